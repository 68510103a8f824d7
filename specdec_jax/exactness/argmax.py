"""Comparison of argmax outputs, and of whether rounding of the logits explains a difference."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specdec_jax.core.arrays import gather
from specdec_jax.core.context import Prompt
from specdec_jax.core.counts import require_finite
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.processors import Processors
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import DecodeResult, Model
from specdec_jax.exactness.paths import batches, plans_of
from specdec_jax.exactness.processed import processed
from specdec_jax.pair import Pair

Decode = Callable[..., DecodeResult]  # function of (prompt [B, P], keys [B], *, max_new_tokens)
PAST_END = -1  # marks the positions past the end of a text
SHARES = {"float32": 1e-3, "bfloat16": 0.03}  # fractions of the range of a token's logits


class Rounding(NamedTuple):
  """Rounding differences between logits of a verification pass and of single-token passes.

  Attributes:
    share: bound on the differences, as a fraction of the range of the logits of a token.
    measured: largest difference that `node_moves` measured for the same chain or tree.
  """

  share: float
  measured: float = 0.0


class Divergence(NamedTuple):
  """First token at which a row of speculative output differs from autoregressive decoding.

  Attributes:
    row: index of the row in the batch.
    position: index of the token in the output.
    autoregressive: token of autoregressive decoding; PAST_END past the end of its text.
    speculative: token of speculative decoding; PAST_END past the end of its text.
    gap: the target's logit of `autoregressive` minus its logit of `speculative`, from forward
      passes over single tokens; infinite if one of the texts has ended.
    rounding: logit difference that is attributed to rounding: the largest difference between
      passes over single and over several tokens in this row up to `position`, or
      `Rounding.measured` if that is larger, but at most the fraction `Rounding.share` of the range
      of the logits at `position`.
  """

  row: int
  position: int
  autoregressive: int
  speculative: int
  gap: float
  rounding: float

  @property
  def is_tie(self) -> bool:
    """True if a change of both logits by `rounding` can swap their order."""
    return abs(self.gap) <= 2 * self.rounding


def compare_argmax(
  pair: Pair,
  texts: Sequence[str],
  autoregressive: Decode,
  speculative: Decode,
  block: int,
  settings: DecodeSettings,
  rounding: Rounding,
  processors: Processors = (),
) -> list[tuple[int, Divergence]]:
  """Compare speculative and autoregressive argmax outputs token by token.

  A verification pass of `speculative` has `block` tokens: gamma + 1, or the number of nodes of a
  tree. Both functions apply `processors`.

  Returns:
    For each text whose outputs differ, the number of the text, from 1, and the first difference.
  """
  divergences = []
  num_batches = -(-len(texts) // settings.batch_size)
  for first, prompt, keys in itertools.islice(batches(pair, texts, settings), num_batches):
    tokens, expected = (
      tokens_of(require_finite(decode(prompt, keys, max_new_tokens=settings.max_new_tokens)))
      for decode in (speculative, autoregressive)
    )
    of_batch = first_divergences(
      pair.target.model, pair.target.params, prompt, expected, tokens, block, rounding, processors
    )
    divergences += [(first + d.row + 1, d) for d in of_batch if first + d.row < len(texts)]
  return divergences


def tokens_of(result: DecodeResult) -> np.ndarray:
  """Return the tokens [B, T] of a result, with PAST_END past the end of each text."""
  tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
  return np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, PAST_END)


def share_of(pair: Pair) -> float:
  """Return a bound on rounding differences of the target's logits, as a fraction of their range.

  It is 0 for an encoder-decoder with `kernels.skinny`, which compute the same bits for a token in
  any block.
  """
  has_encoder = getattr(getattr(pair.target.model, "config", None), "has_encoder", False)
  if pair.kernels.startswith("skinny") and has_encoder:
    return 0.0
  return SHARES[pair.dtype]


def node_moves(
  pair: Pair, prompt: Prompt, text: np.ndarray, lengths: np.ndarray, tree: AnyTree
) -> tuple[float, float]:
  """Measure how much logits differ between a verification pass and passes over single tokens.

  After a prefix of each row's text, the next tokens of the text are placed on one path of the tree,
  and different tokens on the other nodes (`paths.Plans`). One pass processes all nodes; passes over
  single tokens process each path. This is repeated with other prefixes until all plans are used, at
  least 3 times. `prompt` [B, P] and `text` [B, T] are padded; `lengths` [B] are those of the texts.

  Returns:
    The largest difference of a logit, and the largest difference as a fraction of the range of the
    logits at the same node.
  """
  batch, plans = len(prompt), plans_of(tree)
  padded = np.pad(text, ((0, 0), (0, tree.depth)))
  largest = largest_share = 0.0
  for number in range(max(3, -(-len(plans.lengths) // batch))):
    rows = np.arange(batch)
    plan = (rows + number * batch) % len(plans.lengths)
    start = (lengths * ((rows + number * batch / 3) % batch) / batch).astype(int)
    following = np.take_along_axis(padded, start[:, None] + np.arange(tree.depth), axis=1)
    block = start, following, plan, plans.paths[plan]
    moves, ranges = _node_moves(pair.target.model, tree, pair.target.params, prompt, padded, *block)
    largest = max(largest, float(moves.max()))
    largest_share = max(largest_share, float((moves / ranges).max()))
  return largest, largest_share


@functools.partial(jax.jit, static_argnames=("target", "tree"))
def _node_moves(
  target: Model,
  tree: AnyTree,
  params: Any,
  prompt: Prompt,
  text: Array,
  start: Array,
  following: Array,
  plan: Array,
  paths: Array,
) -> tuple[Array, Array]:
  """Return the largest difference of a logit at each node of each path, and the logits' range.

  A pass begins after `start` [B] tokens of `text`, which ends with D tokens of padding. Both
  results are [leaves, B, D + 1]. The first node of each path is the root; differences past a leaf
  are 0.
  """
  first, length = target.prompt_tokens(prompt)
  last = gather(first, length[:, None] - 1)
  num_slots = first.shape[1] + text.shape[1] - tree.depth + tree.num_nodes  # as in decoding
  text = jnp.concatenate([last, text], axis=1)  # step i processes token i
  _, cache = target.prefill(params, prompt, num_slots)

  def extend(cache, token):
    logits, _, cache = target.extend(params, cache, token[:, None])
    return cache, logits[:, 0]

  def step(i, cache):
    after = extend(cache, text[:, i])[0]
    return target.commit(after, length - 1 + jnp.minimum(i + 1, start))

  cache = lax.fori_loop(0, start.max(), step, cache)
  last = gather(text, start[:, None])
  plans = plans_of(tree)
  draft_tokens = plans.tokens(plan, following, target.vocab_size)
  block = jnp.concatenate([last, draft_tokens], axis=1)
  in_block = target.extend(params, cache, block, plans.shape(plan, tree))[0]

  def of_path(path: Array) -> tuple[Array, Array]:
    nodes = jnp.pad(path, ((0, 0), (1, 0)))

    def next_token(cache, token):
      after, logits = extend(cache, token)
      return target.commit(after, cache.length + 1), logits

    tokens = gather(block, nodes)
    by_one = lax.scan(next_token, cache, tokens.T)[1].swapaxes(0, 1)  # [B, D + 1, V]
    by_block = gather(in_block, nodes)
    exists = (nodes > 0) | (jnp.arange(nodes.shape[1]) == 0)
    moves = jnp.where(exists, jnp.abs(by_block - by_one).max(axis=-1), 0.0)
    return moves, by_one.max(axis=-1) - by_one.min(axis=-1)

  return lax.map(of_path, paths.swapaxes(0, 1))


def first_divergences(
  target: Model,
  params,
  prompt: Prompt,
  autoregressive: np.ndarray,
  speculative: np.ndarray,
  block: int,
  rounding: Rounding,
  processors: Processors = (),
  limit: int | np.ndarray | None = None,
) -> list[Divergence]:
  """Return the first difference in each row of two outputs [B, T], as of `tokens_of`.

  `limit` is that of the outputs, or of each of them; by default T.
  """
  rows = np.flatnonzero((autoregressive != speculative).any(axis=1))
  if not len(rows):
    return []
  tokens = jnp.maximum(autoregressive, 0)
  logits = (logits_in_blocks(target, params, prompt, tokens, k) for k in (1, block))
  limit = tokens.shape[1] if limit is None else limit
  by_one, by_block = (
    np.asarray(processed(processors, target, prompt, tokens, limit, x)) for x in logits
  )
  divergences = []
  for row in rows.tolist():
    i = int((autoregressive[row] != speculative[row]).argmax())
    token, other_token = int(autoregressive[row, i]), int(speculative[row, i])
    gap = float(by_one[row, i, token] - by_one[row, i, other_token])
    gap = math.inf if PAST_END in (token, other_token) else gap
    single, several = by_one[row, : i + 1], by_block[row, : i + 1]
    differences = np.subtract(single, several, out=np.zeros_like(single), where=single != several)
    finite = single[-1][np.isfinite(single[-1])]  # processors exclude tokens by -inf
    bound = rounding.share * float(np.ptp(finite))
    moved = min(max(float(np.abs(differences).max()), rounding.measured), bound)
    divergences.append(Divergence(row, i, token, other_token, gap, moved))
  return divergences


def logits_in_blocks(target: Model, params, prompt: Prompt, tokens: Array, block: int) -> Array:
  """Return the logits [B, T, V] that predict each token, from passes over `block` tokens."""
  first, length = target.prompt_tokens(prompt)
  batch, count = tokens.shape
  num_blocks = -(-count // block)
  # Rows may have prompts of different lengths; each continues with its last token and the output.
  last = gather(first, length[:, None] - 1)
  text = jnp.concatenate([last, tokens[:, :-1]], axis=1)
  text = jnp.pad(text, ((0, 0), (0, num_blocks * block - count)))
  blocks = text.reshape(batch, num_blocks, block).swapaxes(0, 1)

  @jax.jit
  def logits_of_blocks(params):
    def step(cache, tokens):
      logits, _, cache = target.extend(params, cache, tokens)
      return target.commit(cache, cache.length + block), logits

    _, cache = target.prefill(params, prompt, first.shape[1] + num_blocks * block)
    return lax.scan(step, cache, blocks)[1]  # [N, B, K, V]

  logits = logits_of_blocks(params).swapaxes(0, 1)
  return logits.reshape(batch, num_blocks * block, -1)[:, :count]
