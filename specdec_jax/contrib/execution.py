"""Stochastic speculative execution of any two functions (end of Section 6)."""

import concurrent.futures
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.errors import InputError


class ExecutionResult(NamedTuple):
  """Result of `speculative_execution`.

  Attributes:
    y: the input of g, sampled from the distribution that f returned.
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
  q of the guess. Let F and G be the times of f and g. On average the call takes
  beta max(F, G) + (1 - beta) (F + G), where beta = sum_y min(p(y), q(y)) is the probability that
  the guess is accepted. Without speculation it takes F + G.

  Args:
    f: function that returns p, the distribution of y: an array [V].
    g: function of y in 0..V-1. If the guess is rejected, the call of g on the guess continues in
      the background and its result is dropped, so side effects of g must be harmless.
    q: [V], the distribution of the guess.
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


def _normalized(name: str, probs: np.ndarray) -> np.ndarray:
  probs = np.asarray(probs, np.float64)
  if probs.ndim != 1 or not (probs >= 0).all() or not np.isclose(probs.sum(), 1):
    raise InputError(f"{name} is {probs!r:.100}; it must be probabilities [V] that add up to 1.")
  return probs / probs.sum()
