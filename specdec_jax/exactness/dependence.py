"""Tests of joint distributions: whether tokens are sampled with independent random numbers.

Given all earlier tokens, each score of `martingale` has mean 0. The product of a score and the
score of an earlier token therefore has mean 0, too, and a bound on its variance is known. Sums of
such products are martingales as well. If random numbers are used twice, these sums drift away from
0, even if each token alone has the correct distribution.
"""

import operator
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from specdec_jax.exactness.martingale import Drift, RoundScores

LAGS = range(1, 17)  # distances, in tokens, between the rounds that are compared

Correlations = dict[str, Drift]  # keys are the names of the compared tokens


class Grid(NamedTuple):
  """Scores of one kind, in arrays [rows, slots, columns]; they are 0 where nothing was sampled.

  A row is an output, and a slot is the index of a token in it. Scores of a guess and of its
  acceptance are at the slot of the guess; the score of a next token is at the slot at which its
  round began. A column is a position of a guess in its round; if a kind of scores does not
  distinguish positions, there is a single column.

  Attributes:
    score: scores with mean 0, given all earlier tokens.
    variance: variances of the scores.
    largest: bound on the absolute value of a score.
  """

  score: np.ndarray
  variance: np.ndarray
  largest: float


def within_rounds(scored: RoundScores) -> Correlations:
  """Correlate scores of tokens and of acceptance with earlier scores of the same round."""
  drafted, sampled = scored.where(_is_guess(scored)), scored.where(scored.next.spread > 0)
  # `first_child` has the first child at each slot, and `opening` the first guess of each round.
  first_child = drafted.where(drafted.sibling == 0)
  opening = first_child.where(first_child.slot == first_child.start)
  is_bonus = sampled.position < 0
  correlations: Correlations = {}
  for name in ("rank", "place"):
    of = operator.attrgetter(f"guess.{name}")
    follows = getattr(sampled.next, name), sampled.next.spread, 0.5
    first = _at(opening, of(opening), sampled.row, sampled.start)
    rejected = _at(drafted, of(drafted), sampled.row, sampled.slot)
    last = np.where(is_bonus, _before(drafted, of(drafted), sampled), rejected)
    guesses = of(first_child), first_child.guess.spread, 0.5
    before = _before(first_child, of(first_child), first_child)
    correlations[f"next token with the round's first guess, by {name}"] = _product(
      *follows, first, 0.5
    )
    correlations[f"next token with the last verified guess, by {name}"] = _product(
      *follows, last, 0.5
    )
    correlations[f"guess with the guess before, by {name}"] = _product(*guesses, before, 0.5)
    correlations[f"acceptance with its guess, by {name}"] = _product(
      *_acceptance(drafted), of(drafted), 0.5
    )
  before = _before(first_child, _acceptance(first_child)[0], first_child)
  correlations["acceptance with the acceptance before"] = _product(
    *_acceptance(first_child), before, 1.0
  )
  return correlations


def between_rounds(scored: RoundScores, lags: range = LAGS) -> Correlations:
  """Correlate scores at a given distance in an output, and scores of neighboring outputs.

  Pairs of scores of four kinds are correlated:

  - guesses at the same position of two rounds, at the distance between the starts of the rounds;
  - the acceptance of such guesses, at the same distance;
  - the next tokens of two rounds, at the distance between the starts of the rounds;
  - any two guesses that are first children, of one round or of two, at the distance between their
    slots.

  In neighboring outputs (consecutive rows), the distance is 0.

  Args:
    scored: scores of one setting.
    lags: distances, in tokens.
  """
  correlations: Correlations = {}
  grids = dict(_grids(scored))
  for name, grid in grids.items():
    for lag in lags:
      if lag < grid.score.shape[1]:
        later = grid.score[:, lag:], grid.variance[:, lag:], grid.largest
        earlier = grid.score[:, :-lag]
        correlations[f"{name} {lag} tokens apart"] = _product(*later, earlier, grid.largest)
    later = grid.score[1:], grid.variance[1:], grid.largest
    correlations[f"{name} of neighboring outputs"] = _product(*later, grid.score[:-1], grid.largest)
  return correlations


