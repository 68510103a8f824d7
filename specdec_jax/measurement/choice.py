"""The gamma and the tree of the best predicted speed, from acceptance and costs (Section 3.5)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax import tree_theory
from specdec_jax.core import theory
from specdec_jax.core.trees import Tree, chain
from specdec_jax.measurement.costs import Costs

LEAST_GAIN = 1.02  # predicted or tried, for speculation to be chosen
NODES, DEPTH = (4, 8, 16, 32, 64), 10  # of trees to choose from


class Branching(NamedTuple):
  """The best tree of those that branch, and why.

  Attributes:
    tree: of the most predicted speed.
    acceptance: how often a node's child of each rank stands.
    drafting: time of guessing the tree, in target steps.
    v: time of a pass over its nodes, likewise.
    speedup: predicted.
    tried: speed over that of what would be chosen else, on the same few texts, if it was tried.
  """

  tree: Tree
  acceptance: tuple[float, ...]
  drafting: float
  v: float
  speedup: float
  tried: float | None = None

  def __str__(self) -> str:
    ranks = ", ".join(f"{chance:.2f}" for chance in self.acceptance[:3])
    tokens = tree_theory.tree_tokens(self.tree, self.acceptance)
    tried = "" if self.tried is None else f"; tried, {self.tried:.2f} times as fast as without it"
    return (
      f"the best tree, {self.tree.num_nodes} nodes of depth {self.tree.depth}, has a predicted "
      f"speedup of {self.speedup:.2f}: {tokens:.2f} tokens a round, drafting {self.drafting:.2f} "
      f"and v {self.v:.2f} steps, children of rank 0, 1, 2 stand {ranks}{tried}"
    )


class Calibration(NamedTuple):
  """A choice of gamma or of a tree, and why.

  Attributes:
    gamma: the choice among chains; 0 for plain decoding.
    alpha: accepted / judged guesses of the texts decoded; with `branching`, how often an eldest
      child stands, so that chains and trees are judged alike.
    c: time of a draft step in target steps, at gamma 0, 1, 2, ... (Definition 7); 0 at gamma 0.
    v: time of a pass over gamma + 1 tokens, likewise; 1 at gamma 0.
    speedups: predicted, likewise; 1 at gamma 0.
    starts: time of the target and of the draft to read a batch's prompts, in target steps.
    tried: speedup of the best draft over plain decoding of the same few texts, if it was tried.
    branching: the best tree that is no chain, if trees were looked at.
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
    """The choice: a tree that was faster than the chain when it was tried, else the chain."""
    best = self.branching
    faster = best is not None and best.tried is not None and best.tried >= LEAST_GAIN
    return best.tree if best is not None and faster else chain(self.gamma)

  @property
  def best_draft(self) -> int:
    """The best gamma of those that speculate."""
    return 1 + int(np.argmax(self.speedups[1:]))

  def round_cost(self, gamma: int) -> float:
    """Time of a round, in target steps."""
    return gamma * self.c[gamma] + self.v[gamma]

  def __str__(self) -> str:
    best = self.best_draft
    speedups = ", ".join(
      f"{self.speedups[gamma]:.2f} at gamma {gamma}"
      for gamma in (best - 1, best, best + 1)
      if 0 < gamma < len(self.speedups)
    )
    chosen = f"gamma {self.gamma}" if self.gamma else "plain decoding, gamma 0,"
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
  """The gamma from 0 to the largest measured with the best speed (`theory.text_improvement`).

  v goes in lines from 1 at gamma 0 through the gammas measured. So does what drafting takes once a
  round and once a guess, on one line through the first and the last of them.

  Args:
    alpha: acceptance rate.
    costs: measured at two gammas or more.
    lengths: tokens of typical texts, for each batch those of its rows.
  """
  measured = sorted(costs)
  gammas = np.arange(1, measured[-1] + 1)
  drafting = [gamma * costs[gamma].c for gamma in (measured[0], measured[-1])]
  slope, fixed = np.polyfit((measured[0], measured[-1]), drafting, 1)
  c = np.maximum(0.0, fixed + slope * gammas) / gammas  # noise can make a difference negative
  v = np.interp(gammas, [0, *measured], [1.0, *(costs[gamma].v for gamma in measured)])
  one = costs[measured[0]]
  starts = one.target_start / one.target_step, one.draft_start / one.target_step
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
  """Of the best tree for each number of nodes, to the most measured, and depth, that of the best
  speed; chains are not among them.

  v goes in lines from 1 at one node through the trees measured. Drafting takes so much a level, as
  it is a call of the draft, and so much a guess, as wide levels take more: found by least squares,
  in which a tree weighs 1 / v, since drafting is what rounds of about that time differ by.

  Args:
    acceptance: how often a node's child of each rank stands.
    costs: measured with trees of different sizes and depths.
    lengths: as in `choose`.
  """
  one = next(iter(costs.values()))
  starts = one.target_start / one.target_step, one.draft_start / one.target_step
  shapes = np.array([(t.depth, t.num_guesses, t.depth * cost.c) for t, cost in costs.items()])
  *shapes, drafting = (shapes / [[cost.v] for cost in costs.values()]).T
  of_level, of_guess = np.maximum(0.0, np.linalg.lstsq(np.transpose(shapes), drafting)[0])
  sizes, vs = zip(*sorted((tree.num_nodes, cost.v) for tree, cost in costs.items()))
  found, nodes = [], [n for n in NODES if n <= sizes[-1]]
  for tree in {tree_theory.best_tree(acceptance, n, d) for n in nodes for d in range(1, DEPTH + 1)}:
    if not tree.is_chain:
      drafting = of_level * tree.depth + of_guess * tree.num_guesses
      v = float(np.interp(tree.num_nodes, [1, *sizes], [1.0, *vs]))
      rates = tree_theory.tree_rates(tree, acceptance)
      speedup = theory.text_improvement(
        rates, tree.depth, drafting / tree.depth, v, lengths, *starts
      )
      found.append(Branching(tree, tuple(acceptance), float(drafting), v, speedup))
  return max(found, key=lambda one: one.speedup)
