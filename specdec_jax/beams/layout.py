"""Layout of the tokens of a beam search in the slots of a cache, and attention masks over slots.

The cache of a row begins with the tokens committed before the first round, except the last one, as
in decoding. The next w slots belong to no text. Then there are w slots per step, for the last
tokens of the live beams in order. The last part holds nodes that are not committed: first those
cached from earlier passes (`verified`), then those of the current pass. After a pass the committed
nodes move to the slots of their steps, and the nodes that remain cached move to the slots after
them.

Each beam has a mask of the slots that hold its text. Therefore the slots do not have to be
reordered when beams change places.

Axis letters are those of `beams`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, Shaped

from specdec_jax.core.arrays import gather
from specdec_jax.core.types import Model


def slot_of_last_tokens(
  length: Int[Array, " B"], prompt_length: Int[Array, " B"], num_beams: int
) -> Int[Array, " B"]:
  """Return the slot of the first beam's last token, for live sequences with `length` tokens."""
  return prompt_length - 1 + num_beams * (1 + length - prompt_length)


def committed_positions(
  prompt_length: Int[Array, " B"], num_beams: int, num_slots: int
) -> Int[Array, "B {num_slots}"]:
  """Return the position in the text of the committed token in each slot."""
  slots, prompt_slots = jnp.arange(num_slots)[None], prompt_length[:, None] - 1
  step_positions = prompt_slots + (slots - prompt_slots) // num_beams - 1
  return jnp.where(slots < prompt_slots, slots, step_positions)


def slot_mask(
  slot: Int[Array, " B"], num_nodes: int, num_slots: int
) -> Bool[Array, "B {num_nodes} {num_slots}"]:
  """Return a mask that is True at the slot of each node; node i is in slot `slot + i`."""
  slot_of_node = slot[:, None] + jnp.arange(num_nodes)[None]
  return jnp.arange(num_slots)[None, None] == slot_of_node[..., None]


def write_block(
  rows: Shaped[Array, "B *rest T"], block: Shaped[Array, "B *rest K"], slot: Int[Array, " B"]
) -> Shaped[Array, "B *rest T"]:
  """Return `rows` with `block` written to the slots from `slot` on."""

  def write_row(row: Array, new: Array, first: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(row, new, first, row.ndim - 1)

  return jax.vmap(write_row)(rows, block.astype(rows.dtype), slot)


def move_nodes(model: Model, cache: Any, slot: Int[Array, " B"], nodes: Int[Array, "B K"]) -> Any:
  """Return the cache with selected nodes moved to the slots from `slot` on, in order.

  Before the move, node i is in slot `slot + i`.
  """
  # `commit` moves the nodes of a path to the slots after the first node of a block.
  return model.commit(model.commit(cache, slot - 1), slot, path=nodes + 1)


def concatenate_prefix(
  first: Int[Array, "B K"], count: Int[Array, " B"], second: Int[Array, "B Q"]
) -> Int[Array, "B K+Q"]:
  """Return the first `count` elements of each row of `first`, followed by that row of `second`.

  The last element is repeated up to the full width.
  """
  size, skipped = first.shape[1], first.shape[1] - count[:, None]
  position = jnp.arange(size + second.shape[1])[None]
  index = jnp.where(position < count[:, None], position, position + skipped)
  both = jnp.concatenate([first, second], axis=1)
  return gather(both, jnp.minimum(index, position[:, -1:]))
