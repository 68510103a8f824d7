"""Test unigrams and bigrams: counts in plain Python, q and samples, and the target's output."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from tiny import autoregressive_decode, speculative_decode

from specdec_jax.core.context import Context
from specdec_jax.core.decode import Decoder, DecodeSettings
from specdec_jax.core.sampling import Sampling, distribution
from specdec_jax.core.trees import branching, chain
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.pieces import EOS_ID
from specdec_jax.drafts.ngram import NgramDraft, fit_ngrams
from specdec_jax.errors import InputError
from specdec_jax.exactness.checker import samples_row
from specdec_jax.exactness.texts import score_texts
from specdec_jax.models.t5 import T5Model

V = 24
LIMIT = 16
GREEDY = Sampling(temperature=0.0)
SAMPLINGS = [GREEDY, Sampling(), Sampling(2.0, top_k=3), Sampling(0.6, top_p=0.6)]


@functools.cache
def rows():
  """Return 300 texts of 1 to 9 tokens; low ids are most frequent, and 22 and 23 never occur."""
  rng = np.random.default_rng(0)

  def draw():
    return (2 + np.minimum(rng.geometric(0.2, rng.integers(0, 9)), 19)).tolist()

  return [[*draw(), EOS_ID] for _ in range(300)]


@functools.cache
def counted():
  """Return unigram counts, and successors of each token, counted in plain Python."""
  unigrams, successors = Counter(), {token: Counter() for token in range(V)}
  for row in rows():
    for before, token in zip([0, *row], row):
      unigrams[token] += 1
      successors[before][token] += 1
  return unigrams, successors


def weights(order, newest, kept=V):
  """Return the counts [V] of the successors of a token, computed in plain Python."""
  unigrams, successors = counted()
  counts = unigrams if order == 1 or not successors[newest] else successors[newest]
  if counts is not unigrams:
    counts = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:kept])
  return np.array([counts.get(token, 0) for token in range(V)], np.float32)


def propose(draft, ngrams, newest, seed=0):
  """Return draft tokens [B, G] and q [B, G, V] after rows of text that end with `newest` [B]."""
  newest = jnp.asarray(newest, jnp.int32)
  tokens = jnp.stack([newest * 0, newest * 0 + 5, newest, newest * 0], axis=1)
  keys = jax.random.split(jax.random.key(seed), len(newest))
  context = Context(None, tokens, newest * 0 + 3, None, None)
  state = draft.init(ngrams, context, jnp.zeros((len(newest), 1, 0)))
  assert state == ()
  (draft_tokens, q, _), state = jax.jit(draft.propose)(ngrams, state, context, keys)
  assert state == ()
  return np.asarray(draft_tokens), None if q is None else np.asarray(q)


# Counts.


@pytest.mark.parametrize("kept", [1, 4, 100])
def test_counts_equal_those_of_a_plain_counter(kept):
  ngrams = fit_ngrams(rows(), V, kept)
  unigrams, successors = counted()
  assert ngrams.unigrams.tolist() == [unigrams[token] for token in range(V)]
  assert ngrams.successors.shape == ngrams.counts.shape == (V, min(kept, V))
  for token in range(V):
    want = sorted(successors[token].items(), key=lambda item: (-item[1], item[0]))[:kept]
    found = zip(ngrams.successors[token].tolist(), ngrams.counts[token].tolist())
    assert [pair for pair in found if pair[1]] == want
  assert not ngrams.counts[EOS_ID].any()  # no bigram extends from one row into the next
  assert any(len(s) > 4 for s in successors.values()) and not successors[23]


def test_start_token_may_also_be_eos_and_token_0_may_be_any_token():
  """In GPT-2 the last token precedes a text and ends it, and 0 is an ordinary token."""
  ngrams = fit_ngrams([[0, 3, 0, 9], [0, 9], [3, 9]], 10, start_id=9)
  assert ngrams.unigrams.tolist() == [3, 0, 0, 2, 0, 0, 0, 0, 0, 3]
  found = {t: ngrams.successors[t][ngrams.counts[t] > 0].tolist() for t in (0, 3, 9)}
  assert found == {0: [9, 3], 3: [0, 9], 9: [0, 3]}  # after 9: the first tokens of texts
  assert ngrams.counts[9].tolist()[:3] == [2, 1, 0]


def test_counts_of_32_thousand_tokens_take_little_memory():
  ngrams = fit_ngrams([[31_999, 7, 1]], 32_128)
  assert sum(x.nbytes for x in ngrams) < 40e6
  draft_tokens, _ = propose(NgramDraft(2, 32_128, GREEDY, chain(2)), ngrams, [0, 31_999])
  assert draft_tokens.tolist() == [[31_999, 7], [7, 1]]


# Proposals.


@pytest.mark.parametrize(
  "order, sampling", [(1, Sampling(0.6)), *((2, sampling) for sampling in SAMPLINGS)], ids=str
)
def test_q_is_the_adjusted_distribution_of_the_counts(order, sampling):
  """The q after every token, including unseen tokens, and after each draft token is compared."""
  draft = NgramDraft(order, V, sampling, chain(3))
  draft_tokens, q = propose(draft, fit_ngrams(rows(), V, 4), range(V))
  if sampling.is_argmax:
    assert q is None
    q = np.eye(V)[draft_tokens]
  before = np.concatenate([np.arange(V)[:, None], draft_tokens[:, :-1]], axis=1)
  want = np.stack([[weights(order, newest, kept=4) for newest in row] for row in before])
  with np.errstate(divide="ignore"):
    want = distribution(jnp.asarray(np.log(want)), sampling)
  np.testing.assert_allclose(q, want, atol=1e-6)
  assert (np.take_along_axis(q, draft_tokens[..., None], axis=2) > 0).all()


@pytest.mark.parametrize("sampling", SAMPLINGS[2:], ids=str)
def test_draft_tokens_are_sampled_from_q(sampling):
  """20,000 pairs of draft tokens are tested at tiny.LEVEL; q at temperature 1 must be detected."""
  ngrams, n = fit_ngrams(rows(), V), 20_000
  draft_tokens, q = propose(NgramDraft(2, V, sampling, chain(2)), ngrams, [3] * n)
  second = np.zeros((V, V))
  second[draft_tokens[:, 0]] = q[:, 1]
  joint = q[0, 0][:, None] * second
  joint /= joint.sum()  # pairs whose first token was never sampled have negligible mass
  counts = np.bincount(draft_tokens[:, 0] * V + draft_tokens[:, 1], minlength=V * V)
  assert tiny.p_value(counts, joint) > tiny.LEVEL
  assert tiny.detectable(n, joint) < 0.15
  plain = weights(2, 3) / weights(2, 3).sum()
  assert tiny.p_value(np.bincount(draft_tokens[:, 0], minlength=V), plain) < tiny.CAUGHT


def test_rows_do_not_depend_on_their_neighbors():
  ngrams, draft = fit_ngrams(rows(), V), NgramDraft(2, V, Sampling(), chain(3))
  tokens = jnp.asarray([[0, 4, 0, 0], [0, 9, 5, 0], [0, 0, 0, 0]])
  length, keys = jnp.asarray([2, 3, 1]), jax.random.split(jax.random.key(3), 3)
  propose_jitted = jax.jit(draft.propose)

  def proposed(*rows):
    return propose_jitted(ngrams, (), Context(None, *rows[:2], None, None), rows[2])[0]

  whole = proposed(tokens, length, keys)
  for row in range(3):
    of_row = slice(row, row + 1)
    alone = proposed(tokens[of_row], length[of_row], keys[of_row])
    np.testing.assert_array_equal(alone.tokens[0], whole.tokens[row])
    np.testing.assert_allclose(alone.q[0], whole.q[row], atol=1e-7)


# The output equals the target's.

CONFIG = tiny.config(vocab_size=V, num_encoder_layers=1)
TARGET = T5Model(CONFIG)
EOS = 5  # with these weights some texts end in it and some do not


@functools.cache
def decoded():
  """Return parameters of the target, prompts [8, S], and its greedy texts [8, LIMIT]."""
  params, prompts = tiny.params(CONFIG, 526), tiny.sources(CONFIG, 0, 8)
  keys = jax.random.split(jax.random.key(0), 8)
  out = autoregressive_decode(
    TARGET, params, prompts, keys, max_new_tokens=LIMIT, sampling=GREEDY, eos_id=EOS
  )
  return params, prompts, np.asarray(out.tokens), np.asarray(out.lengths)


def speculate(order, gamma, rows, ngrams):
  params, prompts, *_ = decoded()
  return speculative_decode(
    *(TARGET, NgramDraft(order, V, GREEDY, chain(gamma)), params, ngrams, prompts[rows]),
    jax.random.split(jax.random.key(1), len(prompts[rows])),
    max_new_tokens=LIMIT,
    verifier=TokenVerifier(GREEDY),
    eos_id=EOS,
  )


@pytest.mark.slow
@pytest.mark.parametrize("order, gamma, batch", [(1, 3, 3), (2, 5, 3)])
def test_greedy_output_equals_the_targets(order, gamma, batch):
  """Bigrams of the target's own texts are often accepted, bigrams of other texts rarely."""
  _, _, tokens, lengths = decoded()
  assert len(set(lengths)) > 3
  own = fit_ngrams([t[:n][t[:n] > 0].tolist() for t, n in zip(tokens, lengths)], V)
  some = slice(3, 3 + batch)
  rounds = []
  for ngrams in (own, fit_ngrams(rows(), V)):
    out = speculate(order, gamma, some, ngrams)
    np.testing.assert_array_equal(out.tokens, tokens[some])
    np.testing.assert_array_equal(out.lengths, lengths[some])
    rounds.append(int(out.num_rounds))
  if order == 2:
    assert rounds[0] < rounds[1] <= LIMIT


