"""Filters of a distribution: which tokens to sample from, given their probabilities.

V is the size of the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Shaped

from specdec_jax.settings import is_neutral

MIN_LARGE = 2**14  # smallest vocabulary in which few tokens are searched first


def filtered(
  probs: Float[Array, "*batch V"], logits: Float[Array, "*batch V"], sampling: Any
) -> Float[Array, "*batch V"]:
  """Return probabilities after all filters of a `Sampling` except top-k.

  Args:
    probs: softmax of the logits.
    logits: logits after temperature and top-k, in float32, shifted so that their maximum is 0.
    sampling: the sampling method. Filters that are switched off are not compiled.
  """

  def apply(value: Any, neutral: float, keep: Callable[[], Array]) -> None:
    nonlocal probs
    if not is_neutral(value, neutral):
      probs = jnp.where(keep(), probs, 0.0)
      probs = probs / probs.sum(axis=-1, keepdims=True)

  s = sampling
  apply(s.top_p, 1, lambda: nearest(-logits, probs, s.top_p))
  apply(s.min_p, 0, lambda: at_least(probs, s.min_p * highest(probs)))
  apply(s.typical_p, 1, lambda: typical(probs, s.typical_p))
  apply(s.epsilon_cutoff, 0, lambda: at_least(probs, s.epsilon_cutoff))
  apply(s.eta_cutoff, 0, lambda: at_least(probs, eta_threshold(probs, s.eta_cutoff)))
  return probs


def highest(probs: Float[Array, "*batch V"]) -> Float[Array, "*batch 1"]:
  """Return the probability of the most probable token."""
  return probs.max(axis=-1, keepdims=True)


def at_least(probs: Float[Array, "*batch V"], least: ArrayLike) -> Bool[Array, "*batch V"]:
  """Return a mask of the tokens with probability >= `least`, and of the most probable one."""
  return (probs >= least) | (probs == highest(probs))


def _information(probs: Float[Array, "*batch V"]) -> Float[Array, "*batch V"]:
  """Return -log p of each token, infinite where p is 0."""
  return -jnp.log(probs)


def _entropy(probs: Float[Array, "*batch V"]) -> Float[Array, "*batch 1"]:
  terms = jnp.where(probs > 0, probs * _information(probs), 0.0)
  return terms.sum(axis=-1, keepdims=True)


def typical(probs: Float[Array, "*batch V"], mass: ArrayLike) -> Bool[Array, "*batch V"]:
  """Return a mask of the tokens with the smallest |-log p - entropy| whose total p reaches `mass`.

  This is locally typical sampling (Meister et al., 2023).
  """
  return nearest(jnp.abs(_information(probs) - _entropy(probs)), probs, mass)


def eta_threshold(probs: Float[Array, "*batch V"], epsilon: ArrayLike) -> Float[Array, "*batch 1"]:
  """Return the threshold of eta sampling, min(epsilon, sqrt(epsilon) exp(-entropy)).

  Source: Hewitt et al. (2022), who also propose a constant threshold (`epsilon_cutoff`).
  """
  return jnp.minimum(epsilon, jnp.sqrt(epsilon) * jnp.exp(-_entropy(probs)))


def in_blocks(
  x: Shaped[Array, "*batch V"], size: int, fill: ArrayLike
) -> Shaped[Array, "*batch blocks {size}"]:
  """Return the last axis of x in blocks of consecutive entries, the last one padded with `fill`."""
  padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)]
  return jnp.pad(x, padding, constant_values=fill).reshape(*x.shape[:-1], -1, size)


def nearest(
  distances: Float[Array, "*batch V"], weights: ArrayLike, total: ArrayLike
) -> Bool[Array, "*batch V"]:
  """Return a mask of the tokens with the smallest distances whose weights reach `total`.

  The mask has the fewest such tokens, and all tokens at the same distance as the last of them. No
  sort over the vocabulary is needed. Non-negative float32 numbers have the same order as their bits
  read as integers, so the distance of the last token is found bit by bit, in 31 sums.

  On a CPU, the sums of a large vocabulary run over some of its tokens (`_threshold_of_columns`).

  Args:
    distances: float32, at least 0.
    weights: weight of each token, at least 0; or one weight for all tokens.
    total: sum of weights to reach, broadcast to [..., 1]. If the sum of all weights is less, all
      tokens are kept.
  """
  distances = jnp.abs(distances)
  below = _bits(distances)
  if below.shape[-1] < MIN_LARGE:
    return below <= _threshold(below, weights, total)
  # Other compilers fuse the comparisons with their sum, and would only need more memory.
  return below <= lax.platform_dependent(
    distances,
    cpu=lambda distances: _threshold_of_columns(distances, weights, total),
    default=lambda distances: _threshold(_bits(distances), weights, total),
  )


def _threshold_of_columns(
  distances: Float[Array, "*batch V"], weights: ArrayLike, total: ArrayLike
) -> Int[Array, "*batch 1"]:
  """Return the result of `_threshold`, which is searched among few tokens if possible.

  The vocabulary is reshaped to 32 rows. The 128 columns with the smallest minima hold all tokens
  that are nearer than the last of these minima, so the sums run over these columns. Only if these
  tokens do not reach `total` somewhere in the batch, the sums run over the vocabulary.
  """
  # Minima of columns are faster than those of rows, and `top_k` needs floats to be fast.
  columns = in_blocks(distances, -(-distances.shape[-1] // 32), jnp.inf)
  negated, chosen = lax.top_k(-columns.min(axis=-2), 128)
  # These columns hold all tokens nearer than `bound`. If tokens at `bound` are needed, all of them
  # are kept. (With a slice `[..., -1:]` of its result, XLA would compile `top_k` to a sort.)
  bound = -negated.min(axis=-1, keepdims=True)

  def candidates(columns: Array) -> Array:
    gathered = jnp.take_along_axis(columns, chosen[..., None, :], axis=-1)
    return gathered.reshape(*chosen.shape[:-1], -1)

  near, near_weights = candidates(columns), weights
  if isinstance(weights, Array) and weights.shape == distances.shape:
    near_weights = candidates(in_blocks(weights, columns.shape[-1], 0))
  near_weights = jnp.where(near <= bound, near_weights, 0)
  is_enough = near_weights.sum(axis=-1, keepdims=True) >= total
  found = _threshold(_bits(near), near_weights, total)
  # Each row takes one of the two thresholds by its own tokens, so it does not depend on other rows.
  return lax.cond(
    is_enough.all(),
    lambda: found,
    lambda: jnp.where(is_enough, found, _threshold(_bits(distances), weights, total)),
  )


def _bits(distances: Float[Array, "*batch V"]) -> Int[Array, "*batch V"]:
  """Return the bits of non-negative float32 numbers, as integers, which have the same order."""
  return lax.bitcast_convert_type(distances, jnp.int32)


def _threshold(
  below: Int[Array, "*batch V"], weights: ArrayLike, total: ArrayLike
) -> Int[Array, "*batch 1"]:
  """Return the largest threshold such that the tokens below it weigh less than `total`."""

  def add_bit(i, depth):
    """Set bit 30 - i of the threshold if the tokens below it then weigh less than `total`."""
    deeper = depth | 1 << 30 - i
    weight = jnp.where(below < deeper, weights, 0).sum(axis=-1, keepdims=True)
    return jnp.where(weight < total, deeper, depth)

  return lax.fori_loop(0, 31, add_bit, jnp.zeros_like(below[..., :1]))
