"""How far rounding moves logits, and whether it explains that two argmax outputs differ."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import Model
from specdec_jax.exactness.paths import plans_of
from specdec_jax.pairs import Pair

SHARES = {"float32": 1e-3, "bfloat16": 0.03}  # of the range of a token's logits


class Rounding(NamedTuple):
  """How far a verification pass may move a logit from that of a pass over one token.

  Attributes:
    share: bound, as a share of the range of a token's logits.
    measured: largest move that was seen in a pass of this shape.
  """

  share: float
  measured: float = 0.0


class Divergence(NamedTuple):
  """The first token at which a row of speculative output differs from autoregressive decoding.

  Attributes:
    row: of the batch.
    position: of the token in the output, from 0.
    plain: token of autoregressive decoding.
    speculative: token of speculative decoding.
    gap: how far the target's logit of `plain` lies above that of `speculative`, in passes over one
      token at a time.
    rounding: how far rounding can move a logit there: the largest difference between passes over
      one token and over blocks, of this row or of a verification pass, but no more than the bound.
  """

  row: int
  position: int
  plain: int
  speculative: int
  gap: float
  rounding: float

  @property
  def is_tie(self) -> bool:
    """Whether rounding both logits apart by `rounding` can have swapped them."""
    return self.gap <= 2 * self.rounding


def share_of(pair: Pair) -> float:
  """Bound on how far rounding moves a logit of the target, as a share of the logits' range.

  On a CPU `kernels.skinny` give each token of a T5 the same bits in any block, so there is none.
  """
  has_encoder = getattr(getattr(pair.target, "config", None), "has_encoder", False)
  if pair.kernels.startswith("skinny") and has_encoder:
    return 0.0
  return SHARES[pair.dtype]


def node_moves(
  pair: Pair, prompt: Array, text: np.ndarray, lengths: np.ndarray, tree: AnyTree
) -> tuple[float, float]:
  """How far a verification pass moves the logits of its nodes: at most, and as a share of their
  range.

  Each row is read up to some token of its text, by passes over one token. Then the text's next
  tokens are put on a path of the tree, and other tokens next to it; one pass reads all nodes, and
  passes over one token read each path from the root to a leaf.

  Args:
    pair: its target is read.
    prompt: [B, P].
    text: [B, T], output of the target.
    lengths: [B], tokens of each output.
    tree: shape of the pass.
  """
  batch, plans = len(prompt), plans_of(tree)
  padded = np.pad(text, ((0, 0), (0, tree.depth)))
  largest = largest_share = 0.0
  for number in range(max(3, -(-len(plans.lengths) // batch))):
    rows = np.arange(batch)
    plan = (rows + number * batch) % len(plans.lengths)
    start = (lengths * ((rows + number * batch / 3) % batch) / batch).astype(int)
    along = np.take_along_axis(padded, start[:, None] + np.arange(tree.depth), axis=1)
    moves, ranges = _node_moves(
      *(pair.target, tree, pair.target_params, prompt, padded, start),
      *(along, plan, plans.paths[plan]),
    )
    largest = max(largest, float(moves.max()))
    largest_share = max(largest_share, float((moves / ranges).max()))
  return largest, largest_share


@functools.partial(jax.jit, static_argnames=("target", "tree"))
def _node_moves(
  target: Model,
  tree: AnyTree,
  params,
  prompt: Array,
  text: Array,
  start: Array,
  along: Array,
  plan: Array,
  paths: Array,
) -> tuple[Array, Array]:
  """Largest difference [L, B, D + 1] of a logit at each node of paths [B, L, D], and the range of
  the logits there. The root of each path counts, 0 past its leaf does not."""
  first, length = target.prompt_tokens(prompt)
  newest = jnp.take_along_axis(first, length[:, None] - 1, axis=1)
  num_slots = first.shape[1] + text.shape[1] - tree.depth + tree.num_nodes  # as in decoding
  text = jnp.concatenate([newest, text], axis=1)  # token i is read in step i
  _, cache = target.prefill(params, prompt, num_slots)

  def read(cache, token):
    logits, _, cache = target.extend(params, cache, token[:, None])
    return cache, logits[:, 0]

  def step(i, cache):
    after = read(cache, text[:, i])[0]
    return target.commit(after, length - 1 + jnp.minimum(i + 1, start))

  cache = lax.fori_loop(0, start.max(), step, cache)
  newest = jnp.take_along_axis(text, start[:, None], axis=1)
  plans = plans_of(tree)
  guesses = plans.tokens(plan, along, target.vocab_size)
  block = jnp.concatenate([newest, guesses], axis=1)
  in_block = target.extend(params, cache, block, plans.shape(plan, tree))[0]

  def of_path(path: Array) -> tuple[Array, Array]:
    nodes = jnp.pad(path, ((0, 0), (1, 0)))

    def next_token(cache, token):
      after, logits = read(cache, token)
      return target.commit(after, cache.length + 1), logits

    tokens = jnp.take_along_axis(block, nodes, axis=1)
    plain = lax.scan(next_token, cache, tokens.T)[1].swapaxes(0, 1)  # [B, D + 1, V]
    ours = jnp.take_along_axis(in_block, nodes[..., None], axis=1)
    exists = (nodes > 0) | (jnp.arange(nodes.shape[1]) == 0)
    moves = jnp.where(exists, jnp.abs(ours - plain).max(axis=-1), 0.0)
    return moves, plain.max(axis=-1) - plain.min(axis=-1)

  return lax.map(of_path, paths.swapaxes(0, 1))


def first_divergences(
  target: Model,
  params,
  prompt: Array,
  plain: np.ndarray,
  speculative: np.ndarray,
  block: int,
  rounding: Rounding,
) -> list[Divergence]:
  """The first difference of each row in which two outputs differ.

  Args:
    target: the model of both.
    params: its parameters.
    prompt: source tokens [B, P].
    plain: output of autoregressive decoding [B, T].
    speculative: output of speculative decoding [B, T].
    block: tokens of a verification pass: gamma + 1, or a tree's nodes.
    rounding: of the target.
  """
  rows = np.flatnonzero((plain != speculative).any(axis=1))
  if not len(rows):
    return []
  by_one, by_block = (np.asarray(_logits(target, params, prompt, plain, k)) for k in (1, block))
  found = []
  for row in rows.tolist():
    at = int((plain[row] != speculative[row]).argmax())
    tokens = int(plain[row, at]), int(speculative[row, at])
    gap = float(by_one[row, at, tokens[0]] - by_one[row, at, tokens[1]])
    moved = float(np.abs(by_one[row, : at + 1] - by_block[row, : at + 1]).max())
    bound = rounding.share * float(np.ptp(by_one[row, at]))
    found.append(Divergence(row, at, *tokens, gap, min(max(moved, rounding.measured), bound)))
  return found


def _logits(target: Model, params, prompt: Array, tokens: np.ndarray, block: int) -> Array:
  """Target's logits [B, T, V] before each of tokens [B, T], by passes over `block` tokens."""
  first, length = target.prompt_tokens(prompt)
  batch, count = tokens.shape
  num_blocks = -(-count // block)
  # Rows may begin at different lengths; each reads its newest token, then the output.
  newest = jnp.take_along_axis(first, length[:, None] - 1, axis=1)
  text = jnp.concatenate([newest, jnp.asarray(tokens[:, :-1])], axis=1)
  text = jnp.pad(text, ((0, 0), (0, num_blocks * block - count)))
  blocks = text.reshape(batch, num_blocks, block).swapaxes(0, 1)

  @jax.jit
  def read(params):
    def step(cache, tokens):
      logits, _, cache = target.extend(params, cache, tokens)
      return target.commit(cache, cache.length + block), logits

    _, cache = target.prefill(params, prompt, first.shape[1] + num_blocks * block)
    return lax.scan(step, cache, blocks)[1]  # [N, B, K, V]

  logits = read(params).swapaxes(0, 1)
  return logits.reshape(batch, num_blocks * block, -1)[:, :count]
