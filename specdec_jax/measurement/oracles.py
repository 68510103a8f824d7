"""What speed could be reached at most by whoever knows which guesses will stand (Section 3.5)."""

from collections.abc import Sequence

import numpy as np
from jax import Array

from specdec_jax.core.sampling import Sampling, distribution
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.measurement.alpha import draft_probs, teacher_forced_logits
from specdec_jax.measurement.choice import Calibration
from specdec_jax.pairs import Pair


def acceptances(
  pair: Pair, prompt: Array, decoded: DecodeResult, sampling: Sampling
) -> list[np.ndarray]:
  """For each text the chance [T] that its token x came from a guess, if one was judged there.

  It is min(1, q(x) / p(x)): a guess that stands is x with probability min(p(x), q(x)), and x is
  emitted with probability p(x), whatever the gamma. Tokens are independent, given the text.
  """
  logits = teacher_forced_logits(pair.target, pair.target_params, prompt, decoded.tokens)
  guessed = draft_probs(pair, pair.draft(sampling, chain(1)), prompt, decoded.tokens)
  tokens = np.asarray(decoded.tokens)[..., None]
  of_text = lambda x: np.take_along_axis(np.asarray(x), tokens, axis=-1)[..., 0]
  p, q = of_text(distribution(logits, sampling)), of_text(guessed)
  chances = np.minimum(1.0, np.divide(q, p, out=np.zeros_like(p), where=p > 0))
  return [row[:length] for row, length in zip(chances, decoded.lengths)]


def oracles(
  acceptances: Sequence[np.ndarray], calibration: Calibration, samples: int = 20
) -> dict[str, float]:
  """Speedups of texts decoded one by one, with gammas chosen knowing which guesses are accepted.

  Args:
    acceptances: of each text, as the function of this name gives them.
    calibration: has the costs; of the gammas in it the oracles choose, 0 among them.
    samples: that are drawn of each text's guesses.
  """
  rng = np.random.default_rng(0)
  drawn = [rng.random(len(row)) < row for row in acceptances for _ in range(samples)]
  costs = [calibration.round_cost(gamma) for gamma in range(len(calibration.c))]
  of_texts, of_rounds = map(np.array, zip(*(times(stands, costs) for stands in drawn)))
  starts = len(drawn) * sum(calibration.starts)
  plain = sum(map(len, drawn)) + len(drawn) * calibration.starts[0]
  return {
    "oracle of a gamma": float(plain / (starts + of_texts[:, 1:].sum(axis=0).min())),
    "oracle of each text": float(plain / (starts + of_texts.min(axis=1).sum())),
    "oracle of each round": float(plain / (starts + of_rounds.sum())),
  }


def times(stands: np.ndarray, costs: Sequence[float]) -> tuple[np.ndarray, float]:
  """Time of a text's rounds with each gamma, [G + 1], and with the best gamma for each round.

  Args:
    stands: [T], whether a guess at each token is accepted.
    costs: [G + 1], time of a round with gamma 0, 1, ...
  """
  end, each_gamma = len(stands), np.arange(len(costs))
  fixed, best = np.zeros((end + 1, len(costs))), np.zeros(end + 1)  # from each token to the end
  run = 0
  for i in reversed(range(end)):
    run = run + 1 if stands[i] else 0
    after = np.minimum(i + np.minimum(run, each_gamma) + 1, end)
    fixed[i] = costs + fixed[after, each_gamma]
    best[i] = (costs + best[after]).min()
  return fixed[0], float(best[0])
