"""Oracles that know which draft tokens are accepted (Section 3.5).

Their speeds are upper bounds on the speed that any choice of gamma can reach.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.core.arrays import gather_token
from specdec_jax.core.sampling import Sampling, distribution
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.measurement.alpha import draft_probs, teacher_forced_logits
from specdec_jax.measurement.choice import Calibration
from specdec_jax.pairs import LoadedPair


def acceptances(
  pair: LoadedPair, prompt: Array, decoded: DecodeResult, sampling: Sampling
) -> list[np.ndarray]:
  """Return, for each text, the probability [T] that each token was an accepted draft token.

  If a draft token is verified where the text has token x, the probability is min(1, q(x) / p(x)).
  The reason is that, for any gamma, x is drafted and accepted with probability min(p(x), q(x)), and
  x is emitted with probability p(x). Given the text, these events are independent.
  """
  logits = teacher_forced_logits(pair.target, pair.target_params, prompt, decoded.tokens)
  draft_q = draft_probs(pair, pair.draft(sampling, chain(1)), prompt, decoded.tokens)
  tokens = jnp.asarray(decoded.tokens)
  p_x = np.asarray(gather_token(distribution(logits, sampling), tokens))
  q_x = np.asarray(gather_token(draft_q, tokens))
  probs = np.minimum(1.0, np.divide(q_x, p_x, out=np.zeros_like(p_x), where=p_x > 0))
  return [row[:length] for row, length in zip(probs, decoded.lengths)]


def oracles(
  acceptances: Sequence[np.ndarray], calibration: Calibration, samples: int = 20
) -> dict[str, float]:
  """Compute the speedups at batch size 1 if oracles choose gamma.

  The oracles know which draft tokens are accepted. They choose one gamma above 0 for all texts, one
  for each text, or one for each round.

  Args:
    acceptances: acceptance probabilities of each text, from `acceptances`.
    calibration: calibration, which has the costs of the gammas to choose from, including 0.
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
    accepted: [T], whether a draft token at each token of the text is accepted.
    costs: [G + 1], time of a round with gamma 0, 1, ..., G.

  Returns:
    The time with each fixed gamma [G + 1], and the time with the best gamma in each round.
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
