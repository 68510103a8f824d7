"""Extensions of the paper's closed forms to texts of finite length and trees of draft tokens.

Functions for trees take the positional acceptance (Chen et al., Sequoia, 2024). For each rank, that
is the probability that, of the children of an accepted node, the one with that rank is accepted.
The rank of a child is its number of earlier siblings. The probabilities are assumed to be the same
at all nodes, and sum to at most 1.
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
  """Return the expected rounds of a text or batch, if draft tokens are accepted independently.

  Theorem 8 uses num_tokens / E[tokens per round], which holds for "long enough" texts. This
  function is exact for any length: a text may end inside its last round, and the other tokens of
  that round are lost.

  Args:
    alpha: acceptance rate; or a sequence of gamma rates, one per depth (`tree_rates`).
    gamma: number of draft tokens per round; for a tree, its depth.
    num_tokens: number of tokens of the text; or, for a batch, of each row. A batch ends when its
      last row ends.
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
  """Return the speedup for texts of given lengths: Theorem 8 without its assumption of long texts.

  Times are in units of the time of a target step.

  Args:
    alpha: see `expected_rounds`.
    gamma: number of draft tokens per round; for a tree, its depth.
    c: time of a draft step; for a tree, time to draft one level.
    verify_cost: v, the time of a target forward pass over the draft tokens, with verification.
    lengths: number of tokens of each text; or, for batches, of each row of each batch.
    target_start: time of the target's prefill, once per text or batch.
    draft_start: time of the draft's prefill, once per text or batch.
  """
  autoregressive = sum(target_start + np.max(n) for n in lengths)
  rounds = sum(expected_rounds(alpha, gamma, n) for n in lengths)
  starts = len(lengths) * (target_start + draft_start)
  return float(autoregressive / (starts + rounds * (gamma * c + verify_cost)))


def tree_tokens(tree: Tree, acceptance: Sequence[float]) -> float:
  """Return the expected number of tokens per round with a tree of draft tokens.

  Args:
    tree: tree of draft tokens.
    acceptance: positional acceptance. Children whose rank is not in it are never accepted.
  """
  return float(_reach_probs(tree, acceptance).sum())


def tree_rates(tree: Tree, acceptance: Sequence[float]) -> list[float]:
  """Return the acceptance rate at each depth from 1 to D, given acceptance at the depth before.

  For a chain, the rate at every depth is alpha. The arguments are those of `tree_tokens`.
  """
  reached = np.bincount(tree.depths, _reach_probs(tree, acceptance))
  return [float(after / before) if before else 0.0 for before, after in zip(reached, reached[1:])]


def _reach_probs(tree: Tree, acceptance: Sequence[float]) -> np.ndarray:
  """Return, for each node, the probability that it is on the accepted path; 1 for the root."""
  probs = [1.0]
  for parent, rank in zip(tree.parents, tree.ranks):
    probs.append(probs[parent] * (acceptance[rank] if rank < len(acceptance) else 0.0))
  return np.array(probs)


def best_tree(acceptance: Sequence[float], num_nodes: int, depth: int) -> Tree:
  """Return the tree of up to `num_nodes` nodes with the highest expected tokens per round.

  If `acceptance` increases with the rank anywhere, it is first replaced by its running minimum. The
  value of a node is the product of the acceptance probabilities on its path. It is at most the
  value of the parent and of each earlier sibling. So the best tree consists of the nodes with the
  highest values, which a priority queue finds. The result equals that of Sequoia's dynamic program.

  Args:
    acceptance: positional acceptance.
    num_nodes: number of nodes, including the root.
    depth: maximum number of draft tokens on a path.

  Raises:
    InputError: num_nodes or depth is not a positive integer, or acceptance is empty or invalid.
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
