"""Closed forms of Section 3, their extension to finite texts and trees, and beam search.

Array arguments are broadcast. gamma is the number of draft tokens per round. c is the time of a
draft step, divided by that of a target step (Definition 7). v (`verify_cost`) is the time of a
target forward pass over gamma + 1 tokens, divided by that of a target step; the paper has v = 1.

Functions for trees take the positional acceptance (Chen et al., Sequoia, 2024). For each rank, that
is the probability that, of the children of an accepted node, the one with that rank is accepted.
The rank of a child is its number of earlier siblings. The probabilities are assumed to be the same
at all nodes, and sum to at most 1. With greedy siblings (`Tree.greedy_siblings`) they depend on the
number of children, and `acceptance` has one sequence for each number of children, from 1.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specdec_jax.core.trees import Tree
from specdec_jax.errors import InputError, require_count

Acceptance = Sequence[float] | Sequence[Sequence[float]]  # see the module docstring


def expected_tokens(alpha, gamma):
  """Return E[tokens per round] = (1 - alpha^(gamma+1)) / (1 - alpha) (Equation 1)."""
  alpha, gamma = _rate(alpha), np.asarray(gamma)
  if not np.all((gamma >= 0) & (gamma % 1 == 0)):
    raise InputError(f"gamma is {gamma}; the number of draft tokens is a whole number, at least 0.")
  # The sum 1 + alpha + ... + alpha^gamma keeps digits that the fraction loses near alpha = 1.
  powers = np.arange(np.max(gamma, initial=0) + 1)
  return np.where(powers <= gamma[..., None], alpha[..., None] ** powers, 0.0).sum(axis=-1)


def operations_factor(alpha, gamma, c_hat):
  """Return the factor by which the number of arithmetic operations increases (Theorem 10).

  The factor is (gamma c_hat + gamma + 1) / E[tokens per round], compared with autoregressive
  decoding. c_hat >= 0 is the draft's number of operations per token divided by the target's.
  """
  c_hat = _cost("c_hat", c_hat)
  return (np.asarray(gamma) * (c_hat + 1) + 1) / expected_tokens(alpha, gamma)


def round_operations(prefix, gamma, num_weights, attention_width):
  """Return the arithmetic operations of a decoder-only target in one round (Section 3.4).

  Its cache holds the keys and values of the prefix without the last token, so it processes this one
  and gamma draft tokens. They attend to prefix, prefix + 1, ..., prefix + gamma tokens.

  Args:
    prefix: number of tokens before the round, at least 1.
    gamma: number of draft tokens.
    num_weights: number of weights that each token is multiplied with.
    attention_width: number of layers times heads times the dimension of a head.
  """
  attended = (gamma + 1) * (prefix + np.asarray(gamma) / 2)
  return 2 * num_weights * (gamma + 1) + 4 * attention_width * attended


def encoder_operations(num_tokens, num_weights, attention_width):
  """Return the arithmetic operations of an encoder, in which every token attends to all tokens.

  With prefix + gamma tokens, they are an upper bound on `round_operations` (Section 3.4). The bound
  holds for one round, not for a text: rejected tokens are computed again (Theorem 10).
  """
  return num_tokens * (2 * num_weights + 4 * attention_width * np.asarray(num_tokens))


def beam_runs(width, draft_width, gamma):
  """Return w + u gamma, the runs of the target in a pass of speculative beam search (Appendix A.4).

  The target runs once for each of the w beams and for each of the u candidates of gamma steps of
  the draft's own beam search, u >= w. A pass makes `expected_tokens` steps if alpha is the
  probability that the w beams of a step are among the draft's u. The speedup is then
  `walltime_improvement`, with the verify cost of a pass over that many tokens.
  """
  return width + draft_width * np.asarray(gamma)


def beam_operations_factor(alpha, gamma, width, draft_width):
  """Return the factor by which the target's operations increase in beam search (Appendix A.4).

  The factor is (w + u gamma) / (w E[steps per pass]), because plain beam search runs the target w
  times per step. For w = u = 1 it is that of Theorem 10 without the draft. See `beam_runs`.
  """
  return beam_runs(width, draft_width, gamma) / (width * expected_tokens(alpha, gamma))


def walltime_improvement(alpha, gamma, c, verify_cost=1.0):
  """Return the speedup, E[tokens per round] / (gamma c + v) (Theorem 8)."""
  # A measured c may be negative because of noise, so it is not checked here.
  return expected_tokens(alpha, gamma) / (np.asarray(gamma) * c + verify_cost)


def oracle_improvement(alpha, c=0.0):
  """Return 1 / (1 - alpha + c alpha), the speedup if an oracle sets gamma (Section 3.5).

  The oracle drafts exactly the tokens that are accepted, alpha / (1 - alpha) per round on average.
  With c = 0 this is the number of tokens per target call, and an upper bound on the speedup for all
  gamma and c if v >= 1. It is infinite at alpha = 1 and c = 0.
  """
  alpha = _rate(alpha)
  with np.errstate(divide="ignore"):
    return 1 / (1 - alpha + _cost("c", c) * alpha)


def best_gamma(
  alpha: float, c: float, verify_cost: float | Callable[[int], float] = 1.0, most: int = 20
) -> int:
  """Return the gamma from 0 to `most` with the largest speedup (Section 3.5).

  At 0, decoding is autoregressive. `verify_cost` may be a function of gamma.
  """
  v = verify_cost if callable(verify_cost) else lambda gamma: verify_cost
  gains = [1.0] + [float(walltime_improvement(alpha, g, c, v(g))) for g in range(1, most + 1)]
  return int(np.argmax(gains))


def _rate(alpha) -> np.ndarray:
  alpha = np.asarray(alpha, float)
  if not np.all((0 <= alpha) & (alpha <= 1)):
    raise InputError(f"alpha is {alpha}; an acceptance rate lies in [0, 1].")
  return alpha


def _cost(name: str, value) -> np.ndarray:
  value = np.asarray(value, float)
  if not np.all(value >= 0):
    raise InputError(f"{name} is {value}; a cost cannot be negative.")
  return value


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

  `alpha` and `gamma` are those of `expected_rounds`. Times are in units of the time of a target
  step.

  Args:
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


def tree_tokens(tree: Tree, acceptance: Acceptance) -> float:
  """Return the expected number of tokens per round with a tree of draft tokens.

  Children whose rank is not in `acceptance`, the positional acceptance, are never accepted.
  """
  return float(_reach_probs(tree, acceptance).sum())


def tree_rates(tree: Tree, acceptance: Acceptance) -> list[float]:
  """Return the acceptance rate at each depth from 1 to D, given acceptance at the depth before.

  For a chain, the rate at every depth is alpha. The arguments are those of `tree_tokens`.
  """
  reached = np.bincount(tree.depths, _reach_probs(tree, acceptance))
  return [float(after / before) if before else 0.0 for before, after in zip(reached, reached[1:])]


def _reach_probs(tree: Tree, acceptance: Acceptance) -> np.ndarray:
  """Return, for each node, the probability that it is on the accepted path; 1 for the root."""
  probs = [1.0]
  for parent, rank in zip(tree.parents, tree.ranks):
    ranks = acceptance_of_siblings(acceptance, tree.num_children[parent])
    probs.append(probs[parent] * (ranks[rank] if rank < len(ranks) else 0.0))
  return np.array(probs)


def acceptance_of_siblings(acceptance: Acceptance, count: int) -> tuple[float, ...]:
  """Return the probability of each of `count` children to be the accepted one."""
  rows: Any = acceptance
  ranks = rows[min(count, len(rows)) - 1] if np.ndim(rows[0]) else rows
  return tuple(ranks[:count])


def best_tree(acceptance: Acceptance, num_nodes: int, depth: int) -> Tree:
  """Return the tree of up to `num_nodes` nodes with the highest expected tokens per round.

  `num_nodes` includes the root; `depth` limits the draft tokens on a path. The tree has greedy
  siblings if `acceptance` depends on the number of children.
  """
  require_count("num_nodes", num_nodes)
  require_count("depth", depth)
  rows = tuple(acceptance_of_siblings(acceptance, k + 1) for k in range(len(acceptance)))
  if not rows or any(min(ranks) < 0 or sum(ranks) > 1 + 1e-6 for ranks in rows):
    raise InputError(f"acceptance is {acceptance}; it must be probabilities of at most 1 together.")
  parents: list[int] = []
  nodes = [(0, _best_subtrees(rows, num_nodes, min(depth, num_nodes - 1))[1][-1])]
  for node, children in nodes:  # grows
    for child in children:
      parents.append(node)
      nodes.append((len(parents), child))
  return Tree(parents, greedy_siblings=np.ndim(acceptance[0]) > 0)


@functools.cache
def _best_subtrees(
  rows: tuple[tuple[float, ...], ...], num_nodes: int, depth: int
) -> tuple[np.ndarray, list[tuple]]:
  """Return the most tokens of a subtree of up to 1, 2, ... nodes, and its shape (Sequoia).

  A shape is a tuple of the shapes of the children of the root.
  """
  single: tuple = ()
  values, shapes = np.ones(num_nodes), [single] * num_nodes
  if not depth:
    return values, shapes
  below, shapes_below = _best_subtrees(rows, num_nodes, depth - 1)
  for ranks in rows:
    # Values and shapes of the first children, with 0, 1, ... nodes together.
    total, forests = np.array([0.0] + [-np.inf] * (num_nodes - 1)), [single] * num_nodes
    for chance in ranks:
      before, forests_before = total.copy(), forests.copy()
      total[0] = -np.inf
      for n in range(1, num_nodes):
        sums = before[:n][::-1] + chance * below[:n]  # with 1, ..., n nodes of the next child
        size = int((sums >= sums.max() - 1e-12).argmax())
        total[n], forests[n] = sums[size], (*forests_before[n - 1 - size], shapes_below[size])
    for n in np.flatnonzero(1 + total >= values - 1e-12):  # if equal, as many children as possible
      values[n], shapes[n] = 1 + total[n], forests[n]
  return values, shapes
