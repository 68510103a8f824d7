"""Test that adaptive gamma leaves the distribution of the output unchanged and follows alpha."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from tiny import autoregressive_decode

from experiments.gamma.adaptive import AdaptiveDecoder, ScheduledDecoder
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.exactness.checker import samples_row
from specdec_jax.exactness.texts import score_texts
from specdec_jax.models.t5 import T5Model

V, LIMIT, EOS, BATCH = 24, 16, 5, 8
CONFIG = tiny.config(vocab_size=V, num_encoder_layers=1)
TARGET = T5Model(CONFIG)
GREEDY = Sampling(0.0)
GAMMAS = (1, 2, 4)
# Gamma 1 is best up to alpha 0.52, 2 up to 0.87, then 4.
COSTS = jnp.array([1.1, 1.3, 1.9])
SCRIPTED = tuple(tiny.ScriptedDraft(chain(gamma)) for gamma in GAMMAS)


@functools.cache
def params():
  return tiny.params(CONFIG, 526)


@functools.cache
def prompts():
  return tiny.sources(CONFIG, 0, BATCH)


def keys():
  return jax.random.split(jax.random.key(0), BATCH)


@functools.cache
def autoregressive(eos_id=EOS):
  settings = dict(max_new_tokens=LIMIT, sampling=GREEDY, eos_id=eos_id)
  return autoregressive_decode(TARGET, params(), prompts(), keys(), **settings)


def decode(drafts, draft_params, costs=COSTS, prior=(0.5, 0.5), eos_id=EOS):
  decoder = AdaptiveDecoder(TARGET, drafts, TokenVerifier(GREEDY), eos_id)
  pair_params = Params(params(), draft_params)
  return decoder.run(pair_params, prompts(), keys(), costs, jnp.array(prior), max_new_tokens=LIMIT)


def script(right):
  """Return draft tokens, by position in the text, that equal the target's tokens where `right`."""
  target_tokens = np.asarray(autoregressive(-1).tokens)
  draft_tokens = np.where(right, target_tokens, (target_tokens + 1) % V)
  return jnp.pad(jnp.asarray(draft_tokens), ((0, 0), (1, 0)))  # position 0 has the start token


def gammas_of(out):
  """Return the gamma of each round that ran, after checking that all rows have the same gamma."""
  num_proposed = (np.asarray(out.rounds.draft_tokens) >= 0).sum(axis=-1)[: int(out.num_rounds)]
  assert (num_proposed == num_proposed[:, :1]).all()
  return num_proposed[:, 0].tolist()


RIGHT = {
  "always": np.ones(LIMIT, bool),
  "never": np.zeros(LIMIT, bool),
  "at first": np.arange(LIMIT) < 10,
  "by row": np.arange(BATCH)[:, None] % 2 == 0,
}


@pytest.mark.parametrize("name", RIGHT)
def test_greedy_output_equals_autoregressive_decoding(name):
  out = decode(SCRIPTED, script(RIGHT[name]))
  np.testing.assert_array_equal(out.tokens, autoregressive().tokens)
  np.testing.assert_array_equal(out.lengths, autoregressive().lengths)


def test_gamma_follows_a_draft_whose_quality_changes():
  """Without EOS all rows run the same rounds, so the expected gammas are known."""
  out = decode(SCRIPTED, script(RIGHT["at first"]), eos_id=-1)
  # Estimates of alpha: 1/2, 3/4, 7/8, 15/16; then every draft token is rejected: 15/18, 15/20, ...
  assert gammas_of(out) == [1, 2, 4, 4, 2, 2, 2, 2, 2]
  assert (np.asarray(out.rounds.num_accepted)[:9].T == [1, 2, 4, 0, 0, 0, 0, 0, 0]).all()
  accepted, rejected = out.rounds.acceptance_counts()
  assert (accepted == 7).all() and (rejected == 6).all()


def test_finished_rows_do_not_affect_gamma():
  """Row 1 ends after one token; its wrong draft tokens would lower gamma if they were counted."""
  right = np.arange(BATCH)[:, None] != 1
  assert int(autoregressive().lengths[1]) == 1
  with_wrong_row = decode(SCRIPTED, script(right))
  all_right = decode(SCRIPTED, script(RIGHT["always"]))
  assert gammas_of(with_wrong_row)[1:] == gammas_of(all_right)[1:]


def test_schedule_raises_gamma_by_2_and_lowers_it_by_1():
  decoder = ScheduledDecoder(TARGET, SCRIPTED, TokenVerifier(GREEDY), -1)
  pair_params = Params(params(), script(RIGHT["at first"]))
  out = decoder.run(pair_params, prompts(), keys(), 1, max_new_tokens=LIMIT)
  # Wanted: 1, 3, 4 (the largest), 4, 3, 2, 1, 1, 1; a round has the longest chain of at most that.
  assert gammas_of(out) == [1, 2, 4, 4, 2, 2, 1, 1, 1]
  np.testing.assert_array_equal(out.tokens, autoregressive(-1).tokens)


# Sampling.


def sampled():
  """Compare samples with the target's distribution; also return the gammas of one batch."""
  pair, sampling = tiny_pair.pair(), Sampling()
  # Fresh draft objects, so that no program compiled by another test is used.
  drafts = [pair.draft.build(sampling, chain(gamma)) for gamma in (1, 3)]
  drafts = tuple(tiny.ChangedDraft(draft, lambda params, proposal: proposal) for draft in drafts)
  costs, prior = jnp.array([1.1, 1.6]), jnp.array([0.7, 0.3])

  def decode(prompt, rng, *, max_new_tokens):
    decoder = AdaptiveDecoder(pair.target.model, drafts, TokenVerifier(sampling))
    return decoder.run(pair.params, prompt, rng, costs, prior, max_new_tokens=max_new_tokens)

  texts = tiny_pair.SENTENCES[:4]
  found = score_texts(pair, texts, decode, DecodeSettings(sampling, 32, 4), num_tokens=6000)
  out = decode(pair.prompt(texts), jax.random.split(jax.random.key(1), 4), max_new_tokens=4)
  return found, gammas_of(out)


def test_samples_have_the_targets_distribution():
  found, gammas = sampled()
  assert samples_row([found], "", tiny.LEVEL).holds
  assert gammas[0] == 3
