"""Stochastic speculative execution: y is distributed as f says, and g runs beside f."""

import threading

import numpy as np
import pytest

from specdec_jax.core.theory import beta
from specdec_jax.errors import InputError
from specdec_jax.execution import expected_seconds, speculative_execution

P, Q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.3, 0.1, 0.4])


def test_y_is_distributed_as_f_says_whatever_q_is():
  """5,000 draws: each frequency within five standard deviations; always keeping would be Q."""
  rng, count = np.random.default_rng(0), 5_000
  made = [speculative_execution(lambda: P, lambda y: 10 * y, Q, rng) for _ in range(count)]
  assert all(one.output == 10 * one.y for one in made)
  frequencies = np.bincount([one.y for one in made], minlength=4) / count
  deviations = np.sqrt(P * (1 - P) / count)
  assert (abs(frequencies - P) <= 5 * deviations).all() and abs(frequencies - Q).max() > 0.2
  kept = np.mean([one.kept for one in made])
  assert kept == pytest.approx(float(beta(P, Q)), abs=5 * np.sqrt(0.24 / count))


def test_g_runs_beside_f():
  """f ends only when g has begun: in turn, neither would end."""
  begun = threading.Event()

  def f():
    assert begun.wait(10)
    return P

  speculative_execution(f, lambda y: begun.set(), Q, np.random.default_rng(0))


def test_what_a_refused_guess_did_is_not_heard():
  def g(y):
    if y == 3:  # which f never says
      raise ValueError("not possible")
    return y

  rng = np.random.default_rng(0)
  made = [speculative_execution(lambda: P, g, np.eye(4)[3], rng) for _ in range(20)]
  assert not any(one.kept for one in made) and {one.output for one in made} <= {0, 1, 2}


def test_its_time_lies_between_both_beside_each_other_and_both_in_turn():
  assert expected_seconds(1.0, 3.0, 2.0) == 3.0 and expected_seconds(0.0, 3.0, 2.0) == 5.0
  assert expected_seconds(0.6, 3.0, 2.0) == pytest.approx(3.0 + 0.4 * 2.0)  # max(F, G) + (1 - b) G


@pytest.mark.parametrize(
  "p, q, words",
  [
    (P, [0.5, 0.6], "q is .* add up to 1"),
    ([1.5, -0.5, 0, 0], Q, "what f gives is .* add up to 1"),
    ([0.5, 0.5], Q, "a law of 2 values and q is one of 4"),
  ],
)
def test_laws_that_are_none(p, q, words):
  with pytest.raises(InputError, match=words):
    speculative_execution(lambda: p, lambda y: y, q, np.random.default_rng(0))
