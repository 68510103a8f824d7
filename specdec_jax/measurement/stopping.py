"""When to stop drafting (Section 6): how well a draft's own law foretells which guesses stand, and
the speed of stopping by it, worked out from texts that the target wrote."""

from collections.abc import Sequence

import numpy as np
from jax import Array

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.measurement.alpha import draft_probs
from specdec_jax.measurement.choice import Calibration
from specdec_jax.pairs import Pair

ENTROPY_FACTOR = 0.2  # AdaEDL's (Agrawal et al., 2024)


def certainties(pair: Pair, prompt: Array, decoded: DecodeResult) -> dict[str, list[np.ndarray]]:
  """What a draft says of its guess at each token of each text, [T], before any sampling method.

  The largest probability that it gives, and AdaEDL's bound from its entropy H, 1 - sqrt(0.2 H).
  """
  draft = pair.draft(Sampling(), chain(1))
  probs = np.asarray(draft_probs(pair, draft, prompt, decoded.tokens), np.float64)
  entropy = -(probs * np.log(np.maximum(probs, 1e-30))).sum(axis=-1)
  found = {
    "largest probability": probs.max(axis=-1),
    "entropy bound": 1 - np.sqrt(ENTROPY_FACTOR * entropy),
  }
  of_texts = lambda rows: [row[:n] for row, n in zip(rows, decoded.lengths)]
  return {name: of_texts(rows) for name, rows in found.items()}


def separation(chances: np.ndarray, scores: np.ndarray) -> float:
  """How often, of a guess that stands and one that does not, the former has the higher score.

  A half where scores say nothing. Each guess stands with its chance; ties count half.
  """
  _, places = np.unique(scores, return_inverse=True)
  stood, refused = np.bincount(places, chances), np.bincount(places, 1 - chances)
  below = np.cumsum(refused) - refused / 2
  return float((stood * below).sum() / (stood.sum() * refused.sum()))


def in_a_row(rows: Sequence[np.ndarray], count: int) -> np.ndarray:
  """Products of so many values beside each other, wherever a row has them."""
  windows = [np.lib.stride_tricks.sliding_window_view(r, count) for r in rows if len(r) >= count]
  return np.concatenate(windows).prod(axis=-1)


def stopped_speedup(
  chances: Sequence[np.ndarray],
  sure: Sequence[np.ndarray],
  calibration: Calibration,
  threshold: float,
  most: int,
  samples: int = 20,
) -> float:
  """Speedup of texts decoded one by one with drafts that stop as `StoppingDraft` does.

  Args:
    chances: of each text, that a guess at each token stands (`oracles.acceptances`).
    sure: what the draft says of them, the largest probability.
    calibration: has the costs.
    threshold: a next guess is made while the product of `sure` since the round began is no less.
    most: guesses of a round.
    samples: that are drawn of each text's guesses.
  """
  rng = np.random.default_rng(0)
  costs = [calibration.round_cost(gamma) for gamma in range(most + 1)]
  seconds = 0.0
  for text, its_sure in zip(chances, sure):
    made = [_guesses(its_sure[at:], threshold, most) for at in range(len(text))]
    for _ in range(samples):
      refused = np.flatnonzero([*(rng.random(len(text)) >= text), True])
      at = 0
      while at < len(text):
        seconds += costs[made[at]]
        at += min(refused[np.searchsorted(refused, at)] - at, made[at]) + 1
  starts = len(chances) * sum(calibration.starts)
  plain = sum(map(len, chances)) + len(chances) * calibration.starts[0]
  return float(plain / (starts + seconds / samples))


def _guesses(sure: np.ndarray, threshold: float, most: int) -> int:
  """How many a round makes; past the end of a text, of which nothing is known, all."""
  products = np.cumprod([*sure[: most - 1], *[1.0] * (most - 1 - len(sure))])
  return 1 + int((products >= threshold).sum())
