"""Test adverse input: empty and padded sources, non-finite logits, and guesses of padding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import autoregressive_decode, speculative_decode

from specdec_jax.core.counts import require_finite
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError
from specdec_jax.models.t5 import T5Model

V = 24
CONFIG = tiny.config(vocab_size=V, layers=1)
TARGET = T5Model(CONFIG)
GREEDY, RANDOM = Sampling(0.0), Sampling(1.0)
LIMIT = 12
BOTH = pytest.mark.parametrize("sampling", [RANDOM], ids=["sampling"])


@functools.cache
def params():
  return tiny.params(CONFIG, 73)


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


def autoregressive(prompt, target=TARGET, **settings):
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
def test_empty_source_is_decoded_and_does_not_change_other_rows(sampling):
  """A source of only padding has no key to attend to, which must not give 0 / 0."""
  sources = tiny.sources(CONFIG, 0, 4)
  with_empty = sources.copy()
  with_empty[1] = 0
  before, after = speculate(sources, sampling), speculate(with_empty, sampling)
  assert (after.not_finite == -1).all() and after.lengths[1] >= 1
  for row in (0, 2, 3):
    np.testing.assert_array_equal(after.tokens[row], before.tokens[row])
  if sampling == GREEDY:
    np.testing.assert_array_equal(after.tokens, autoregressive(with_empty).tokens)


@BOTH
def test_output_does_not_depend_on_source_padding(sampling):
  sources = tiny.sources(CONFIG, 0, 4)
  wider = np.pad(sources, ((0, 0), (0, 9)))
  np.testing.assert_array_equal(
    speculate(wider, sampling).tokens, speculate(sources, sampling).tokens
  )


def test_draft_that_proposes_padding_does_not_change_the_output():
  sources = tiny.sources(CONFIG, 0, 4)
  padding_draft = tiny.ScriptedDraft(chain(3))
  got = speculate(sources, draft=padding_draft, draft_params=np.zeros((4, 1), np.int32))
  np.testing.assert_array_equal(got.tokens, autoregressive(sources).tokens)


def test_padded_rows_of_the_vocabulary_are_never_sampled():
  """The weights of the padded rows, from V on, exceed those of real tokens, as unused rows may."""
  config = dataclasses.replace(CONFIG, padded_vocab_size=32)
  padded = tiny.params(config, 73)
  kernel = padded["decoder"]["logits_dense"]["kernel"]
  padded["decoder"]["logits_dense"]["kernel"] = kernel.at[:, V:].multiply(100.0)
  model = T5Model(config)
  sampling = Sampling(5.0)
  got = speculate(
    tiny.sources(config, 0, 16),
    sampling,
    draft=ModelDraft(model, sampling, chain(3)),
    target=model,
    params=padded,
    draft_params=padded,
  )
  assert (got.tokens < V).all() and got.lengths.sum() > 32


@pytest.mark.parametrize("target_dtype, draft_dtype", [("f4", "bfloat16"), ("bfloat16", "f4")])
def test_models_of_different_dtypes_decode_together(target_dtype, draft_dtype):
  sources = tiny.sources(CONFIG, 0, 4)
  target, draft = (
    T5Model(dataclasses.replace(CONFIG, dtype=jnp.dtype(dtype)))
    for dtype in (target_dtype, draft_dtype)
  )
  got = speculate(sources, draft=ModelDraft(draft, GREEDY, chain(3)), target=target)
  assert (got.not_finite == -1).all()
  if target_dtype == "f4":  # bfloat16 may tie
    np.testing.assert_array_equal(got.tokens, autoregressive(sources).tokens)


# Logits that are not finite.


def with_injected_logits(position: np.ndarray, values: np.ndarray):
  """Return a target whose logits for the token at `position` [B] are `values` [B], where not 0."""

  def extend(model, params, cache, tokens, tree, first):
    # The number of tokens before each one, without the start token.
    positions = cache.length[:, None] + jnp.arange(tokens.shape[1])
    logits, hidden, cache = model.extend(params, cache, tokens, tree, first)
    injected = (positions == position[:, None]) & (values != 0)[:, None]
    column = jnp.where(injected, values[:, None], logits[..., 5])
    return logits.at[..., 5].set(column), hidden, cache

  return tiny.ChangedModel(TARGET, extend)


@pytest.mark.parametrize("speculation", [False, True])
def test_logits_that_are_not_finite_end_only_their_own_rows(speculation):
  """One row has a NaN, a second row an infinity, and a third row a NaN after its end."""
  sources, position = tiny.sources(CONFIG, 0, 4), 4
  good = autoregressive(sources)
  first, *_, infinite, row = np.argsort(good.lengths)
  assert good.lengths[infinite] > position and good.lengths[first] < max(good.lengths)
  values, positions = np.zeros(4, np.float32), np.full(4, position)
  values[[row, infinite]] = np.nan, np.inf
  others = values == 0
  if not speculation:  # a block of guesses extends past the end before the end is known
    values[first], positions[first] = np.nan, good.lengths[first]
  got = (speculate if speculation else autoregressive)(
    sources, target=with_injected_logits(positions, values)
  )
  np.testing.assert_array_equal(got.tokens[others], good.tokens[others])
  assert (got.not_finite[others] == -1).all()
  # The whole block that contains the value is dropped, so the row may end a few tokens earlier.
  for bad_row in (row, infinite):
    length = got.lengths[bad_row]
    assert got.not_finite[bad_row] == length <= position and (speculation or length == position)
    np.testing.assert_array_equal(got.tokens[bad_row, :length], good.tokens[bad_row, :length])
  first = min(row, infinite)
  message = rf"row {first} .* past token {got.lengths[first]}.* NaN or infinite"
  with pytest.raises(InputError, match=message):
    require_finite(got)
  assert require_finite(good) is good


def test_draft_with_nan_parameters_is_reported():
  sources = tiny.sources(CONFIG, 0, 4)
  damaged = jax.tree.map(lambda x: x * np.nan, draft_params())
  got = speculate(sources, RANDOM, draft_params=damaged)
  assert (got.not_finite == 0).all() and (got.lengths == 0).all()
  with pytest.raises(InputError, match="row 0 of a batch"):
    require_finite(got)
