"""Confidence scores for stopping a draft early (Section 6).

On text that the target generated, this module measures how well a draft's own distribution predicts
which tokens are accepted. It also computes the speed of decoding if drafting stops at low
confidence.
"""

from collections.abc import Sequence

import numpy as np
from jax import Array

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.measure.alpha import draft_probs
from specdec_jax.measure.calibrate import Calibration
from specdec_jax.pair import Pair

ENTROPY_FACTOR = 0.2  # the value of AdaEDL (Agrawal et al., 2024)


def certainties(pair: Pair, prompt: Array, decoded: DecodeResult) -> dict[str, list[np.ndarray]]:
  """Return the confidence scores of a draft by name, each as one array [T] per text.

  The scores are the largest probability of q, and AdaEDL's lower bound on acceptance,
  1 - sqrt(0.2 H), where H is the entropy of q. q is the softmax of the draft's logits at
  temperature 1, without top-k or top-p.
  """
  draft = pair.draft.build(Sampling(), chain(1))
  probs = np.asarray(draft_probs(pair, draft, prompt, decoded.tokens), np.float64)
  entropy = -(probs * np.log(np.maximum(probs, 1e-30))).sum(axis=-1)
  scores = {
    "largest probability": probs.max(axis=-1),
    "entropy bound": 1 - np.sqrt(ENTROPY_FACTOR * entropy),
  }
  return {
    name: [row[:length] for row, length in zip(rows, decoded.lengths)]
    for name, rows in scores.items()
  }


def auc(probs: np.ndarray, scores: np.ndarray) -> float:
  """Compute the area under the ROC curve of a score that predicts acceptance.

  It is the probability that an accepted token has a higher score than a rejected one; ties count
  half. 0.5 means that the score has no information.

  Args:
    probs: probability that each token is accepted.
    scores: score of each token.
  """
  _, ranks = np.unique(scores, return_inverse=True)
  accepted, rejected = np.bincount(ranks, probs), np.bincount(ranks, 1 - probs)
  below = np.cumsum(rejected) - rejected / 2
  return float((accepted * below).sum() / (accepted.sum() * rejected.sum()))


def in_a_row(rows: Sequence[np.ndarray], count: int) -> np.ndarray:
  """Return one array with the product of each window of `count` consecutive values of a row."""
  windows = [np.lib.stride_tricks.sliding_window_view(r, count) for r in rows if len(r) >= count]
  return np.concatenate(windows).prod(axis=-1)


def stopped_speedup(
  acceptances: Sequence[np.ndarray],
  confidences: Sequence[np.ndarray],
  calibration: Calibration,
  threshold: float,
  max_gamma: int,
  samples: int = 20,
) -> float:
  """Predict the speedup, at batch size 1, of a draft that stops as `StoppingDraft` does.

  Args:
    acceptances: acceptance probabilities of each text (`oracles.acceptances`).
    confidences: for each text, the largest probability of q at each token (`certainties`).
    calibration: result of `calibrate`, which has the measured costs.
    threshold: lower bound on the product of the confidences in a round; drafting stops below it.
    max_gamma: maximum number of draft tokens per round.
    samples: number of times that acceptance is sampled for each text.
  """
  rng = np.random.default_rng(0)
  costs = [calibration.round_cost(gamma) for gamma in range(max_gamma + 1)]
  speculative = 0.0  # in target steps
  for probs, confidence in zip(acceptances, confidences):
    gammas = [_proposed(confidence[i:], threshold, max_gamma) for i in range(len(probs))]
    for _ in range(samples):
      rejected = np.flatnonzero([*(rng.random(len(probs)) >= probs), True])
      i = 0
      while i < len(probs):
        speculative += costs[gammas[i]]
        i += min(rejected[np.searchsorted(rejected, i)] - i, gammas[i]) + 1
  prefill = len(acceptances) * sum(calibration.starts)
  autoregressive = sum(map(len, acceptances)) + len(acceptances) * calibration.starts[0]
  return float(autoregressive / (prefill + speculative / samples))


def _proposed(confidence: np.ndarray, threshold: float, max_gamma: int) -> int:
  """Return the number of tokens that a round proposes.

  `confidence` has one value per token, from the start of the round to the end of the text. Past the
  end of the text, confidence counts as 1.
  """
  products = np.cumprod([*confidence[: max_gamma - 1], *[1.0] * (max_gamma - 1 - len(confidence))])
  return 1 + int((products >= threshold).sum())
