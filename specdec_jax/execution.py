"""Stochastic speculative execution (Section 6, end): a slow g starts on a guess of what a slow f
will say. Speculative decoding is the case where f is a target's step and g the one after it.
"""

import concurrent.futures
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.errors import InputError


class Executed(NamedTuple):
  """What came of it.

  Attributes:
    y: drawn from what f said.
    output: of g for it.
    kept: whether it is the guess, so that g ran beside f.
  """

  y: int
  output: Any
  kept: bool


def speculative_execution(
  f: Callable[[], np.ndarray],
  g: Callable[[int], Any],
  q: np.ndarray,
  rng: np.random.Generator,
) -> Executed:
  """g(y) with y ~ f(), where g starts at once, beside f, on a guess from q.

  y is distributed as f says whatever q is, by the rule of Algorithm 1 (Appendix A.1). With F and G
  the times of f and g, it takes max(F, G) where the guess is kept, as it is with probability
  beta = sum_y min(p(y), q(y)), and F + G where not, when g's first run is left to end unheard:
  beta max(F, G) + (1 - beta) (F + G) on average, against F + G.

  Args:
    f: gives p, the law of y [V].
    g: of y in 0..V-1; what it does for a guess that is not kept must not matter.
    q: the law of the guess [V].
    rng: draws the guess, the verdict and the other y.

  Raises:
    InputError: q, or what f gives, is no distribution, or they differ in length.
  """
  q = _distribution("q", q)
  guess = int(rng.choice(len(q), p=q))
  pool = concurrent.futures.ThreadPoolExecutor(1)
  try:
    early = pool.submit(g, guess)
    p = _distribution("what f gives", f())
    if p.shape != q.shape:
      raise InputError(f"f gives a law of {len(p)} values and q is one of {len(q)}.")
    if rng.random() * q[guess] < p[guess]:
      return Executed(guess, early.result(), True)
    residual = np.maximum(p - q, 0)
    y = int(rng.choice(len(p), p=residual / residual.sum()))
    return Executed(y, g(y), False)
  finally:
    pool.shutdown(wait=False)


def expected_seconds(beta: float, f_seconds: float, g_seconds: float) -> float:
  """Time of `speculative_execution` on average."""
  return beta * max(f_seconds, g_seconds) + (1 - beta) * (f_seconds + g_seconds)


def _distribution(name: str, law: np.ndarray) -> np.ndarray:
  law = np.asarray(law, np.float64)
  if law.ndim != 1 or not (law >= 0).all() or not np.isclose(law.sum(), 1):
    raise InputError(f"{name} is {law!r:.100}; it must be probabilities [V] that add up to 1.")
  return law / law.sum()
