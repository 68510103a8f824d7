"""A round's nodes: the newest tokens of the live beams, and guesses behind them.

Nodes 0..w-1 are the newest tokens of the live beams, guess i is node w + i. Those that the target
has not read before are read in a pass, as many as that has room for, in their order.

Axes: B batch, w beams, G guesses, K = w + G nodes, N read in a pass, M entries kept, E = M + N,
T slots of a cache, L tokens of a text, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.beam_search.entries import NOT, Entries, of, sum_at
from specdec_jax.beam_search.layout import PlacedNodes, put
from specdec_jax.core.trees import reach


class BeamContext(NamedTuple):
  """What such a draft may read; slots are those of a cache laid out as the target's (`layout`).

  Attributes:
    prompt: [B, P].
    tokens: [B, w, L], live texts. length: [B], their tokens. log_probs: [B, w], theirs.
    newest: [B, w], their last tokens. seen: [B, w, T], slots of what stands before each.
    before: [B, w], the last tokens of the step before. seen_before: [B, w, T], slots that these
      see, their own among them.
    slot: [B], of the first of the newest. places: [B, T], of what each slot before it holds.
    target_cache: the target's cache; its layers are laid out as above, what it holds of a source is a
      row's.
    hidden: [B, w, E], the target's last state where it chose the newest token.
    kept: what the target has read already. known: [B, w], the newest tokens' entries there.
    eos_id: ends a text.
  """

  prompt: Array
  tokens: Array
  length: Array
  log_probs: Array
  newest: Array
  seen: Array
  before: Array
  seen_before: Array
  slot: Array
  places: Array
  target_cache: Any
  hidden: Array
  kept: Entries
  known: Array
  eos_id: int


class Forest(NamedTuple):
  """Guesses [B, G], -1 where none was made, the node [B, G] that each follows, and its entry
  [B, G] if the target has read it already."""

  tokens: Array
  parents: Array
  known: Array


class Pass(NamedTuple):
  """What the target reads of a round's nodes.

  Attributes:
    nodes: [B, N], those read; the first one where there are fewer.
    tokens: [B, N]. placed: what they see.
    parents: [B, N], the entry that each follows; -1 for the newest tokens, and where there is none.
    entries: [B, K], the entry that each node is, once they are read.
  """

  nodes: Array
  tokens: Array
  placed: PlacedNodes
  parents: Array
  entries: Array


def of_round(context: BeamContext, forest: Forest, depth: int, count: int) -> Pass:
  """The first `count` nodes that the target has not read."""
  width, num_kept = context.newest.shape[1], context.kept.tokens.shape[1]
  tokens = jnp.concatenate([context.newest, forest.tokens], axis=1)
  known = jnp.concatenate([context.known, forest.known], axis=1)
  roots = jnp.broadcast_to(jnp.arange(width), context.newest.shape)
  above = jnp.concatenate([roots, forest.parents], axis=1)

  unread = (known < 0) & (tokens >= 0)
  rank = jnp.cumsum(unread, axis=1) - 1
  entries = jnp.where(unread & (rank < count), num_kept + rank, known)
  is_it = entries[:, None] == num_kept + jnp.arange(count)[:, None]  # [B, N, K]
  nodes, there = is_it.argmax(axis=2), is_it.any(axis=2)
  parents = jnp.where(there & (nodes >= width), of(entries, of(above, nodes)), NOT)

  related = reach(above, depth)  # [B, K, K]
  positions = context.length[:, None] - 2 + related.sum(axis=2)
  place = entries[..., None] == jnp.arange(num_kept + count)  # [B, K, E]
  sees = of(related, nodes)
  of_root = jnp.einsum("bnw,bwt->bnt", sees[..., :width], context.seen, preferred_element_type=int)
  of_entries = jnp.einsum("bnk,bke->bne", sees, place, preferred_element_type=int)
  stand = jnp.einsum("bk,bke->be", positions, place, preferred_element_type=int)
  placed = PlacedNodes(
    positions=of(positions, nodes),
    key_positions=put(context.places, stand, context.slot),
    visible=put(of_root > 0, of_entries > 0, context.slot),
  )
  return Pass(nodes, of(tokens, nodes), placed, parents, entries)


def entries_read(
  logits: Array, hidden: Array, read: Pass, context: BeamContext, depth: int
) -> Entries:
  """What a pass read: of each the 2w likeliest continuations, of equals the smaller token first,
  and the log-probabilities of the texts that they make."""
  width, num_kept = context.newest.shape[1], context.kept.tokens.shape[1]
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
  batch, _, size = log_probs.shape
  first = of(context.log_probs, jnp.minimum(read.nodes, width - 1))
  of_kept = sum_at(context.kept, jnp.where(read.parents < num_kept, read.parents, NOT), read.tokens)
  start = jnp.where(read.nodes < width, first, of_kept)
  above, here = jnp.maximum(read.parents - num_kept, 0), read.parents >= num_kept
  of_token = above * size + read.tokens  # in its parent's log-probabilities
  own = jnp.take_along_axis(log_probs.reshape(batch, -1), of_token, axis=1)
  sums = start
  for _ in range(depth):
    sums = jnp.where(here, of(sums, above) + own, start)
  best, tokens = lax.top_k(sums[..., None] + log_probs, 2 * width)
  return Entries(read.tokens, read.parents, tokens, best, hidden)
