"""How far what happened in rounds has drifted from its exact laws.

Output is exact if three things hold wherever a guess is judged: it was drawn from the q that its
draft reports, it is accepted with the probability that the rule gives it, and what replaces it if
refused, or follows the last guess, is drawn from what the rule leaves. Each gives a score whose
mean, given all that came before, is 0 and whose variance is known. Sums of such scores are
martingales, and Freedman's inequality bounds how far they drift, for any number of tokens.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

MOST = 50.0  # weight of a guess that is nearly certain to be accepted


class Judged(NamedTuple):
  """What happened to each of N guesses, or at a token without one; arrays [N].

  Attributes:
    position: of the guess in its round, from 0 (`laws.positions`); -1 for a bonus token, which had
      no guess.
    accepted: whether the guess was. probability: of that.
    guess: rank of the guess in q, less its mean. guess_variance: of that.
    next: rank, in what the rule leaves, of the token in place of the guess, less its mean; 0 if the
      guess was accepted or has a younger sibling.
    next_variance: of that.
  """

  position: np.ndarray
  accepted: np.ndarray
  probability: np.ndarray
  guess: np.ndarray
  guess_variance: np.ndarray
  next: np.ndarray
  next_variance: np.ndarray

  def at(self, *positions: int) -> "Judged":
    """What happened at these positions of rounds."""
    return Judged(*(x[np.isin(self.position, positions)] for x in self))


class Drift(NamedTuple):
  """How far a sum of scores has gone from 0, which is its mean.

  Attributes:
    sum: of the scores. variance: sum of their variances. largest: bound on a score.
  """

  sum: float
  variance: float
  largest: float

  @property
  def z(self) -> float:
    """The sum in standard deviations."""
    return self.sum / math.sqrt(self.variance) if self.variance else 0.0

  @property
  def p_value(self) -> float:
    """At least how often exact rounds drift so far, in either direction (Freedman, 1975)."""
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
  """The tokens of all parts."""
  return Judged(*(np.concatenate(x) for x in zip(*parts)))


def of_acceptance(judged: Judged) -> Drift:
  """Accepted guesses less their probabilities, weighted so that a bias shows most.

  Acceptance that is too frequent by a factor adds in proportion to the probability a, against a
  variance a (1 - a): the best weight is 1 / (1 - a), here at most MOST.
  """
  a, weight = judged.probability, _weight(judged.probability)
  scores = weight * (judged.accepted - a)
  return Drift(float(scores.sum()), float((weight**2 * a * (1 - a)).sum()), MOST)


def of_guesses(judged: Judged) -> Drift:
  """Ranks of the guesses in the q that the draft reports."""
  return Drift(float(judged.guess.sum()), float(judged.guess_variance.sum()), 0.5)


def of_next(judged: Judged) -> Drift:
  """Ranks of the tokens that the target drew, in what the rule leaves of p."""
  return Drift(float(judged.next.sum()), float(judged.next_variance.sum()), 0.5)


def drifts(judged: Judged, count: int) -> dict[str, list[Drift]]:
  """Of each of so many positions in a round (a chain has gamma), of all guesses' acceptance, and,
  last among next tokens, of the bonus."""
  at = [judged.at(i) for i in range(count)]
  return {
    "all acceptance": [of_acceptance(joined(at))],
    "acceptance": [of_acceptance(x) for x in at],
    "guesses": [of_guesses(x) for x in at],
    "next tokens": [of_next(x) for x in (*at, judged.at(-1))],
  }


def detectable_bias(judged: Judged, level: float, power: float = 0.9) -> float:
  """Smallest b found with chance `power`, where acceptance is min(1, (1 + b) p / q)."""
  a, weight = judged.probability, _weight(judged.probability)
  critical, deviations = of_acceptance(judged).critical(level), stats.norm.isf(1 - power)

  def beyond(bias: float) -> float:
    biased = np.minimum(1, (1 + bias) * a)
    spread = math.sqrt((weight**2 * biased * (1 - biased)).sum())
    return float((weight * (biased - a)).sum()) - critical - deviations * spread

  return optimize.brentq(beyond, 0, 1e6) if beyond(1e6) > 0 else math.inf


def _weight(probability: np.ndarray) -> np.ndarray:
  return 1 / np.maximum(1 - probability, 1 / MOST)
