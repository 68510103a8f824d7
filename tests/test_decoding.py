"""Test the decoding loop: greedy output equals the target's for any draft, batch size and block
size.

The oracle uses neither a cache nor blocks. For each token, the oracle runs one teacher-forced
forward pass over the whole text and takes the argmax.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import autoregressive_decode, speculative_decode

from specdec_jax.core.arrays import switch
from specdec_jax.core.decode import (
  Decoder,
  DecodeState,
  NullDraft,
  empty_rounds,
  unpacked_rounds,
)
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.models.t5 import T5Model

V = 24
CONFIG = tiny.config(vocab_size=V, num_encoder_layers=1)
TARGET = T5Model(CONFIG)
GREEDY, RANDOM = Sampling(0.0), Sampling(1.0)
LIMIT = 16
EOS = 5  # ends the texts of these weights and prompts early, late, at once and not at all


@functools.cache
def params():
  return tiny.params(CONFIG, 526)


@functools.cache
def drafts():
  """Return parameters of a good draft (most draft tokens accepted), a bad draft, and the target."""
  return {
    "good": tiny.near(params(), seed=9, noise=0.05),
    "bad": tiny.params(CONFIG, seed=5),
    "equal": params(),
  }


@functools.cache
def prompts():
  return tiny.sources(CONFIG, 0, 8)


@functools.cache
def oracle():
  """Return the target's greedy continuation [8, LIMIT] of each prompt, ignoring EOS."""
  inputs = np.zeros((8, LIMIT + 1), np.int32)  # the start token, then the tokens so far
  for i in range(LIMIT):
    logits = np.asarray(tiny.teacher_forced(CONFIG)(params(), prompts(), inputs))[:, i]
    best_two = np.sort(logits, axis=-1)[:, -2:]
    assert (np.diff(best_two) > 1e-3).all(), "a near tie: choose another seed"
    inputs[:, i + 1] = logits.argmax(axis=-1)
  return inputs[:, 1:]


def until(eos, limit=LIMIT):
  """Return the oracle's texts, truncated after `eos` and at the limit."""
  truncated = []
  for row in oracle()[:, :limit].tolist():
    truncated.append(row[: row.index(eos) + 1] if eos in row else row)
  return truncated


def keys(seed=0, batch=8):
  return jax.random.split(jax.random.key(seed), batch)


def speculate(gamma, draft_params, sampling=GREEDY, rows=slice(None), **settings):
  """Decode `rows` of the prompts with a draft that has the target's architecture."""
  settings = {"rng": keys()[rows], "max_new_tokens": LIMIT, "eos_id": EOS, **settings}
  draft = settings.pop("draft", None) or ModelDraft(TARGET, sampling, chain(gamma))
  prompt = settings.pop("prompt", prompts())[rows]
  verifier = TokenVerifier(sampling)
  out = speculative_decode(
    TARGET, draft, params(), draft_params, prompt, verifier=verifier, **settings
  )
  check(out, settings["max_new_tokens"], settings["eos_id"])
  return out


def texts(out):
  rows = zip(np.asarray(out.tokens).tolist(), np.asarray(out.lengths).tolist(), strict=True)
  return [tokens[:length] for tokens, length in rows]


def history(out, row=0):
  """Return (draft tokens, n, next token, number of emitted tokens) of each round that a row ran."""
  r = jax.tree.map(lambda a: np.asarray(a)[:, row].tolist(), out.rounds)
  rounds = zip(r.draft_tokens, r.num_accepted, r.next_token, r.num_emitted, strict=True)
  return [fields for fields in rounds if fields[-1] > 0]


def check(out, limit, eos):
  """Check that texts are within the limit, end at EOS, and agree with the recorded rounds."""
  assert out.tokens.shape[1] == limit
  num_emitted = np.asarray(out.rounds.num_emitted)
  for row, text in enumerate(texts(out)):
    assert 1 <= len(text) <= limit
    assert not np.asarray(out.tokens)[row, len(text) :].any()
    assert eos not in text[:-1]
    assert len(text) == limit or text[-1] == eos

    rounds = history(out, row)
    assert not num_emitted[len(rounds) :, row].any()  # a finished row emits nothing
    emitted = []
    for draft_tokens, n, next_token, count in rounds:
      assert 0 <= n <= len(draft_tokens)
      emitted += [*draft_tokens[:n], next_token][:count]
    assert emitted == text
    assert all(count == n + 1 for _, n, _, count in rounds[:-1])  # only the last round is truncated
    assert 1 <= rounds[-1][3] <= rounds[-1][1] + 1
  assert out.num_rounds == max(len(history(out, row)) for row in range(len(out.lengths)))


