"""Test of the tokens of outputs, for any verifier and tree.

The output of a round and of those after it depends on fresh random numbers. So the tokens from the
start of a round on are sampled from the target's p, each given the tokens before it. An output is
divided into windows of a fixed number of tokens, each of which begins where a round begins. Scores
of tokens by their position in a window, and products of the scores of two of them, have mean 0
(`martingale`).

The score against the draft is the most powerful one if some tokens are sampled from the draft's q
in place of p, as with a wrong acceptance probability. Its mean is 0 for any q, such as the q before
logits processors, which is used here.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.core.arrays import gather_token
from specdec_jax.core.counts import require_finite
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.processors import Processors
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult, DraftOptions
from specdec_jax.exactness.argmax import Decode
from specdec_jax.exactness.martingale import TOKEN_SCORES, Drift, product
from specdec_jax.exactness.paths import batches
from specdec_jax.exactness.processed import target_probs
from specdec_jax.exactness.round_scores import token_scores
from specdec_jax.measure.alpha import draft_probs
from specdec_jax.pair import Pair

MAX_RATIO = 2.0  # largest q / p in the score against the draft
PAIRED = "rank", "place", "draft"  # scores of which pairs are multiplied


class TextScores(NamedTuple):
  """Scores of the tokens in windows of outputs.

  Attributes:
    scores: for each kind of score, values [windows, tokens], their variances, and their bound.
      Both arrays are 0 past the end of a text.
    num_tokens: number of tokens of all outputs.
    num_impossible: number of outputs that the target cannot generate; a single one is a fault.
    lines: lines below the row of the report.
  """

  scores: Mapping[str, tuple[np.ndarray, np.ndarray, float]]
  num_tokens: int
  num_impossible: int
  lines: Sequence[str] = ()

  def drifts(self) -> dict[str, list[Drift]]:
    """Return the drifts by name: for all tokens, by position, and for pairs of positions."""
    found: dict[str, list[Drift]] = {}
    for kind, (score, variance, largest) in self.scores.items():
      by_position = [
        Drift(float(s.sum()), float(v.sum()), largest) for s, v in zip(score.T, variance.T)
      ]
      found[kind] = [functools.reduce(Drift.plus, by_position)]
      found[f"{kind} by position"] = by_position
      if kind in PAIRED:
        pairs = itertools.combinations(range(score.shape[1]), 2)
        found[f"{kind} of two tokens"] = [
          product((score[:, j], variance[:, j], largest), score[:, i], largest) for i, j in pairs
        ]
    return found


def score_texts(
  pair: Pair,
  texts: Sequence[str],
  decode: Decode,
  settings: DecodeSettings,
  num_tokens: int,
  window: int = 4,
  processors: Processors = (),
) -> TextScores:
  """Decode texts until they have `num_tokens` tokens; return the scores in windows of outputs.

  Texts are decoded repeatedly if necessary, as in `round_scores.score_rounds`. `processors` are
  those that `decode` applies.
  """
  parts, count, impossible = [], 0, 0
  sampling, limit, target = settings.sampling, settings.max_new_tokens, pair.target
  draft = pair.draft.build(sampling, chain(1), DraftOptions())
  for _, prompt, keys in batches(pair, texts, settings):
    result = jax.device_get(require_finite(decode(prompt, keys, max_new_tokens=limit)))
    tokens = jnp.asarray(result.tokens)
    p = target_probs(target.model, target.params, prompt, tokens, sampling, limit, processors)
    q = draft_probs(pair, draft, prompt, tokens)
    scores = jax.device_get((token_scores(p, tokens), _draft_scores(p, q, tokens)))
    parts.append(jax.tree.map(functools.partial(_in_windows, result, window), scores))
    slots, lengths = np.arange(limit), result.lengths[:, None]
    is_eos = result.tokens == pair.vocabulary.eos_id
    is_wrong = (gather_token(p, tokens) <= 0) | (is_eos & (slots < lengths - 1))
    is_wrong |= ~is_eos & (slots == lengths - 1) & (lengths < limit)
    impossible += int((is_wrong & (slots < lengths)).any(axis=1).sum())
    if (count := count + int(lengths.sum())) >= num_tokens:
      break
  by_token, by_draft = jax.tree.map(lambda *x: np.concatenate(x).astype(float), *parts)
  of_kind = {
    kind: (getattr(by_token, score), getattr(by_token, variance), bound)
    for kind, (score, variance, bound) in TOKEN_SCORES.items()
  }
  return TextScores(of_kind | {"draft": (*by_draft, MAX_RATIO)}, count, impossible)


def _in_windows(result: DecodeResult, window: int, values: np.ndarray) -> np.ndarray:
  """Return values [B, T] of tokens as [windows, `window`], with 0 past the end of a text.

  A window begins with the first round that begins after the window before it. This choice depends
  on the rounds before it only, so the tokens of a window are still sampled from p.
  """
  is_text = np.arange(values.shape[1]) < result.lengths[:, None]
  padded, found = np.pad(values * is_text, ((0, 0), (0, window))), []
  ends = np.cumsum(result.rounds.num_emitted, axis=0).T
  for row, (of_row, length) in enumerate(zip(ends, result.lengths)):
    free = 0
    for start in [0, *of_row.tolist()]:
      if free <= start < length:
        found.append(padded[row, start : start + window])
        free = start + window
  return np.stack(found)


@jax.jit
def _draft_scores(p: Array, q: Array, tokens: Array) -> tuple[Array, Array]:
  """Return min(q / p, MAX_RATIO) of each token, minus its mean under p, and its variance."""
  ratio = jnp.where(p > 0, jnp.minimum(q / jnp.where(p > 0, p, 1.0), MAX_RATIO), 0.0)
  ratio = ratio - (p * ratio).sum(axis=-1, keepdims=True)
  return gather_token(ratio, tokens), (p * ratio**2).sum(axis=-1)
