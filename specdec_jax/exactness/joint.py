"""Whether samples of the first few tokens have the target's exact joint distribution.

The texts that can begin an output form a tree. It is cut into cells, each large enough for a
count to mean something, and the counts of many samples are compared with the cells' exact
probabilities (Pearson's chi-square).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import optimize, stats

Prefix = tuple[int, ...]

LEAST = 5.0  # expected count of a cell, as is usual for Pearson's test


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Counts of one or more samples beside their exact probabilities.

  Attributes:
    statistic: Pearson's chi-square.
    degrees: of freedom.
    num_samples: texts drawn.
    num_cells: into which they fell.
    num_impossible: texts that the target cannot write: one is a fault by itself.
  """

  statistic: float = 0.0
  degrees: int = 0
  num_samples: int = 0
  num_cells: int = 0
  num_impossible: int = 0

  def __add__(self, other: "Comparison") -> "Comparison":
    """Both comparisons as one, of independent samples."""
    mine, its = dataclasses.astuple(self), dataclasses.astuple(other)
    return Comparison(*(a + b for a, b in zip(mine, its)))

  @property
  def p_value(self) -> float:
    """How often samples of the exact distribution would lie this far out."""
    return 0.0 if self.num_impossible else float(stats.chi2.sf(self.statistic, self.degrees))

  def detectable(self, level: float, power: float = 0.9) -> float:
    """Total variation distance, averaged over the samples' texts, found with chance `power`.

    Pearson's statistic grows by N sum((p' - p)^2 / p) >= 4 N TV^2, so a distance of this size
    between the cells is found at least that often.
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
  """Probabilities of cells that the first `num_tokens` tokens of a text can fall in.

  A prefix expected LEAST times in `num_samples` has a cell: the texts that begin with it and
  with no longer prefix that has one too.

  Args:
    next_probs: prefixes of one length n -> probabilities [n, V] of the token after each.
    num_samples: texts that will be counted.
    num_tokens: length of the texts, EOS counted; shorter ones end in `eos_id`.
    eos_id: ends a text.
  """
  cells: dict[Prefix, float] = {(): 1.0}
  level: list[Prefix] = [()]
  for _ in range(num_tokens):
    grown: list[Prefix] = []
    for prefix, probs in zip(level, next_probs(level) if level else ()):
      joint = cells[prefix] * probs.astype(np.float64) / probs.sum(dtype=np.float64)
      kept = np.flatnonzero(joint * num_samples >= LEAST)
      for token in kept.tolist():
        cells[*prefix, token] = float(joint[token])
        if token != eos_id:
          grown.append((*prefix, token))
      cells[prefix] = float(np.delete(joint, kept).sum())
    level = grown
  return cells


def compare(
  cells: Mapping[Prefix, float], texts: Sequence[Prefix], num_impossible: int = 0
) -> Comparison:
  """Counts of `texts`, as long as the cells were cut for, beside the probabilities of `cells`."""
  counts = dict.fromkeys(cells, 0)
  for text in texts:
    counts[next(text[:n] for n in range(len(text), -1, -1) if text[:n] in cells)] += 1
  expected = np.array(list(cells.values())) * len(texts)
  observed = np.array(list(counts.values()), float)
  order = np.argsort(expected)
  expected, observed = expected[order], observed[order]
  # Cells too small by themselves share one, with the next larger if it takes that to be enough.
  last = int(np.searchsorted(np.cumsum(expected), LEAST))
  last = max(last, int(np.sum(expected < LEAST)) - 1, 0)
  merged = lambda x: np.concatenate([[x[: last + 1].sum()], x[last + 1 :]])
  expected, observed = merged(expected), merged(observed)
  statistic = float(((observed - expected) ** 2 / expected).sum())
  return Comparison(statistic, len(expected) - 1, len(texts), len(expected), num_impossible)
