"""Tests of single tokens: guesses, their acceptance, and the tokens that the target samples.

Output is exact if three things hold wherever a guess is verified: the guess is sampled from the q
that its draft reports, it is accepted with the probability that the verifier gives it, and the token
that replaces a rejected guess, or follows the last guess, is sampled from the distribution that
the verifier leaves. Each gives scores whose mean, given everything earlier, is 0 and whose variance is
known. Sums of such scores are martingales, and Freedman's inequality bounds how far they drift,
for any number of tokens. The joint distribution of several tokens is tested by `dependence`.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import optimize, stats

MOST = 50.0  # weight of a guess that is nearly certain to be accepted, in all rounds together
FEW = 10.0  # the same in one setting: a large weight takes many guesses to be worth its bound
FLOOR = 1e-4  # probabilities below it count as it in scores of log-probability


class Scores(NamedTuple):
  """Three scores of each of N sampled tokens, arrays [N], all 0 where no token was sampled.

  The arrays are of jax where they are computed, and of numpy after that.

  Attributes:
    rank: mass of the more probable tokens, plus half of the token's own, less 1/2.
    place: the same for tokens earlier in the vocabulary. Inverse sampling in that order maps its
      uniform to this score, so shared uniforms show here.
    spread: variance of either.
    log: log-probability, at least log FLOOR, less its mean. It is the derivative of the likelihood
      by the inverse temperature: no other score shows a small error of temperature as clearly.
    log_variance: variance of that.
  """

  rank: Any
  place: Any
  spread: Any
  log: Any
  log_variance: Any


class Judged(NamedTuple):
  """Scores of N verified guesses, and of tokens without a guess; arrays [N].

  Attributes:
    row: number of the output, from 0. slot: of the guess in the output, from 0.
    start: slot at which the round began.
    sibling: number of earlier siblings of the guess.
    position: of the guess in its round, from 0 (`laws.positions`); -1 for a bonus token, which had
      no guess.
    accepted: whether the guess was accepted. probability: of that.
    guess: scores of the guess in the q that its draft reports.
    next: scores of the token that the target sampled in place of the guess, or as bonus.
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

  def where(self, mask: np.ndarray) -> "Judged":
    """The entries that `mask` [N] selects."""
    return jax.tree.map(lambda x: x[mask], self)

  def at(self, *positions: int) -> "Judged":
    """The entries at these positions of rounds."""
    return self.where(np.isin(self.position, positions))


class Drift(NamedTuple):
  """Sum of scores, whose mean is 0.

  Attributes:
    sum: of the scores. variance: sum of their variances. largest: bound on the size of a score.
  """

  sum: float
  variance: float
  largest: float

  def plus(self, other: "Drift") -> "Drift":
    """Both sums together, of scores that do not overlap."""
    return Drift(
      self.sum + other.sum, self.variance + other.variance, max(self.largest, other.largest)
    )

  @property
  def z(self) -> float:
    """The sum in standard deviations."""
    return self.sum / math.sqrt(self.variance) if self.variance else 0.0

  @property
  def p_value(self) -> float:
    """Bound on how often exact rounds drift this far, in either direction (Freedman, 1975)."""
    if not self.sum:
      return 1.0
    bound = self.variance + self.largest * abs(self.sum) / 3
    return min(1.0, 2 * math.exp(-(self.sum**2) / (2 * bound)))

  def critical(self, level: float) -> float:
    """The sum whose p-value is `level`."""
    log = math.log(2 / level)
    third = self.largest * log / 3
    return third + math.sqrt(third**2 + 2 * log * self.variance)


def joined(parts: Sequence[Judged]) -> Judged:
  """The entries of all parts."""
  return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def total(drifts: Iterable[Drift]) -> Drift:
  """One drift of all scores."""
  return functools.reduce(Drift.plus, drifts)


def of_acceptance(judged: Judged, most: float = MOST) -> Drift:
  """Accepted guesses less their probabilities, weighted so that a bias shows most.

  Acceptance that is too frequent by a factor adds in proportion to the probability a, against a
  variance a (1 - a): the best weight is 1 / (1 - a), here at most `most`.
  """
  a, weight = judged.probability, _weight(judged.probability, most)
  scores = weight * (judged.accepted - a)
  return Drift(float(scores.sum()), float((weight**2 * a * (1 - a)).sum()), most)


def of_ranks(scores: Scores) -> Drift:
  """Ranks in the distribution that the tokens should have, the most probable first."""
  return Drift(float(scores.rank.sum()), float(scores.spread.sum()), 0.5)


def of_places(scores: Scores) -> Drift:
  """Ranks in the same distribution, in the order of the vocabulary."""
  return Drift(float(scores.place.sum()), float(scores.spread.sum()), 0.5)


def of_logs(scores: Scores) -> Drift:
  """Log-probabilities in the same distribution."""
  return Drift(float(scores.log.sum()), float(scores.log_variance.sum()), -math.log(FLOOR))


OF_TOKENS: dict[str, Callable[[Scores], Drift]] = {
  "rank": of_ranks,
  "place": of_places,
  "log-probability": of_logs,
}


def drifts(judged: Judged, count: int) -> dict[str, list[Drift]]:
  """Drifts of one setting, whose rounds have `count` positions (gamma of a chain).

  Acceptance, guesses by rank and next tokens by rank have one for each position, next tokens
  another for the bonus; the rest is of all positions together.
  """
  at = [judged.at(i) for i in range(count)]
  return {
    "all acceptance": [of_acceptance(joined(at), FEW)],
    "acceptance": [of_acceptance(x, FEW) for x in at],
    "guesses": [of_ranks(x.guess) for x in at],
    "guesses' log-probability": [of_logs(judged.guess)],
    "next tokens": [of_ranks(x.next) for x in (*at, judged.at(-1))],
    "next tokens' log-probability": [of_logs(judged.next)],
  }


def detectable_bias(judged: Judged, level: float, power: float = 0.9, most: float = MOST) -> float:
  """Smallest b found with chance `power`, where acceptance is min(1, (1 + b) p / q)."""
  a, weight = judged.probability, _weight(judged.probability, most)
  critical, deviations = of_acceptance(judged, most).critical(level), stats.norm.isf(1 - power)

  def beyond(bias: float) -> float:
    biased = np.minimum(1, (1 + bias) * a)
    spread = math.sqrt((weight**2 * biased * (1 - biased)).sum())
    return float((weight * (biased - a)).sum()) - critical - deviations * spread

  return optimize.brentq(beyond, 0, 1e6) if beyond(1e6) > 0 else math.inf


def detectable_temperature(scores: Scores, level: float, power: float = 0.9) -> float:
  """Smallest b found with chance `power`, where tokens are sampled at 1 - b of their temperature.

  That multiplies log-probabilities by 1 / (1 - b), which moves the mean of each score by
  b / (1 - b) times its variance, to first order in b, and more where the score is cut off at
  log FLOOR.
  """
  drift, deviations = of_logs(scores), stats.norm.isf(1 - power)
  if not drift.variance:
    return math.inf
  tilt = (drift.critical(level) + deviations * math.sqrt(drift.variance)) / drift.variance
  return tilt / (1 + tilt)


def _weight(probability: np.ndarray, most: float) -> np.ndarray:
  return 1 / np.maximum(1 - probability, 1 / most)
