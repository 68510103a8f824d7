"""Simulated acceptance: as often as asked, independently, with the target's work still done."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from flax import struct
from tiny import autoregressive_decode, speculative_decode

from specdec_jax.core.decode import Decoder
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.theory import expected_tokens
from specdec_jax.core.trees import chain
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.models.t5 import T5Model

V, EOS = 16, 1
CONFIG = tiny.config(vocab_size=V, layers=1)
T5 = T5Model(CONFIG)
GREEDY, RANDOM = Sampling(temperature=0.0), Sampling()
SIGMAS = 5  # of each estimate: a correct program is this far out 6 times in 10^7


@functools.cache
def weights():
  """Parameters of the target and of its draft, which need not resemble it."""
  return tiny_pair.random_params(CONFIG, 0), tiny_pair.random_params(CONFIG, 1)


def without_eos(model, *args):
  """Its EOS out of reach: a guess of EOS would be refused whatever alpha is."""
  logits, hidden, cache = model.extend(*args)
  return logits.at[..., EOS].set(-1e9), hidden, cache


DRAFT = tiny.ChangedModel(T5, without_eos)


def simulated(model, alpha, **how):
  return SimulatedModel(model, alpha, eos_id=EOS, **how)


def decode(alpha, sampling, gamma, limit=256, batch=16, prompts=None):
  """Speculative decoding of a simulated target; every text must run to its limit without EOS."""
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


def of_running(out):
  """(guesses [N, G], n [N], next token [N]) of every round of every row that was running."""
  running = np.asarray(out.rounds.num_emitted) > 0
  return [np.asarray(x)[running] for x in out.rounds[:3]]


@pytest.mark.parametrize(
  "alpha, gamma, sampling",
  [(0.3, 5, RANDOM), (0.75, 3, GREEDY), (1.0, 3, RANDOM)],
)
def test_guesses_stand_as_often_as_asked(alpha, gamma, sampling):
  """4,096 tokens: alpha lies within 0.05, tokens a round within 5 standard errors (Equation 1)."""
  limit = 256 if 0 < alpha < 1 else 32  # nothing is left to chance at 0 and 1
  guesses, n, next_token = of_running(decode(alpha, sampling, gamma, limit))
  refused = n < gamma
  judged = n.sum() + refused.sum()
  error = SIGMAS * np.sqrt(alpha * (1 - alpha) / judged)
  assert error < 0.05
  assert abs(n.sum() / judged - alpha) <= error
  # n is geometric, cut at gamma: its spread is known too.
  chances = np.append((1 - alpha) * alpha ** np.arange(gamma), alpha**gamma)
  spread = np.sqrt(chances @ np.arange(gamma + 1) ** 2 - (chances @ np.arange(gamma + 1)) ** 2)
  error = SIGMAS * spread / np.sqrt(len(n)) + 1e-12
  assert error < 0.3
  assert abs(1 + n.mean() - expected_tokens(alpha, gamma)) <= error
  assert tiny.p_value(np.bincount(n, minlength=gamma + 1), chances) > tiny.LEVEL
  # What replaces a refused guess is another token.
  assert (guesses[refused, n[refused]] != next_token[refused]).all()


def prefilled(model, prompts, num_slots):
  return jax.jit(model.prefill, static_argnums=2)(weights()[0], prompts, num_slots)[1]


def verdicts(model, prompts, tokens):
  """Whether each guess tokens[:, 1:] is certain; else it must be impossible. [B, K - 1]."""
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
  """Any token is as likely as any other: what costs no time in long blocks."""

  def prefill(self, params, prompt, num_slots):
    return jnp.zeros((len(prompt), 1, 0)), Length(jnp.zeros(len(prompt), jnp.int32))

  def extend(self, params, cache, tokens, tree=None, first=0):
    return jnp.zeros((*tokens.shape, V)), jnp.zeros((*tokens.shape, 0)), cache

  def commit(self, cache, length, tree=None, path=None):
    return Length(length)


def test_verdicts_are_independent_of_each_other():
  """16,000 guesses, the same tokens in each of 16 rows whose prompts differ.

  From one position to the next, from prompt to prompt, with other guesses and with another seed
  the correlation is 0 within 5 standard errors, 0.04.
  """
  alpha, model, prompts = 0.6, FlatModel(), tiny.sources(CONFIG, 3, 16)
  assert len({tuple(row) for row in prompts.tolist()}) == 16
  one_row = np.random.default_rng(0).integers(2, V, 1001).astype(np.int32)
  tokens = np.tile(one_row, (16, 1))
  found = functools.partial(verdicts, simulated(model, alpha))
  right = found(prompts, tokens)
  assert abs(right.mean() - alpha) < SIGMAS * np.sqrt(alpha * (1 - alpha) / right.size) < 0.02

  def correlation(a, b):  # in standard errors
    a, b = ((x - alpha) / np.sqrt(alpha * (1 - alpha)) for x in (a, b))
    return abs((a * b).mean()) * np.sqrt(a.size)

  assert correlation(right[:, 1:], right[:, :-1]) < SIGMAS
  assert correlation(right, np.roll(right, 1, axis=0)) < SIGMAS
  assert correlation(right, found(prompts, np.where(tokens == 2, 3, 2).astype(np.int32))) < SIGMAS
  other_seed = simulated(model, alpha, seed=1)
  assert correlation(right, verdicts(other_seed, prompts, tokens)) < SIGMAS
  # What is not independent is seen: two rows of one prompt that guess alike.
  same = found(np.roll(prompts, 1, axis=0), tokens)
  assert correlation(np.roll(right, 1, axis=0), same) > 100


def test_a_verdict_does_not_depend_on_block_padding_or_neighbours():
  prompts = tiny.sources(CONFIG, 3, 4)
  tokens = np.random.default_rng(1).integers(2, V, (4, 9)).astype(np.int32)
  model = simulated(FlatModel(), 0.5)
  whole = verdicts(model, prompts, tokens)
  assert 0 < whole.sum() < whole.size
  np.testing.assert_array_equal(verdicts(model, prompts[1:2], tokens[1:2]), whole[1:2])
  padded = np.pad(prompts, ((0, 0), (0, 5)))
  np.testing.assert_array_equal(verdicts(model, padded, tokens), whole)
  cache = prefilled(model, prompts, 10)
  for i in range(8):  # two tokens at a time, the second again as the first of the next two
    logits, _, cache = model.extend((), model.commit(cache, jnp.full(4, i)), tokens[:, i : i + 2])
    of_guess = np.take_along_axis(np.asarray(logits)[:, 0], tokens[:, i + 1, None], axis=1)[:, 0]
    np.testing.assert_array_equal(of_guess > 0, whole[:, i])


def test_logits_are_the_targets_own_where_nothing_is_judged():
  prompts, (params, _) = tiny.sources(CONFIG, 3, 3), weights()
  tokens = np.random.default_rng(1).integers(2, V, (3, 4)).astype(np.int32)
  own, ours = (
    jax.jit(model.extend)(params, prefilled(model, prompts, 5), tokens)[0]
    for model in (T5, simulated(T5, 0.5))
  )
  shifted = np.abs(np.asarray(ours - own)) > 1e-3
  expected = np.arange(V) == EOS
  expected = expected | (np.pad(tokens[:, 1:, None], ((0, 0), (0, 1), (0, 0))) == np.arange(V))
  expected[:, -1] = np.arange(V) == EOS
  np.testing.assert_array_equal(shifted, expected)


def test_plain_decoding_runs_to_the_limit():
  prompts = tiny.sources(CONFIG, 3, 8)
  keys = jax.random.split(jax.random.key(0), 8)
  settings = dict(max_new_tokens=64, sampling=RANDOM)
  model = simulated(T5, 0.5)
  out = autoregressive_decode(model, weights()[0], prompts, keys, **settings)
  assert (np.asarray(out.lengths) == 64).all() and not (np.asarray(out.tokens) == EOS).any()
  # The model itself ends its texts.
  own = autoregressive_decode(T5, weights()[0], prompts, keys, **settings)
  assert (np.asarray(own.lengths) < 64).any()


def test_a_guess_of_eos_is_always_refused():
  tokens = np.full((4, 30), EOS, np.int32)
  model = simulated(FlatModel(), 1.0)
  assert not verdicts(model, tiny.sources(CONFIG, 3, 4), tokens).any()


def test_a_row_does_not_depend_on_its_neighbours():
  prompts = tiny.sources(CONFIG, 3, 16)
  whole = decode(0.75, GREEDY, 3)
  turned = decode(0.75, GREEDY, 3, prompts=prompts[::-1].copy())
  np.testing.assert_array_equal(np.asarray(turned.tokens)[::-1], whole.tokens)


def test_the_targets_work_remains_in_the_compiled_program():
  """Where only the argmax of each position is wanted, and where the logits are replaced instead."""
  prompts, (params, _) = tiny.sources(CONFIG, 3, 4), weights()
  tokens = np.full((4, 4), 5, np.int32)

  def flops(model, change=lambda logits: logits):
    cache = jax.eval_shape(lambda: model.prefill(params, prompts, 8))[1]
    newest = lambda *args: change(model.extend(*args)[0]).argmax(axis=-1)
    cost = jax.jit(newest).lower(params, cache, tokens).compile().cost_analysis()
    return cost.get("flops", 0.0)

  plain = flops(T5)
  assert flops(simulated(T5, 0.5)) >= plain
  assert flops(T5, lambda logits: jnp.zeros_like(logits)) < plain / 10


def test_calls_of_one_shape_compile_once():
  decode(0.75, GREEDY, 3)
  compiled = Decoder.run._cache_size()
  decode(0.75, GREEDY, 3, prompts=tiny.sources(CONFIG, 4, 16))
  assert hash(simulated(T5, 0.75)) == hash(simulated(T5Model(CONFIG), 0.75))
  assert Decoder.run._cache_size() == compiled


@pytest.mark.parametrize("alpha", [-0.1, 1.01, float("nan")])
def test_bad_input(alpha):
  with pytest.raises(InputError, match=f"alpha is {alpha}"):
    simulated(T5, alpha)
