"""A round's nodes: the newest tokens of the live beams, and guesses behind them.

Nodes 0..w-1 are the newest tokens of the live beams, guess i is node w + i.

Axes: B batch, w beams, N guesses, K = w + N nodes, T slots of a cache, L tokens of a text, V
vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.beams.layout import put
from specdec_jax.trees import Placed, reach


class BeamContext(NamedTuple):
  """What such a draft may read; slots are those of a cache laid out as the target's (`layout`).

  Attributes:
    prompt: [B, P].
    tokens: [B, w, L], live texts. length: [B], their tokens. log_probs: [B, w], theirs.
    newest: [B, w], their last tokens. seen: [B, w, T], slots of what stands before each.
    before: [B, w], the last tokens of the step before. seen_before: [B, w, T], slots that these
      see, their own among them.
    slot: [B], of the first of the newest. places: [B, T], of what each slot before it holds.
    target: the target's cache; its layers are laid out as above, what it holds of a source is a
      row's.
    hidden: [B, w, E], the target's last state where it chose the newest token.
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
  target: Any
  hidden: Array
  eos_id: int


class Forest(NamedTuple):
  """Guesses [B, N], -1 where none was made, and the node [B, N] that each follows."""

  tokens: Array
  parents: Array


def of(x: Array, nodes: Array) -> Array:
  """x [B, n, ...] at nodes [B, k]."""
  return jnp.take_along_axis(x, nodes.reshape(*nodes.shape, *[1] * (x.ndim - 2)), axis=1)


def placed(context: BeamContext, forest: Forest, depth: int) -> tuple[Placed, Array]:
  """What the nodes of a round see, and the parent of each, [B, K]; a root is its own."""
  width = context.newest.shape[1]
  roots = jnp.broadcast_to(jnp.arange(width), context.newest.shape)
  parents = jnp.concatenate([roots, forest.parents], axis=1)
  related = reach(parents, depth)  # [B, K, K]
  of_root = jnp.einsum(
    "bkw,bwt->bkt", related[..., :width], context.seen, preferred_element_type=int
  )
  positions = context.length[:, None] - 2 + related.sum(axis=2)
  seen = put(of_root > 0, related, context.slot)
  return Placed(positions, put(context.places, positions, context.slot), seen), parents


def continuations(
  logits: Array, block: Array, parents: Array, context: BeamContext, depth: int
) -> tuple[Array, Array]:
  """Of each node the 2w likeliest continuations [B, K, 2w] in order, of equals the smaller token
  first, and the log-probabilities of the texts that they make."""
  width = context.newest.shape[1]
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
  batch, num_nodes, size = log_probs.shape
  of_token = parents * size + block  # in its parent's log-probabilities
  own = jnp.take_along_axis(log_probs.reshape(batch, -1), of_token, axis=1)
  sums = jnp.pad(context.log_probs, ((0, 0), (0, num_nodes - width)))
  for _ in range(depth):
    sums = sums.at[:, width:].set((of(sums, parents) + own)[:, width:])
  best, tokens = lax.top_k(sums[..., None] + log_probs, 2 * width)
  return tokens, best
