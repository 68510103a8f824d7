"""Closed forms of Section 3: what speculation should give, from alpha, gamma and the costs."""

from collections.abc import Callable, Sequence

import numpy as np

from specdec_jax.errors import InputError


def expected_tokens(alpha, gamma):
  """Tokens a round emits on average, (1 - alpha^(gamma+1)) / (1 - alpha) (Equation 1).

  Args:
    alpha: acceptance rate in [0, 1]; an array broadcasts.
    gamma: guesses a round, >= 0.

  Raises:
    InputError: alpha outside [0, 1] or gamma < 0.
  """
  alpha, gamma = np.asarray(alpha, float), np.asarray(gamma)
  if not np.all((0 <= alpha) & (alpha <= 1)):
    raise InputError(f"alpha is {alpha}; an acceptance rate lies in [0, 1].")
  if np.any(gamma < 0):
    raise InputError(f"gamma is {gamma}; the number of guesses cannot be negative.")
  rejected = np.where(alpha < 1, 1 - alpha, 1.0)
  return np.where(alpha < 1, (1 - alpha ** (gamma + 1.0)) / rejected, gamma + 1.0)[()]


def walltime_improvement(alpha, gamma, c, verify_cost=1.0):
  """Speedup over plain decoding, E[tokens] / (gamma c + v) (Theorem 8).

  Args:
    alpha: acceptance rate.
    gamma: guesses a round.
    c: time of a draft step / time of a target step (Definition 7).
    verify_cost: v, time of the target's pass over gamma + 1 tokens / over one. Theorem 8 assumes
      1; measured on real hardware it is more.
  """
  return expected_tokens(alpha, gamma) / (np.asarray(gamma) * c + verify_cost)


def expected_rounds(alpha: float, gamma: int, num_tokens: int) -> float:
  """Rounds that a text of `num_tokens` takes on average, with guesses accepted independently.

  The exact count behind Equation 1, which Theorem 8 replaces by num_tokens / E[tokens] for texts
  that are "long enough": a text ends inside its last round, whose further tokens are lost.
  """
  # A round emits k = 1..gamma tokens with probability (1 - alpha) alpha^(k - 1), or gamma + 1.
  emits = (1 - alpha) * alpha ** np.arange(gamma + 1)
  emits[gamma] = alpha**gamma
  rounds = np.zeros(num_tokens + 1)
  for n in range(1, num_tokens + 1):
    most = min(n, gamma + 1)
    rounds[n] = 1 + emits[:most] @ rounds[n - most : n][::-1]
  return float(rounds[num_tokens])


def text_improvement(
  alpha: float,
  gamma: int,
  c: float,
  verify_cost: float,
  lengths: Sequence[int],
  target_start: float = 0.0,
  draft_start: float = 0.0,
) -> float:
  """Speedup over whole texts: Theorem 8 without its assumption that they are long.

  Args:
    alpha: acceptance rate.
    gamma: guesses a round.
    c: time of a draft step, in target steps.
    verify_cost: v, time of a pass over gamma + 1 tokens, in target steps.
    lengths: tokens of each text.
    target_start: time to read a prompt, in target steps.
    draft_start: time of the draft to read it, in target steps.
  """
  plain = sum(target_start + n for n in lengths)
  rounds = sum(expected_rounds(alpha, gamma, n) for n in lengths)
  starts = len(lengths) * (target_start + draft_start)
  return plain / (starts + rounds * (gamma * c + verify_cost))


def best_gamma(
  alpha: float, c: float, verify_cost: float | Callable[[int], float] = 1.0, most: int = 20
) -> int:
  """The gamma in 0..most with the largest speedup (Section 3.5); 0 says: do not speculate.

  `verify_cost` may be a function of gamma.
  """
  v = verify_cost if callable(verify_cost) else lambda gamma: verify_cost
  gains = [1.0] + [float(walltime_improvement(alpha, g, c, v(g))) for g in range(1, most + 1)]
  return int(np.argmax(gains))
