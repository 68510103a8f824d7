"""Compare prompt lookup with a plain search, and its output with the target's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import autoregressive_decode, speculative_decode

from specdec_jax.core.context import Context
from specdec_jax.core.decode import Decoder
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import DynamicTree, Tree, chain
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.prompt_lookup import PromptLookupDraft
from specdec_jax.errors import InputError
from specdec_jax.models.t5 import T5Model

GREEDY = Sampling(temperature=0.0)


def by_hand(source, text, gamma, max_ngram, vocab_size, taken=()):
  """Return the tokens for one row, whose source has no padding, by a search that starts with the
  best match. The first draft token is not in `taken`."""
  for n in range(min(max_ngram, len(text)), 0, -1):
    suffix = text[-n:]
    for context, in_text in ((source, False), (text, True)):
      for end in range(len(context) - 1, n - 1, -1):  # a match needs a successor
        if context[end - n : end] == suffix and context[end] not in taken:
          followed = list(context[end:])
          for _ in range(gamma):
            followed.append(followed[len(followed) - (len(text) - end)] if in_text else 0)
          return [token if token < vocab_size else 0 for token in followed[:gamma]]
  return [0] * gamma


@functools.cache
def proposing(tree, max_ngram, vocab_size, *options):
  tree = chain(tree) if isinstance(tree, int) else tree
  draft = PromptLookupDraft(vocab_size, tree, max_ngram, *options)

  def run(prompt, tokens, length):
    context = Context(prompt, tokens, length, None, None)
    state = draft.init((), context, jnp.zeros((len(tokens), 1, 0)))
    keys = jax.random.split(jax.random.key(0), len(length))
    proposal, after = draft.propose((), state, context, keys)
    return proposal.tokens, proposal.q, jnp.array_equal(after, state)

  return jax.jit(run)


def propose(sources, texts, gamma, max_ngram=3, vocab_size=40, slots=20, width=16, options=()):
  """Return draft tokens for rows of different lengths, and check that they are deterministic."""

  def fill(rows, size):
    return np.array([[*r, *[0] * (size - len(r))] for r in rows], np.int32)

  lengths = np.array([len(text) for text in texts], np.int32)
  run = proposing(gamma, max_ngram, vocab_size, *options)
  draft_tokens, q, same_state = run(fill(sources, width), fill(texts, slots), lengths)
  assert q is None and same_state and run._cache_size() == 1
  return np.asarray(draft_tokens).tolist()


# Examples by hand. Texts begin with T5's start token 0, and sources end with EOS 1.


@pytest.mark.parametrize(
  "source, text, draft_tokens",
  [
    ([5, 6, 7, 8, 9, 1], [0, 6, 7], [8, 9, 1, 0]),  # up to the end of the source, then padding
    ([5, 6, 7, 8, 9, 1], [0, 9], [1, 0, 0, 0]),
    ([5, 6, 7, 8, 9, 1], [0, 3], [0, 0, 0, 0]),  # no match
    ([5, 6, 7, 8, 9, 1], [0], [0, 0, 0, 0]),  # no context yet
    ([4, 7, 9, 8, 7, 5, 1], [0, 8, 7], [5, 1, 0, 0]),  # two tokens rather than one
    ([8, 7, 4, 3, 7, 5, 1], [0, 8, 7], [4, 3, 7, 5]),  # even if the shorter match is later
    ([7, 4, 1], [0, 7, 5, 6, 7], [4, 1, 0, 0]),  # the source takes precedence over the text
    ([7, 4, 1], [0, 6, 7, 5, 6, 7], [5, 6, 7, 5]),  # but not over a longer match
    ([7, 4, 7, 5, 1], [0, 7], [5, 1, 0, 0]),  # the last one
    ([9, 1], [0, 7, 5, 7, 6, 7], [6, 7, 6, 7]),  # the last one in the text
    ([9, 1], [0, 7, 7], [7, 7, 7, 7]),  # a period of one
    ([7, 50, 8, 1], [0, 7], [0, 8, 1, 0]),  # 50 is not among the target's 40 tokens
    ([2, 3, 4, 6, 3, 4, 5, 7, 3, 4, 8, 1], [0, 6, 3, 4], [5, 7, 3, 4]),  # three rather than two
    ([5, 6, 3, 4, 5, 7, 6, 3, 4, 8, 1], [0, 5, 6, 3, 4], [8, 1, 0, 0]),  # four count as three
    ([5, 6, 1], [0, 5, 6, 8, 6, 8], [6, 8, 6, 8]),  # after a prompt: what followed in the text
    ([5, 6, 1], [0, 5, 6, 8, 5, 6], [1, 0, 0, 0]),  # the end of the prompt occurs again: its EOS
    ([1], [0, 5, 6, 8, 5, 6], [8, 5, 6, 8]),  # an empty one
  ],
)
def test_examples_by_hand(source, text, draft_tokens):
  assert propose([source], [text], gamma=4) == [draft_tokens]
  assert by_hand(source, text, 4, 3, 40) == draft_tokens


@pytest.mark.parametrize(
  "tokens_per_match, from_start, draft_tokens",
  [
    (1, False, [[0, 0, 0, 0], [8, 9, 0, 0], [8, 0, 0, 0], [0, 0, 0, 0]]),
    (2, False, [[0, 0, 0, 0], [8, 9, 1, 0], [8, 9, 0, 0], [0, 0, 0, 0]]),
    (None, True, [[5, 6, 7, 8], [8, 9, 1, 0], [8, 9, 1, 0], [0, 0, 0, 0]]),
    (1, True, [[5, 6, 7, 0], [8, 9, 0, 0], [8, 0, 0, 0], [0, 0, 0, 0]]),
  ],
)
def test_long_matches_and_starts_of_texts(tokens_per_match, from_start, draft_tokens):
  sources, texts = [[5, 6, 7, 8, 9, 1]] * 4, [[0], [0, 6, 7], [0, 7], [0, 3]]
  options = tokens_per_match, from_start
  assert propose(sources, texts, gamma=4, options=options) == draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("max_ngram", [1, 2, 3, 5])
@pytest.mark.parametrize("gamma", [1, 4])
def test_draft_tokens_equal_those_of_a_plain_search(gamma, max_ngram):
  """One call has 1,000 random rows; with two token ids, matches of every length are frequent."""
  rng = np.random.default_rng(0)

  def some(least, most):
    return rng.integers(2, 4, rng.integers(least, most)).tolist()

  # Some sources were cut and lack EOS, and some texts (of a model that is not a T5) lack a start
  # token.
  sources = [[*some(0, 15), *[1][: i % 2]] for i in range(1000)]
  texts = [[*[0][: i % 3], *some(1, 18)] for i in range(1000)]
  got = propose(sources, texts, gamma, max_ngram, vocab_size=4)
  want = [by_hand(*row, gamma, max_ngram, 4) for row in zip(sources, texts)]
  assert got == want
  # Each length of a match changes the draft tokens.
  shorter = [by_hand(*row, gamma, max_ngram - 1, 4) for row in zip(sources, texts)]
  assert sum(a != b for a, b in zip(want, shorter)) > 5


def test_branches_are_the_next_best_matches_with_another_first_token():
  rng = np.random.default_rng(1)

  def some(least, most):
    return rng.integers(2, 6, rng.integers(least, most)).tolist()

  sources, texts = zip(*(([*some(3, 15), 1], [0, *some(1, 18)]) for _ in range(300)))
  tree = Tree((0, 0, 1, 1, 2, 3))  # two branches of depth 3 and 2, and a child in neither of them
  got = propose(sources, texts, tree, vocab_size=6)
  others = 0
  for source, text, draft_tokens in zip(sources, texts, got):
    first = by_hand(source, text, 3, 3, 6)
    # No two branches begin with the same token, not even with padding.
    second = by_hand(source, text, 3, 3, 6, taken=first[:1])
    others += second[0] > 0
    assert draft_tokens == [first[0], second[0], first[1], 0, second[1], first[2]]
  assert others > 100


def test_slots_past_the_text_are_not_read():
  run = proposing(4, 3, 40)
  prompt, length = np.array([[5, 6, 7, 1]], np.int32), np.array([4], np.int32)
  clean, junk = np.zeros((1, 20), np.int32), np.full((1, 20), 9, np.int32)
  clean[0, :4] = junk[0, :4] = [0, 9, 8, 9]
  assert run(prompt, clean, length)[0].tolist() == run(prompt, junk, length)[0].tolist()
  assert run(prompt, junk, length)[0].tolist() == [[8, 9, 8, 9]]


# The output equals the target's.

V, LIMIT, EOS = 24, 24, 16
CONFIG = tiny.config(vocab_size=V, num_encoder_layers=1)
TARGET = T5Model(CONFIG)


@functools.cache
def decoded():
  """Return parameters of the target, prompts [8, S], and its greedy texts [8, LIMIT]."""
  params, prompts = tiny.params(CONFIG, 12), tiny.sources(CONFIG, 0, 8)
  keys = jax.random.split(jax.random.key(0), 8)
  out = autoregressive_decode(
    TARGET, params, prompts, keys, max_new_tokens=LIMIT, sampling=GREEDY, eos_id=EOS
  )
  return params, prompts, np.asarray(out.tokens), np.asarray(out.lengths)


def speculate(gamma, rows):
  params, prompts, *_ = decoded()
  return speculative_decode(
    *(TARGET, PromptLookupDraft(V, chain(gamma)), params, (), prompts[rows]),
    jax.random.split(jax.random.key(1), len(prompts[rows])),
    max_new_tokens=LIMIT,
    verifier=TokenVerifier(GREEDY),
    eos_id=EOS,
  )


@pytest.mark.slow
def test_greedy_output_equals_the_targets(gamma=5, batch=3):
  _, _, tokens, lengths = decoded()
  accepted = 0
  for first in range(8 - batch):
    rows = slice(first, first + batch)
    out = speculate(gamma, rows)
    np.testing.assert_array_equal(out.tokens, tokens[rows])
    np.testing.assert_array_equal(out.lengths, lengths[rows])
    accepted += int((lengths[rows] - (np.asarray(out.rounds.num_emitted) > 0).sum(axis=0)).sum())
  assert accepted > 0


def test_calls_of_one_shape_compile_once():
  speculate(5, slice(0, 3))
  compiled = Decoder.run._cache_size()
  speculate(5, slice(3, 6))
  assert Decoder.run._cache_size() == compiled


@pytest.mark.parametrize(
  "tree, options, words",
  [
    (chain(0), (3,), "gamma is 0"),
    (chain(3), (0,), "max_ngram is 0"),
    (chain(3), (3, 0), "tokens_per_match is 0"),
    (DynamicTree(3, 2), (3,), "takes static trees"),
  ],
)
def test_invalid_input_raises(tree, options, words):
  with pytest.raises(InputError, match=words):
    PromptLookupDraft(V, tree, *options)
