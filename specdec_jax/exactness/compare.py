"""Comparison of speculative outputs with the target's argmax outputs or exact distribution."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.core.arrays import gather
from specdec_jax.core.counts import require_finite
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.processors import Processors
from specdec_jax.core.sampling import Sampling, distribution, row_keys
from specdec_jax.core.types import DecodeResult, Model
from specdec_jax.exactness.near_ties import Divergence, Rounding, first_divergences
from specdec_jax.exactness.paths import batches
from specdec_jax.exactness.prefix_chi2 import Comparison, compare, cut_into_cells
from specdec_jax.exactness.processed import processed
from specdec_jax.pair import Pair

Decode = Callable[..., DecodeResult]  # function of (prompt [B, P], keys [B], *, max_new_tokens)
Cells = dict[tuple[int, ...], float]


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

  Args:
    pair: target and vocabulary.
    texts: sources.
    autoregressive: function that decodes without a draft.
    speculative: function that decodes speculatively.
    block: number of tokens of a verification pass: gamma + 1, or the number of nodes of a tree.
    settings: settings of decoding; only batch size, `max_new_tokens` and seed are used.
    rounding: logit differences that are attributed to rounding.
    processors: logits processors that both functions apply.

  Returns:
    For each text whose outputs differ, the number of the text, from 1, and the first difference.
  """
  divergences = []
  batch_size, limit = settings.batch_size, settings.max_new_tokens
  for rows, prompt, count in batches(pair, texts, batch_size):
    keys = row_keys(settings.seed, rows[0], batch_size)
    tokens, expected = (
      np.asarray(require_finite(decode(prompt, keys, max_new_tokens=limit)).tokens)
      for decode in (speculative, autoregressive)
    )
    of_batch = first_divergences(
      pair.target.model, pair.target.params, prompt, expected, tokens, block, rounding, processors
    )
    divergences += [(rows[d.row] + 1, d) for d in of_batch if d.row < count]
  return divergences


def cells_of(
  pair: Pair,
  texts: Sequence[str],
  sampling: Sampling,
  samples_per_text: int,
  num_tokens: int,
  processors: Processors = (),
) -> list[Cells]:
  """Divide the possible outputs of each text into cells, and return their exact probabilities.

  A cell has a prefix. It contains the outputs that begin with this prefix but not with the longer
  prefix of another cell (`prefix_chi2.cut_into_cells`).

  Args:
    pair: target and draft; the target computes the probabilities.
    texts: sources.
    sampling: sampling method.
    samples_per_text: number of outputs that will be sampled for each text.
    num_tokens: maximum number of tokens of an output, and of the prefix of a cell.
    processors: logits processors of the target.
  """
  eos_id = pair.vocabulary.eos_id

  def cells_of_source(source: Array) -> Cells:
    def next_probs(prefixes: Sequence[tuple[int, ...]]) -> np.ndarray:
      padded = [(*prefix, eos_id) for prefix in prefixes]
      return _exact_probs(pair, source, sampling, padded, num_tokens, processors)[:, -1]

    return cut_into_cells(next_probs, samples_per_text, num_tokens, eos_id)

  return [cells_of_source(source) for source in pair.prompt(texts)[:, None]]


def compare_samples(
  pair: Pair,
  texts: Sequence[str],
  decode: Decode,
  settings: DecodeSettings,
  samples_per_text: int,
  cells: Sequence[Cells] | None = None,
  processors: Processors = (),
) -> Comparison:
  """Compare the first tokens of many outputs with the target's exact joint distribution.

  Args:
    pair: target and draft; the target computes the exact probabilities.
    texts: sources.
    decode: function whose outputs are compared.
    settings: settings of decoding; `max_new_tokens` is the number of tokens that are compared.
    samples_per_text: number of outputs sampled for each text.
    cells: result of `cells_of` for the same arguments, which several comparisons can share; None
      to compute it here.
    processors: logits processors that `decode` applies. They also apply to the exact
      probabilities.
  """
  total, eos_id = Comparison(), pair.vocabulary.eos_id
  sampling, batch_size = settings.sampling, settings.batch_size
  num_tokens, seed = settings.max_new_tokens, settings.seed
  cells = cells or cells_of(pair, texts, sampling, samples_per_text, num_tokens, processors)
  for rows, prompt, count in batches(pair, texts, batch_size):
    keys = row_keys(seed, rows[0] * samples_per_text, batch_size * samples_per_text)
    draws = [
      jax.device_get(require_finite(decode(prompt, keys_of_draw, max_new_tokens=num_tokens)))
      for keys_of_draw in keys.reshape(samples_per_text, batch_size)
    ]
    for row in range(count):
      source = prompt[row : row + 1]
      drawn = [tuple(d.tokens[row, : d.lengths[row]].tolist()) for d in draws]
      unique = sorted(set(drawn))
      is_possible = functools.partial(_is_possible, eos_id)
      filled = [(*text, *(eos_id,) * (num_tokens - len(text))) for text in unique]
      probs = _exact_probs(pair, source, sampling, filled, num_tokens, processors)
      possible = dict(zip(unique, map(is_possible, unique, probs)))
      total += compare(cells[rows[row]], drawn, sum(not possible[text] for text in drawn))
  return total


def _exact_probs(
  pair: Pair,
  source: Array,
  sampling: Sampling,
  texts: Sequence[Sequence[int]],
  limit: int,
  processors: Processors,
) -> np.ndarray:
  """Return the target's distribution of each token of `texts`, as an array [len(texts), T, V]."""
  rows = -(-len(texts) // 32) * 32  # few shapes, so few programs
  tokens = np.full((rows, len(texts[0])), pair.vocabulary.eos_id, np.int32)
  tokens[: len(texts)] = texts
  exact = functools.partial(_probs, pair.target.model, sampling, pair.target.params, source)
  parts = np.split(tokens, rows // 32)
  return np.concatenate([exact(part, limit, processors) for part in parts])[: len(texts)]


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def _probs(
  model: Model,
  sampling: Sampling,
  params: Any,
  source: Array,
  tokens: Array,
  limit: int,
  processors: Processors,
) -> Array:
  """Return the target's distribution [B, T, V] of each token, given the tokens before it.

  All rows of `tokens` [B, T] have the same source [1, S], so a single prefill is enough.
  """
  batch, num_tokens = tokens.shape
  first, length = model.prompt_tokens(source)
  last = gather(first, length[:, None] - 1)
  _, cache = model.prefill(params, source, first.shape[1] + num_tokens)
  cache, last = jax.tree.map(lambda x: jnp.repeat(x, batch, axis=0), (cache, last))
  block = jnp.concatenate([last, tokens[:, :-1]], axis=1)
  logits = model.extend(params, cache, block)[0]
  prompt = jnp.repeat(source, batch, axis=0)
  return distribution(processed(processors, model, prompt, tokens, limit, logits), sampling)


def _is_possible(eos_id: int, text: tuple[int, ...], probs: np.ndarray) -> bool:
  """Return whether the target can generate a text.

  `probs` [T, V] are the target's distributions of the tokens. No token may have probability 0 or
  follow EOS, and the text must be complete: it has T tokens or ends with EOS.
  """
  ends = len(text) == len(probs) or text[-1:] == (eos_id,)
  return bool(ends and eos_id not in text[:-1] and (probs[range(len(text)), text] > 0).all())
