"""Helpers of the decoding code that gather entries, write slots and split random keys.

Axis letters are those of `core.types`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Key, Shaped

Keys = Key[Array, " B"]  # random keys, one per row


def gather(x: Shaped[Array, "B N *rest"], index: Int[Array, "B K"]) -> Shaped[Array, "B K *rest"]:
  """Return, for each row of `x`, the entries at the indices in the same row of `index`."""
  return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def gather_one(x: Shaped[Array, "B N *rest"], index: Int[Array, " B"]) -> Shaped[Array, " B *rest"]:
  """Return, for each row of `x`, the entry at the index of the same row."""
  return gather(x, index[:, None])[:, 0]


def gather_token(
  x: Shaped[Array, "*#batch V"], token: Int[Array, "*#batch"]
) -> Shaped[Array, "..."]:
  """Return, for each token, its entry on the last axis of `x`, for example its probability."""
  return jnp.take_along_axis(x, token[..., None], axis=-1)[..., 0]


def gather_or_zero(x: Float[Array, "B N E"], index: Int[Array, " B"]) -> Float[Array, "B E"]:
  """Return one entry of each row of `x`; for a row whose index is negative, return zeros."""
  return jnp.where(index[:, None] < 0, 0, gather_one(x, jnp.maximum(index, 0)))


def expanded(x: Array | np.ndarray, like: Array | np.ndarray) -> Shaped[Array, "..."]:
  """Return x with leading axes of size 1, as many axes as `like`."""
  return lax.expand_dims(x, range(like.ndim - x.ndim))


def highest(x: Shaped[Array, "*batch N"]) -> Shaped[Array, "*batch 1"]:
  """Return the largest entry of the last axis."""
  return lax.platform_dependent(
    x,
    cpu=lambda x: _halved(x, jnp.maximum).max(axis=-1, keepdims=True),
    default=lambda x: x.max(axis=-1, keepdims=True),
  )


def first_true(mask: Bool[Array, "*batch N"]) -> Int[Array, "*batch"]:
  """Return the index of the first True on the last axis, or N if there is none.

  On a CPU, `jnp.argmax` takes 10 times as long or more.
  """
  size = mask.shape[-1]
  indices = jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size)
  return lax.platform_dependent(
    indices,
    cpu=lambda x: _halved(x, jnp.minimum).min(axis=-1),
    default=lambda x: x.min(axis=-1),
  )


def _halved(
  x: Shaped[Array, "*batch N"], combine: Callable[[Array, Array], Array]
) -> Shaped[Array, "*batch n"]:
  """Combine the halves of rows, which may overlap, until at most 512 entries are left.

  XLA for CPUs vectorizes this, but not the maximum or minimum of a row: of 8 rows of 51,865 logits,
  `sampling.argmax` takes a quarter of the time.
  """
  while (size := x.shape[-1]) > 512:
    half = -(-size // 2)
    x = combine(x[..., :half], x[..., size - half :])
  return x


def switch(
  index: Int[Array, ""], branches: Sequence[Callable[[Any], tuple[Any, Any]]], state: Any
) -> tuple[Any, Any]:
  """Return the result and the new state of `branches[index](state)`, as `lax.switch` does.

  On a CPU, `lax.switch` copies a state that branches change in place, such as a cache, once into a
  branch and once out of it. A loop with at most one iteration does not. A program that is compiled
  on a CPU for another device has these loops, too.
  """
  if jax.default_backend() != "cpu":
    return lax.switch(index, branches, state)
  shapes, _ = jax.eval_shape(branches[0], state)
  carry = index, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), state
  for i, branch in enumerate(branches):
    is_chosen = functools.partial(lambda i, carry: carry[0] == i, i)
    once = functools.partial(lambda branch, carry: (-carry[0] - 1, *branch(carry[2])), branch)
    carry = lax.while_loop(is_chosen, once, carry)
  return carry[1:]


def take(
  x: Shaped[Array, "B N *rest"], places: Sequence[int] | np.ndarray
) -> Shaped[Array, "B K *rest"]:
  """Return the entries of every row of `x` at static indices, which are the same for all rows."""
  places = np.asarray(places)
  if len(places) and (places == np.arange(places[0], places[0] + len(places))).all():
    return x[:, places[0] : places[0] + len(places)]
  return jnp.take(x, jnp.asarray(places, jnp.int32), axis=1)


def place_tokens(
  row: Shaped[Array, "B T *rest"],
  block: Shaped[Array, "B K *rest"],
  start: Int[Array, " B"],
  count: Int[Array, " B"] | int,
) -> Shaped[Array, "B T *rest"]:
  """Return `row` with the first `count` tokens of `block` at slots `start`, `start + 1`, ..."""
  offset = jnp.arange(row.shape[1])[None] - start[:, None]
  num_placed = count if isinstance(count, int) else count[:, None]
  inside = (offset >= 0) & (offset < num_placed)
  moved = gather(block.astype(row.dtype), jnp.clip(offset, 0, block.shape[1] - 1))
  return jnp.where(inside.reshape(*inside.shape, *[1] * (row.ndim - 2)), moved, row)


def write_slots(
  cache: Shaped[Array, "B H T D"], block: Shaped[Array, "B H K D"], start: Int[Array, " B"]
) -> Shaped[Array, "B H T D"]:
  """Return `cache` with `block` in slots `start` to `start + K - 1` of each row (D: head size)."""
  block = block.astype(cache.dtype)
  if len(start) == 1:  # a slice; several rows are a scatter, which checks its bounds
    return lax.dynamic_update_slice_in_dim(cache, block, start[0], axis=2)

  def write_row(row, new, slot):
    return lax.dynamic_update_slice_in_dim(row, new, slot, axis=1)

  return jax.vmap(write_row)(cache, block, start)


def repeat_rows(tree: Any, count: int) -> Any:
  """Repeat each row of all arrays; a cache may have its own method (`models.transformer.Cache`)."""

  def repeated(x: Any) -> Any:
    return x.repeat_rows(count) if hasattr(x, "repeat_rows") else jnp.repeat(x, count, axis=0)

  return jax.tree.map(repeated, tree, is_leaf=lambda x: hasattr(x, "repeat_rows"))


def fold_in_rows(rng: Keys, data: Int[Array, " B"]) -> Keys:
  """Return the key of each row with the row's entry of `data` folded in."""
  return jax.vmap(jax.random.fold_in)(rng, data)


def split_rows(rng: Keys, count: int = 2) -> Key[Array, "{count} B"]:
  """Split the key of each row into `count` keys."""
  return jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(rng)


def uniform_rows(rng: Keys, count: int) -> Float[Array, "B {count}"]:
  """Sample `count` uniforms in [0, 1) for each row, from the key of that row."""
  return jax.vmap(lambda key: jax.random.uniform(key, (count,), jnp.float32))(rng)
