"""Test of the joint distribution of the first tokens of an output (Pearson's chi-square).

The possible first tokens form a tree of prefixes. The tree is divided into cells, and cells with
small expected counts are merged. The counts of many samples are compared with the target's exact
probabilities of the cells.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import optimize, stats

from specdec_jax.core.arrays import gather
from specdec_jax.core.counts import require_finite
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.processors import Processors
from specdec_jax.core.sampling import Sampling, distribution, row_keys
from specdec_jax.core.types import DecodeResult, Model
from specdec_jax.exactness.paths import batches
from specdec_jax.exactness.processed import processed
from specdec_jax.pair import Pair

Prefix = tuple[int, ...]
# A cell has a prefix. It contains the outputs that begin with this prefix, but not with the longer
# prefix of another cell.
Cells = Mapping[Prefix, float]

MIN_COUNT = 5.0  # smallest expected count of a cell, as is usual for Pearson's test


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Comparison of the counts of cells with their exact probabilities.

  Attributes:
    statistic: Pearson's chi-square.
    degrees: degrees of freedom.
    num_cells: number of cells, after small ones are merged.
    num_impossible: number of sampled outputs with probability 0; a single one is a fault.
  """

  statistic: float = 0.0
  degrees: int = 0
  num_samples: int = 0
  num_cells: int = 0
  num_impossible: int = 0

  def __add__(self, other: "Comparison") -> "Comparison":
    """Combine two comparisons of independent samples."""
    values = zip(dataclasses.astuple(self), dataclasses.astuple(other))
    return Comparison(*(one + another for one, another in values))

  @property
  def p_value(self) -> float:
    """Probability of at least this deviation in exact samples; 0 if an output was impossible."""
    return 0.0 if self.num_impossible else float(stats.chi2.sf(self.statistic, self.degrees))

  def detectable(self, level: float, power: float = 0.9) -> float:
    """Return the total variation distance that a test at `level` detects with probability `power`.

    It is the distance TV between the actual and the exact probabilities of the cells, averaged over
    the sources. In N samples, it increases the mean of the statistic by at least 4 N TV^2.
    """
    critical = stats.chi2.isf(level, self.degrees)
    shift = optimize.brentq(
      lambda nc: stats.ncx2.sf(critical, self.degrees, nc) - power, 1e-6, 1e3 + 10 * critical
    )
    return float(np.sqrt(shift / self.num_samples) / 2)


def compare_samples(
  pair: Pair,
  texts: Sequence[str],
  decode: Callable[..., DecodeResult],
  settings: DecodeSettings,
  samples_per_text: int,
  cells: Sequence[Cells] | None = None,
  processors: Processors = (),
) -> Comparison:
  """Compare the first tokens of many outputs with the target's exact joint distribution.

  `settings.max_new_tokens` tokens of `samples_per_text` outputs per text are compared. `cells` is
  the result of `cells_of` for the same arguments. `processors` are those that `decode` applies.
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
      drawn = [tuple(d.tokens[row, : d.lengths[row]].tolist()) for d in draws]
      unique = sorted(set(drawn))
      filled = [(*text, *(eos_id,) * (num_tokens - len(text))) for text in unique]
      source = prompt[row : row + 1]
      probs = _exact_probs(pair, source, sampling, filled, num_tokens, processors)
      possible = {text: _is_possible(eos_id, text, p) for text, p in zip(unique, probs)}
      total += compare(cells[rows[row]], drawn, sum(not possible[text] for text in drawn))
  return total


def cells_of(
  pair: Pair,
  texts: Sequence[str],
  sampling: Sampling,
  samples_per_text: int,
  num_tokens: int,
  processors: Processors = (),
) -> list[Cells]:
  """Divide the possible outputs of each text into cells, with the target's exact probabilities."""
  eos_id = pair.vocabulary.eos_id

  def cells_of_source(source: Array) -> Cells:
    def next_probs(prefixes: Sequence[Prefix]) -> np.ndarray:
      padded = [(*prefix, eos_id) for prefix in prefixes]
      return _exact_probs(pair, source, sampling, padded, num_tokens, processors)[:, -1]

    return cut_into_cells(next_probs, samples_per_text, num_tokens, eos_id)

  return [cells_of_source(source) for source in pair.prompt(texts)[:, None]]


