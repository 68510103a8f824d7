"""Choice of the gamma and the tree with the best predicted speed (Section 3.5)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax import theory
from specdec_jax.core.trees import Tree, chain
from specdec_jax.measure.costs import Costs

LEAST_GAIN = 1.02  # speedup, predicted or tried, below which speculation is not used
NODES, DEPTH = (4, 8, 16, 32, 64), 10  # sizes and maximum depth of the trees to choose from


class Branching(NamedTuple):
  """Best tree that is not a chain, and the values on which the choice is based.

  Attributes:
    tree: the tree with the highest predicted speed.
    acceptance: positional acceptance: for each rank, the probability that the child of that rank is
      the accepted one.
    drafting: predicted time to draft the tree, in target steps.
    v: predicted time of a round without drafting, in target steps.
    speedup: predicted speedup.
    tried: measured speed relative to the chosen gamma on the calibration texts; None if there was
      no trial.
  """

  tree: Tree
  acceptance: tuple[float, ...]
  drafting: float
  v: float
  speedup: float
  tried: float | None = None

  def __str__(self) -> str:
    ranks = ", ".join(f"{chance:.2f}" for chance in self.acceptance[:3])
    tokens = theory.tree_tokens(self.tree, self.acceptance)
    tried = "" if self.tried is None else f"; tried, {self.tried:.2f} times as fast as the chain"
    return (
      f"the best tree, {self.tree.num_nodes} nodes of depth {self.tree.depth}, has a predicted "
      f"speedup of {self.speedup:.2f}: {tokens:.2f} tokens per round, drafting "
      f"{self.drafting:.2f} and v {self.v:.2f} steps, acceptance of children of rank 0, 1, 2: "
      f"{ranks}{tried}"
    )


class Calibration(NamedTuple):
  """Choice of gamma or of a tree, and the values on which the choice is based.

  `c`, `v` and `speedups` have one entry for each gamma, from 0.

  Attributes:
    gamma: chosen gamma, used unless `branching` is chosen; 0 for autoregressive decoding.
    alpha: acceptance rate in the decoded texts. If trees were considered, it is the acceptance rate
      of first children, so that chains and trees are compared by the same measure.
    c: time of a draft step, in target steps (Definition 7); 0 at gamma 0.
    v: time of a round without drafting, in target steps (`Costs.v`); 1 at gamma 0.
    speedups: predicted speedups; 1 at gamma 0.
    starts: prefill times of target and draft for one batch, in target steps.
    tried: measured speedup of the best gamma over autoregressive decoding on the calibration texts;
      None if there was no trial.
    branching: the best tree that is not a chain; None if trees were not considered.
  """

  gamma: int
  alpha: float
  c: tuple[float, ...]
  v: tuple[float, ...]
  speedups: tuple[float, ...]
  starts: tuple[float, float]
  tried: float | None = None
  branching: Branching | None = None

  @property
  def tree(self) -> Tree:
    """Best tree, if at least LEAST_GAIN times as fast as the chain in a trial; else the chain."""
    best = self.branching
    faster = best is not None and best.tried is not None and best.tried >= LEAST_GAIN
    return best.tree if best is not None and faster else chain(self.gamma)

  @property
  def best_draft(self) -> int:
    """Gamma with the highest predicted speedup among those above 0."""
    return 1 + int(np.argmax(self.speedups[1:]))

  def round_cost(self, gamma: int) -> float:
    """Return the time of a round with a given gamma, in target steps."""
    return gamma * self.c[gamma] + self.v[gamma]

  def __str__(self) -> str:
    best = self.best_draft
    speedups = ", ".join(
      f"{self.speedups[gamma]:.2f} at gamma {gamma}"
      for gamma in (best - 1, best, best + 1)
      if 0 < gamma < len(self.speedups)
    )
    chosen = f"gamma {self.gamma}" if self.gamma else "autoregressive decoding, gamma 0,"
    if not self.tree.is_chain:
      chosen = f"a tree of {self.tree.num_nodes} nodes"
    branching = "" if self.branching is None else f"; {self.branching}"
    tried = "" if self.tried is None else f"; tried, {self.tried:.2f} at gamma {best}"
    return (
      f"{chosen} was chosen: alpha {self.alpha:.2f}, c {self.c[best]:.3f}, v({best}) "
      f"{self.v[best]:.2f}; predicted speedup {speedups}{tried}{branching}"
    )


def choose(
  alpha: float, costs: Mapping[int, Costs], lengths: Sequence[Sequence[int]]
) -> Calibration:
  """Choose the gamma with the best predicted speed, from 0 to the largest measured gamma.

  gamma is 0 if the best predicted speedup is below LEAST_GAIN. Speed is predicted by
  `theory.text_improvement`. The cost v of verification is interpolated linearly, from 1 at
  gamma 0 through the measured gammas. The time of drafting is linear in gamma, through the smallest
  and the largest measured gamma.

  Args:
    alpha: acceptance rate.
    costs: measured costs by gamma, for at least two gammas.
    lengths: lengths of typical texts in tokens, one sequence per batch.
  """
  measured = sorted(costs)
  gammas = np.arange(1, measured[-1] + 1)
  drafting = [gamma * costs[gamma].c for gamma in (measured[0], measured[-1])]
  slope, fixed = np.polyfit((measured[0], measured[-1]), drafting, 1)
  c = np.maximum(0.0, fixed + slope * gammas) / gammas  # noise can make a difference negative
  v = np.interp(gammas, [0, *measured], [1.0, *(costs[gamma].v for gamma in measured)])
  starts = _prefill_steps(costs[measured[0]])
  speedups = [
    theory.text_improvement(alpha, gamma, c[gamma - 1], v[gamma - 1], lengths, *starts)
    for gamma in gammas.tolist()
  ]
  best = int(np.argmax(speedups))
  return Calibration(
    gamma=best + 1 if speedups[best] >= LEAST_GAIN else 0,
    alpha=alpha,
    c=(0.0, *c.tolist()),
    v=(1.0, *v.tolist()),
    speedups=(1.0, *speedups),
    starts=starts,
  )


def choose_tree(
  acceptance: Sequence[float], costs: Mapping[Tree, Costs], lengths: Sequence[Sequence[int]]
) -> Branching:
  """Choose the tree with the best predicted speed; chains are excluded.

  The candidates are the best trees for each maximum depth up to DEPTH and each number of nodes in
  NODES, up to the largest measured number. The cost v of verification is interpolated linearly,
  from 1 at one node through the measured trees. The time of drafting is a cost per level (one call
  of the draft) plus a cost per draft token (wide levels cost more). Both are fitted by weighted
  least squares. The equation of a tree is divided by v, because its drafting time is the difference
  of two measured times of rounds, and the error of the difference grows with these times.

  Args:
    acceptance: positional acceptance: for each rank, the probability that the child of that rank is
      the accepted one.
    costs: measured costs of trees of different sizes and depths.
    lengths: see `choose`.
  """
  starts = _prefill_steps(next(iter(costs.values())))
  shapes = np.array([(t.depth, t.num_guesses, t.depth * cost.c) for t, cost in costs.items()])
  *shapes, drafting = (shapes / [[cost.v] for cost in costs.values()]).T
  level_cost, token_cost = np.maximum(0.0, np.linalg.lstsq(np.transpose(shapes), drafting)[0])
  sizes, vs = zip(*sorted((tree.num_nodes, cost.v) for tree, cost in costs.items()))
  candidates, nodes = [], [n for n in NODES if n <= sizes[-1]]
  for tree in {theory.best_tree(acceptance, n, d) for n in nodes for d in range(1, DEPTH + 1)}:
    if not tree.is_chain:
      drafting = level_cost * tree.depth + token_cost * tree.num_guesses
      v = float(np.interp(tree.num_nodes, [1, *sizes], [1.0, *vs]))
      rates = theory.tree_rates(tree, acceptance)
      speedup = theory.text_improvement(
        rates, tree.depth, drafting / tree.depth, v, lengths, *starts
      )
      candidates.append(Branching(tree, tuple(acceptance), float(drafting), v, speedup))
  return max(candidates, key=lambda candidate: candidate.speedup)


def _prefill_steps(costs: Costs) -> tuple[float, float]:
  """Return the prefill time of the target and that of the draft, in target steps."""
  return costs.target_start / costs.target_step, costs.draft_start / costs.target_step
