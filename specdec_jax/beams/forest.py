"""Forest of the draft tokens of a round, and the block of its nodes that the target verifies.

Nodes 0 to w - 1 of a forest are the last tokens of the live beams, and nodes w to F - 1 are the
draft tokens after them. A target forward pass covers the first nodes that are not yet verified, at
most M of them.

Axis letters are those of `beams`.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from specdec_jax.beams.layout import PlacedNodes, write_block
from specdec_jax.beams.verified import NO_ENTRY, VerifiedNodes, continuation_log_prob
from specdec_jax.core.arrays import gather
from specdec_jax.core.context import Prefixes
from specdec_jax.core.trees import reach


class BeamContext(NamedTuple):
  """Inputs of a draft in a beam search. Slots are cache slots, in the layout of module `layout`.

  Attributes:
    visible: mask of the slots of the tokens before each last token.
    previous_tokens: last tokens of the live sequences one step earlier.
    previous_visible: mask of the slots that the previous tokens attend to, their own included.
    slot: slot of the first live sequence's last token; the other last tokens follow it.
    key_positions: position of the token in each slot before `slot`.
    target_cache: cache of the target. Its layers have the layout of module `layout`; the encoded
      source is stored once per row.
    hidden: hidden state from which the target selected each last token.
    last_entries: index of each last token among the verified nodes; NO_ENTRY if it is not verified.
    start: number of tokens before the first generated one, with forced ones, for logits processors.
    limit: length that no text exceeds, for logits processors.
  """

  prompt: Int[Array, "B P"]
  tokens: Int[Array, "B w X"]
  length: Int[Array, " B"]
  log_probs: Float[Array, "B w"]
  last_tokens: Int[Array, "B w"]
  visible: Bool[Array, "B w T"]
  previous_tokens: Int[Array, "B w"]
  previous_visible: Bool[Array, "B w T"]
  slot: Int[Array, " B"]
  key_positions: Int[Array, "B T"]
  target_cache: Any
  hidden: Float[Array, "B w E"]
  verified: VerifiedNodes
  last_entries: Int[Array, "B w"]
  eos_ids: Int[Array, " eos"]
  start: Int[Array, " B"]
  limit: Int[Array, " B"]


class Forest(NamedTuple):
  """Draft tokens after the live beams.

  Attributes:
    tokens: draft tokens; -1 for a token that was not proposed.
    parents: node that each draft token follows.
    entries: index of each draft token among the verified nodes; NO_ENTRY if it is not verified.
  """

  tokens: Int[Array, "B N"]
  parents: Int[Array, "B N"]
  entries: Int[Array, "B N"]


class VerifyBlock(NamedTuple):
  """Nodes of a forest that one target forward pass covers.

  Attributes:
    nodes: index of each node in the forest; 0 for unused places of the block.
    parents: index of each node's parent among the verified nodes after the pass; NO_ENTRY for last
      tokens and for unused places.
    entries: index of each node of the forest among the verified nodes after the pass; NO_ENTRY if
      the node is not verified.
  """

  nodes: Int[Array, "B M"]
  tokens: Int[Array, "B M"]
  placed: PlacedNodes
  parents: Int[Array, "B M"]
  entries: Int[Array, "B F"]


def pack_block(context: BeamContext, forest: Forest, depth: int, count: int) -> VerifyBlock:
  """Return the block of the first (up to `count`) nodes of a forest that are not verified yet."""
  num_beams, num_cached = context.last_tokens.shape[1], context.verified.tokens.shape[1]
  tokens = jnp.concatenate([context.last_tokens, forest.tokens], axis=1)
  known_entries = jnp.concatenate([context.last_entries, forest.entries], axis=1)
  roots = jnp.broadcast_to(jnp.arange(num_beams, dtype=jnp.int32), context.last_tokens.shape)
  parent_nodes = jnp.concatenate([roots, forest.parents], axis=1)

  # Entries of new nodes follow those of the cached ones.
  is_new = (known_entries < 0) & (tokens >= 0)
  rank = jnp.cumsum(is_new, axis=1, dtype=jnp.int32) - 1
  entries = jnp.where(is_new & (rank < count), num_cached + rank, known_entries)
  is_node = entries[:, None] == num_cached + jnp.arange(count)[None, :, None]  # [B, M, F]
  nodes, is_used = is_node.argmax(axis=2), is_node.any(axis=2)
  has_parent = is_used & (nodes >= num_beams)
  parents = jnp.where(has_parent, gather(entries, gather(parent_nodes, nodes)), NO_ENTRY)

  # A node attends to its ancestors in the forest and to the text before its root.
  ancestors = reach(parent_nodes, depth)  # [B, F, F]
  positions = context.length[:, None] - 2 + ancestors.sum(axis=2, dtype=jnp.int32)
  entry_of_node = entries[..., None] == jnp.arange(num_cached + count)[None, None]  # [B, F, J]
  block_ancestors = gather(ancestors, nodes)  # [B, M, F]
  einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.int32)
  text_slots = einsum("bnw,bwt->bnt", block_ancestors[..., :num_beams], context.visible)
  ancestor_entries = einsum("bnk,bke->bne", block_ancestors, entry_of_node)
  entry_positions = einsum("bk,bke->be", positions, entry_of_node)
  placed = PlacedNodes(
    positions=gather(positions, nodes),
    key_positions=write_block(context.key_positions, entry_positions, context.slot),
    visible=write_block(text_slots > 0, ancestor_entries > 0, context.slot),
  )
  return VerifyBlock(nodes, gather(tokens, nodes), placed, parents, entries)


def block_prefixes(
  context: BeamContext, forest: Forest, block: VerifyBlock, depth: int
) -> Prefixes:
  """Return the text that ends at each node of a block, for logits processors."""
  num_beams = context.last_tokens.shape[1]
  tokens = jnp.concatenate([context.last_tokens, forest.tokens], axis=1)
  roots = jnp.broadcast_to(jnp.arange(num_beams, dtype=jnp.int32), context.last_tokens.shape)
  ancestors = reach(jnp.concatenate([roots, forest.parents], axis=1), depth)  # [B, F, F]
  depths = ancestors.sum(axis=2, dtype=jnp.int32) - 1
  of_block = gather(ancestors, block.nodes)  # [B, M, F]
  text = gather(context.tokens, of_block[..., :num_beams].argmax(axis=2))  # [B, M, X]
  slots = jnp.arange(text.shape[2])[None, None]
  length = context.length[:, None] + gather(depths, block.nodes)
  # Each draft token on the path to a node is in the slot of its depth.
  in_slot = (context.length[:, None] - 1 + depths)[..., None] == slots  # [B, F, X]
  path = jnp.einsum("bmf,bfx->bmx", of_block * jnp.maximum(tokens, 0)[:, None], in_slot)
  text = jnp.where(slots < context.length[:, None, None], text, path.astype(text.dtype))
  text = jnp.where(slots < length[..., None], text, 0)
  return Prefixes(text, length, context.start, context.limit, context.prompt)


def verified_nodes(
  log_probs: Float[Array, "B M V"],
  hidden: Float[Array, "B M E"],
  block: VerifyBlock,
  context: BeamContext,
  depth: int,
  num_top: int,
) -> VerifiedNodes:
  """Return the nodes of a block with their most probable continuations.

  A continuation of a node is a next token. Of two equally probable ones, the smaller id is first.
  """
  num_beams, num_cached = context.last_tokens.shape[1], context.verified.tokens.shape[1]
  batch, _, vocab_size = log_probs.shape

  # The text up to a node is a live sequence, or ends with a child of a cached node or of a block
  # node.
  live = gather(context.log_probs, jnp.minimum(block.nodes, num_beams - 1))
  cached_parents = jnp.where(block.parents < num_cached, block.parents, NO_ENTRY)
  after_cached = continuation_log_prob(context.verified, cached_parents, block.tokens)
  start = jnp.where(block.nodes < num_beams, live, after_cached)
  block_parents = jnp.maximum(block.parents - num_cached, 0)
  in_block = block.parents >= num_cached
  index = block_parents * vocab_size + block.tokens  # in the log-probabilities of the parent
  token_log_probs = gather(log_probs.reshape(batch, -1), index)
  text_log_probs = start
  for _ in range(depth):  # each iteration adds one level of the forest
    sums = gather(text_log_probs, block_parents) + token_log_probs
    text_log_probs = jnp.where(in_block, sums, start)
  best, continuations = lax.top_k(text_log_probs[..., None] + log_probs, num_top)
  return VerifiedNodes(block.tokens, block.parents, continuations, best, hidden)