def cut_into_cells(
  next_probs: Callable[[Sequence[Prefix]], np.ndarray],
  num_samples: int,
  num_tokens: int,
  eos_id: int,
) -> Cells:
  """Divide the possible first tokens of an output into cells, and return their probabilities.

  Each prefix with an expected count of at least MIN_COUNT has a cell.

  Args:
    next_probs: function that takes n prefixes of equal length and returns the probabilities [n, V]
      of the next token.
    num_samples: number of outputs that will be counted.
    num_tokens: number of first tokens, EOS included.
  """
  cells: dict[Prefix, float] = {(): 1.0}
  level: list[Prefix] = [()]
  for _ in range(num_tokens):
    grown: list[Prefix] = []
    for prefix, probs in zip(level, next_probs(level) if level else ()):
      joint = cells[prefix] * probs.astype(np.float64) / probs.sum(dtype=np.float64)
      frequent = np.flatnonzero(joint * num_samples >= MIN_COUNT)
      for token in frequent.tolist():
        cells[*prefix, token] = float(joint[token])
        if token != eos_id:
          grown.append((*prefix, token))
      cells[prefix] = float(np.delete(joint, frequent).sum())
    level = grown
  return cells


def compare(cells: Cells, texts: Sequence[Prefix], num_impossible: int = 0) -> Comparison:
  """Compare the counts of outputs, `num_impossible` of probability 0, with exact probabilities."""
  counts = dict.fromkeys(cells, 0)
  for text in texts:
    counts[next(text[:n] for n in range(len(text), -1, -1) if text[:n] in cells)] += 1
  expected = np.array(list(cells.values())) * len(texts)
  observed = np.array(list(counts.values()), float)
  order = np.argsort(expected)
  expected, observed = expected[order], observed[order]
  # Cells below MIN_COUNT are merged. If their sum is too small, the next larger cell is merged too.
  last = int(np.searchsorted(np.cumsum(expected), MIN_COUNT))
  last = max(last, int(np.sum(expected < MIN_COUNT)) - 1, 0)
  expected, observed = (
    np.concatenate([[x[: last + 1].sum()], x[last + 1 :]]) for x in (expected, observed)
  )
  statistic = float(((observed - expected) ** 2 / expected).sum())
  return Comparison(statistic, len(expected) - 1, len(texts), len(expected), num_impossible)


def _exact_probs(
  pair: Pair,
  source: Array,
  sampling: Sampling,
  texts: Sequence[Sequence[int]],
  limit: int,
  processors: Processors,
) -> np.ndarray:
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
  """Return the target's distribution [B, T, V] of each token; all rows have one source [1, S]."""
  batch, num_tokens = tokens.shape
  first, length = model.prompt_tokens(source)
  last = gather(first, length[:, None] - 1)
  _, cache = model.prefill(params, source, first.shape[1] + num_tokens)
  cache, last = jax.tree.map(lambda x: jnp.repeat(x, batch, axis=0), (cache, last))
  block = jnp.concatenate([last, tokens[:, :-1]], axis=1)
  logits = model.extend(params, cache, block)[0]
  prompt = jnp.repeat(source, batch, axis=0)
  return distribution(processed(processors, model, prompt, tokens, limit, logits), sampling)


def _is_possible(eos_id: int, text: Prefix, probs: np.ndarray) -> bool:
  """Return whether a text is complete (T tokens, or EOS at its end) and has probability above 0."""
  ends = len(text) == len(probs) or text[-1:] == (eos_id,)
  return bool(ends and eos_id not in text[:-1] and (probs[range(len(text)), text] > 0).all())
