"""Test sampling distributions and samples from them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_jax.core import sampling
from specdec_jax.core.sampling import (
  Sampling,
  distribution,
  filtered,
  sample,
  sample_logits,
  sample_siblings,
  split_keys,
)

METHODS = [
  dict(temperature=0.0),
  dict(temperature=1.0),
  dict(temperature=0.3),
  dict(temperature=2.5),
  dict(top_k=1),
  dict(top_k=4),
  dict(top_k=10_000),
  dict(top_p=0.01),
  dict(top_p=0.6),
  dict(top_p=0.999),
  dict(temperature=0.7, top_k=9, top_p=0.8),
]


def logits_of(*shape, seed=0, scale=3.0):
  return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_distribution_equals_the_float64_reference(method):
  logits = logits_of(5, 4, 23)
  got = np.asarray(distribution(jnp.asarray(logits), Sampling(**method)))
  want = tiny.adjusted(logits, **method)
  assert got.shape == logits.shape and got.dtype == np.float32
  np.testing.assert_array_equal(got > 0, want > 0)  # the same tokens are kept
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)
  np.testing.assert_allclose(got.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_come_with_their_distribution(temperature):
  logits, method = jnp.asarray(logits_of(4, 9)), Sampling(temperature)
  tokens, q = sample_logits(jax.random.split(jax.random.key(0), 4), logits, method)
  np.testing.assert_array_equal(q, distribution(logits, method))
  assert (np.take_along_axis(np.asarray(q), np.asarray(tokens)[:, None], 1) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_bfloat16_logits_are_converted_to_float32_first(method):
  logits = jnp.asarray(logits_of(6, 17), jnp.bfloat16)
  got = distribution(logits, Sampling(**method))
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got.sum(-1), 1, atol=1e-5)
  np.testing.assert_array_equal(got, distribution(logits.astype(jnp.float32), Sampling(**method)))


def test_argmax_of_tied_logits_is_a_one_hot():
  got = distribution(jnp.asarray([[1.0, 3.0, 3.0, -2.0]]), Sampling(temperature=0.0))
  np.testing.assert_array_equal(got, [[0, 1, 0, 0]])


def test_low_temperature_approaches_argmax():
  logits = jnp.asarray(logits_of(50, 12))
  greedy = distribution(logits, Sampling(temperature=0.0))
  for temperature in (1e-6, 1e-20, 1e-30):
    np.testing.assert_allclose(distribution(logits, Sampling(temperature)), greedy, atol=1e-6)


def test_top_k_keeps_tokens_tied_with_the_last():
  got = distribution(jnp.log(jnp.asarray([0.4, 0.2, 0.2, 0.1, 0.1])), Sampling(top_k=2))
  np.testing.assert_allclose(got, [0.5, 0.25, 0.25, 0, 0], atol=1e-6)


@pytest.mark.parametrize(
  "top_p,kept",
  [
    (0.01, [1]),  # the most probable token is always kept
    (0.49, [1]),
    (0.51, [0.5 / 0.75, 0.25 / 0.75]),  # the token that crosses top_p is kept
    (0.74, [0.5 / 0.75, 0.25 / 0.75]),
    (0.76, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9]),
    (0.95, [0.5, 0.25, 0.15, 0.1]),
    (1.0, [0.5, 0.25, 0.15, 0.1]),
  ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass(top_p, kept):
  # The probabilities are not in descending order, so that sorting has to be undone.
  probs, order = np.asarray([0.5, 0.25, 0.15, 0.1]), [2, 0, 3, 1]
  want = np.pad(kept, (0, 4 - len(kept)))
  got = distribution(jnp.log(jnp.asarray(probs[order])), Sampling(top_p=top_p))
  np.testing.assert_allclose(got, want[order], atol=1e-6)


@pytest.mark.parametrize(
  "method, kept",
  [
    (dict(top_p=0.75), 2),
    (dict(min_p=0.5), 2),
    (dict(min_p=0.25), 4),
    (dict(epsilon_cutoff=0.25), 2),
    (dict(epsilon_cutoff=0.125), 4),
  ],
  ids=str,
)
def test_tokens_exactly_at_a_threshold_are_kept(method, kept):
  probs = jnp.asarray([0.5, 0.25, 0.125, 0.125])  # exact in float32, as are their sums
  got = filtered(probs, jnp.log2(probs) + 1, Sampling(**method))
  assert (np.asarray(got) > 0).tolist() == [True] * kept + [False] * (4 - kept)


def test_temperature_precedes_top_k_which_precedes_top_p():
  # Temperature 0.5 squares the weights: 25:16:9:1. Top-k 3 keeps 25:16:9, whose sum is 50. The
  # first two have 0.82 of that mass. Before top-k they have 0.80, and before the temperature
  # 9/13 = 0.69.
  logits = jnp.log(jnp.asarray([5.0, 4.0, 3.0, 1.0]))
  got = distribution(logits, Sampling(temperature=0.5, top_k=3, top_p=0.81))
  np.testing.assert_allclose(got, [25 / 41, 16 / 41, 0, 0], atol=1e-6)


def test_masked_logits_get_no_probability():
  logits = jnp.asarray([[0.5, -jnp.inf, 2.0, -jnp.inf, 1.0]])
  for method in METHODS:
    got = np.asarray(distribution(logits, Sampling(**method)))
    assert got[0, 1] == got[0, 3] == 0
    np.testing.assert_allclose(got.sum(), 1, atol=1e-6)


@functools.cache
def compiled(**method):
  return jax.jit(lambda logits: distribution(logits, Sampling(**method)))


def assert_follows_the_definition(probs, logits, temperature=1.0, top_k=0, top_p=1.0):
  """Check probs [V] by sorting: the fewest of the most probable tokens, and ties with the last.

  The mass of top-p is compared up to rounding, the tokens of top-k exactly.
  """
  # Logits are tied if their differences from the maximum are equal in float32.
  logits = (logits - logits.max()) / np.float32(temperature)
  weights = np.exp(logits, dtype=np.float64)
  if 0 < top_k < len(logits):
    weights[logits < np.sort(logits)[-top_k]] = 0
  kept = probs > 0
  if top_p < 1:
    last = logits[kept].min()
    assert kept[logits >= last].all()
    mass = weights / weights.sum()
    assert mass[logits >= last].sum() >= top_p - 1e-6 or kept[weights > 0].all()
    assert mass[logits > last].sum() <= top_p + 1e-6
    weights[logits < last] = 0
  np.testing.assert_array_equal(kept, weights > 0)
  np.testing.assert_allclose(probs, weights / weights.sum(), rtol=1e-5, atol=1e-30)


@pytest.mark.slow
@settings(max_examples=250, deadline=None, derandomize=True)
@given(
  pool=st.lists(
    st.one_of(
      st.floats(-20, 20).map(lambda x: round(x, 3)),  # XLA flushes subnormal differences to 0
      st.sampled_from([-np.inf, 0.0, -0.0, 1.0, np.nextafter(np.float32(1), 2, dtype=np.float32)]),
    ),
    min_size=1,
    max_size=40,
  ).filter(lambda pool: max(pool) > -np.inf),
  vocab_size=st.sampled_from([7, 200]),
  seed=st.integers(0, 2**31 - 1),
  half=st.booleans(),
  method=st.sampled_from(
    [
      dict(top_k=1),
      dict(top_k=6),
      dict(top_k=7),
      dict(top_k=40),
      dict(top_p=1e-30),
      dict(top_p=0.5),
      dict(top_p=0.999999),
      dict(temperature=0.5, top_k=5, top_p=0.8),
    ]
  ),
)
def test_kept_tokens_are_those_that_sorting_keeps(pool, vocab_size, seed, half, method):
  # A small pool gives ties. With a pool of one, all logits are equal.
  logits = np.random.default_rng(seed).choice(np.float32(pool), vocab_size)
  logits[seed % vocab_size] = np.float32(max(pool))
  given_logits = jnp.asarray(logits, jnp.bfloat16 if half else jnp.float32)
  probs = np.asarray(compiled(**method)(given_logits))
  assert_follows_the_definition(probs, np.asarray(given_logits, np.float32), **method)


@pytest.mark.parametrize("method", [dict(top_k=40), dict(top_p=0.9)], ids=str)
def test_rows_of_a_large_vocabulary_do_not_depend_on_the_batch(method):
  logits = logits_of(8, 4099)
  together = np.asarray(compiled(**method)(logits))
  for row, probs in zip(logits, together):
    assert_follows_the_definition(probs, row, **method)
    alone = np.asarray(compiled(**method)(row[None])[0])
    np.testing.assert_array_equal(alone > 0, probs > 0)
    np.testing.assert_allclose(alone, probs, rtol=1e-6)


@pytest.mark.parametrize(
  "setting,name",
  [
    (dict(temperature=-0.1), "temperature"),
    (dict(temperature=float("nan")), "temperature"),
    (dict(temperature=float("inf")), "temperature"),
    (dict(top_k=-1), "top_k"),
    (dict(top_p=0.0), "top_p"),
    (dict(top_p=-0.5), "top_p"),
    (dict(top_p=1.01), "top_p"),
    (dict(top_p=float("nan")), "top_p"),
  ],
  ids=str,
)
def test_error_for_an_invalid_setting_states_its_value(setting, name):
  with pytest.raises(ValueError, match=rf"{name} is {list(setting.values())[0]}"):
    Sampling(**setting)


@pytest.mark.slow
def test_samples_follow_the_weights_and_never_have_weight_0():
  # 200,000 samples, level 1e-6: detects effects w >= 0.02.
  n = 200_000
  weights = np.zeros(72)  # two blocks of 64, not normalized
  possible = [1, 2, 4, 66, 70]
  weights[possible] = [3.0, 0.5, 0.05, 6.0, 1.0]
  probs = weights / weights.sum()
  keys = jax.random.split(jax.random.key(0), n)
  samples = sample(keys, jnp.broadcast_to(weights, (n, 72)))
  counts = np.bincount(samples, minlength=72)
  assert not counts[weights == 0].any()
  assert tiny.p_value(counts, probs) > tiny.LEVEL
  assert tiny.detectable(n, probs) < 0.02
  # The same counts reject slightly different weights.
  perturbed = probs + 0.01 * (np.eye(72)[1] - np.eye(72)[66])
  assert tiny.p_value(counts, perturbed) < tiny.CAUGHT


@pytest.mark.parametrize("u, index", [(0.0, 0), (1 - 2**-23, -1)])
@pytest.mark.parametrize("possible", [[3, 5], [70, 90, 199], [64], [0, 299]], ids=str)
def test_extreme_uniforms_sample_tokens_of_positive_weight(u, index, possible, monkeypatch):
  """Extreme uniforms sample the first and last token of positive weight, past blocks of weight
  0."""
  monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.full(shape, u, dtype))
  weights = np.zeros((1, 300), np.float32)
  weights[0, possible] = 0.1
  keys = jax.random.split(jax.random.key(0), 1)
  assert sample(keys, jnp.asarray(weights)).tolist() == [possible[index]]


@pytest.mark.slow
def test_sample_with_one_possible_token():
  weights = jnp.asarray(np.eye(6, dtype=np.float32)[np.arange(600) % 6] * 1e-20)
  samples = sample(jax.random.split(jax.random.key(1), 600), weights)
  np.testing.assert_array_equal(samples, np.arange(600) % 6)


@pytest.mark.slow
def test_each_row_is_sampled_with_its_own_key():
  weights = jnp.asarray(np.random.default_rng(0).random((50, 9)))
  keys = jax.random.split(jax.random.key(2), 50)
  together = sample(keys, weights)
  alone = [sample(keys[i : i + 1], weights[i : i + 1])[0] for i in range(50)]
  np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_tiny_temperature_gives_a_finite_argmax(temperature):
  probs = distribution(jnp.asarray([1.0, 5.0, -2.0]), Sampling(temperature))
  np.testing.assert_array_equal(probs, [0.0, 1.0, 0.0])


def filtered_row(probs, min_p=0.0, typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0.0):
  """Return the filters of `Sampling` after top-p, by sorting, in float64."""

  def keep(allowed):
    nonlocal probs
    probs = np.where(allowed, probs, 0)
    probs = probs / probs.sum()

  def entropy():
    return -sum(p * math.log(p) for p in probs if p > 0)

  best = np.arange(len(probs)) == probs.argmax()
  keep((probs >= min_p * probs.max()) | best)
  if typical_p < 1:
    level, mass, kept = entropy(), 0.0, np.zeros(len(probs), bool)
    surprise = [abs(-math.log(p) - level) if p > 0 else math.inf for p in probs]
    for x in np.argsort(surprise):
      kept[x] = mass < typical_p
      mass += probs[x]
    keep(kept)
  keep((probs >= epsilon_cutoff) | best)
  if eta_cutoff:
    keep((probs >= min(eta_cutoff, math.sqrt(eta_cutoff) * math.exp(-entropy()))) | best)
  return probs


@pytest.mark.parametrize(
  "filters",
  [
    dict(min_p=0.1),
    dict(typical_p=0.6),
    dict(epsilon_cutoff=0.06),
    dict(eta_cutoff=0.3),
    dict(min_p=0.02, typical_p=0.9, epsilon_cutoff=0.03, eta_cutoff=0.1),
  ],
  ids=lambda filters: " ".join(filters),
)
def test_filters_keep_the_tokens_that_sorting_keeps(filters):
  logits = np.random.default_rng(7).normal(0, 2, (40, 23)).astype(np.float32)
  sampling = Sampling(0.8, top_p=0.98, **filters)
  found = jax.jit(lambda logits: distribution(logits, sampling))(logits)
  before = tiny.adjusted(logits, 0.8, top_p=0.98)
  want = np.stack([filtered_row(row, **filters) for row in before])
  np.testing.assert_allclose(found, want, atol=1e-6)
  assert (want == 0).sum() > (before == 0).sum()


def kept_by_sorting(distances, weights, total):
  """Return the mask of `sampling.nearest` for one row, by sorting."""
  order = np.argsort(distances, kind="stable")
  reached = np.cumsum(weights[order], dtype=np.float64) >= total
  last = order[reached.argmax()] if reached.any() else order[-1]
  return distances <= distances[last]


@pytest.mark.slow
@pytest.mark.parametrize("masses, size", [(False, 70_001), (True, 32 * 512)])
def test_nearest_tokens_of_a_large_vocabulary_are_those_of_sorting(masses, size):
  rng = np.random.default_rng(size)
  peaked = rng.standard_normal(size) ** 2 * 9
  flat = rng.random(size) * 1e-3
  tied = rng.choice([0.0, 1.0, 2.0, np.inf], size, p=[1e-4, 0.1, 0.6, 0.2999])
  excluded = np.where(np.arange(size) % 1000 < 2, peaked, np.inf)
  close = np.where(np.arange(size) % (-(-size // 32)) == 5, 1e-3, 1.0) * (1 + rng.random(size))
  distances = np.float32([peaked, flat, tied, excluded, close, np.zeros(size)])
  weights = np.round(rng.random(distances.shape) * 8).astype(np.float32)  # their sums are exact
  weights[np.isinf(distances)] = 0
  given = weights if masses else np.ones_like(weights)
  all_distances, all_weights = jnp.asarray(distances), jnp.asarray(weights) if masses else 1
  for total in (1, 129, 5000, size * 10):
    got = sampling.nearest(all_distances, all_weights, total)
    want = [kept_by_sorting(*row, total) for row in zip(distances, given)]
    np.testing.assert_array_equal(got, want)
    for row in (0, 2):  # alone, without flat rows
      weight, alone = jnp.asarray(weights[row]) if masses else 1, jnp.asarray(distances[row])
      np.testing.assert_array_equal(sampling.nearest(alone, weight, total), want[row])
      on_gpu = sampling._threshold_in_few_passes(alone, weight, total)
      np.testing.assert_array_equal(sampling._bits(alone) <= on_gpu, want[row])
    on_gpu = sampling._threshold_in_few_passes(all_distances, all_weights, total)
    np.testing.assert_array_equal(sampling._bits(all_distances) <= on_gpu, want)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("independent", [False, True])
def test_siblings_at_temperature_0_are_the_best_tokens_and_have_no_q(independent, coupled):
  logits, counts = np.random.default_rng(0).normal(size=(4, 2, 9)), np.array([3, 1])
  best = np.argsort(-logits, axis=-1)
  want = [best[:, 0, : 1 if independent else 3], best[:, 1, :1]]
  want[0] = np.broadcast_to(want[0], (4, 3))
  keys = jax.random.split(jax.random.key(0), 4)
  found = sample_siblings(keys, jnp.asarray(logits), Sampling(0), counts, independent, coupled)
  np.testing.assert_array_equal(found[0], np.concatenate(want, axis=1))
  assert found[1] is None


@pytest.mark.parametrize("independent", [False, True])
def test_siblings_are_distinct_unless_they_are_sampled_independently(independent):
  logits = jnp.zeros((512, 1, 4)).at[:, :, 0].set(1.0)
  keys = jax.random.split(jax.random.key(0), 512)
  tokens, _ = sample_siblings(keys, logits, Sampling(), np.array([3]), independent)
  assert (np.diff(np.sort(tokens, axis=1)) > 0).all() != independent


def test_of_greedy_siblings_only_the_first_is_sampled():
  probs = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
  logits = jnp.broadcast_to(jnp.log(probs), (4000, 2, 5))
  keys = jax.random.split(jax.random.key(0), 4000)
  tokens, q = sample_siblings(keys, logits, Sampling(), np.array([3, 1]), greedy=True)
  assert (np.asarray(tokens[:, 1:3]) == [1, 3]).all()  # the most probable tokens
  rest = np.where(np.isin(np.arange(5), [1, 3]), 0, probs) / 0.3
  np.testing.assert_allclose(q[0], [rest, np.eye(5)[1], np.eye(5)[3], probs], atol=1e-6)
  for child, expected in ((0, rest), (3, probs)):
    counts = np.bincount(tokens[:, child], minlength=5)
    np.testing.assert_allclose(counts / 4000, expected, atol=0.03)  # 3.6 standard errors


def test_rows_have_keys_of_their_own():
  keys = jax.random.key_data(split_keys(jax.random.key(0), 4))
  assert len({*map(tuple, keys.tolist())}) == 4
