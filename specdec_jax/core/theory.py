"""Closed forms of Section 3: what speculation should give, from alpha, gamma and the costs."""

import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np

from specdec_jax.core.trees import Tree
from specdec_jax.errors import InputError, require_count, require_number


def expected_tokens(alpha, gamma):
  """Tokens a round emits on average, (1 - alpha^(gamma+1)) / (1 - alpha) (Equation 1).

  Args:
    alpha: acceptance rate in [0, 1]; an array broadcasts.
    gamma: guesses a round, >= 0.

  Raises:
    InputError: alpha outside [0, 1], or gamma no whole number from 0.
  """
  alpha, gamma = _rate(alpha), np.asarray(gamma)
  if not np.all((gamma >= 0) & (gamma % 1 == 0)):
    raise InputError(f"gamma is {gamma}; the number of guesses is a whole number, at least 0.")
  # The sum 1 + alpha + ... + alpha^gamma keeps the digits that the fraction loses near alpha = 1.
  powers = np.arange(np.max(gamma, initial=0) + 1)
  return np.where(powers <= gamma[..., None], alpha[..., None] ** powers, 0.0).sum(axis=-1)


def memory_access_factor(alpha, gamma):
  """Factor by which reads of the target's weights and KV cache shrink (Section 3.4).

  A round reads them once, so it is the tokens of a round.
  """
  return expected_tokens(alpha, gamma)


def operations_factor(alpha, gamma, c_hat):
  """Arithmetic operations / plain decoding's, (gamma c_hat + gamma + 1) / E[tokens] (Theorem 10).

  Args:
    alpha: acceptance rate.
    gamma: guesses a round.
    c_hat: operations per token of the draft / of the target, >= 0.
  """
  c_hat = _cost("c_hat", c_hat)
  return (np.asarray(gamma) * (c_hat + 1) + 1) / expected_tokens(alpha, gamma)


def walltime_improvement(alpha, gamma, c, verify_cost=1.0):
  """Speedup over plain decoding, E[tokens] / (gamma c + v) (Theorem 8).

  Args:
    alpha: acceptance rate.
    gamma: guesses a round.
    c: time of a draft step / time of a target step (Definition 7).
    verify_cost: v, time of the target's pass over gamma + 1 tokens / over one. Theorem 8 assumes
      1; measured on real hardware it is more.
  """
  # A measured c may fall below 0 by noise, so it is not checked here.
  return expected_tokens(alpha, gamma) / (np.asarray(gamma) * c + verify_cost)


def improvement_lower_bound(alpha, c):
  """Speedup that the best gamma has at least where alpha > c, (1 + alpha) / (1 + c) (Corollary 9).

  It is gamma = 1's. Where alpha <= c it is at most 1: speculation does not pay.
  """
  return walltime_improvement(alpha, 1, _cost("c", c))


def oracle_improvement(alpha):
  """Tokens a pass of the target emits if gamma is always right, 1 / (1 - alpha) (Section 3.5).

  It bounds the speedup with any gamma and c, and is infinite at alpha = 1.
  """
  with np.errstate(divide="ignore"):
    return 1 / (1 - _rate(alpha))


def break_even_alpha(gamma, c, verify_cost=1.0):
  """Smallest alpha whose `walltime_improvement` is at least 1; NaN where alpha = 1 is not enough.

  Args:
    gamma: guesses a round; an array broadcasts.
    c: time of a draft step, in target steps, >= 0.
    verify_cost: v, time of a pass over gamma + 1 tokens, in target steps, >= 0.
  """
  round_cost = np.asarray(gamma) * _cost("c", c) + _cost("verify_cost", verify_cost)
  low, high = np.zeros(round_cost.shape), np.ones(round_cost.shape)
  for _ in range(60):  # E[tokens] grows with alpha, so halving closes in on the root, to 2^-60
    middle = (low + high) / 2
    pays = expected_tokens(middle, gamma) >= round_cost
    low, high = np.where(pays, low, middle), np.where(pays, middle, high)
  possible = np.where(round_cost <= np.asarray(gamma) + 1, high, np.nan)
  return np.where(round_cost <= 1, 0.0, possible)[()]


def expected_rounds(
  alpha: float | Sequence[float], gamma: int, num_tokens: int | Sequence[int]
) -> float:
  """Rounds that a text of `num_tokens` takes on average, with guesses accepted independently.

  The exact count behind Equation 1, which Theorem 8 replaces by num_tokens / E[tokens] for texts
  that are "long enough": a text ends inside its last round, whose further tokens are lost.

  Args:
    alpha: acceptance rate; or, [gamma], the rate at each depth (`tree_rates`).
    gamma: guesses a round, of a tree its depth.
    num_tokens: of the text; or of each row of a batch, which ends with the last of its rows.
  """
  lengths = np.atleast_1d(num_tokens)
  longest = lengths.max()
  # A round emits k = 1..gamma tokens with probability (1 - alpha) alpha^(k - 1), or gamma + 1.
  reached = np.cumprod([1.0, *np.broadcast_to(alpha, gamma), 0.0])
  emits = reached[:-1] - reached[1:]
  # ended[n, r]: the chance that n tokens take at most r rounds, r < longest.
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
  """Speedup over whole texts: Theorem 8 without its assumption that they are long.

  Args:
    alpha: acceptance rate; or, [gamma], the rate at each depth (`tree_rates`).
    gamma: guesses a round, of a tree its depth.
    c: time of a draft step, of a tree a level, in target steps.
    verify_cost: v, time of a pass over all that is guessed and one more, in target steps.
    lengths: tokens of each text; or of each batch those of its rows.
    target_start: time to read a prompt, in target steps.
    draft_start: time of the draft to read it, in target steps.
  """
  plain = sum(target_start + np.max(n) for n in lengths)
  rounds = sum(expected_rounds(alpha, gamma, n) for n in lengths)
  starts = len(lengths) * (target_start + draft_start)
  return float(plain / (starts + rounds * (gamma * c + verify_cost)))


