"""Closed forms of Section 3, held against the paper's own numbers and against simulation."""

import numpy as np
import pytest

from specdec_jax.errors import InputError
from specdec_jax.theory import (
  best_gamma,
  expected_rounds,
  expected_tokens,
  text_improvement,
  walltime_improvement,
)

# The paper's Table 1: alpha, gamma, and the speed it gives for c = 0.
TABLE_1 = [
  (0.6, 2, 1.96),
  (0.7, 3, 2.53),
  (0.8, 2, 2.44),
  (0.8, 5, 3.69),
  (0.9, 2, 2.71),
  (0.9, 10, 6.86),
]


@pytest.mark.parametrize("alpha, gamma, speed", TABLE_1)
def test_table_1(alpha, gamma, speed):
  assert walltime_improvement(alpha, gamma, c=0.0) == pytest.approx(speed, abs=0.0051)
  assert expected_tokens(alpha, gamma) == pytest.approx(speed, abs=0.0051)


@pytest.mark.parametrize("gamma", [0, 1, 2, 7])
def test_expected_tokens_is_the_sum_over_accepted_prefixes(gamma):
  """Equation 1 is 1 + alpha + ... + alpha^gamma, which needs no division at alpha = 1."""
  for alpha in (0.0, 1e-9, 0.3, 0.999, 1 - 1e-12, 1.0):
    series = sum(alpha**i for i in range(gamma + 1))
    assert expected_tokens(alpha, gamma) == pytest.approx(series, rel=1e-4)


def test_edges():
  for gamma in (0, 1, 5):
    assert expected_tokens(0.0, gamma) == 1.0
    assert expected_tokens(1.0, gamma) == gamma + 1
  assert walltime_improvement(1.0, 4, c=0.0) == 5.0
  assert walltime_improvement(0.0, 4, c=0.25) == 0.5  # only the drafting costs
  assert walltime_improvement(0.7, 0, c=0.3) == 1.0  # no guess is plain decoding


def test_measured_verification_divides_the_time_of_a_round():
  tokens = expected_tokens(0.75, 4)
  assert walltime_improvement(0.75, 4, c=0.1, verify_cost=1.6) == pytest.approx(tokens / 2.0)


def test_vectorised():
  alphas, gammas = np.array([[0.0], [0.5], [1.0]]), np.array([1, 2, 6])
  got = walltime_improvement(alphas, gammas, c=0.05, verify_cost=1.2)
  assert got.shape == (3, 3)
  for i, alpha in enumerate(alphas[:, 0]):
    for j, gamma in enumerate(gammas):
      assert got[i, j] == pytest.approx(walltime_improvement(alpha, gamma, 0.05, 1.2))


def test_numbers_in_give_numbers_out():
  assert np.ndim(expected_tokens(0.5, 3)) == 0
  assert f"{expected_tokens(0.5, 3):.3f}" == "1.875"


def test_best_gamma_is_the_best():
  for alpha in (0.3, 0.6, 0.8, 0.95):
    for c in (0.01, 0.05, 0.2):
      gains = {g: walltime_improvement(alpha, g, c) for g in range(21)}
      assert best_gamma(alpha, c) == max(gains, key=gains.get)
  assert best_gamma(1.0, 0.01, most=9) == 9


def test_best_gamma_is_0_where_speculation_does_not_pay():
  """Corollary 9: it pays iff alpha > c."""
  assert best_gamma(0.3, 0.31) == 0
  assert best_gamma(0.3, 0.29) == 1
  assert best_gamma(0.0, 0.0) == 0
  assert best_gamma(0.9, 0.05, verify_cost=10.0) == 0


def test_best_gamma_with_a_verification_that_grows():
  slope = lambda gamma: 1 + 0.3 * gamma
  gains = {g: expected_tokens(0.8, g) / (0.02 * g + slope(g)) for g in range(1, 21)}
  assert best_gamma(0.8, 0.02, slope) == max(gains, key=gains.get) < best_gamma(0.8, 0.02)


