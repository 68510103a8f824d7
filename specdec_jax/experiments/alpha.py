"""Alpha as the paper measures it: E[sum min(p, q)] over text that the target generates."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.protocols import Model
from specdec_jax.sampling import Sampling, distribution


class Estimate(NamedTuple):
  """A mean with its 95% interval (bootstrap over sequences, whose tokens are not independent)."""

  mean: float
  low: float
  high: float


@functools.partial(jax.jit, static_argnames=("target", "draft", "sampling"))
def acceptance_probabilities(
  target: Model, target_params, draft: Model, draft_params, prompt: Array, tokens: Array, sampling
) -> Array:
  """beta = sum_x min(p(x), q(x)) before each token of a text (Theorem 5).

  One parallel pass of each model over prompt [B, P] and tokens [B, T]; returns [B, T].
  """
  first, _ = target.begin(prompt)
  text = jnp.concatenate([first, tokens], axis=1)[:, :-1]

  def probs(model, params):
    cache = model.start(params, prompt, text.shape[1])
    cache = cache.replace(length=jnp.zeros_like(cache.length))
    logits, _ = model.extend(params, cache, text)
    return distribution(logits[:, first.shape[1] - 1 :], sampling)

  return jnp.minimum(probs(target, target_params), probs(draft, draft_params)).sum(axis=-1)


def mean_with_interval(rows: list[np.ndarray], seed: int = 0, resamples: int = 2000) -> Estimate:
  """Mean over all values of all rows; its interval by resampling whole rows."""
  sums = np.array([row.sum() for row in rows])
  counts = np.array([len(row) for row in rows])
  picks = np.random.default_rng(seed).integers(len(rows), size=(resamples, len(rows)))
  means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
  low, high = np.quantile(means, [0.025, 0.975])
  return Estimate(float(sums.sum() / counts.sum()), float(low), float(high))


def measure_alpha(pair, prompts, decoded, sampling: Sampling) -> Estimate:
  """Alpha of a pair over what its target generated.

  Args:
    pair: see `pairs.Pair`.
    prompts: source tokens [B, P] of each batch.
    decoded: the target's own outputs for each of them (`autoregressive_decode`).
    sampling: how both models' logits are adjusted.
  """
  models = pair.target, pair.target_params, pair.draft, pair.draft_params
  rows = []
  for prompt, output in zip(prompts, decoded):
    beta = acceptance_probabilities(*models, prompt, output.tokens, sampling)
    rows += [b[:n] for b, n in zip(np.asarray(beta), np.asarray(output.lengths))]
  return mean_with_interval(rows)
