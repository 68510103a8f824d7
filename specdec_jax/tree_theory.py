"""Expected tokens of a round with a tree of draft tokens, and the best tree of a size.

All functions take positional acceptance: for each rank, the probability that the child of that rank
is the accepted child of its node (Chen et al., Sequoia, 2024). It is assumed to be the same at all
nodes; the probabilities sum to at most 1.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from specdec_jax.core.trees import Tree
from specdec_jax.errors import InputError, require_count


def tree_tokens(tree: Tree, acceptance: Sequence[float]) -> float:
  """Return the expected number of tokens per round.

  Args:
    tree: tree of draft tokens.
    acceptance: positional acceptance; children of higher ranks are never accepted.
  """
  return float(_reach_probs(tree, acceptance).sum())


def tree_rates(tree: Tree, acceptance: Sequence[float]) -> list[float]:
  """Return, for each depth [D], the share of rounds that accept a token there among those that reach it.

  For a chain that is alpha at every depth. Arguments as in `tree_tokens`.
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
