"""Tests of single tokens: guesses, their acceptance, and the tokens that the target samples.

Output is exact if three conditions hold in every round:

- Each guess is sampled from the q that its draft reports.
- Each verified guess is accepted with the probability that token verification prescribes.
- The token that replaces rejected guesses is sampled from the residual distribution, and a bonus
  token is sampled from the target's distribution.

Each condition gives scores that have mean 0 and a known bound on their variance, given all earlier
tokens. Sums of such scores are martingales. Freedman's inequality bounds how far such a sum drifts,
for any number of tokens. The joint distribution of several tokens is tested by `dependence`.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import optimize, stats

MAX_WEIGHT = 50.0  # largest weight of a guess in the acceptance test over all rounds
# Largest weight in the test of one setting. It is smaller, because a large weight loosens the
# bound, which pays off only with many guesses.
MAX_SETTING_WEIGHT = 10.0
MIN_PROB = 1e-4  # lower bound on probabilities in scores of log-probability


class Scores(NamedTuple):
  """Three scores of each sampled token, in arrays of one shape; 0 where no token was sampled.

  The scores are computed as jax arrays and then converted to numpy.

  Attributes:
    rank: probability mass of the more probable tokens, plus half of the mass of the equally
      probable ones (including the token itself), minus 1/2.
    place: probability mass of the tokens that are earlier in the vocabulary, plus half of the
      token's own probability, minus 1/2. If tokens are sampled by inverse transform in vocabulary
      order, this score follows the uniform random number, so it detects shared uniforms.
    spread: variance of `place`, which is also the variance of `rank` unless several tokens have
      equal probabilities; the variance of `rank` is then smaller.
    log: log-probability of the token, clipped below at log MIN_PROB, minus its mean. Apart from the
      clipping, it is proportional to the derivative of the log-likelihood with respect to the
      inverse temperature. It is therefore the most powerful score against a small error of the
      temperature.
    log_variance: variance of `log`.
  """

  rank: Any
  place: Any
  spread: Any
  log: Any
  log_variance: Any


class RoundScores(NamedTuple):
  """Scores of verified guesses, and of bonus tokens, which have no guess; in arrays of one shape.

  Attributes:
    row: number of the output, from 0.
    slot: slot of the guess or of the bonus token in the output, from 0.
    start: slot at which the round began.
    sibling: number of earlier siblings of the guess.
    position: position of the guess in its round, from 0 (`round_scores.positions`); -1 for a bonus
      token.
    accepted: whether the guess was accepted.
    probability: probability that the guess is accepted, given that its earlier siblings were not.
    guess: scores of the guess under the q that its draft reports.
    next: scores of the token that the target sampled in place of the guess, or as a bonus token;
      0 if the guess was accepted or has a later sibling.
  """

  row: Any
  slot: Any
  start: Any
  sibling: Any
  position: Any
  accepted: Any
  probability: Any
  guess: Scores
  next: Scores

  def where(self, mask: np.ndarray) -> "RoundScores":
    """Return the scores at which `mask` is True."""
    return jax.tree.map(lambda x: x[mask], self)

  def at(self, *positions: int) -> "RoundScores":
    """Return the scores of the tokens at the given positions in their rounds."""
    return self.where(np.isin(self.position, positions))


class Drift(NamedTuple):
  """Sum of scores, which has mean 0 if decoding is exact.

  Attributes:
    sum: sum of the scores.
    variance: sum of the variances of the scores, or of upper bounds on them.
    largest: bound on the absolute value of a score.
  """

  sum: float
  variance: float
  largest: float

  def plus(self, other: "Drift") -> "Drift":
    """Return the drift of the union of two disjoint sets of scores."""
    return Drift(
      self.sum + other.sum, self.variance + other.variance, max(self.largest, other.largest)
    )

  @property
  def z(self) -> float:
    """Sum of the scores, divided by its standard deviation; 0 if the variance is 0."""
    return self.sum / math.sqrt(self.variance) if self.variance else 0.0

  @property
  def p_value(self) -> float:
    """Bound on the probability of a sum at least this far from 0 if decoding is exact."""
    if not self.sum:
      return 1.0
    bound = self.variance + self.largest * abs(self.sum) / 3
    return min(1.0, 2 * math.exp(-(self.sum**2) / (2 * bound)))

  def critical(self, level: float) -> float:
    """Return the critical value of the sum of the scores at significance level `level`."""
    log = math.log(2 / level)
    third = self.largest * log / 3
    return third + math.sqrt(third**2 + 2 * log * self.variance)


def joined(parts: Sequence[RoundScores]) -> RoundScores:
  """Concatenate several sets of scores."""
  return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def total(drifts: Iterable[Drift]) -> Drift:
  """Return the drift of the union of several disjoint sets of scores, given the drift of each."""
  return functools.reduce(Drift.plus, drifts)


def acceptance_drift(scored: RoundScores, max_weight: float = MAX_WEIGHT) -> Drift:
  """Return the drift of `accepted - probability` over all guesses, with a weight for each guess.

  Let `a` be the acceptance probability of a guess. A bias that multiplies `a` by a constant shifts
  the mean of the difference in proportion to `a`, and the variance of the difference is a (1 - a).
  The most powerful weight is therefore 1 / (1 - a). It is limited to `max_weight`.
  """
  a, weight = scored.probability, _weight(scored.probability, max_weight)
  scores = weight * (scored.accepted - a)
  return Drift(float(scores.sum()), float((weight**2 * a * (1 - a)).sum()), max_weight)


def rank_drift(scores: Scores) -> Drift:
  """Return the drift of the rank scores of sampled tokens."""
  return Drift(float(scores.rank.sum()), float(scores.spread.sum()), 0.5)


def place_drift(scores: Scores) -> Drift:
  """Return the drift of the place scores of sampled tokens."""
  return Drift(float(scores.place.sum()), float(scores.spread.sum()), 0.5)


def log_drift(scores: Scores) -> Drift:
  """Return the drift of the log-probability scores of sampled tokens."""
  return Drift(float(scores.log.sum()), float(scores.log_variance.sum()), -math.log(MIN_PROB))


TOKEN_DRIFTS: dict[str, Callable[[Scores], Drift]] = {
  "rank": rank_drift,
  "place": place_drift,
  "log-probability": log_drift,
}


def drifts(scored: RoundScores, count: int) -> dict[str, list[Drift]]:
  """Return the drifts of one setting by name.

  Acceptance, ranks of guesses and ranks of next tokens have one drift per position. Ranks of next
  tokens have one more drift, for bonus tokens. Each of the other lists has a single drift, which
  covers all positions.

  Args:
    scored: scores of the setting.
    count: number of positions in a round (`round_scores.positions`); for a chain, it is gamma.
  """
  at = [scored.at(i) for i in range(count)]
  return {
    "all acceptance": [acceptance_drift(joined(at), MAX_SETTING_WEIGHT)],
    "acceptance": [acceptance_drift(x, MAX_SETTING_WEIGHT) for x in at],
    "guesses": [rank_drift(x.guess) for x in at],
    "guesses' log-probability": [log_drift(scored.guess)],
    "next tokens": [rank_drift(x.next) for x in (*at, scored.at(-1))],
    "next tokens' log-probability": [log_drift(scored.next)],
  }


def detectable_bias(
  scored: RoundScores, level: float, power: float = 0.9, max_weight: float = MAX_WEIGHT
) -> float:
  """Return the smallest bias b of acceptance that the test detects with probability `power`.

  The test is that of `acceptance_drift` at significance level `level`. With bias b, a guess with
  acceptance probability a is accepted with probability min(1, (1 + b) a) instead. The result is
  infinite if the test detects no bias.
  """
  a, weight = scored.probability, _weight(scored.probability, max_weight)
  critical, deviations = (
    acceptance_drift(scored, max_weight).critical(level),
    stats.norm.isf(1 - power),
  )

  def beyond(bias: float) -> float:
    biased = np.minimum(1, (1 + bias) * a)
    spread = math.sqrt((weight**2 * biased * (1 - biased)).sum())
    return float((weight * (biased - a)).sum()) - critical - deviations * spread

  return optimize.brentq(beyond, 0, 1e6) if beyond(1e6) > 0 else math.inf


def detectable_temperature(scores: Scores, level: float, power: float = 0.9) -> float:
  """Return the smallest relative error b of the temperature that the test detects.

  The test is that of `log_drift` at significance level `level`. It detects a temperature of 1 - b
  times the correct one with probability `power`. Such a temperature multiplies log-probabilities by
  1 / (1 - b). To first order in b, this moves the mean of each score by b / (1 - b) times the
  variance of the score, and by more if the score is clipped at log MIN_PROB. The result is infinite
  if all scores have variance 0.
  """
  drift, deviations = log_drift(scores), stats.norm.isf(1 - power)
  if not drift.variance:
    return math.inf
  tilt = (drift.critical(level) + deviations * math.sqrt(drift.variance)) / drift.variance
  return tilt / (1 + tilt)


def _weight(probability: np.ndarray, max_weight: float) -> np.ndarray:
  return 1 / np.maximum(1 - probability, 1 / max_weight)
