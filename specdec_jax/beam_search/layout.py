"""Where a beam search lays tokens in the slots of a cache, and what of them a node sees.

A row's cache begins with its prompt, less the newest token, as any. Behind it lie w slots that
nothing sees, then w a step: the live beams, in their order. What a beam's newest token sees goes
with it from step to step, as a mask of slots; so nothing moves when beams change places. Last lie
the entries: what the target has read ahead, and then what a pass reads. After it those that came to
stand go to the places of their steps, and those that may yet (`entries`) right behind.

Axes: B batch, w beams, n nodes, T slots.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int

from specdec_jax.core.trees import NodePlacement
from specdec_jax.core.types import Model


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlacedNodes:
  """Nodes with an explicit attention mask over cache slots; a `core.trees.NodeLayout`.

  Attributes:
    positions: position of each node in its text.
    key_positions: position of the token in each cache slot.
    visible: cache slots that each node attends to, its own included.
  """

  positions: Int[Array, "B K"]
  key_positions: Int[Array, "B T"]
  visible: Bool[Array, "B K T"]

  is_chain = False

  def place(self, length: Any, first: Any, num_nodes: int, num_slots: int) -> NodePlacement:
    """Return the arrays; they describe exactly the nodes of the block."""
    return NodePlacement(self.positions, self.key_positions, self.visible)


def slot_of_newest(length: Array, prompt_length: Array, width: int) -> Array:
  """Of live texts with `length` [B] tokens, the slot [B] of the first's newest."""
  return prompt_length - 1 + width * (1 + length - prompt_length)


def places(prompt_length: Array, width: int, num_slots: int) -> Array:
  """Where what each slot holds stands in its text, [B, T], however far a search has come."""
  slots, prompt = jnp.arange(num_slots), prompt_length[:, None] - 1
  return jnp.where(slots < prompt, slots, prompt + (slots - prompt) // width - 1)


def own_slots(slot: Array, num_nodes: int, num_slots: int) -> Array:
  """[B, n, T]: the slot of each node, of which the first is in `slot` [B]."""
  return jnp.arange(num_slots) == (slot[:, None] + jnp.arange(num_nodes))[..., None]


def put(rows: Array, block: Array, slot: Array) -> Array:
  """Rows [B, ..., T] with a block [B, ..., n] in the slots from `slot` [B] on."""

  def one(row: Array, new: Array, at: Array) -> Array:
    return lax.dynamic_update_slice(row, new, (*[0] * (row.ndim - 1), at))

  return jax.vmap(one)(rows, block.astype(rows.dtype), slot)


def move(model: Model, cache: Any, nodes: Array) -> Any:
  """The cache with nodes [B, n] of those behind what it holds at the first places there."""
  first = model.commit(cache, cache.length - 1)
  return model.commit(first, cache.length, path=nodes + 1)


def joined(first: Array, count: Array, second: Array) -> Array:
  """[B, m + n]: of `first` [B, m] each row's `count` [B], and `second` [B, n] right behind."""
  size, skipped = first.shape[1], first.shape[1] - count[:, None]
  number = jnp.arange(size + second.shape[1])
  at = jnp.where(number < count[:, None], number, number + skipped)
  both = jnp.concatenate([first, second], axis=1)
  return jnp.take_along_axis(both, jnp.minimum(at, number[-1]), axis=1)
