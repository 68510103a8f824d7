"""Verified nodes, cached so that later target forward passes need not process them again.

The entry of a node is its index among the verified nodes. Entries 0 to Q - 1 are cached from
earlier passes, and entries Q to J - 1 are the nodes of the current pass. The target's cache holds
the nodes in that order, in the slots after the committed tokens. The entry of a node that is not
verified is `NO_ENTRY`.

Axis letters are those of `beams`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather

NO_ENTRY = -1


class VerifiedNodes(NamedTuple):
  """Nodes whose most probable next tokens, by the target, are known.

  Attributes:
    parents: entry of the parent of each node; NO_ENTRY for the last token of a live beam, and for
      unused entries.
    continuations: the most probable tokens after each node, most probable first. There are 2w per
      node if there is one EOS, and more if there are several.
    log_probs: the target's log-probability of the text that ends with each continuation.
  """

  tokens: Int[Array, "B J"]
  parents: Int[Array, "B J"]
  continuations: Int[Array, "B J top"]
  log_probs: Float[Array, "B J top"]
  hidden: Float[Array, "B J E"]


def empty_nodes(batch: int, count: int, num_top: int, hidden: Float[Array, "B E"]) -> VerifiedNodes:
  """Return `count` unused entries, for hidden states with the size and dtype of `hidden`."""
  return VerifiedNodes(
    tokens=jnp.zeros((batch, count), jnp.int32),
    parents=jnp.full((batch, count), NO_ENTRY, jnp.int32),
    continuations=jnp.zeros((batch, count, num_top), jnp.int32),
    log_probs=jnp.zeros((batch, count, num_top), jnp.float32),
    hidden=jnp.zeros((batch, count, hidden.shape[-1]), hidden.dtype),
  )


def append_nodes(cached: VerifiedNodes, new: VerifiedNodes) -> VerifiedNodes:
  """Return the cached nodes, followed by the nodes of the current pass."""
  return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), cached, new)


def find_child(
  nodes: VerifiedNodes, parents: Int[Array, "B K"], tokens: Int[Array, "B K"]
) -> Int[Array, "B K"]:
  """Return the entry of each token, given the entry of its parent; NO_ENTRY if not verified."""
  if not nodes.tokens.shape[1]:
    return jnp.full(tokens.shape, NO_ENTRY, jnp.int32)
  matches = nodes.parents[:, None] == parents[..., None]
  matches &= (nodes.tokens[:, None] == tokens[..., None]) & (parents[..., None] >= 0)
  return jnp.where(matches.any(axis=2), matches.argmax(axis=2), NO_ENTRY).astype(jnp.int32)


def continuation_log_prob(
  nodes: VerifiedNodes, parents: Int[Array, "B K"], tokens: Int[Array, "B K"]
) -> Float[Array, "B K"]:
  """Return the log-probability of the whole text that ends with each token after its parent.

  It is -inf if the parent has no entry, or if the token is not among the continuations of the
  parent.
  """
  if not nodes.tokens.shape[1]:
    return jnp.full(tokens.shape, -jnp.inf, jnp.float32)
  index = jnp.maximum(parents, 0)
  matches = (gather(nodes.continuations, index) == tokens[..., None]) & (parents[..., None] >= 0)
  return jnp.where(matches, gather(nodes.log_probs, index), -jnp.inf).max(axis=2)


def prune(
  nodes: VerifiedNodes, last_entries: Int[Array, "B w"], count: int, depth: int
) -> tuple[VerifiedNodes, Int[Array, "B w"], Int[Array, "B {count}"]]:
  """Return the verified nodes to cache for the next pass: those that continue live beams.

  These nodes are the verified last tokens of live beams and their verified descendants, up to
  `depth` levels. If there are more than `count`, the first `count` of them are returned. The other
  results are `last_entries` renumbered, and the old entry of each cached node.
  """
  if not count:
    no_entries = jnp.zeros((len(last_entries), 0), jnp.int32)
    empty = jax.tree.map(lambda x: x[:, :0], nodes)
    return empty, jnp.full(last_entries.shape, NO_ENTRY, jnp.int32), no_entries
  entries = jnp.arange(nodes.tokens.shape[1])[None, None]
  parents = jnp.maximum(nodes.parents, 0)
  reachable = (last_entries[..., None] == entries).any(axis=1)
  for _ in range(depth):  # each iteration adds one level of descendants
    reachable |= (nodes.parents >= 0) & gather(reachable, parents)
  rank = jnp.cumsum(reachable, axis=1, dtype=jnp.int32) - 1
  new_entries = jnp.where(reachable & (rank < count), rank, NO_ENTRY)  # [B, J]
  moves_to = new_entries[:, None] == jnp.arange(count)[None, :, None]  # [B, Q, J]
  old_entries, is_used = moves_to.argmax(axis=2), moves_to.any(axis=2)
  cached = jax.tree.map(lambda x: gather(x, old_entries), nodes)

  def renumbered(old: Int[Array, "B K"]) -> Int[Array, "B K"]:
    return jnp.where(old >= 0, gather(new_entries, jnp.maximum(old, 0)), NO_ENTRY)

  new_parents = jnp.where(is_used, renumbered(cached.parents), NO_ENTRY)
  return cached._replace(parents=new_parents), renumbered(last_entries), old_entries
