"""Sampling methods, their filters of a distribution, and sampling (Section 2.2).

Only `distribution` turns logits into p or q. Axis letters are those of `core.types`; V is the size
of the vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Key, Shaped

from specdec_jax.core.arrays import (
  Keys,
  expanded,
  first_true,
  fold_in_rows,
  gather_one,
  highest,
  take,
)
from specdec_jax.core.settings import Settings, is_neutral, traced
from specdec_jax.errors import InputError, require_count, require_number


@dataclasses.dataclass(frozen=True)
class Sampling(Settings):
  """Sampling method: standard sampling from an adjusted distribution.

  Names and definitions are those of transformers. Filters apply in the order of the attributes,
  each to the renormalized distribution that the filters before it leave.

  Attributes:
    temperature: logits are divided by it; 0 means argmax.
    top_k: keep the k most probable tokens (and any tied with the last); 0 keeps all.
    top_p: keep the smallest set of most probable tokens whose mass reaches top_p (and any tied with
      the last); 1.0 keeps all.
    min_p: keep the tokens with at least min_p times the highest probability; 0 keeps all.
    typical_p: mass of `typical`; 1.0 keeps all.
    epsilon_cutoff: keep tokens with at least this probability, and the most probable; 0 keeps all.
    eta_cutoff: argument `epsilon` of `eta_threshold`; 0 keeps all.
  """

  temperature: float = traced(1.0, neutral=0.0)
  top_k: int = traced(0, neutral=0)
  top_p: float = traced(1.0, neutral=1.0)
  min_p: float = traced(0.0, neutral=0.0)
  typical_p: float = traced(1.0, neutral=1.0)
  epsilon_cutoff: float = traced(0.0, neutral=0.0)
  eta_cutoff: float = traced(0.0, neutral=0.0)

  def __post_init__(self):
    # Numbers of other kinds, such as numpy scalars, become hashable Python numbers.
    temperature = require_number("temperature", self.temperature, 0, math.inf)
    if 0 < temperature < 1e-30:
      raise InputError(f"temperature is {temperature}; it must be 0 (argmax) or at least 1e-30.")
    require_count("top_k", self.top_k, 0)
    values = {"temperature": temperature, "top_k": int(self.top_k)}
    for name in ("top_p", "typical_p"):
      values[name] = require_number(name, getattr(self, name), 0, 1, "(]", ", with 1 to keep all")
    for name, ends in (("min_p", "[]"), ("epsilon_cutoff", "[)"), ("eta_cutoff", "[)")):
      values[name] = require_number(name, getattr(self, name), 0, 1, ends, ", with 0 to keep all")
    for name, value in values.items():
      object.__setattr__(self, name, value)

  @property
  def is_argmax(self) -> bool:
    """True at temperature 0, where nothing is sampled."""
    return is_neutral(self.temperature, 0)


def distribution(logits: Float[Array, "*batch V"], sampling: Sampling) -> Float[Array, "*batch V"]:
  """Return the distribution that a sampling method gives the next token, in float32.

  Temperature is applied first, then the filters of `Sampling`. Temperature 0 gives a one-hot.
  """
  logits = logits.astype(jnp.float32)
  if sampling.is_argmax:
    return jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=jnp.float32)
  # Subtract the maximum first, so that a tiny temperature does not overflow.
  logits = (logits - highest(logits)) / sampling.temperature
  if not is_neutral(sampling.top_k, 0):
    logits = jnp.where(nearest(-logits, 1, sampling.top_k), logits, -jnp.inf)
  weights = jnp.exp(logits)
  probs = weights / weights.sum(axis=-1, keepdims=True)
  return filtered(probs, logits, sampling)


def split_keys(rng: Any, batch: int) -> Key[Array, " {batch}"]:
  """Return one key per row: the given keys, or the keys that a single given key is split into.

  Keys of `jax.random.key` and of `jax.random.PRNGKey` are accepted.
  """
  if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
    rng = jax.random.wrap_key_data(jnp.asarray(rng))
  return rng if rng.ndim else jax.random.split(rng, batch)


def row_keys(seed: int, start: int | np.integer, count: int) -> Key[Array, " {count}"]:
  """Return the keys of texts `start` to `start + count - 1`, made from their indices and `seed`."""
  return sample_keys(seed, np.arange(start, start + count), 1)


def sample_keys(seed: int, index: Sequence[int] | np.ndarray, count: int) -> Key[Array, " rows"]:
  """Return `count` keys for each of the texts with these indices; the first is as in `row_keys`."""
  index = np.asarray(index, np.int32)
  return _sample_keys(np.uint32(seed % 2**32), index, count)  # the same with `jax_enable_x64`


@functools.partial(jax.jit, static_argnames="count")
def _sample_keys(seed: Array, index: Array, count: int) -> Array:
  fold_in = jax.vmap(jax.random.fold_in, (None, 0))
  keys = fold_in(jax.random.key(seed), index)
  if count == 1:
    return keys
  others = jax.vmap(fold_in, (0, None))(keys, jnp.arange(count))
  return others.at[:, 0].set(keys).reshape(-1)


def position_keys(rng: Keys, length: Int[Array, " B"], count: int) -> Key[Array, "B {count}"]:
  """Return the keys of positions `length` to `length + count - 1` of each row."""
  return jax.vmap(fold_in_rows, (None, 1), 1)(rng, length[:, None] + jnp.arange(count)[None])


def sample_logits(
  rng: Keys, logits: Float[Array, "B V"], sampling: Sampling, coupled: bool = False
) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
  """Return a sampled token per row (the argmax of `perturbed` logits if `coupled`), and its q."""
  token, q = sample_draft_token(rng, logits, sampling, coupled)
  return token, distribution(logits, sampling) if q is None else q


def sample_draft_token(
  rng: Keys, logits: Float[Array, "B V"], sampling: Sampling, coupled: bool = False
) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None]:
  """Return the result of `sample_logits`, but None for q at temperature 0; see `Proposal`."""
  if sampling.is_argmax:
    return argmax(logits), None
  probs = distribution(logits, sampling)
  return argmax(perturbed(rng, logits, sampling)) if coupled else sample(rng, probs), probs


def perturbed(
  rng: Key[Array, "*batch"], logits: Float[Array, "*batch V"], sampling: Sampling
) -> Float[Array, "*batch V"]:
  """Return log p + Gumbel noise (its argmax is a sample from p); at temperature 0, the logits."""
  if sampling.is_argmax:
    return logits

  def noise(key: Key[Array, ""]) -> Float[Array, " V"]:
    return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

  gumbel = jax.vmap(noise)(rng.reshape(-1)).reshape(logits.shape)
  return jnp.log(distribution(logits, sampling)) + gumbel


def sample_siblings(
  rng: Keys,
  logits: Float[Array, "B nodes V"],
  sampling: Sampling,
  counts: np.ndarray,
  independent: bool = False,
  coupled: bool = False,
  greedy: bool = False,
) -> tuple[Int[Array, "B children"], Float[Array, "B children V"] | None]:
  """Sample the children of each node, in the order in which they will be verified.

  Above temperature 0, siblings are sampled without replacement by default: each is sampled from the
  renormalized distribution without its earlier siblings. At temperature 0, and where the filters
  leave only earlier siblings, the most probable remaining token is selected deterministically.

  Args:
    counts: number of children of each node.
    independent: whether to sample siblings independently, with replacement.
    coupled: whether to sample without replacement by selecting the largest `perturbed` logits.
    greedy: whether to sample only the first of K siblings, from the distribution without its K - 1
      most probable tokens, which are the other siblings (Hu et al., 2025). It has no effect at
      temperature 0 or if `coupled`.

  Returns:
    The children, node by node, and the distribution of each given its earlier siblings: a one-hot
    where it was selected deterministically. At temperature 0 it is None; see `core.types.Proposal`.
  """
  width, nodes = int(counts.max()), np.arange(len(counts))
  keys = jax.vmap(lambda key: jax.random.split(key, (width, len(counts))))(rng)  # [B, W, nodes]
  # p without earlier siblings
  remaining = None if sampling.is_argmax else distribution(logits, sampling)
  parents, ranks = np.repeat(nodes, counts), np.concatenate([*map(np.arange, counts)])
  if independent:
    if remaining is None:
      return take(argmax(logits), parents), None
    q = take(remaining, parents)
    return _sample_nodes(keys[:, ranks, parents], q), q
  if greedy and not coupled and remaining is not None:
    tokens, q = _greedy_siblings(keys[:, 0], remaining, logits, counts)
    return tokens[:, parents, ranks], q[:, parents, ranks]
  scores = None  # logits whose argmax is the next token, if it is not sampled
  if coupled:
    scores = perturbed(jnp.broadcast_to(rng[:, None], logits.shape[:2]), logits, sampling)
  elif sampling.is_argmax:
    scores = logits
  levels = []  # of siblings with the same rank
  for rank in range(width):
    has_child = np.flatnonzero(counts[nodes] > rank)
    nodes = nodes[has_child]
    logits, remaining, scores = jax.tree.map(
      lambda x, rows=has_child: take(x, rows), (logits, remaining, scores)
    )
    q = _renormalized(remaining, logits) if rank and remaining is not None else remaining
    if scores is None:
      token = _sample_nodes(take(keys[:, rank], nodes), q)
    else:
      token = argmax(jnp.where(highest(scores) > -jnp.inf, scores, logits))
    is_taken = token[..., None] == jnp.arange(logits.shape[-1])[None, None]
    remaining = _excluding(is_taken, remaining, 0.0)
    logits, scores = (_excluding(is_taken, x, -jnp.inf) for x in (logits, scores))
    levels.append((nodes, token, q))
  nodes_of_levels, tokens, probs = zip(*levels, strict=True)
  order = np.argsort(np.concatenate(nodes_of_levels), kind="stable")  # node by node
  return jax.tree.map(
    lambda *levels: take(jnp.concatenate(levels, axis=1), order), *zip(tokens, probs, strict=True)
  )


def _excluding(is_taken: Bool[Array, "B nodes V"], x: Array | None, value: float) -> Array | None:
  return None if x is None else jnp.where(is_taken, value, x)


def _greedy_siblings(
  keys: Key[Array, "B nodes"],
  probs: Float[Array, "B nodes V"],
  logits: Float[Array, "B nodes V"],
  counts: np.ndarray,
) -> tuple[Int[Array, "B nodes W"], Float[Array, "B nodes W V"]]:
  """Return a sampled first child and the most probable tokens for each node, and their q."""
  top = lax.top_k(probs, int(counts.max()))[1]  # [B, nodes, W], the most probable tokens
  is_child = np.arange(counts.max()) < counts[:, None] - 1
  is_top = jax.nn.one_hot(top, probs.shape[-1], dtype=probs.dtype) * is_child[None, ..., None]
  rest = 1 - is_top.sum(axis=2)
  q = _renormalized(probs * rest, jnp.where(rest > 0, logits, -jnp.inf))
  tokens = jnp.concatenate([_sample_nodes(keys, q)[..., None], top], axis=2)
  return tokens, jnp.concatenate([q[:, :, None], is_top], axis=2)


def _renormalized(
  weights: Float[Array, "B nodes V"], logits: Float[Array, "B nodes V"]
) -> Float[Array, "B nodes V"]:
  """Return weights divided by their sum; where all are 0, a one-hot at the largest logit."""
  mass = weights.sum(axis=-1, keepdims=True)
  most_probable = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=weights.dtype)
  return jnp.where(mass > 0, weights / jnp.where(mass > 0, mass, 1.0), most_probable)


def _sample_nodes(
  keys: Key[Array, "B nodes"], probs: Float[Array, "B nodes V"]
) -> Int[Array, "B nodes"]:
  return sample(keys.reshape(-1), probs.reshape(-1, probs.shape[-1])).reshape(keys.shape)


def sample(rng: Keys, weights: Float[Array, "B V"]) -> Int[Array, " B"]:
  """Sample one token per row in proportion to weights, which are at least 0 and not all 0.

  The cumulative sum is inverted in two steps: a block of 64 tokens is sampled, then a token in it.
  This needs two random numbers per row; the Gumbel-max method needs V. On a CPU with V = 4,096, the
  two methods take 2 and 86 microseconds. A token of weight 0 is never sampled.
  """
  blocks = in_blocks(weights, 64, 0)
  u = jax.vmap(lambda key: jax.random.uniform(key, (2,), jnp.float32))(rng)
  block = _invert(u[:, 0], blocks.sum(axis=-1))
  return block * 64 + _invert(u[:, 1], gather_one(blocks, block))


def _invert(u: Float[Array, " B"], weights: Float[Array, "B N"]) -> Int[Array, " B"]:
  """Return the first index at which the cumulative sum of weights exceeds u times their total."""
  # A parallel cumulative sum need not be monotone, so entries of weight 0 are excluded.
  cumulative = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0.0)
  total = cumulative.max(axis=-1, keepdims=True)
  return first_true((cumulative > u[:, None] * total) | (cumulative == total))


def argmax(logits: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
  """Return the most probable token; in a tie, the one with the smallest id."""
  return lax.platform_dependent(
    logits,
    cuda=lambda logits: lax.argmax(logits, logits.ndim - 1, jnp.int32),
    default=lambda logits: first_true(logits == highest(logits)),
  )


MIN_LARGE = 2**14  # smallest vocabulary in which few tokens are searched first


def filtered(
  probs: Float[Array, "*batch V"], logits: Float[Array, "*batch V"], sampling: Any
) -> Float[Array, "*batch V"]:
  """Return probabilities after all filters of a `Sampling` except top-k.

  `probs` is the softmax of the logits after temperature and top-k. The logits are float32, shifted
  so that their maximum is 0. Filters that are switched off are not compiled.
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


