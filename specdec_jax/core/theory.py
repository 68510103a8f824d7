"""Closed forms of Section 3: expected tokens and speedup, given alpha, gamma and costs.

Arrays broadcast. gamma is the number of draft tokens per round, c the time of a draft step divided by
that of a target step (Definition 7), and v (`verify_cost`) the time of a target forward pass over
gamma + 1 tokens divided by that of a target step, which the paper takes as 1.
"""

from collections.abc import Callable, Sequence

import numpy as np

from specdec_jax.errors import InputError, require_number


def expected_tokens(alpha, gamma):
  """Return E[tokens per round] = (1 - alpha^(gamma+1)) / (1 - alpha) (Equation 1).

  Args:
    alpha: acceptance rate in [0, 1].
    gamma: draft tokens per round, at least 0.

  Raises:
    InputError: alpha is outside [0, 1], or gamma is not a whole number from 0.
  """
  alpha, gamma = _rate(alpha), np.asarray(gamma)
  if not np.all((gamma >= 0) & (gamma % 1 == 0)):
    raise InputError(f"gamma is {gamma}; the number of guesses is a whole number, at least 0.")
  # The sum 1 + alpha + ... + alpha^gamma keeps digits that the fraction loses near alpha = 1.
  powers = np.arange(np.max(gamma, initial=0) + 1)
  return np.where(powers <= gamma[..., None], alpha[..., None] ** powers, 0.0).sum(axis=-1)


def memory_access_factor(alpha, gamma):
  """Return the factor by which reads of the target's weights and KV cache shrink (Section 3.4).

  One round reads them once, so it is the expected number of tokens per round.
  """
  return expected_tokens(alpha, gamma)


def operations_factor(alpha, gamma, c_hat):
  """Return arithmetic operations relative to autoregressive decoding (Theorem 10).

  (gamma c_hat + gamma + 1) / E[tokens per round], where c_hat >= 0 is the number of operations per
  token of the draft divided by that of the target.
  """
  c_hat = _cost("c_hat", c_hat)
  return (np.asarray(gamma) * (c_hat + 1) + 1) / expected_tokens(alpha, gamma)


def walltime_improvement(alpha, gamma, c, verify_cost=1.0):
  """Return the speedup over autoregressive decoding, E[tokens per round] / (gamma c + v) (Theorem 8)."""
  # A measured c may be negative because of noise, so it is not checked here.
  return expected_tokens(alpha, gamma) / (np.asarray(gamma) * c + verify_cost)


def improvement_lower_bound(alpha, c):
  """Return the speedup that the best gamma reaches at least if alpha > c (Corollary 9).

  (1 + alpha) / (1 + c), the speedup with gamma = 1. If alpha <= c, it is at most 1.
  """
  return walltime_improvement(alpha, 1, _cost("c", c))


def oracle_improvement(alpha):
  """Return the tokens per target forward pass with the perfect gamma, 1 / (1 - alpha) (Section 3.5).

  It bounds the speedup for all gamma and c, and is infinite at alpha = 1.
  """
  with np.errstate(divide="ignore"):
    return 1 / (1 - _rate(alpha))


def break_even_alpha(gamma, c, verify_cost=1.0):
  """Return the smallest alpha with a speedup of at least 1; NaN if alpha = 1 does not suffice."""
  round_cost = np.asarray(gamma) * _cost("c", c) + _cost("verify_cost", verify_cost)
  low, high = np.zeros(round_cost.shape), np.ones(round_cost.shape)
  for _ in range(60):  # bisection to 2^-60: E[tokens] increases with alpha
    middle = (low + high) / 2
    pays = expected_tokens(middle, gamma) >= round_cost
    low, high = np.where(pays, low, middle), np.where(pays, middle, high)
  possible = np.where(round_cost <= np.asarray(gamma) + 1, high, np.nan)
  return np.where(round_cost <= 1, 0.0, possible)[()]


def expected_rounds(
  alpha: float | Sequence[float], gamma: int, num_tokens: int | Sequence[int]
) -> float:
  """Return the expected number of rounds of a text, if draft tokens are accepted independently.

  Theorem 8 uses num_tokens / E[tokens per round], which holds for "long enough" texts. This is the
  exact count: a text ends inside its last round, and further tokens of that round are lost.

  Args:
    alpha: acceptance rate; or, [gamma], the rate at each depth (`tree_theory.tree_rates`).
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
    alpha: as in `expected_rounds`.
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


def best_gamma(
  alpha: float, c: float, verify_cost: float | Callable[[int], float] = 1.0, most: int = 20
) -> int:
  """Return the gamma in 0..most with the largest speedup (Section 3.5); 0 means no speculation.

  `verify_cost` may be a function of gamma.
  """
  v = verify_cost if callable(verify_cost) else lambda gamma: verify_cost
  gains = [1.0] + [float(walltime_improvement(alpha, g, c, v(g))) for g in range(1, most + 1)]
  return int(np.argmax(gains))


def beta(p, q, lenience: float = 1.0):
  """Return beta, the probability that a draft token is accepted: sum_x min(p / l, q) (Theorem 5).

  alpha is its mean over prefixes of text generated by the target (Corollary 6).

  Args:
    p: distribution of the target [..., V].
    q: distribution of the draft [..., V].
    lenience: l in (0, 1] (Appendix A.5); 1 is exact.

  Raises:
    InputError: p and q are not distributions over one vocabulary, or lenience is outside (0, 1].
  """
  p, q = _distributions(p, q)
  lenience = require_number("lenience", lenience, 0, 1, "(]", ", with 1 for exactness")
  return np.minimum(p / lenience, q).sum(axis=-1)


def divergence(p, q):
  """Return D_LK(p, q) = sum_x |p - q| / 2 (Definition 2), which is 1 - beta (Lemma 3)."""
  p, q = _distributions(p, q)
  return np.abs(p - q).sum(axis=-1) / 2


def rejection_sampling_rate(p, q):
  """Return the acceptance probability of rejection sampling, min_x q / p (Appendix A.2).

  It never exceeds beta of speculative sampling.
  """
  p, q = _distributions(p, q)
  # Tokens with p = 0 do not constrain the minimum.
  return np.divide(q, p, out=np.full(np.broadcast(p, q).shape, np.inf), where=p > 0).min(axis=-1)


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