def _grids(scored: RoundScores) -> Iterator[tuple[str, Grid]]:
  """Yield the name and the grid of each kind of scores that `between_rounds` correlates."""
  drafted, sampled = scored.where(_is_guess(scored)), scored.where(scored.next.spread > 0)
  shape = int(scored.row.max() - scored.row.min()) + 1, int(scored.slot.max()) + 1

  def put(
    part: RoundScores,
    slot: np.ndarray,
    columns: np.ndarray,
    score: np.ndarray,
    variance: np.ndarray,
  ) -> tuple[np.ndarray, np.ndarray]:
    whole = np.zeros((2, *shape, int(columns.max(initial=0)) + 1))
    row = (part.row - scored.row.min()).astype(int)
    whole[:, row, slot.astype(int), columns.astype(int)] = score, variance
    return whole[0], whole[1]

  for name in ("rank", "place"):
    of_guess = getattr(drafted.guess, name), drafted.guess.spread
    yield (
      f"guesses of rounds, by {name},",
      Grid(*put(drafted, drafted.slot, drafted.position, *of_guess), 0.5),
    )
    first_child = drafted.where(drafted.sibling == 0)
    of_guess = getattr(first_child.guess, name), first_child.guess.spread
    none = np.zeros(len(first_child.row))
    yield (
      f"any guesses, by {name},",
      Grid(*put(first_child, first_child.slot, none, *of_guess), 0.5),
    )
    of_next = getattr(sampled.next, name), sampled.next.spread
    none = np.zeros(len(sampled.row))
    yield (
      f"next tokens of rounds, by {name},",
      Grid(*put(sampled, sampled.start, none, *of_next), 0.5),
    )
  score, variance, largest = _acceptance(drafted)
  yield (
    "acceptance in rounds",
    Grid(*put(drafted, drafted.slot, drafted.position, score, variance), largest),
  )


def _is_guess(scored: RoundScores) -> np.ndarray:
  return scored.position >= 0


def _acceptance(scored: RoundScores) -> tuple[np.ndarray, np.ndarray, float]:
  a = scored.probability
  return scored.accepted - a, a * (1 - a), 1.0


def _at(scored: RoundScores, values: np.ndarray, row: np.ndarray, slot: np.ndarray) -> np.ndarray:
  """Return the value of the last guess at each given row and slot, or 0 if there is no guess.

  `values` has one value for each guess in `scored`.
  """
  if not len(scored.row):
    return np.zeros(len(row))
  first, width = scored.row.min(), int(max(scored.slot.max(), slot.max(initial=0))) + 2
  table = np.zeros((int(max(scored.row.max(), row.max(initial=first)) - first) + 1, width))
  table[(scored.row - first).astype(int), scored.slot.astype(int)] = values
  return table[np.maximum(row - first, 0).astype(int), slot.astype(int)] * (row >= first)


def _before(scored: RoundScores, values: np.ndarray, later: RoundScores) -> np.ndarray:
  """Return the value of the guess one slot before each token of `later`; 0 where a round starts."""
  return _at(scored, values, later.row, later.slot - 1) * (later.slot > later.start)


def _product(
  score: np.ndarray, variance: np.ndarray, largest: float, earlier: np.ndarray, bound: float
) -> Drift:
  """Return the drift of products of scores, each with the score of an earlier token.

  Args:
    score: score of the later token of each product.
    variance: variances of `score`.
    largest: bound on the absolute value of `score`.
    earlier: score of the earlier token of each product.
    bound: bound on the absolute value of the scores in `earlier`.
  """
  return Drift(
    float((score * earlier).sum()), float((variance * earlier**2).sum()), largest * bound
  )