def accepted(out):
  """Return n, the number of accepted tokens, of every round of every row that was still running."""
  return np.asarray(out.rounds.num_accepted)[np.asarray(out.rounds.num_emitted) > 0]


def one(row):
  return slice(row, row + 1)


# Greedy output equals the oracle's for every draft.


def test_expected_texts_are_varied():
  """Identical texts would hide errors from the tests below."""
  assert len(set(oracle().ravel())) > 10
  assert len({tuple(row) for row in oracle()}) == 8
  assert [len(text) for text in until(EOS)] == [16, 1, 5, 4, 1, 8, 6, 16]


def test_greedy_autoregressive_decoding_equals_the_oracle():
  decode = functools.partial(
    autoregressive_decode, TARGET, params(), max_new_tokens=LIMIT, sampling=GREEDY, eos_id=EOS
  )
  whole = decode(prompts(), keys())
  check(whole, LIMIT, EOS)
  assert texts(whole) == until(EOS)
  assert whole.num_rounds == LIMIT
  for row, text in enumerate(until(EOS)):
    alone = decode(prompts()[one(row)], keys()[one(row)])
    check(alone, LIMIT, EOS)
    assert texts(alone) == [text]
    assert alone.num_rounds == len(text)


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [5])
def test_greedy_speculative_decoding_equals_the_oracle(gamma):
  """The batch sizes are 1 and 8; the drafts are good, bad and equal to the target."""
  for draft_params in drafts().values():
    whole = speculate(gamma, draft_params)
    assert texts(whole) == until(EOS)
    for row, text in enumerate(until(EOS)):
      alone = speculate(gamma, draft_params, rows=one(row))
      assert texts(alone) == [text]
      assert history(alone) == history(whole, row)


@pytest.mark.slow
def test_acceptance_of_the_good_the_bad_and_the_equal_draft():
  rates = {name: accepted(speculate(3, drafts()[name])).mean() for name in drafts()}
  assert rates["bad"] < 0.5 < 1 < rates["good"] < rates["equal"] == 3


def test_sampling_draft_of_another_architecture_does_not_change_greedy_output():
  small = tiny.config(vocab_size=V, layers=1, emb_dim=8)
  draft = ModelDraft(T5Model(small), Sampling(2.0), chain(3))
  out = speculate(3, tiny.params(small, 1), draft=draft)
  assert texts(out) == until(EOS)


# A draft equal to the target detects a draft cache that lacks the last accepted draft token.


