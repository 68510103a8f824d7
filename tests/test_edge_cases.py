"""Test empty and padded sources, non-finite logits, memory limits, and random keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from tiny import autoregressive_decode, speculative_decode

from experiments.model_free_drafts.given_outputs import RecitingModel
from specdec_jax.core import memory
from specdec_jax.core.counts import require_finite
from specdec_jax.core.decode import Decoder, NullDraft
from specdec_jax.core.sampling import Sampling, split_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError
from specdec_jax.models.gpt import GPTModel
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


@pytest.mark.slow
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


@pytest.mark.slow
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
  if not speculation:  # a block of draft tokens extends past the end before the end is known
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


def test_row_that_has_ended_is_not_reported_later():
  """The logits of the first row are NaN only after its limit of two tokens."""
  target = with_injected_logits(np.array([2, LIMIT]), np.array([np.nan, 0], np.float32))
  decoder = Decoder(target, NullDraft(), TokenVerifier(GREEDY), eos_id=-1)
  sources, limit = tiny.sources(CONFIG, 0, 2), np.array([2, 4])
  got = decoder.run(Params(params()), sources, keys(2), max_new_tokens=LIMIT, limit=limit)
  assert got.lengths.tolist() == [2, 4] and got.not_finite.tolist() == [-1, -1]


# Settings that no device can hold.


@pytest.mark.parametrize("name", ["gamma", "max_new_tokens"])
@pytest.mark.parametrize("pair", [tiny_pair.pair, tiny_pair.gpt_pair])
def test_setting_that_exceeds_memory_is_rejected(monkeypatch, pair, name):
  monkeypatch.setattr(memory, "_device_memory", lambda mesh: 16e9)
  with pytest.raises(InputError, match="GB; ask for less|positions"):
    pair().generate(["A man runs."], **{name: 10**9})


def test_batch_that_exceeds_memory_is_rejected(monkeypatch):
  """The estimate includes the caches of all rows, and nothing is computed for the 10,000 rows."""
  monkeypatch.setattr(memory, "_device_memory", lambda mesh: 50e6)
  pair = tiny_pair.pair()
  with pytest.raises(InputError, match="a batch of 10000 .* would take at least"):
    pair.generate(["A man runs."] * 10_000, batch_size=10_000)


@pytest.mark.parametrize("number", [np.float32(0.5), 0.5])
def test_numbers_of_any_type_become_python_numbers(number):
  """Values of other types cannot be traced, or do not share a program with an equal number."""
  sampling = Sampling(number, np.int64(3), number)
  assert [*map(type, dataclasses.astuple(sampling))] == [float, int, *[float] * 5]
  assert sampling == Sampling(0.5, 3, 0.5) and hash(sampling) == hash(Sampling(0.5, 3, 0.5))
  assert type(TokenVerifier(sampling, number).lenience) is float
  assert Sampling(2**31).temperature == 2.0**31  # does not fit 32 bits


# Decoding from Python.

N, END = 12, 5


def recite(decode=autoregressive_decode, rng=None, temperature=1.0, **settings):
  """Decode two rows of a target whose text is 3 4 5 6 7 8 9 and whose EOS is 5."""
  texts = np.array([[3, 4, 5, 6, 7, 8, 9]] * 2, np.int32)
  settings = dict(max_new_tokens=6, sampling=Sampling(temperature), **settings)
  rng = jax.random.key(0) if rng is None else rng
  return decode(RecitingModel(N, eos_id=END), texts, jnp.zeros((2, 1), int), rng, **settings)


def recite_speculatively(model, params, *args, sampling, **settings):
  """Decode with a draft without parameters; arguments are those of `autoregressive_decode`."""
  settings["verifier"] = TokenVerifier(sampling)
  return speculative_decode(model, NullDraft(chain(1)), params, (), *args, **settings)


def test_text_ends_at_the_eos_of_its_model():
  assert recite(temperature=0.0).tokens[0].tolist() == [3, 4, 5, 0, 0, 0]
  assert recite(temperature=0.0, eos_id=-1).tokens[0].tolist() == [3, 4, 5, 6, 7, 8]
  gpt = GPTModel(tiny.gpt_config(N, eos_id=N - 1))
  assert (gpt.eos_id, T5Model(tiny.config()).eos_id) == (N - 1, 1)


@pytest.mark.slow
def test_typed_and_legacy_keys_give_the_same_text():
  typed = jax.random.key(7), jax.random.split(jax.random.key(7), 2)
  legacy = jax.random.PRNGKey(7), jax.random.split(jax.random.PRNGKey(7), 2)
  rows = typed[1]  # one key is split
  for rng in (*typed, *legacy, *map(np.asarray, legacy)):
    assert (jax.random.key_data(split_keys(rng, 2)) == jax.random.key_data(rows)).all()
  for decode_it in (autoregressive_decode, recite_speculatively):
    one, *others = (recite(decode_it, rng).tokens for rng in (rows, *legacy))
    np.testing.assert_array_equal(others, [one, one])
