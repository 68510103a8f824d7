"""Test stochastic speculative execution: y has the distribution of f, and g runs in parallel."""

import threading

import numpy as np
import pytest

from specdec_jax.contrib.execution import speculative_execution
from specdec_jax.errors import InputError

pytestmark = pytest.mark.slow

P, Q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.3, 0.1, 0.4])


def test_y_has_the_distribution_of_f_for_any_q():
  """Frequencies over 5,000 samples are within five standard deviations of P.

  Accepting every draft token would give the frequencies Q.
  """
  rng, count = np.random.default_rng(0), 5_000
  results = [speculative_execution(lambda: P, lambda y: 10 * y, Q, rng) for _ in range(count)]
  assert all(result.output == 10 * result.y for result in results)
  frequencies = np.bincount([result.y for result in results], minlength=4) / count
  deviations = np.sqrt(P * (1 - P) / count)
  assert (abs(frequencies - P) <= 5 * deviations).all() and abs(frequencies - Q).max() > 0.2
  share = np.mean([result.accepted for result in results])
  assert share == pytest.approx(np.minimum(P, Q).sum(), abs=5 * np.sqrt(0.24 / count))


def test_g_runs_in_parallel_with_f():
  """f waits until g has begun, so the call would fail if g began after f."""
  begun = threading.Event()

  def f():
    assert begun.wait(10)
    return P

  speculative_execution(f, lambda y: begun.set(), Q, np.random.default_rng(0))


def test_exception_of_g_for_a_rejected_draft_token_is_dropped():
  def g(y):
    if y == 3:  # P(3) = 0
      raise ValueError("not possible")
    return y

  rng = np.random.default_rng(0)
  results = [speculative_execution(lambda: P, g, np.eye(4)[3], rng) for _ in range(20)]
  assert not any(result.accepted for result in results) and {
    result.output for result in results
  } <= {0, 1, 2}


@pytest.mark.parametrize(
  "p, q, words",
  [
    (P, [0.5, 0.6], "q is .* add up to 1"),
    ([1.5, -0.5, 0, 0], Q, "the result of f is .* add up to 1"),
    ([0.5, 0.5], Q, "a distribution of 2 values and q is one of 4"),
  ],
)
def test_invalid_distributions_are_reported(p, q, words):
  with pytest.raises(InputError, match=words):
    speculative_execution(lambda: p, lambda y: y, q, np.random.default_rng(0))