def test_every_greedy_draft_token_of_a_draft_equal_to_the_target_is_accepted(gamma=3):
  """`test_adaptive.py` covers gamma 1, 2 and 4."""
  out = speculate(gamma, params())
  assert (accepted(out) == gamma).all()
  for row, text in enumerate(texts(out)):
    assert len(history(out, row)) == -(-len(text) // (gamma + 1))


@pytest.mark.slow
@pytest.mark.parametrize("gamma,sampling", [(4, Sampling(0.7, top_k=9, top_p=0.9))])
def test_every_sampled_draft_token_of_a_draft_equal_to_the_target_is_accepted(gamma, sampling):
  for seed in range(5):
    out = speculate(gamma, params(), sampling, rng=keys(seed))
    assert (accepted(out) == gamma).all()
    for row, text in enumerate(texts(out)):
      assert len(history(out, row)) == -(-len(text) // (gamma + 1))


# Scripted drafts: any number of accepted draft tokens, and EOS at any position of a block.


def scripts(wrong):
  """Return draft tokens [8, LIMIT + 1] by position: the oracle's tokens except where `wrong`."""
  right = np.pad(oracle(), ((0, 0), (1, 0)))
  other = np.where((right + 1) % V == EOS, (right + 2) % V, (right + 1) % V)
  return np.where(np.pad(wrong, ((0, 0), (1, 0))), other, right).astype(np.int32)


def expected_rounds(text, wrong, gamma):
  """Return (n, num_emitted) of each round when the draft tokens at `wrong` [LIMIT] are wrong."""
  rounds, position = [], 0
  while position < len(text):
    wrong_draft_tokens = [*wrong[position : position + gamma], True][: gamma + 1]
    n = wrong_draft_tokens.index(True)
    rounds.append((n, min(n + 1, len(text) - position)))
    position += n + 1
  return rounds


@pytest.mark.parametrize("gamma", [4, 7])
def test_text_and_rounds_for_random_patterns_of_right_and_wrong_draft_tokens(gamma):
  """Check 20 patterns of 8 rows, with EOS at any position of a block."""
  values_of_n, kinds_of_eos = set(), set()
  for seed in range(20):
    probability = [0.0, 0.1, 0.2, 0.5, 1.0][seed % 5]
    wrong = np.random.default_rng(seed).random((8, LIMIT)) < probability
    draft = tiny.ScriptedDraft(chain(gamma))
    out = speculate(gamma, scripts(wrong), draft=draft)
    assert texts(out) == until(EOS)
    for row, text in enumerate(until(EOS)):
      want = expected_rounds(text, wrong[row].tolist(), gamma)
      got = history(out, row)
      assert [emitted for *_, emitted in got] == [emitted for _, emitted in want]
      # The script past the end of the text is arbitrary, so n of the last round may be too.
      assert [n for _, n, *_ in got[:-1]] == [n for n, _ in want[:-1]]
      values_of_n |= {n for n, _ in want}
      if text[-1] == EOS:
        n, emitted = got[-1][1], got[-1][3]
        kinds_of_eos.add("draft_token" if emitted <= n else "bonus" if n == gamma else "correction")
  assert values_of_n == set(range(gamma + 1))
  assert kinds_of_eos == {"draft_token", "bonus", "correction"}


def test_eos_inside_accepted_draft_tokens_ends_the_row_there():
  """All draft tokens are right, including those after EOS, and yet the row stops at EOS."""
  gamma = 7
  right = scripts(np.zeros((8, LIMIT), bool))
  out = speculate(gamma, right, draft=tiny.ScriptedDraft(chain(gamma)))
  assert texts(out) == until(EOS)
  inside = [
    row
    for row, text in enumerate(until(EOS))
    if text[-1] == EOS and len(text) % (gamma + 1) not in (0, gamma)
  ]
  assert len(inside) > 3
  for row in inside:
    _, n, _, emitted = history(out, row)[-1]
    assert emitted == len(until(EOS)[row]) % (gamma + 1) < n + 1


def test_row_whose_first_token_is_eos_ends_after_one_round():
  first = [row for row in range(8) if oracle()[row, 0] == EOS]
  assert first
  for draft_params in drafts().values():
    out = speculate(5, draft_params)
    assert all(texts(out)[row] == [EOS] and len(history(out, row)) == 1 for row in first)


def test_rejected_eos_does_not_end_a_row():
  gamma = 4
  out = speculate(
    gamma,
    np.full((8, LIMIT + 1), EOS, np.int32),
    draft=tiny.ScriptedDraft(chain(gamma)),
    eos_id=EOS,
  )
  assert texts(out) == until(EOS)
  # All other draft tokens are wrong: each round emits one token, and the last one emits EOS.
  assert [len(history(out, row)) for row in range(8)] == [len(text) for text in until(EOS)]


def test_tokens_past_the_end_are_0():
  """In the prompts of a decoder-only model, these positions may hold padding."""
  state = DecodeState(*[None] * len(DecodeState._fields))._replace(
    tokens=jnp.array([[7, 2, 3, 9, 9, 9], [7, 6, 5, 4, 3, 9]]),
    length=jnp.array([3, 5]),
    prompt_length=jnp.array([1, 2]),
    num_rounds=jnp.array([4, 4]),
    rounds=empty_rounds(chain(0), 4, 2),
  )
  out = Decoder(TARGET, NullDraft(), TokenVerifier(GREEDY)).result(state)
  assert (out.tokens.tolist(), out.lengths.tolist()) == ([[2, 3, 0, 0], [5, 4, 3, 0]], [2, 3])


@pytest.mark.slow
def test_row_that_has_ended_does_not_overwrite_its_rounds():
  """In a batch with other rows, it may run more rounds than there are slots for."""
  draft, decoder_params = ModelDraft(TARGET, GREEDY, chain(2)), Params(params(), params())
  decoder = Decoder(TARGET, draft, TokenVerifier(GREEDY))
  state = decoder.init(decoder_params, jnp.asarray(prompts()[:2]), keys(batch=2), LIMIT)
  ended = jnp.array([True, False])
  state = state._replace(done=ended, num_rounds=jnp.array([LIMIT + 3, LIMIT - 1]))
  state = state._replace(rounds=jnp.full_like(state.rounds, 7))
  after = unpacked_rounds(draft.tree, decoder.round(decoder_params, state).rounds)
  assert all((x[:, 0] == 7).all() for x in after[:4])
  assert after.num_emitted[:, 1].tolist() == [7] * (LIMIT - 1) + [3]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 3])
def test_limit_smaller_than_a_block_truncates_the_text(limit):
  gamma = 7
  for draft_params in drafts().values():
    out = speculate(gamma, draft_params, max_new_tokens=limit)
    assert texts(out) == until(EOS, limit)
  assert out.num_rounds == 1  # the last draft is the target itself


