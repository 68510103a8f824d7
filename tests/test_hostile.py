"""Conditions that break decoders: empty and padded sources, NaN, guesses that are no words."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import autoregressive_decode, speculative_decode

from specdec_jax.core.decode import require_finite
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError
from specdec_jax.models.t5 import T5Model

V = 24
CONFIG = tiny.config(vocab_size=V, num_encoder_layers=1)
TARGET = T5Model(CONFIG)
GREEDY, RANDOM = Sampling(0.0), Sampling(1.0)
LIMIT = 12
BOTH = pytest.mark.parametrize("sampling", [RANDOM], ids=["sampling"])


@functools.cache
def params():
  return tiny.params(CONFIG, 12)


@functools.cache
def draft_params():
  return tiny.near(params(), seed=9, noise=0.05)


def keys(batch):
  return jax.random.split(jax.random.key(0), batch)


def speculate(prompt, sampling=GREEDY, draft=None, target=TARGET, gamma=3, **settings):
  prompt = np.asarray(prompt, np.int32)
  return jax.device_get(
    speculative_decode(
      target,
      draft or ModelDraft(TARGET, sampling, chain(gamma)),
      settings.pop("params", params()),
      settings.pop("draft_params", draft_params()),
      prompt,
      settings.pop("rng", keys(len(prompt))),
      max_new_tokens=LIMIT,
      verifier=TokenVerifier(sampling),
      **settings,
    )
  )


def plain(prompt, target=TARGET, **settings):
  prompt = np.asarray(prompt, np.int32)
  return jax.device_get(
    autoregressive_decode(
      target,
      settings.pop("params", params()),
      prompt,
      keys(len(prompt)),
      max_new_tokens=LIMIT,
      sampling=GREEDY,
      **settings,
    )
  )


@BOTH
def test_an_empty_source_is_decoded_and_leaves_its_neighbours_alone(sampling):
  """A source of padding only: nothing to attend to, which must not become 0 / 0."""
  sources = tiny.sources(CONFIG, 0, 4)
  with_empty = sources.copy()
  with_empty[1] = 0
  before, after = speculate(sources, sampling), speculate(with_empty, sampling)
  assert (after.not_finite == -1).all() and after.lengths[1] >= 1
  for row in (0, 2, 3):
    np.testing.assert_array_equal(after.tokens[row], before.tokens[row])
  if sampling == GREEDY:
    np.testing.assert_array_equal(after.tokens, plain(with_empty).tokens)


@BOTH
def test_padding_of_the_source_changes_nothing(sampling):
  sources = tiny.sources(CONFIG, 0, 4)
  wider = np.pad(sources, ((0, 0), (0, 9)))
  np.testing.assert_array_equal(
    speculate(wider, sampling).tokens, speculate(sources, sampling).tokens
  )


def test_a_draft_that_proposes_padding_changes_nothing():
  sources = tiny.sources(CONFIG, 0, 4)
  silent = tiny.ScriptedDraft(chain(3))
  got = speculate(sources, draft=silent, draft_params=np.zeros((4, 1), np.int32))
  np.testing.assert_array_equal(got.tokens, plain(sources).tokens)


def test_padded_rows_of_the_vocabulary_are_never_sampled():
  """Rows V.. of the table are larger than any word's, as random or damaged ones may be."""
  config = dataclasses.replace(CONFIG, padded_vocab_size=32)
  padded = tiny.params(config, 12)
  kernel = padded["decoder"]["logits_dense"]["kernel"]
  padded["decoder"]["logits_dense"]["kernel"] = kernel.at[:, V:].multiply(100.0)
  model = T5Model(config)
  for sampling in (GREEDY, Sampling(5.0)):
    draft = ModelDraft(model, sampling, chain(3))
    got = speculate(
      tiny.sources(config, 0, 16),
      sampling,
      draft=draft,
      target=model,
      params=padded,
      draft_params=padded,
    )
    assert (got.tokens < V).all() and got.lengths.sum() > 32


@pytest.mark.parametrize("target_dtype, draft_dtype", [("f4", "bfloat16"), ("bfloat16", "f4")])
def test_models_of_different_dtypes_decode_together(target_dtype, draft_dtype):
  sources = tiny.sources(CONFIG, 0, 4)
  config = lambda dtype: dataclasses.replace(CONFIG, dtype=jnp.dtype(dtype))
  target, draft = T5Model(config(target_dtype)), T5Model(config(draft_dtype))
  got = speculate(sources, draft=ModelDraft(draft, GREEDY, chain(3)), target=target)
  assert (got.not_finite == -1).all()
  if target_dtype == "f4":  # bfloat16 may tie
    np.testing.assert_array_equal(got.tokens, plain(sources).tokens)


# Logits that are not finite.


def breaking(position: np.ndarray, values: np.ndarray):
  """The target, whose logits before token `position` [B] hold `values` [B] once: 0 for nothing."""

  def breaks(model, params, cache, tokens, tree, first):
    at = cache.length[:, None] + jnp.arange(tokens.shape[1])  # tokens before it, less the first
    logits, hidden, cache = model.extend(params, cache, tokens, tree, first)
    here = (at == position[:, None]) & (values != 0)[:, None]
    there = jnp.where(here, values[:, None], logits[..., 5])
    return logits.at[..., 5].set(there), hidden, cache

  return tiny.ChangedModel(TARGET, breaks)


@pytest.mark.parametrize("speculation", [False, True])
def test_logits_that_are_not_finite_end_their_rows_and_no_other(speculation):
  """NaN in one row, infinity in another; and NaN in a third, behind its end."""
  sources, position = tiny.sources(CONFIG, 0, 4), 4
  good = plain(sources)
  first, *_, infinite, row = np.argsort(good.lengths)
  assert good.lengths[infinite] > position and good.lengths[first] < max(good.lengths)
  values, places = np.zeros(4, np.float32), np.full(4, position)
  values[[row, infinite]] = np.nan, np.inf
  others = values == 0
  if not speculation:  # a block of guesses would reach behind the end before it is known to be one
    values[first], places[first] = np.nan, good.lengths[first]
  got = (speculate if speculation else plain)(sources, target=breaking(places, values))
  np.testing.assert_array_equal(got.tokens[others], good.tokens[others])
  assert (got.not_finite[others] == -1).all()
  # A block that holds it is dropped whole: the row ends there, or a few tokens before.
  for at in (row, infinite):
    ends = got.lengths[at]
    assert got.not_finite[at] == ends <= position and (speculation or ends == position)
    np.testing.assert_array_equal(got.tokens[at, :ends], good.tokens[at, :ends])
  first = min(row, infinite)
  said = rf"row {first} .* past token {got.lengths[first]}.* NaN or infinite"
  with pytest.raises(InputError, match=said):
    require_finite(got)
  assert require_finite(good) is good


def test_a_draft_that_is_not_finite_is_said():
  sources = tiny.sources(CONFIG, 0, 4)
  damaged = jax.tree.map(lambda x: x * np.nan, draft_params())
  got = speculate(sources, RANDOM, draft_params=damaged)
  assert (got.not_finite == 0).all() and (got.lengths == 0).all()
  with pytest.raises(InputError, match="row 0 of a batch"):
    require_finite(got)
