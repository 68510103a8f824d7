"""Outputs of speculation compared with those of autoregressive decoding: tokens and samples."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.core.decode import require_finite
from specdec_jax.core.sampling import Sampling, distribution, row_keys
from specdec_jax.core.types import DecodeResult, Model
from specdec_jax.exactness.joint import Comparison, compare, cut_into_cells
from specdec_jax.exactness.paths import batches
from specdec_jax.exactness.ties import Divergence, Rounding, first_divergences
from specdec_jax.pairs import Pair

Decode = Callable[..., DecodeResult]  # (prompt [B, P], keys [B], max_new_tokens=)
Cells = dict[tuple[int, ...], float]


def compare_argmax(
  pair: Pair,
  texts: Sequence[str],
  plain: Decode,
  speculative: Decode,
  block: int,
  batch_size: int,
  max_new_tokens: int,
  rounding: Rounding,
) -> list[tuple[int, Divergence]]:
  """Numbers of the texts whose two argmax outputs differ, from 1, and the first difference of each.

  `block` is the number of tokens in a verification pass: gamma + 1, or a tree's nodes.
  """
  found = []
  for rows, prompt, count in batches(pair, texts, batch_size):
    keys = row_keys(0, rows[0], batch_size)
    ours, own = (
      np.asarray(require_finite(decode(prompt, keys, max_new_tokens=max_new_tokens)).tokens)
      for decode in (speculative, plain)
    )
    parted = first_divergences(
      *(pair.target, pair.target_params, prompt, own, ours, block, rounding)
    )
    found += [(rows[d.row] + 1, d) for d in parted if d.row < count]
  return found


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
  total, eos_id = Comparison(), pair.vocabulary.eos_id
  cells = cells or cells_of(pair, texts, sampling, samples_per_text, num_tokens)
  for rows, prompt, count in batches(pair, texts, batch_size):
    keys = row_keys(seed, rows[0] * samples_per_text, batch_size * samples_per_text)
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
      total += compare(cells[rows[row]], drawn, sum(not possible[text] for text in drawn))
  return total


def _exact_probs(
  pair: Pair, source: Array, sampling: Sampling, texts: Sequence[Sequence[int]]
) -> np.ndarray:
  """The target's probabilities [N, T, V] before each token of N texts of length T."""
  rows = -(-len(texts) // 32) * 32  # few shapes, so few programs
  tokens = np.full((rows, len(texts[0])), pair.vocabulary.eos_id, np.int32)
  tokens[: len(texts)] = texts
  exact = functools.partial(_probs, pair.target, sampling, pair.target_params, source)
  return np.concatenate([exact(part) for part in np.split(tokens, rows // 32)])[: len(texts)]


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def _probs(model: Model, sampling: Sampling, params, source: Array, tokens: Array) -> Array:
  """Probabilities [B, T, V] before each of tokens [B, T], all after one source [1, S].

  As `teacher_forced_logits`, with one prefill for all rows.
  """
  batch, num_tokens = tokens.shape
  first, length = model.prompt_tokens(source)
  newest = jnp.take_along_axis(first, length[:, None] - 1, axis=1)
  _, cache = model.prefill(params, source, first.shape[1] + num_tokens)
  cache, newest = jax.tree.map(lambda x: jnp.repeat(x, batch, axis=0), (cache, newest))
  block = jnp.concatenate([newest, tokens[:, :-1]], axis=1)
  return distribution(model.extend(params, cache, block)[0], sampling)


def _is_possible(eos_id: int, text: tuple[int, ...], probs: np.ndarray) -> bool:
  """Whether the target can write this, given its probabilities [T, V] before each token.

  No token has probability 0, none follows EOS, and none is missing.
  """
  ends = len(text) == len(probs) or text[-1:] == (eos_id,)
  return bool(ends and eos_id not in text[:-1] and (probs[range(len(text)), text] > 0).all())