def test_last_block_is_truncated_at_the_limit():
  """16 tokens are emitted in blocks of 4, or in blocks of 6 with the last block truncated to 4."""
  unended = [row for row, text in enumerate(until(EOS)) if text[-1] != EOS]
  assert unended
  for gamma, last in ((3, 4), (5, 4)):
    out = speculate(gamma, params())
    assert {history(out, row)[-1][3] for row in unended} == {last}


# Rows are independent of each other.


@pytest.mark.slow
@pytest.mark.parametrize("draft_name", ["good"])
def test_sampled_row_is_the_same_alone_and_in_a_batch(draft_name):
  """The tests against the oracle compare greedy rows one by one."""
  draft_params = drafts()[draft_name]
  whole = speculate(3, draft_params, RANDOM)
  assert len(set(np.asarray(whole.lengths))) > 2
  for row in range(8):
    alone = speculate(3, draft_params, RANDOM, rows=one(row))
    assert texts(alone) == [texts(whole)[row]]
    assert history(alone) == history(whole, row)


def test_autoregressively_sampled_row_is_the_same_alone_and_in_a_batch():
  decode = functools.partial(
    autoregressive_decode, TARGET, params(), max_new_tokens=LIMIT, sampling=RANDOM, eos_id=EOS
  )
  whole = decode(prompts(), keys())
  check(whole, LIMIT, EOS)
  for row in range(8):
    assert texts(decode(prompts()[one(row)], keys()[one(row)])) == [texts(whole)[row]]


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "sampling"])
def test_finished_row_does_not_depend_on_its_neighbors(sampling):
  """The rows that stop first do not change when all other rows run longer."""
  draft_params = drafts()["good"]
  before = speculate(3, draft_params, sampling)
  stops = np.asarray(before.lengths)
  early, late = np.flatnonzero(stops < 4), np.argmax(stops)
  assert len(early) and stops[late] > 10
  others = np.setdiff1d(np.arange(8), early)
  prompt, rng = prompts().copy(), keys()
  prompt[others], rng = prompt[late], rng.at[others].set(rng[late])
  after = speculate(3, draft_params, sampling, prompt=prompt, rng=rng)
  for row in early:
    assert texts(after)[row] == texts(before)[row]
    assert history(after, row) == history(before, row)
  for row in others:
    assert texts(after)[row] == texts(before)[late]


def test_row_text_is_determined_by_its_key():
  draft_params = drafts()["good"]
  first = speculate(3, draft_params, RANDOM)
  again = speculate(3, draft_params, RANDOM)
  other = speculate(3, draft_params, RANDOM, rng=keys(1))
  jax.tree.map(np.testing.assert_array_equal, first, again)
  assert texts(other) != texts(first)
  # Rows with the same prompt differ only because of their keys.
  same = np.repeat(prompts()[one(3)], 8, axis=0)
  out = speculate(3, draft_params, RANDOM, prompt=same)
  assert len({tuple(text) for text in texts(out)}) == 8


# Compilation and invalid input.


def test_calls_of_one_shape_compile_once():
  speculate(3, drafts()["good"])
  compiled = Decoder.run._cache_size()
  for seed, draft_params in enumerate(drafts().values()):
    prompt = tiny.sources(CONFIG, seed + 1, 8)
    speculate(3, draft_params, prompt=prompt, rng=keys(seed))
  assert Decoder.run._cache_size() == compiled

  settings = dict(max_new_tokens=LIMIT, eos_id=EOS)
  autoregressive_decode(TARGET, params(), prompts(), keys(), sampling=Sampling(0.0), **settings)
  compiled = Decoder.run._cache_size()
  for seed in range(3):
    prompt = tiny.sources(CONFIG, seed + 1, 8)
    other = tiny.params(CONFIG, seed)
    autoregressive_decode(TARGET, other, prompt, keys(seed), sampling=Sampling(0.0), **settings)
  assert Decoder.run._cache_size() == compiled


@pytest.mark.parametrize("gamma", [0, -2])
def test_gamma_below_1_is_rejected(gamma):
  with pytest.raises(ValueError, match=f"gamma is {gamma}"):
    ModelDraft(TARGET, GREEDY, chain(gamma))


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_switch_runs_one_branch(monkeypatch, backend):
  monkeypatch.setattr(jax, "default_backend", lambda: backend)

  def branch(number, state):
    return state["x"].sum() + number, {"x": state["x"] * number}

  branches = [functools.partial(branch, number) for number in (2.0, 3.0, 5.0)]
  for index, number in enumerate((2.0, 3.0, 5.0)):
    found = jax.jit(functools.partial(switch, branches=branches))(
      jnp.asarray(index), state={"x": jnp.ones(4)}
    )
    result, state = found
    assert result == 4 + number and (state["x"] == number).all()
