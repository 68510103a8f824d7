"""Martingale tests of draft tokens, their acceptance, and the tokens that the target samples.

Output is exact if, in every round, each draft token is sampled from the q that its draft reports,
each verified draft token is accepted with the probability of token verification, and the next
token is sampled from the residual distribution or, as a bonus token, from the target's.

Each condition gives scores that have mean 0 and a known bound on their variance, given all earlier
tokens. Sums of such scores, and of products with scores of earlier tokens, are martingales.
Freedman's inequality bounds how far such a sum drifts, for any number of tokens. The products
detect random numbers that are used twice, even if each token alone has the correct distribution
(`within_rounds`, `between_rounds`).
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import optimize, stats

MAX_WEIGHT = 50.0  # largest weight of a draft token in the acceptance test over all rounds
# Largest weight in the test of one setting. It is smaller, because a large weight loosens the
# bound, which pays off only with many draft tokens.
MAX_SETTING_WEIGHT = 10.0
MIN_PROB = 1e-4  # lower bound on probabilities in scores of log-probability
POWER = 0.9  # probability with which an error of a "detectable" size is detected
LAGS = range(1, 17)  # distances, in tokens, between the rounds that are compared


class Scores(NamedTuple):
  """Three scores of each sampled token, in arrays of one shape; 0 where no token was sampled.

  Attributes:
    rank: probability mass of the more probable tokens, plus half of the mass of the equally
      probable ones (including the token itself), minus 1/2.
    place: probability mass of the tokens that are earlier in the vocabulary, plus half of the
      token's own probability, minus 1/2. It follows the uniform random number of an inverse
      transform in vocabulary order, so it detects shared uniforms.
    spread: variance of `place`, and upper bound on the variance of `rank`.
    log: log-probability of the token, clipped below at log MIN_PROB, minus its mean: the most
      powerful score against a small error of the temperature.
    log_variance: variance of `log`.
  """

  rank: Any
  place: Any
  spread: Any
  log: Any
  log_variance: Any


class RoundScores(NamedTuple):
  """Scores of verified draft tokens, and of bonus tokens, in arrays of one shape.

  Attributes:
    row: number of the output.
    slot: slot of the draft token or of the bonus token in the output.
    start: slot at which the round began.
    sibling: number of earlier siblings of the draft token.
    position: position in the round (`round_scores.positions`); -1 for a bonus token.
    accepted: whether the draft token was accepted.
    probability: probability that the draft token is accepted if its earlier siblings were not.
    draft_token: scores under the q that the draft reports.
    next: scores of the token that the target sampled in place of the draft token, or as a bonus
      token; 0 if the draft token was accepted or has a later sibling.
  """

  row: Any
  slot: Any
  start: Any
  sibling: Any
  position: Any
  accepted: Any
  probability: Any
  draft_token: Scores
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


def acceptance_drift(scored: RoundScores, max_weight: float = MAX_WEIGHT) -> Drift:
  """Return the drift of `accepted - probability` over all draft tokens, weighted.

  The most powerful weight against a bias that multiplies the acceptance probability a by a constant
  is 1 / (1 - a), because the variance is a (1 - a). It is limited to `max_weight`.
  """
  a, weight = scored.probability, _weight(scored.probability, max_weight)
  scores = weight * (scored.accepted - a)
  return Drift(float(scores.sum()), float((weight**2 * a * (1 - a)).sum()), max_weight)


# Fields in `Scores` of each kind of score, and the bound on its absolute value.
TOKEN_SCORES = {
  "rank": ("rank", "spread", 0.5),
  "place": ("place", "spread", 0.5),
  "log-probability": ("log", "log_variance", -math.log(MIN_PROB)),
}


def token_drift(scores: Scores, kind: str) -> Drift:
  """Return the drift of the scores of sampled tokens, of a kind in TOKEN_SCORES."""
  score, variance, largest = TOKEN_SCORES[kind]
  return Drift(float(getattr(scores, score).sum()), float(getattr(scores, variance).sum()), largest)


def drifts(scored: RoundScores, count: int) -> dict[str, list[Drift]]:
  """Return the drifts of one setting by name, per position or for all positions.

  `count` is the number of positions in a round (`round_scores.positions`), gamma for a chain. Ranks
  of next tokens have one more drift, for bonus tokens.
  """
  at = [scored.at(i) for i in range(count)]
  return {
    "all acceptance": [acceptance_drift(joined(at), MAX_SETTING_WEIGHT)],
    "acceptance": [acceptance_drift(x, MAX_SETTING_WEIGHT) for x in at],
    "draft tokens": [token_drift(x.draft_token, "rank") for x in at],
    "draft tokens' log-probability": [token_drift(scored.draft_token, "log-probability")],
    "next tokens": [token_drift(x.next, "rank") for x in (*at, scored.at(-1))],
    "next tokens' log-probability": [token_drift(scored.next, "log-probability")],
  }


def detectable_bias(scored: RoundScores, level: float, max_weight: float = MAX_WEIGHT) -> float:
  """Return the smallest bias b of acceptance that `acceptance_drift` detects at `level`.

  With bias b, the acceptance probability is min(1, (1 + b) a) instead of a. The result is infinite
  if the test detects no bias.
  """
  a, weight = scored.probability, _weight(scored.probability, max_weight)
  critical = acceptance_drift(scored, max_weight).critical(level)
  deviations = stats.norm.isf(1 - POWER)

  def beyond(bias: float) -> float:
    biased = np.minimum(1, (1 + bias) * a)
    spread = math.sqrt((weight**2 * biased * (1 - biased)).sum())
    return float((weight * (biased - a)).sum()) - critical - deviations * spread

  return optimize.brentq(beyond, 0, 1e6) if beyond(1e6) > 0 else math.inf


def detectable_temperature(drift: Drift, level: float) -> float:
  """Return the smallest relative error b of the temperature that a test detects.

  A temperature of 1 - b times the correct one multiplies log-probabilities by 1 / (1 - b). To first
  order, this moves the mean of each log-probability score by b / (1 - b) times its variance. The
  result is infinite if all scores have variance 0.
  """
  tilt = detectable_shift(drift, level)
  return tilt / (1 + tilt) if math.isfinite(tilt) else tilt


def detectable_shift(drift: Drift, level: float) -> float:
  """Return the smallest s such that a shift of each mean by s times its variance is detected."""
  if not drift.variance:
    return math.inf
  deviations = stats.norm.isf(1 - POWER)
  return (drift.critical(level) + deviations * math.sqrt(drift.variance)) / drift.variance


def _weight(probability: np.ndarray, max_weight: float) -> np.ndarray:
  return 1 / np.maximum(1 - probability, 1 / max_weight)


# Joint distributions. Each test has the name of the tokens whose scores are multiplied.

_Scored = tuple[np.ndarray, np.ndarray, float]  # scores, their variances, and their bound


def within_rounds(scored: RoundScores) -> dict[str, Drift]:
  """Correlate scores of tokens and of acceptance with earlier scores of the same round."""
  drafted, sampled = scored.where(scored.position >= 0), scored.where(scored.next.spread > 0)
  first_child = drafted.where(drafted.sibling == 0)
  opening = first_child.where(first_child.slot == first_child.start)
  correlations: dict[str, Drift] = {}
  for name in ("rank", "place"):
    of = operator.attrgetter(f"draft_token.{name}")
    follows = getattr(sampled.next, name), sampled.next.spread, 0.5
    first = _at(opening, of(opening), sampled.row, sampled.start)
    rejected = _at(drafted, of(drafted), sampled.row, sampled.slot)
    is_bonus = sampled.position < 0
    last = np.where(is_bonus, _before(drafted, of(drafted), sampled), rejected)
    before = _before(first_child, of(first_child), first_child)
    draft_tokens = of(first_child), first_child.draft_token.spread, 0.5
    for what, later, earlier in (
      ("next token with the round's first draft token", follows, first),
      ("next token with the last verified draft token", follows, last),
      ("draft token with the draft token before", draft_tokens, before),
      ("acceptance with its draft token", _acceptance(drafted), of(drafted)),
    ):
      correlations[f"{what}, by {name}"] = product(later, earlier, 0.5)
  return correlations | _acceptance_of_pairs(drafted)


def _acceptance_of_pairs(drafted: RoundScores) -> dict[str, Drift]:
  """Return the drift of acceptance at each position of a round, given that at an earlier one.

  The weight is the most powerful one if both draft tokens use the same uniform, limited so that no
  score exceeds 1.
  """
  _, round_of = np.unique(np.stack([drafted.row, drafted.start]), axis=1, return_inverse=True)
  count = int(drafted.position.max(initial=-1)) + 1
  table = np.full((2, int(round_of.max(initial=-1)) + 1, count), np.nan)  # NaN: not verified
  table[:, round_of, drafted.position.astype(int)] = drafted.accepted, drafted.probability
  correlations = {}
  for i, j in itertools.combinations(range(count), 2):
    both = table[:, ~np.isnan(table[0, :, [i, j]]).any(axis=0)]
    (before, accepted), (a_before, a) = both[..., [i, j]].swapaxes(1, 2)
    # The probability of the outcome at i, at both places.
    b_before, b = (np.where(before, x, 1 - x) for x in (a_before, a))
    odds = ((1 - x) / np.maximum(x, MIN_PROB) for x in (b_before, b))
    weight = np.minimum(1, np.minimum(*odds)) / np.maximum(1 - b, MIN_PROB)
    weight *= np.where(before, 1, -1)
    drift = Drift(
      float((weight * (accepted - a)).sum()), float((weight**2 * a * (1 - a)).sum()), 1.0
    )
    correlations[f"acceptance of draft token {j + 1} with that of {i + 1}"] = drift
  return correlations


def between_rounds(scored: RoundScores) -> dict[str, Drift]:
  """Correlate scores at a given distance in an output, and scores of neighboring outputs.

  The distance is that between the starts of two rounds, for draft tokens at the same position,
  their acceptance, and next tokens. For any two draft tokens that are first children, it is that
  between their slots. In neighboring outputs (consecutive rows), it is 0.
  """
  correlations: dict[str, Drift] = {}
  for name, score, variance, largest in [*_grids(scored)]:
    for lag in LAGS:
      if lag < score.shape[1]:
        later = score[:, lag:], variance[:, lag:], largest
        correlations[f"{name} {lag} tokens apart"] = product(later, score[:, :-lag], largest)
    later = score[1:], variance[1:], largest
    correlations[f"{name} of neighboring outputs"] = product(later, score[:-1], largest)
  return correlations


def _grids(scored: RoundScores) -> Iterator[tuple[str, np.ndarray, np.ndarray, float]]:
  """Yield name, scores [rows, slots, columns], variances and bound of each kind of scores.

  Arrays are 0 where nothing was sampled. A column is a position in a round, or there is only one.
  """
  drafted, sampled = scored.where(scored.position >= 0), scored.where(scored.next.spread > 0)
  first_child = drafted.where(drafted.sibling == 0)
  shape = int(scored.row.max() - scored.row.min()) + 1, int(scored.slot.max()) + 1

  def put(part: RoundScores, slot: np.ndarray, columns: Any, score: Any, variance: Any) -> Any:
    whole = np.zeros((2, *shape, int(np.max(columns, initial=0)) + 1))
    row = (part.row - scored.row.min()).astype(int)
    whole[:, row, slot.astype(int), np.asarray(columns).astype(int)] = score, variance
    return whole

  for name in ("rank", "place"):
    for what, part, scores, slot, columns in (
      ("draft tokens of rounds", drafted, drafted.draft_token, drafted.slot, drafted.position),
      ("any draft tokens", first_child, first_child.draft_token, first_child.slot, 0),
      ("next tokens of rounds", sampled, sampled.next, sampled.start, 0),
    ):
      yield (
        f"{what}, by {name},",
        *put(part, slot, columns, getattr(scores, name), scores.spread),
        0.5,
      )
  score, variance, largest = _acceptance(drafted)
  yield (
    "acceptance in rounds",
    *put(drafted, drafted.slot, drafted.position, score, variance),
    largest,
  )


def _acceptance(scored: RoundScores) -> _Scored:
  a = scored.probability
  return scored.accepted - a, a * (1 - a), 1.0


def _at(scored: RoundScores, values: np.ndarray, row: np.ndarray, slot: np.ndarray) -> np.ndarray:
  """Return the value of the last draft token at each given row and slot, or 0 if there is none."""
  if not len(scored.row):
    return np.zeros(len(row))
  first, width = scored.row.min(), int(max(scored.slot.max(), slot.max(initial=0))) + 2
  table = np.zeros((int(max(scored.row.max(), row.max(initial=first)) - first) + 1, width))
  table[(scored.row - first).astype(int), scored.slot.astype(int)] = values
  return table[np.maximum(row - first, 0).astype(int), slot.astype(int)] * (row >= first)


def _before(scored: RoundScores, values: np.ndarray, later: RoundScores) -> np.ndarray:
  """Return the value of the draft token before each token of `later`; 0 where a round starts."""
  return _at(scored, values, later.row, later.slot - 1) * (later.slot > later.start)


def product(later: _Scored, earlier: np.ndarray, bound: float) -> Drift:
  """Return the drift of products of scores with earlier values of at most `bound`."""
  score, variance, largest = later
  return Drift(
    float((score * earlier).sum()), float((variance * earlier**2).sum()), largest * bound
  )
