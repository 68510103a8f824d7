"""Oracles that know which draft tokens are accepted, and choose the best gamma (Section 3.5).

An oracle chooses gamma once for all texts, for each text, or for each round. Its speed is an upper
bound on the speed of the policies that choose gamma equally often.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.core.arrays import gather_token
from specdec_jax.core.sampling import Sampling, distribution
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.measure.alpha import draft_probs, teacher_forced_logits
from specdec_jax.measure.calibrate import Calibration
from specdec_jax.pair import Pair


def acceptances(
  pair: Pair, prompt: Array, decoded: DecodeResult, sampling: Sampling
) -> list[np.ndarray]:
  """Return one array [T] per text: the probability that each token was an accepted draft token.

  The probability is conditioned on the text, and on verification of a draft token at that position.
  If the text has token x there, it is min(1, q(x) / p(x)). The reason is that, for any gamma, x is
  drafted and accepted with probability min(p(x), q(x)), and emitted with probability p(x). Given
  the text, acceptance is independent between positions.
  """
  logits = teacher_forced_logits(pair.target.model, pair.target.params, prompt, decoded.tokens)
  draft_q = draft_probs(pair, pair.draft.build(sampling, chain(1)), prompt, decoded.tokens)
  tokens = jnp.asarray(decoded.tokens)
  p_x = np.asarray(gather_token(distribution(logits, sampling), tokens))
  q_x = np.asarray(gather_token(draft_q, tokens))
  probs = np.minimum(1.0, np.divide(q_x, p_x, out=np.zeros_like(p_x), where=p_x > 0))
  return [row[:length] for row, length in zip(probs, decoded.lengths)]


def oracles(
  acceptances: Sequence[np.ndarray], calibration: Calibration, samples: int = 20
) -> dict[str, float]:
  """Return the predicted speedup of each oracle at batch size 1, by the name of the oracle.

  The oracles know which draft tokens are accepted. They choose one gamma above 0 for all texts, or
  one gamma (possibly 0) for each text or for each round.

  Args:
    acceptances: acceptance probabilities of each text, from the function `acceptances`.
    calibration: result of `calibrate`, which has the costs of the gammas to choose from.
    samples: number of times that acceptance is sampled for each text.
  """
  rng = np.random.default_rng(0)
  sampled = [rng.random(len(row)) < row for row in acceptances for _ in range(samples)]
  costs = [calibration.round_cost(gamma) for gamma in range(len(calibration.c))]
  fixed, best = map(np.array, zip(*(times(accepted, costs) for accepted in sampled)))
  prefill = len(sampled) * sum(calibration.starts)
  autoregressive = sum(map(len, sampled)) + len(sampled) * calibration.starts[0]
  return {
    "oracle of a gamma": float(autoregressive / (prefill + fixed[:, 1:].sum(axis=0).min())),
    "oracle of each text": float(autoregressive / (prefill + fixed.min(axis=1).sum())),
    "oracle of each round": float(autoregressive / (prefill + best.sum())),
  }


def times(accepted: np.ndarray, costs: Sequence[float]) -> tuple[np.ndarray, float]:
  """Compute the time of all rounds of a text.

  Args:
    accepted: [T]; for each position of the text, whether a draft token that is verified there is
      accepted.
    costs: [G + 1], time of a round with gamma 0, 1, ..., G.

  Returns:
    An array [G + 1] of the times with each fixed gamma, and the time with the best gamma in each
    round.
  """
  end, gammas = len(accepted), np.arange(len(costs))
  fixed, best = np.zeros((end + 1, len(costs))), np.zeros(end + 1)  # from each token to the end
  run = 0  # number of accepted tokens in a row, from token i on
  for i in reversed(range(end)):
    run = run + 1 if accepted[i] else 0
    after = np.minimum(i + np.minimum(run, gammas) + 1, end)
    fixed[i] = costs + fixed[after, gammas]
    best[i] = (costs + best[after]).min()
  return fixed[0], float(best[0])
