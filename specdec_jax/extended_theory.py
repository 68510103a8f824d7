"""Closed forms beyond the paper's: texts of finite length, and trees of draft tokens.

Functions of trees take positional acceptance: for each rank, the probability that the child of that
rank is the accepted child of its node (Chen et al., Sequoia, 2024). It is assumed to be the same at
all nodes; the probabilities sum to at most 1.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from specdec_jax.core.trees import Tree
from specdec_jax.errors import InputError, require_count


def expected_rounds(
  alpha: float | Sequence[float], gamma: int, num_tokens: int | Sequence[int]
) -> float:
  """Return the expected number of rounds of a text, if draft tokens are accepted independently.

  Theorem 8 uses num_tokens / E[tokens per round], which holds for "long enough" texts. This is the
  exact count: a text ends inside its last round, and further tokens of that round are lost.

  Args:
    alpha: acceptance rate; or, [gamma], the rate at each depth (`tree_rates`).
    gamma: draft tokens per round; the depth of a tree.
    num_tokens: length of the text; or of each row of a batch, which ends with its last row.
  """
  lengths = np.atleast_1d(num_tokens)
  longest = lengths.max()
  # A round emits k = 1..gamma tokens with probability (1 - alpha) alpha^(k - 1), or gamma + 1.
  reached = np.cumprod([1.0, *np.broadcast_to(alpha, gamma), 0.0])
  emits = reached[:-1] - reached[1:]
  # ended[n, r]: probability that n tokens take at most r rounds, r < longest.
  ended = np.zeros((longest + 1, longest))
  ended[0] = 1.0
  for n in range(1, longest + 1):
    most = min(n, gamma + 1)
    in_one = emits[most:].sum()
    ended[n, 1:] = in_one + emits[:most] @ ended[n - most : n, :-1][::-1]
  return float((1 - ended[lengths].prod(axis=0)).sum())


def text_improvement(
  alpha: float | Sequence[float],
  gamma: int,
  c: float,
  verify_cost: float,
  lengths: Sequence[int] | Sequence[Sequence[int]],
  target_start: float = 0.0,
  draft_start: float = 0.0,
) -> float:
  """Return the speedup over whole texts: Theorem 8 without the assumption of long texts.

  Args:
    alpha: see `expected_rounds`.
    gamma: draft tokens per round; the depth of a tree.
    c: time of a draft step (of one level of a tree), in target steps.
    verify_cost: v, in target steps.
    lengths: tokens of each text; or of the rows of each batch.
    target_start: time of the target to process a prompt, in target steps.
    draft_start: time of the draft to process it, in target steps.
  """
  autoregressive = sum(target_start + np.max(n) for n in lengths)
  rounds = sum(expected_rounds(alpha, gamma, n) for n in lengths)
  starts = len(lengths) * (target_start + draft_start)
  return float(autoregressive / (starts + rounds * (gamma * c + verify_cost)))


def tree_tokens(tree: Tree, acceptance: Sequence[float]) -> float:
  """Return the expected number of tokens per round.

  Args:
    tree: tree of draft tokens.
    acceptance: positional acceptance; children of higher ranks are never accepted.
  """
  return float(_reach_probs(tree, acceptance).sum())


def tree_rates(tree: Tree, acceptance: Sequence[float]) -> list[float]:
  """Return, for each depth [D], the acceptance rate of the rounds that reach it.

  For a chain that is alpha at every depth. The arguments are those of `tree_tokens`.
  """
  reached = np.bincount(tree.depths, _reach_probs(tree, acceptance))
  return [float(after / before) if before else 0.0 for before, after in zip(reached, reached[1:])]


def _reach_probs(tree: Tree, acceptance: Sequence[float]) -> np.ndarray:
  """Return the probability [K] that each node is on the accepted path; 1 for the root."""
  probs = [1.0]
  for parent, rank in zip(tree.parents, tree.ranks):
    probs.append(probs[parent] * (acceptance[rank] if rank < len(acceptance) else 0.0))
  return np.array(probs)


def best_tree(acceptance: Sequence[float], num_nodes: int, depth: int) -> Tree:
  """Return the tree with the most expected tokens among trees of a size.

  The value of a node is the product of the acceptance on its path. It is at most the value of its
  parent and, because acceptance decreases with rank, of its earlier sibling. So the best tree
  consists of the nodes of highest value, which a priority queue finds. The result is that of
  Sequoia's dynamic program.

  Args:
    acceptance: positional acceptance.
    num_nodes: number of nodes, including the root.
    depth: most draft tokens on a path.

  Raises:
    InputError: num_nodes or depth is not a positive integer, or acceptance has invalid values.
  """
  require_count("num_nodes", num_nodes)
  require_count("depth", depth)
  acceptance = np.asarray(acceptance, float)
  if not len(acceptance) or not (0 <= acceptance).all() or acceptance.sum() > 1 + 1e-6:
    raise InputError(f"acceptance is {acceptance}; it must be probabilities of at most 1 together.")
  acceptance = np.minimum.accumulate(acceptance)
  chosen: list[tuple[int, ...]] = []
  queue: list[tuple[float, tuple[int, ...]]] = [(-acceptance[0], (0,))]
  while queue and len(chosen) < num_nodes - 1:
    negative_value, path = heapq.heappop(queue)
    chosen.append(path)
    if len(path) < depth:
      heapq.heappush(queue, (negative_value * acceptance[0], (*path, 0)))
    if path[-1] + 1 < len(acceptance):
      sibling = math.prod(acceptance[list(path[:-1])]) * acceptance[path[-1] + 1]
      heapq.heappush(queue, (-sibling, (*path[:-1], path[-1] + 1)))
  return Tree.from_paths(chosen)
