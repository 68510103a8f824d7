"""Test continuous batching: texts in slots have the outputs that they have in a batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair

from specdec_jax import batching
from specdec_jax.batching import (
  Block,
  Slots,
  Text,
  Texts,
  decode_all,
  decode_texts,
  prefill,
  size_of_sources,
  token_prompts,
)
from specdec_jax.core.decode import Decoder, NullDraft
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Params, WrappedModel
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError
from specdec_jax.models.t5 import T5Model

M, LIMIT, WIDTH = 13, 10, 16
CONFIG, DRAFT = tiny.config(vocab_size=8), tiny.config(vocab_size=8, layers=1)
PARAMS = Params(tiny.params(CONFIG, 0), tiny.params(DRAFT, 1))
KEYS = row_keys(0, 0, M)


def sources() -> tuple[np.ndarray, list[int]]:
  """Return padded sources of different lengths, and the lengths."""
  rng = np.random.default_rng(0)
  lengths = rng.integers(1, WIDTH + 1, M)
  tokens = rng.integers(2, 8, (M, WIDTH)).astype(np.int32)
  return np.where(np.arange(WIDTH) < lengths[:, None], tokens, 0), lengths.tolist()


PROMPTS, LENGTHS = sources()


def decoder(**settings) -> Decoder:
  draft = ModelDraft(T5Model(DRAFT), Sampling(), chain(2))
  return Decoder(T5Model(CONFIG), draft, TokenVerifier(Sampling()), **settings)


@functools.cache
def batch():
  """Return the result of decoding all texts in one batch."""
  result = decoder(records_log_probs=True).run(
    PARAMS, jnp.asarray(PROMPTS), KEYS, max_new_tokens=LIMIT
  )
  return jax.device_get(result)


def same_text(text: int, result, row: int) -> None:
  """Assert that a row of a result is a text of the batch, with its rounds."""
  np.testing.assert_array_equal(result.tokens[row], batch().tokens[text])
  if result.log_probs is not None:
    np.testing.assert_allclose(result.log_probs[row], batch().log_probs[text], atol=1e-5)
  ran = batch().rounds.num_emitted[:, text] > 0
  np.testing.assert_array_equal(result.rounds.num_emitted[:, row] > 0, ran)
  for ours, theirs in zip(*map(jax.tree.leaves, (result.rounds, batch().rounds)), strict=True):
    np.testing.assert_array_equal(ours[ran, row], theirs[ran, text])


@pytest.mark.parametrize("batch_size", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_all_texts_of_a_program_are_those_of_a_batch(batch_size):
  decode = jax.jit(decode_all, static_argnames=("batch_size", "max_new_tokens"))
  result = decode(
    decoder(records_log_probs=True),
    *(PARAMS, jnp.asarray(PROMPTS), KEYS),
    batch_size=batch_size,
    max_new_tokens=LIMIT,
  )
  assert result.num_rounds == batch().num_rounds
  for text in range(M):
    same_text(text, result, text)


@pytest.mark.slow
def test_texts_in_any_order_are_those_of_a_batch():
  """Encoders read fewer tokens of short sources. The slots are fewer than the rows of a window.

  In the first order, each text has its own limit.
  """
  compiled = batching._run._cache_size()
  for seed in range(3):
    rng = np.random.default_rng(seed)
    order, limits = rng.permutation(M), np.full(M, LIMIT) if seed else rng.integers(1, LIMIT, M)
    found = decode_texts(
      decoder(records_log_probs=True),
      PARAMS,
      Texts(
        PROMPTS[order].__getitem__, [LENGTHS[text] for text in order], KEYS[order], limits[order]
      ),
      batch_size=3,
      max_new_tokens=LIMIT,
      has_encoder=True,
    )
    ended = []
    for index, result, row in found:
      text = order[index]
      length = min(limits[text], batch().lengths[text])
      assert result.lengths[row] == length
      np.testing.assert_array_equal(result.tokens[row, :length], batch().tokens[text, :length])
      if limits[text] == LIMIT:
        same_text(text, result, row)
      ended.append(index)
    assert sorted(ended) == [*range(M)] != ended
  assert batching._run._cache_size() <= compiled + 1, "all blocks share one program"


@pytest.mark.slow
def test_slots_are_filled_and_freed_at_any_time():
  """Texts arrive one by one or several at once, and some are cancelled."""
  shared = decoder()
  slots = Slots(shared, PARAMS, 3, LIMIT, token_prompts(WIDTH))
  rng, waiting, ended, cancelled = np.random.default_rng(4), [*range(M)], [], []
  in_slots: dict[int, Text] = {}
  reported = {}

  def text_of(i: int) -> Text:
    prompt = PROMPTS[i, : LENGTHS[i]].tolist()
    return Text(shared, prompt, KEYS[i], LIMIT, lambda *report: reported.update({i: report}))

  while waiting or in_slots:
    count = min(slots.num_free, len(waiting), int(rng.integers(0, 4)))
    new, waiting = {i: text_of(i) for i in waiting[:count]}, waiting[count:]
    if new:
      slots.add([*new.values()])
    in_slots |= new
    if in_slots and rng.random() < 0.1:
      cancelled.append(min(in_slots))
      slots.cancel(in_slots.pop(cancelled[-1]))
    if not in_slots:
      continue
    reported.clear()
    done = slots.step(int(rng.integers(1, 4)))
    assert reported.keys() == in_slots.keys()
    for i, (result, is_last) in reported.items():
      length = int(result.lengths[0])
      np.testing.assert_array_equal(result.tokens[0, :length], batch().tokens[i, :length])
      assert is_last == (in_slots[i] in done)
      if is_last:
        same_text(i, result._replace(log_probs=None), 0)
        del in_slots[i]
        ended.append(i)
    assert slots.num_free == 3 - len(in_slots)
  assert len(cancelled) > 0 and sorted(ended + cancelled) == [*range(M)]


@pytest.mark.slow
def test_samples_of_one_source_share_its_keys_and_values():
  prompts, keys = PROMPTS[:2], jax.random.split(jax.random.key(1), 6)
  state = jax.eval_shape(
    functools.partial(decoder().init, max_new_tokens=LIMIT, num_samples=3),
    *(PARAMS, prompts, keys),
  )
  for cache in (state.target_cache, state.draft_state):
    assert {len(x) for x in jax.tree.leaves(cache.layers)} == {6}
    assert {len(x) for x in jax.tree.leaves((cache.cross, cache.cross_bias))} == {2}
  shared = decoder().run(PARAMS, prompts, keys, max_new_tokens=LIMIT, num_samples=3)
  repeated = decoder().run(PARAMS, prompts.repeat(3, axis=0), keys, max_new_tokens=LIMIT)
  np.testing.assert_array_equal(shared.tokens, repeated.tokens)
  np.testing.assert_array_equal(shared.rounds.draft_tokens, repeated.rounds.draft_tokens)
  assert len({tuple(row) for row in np.asarray(shared.tokens[:3]).tolist()}) > 1


@pytest.mark.slow
def test_generate_has_the_same_outputs_in_slots():
  pair = tiny_pair.pair(max_source_tokens=32)
  texts = [*tiny_pair.SENTENCES[:7], "", tiny_pair.SENTENCES[8]]
  settings = dict(temperature=1.0, gamma=2, max_new_tokens=12, logprobs=True, seed=3)
  settings |= dict(no_repeat_ngram_size=2)
  alone, in_slots = (pair.generate(texts, batch_size=size, **settings) for size in (1, 2))
  for one, other in zip(alone, in_slots, strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
    assert len(one.rounds.num_emitted) == len(other.rounds.num_emitted)


def test_text_that_cannot_be_decoded_is_an_error():
  params = PARAMS._replace(target=jax.tree.map(lambda x: x * np.nan, PARAMS.target))
  found = decode_texts(
    decoder(),
    params,
    Texts(PROMPTS.__getitem__, LENGTHS, KEYS, np.full(M, LIMIT)),
    batch_size=3,
    max_new_tokens=LIMIT,
    has_encoder=True,
  )
  with pytest.raises(InputError, match="NaN or infinite"):
    next(found)


class WithPrompt(WrappedModel):
  """Model whose cache has a further array, whose shape depends on the width of the prompt."""

  def prefill(self, params, prompt, num_slots):
    hidden, cache = self.model.prefill(params, prompt, num_slots)
    return hidden, {"cache": cache, "prompt": prompt}


@pytest.mark.parametrize("model", [T5Model(CONFIG), WithPrompt(T5Model(CONFIG))])
def test_shapes_of_rows_do_not_depend_on_the_width_that_encoders_read(model):
  decoder = Decoder(model, NullDraft(), TokenVerifier(Sampling()))
  block = Block(jnp.asarray(PROMPTS), KEYS, np.arange(M), np.full(M, LIMIT))
  narrow, wide = (
    jax.eval_shape(
      functools.partial(prefill, max_new_tokens=LIMIT, width=width), decoder, PARAMS, block
    )
    for width in (8, None)
  )
  shapes = [[x.shape for x in jax.tree.leaves(rows)] for rows in (narrow, wide)]
  assert shapes[0] == shapes[1]
  assert {WIDTH} == {x.shape[2] for x in jax.tree.leaves(caches(narrow).cross)}


def caches(rows):
  cache = rows.state.target_cache
  return cache["cache"] if isinstance(cache, dict) else cache


def test_sizes_of_sources():
  sizes = {size_of_sources(length) for length in range(1, 65)}
  assert sizes == {8, 16, 24, 32, 48, 64}
  assert all(length <= size_of_sources(length) <= max(8, 2 * length) for length in range(1, 500))