def at_least(probs: Float[Array, "*batch V"], least: ArrayLike) -> Bool[Array, "*batch V"]:
  """Return a mask of the tokens with probability >= `least`, and of the most probable one."""
  return (probs >= least) | (probs == highest(probs))


def _information(probs: Float[Array, "*batch V"]) -> Float[Array, "*batch V"]:
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
  read as integers, so the distance of the last token is found bit by bit, in 31 sums. On a GPU,
  several bits are found at once, and on a CPU the sums of a large vocabulary run over few columns.

  Args:
    distances: float32, at least 0.
    weights: weight of each token, at least 0; or one weight for all tokens.
    total: sum of weights to reach, broadcast to [..., 1]. If the sum of all weights is less, all
      tokens are kept.
  """
  distances = jnp.abs(distances)
  is_large = distances.shape[-1] >= MIN_LARGE
  # Other compilers fuse the comparisons with their sum, and would only need more memory.
  on_cpu = _threshold_of_columns if is_large else _threshold
  return _bits(distances) <= lax.platform_dependent(
    distances,
    cpu=lambda distances: on_cpu(distances, weights, total),
    cuda=lambda distances: _threshold_in_few_passes(distances, weights, total),
    default=lambda distances: _threshold(distances, weights, total),
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
  found = _threshold(near, near_weights, total)
  # Each row takes one of the two thresholds by its own tokens, so it does not depend on other rows.
  return lax.cond(
    is_enough.all(),
    lambda: found,
    lambda: jnp.where(is_enough, found, _threshold(distances, weights, total)),
  )


def _bits(distances: Float[Array, "*batch V"]) -> Int[Array, "*batch V"]:
  return lax.bitcast_convert_type(distances, jnp.int32)


def _threshold(
  distances: Float[Array, "*batch V"], weights: ArrayLike, total: ArrayLike
) -> Int[Array, "*batch 1"]:
  """Return the largest threshold such that the tokens below it weigh less than `total`."""
  bits = _bits(distances)

  def add_bit(i, depth):
    """Set bit 30 - i of the threshold if the tokens below it then weigh less than `total`."""
    deeper = depth | 1 << 30 - i
    weight = jnp.where(bits < deeper, weights, 0).sum(axis=-1, keepdims=True)
    return jnp.where(weight < total, deeper, depth)

  return lax.fori_loop(0, 31, add_bit, jnp.zeros_like(bits[..., :1]))


def _threshold_in_few_passes(
  distances: Float[Array, "*batch V"], weights: ArrayLike, total: ArrayLike
) -> Int[Array, "*batch 1"]:
  """Return the result of `_threshold`, with fewer kernels and more comparisons."""
  bits = _bits(distances)[..., None, :]
  weights = jnp.expand_dims(weights, -2) if jnp.ndim(weights) else weights
  threshold, shift = jnp.zeros_like(bits[..., 0, :1]), 31
  at_once = 8 if bits.size == bits.shape[-1] else 6  # in one row, comparisons cost nothing
  while shift:
    count = min(at_once, shift)
    shift -= count
    added = jnp.arange(1 << count, dtype=jnp.int32) << shift
    deeper = threshold | expanded(added, threshold)
    weight = jnp.where(bits < deeper[..., None], weights, 0).sum(axis=-1)
    threshold = jnp.where(weight < total, deeper, threshold).max(axis=-1, keepdims=True)
  return threshold