def best_gamma(
  alpha: float, c: float, verify_cost: float | Callable[[int], float] = 1.0, most: int = 20
) -> int:
  """The gamma in 0..most with the largest speedup (Section 3.5); 0 says: do not speculate.

  `verify_cost` may be a function of gamma.
  """
  v = verify_cost if callable(verify_cost) else lambda gamma: verify_cost
  gains = [1.0] + [float(walltime_improvement(alpha, g, c, v(g))) for g in range(1, most + 1)]
  return int(np.argmax(gains))


# How near two distributions p and q are, each [..., V], over the last axis.


def beta(p, q, lenience: float = 1.0):
  """beta, the chance that a guess from q passes, sum_x min(p / l, q) (Theorem 5; l: A.5).

  Its mean over prefixes of the target's text is alpha (Corollary 6).

  Args:
    p: the target's distribution [..., V].
    q: the draft's [..., V].
    lenience: l in (0, 1]; 1 for exactness.

  Raises:
    InputError: p and q are no distributions over one vocabulary, or lenience is outside (0, 1].
  """
  p, q = _distributions(p, q)
  lenience = require_number("lenience", lenience, 0, 1, "(]", ", with 1 for exactness")
  return np.minimum(p / lenience, q).sum(axis=-1)


def divergence(p, q):
  """D_LK of p, q [..., V], half of sum_x |p - q| (Definition 2); 1 - beta by Lemma 3."""
  p, q = _distributions(p, q)
  return np.abs(p - q).sum(axis=-1) / 2


def rejection_sampling_rate(p, q):
  """Chance that one try of rejection sampling passes, min_x q / p = 1 / M (Appendix A.2).

  What speculative sampling of p, q [..., V] is compared with; never above its beta.
  """
  p, q = _distributions(p, q)
  # A token that p never gives cannot bind the minimum.
  return np.divide(q, p, out=np.full(np.broadcast(p, q).shape, np.inf), where=p > 0).min(axis=-1)


# Arguments that mean something.


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


def _distributions(p, q) -> tuple[np.ndarray, np.ndarray]:
  p, q = np.asarray(p, float), np.asarray(q, float)
  if p.ndim == 0 or p.shape[-1:] != q.shape[-1:]:
    raise InputError(f"p {p.shape} and q {q.shape} must be [..., V] with the same V.")
  for name, probs in (("p", p), ("q", q)):
    # The tolerance is for sums of many float32 probabilities.
    if not (np.all(probs >= 0) and np.allclose(probs.sum(axis=-1), 1, atol=1e-3)):
      raise InputError(f"{name} is no distribution: entries must be at least 0 and sum to 1.")
  return p, q


def tree_tokens(tree: Tree, acceptance: Sequence[float]) -> float:
  """Expected tokens of a round, if a node's child of each rank stands as often everywhere.

  Args:
    tree: of the guesses.
    acceptance: for each rank the probability that, of a node's children, it is the one that stands
      (positional acceptance; Chen et al., Sequoia, 2024); no more ranks than these ever do.
  """
  return float(_reached(tree, acceptance).sum())


def tree_rates(tree: Tree, acceptance: Sequence[float]) -> list[float]:
  """Of rounds whose path came to a depth, the share that goes on, for each depth [D].

  Of a chain that is alpha, gamma times; arguments as `tree_tokens`.
  """
  reached = np.bincount(tree.depths, _reached(tree, acceptance))
  return [float(on / at) if at else 0.0 for at, on in zip(reached, reached[1:])]


def _reached(tree: Tree, acceptance: Sequence[float]) -> np.ndarray:
  """The chance [K] that each node stands; the newest token does, and brings the next one."""
  chances = [1.0]
  for parent, rank in zip(tree.parents, tree.ranks):
    chances.append(chances[parent] * (acceptance[rank] if rank < len(acceptance) else 0.0))
  return np.array(chances)


def best_tree(acceptance: Sequence[float], num_nodes: int, depth: int) -> Tree:
  """The tree of most expected tokens (`tree_tokens`) of so many nodes, no deeper than `depth`.

  As all children of a rank are alike, a node is worth the product of its path's acceptance, and the
  best tree is made of the most worthy nodes: a node is worth no more than its parent, and, where a
  rank stands no more often than the one before, no more than its elder sibling. This finds what
  Sequoia's dynamic program does.

  Raises:
    InputError: num_nodes or depth is no whole number from 1, or acceptance is no probabilities.
  """
  require_count("num_nodes", num_nodes)
  require_count("depth", depth)
  acceptance = np.asarray(acceptance, float)
  if not len(acceptance) or not (0 <= acceptance).all() or acceptance.sum() > 1 + 1e-6:
    raise InputError(f"acceptance is {acceptance}; it must be probabilities of at most 1 together.")
  acceptance = np.minimum.accumulate(acceptance)
  chosen: list[tuple[int, ...]] = []
  open_: list[tuple[float, tuple[int, ...]]] = [(-acceptance[0], (0,))]
  while open_ and len(chosen) < num_nodes - 1:
    worth, path = heapq.heappop(open_)
    chosen.append(path)
    if len(path) < depth:
      heapq.heappush(open_, (worth * acceptance[0], (*path, 0)))
    if path[-1] + 1 < len(acceptance):
      younger = math.prod(acceptance[list(path[:-1])]) * acceptance[path[-1] + 1]
      heapq.heappush(open_, (-younger, (*path[:-1], path[-1] + 1)))
  return Tree.from_paths(chosen)
