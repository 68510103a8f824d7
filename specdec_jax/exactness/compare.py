"""Outputs of speculation beside the target's own: token for token, in rounds, and as samples."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.decoding import require_finite
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.exactness.joint import Comparison, compare, cut_into_cells
from specdec_jax.exactness.ties import Divergence, first_divergences
from specdec_jax.measurement.alpha import teacher_forced_logits
from specdec_jax.pairs import Pair
from specdec_jax.protocols import Decoded
from specdec_jax.sampling import Sampling, distribution, row_keys

Decode = Callable[..., Decoded]  # (prompt [B, P], keys [B], max_new_tokens=)
Cells = dict[tuple[int, ...], float]


def compare_argmax(
  pair: Pair,
  texts: Sequence[str],
  plain: Decode,
  speculative: Decode,
  gamma: int,
  batch_size: int,
  max_new_tokens: int,
) -> list[tuple[int, Divergence]]:
  """Numbers of the texts whose two argmax outputs differ, from 1, and where they part."""
  found, prompts = [], pair.prompt(texts)
  for at in range(0, len(texts), batch_size):
    prompt, count = _batch(prompts, at, batch_size)
    keys = row_keys(0, at, batch_size)
    ours, own = (
      np.asarray(require_finite(decode(prompt, keys, max_new_tokens=max_new_tokens)).tokens)
      for decode in (speculative, plain)
    )
    parted = first_divergences(pair.target, pair.target_params, prompt, own, ours, gamma + 1)
    found += [(at + d.row + 1, d) for d in parted if d.row < count]
  return found


def rounds_of_self_draft(
  pair: Pair, texts: Sequence[str], gamma: int, batch_size: int, max_new_tokens: int
) -> tuple[int, int]:
  """Rounds that argmax takes with the target as its own draft, and the fewest possible.

  Every guess must stand and every round emit gamma + 1 tokens; what breaks this (a lost bonus
  token, a draft that falls a token behind) costs speed, and need not show in the output.
  """
  itself = functools.partial(ModelDraft, pair.target)
  own = pair._replace(draft=itself, draft_params=pair.target_params)
  decode = own.decoder(Sampling(temperature=0.0), gamma)
  rounds = fewest = 0
  prompts = pair.prompt(texts)
  for at in range(0, len(texts), batch_size):
    prompt, count = _batch(prompts, at, batch_size)
    decoded = decode(prompt, row_keys(0, at, batch_size), max_new_tokens=max_new_tokens)
    rounds += int((decoded.rounds.num_emitted[:, :count] > 0).sum())
    fewest += int((-(-decoded.lengths[:count] // (gamma + 1))).sum())
  return rounds, fewest


def cells_of(
  pair: Pair, texts: Sequence[str], sampling: Sampling, samples_per_text: int, num_tokens: int
) -> list[Cells]:
  """For each text the cells that its outputs' first tokens fall in, with exact probabilities."""
  eos_id = pair.vocabulary.eos_id

  def of(source: Array) -> Cells:
    exact = functools.partial(_exact_probs, pair, source, sampling)
    after = lambda prefixes: exact([(*prefix, eos_id) for prefix in prefixes])[:, -1]
    return cut_into_cells(after, samples_per_text, num_tokens, eos_id)

  return [of(source) for source in pair.prompt(texts)[:, None]]


def compare_samples(
  pair: Pair,
  texts: Sequence[str],
  sampling: Sampling,
  decode: Decode,
  batch_size: int,
  samples_per_text: int,
  num_tokens: int,
  seed: int,
  cells: Sequence[Cells] | None = None,
) -> Comparison:
  """First tokens of many outputs beside the target's exact joint distribution, over all texts.

  `cells` are those of `cells_of` the same settings, for who compares more than one decoding.
  """
  total, eos_id, prompts = Comparison(), pair.vocabulary.eos_id, pair.prompt(texts)
  cells = cells or cells_of(pair, texts, sampling, samples_per_text, num_tokens)
  for at in range(0, len(texts), batch_size):
    prompt, count = _batch(prompts, at, batch_size)
    keys = row_keys(seed, at * samples_per_text, batch_size * samples_per_text)
    draws = [
      jax.device_get(require_finite(decode(prompt, keys_of_draw, max_new_tokens=num_tokens)))
      for keys_of_draw in keys.reshape(samples_per_text, batch_size)
    ]
    for row in range(count):
      exact = functools.partial(_exact_probs, pair, prompt[row : row + 1], sampling)
      drawn = [tuple(d.tokens[row, : d.lengths[row]].tolist()) for d in draws]
      unique = sorted(set(drawn))
      is_possible = functools.partial(_is_possible, eos_id)
      filled = [(*text, *(eos_id,) * (num_tokens - len(text))) for text in unique]
      possible = dict(zip(unique, map(is_possible, unique, exact(filled))))
      total += compare(cells[at + row], drawn, sum(not possible[text] for text in drawn))
  return total


def _batch(prompts: Array, at: int, batch_size: int) -> tuple[Array, int]:
  """Rows at..at+batch_size-1, filled up with the first ones, and how many are new.

  All batches are as wide as the widest text, so each program is compiled once.
  """
  rows = np.arange(at, at + batch_size)
  return prompts[rows % len(prompts)], int((rows < len(prompts)).sum())


def _exact_probs(
  pair: Pair, source: Array, sampling: Sampling, texts: Sequence[Sequence[int]]
) -> np.ndarray:
  """The target's probabilities [N, T, V] before each token of N texts of length T."""
  rows = -(-len(texts) // 32) * 32  # few shapes, so few programs
  tokens = np.full((rows, len(texts[0])), pair.vocabulary.eos_id, np.int32)
  tokens[: len(texts)] = texts
  model, params = pair.target, pair.target_params
  sources = jnp.repeat(source, 32, axis=0)
  logits = (teacher_forced_logits(model, params, sources, c) for c in np.split(tokens, rows // 32))
  return np.concatenate([distribution(x, sampling) for x in logits])[: len(texts)]


def _is_possible(eos_id: int, text: tuple[int, ...], probs: np.ndarray) -> bool:
  """Whether the target can write this, given its probabilities [T, V] before each token.

  No token has probability 0, none follows EOS, and none is missing.
  """
  ends = len(text) == len(probs) or text[-1:] == (eos_id,)
  return bool(ends and eos_id not in text[:-1] and (probs[range(len(text)), text] > 0).all())
