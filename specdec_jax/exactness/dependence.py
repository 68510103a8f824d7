"""Tests of joint distributions: whether the tokens of an output are sampled independently.

Given everything earlier, a score of `drift` has mean 0. So its product with the score of any
earlier token has mean 0 too, and a variance that is known once the earlier token is. Sums of such
products are martingales as well. They drift where random numbers are used twice, even if each token
by itself has the distribution that it should have.
"""

import operator
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from specdec_jax.exactness.drift import Drift, Judged

LAGS = range(1, 17)  # tokens between two rounds that are compared

Pairs = dict[str, Drift]  # by what is compared


class Grid(NamedTuple):
  """Scores by row, slot and column, arrays [R, T, C]; all 0 where nothing was sampled.

  Attributes:
    score: with mean 0 given everything earlier. variance: of it.
    largest: bound on the size of a score.
  """

  score: np.ndarray
  variance: np.ndarray
  largest: float


def within_rounds(judged: Judged) -> Pairs:
  """Tokens of the same round: each compared with an earlier one."""
  drafted, sampled = judged.where(_is_guess(judged)), judged.where(judged.next.spread > 0)
  # The first child at each slot, and of these the first guess of each round.
  first_child = drafted.where(drafted.sibling == 0)
  opening = first_child.where(first_child.slot == first_child.start)
  is_bonus = sampled.position < 0
  found: Pairs = {}
  for name in ("rank", "place"):
    of = operator.attrgetter(f"guess.{name}")
    follows = getattr(sampled.next, name), sampled.next.spread, 0.5
    first = _at(opening, of(opening), sampled.row, sampled.start)
    rejected = _at(drafted, of(drafted), sampled.row, sampled.slot)
    last = np.where(is_bonus, _before(drafted, of(drafted), sampled), rejected)
    guesses = of(first_child), first_child.guess.spread, 0.5
    before = _before(first_child, of(first_child), first_child)
    found[f"next token with the round's first guess, by {name}"] = _product(*follows, first, 0.5)
    found[f"next token with the last verified guess, by {name}"] = _product(*follows, last, 0.5)
    found[f"guess with the guess before, by {name}"] = _product(*guesses, before, 0.5)
    found[f"acceptance with its guess, by {name}"] = _product(
      *_acceptance(drafted), of(drafted), 0.5
    )
  before = _before(first_child, _acceptance(first_child)[0], first_child)
  found["acceptance with the acceptance before"] = _product(*_acceptance(first_child), before, 1.0)
  return found


def between_rounds(judged: Judged, lags: range = LAGS) -> Pairs:
  """Tokens of two rounds of the same output that begin `lag` tokens apart, and of two outputs.

  Compared are guesses at the same position of both rounds, their acceptance, the next tokens of
  both rounds, and any two guesses that lie `lag` tokens apart.
  """
  found: Pairs = {}
  grids = dict(_grids(judged))
  for name, grid in grids.items():
    for lag in lags:
      if lag < grid.score.shape[1]:
        later = grid.score[:, lag:], grid.variance[:, lag:], grid.largest
        earlier = grid.score[:, :-lag]
        found[f"{name} {lag} tokens apart"] = _product(*later, earlier, grid.largest)
    later = grid.score[1:], grid.variance[1:], grid.largest
    found[f"{name} of neighbouring outputs"] = _product(*later, grid.score[:-1], grid.largest)
  return found


def _grids(judged: Judged) -> Iterator[tuple[str, Grid]]:
  drafted, sampled = judged.where(_is_guess(judged)), judged.where(judged.next.spread > 0)
  shape = int(judged.row.max() - judged.row.min()) + 1, int(judged.slot.max()) + 1
  rows = lambda part: (part.row - judged.row.min()).astype(int)

  def put(
    part: Judged, slot: np.ndarray, columns: np.ndarray, score: np.ndarray, variance: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    whole = np.zeros((2, *shape, int(columns.max(initial=0)) + 1))
    whole[:, rows(part), slot.astype(int), columns.astype(int)] = score, variance
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


def _is_guess(judged: Judged) -> np.ndarray:
  return judged.position >= 0


def _acceptance(judged: Judged) -> tuple[np.ndarray, np.ndarray, float]:
  a = judged.probability
  return judged.accepted - a, a * (1 - a), 1.0


def _at(judged: Judged, values: np.ndarray, row: np.ndarray, slot: np.ndarray) -> np.ndarray:
  """The last of values [N] of the entries at each (row, slot) [M], or 0 where there is none."""
  if not len(judged.row):
    return np.zeros(len(row))
  first, width = judged.row.min(), int(max(judged.slot.max(), slot.max(initial=0))) + 2
  table = np.zeros((int(max(judged.row.max(), row.max(initial=first)) - first) + 1, width))
  table[(judged.row - first).astype(int), judged.slot.astype(int)] = values
  return table[np.maximum(row - first, 0).astype(int), slot.astype(int)] * (row >= first)


def _before(judged: Judged, values: np.ndarray, later: Judged) -> np.ndarray:
  """Return values [M] at the slot before each of `later`, 0 if another round wrote that slot."""
  return _at(judged, values, later.row, later.slot - 1) * (later.slot > later.start)


def _product(
  score: np.ndarray, variance: np.ndarray, largest: float, earlier: np.ndarray, bound: float
) -> Drift:
  """Sum of scores, each times that of an earlier token."""
  return Drift(
    float((score * earlier).sum()), float((variance * earlier**2).sum()), largest * bound
  )