@pytest.mark.parametrize("alpha, gamma", [(0.0, 3), (0.5, 4), (0.8, 5), (0.95, 10), (1.0, 2)])
def test_simulated_rounds_agree(alpha, gamma):
  """100,000 rounds of gamma coins; the mean lies within 5 standard errors, or 1 time in 10^6."""
  coins = np.random.default_rng(0).random((100_000, gamma)) < alpha
  tokens = 1 + np.cumprod(coins, axis=1).sum(axis=1)
  error = 5 * tokens.std() / np.sqrt(len(tokens))
  assert abs(tokens.mean() - expected_tokens(alpha, gamma)) <= error
  if 0 < alpha < 1:  # neighbours would be seen
    assert abs(tokens.mean() - expected_tokens(alpha, gamma - 1)) > error
    assert abs(tokens.mean() - expected_tokens(alpha + 0.02, gamma)) > error


# Texts that end.


def test_rounds_of_a_text_at_the_edges():
  for n in (1, 4, 5, 11):
    assert expected_rounds(0.0, 3, n) == n
    assert expected_rounds(0.6, 0, n) == pytest.approx(n)
    assert expected_rounds(1.0, 3, n) == -(-n // 4)
  assert expected_rounds(0.6, 3, 0) == 0


def test_rounds_of_a_short_text_by_hand():
  """3 tokens, gamma 1: two rounds if the first or the second gives 2 tokens, else three."""
  alpha = 0.6
  assert expected_rounds(alpha, 1, 3) == pytest.approx(2 + (1 - alpha) ** 2)


def test_rounds_of_a_long_text_are_equation_1s():
  for alpha, gamma in ((0.3, 2), (0.8, 5)):
    rounds = expected_rounds(alpha, gamma, 5000)
    assert 5000 / rounds == pytest.approx(expected_tokens(alpha, gamma), rel=1e-3)


@pytest.mark.parametrize("alpha, gamma, length", [(0.7, 3, 10), (0.9, 7, 15), (0.4, 2, 4)])
def test_simulated_texts_agree(alpha, gamma, length):
  """20,000 texts; the mean lies within 5 standard errors, or 1 time in 10^6."""
  rng, emitted, rounds = np.random.default_rng(0), np.zeros(20_000, int), np.zeros(20_000)
  while (emitted < length).any():
    rounds += emitted < length
    coins = rng.random((20_000, gamma)) < alpha
    emitted += 1 + np.cumprod(coins, axis=1).sum(axis=1)
  error = 5 * rounds.std() / np.sqrt(len(rounds))
  assert abs(rounds.mean() - expected_rounds(alpha, gamma, length)) <= error
  # What a long text takes is less, by more than the error: the last round is cut.
  assert rounds.mean() - length / expected_tokens(alpha, gamma) > error


def test_improvement_of_long_texts_is_theorem_8s():
  got = text_improvement(0.8, 5, 0.05, 1.3, [5000, 5000])
  assert got == pytest.approx(walltime_improvement(0.8, 5, 0.05, 1.3), rel=1e-3)


def test_improvement_of_texts_is_totals_over_totals():
  """alpha = 1, gamma 3: texts of 4 and 9 tokens take 1 and 3 rounds."""
  plain, ours = (2 + 4) + (2 + 9), 2 * (2 + 0.5) + (1 + 3) * (3 * 0.1 + 1.5)
  assert text_improvement(1.0, 3, 0.1, 1.5, [4, 9], 2, 0.5) == pytest.approx(plain / ours)


# Errors.


@pytest.mark.parametrize("alpha", [-0.01, 1.01, np.array([0.5, 1.5]), float("nan")])
def test_alpha_that_is_no_rate(alpha):
  with pytest.raises(InputError, match="alpha is .*lies in"):
    expected_tokens(alpha, 3)
  with pytest.raises(InputError, match="alpha"):
    walltime_improvement(alpha, 3, 0.1)


def test_gamma_below_0():
  with pytest.raises(InputError, match="gamma is -1"):
    expected_tokens(0.5, -1)
