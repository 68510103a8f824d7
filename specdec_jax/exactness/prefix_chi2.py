"""Test of the joint distribution of the first tokens of an output (Pearson's chi-square).

The possible first tokens form a tree of prefixes. The tree is divided into cells, and cells with
small expected counts are merged. The counts of many samples are compared with the exact
probabilities of the cells.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import optimize, stats

Prefix = tuple[int, ...]

MIN_COUNT = 5.0  # smallest expected count of a cell, as is usual for Pearson's test


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Comparison of the counts of cells with their exact probabilities.

  Attributes:
    statistic: Pearson's chi-square.
    degrees: degrees of freedom.
    num_samples: number of sampled outputs.
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

    It is the distance TV between the actual probabilities p' of the cells and their exact
    probabilities p, averaged over the sources of the samples. In N samples, this distance increases
    the mean of Pearson's statistic by N sum((p' - p)^2 / p) >= 4 N TV^2, so the power is at least
    `power`.
    """
    critical = stats.chi2.isf(level, self.degrees)
    shift = optimize.brentq(
      lambda nc: stats.ncx2.sf(critical, self.degrees, nc) - power, 1e-6, 1e3 + 10 * critical
    )
    return float(np.sqrt(shift / self.num_samples) / 2)


def cut_into_cells(
  next_probs: Callable[[Sequence[Prefix]], np.ndarray],
  num_samples: int,
  num_tokens: int,
  eos_id: int,
) -> dict[Prefix, float]:
  """Divide the possible first tokens of an output into cells, and return their probabilities.

  Each prefix with an expected count of at least MIN_COUNT has a cell. The cell contains the outputs
  that begin with this prefix but not with a longer prefix that has a cell.

  Args:
    next_probs: function that takes n prefixes of equal length and returns the probabilities [n, V]
      of the next token.
    num_samples: number of outputs that will be counted.
    num_tokens: number of first tokens, including EOS; shorter outputs end with `eos_id`.
    eos_id: token that ends an output.
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


def compare(
  cells: Mapping[Prefix, float], texts: Sequence[Prefix], num_impossible: int = 0
) -> Comparison:
  """Compare the counts of sampled outputs with the probabilities of cells.

  Args:
    cells: result of `cut_into_cells`.
    texts: sampled outputs, with at most `num_tokens` tokens (see `cut_into_cells`).
    num_impossible: number of sampled outputs with probability 0.
  """
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
