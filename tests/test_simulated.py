"""Test simulated acceptance: the rate is alpha, tokens are independent, and the target runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from flax import struct
from tiny import autoregressive_decode, speculative_decode

from specdec_jax.contrib.paths import PathsVerifier
from specdec_jax.core.decode import Decoder
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import Tree, chain
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.models.t5 import T5Model
from specdec_jax.theory import expected_tokens

V, EOS = 16, 1
CONFIG = tiny.config(vocab_size=V, layers=1)
T5 = T5Model(CONFIG)
GREEDY, RANDOM = Sampling(temperature=0.0), Sampling()
SIGMAS = 5  # a correct estimate deviates by more standard errors with probability 6e-7


@functools.cache
def weights():
  """Return parameters of the target and of an unrelated draft."""
  return tiny_pair.random_params(CONFIG, 0), tiny_pair.random_params(CONFIG, 1)


def without_eos(model, *args):
  """Run `extend` with a low logit for EOS, because a draft token EOS is rejected for any alpha."""
  logits, hidden, cache = model.extend(*args)
  return logits.at[..., EOS].set(-1e9), hidden, cache


DRAFT = tiny.ChangedModel(T5, without_eos)


def simulated(model, alpha, **settings):
  return SimulatedModel(model, alpha, eos_id=EOS, **settings)


def decode(alpha, sampling, gamma, limit=256, batch=16, prompts=None):
  """Decode with a simulated target and check that every text has the full length and no EOS."""
  prompts = tiny.sources(CONFIG, 3, batch) if prompts is None else prompts
  out = speculative_decode(
    *(simulated(T5, alpha), ModelDraft(DRAFT, sampling, chain(gamma)), *weights(), prompts),
    jax.random.split(jax.random.key(0), len(prompts)),
    max_new_tokens=limit,
    verifier=TokenVerifier(sampling),
  )
  assert (np.asarray(out.lengths) == limit).all() and not (np.asarray(out.tokens) == EOS).any()
  assert (np.asarray(out.not_finite) == -1).all()
  return out


def running_rounds(out):
  """Return draft tokens [N, G], n [N] and next tokens [N] of the rounds of running rows."""
  running = np.asarray(out.rounds.num_emitted) > 0
  return [np.asarray(x)[running] for x in out.rounds[:3]]


@pytest.mark.slow
def test_batch_of_paths_has_the_acceptance_of_the_tree():
  draft = ModelDraft(DRAFT, RANDOM, Tree([0, 0, 1, 2]))
  trees, paths = (
    speculative_decode(
      *(simulated(T5, 0.5), draft, *weights(), tiny.sources(CONFIG, 3, 4)),
      jax.random.split(jax.random.key(0), 4),
      max_new_tokens=12,
      verifier=verifier(RANDOM),
    )
    for verifier in (TokenVerifier, PathsVerifier)
  )
  np.testing.assert_array_equal(paths.tokens, trees.tokens)
  np.testing.assert_array_equal(paths.rounds.num_accepted, trees.rounds.num_accepted)


@pytest.mark.slow
@pytest.mark.parametrize(
  "alpha, gamma, sampling",
  [(0.3, 5, RANDOM), (0.75, 3, GREEDY), (1.0, 3, RANDOM)],
)
def test_draft_tokens_are_accepted_at_rate_alpha(alpha, gamma, sampling):
  """For 4,096 tokens, alpha is within 0.05, and tokens per round are within 5 standard errors."""
  limit = 256 if 0 < alpha < 1 else 32  # acceptance is deterministic at 0 and 1
  draft_tokens, n, next_token = running_rounds(decode(alpha, sampling, gamma, limit))
  rejected = n < gamma
  num_verified = n.sum() + rejected.sum()
  error = SIGMAS * np.sqrt(alpha * (1 - alpha) / num_verified)
  assert error < 0.05
  assert abs(n.sum() / num_verified - alpha) <= error
  # n has a geometric distribution truncated at gamma, whose deviation is known.
  probs = np.append((1 - alpha) * alpha ** np.arange(gamma), alpha**gamma)
  spread = np.sqrt(probs @ np.arange(gamma + 1) ** 2 - (probs @ np.arange(gamma + 1)) ** 2)
  error = SIGMAS * spread / np.sqrt(len(n)) + 1e-12
  assert error < 0.3
  assert abs(1 + n.mean() - expected_tokens(alpha, gamma)) <= error
  assert tiny.p_value(np.bincount(n, minlength=gamma + 1), probs) > tiny.LEVEL
  # The token that replaces a rejected draft token differs from it.
  assert (draft_tokens[rejected, n[rejected]] != next_token[rejected]).all()


def prefilled(model, prompts, num_slots):
  return jax.jit(model.prefill, static_argnums=2)(weights()[0], prompts, num_slots)[1]


def acceptances(model, prompts, tokens):
  """Return [B, K - 1] whether tokens[:, 1:] have probability 1; otherwise it must be 0."""
  cache = prefilled(model, prompts, tokens.shape[1] + 1)
  logits, _, cache = jax.jit(model.extend)(weights()[0], cache, tokens)
  assert (np.asarray(cache.length) == 0).all()
  p = np.asarray(jax.nn.softmax(logits))
  assert (p[..., EOS] == 0).all()
  p = np.take_along_axis(p[:, :-1], tokens[:, 1:, None], axis=2)[..., 0]
  assert np.isin(p, (0, 1)).all()
  return p == 1


@struct.dataclass
class Length:
  length: jax.Array


class FlatModel:
  """Model with uniform logits, which is fast even for long blocks."""

  def prefill(self, params, prompt, num_slots):
    return jnp.zeros((len(prompt), 1, 0)), Length(jnp.zeros(len(prompt), jnp.int32))

  def extend(self, params, cache, tokens, tree=None, first=0):
    return jnp.zeros((*tokens.shape, V)), jnp.zeros((*tokens.shape, 0)), cache

  def commit(self, cache, length, tree=None, path=None):
    return Length(length)


def test_acceptance_of_draft_tokens_is_independent():
  """16 rows with different prompts have the same 1,000 draft tokens.

  The correlation between positions, prompts, draft tokens and seeds is 0 within 5 standard errors,
  0.04.
  """
  alpha, model, prompts = 0.6, FlatModel(), tiny.sources(CONFIG, 3, 16)
  assert len({tuple(row) for row in prompts.tolist()}) == 16
  one_row = np.random.default_rng(0).integers(2, V, 1001).astype(np.int32)
  tokens = np.tile(one_row, (16, 1))
  acceptances_of = functools.partial(acceptances, simulated(model, alpha))
  right = acceptances_of(prompts, tokens)
  assert abs(right.mean() - alpha) < SIGMAS * np.sqrt(alpha * (1 - alpha) / right.size) < 0.02

  def correlation(a, b):  # in standard errors
    a, b = ((x - alpha) / np.sqrt(alpha * (1 - alpha)) for x in (a, b))
    return abs((a * b).mean()) * np.sqrt(a.size)

  assert correlation(right[:, 1:], right[:, :-1]) < SIGMAS
  assert correlation(right, np.roll(right, 1, axis=0)) < SIGMAS
  assert (
    correlation(right, acceptances_of(prompts, np.where(tokens == 2, 3, 2).astype(np.int32)))
    < SIGMAS
  )
  other_seed = simulated(model, alpha, seed=1)
  assert correlation(right, acceptances(other_seed, prompts, tokens)) < SIGMAS
  # The test detects dependence: rows with the same prompt and draft tokens agree.
  same = acceptances_of(np.roll(prompts, 1, axis=0), tokens)
  assert correlation(np.roll(right, 1, axis=0), same) > 100


def test_acceptance_does_not_depend_on_block_size_padding_or_other_rows():
  prompts = tiny.sources(CONFIG, 3, 4)
  tokens = np.random.default_rng(1).integers(2, V, (4, 9)).astype(np.int32)
  model = simulated(FlatModel(), 0.5)
  whole = acceptances(model, prompts, tokens)
  assert 0 < whole.sum() < whole.size
  np.testing.assert_array_equal(acceptances(model, prompts[1:2], tokens[1:2]), whole[1:2])
  padded = np.pad(prompts, ((0, 0), (0, 5)))
  np.testing.assert_array_equal(acceptances(model, padded, tokens), whole)
  cache = prefilled(model, prompts, 10)
  for i in range(8):  # blocks of two tokens that overlap by one
    logits, _, cache = model.extend(
      (), model.commit(cache, jnp.full(4, i)), jnp.asarray(tokens[:, i : i + 2])
    )
    draft_token_logits = np.take_along_axis(
      np.asarray(logits)[:, 0], tokens[:, i + 1, None], axis=1
    )[:, 0]
    np.testing.assert_array_equal(draft_token_logits > 0, whole[:, i])


def test_only_the_logits_of_draft_tokens_and_of_eos_are_changed():
  prompts, (params, _) = tiny.sources(CONFIG, 3, 3), weights()
  tokens = np.random.default_rng(1).integers(2, V, (3, 4)).astype(np.int32)
  original, changed = (
    jax.jit(model.extend)(params, prefilled(model, prompts, 5), tokens)[0]
    for model in (T5, simulated(T5, 0.5))
  )
  shifted = np.abs(np.asarray(changed - original)) > 1e-3
  expected = np.arange(V) == EOS
  expected = expected | (np.pad(tokens[:, 1:, None], ((0, 0), (0, 1), (0, 0))) == np.arange(V))
  expected[:, -1] = np.arange(V) == EOS
  np.testing.assert_array_equal(shifted, expected)


def test_autoregressive_decoding_runs_to_the_limit():
  prompts = tiny.sources(CONFIG, 3, 8)
  keys = jax.random.split(jax.random.key(0), 8)
  settings = dict(max_new_tokens=64, sampling=RANDOM)
  model = simulated(T5, 0.5)
  out = autoregressive_decode(model, weights()[0], prompts, keys, **settings)
  assert (np.asarray(out.lengths) == 64).all() and not (np.asarray(out.tokens) == EOS).any()
  # Without simulation some texts end earlier.
  unsimulated = autoregressive_decode(T5, weights()[0], prompts, keys, **settings)
  assert (np.asarray(unsimulated.lengths) < 64).any()


def test_draft_token_of_eos_is_always_rejected():
  tokens = np.full((4, 30), EOS, np.int32)
  model = simulated(FlatModel(), 1.0)
  assert not acceptances(model, tiny.sources(CONFIG, 3, 4), tokens).any()


def test_row_does_not_depend_on_its_position_in_the_batch():
  prompts = tiny.sources(CONFIG, 3, 16)
  whole = decode(0.75, GREEDY, 3)
  reversed_rows = decode(0.75, GREEDY, 3, prompts=prompts[::-1].copy())
  np.testing.assert_array_equal(np.asarray(reversed_rows.tokens)[::-1], whole.tokens)


def test_compiler_does_not_remove_the_target_forward_pass():
  """Only the argmax is used. The compiler removes the pass if constants replace the logits."""
  prompts, (params, _) = jnp.asarray(tiny.sources(CONFIG, 3, 4)), weights()
  tokens = np.full((4, 4), 5, np.int32)

  def flops(model, change=lambda logits: logits):
    cache = jax.eval_shape(lambda: model.prefill(params, prompts, 8))[1]

    @jax.jit
    def argmax(*args):
      return change(model.extend(*args)[0]).argmax(axis=-1)

    cost = argmax.lower(params, cache, tokens).compile().cost_analysis()
    return cost.get("flops", 0.0)

  expected = flops(T5)
  assert flops(simulated(T5, 0.5)) >= expected
  assert flops(T5, lambda logits: jnp.zeros_like(logits)) < expected / 10


def test_calls_of_one_shape_compile_once():
  decode(0.75, GREEDY, 3)
  compiled = Decoder.run._cache_size()
  decode(0.75, GREEDY, 3, prompts=tiny.sources(CONFIG, 4, 16))
  assert hash(simulated(T5, 0.75)) == hash(simulated(T5Model(CONFIG), 0.75))
  assert Decoder.run._cache_size() == compiled


@pytest.mark.parametrize("alpha", [-0.1, 1.01, float("nan")])
def test_alpha_outside_0_to_1_is_rejected(alpha):
  with pytest.raises(InputError, match=f"alpha is {alpha}"):
    simulated(T5, alpha)