def test_calls_of_one_shape_compile_once():
  speculate(2, 5, slice(3, 6), fit_ngrams(rows(), V))
  compiled = Decoder.run._cache_size()
  speculate(2, 5, slice(3, 6), fit_ngrams(rows()[:100], V))
  assert Decoder.run._cache_size() == compiled


@pytest.mark.slow
def test_sampled_output_has_the_targets_joint_distribution(order=1):
  # Bigrams are tested above.
  pair = tiny_pair.pair()
  size = len(pair.vocabulary)
  ngrams = fit_ngrams([pair.vocabulary.encode(text) for text in tiny_pair.SENTENCES], size)

  def draft(sampling, tree, options=None):
    return NgramDraft(order, size, sampling, tree)

  decode = tiny_pair.changed(pair, draft=draft, draft_params=ngrams).decode_fn(Sampling(), chain(2))
  settings = DecodeSettings(Sampling(), batch_size=32, max_new_tokens=4)
  found = score_texts(pair, tiny_pair.SENTENCES[:4], decode, settings, num_tokens=6000)
  assert samples_row([found], "", tiny.LEVEL).holds


# Invalid input.


@pytest.mark.parametrize(
  "call, words",
  [
    (lambda: fit_ngrams([[3, V]], V), f"to {V}"),
    (lambda: fit_ngrams([[3, -1]], V), "from -1"),
    (lambda: fit_ngrams([[3, 1, 0]], V), "padding"),
    (lambda: fit_ngrams([[0, 3, 1], [3, 1]], V), "padding"),
    (lambda: fit_ngrams([[3, 1]], V, 0), "num_successors is 0"),
    (lambda: NgramDraft(3, V, GREEDY, chain(2)), "order is 3"),
    (lambda: NgramDraft(2, V, GREEDY, chain(0)), "gamma is 0"),
    (lambda: NgramDraft(2, V, GREEDY, branching(2)), "chains"),
    (lambda: propose(NgramDraft(2, V, GREEDY, chain(2)), fit_ngrams([[3]], 9), [3]), "of 9 tokens"),
  ],
)
def test_invalid_input_raises(call, words):
  with pytest.raises(InputError, match=words):
    call()
