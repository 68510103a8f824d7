"""Stochastic speculative execution (end of Section 6): start a slow function on a guessed input.

The input of a slow function g is sampled from a distribution that a slow function f computes. In
speculative decoding, f is one decoding step of the target and g is the next one.
"""

import concurrent.futures
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.errors import InputError


class ExecutionResult(NamedTuple):
  """Result of `speculative_execution`.

  Attributes:
    y: the input of g, sampled from the distribution that f returned.
    output: g(y).
    accepted: whether y is the guess, in which case g ran in parallel with f.
  """

  y: int
  output: Any
  accepted: bool


def speculative_execution(
  f: Callable[[], np.ndarray],
  g: Callable[[int], Any],
  q: np.ndarray,
  rng: np.random.Generator,
) -> ExecutionResult:
  """Sample y from f() and compute g(y). While f runs, g is started on a guess of y.

  The acceptance rule of Algorithm 1 (Appendix A.1) makes y a sample of p = f() for any distribution
  q of the guess. Let F and G be the times of f and g. The call takes max(F, G) if the guess is
  accepted, which has probability beta = sum_y min(p(y), q(y)), and F + G if it is rejected. On
  average it takes beta max(F, G) + (1 - beta) (F + G), compared with F + G without speculation.

  Args:
    f: function that returns p, the distribution of y: an array [V].
    g: function of y in 0..V-1. If the guess is rejected, the call of g on the guess continues in
      the background and its result is dropped, so side effects of g must be harmless.
    q: [V], the distribution of the guess.
    rng: random number generator.

  Raises:
    InputError: q or the result of f is not a distribution, or their lengths differ.
  """
  q = _normalized("q", q)
  guess = int(rng.choice(len(q), p=q))
  pool = concurrent.futures.ThreadPoolExecutor(1)
  try:
    speculative_call = pool.submit(g, guess)
    p = _normalized("the result of f", f())
    if p.shape != q.shape:
      raise InputError(f"f returns a distribution of {len(p)} values and q is one of {len(q)}.")
    if rng.random() * q[guess] < p[guess]:
      return ExecutionResult(guess, speculative_call.result(), accepted=True)
    residual = np.maximum(p - q, 0)
    y = int(rng.choice(len(p), p=residual / residual.sum()))
    return ExecutionResult(y, g(y), accepted=False)
  finally:
    pool.shutdown(wait=False)


def expected_seconds(beta: float, f_seconds: float, g_seconds: float) -> float:
  """Return the mean time of `speculative_execution`, given beta and the times of f and g."""
  return beta * max(f_seconds, g_seconds) + (1 - beta) * (f_seconds + g_seconds)


def _normalized(name: str, probs: np.ndarray) -> np.ndarray:
  """Return `probs` in float64, normalized; raise InputError unless they are one distribution."""
  probs = np.asarray(probs, np.float64)
  if probs.ndim != 1 or not (probs >= 0).all() or not np.isclose(probs.sum(), 1):
    raise InputError(f"{name} is {probs!r:.100}; it must be probabilities [V] that add up to 1.")
  return probs / probs.sum()
