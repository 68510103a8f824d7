"""Logits processors: definitions, prefixes of nodes, and exactness with every verifier.

Each processor has a reference here: plain Python, one text at a time.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_verifiers
import tiny
import tiny_pair
from test_verifiers import DRAFT_TOKENS, TREES, VERIFIERS, V, enumerated, exact, tables

from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.core.context import Context, Prefixes, node_prefixes
from specdec_jax.core.decode import Decoder
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.processors import (
  ForcedPrefix,
  ForcedTokens,
  FunctionProcessor,
  LogitsProcessor,
  MinLength,
  NoRepeatNgram,
  RepetitionPenalty,
  SequenceBias,
  SuppressAtBegin,
  TrieConstraint,
  process,
)
from specdec_jax.core.sampling import Sampling, distribution, row_keys
from specdec_jax.core.settings import HashableArray
from specdec_jax.core.trees import DynamicTree, Tree, chain
from specdec_jax.core.verify.gumbel import GumbelVerifier
from specdec_jax.drafts.hierarchical import HierarchicalDraft
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError
from specdec_jax.generate import GenerateCall, generation_config
from specdec_jax.load import load_pair

EOS = 1
SOURCE = [2, 1, 2, 1, 0]  # with EOS and padding
TEXT = [0, 2, 2]  # committed tokens
PROMPT_LENGTH, LIMIT = 2, 5  # one of the committed tokens is new
SENTENCES = [tiny_pair.SENTENCES[i] for i in (0, 14, 60, 33)]
SHORT = dict(max_new_tokens=16)


def ids(*tokens) -> HashableArray:
  return HashableArray(np.array(tokens, np.int32))


def penalized(tokens, penalty):
  def reference(logits, text):
    seen = {*tokens(text)}
    worse = [x * penalty if x < 0 else x / penalty for x in logits]
    return [worse[i] if i in seen else x for i, x in enumerate(logits)]

  return reference


def unrepeated(tokens, n):
  def reference(logits, text):
    past, end = tokens(text), tuple(text[len(text) - n + 1 :]) if n > 1 else ()
    if len(text) < n - 1:
      return logits
    ngrams = {tuple(past[i : i + n]) for i in range(len(past) - n + 1)}
    return [-math.inf if (*end, i) in ngrams else x for i, x in enumerate(logits)]

  return reference


def biased(biases):
  def reference(logits, text):
    logits = [*logits]
    for sequence, bias in biases.items():
      before = [*sequence[:-1]]
      fits = len(sequence) == 1 or len(sequence) <= len(text)
      if fits and text[len(text) - len(before) :] == before:
        logits[sequence[-1]] += bias
    return logits

  return reference


def only(allowed, when):
  def reference(logits, text):
    if not when(text):
      return logits
    return [0.0 if i in allowed else -math.inf for i in range(len(logits))]

  return reference


def without(token, when):
  def reference(logits, text):
    return [-math.inf if i == token and when(text) else x for i, x in enumerate(logits)]

  return reference


def lowered(logits, tokens, length):
  """A user's function: lower the last token by the length, and token 0 if the length is even."""
  logits = logits.at[tokens[length - 1]].add(-0.3 * length)
  return logits.at[0].add(jnp.where(length % 2 == 0, -1.0, 0.0))


def lowered_reference(logits, text):
  logits = [*logits]
  logits[text[-1]] -= 0.3 * len(text)
  logits[0] -= len(text) % 2 == 0
  return logits


SOURCE_TOKENS = [token for token in SOURCE if token]
BIASES = {(2,): 0.5, (2, 0): -1.5, (2, 2, 1): 2.0, (0, 0, 0, 0, 0, 0): 9.0}
PROCESSORS = {
  "repetition_penalty": (RepetitionPenalty(1.7), penalized(lambda text: text, 1.7)),
  "encoder_repetition_penalty": (
    RepetitionPenalty(1 / 1.7, of_prompt=True),
    penalized(lambda text: SOURCE_TOKENS, 1 / 1.7),
  ),
  "encoder_repetition_penalty, decoder-only": (
    RepetitionPenalty(1 / 1.7, of_prompt=True, pad_id=None),
    penalized(lambda text: text[:PROMPT_LENGTH], 1 / 1.7),
  ),
  "no_repeat_ngram_size 1": (NoRepeatNgram(1), None),
  "no_repeat_ngram_size 2": (NoRepeatNgram(2), unrepeated(lambda text: text, 2)),
  "no_repeat_ngram_size 3": (NoRepeatNgram(3), unrepeated(lambda text: text, 3)),
  "encoder_no_repeat_ngram_size": (
    NoRepeatNgram(2, of_prompt=True),
    unrepeated(lambda text: SOURCE_TOKENS, 2),
  ),
  "bad_words_ids": (
    SequenceBias.excluding([(2, 1), (0, 2)]),
    biased({(2, 1): -math.inf, (0, 2): -math.inf}),
  ),
  "suppress_tokens": (SequenceBias.excluding([(2,)]), without(2, lambda text: True)),
  "begin_suppress_tokens": (
    SuppressAtBegin(ids(2)),
    without(2, lambda text: len(text) == PROMPT_LENGTH),
  ),
  "sequence_bias": (SequenceBias.of(BIASES), biased(BIASES)),
  "min_length": (MinLength(4, 0, ids(EOS)), without(EOS, lambda text: len(text) < 4)),
  "min_new_tokens": (
    MinLength(0, 3, ids(EOS)),
    without(EOS, lambda text: len(text) - PROMPT_LENGTH < 3),
  ),
  "forced_bos_token_id": (ForcedTokens(first=ids(2)), only({2}, lambda text: len(text) == 1)),
  "forced_eos_token_id": (
    ForcedTokens(last=ids(1, 2)),
    only({1, 2}, lambda text: len(text) == LIMIT - 1),
  ),
  "function": (FunctionProcessor(lowered), lowered_reference),
}
ALLOWING_ANY = [name for name, (_, reference) in PROCESSORS.items() if reference]


def context_of(batch: int, text=TEXT, num_slots: int = 16) -> Context:
  """Return a context whose unused slots hold tokens that must not matter."""
  tokens = np.full((batch, num_slots), 2, np.int32)
  tokens[:, : len(text)] = text
  full = np.full(batch, 1, np.int32)
  source = np.broadcast_to(np.array(SOURCE, np.int32), (batch, len(SOURCE)))
  bounds = full * PROMPT_LENGTH, full * LIMIT
  context = Context(source, tokens, full * len(text), None, None, *bounds)
  return jax.tree.map(jnp.asarray, context)


def processed_tables(raw: list[np.ndarray], reference) -> list[np.ndarray]:
  """Return the distribution after each text, [V] * d + [V], of log-probabilities `raw`."""
  tables = []
  for d, logits in enumerate(raw):
    table = np.zeros(logits.shape)
    for text in itertools.product(range(V), repeat=d):
      row = np.array(reference(logits[text].tolist(), [*TEXT, *text]))
      weights = np.exp(row - row.max())
      table[text] = weights / weights.sum()
    tables.append(table)
  return tables


@functools.cache
def adjusting(processor, tree, prefixes_of):
  """Return a compiled function that applies a processor to the p of each node of proposals."""

  @jax.jit
  def adjust(x, p):
    prefixes = prefixes_of(context_of(len(x)), x, tree)
    return distribution(process((processor,), jnp.log(p), prefixes), Sampling())

  return adjust


def with_processor(verify, processor, prefixes_of=node_prefixes):
  """Return a verifier of proposals that applies a processor to the p of each node."""

  def processed(tree, x, q, p):
    return verify(tree, x, q, np.asarray(adjusting(processor, tree, prefixes_of)(x, p)))

  return processed


def joint_with(name, shape, way, verifier, prefixes_of=node_prefixes):
  """Return the joint distribution that rounds emit, and the target's."""
  processor, reference = PROCESSORS[name]
  tree = TREES[shape]
  raw = [np.log(table) for table in tables(3, tree.depth)]
  proposals = enumerated(tree, tables(103, tree.depth), DRAFT_TOKENS[way])
  verify = with_processor(VERIFIERS[verifier], processor, prefixes_of)
  want = processed_tables(raw, reference)
  joint = emitted_with(tree, [np.exp(logits) for logits in raw], want, proposals, verify)
  return joint, exact(want)


def emitted_with(tree, raw, continued, proposals, verify):
  """Return the joint distribution: rounds see `raw`, and later rounds continue with `continued`."""
  by_length = [np.zeros((V,) * (d + 1)) for d in range(tree.depth + 1)]
  for first in range(0, len(proposals[2]), test_verifiers.BATCH):
    x, x_q, prob = (field[first : first + test_verifiers.BATCH] for field in proposals)
    rows = np.arange(test_verifiers.BATCH) % len(x)
    batch = x[rows], x_q[rows], np.pad(prob, (0, test_verifiers.BATCH - len(x)))
    test_verifiers._add_emitted(tree, raw, batch, verify, by_length)
  joint = by_length[0]
  for next_p, of_length in zip(continued[1:], by_length[1:]):
    joint = joint[..., None] * next_p + of_length
  return joint


ENUMERATED = [*itertools.product(ALLOWING_ANY, ("chain of 2", "siblings"))]
ENUMERATED += [("no_repeat_ngram_size 2", "ragged"), ("function", "ragged")]


@pytest.mark.parametrize("name, shape", ENUMERATED)
def test_verifiers_emit_the_processed_distribution(name, shape):
  """By exact enumeration, as in test_verifiers.py, with a draft that knows no processor."""
  for verifier in ("tokens", "blocks"):
    joint, want = joint_with(name, shape, "without replacement", verifier)
    np.testing.assert_allclose(joint, want, atol=test_verifiers.ATOL)


def sees_a_sibling(context, draft_tokens, tree):
  """Fault: the prefix of each node ends with the first child of the node's parent."""
  first = np.array([tree.parents.index(parent) for parent in tree.parents], int)
  return node_prefixes(context, draft_tokens[:, first], tree)


def sees_a_rejected_draft_token(context, draft_tokens, tree):
  """Fault: the first draft token counts as committed."""
  prefixes = node_prefixes(context, draft_tokens, tree)
  if not tree.num_draft_tokens:
    return prefixes
  tokens = prefixes.tokens.at[jnp.arange(len(draft_tokens)), 0, context.length].set(
    draft_tokens[:, 0]
  )
  return prefixes._replace(tokens=tokens, length=prefixes.length.at[:, 0].add(1))


def sees_the_round_before(context, draft_tokens, tree):
  """Fault: the last committed token is missing."""
  return node_prefixes(context._replace(length=context.length - 1), draft_tokens, tree)


FAULTS = [sees_a_sibling, sees_a_rejected_draft_token, sees_the_round_before]


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_prefixes_are_detected(fault):
  joint, want = joint_with("function", "ragged", "without replacement", "tokens", fault)
  assert np.abs(joint - want).max() > 1e-3


@pytest.mark.parametrize("kind", ["chain", "tree", "dynamic"])
def test_node_prefixes_are_the_texts_of_the_nodes(kind):
  """Rows of different lengths, and for a dynamic tree of different shapes."""
  parents = np.array([[0, 0, 1, 1, 2, 4], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 3, 5]])
  tree = {
    "chain": chain(6),
    "tree": Tree(tuple(parents[0])),
    "dynamic": DynamicTree(6, 6, jnp.asarray(parents)),
  }[kind]
  rng = np.random.default_rng(0)
  draft_tokens = rng.integers(0, 50, (3, 6)).astype(np.int32)
  texts = [rng.integers(0, 50, n).tolist() for n in (1, 4, 9)]
  tokens = rng.integers(0, 50, (3, 20)).astype(np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  length = np.array([*map(len, texts)], np.int32)
  context = Context(draft_tokens, tokens, length, None, None, length, length + 9)
  context = jax.tree.map(jnp.asarray, context)
  for first, last in ((0, None), (1, 3), (4, 7)):
    known = draft_tokens[:, : last - 1] if last else draft_tokens
    found = node_prefixes(context, jnp.asarray(known), tree, first, last)
    for row, text in enumerate(texts):
      of_row = {"chain": range(6), "tree": parents[0], "dynamic": parents[row]}[kind]
      for k, node in enumerate(range(first, last or 7)):
        path = []
        while node:
          path, node = [draft_tokens[row, node - 1], *path], of_row[node - 1]
        want = [*text, *path]
        assert found.length[row, k] == len(want)
        np.testing.assert_array_equal(found.tokens[row, k], want + [0] * (20 - len(want)))


def test_ngrams_longer_than_a_text_exclude_nothing():
  fields = np.zeros((1, 2, 5), np.int32), np.full((1, 2), 5), [1], [9], [SOURCE]
  prefixes = Prefixes(*(jnp.asarray(field, jnp.int32) for field in fields))
  for size, is_excluded in ((5, True), (6, False), (2**31 - 1, False)):
    found = jax.jit(NoRepeatNgram(size))(jnp.zeros((1, 2, 4)), prefixes)
    assert (np.isneginf(found) == ([is_excluded] + [False] * 3)).all()


@pytest.mark.parametrize("name", PROCESSORS)
def test_processor_equals_its_reference(name):
  """Random texts of all lengths, from a larger vocabulary than that of the enumeration."""
  processor, reference = PROCESSORS[name]
  reference = reference or unrepeated(lambda text: text, 1)
  rng = np.random.default_rng(1)
  vocab_size, num_nodes = 9, 12
  length = np.arange(1, num_nodes + 1, dtype=np.int32)[None]
  texts = rng.integers(0, 4, (1, num_nodes, num_nodes + 2)).astype(np.int32)
  texts = np.where(np.arange(num_nodes + 2) < length[..., None], texts, 0)
  logits = rng.normal(size=(1, num_nodes, vocab_size)).astype(np.float32)
  one = np.ones(1, np.int32)
  fields = texts, length, PROMPT_LENGTH * one, LIMIT * one, np.array([SOURCE])
  prefixes = Prefixes(*map(jnp.asarray, fields))
  found = jax.jit(lambda logits: processor(logits, prefixes))(logits)
  for k in range(num_nodes):
    want = reference(logits[0, k].tolist(), texts[0, k, : length[0, k]].tolist())
    np.testing.assert_allclose(found[0, k], want, rtol=1e-6, err_msg=str(k))


COMBINATIONS = [
  dict(repetition_penalty=1.6, min_new_tokens=6, bad_words_ids=[[5, 6], [7]]),
  dict(no_repeat_ngram_size=2, encoder_repetition_penalty=1.4, min_length=9),
  dict(
    encoder_no_repeat_ngram_size=2,
    suppress_tokens=[4, 8],
    begin_suppress_tokens=[32],
    forced_eos_token_id=1,
  ),
]


SHAPES = [dict(gamma=3, batch_size=4), dict(tree=(0, 0, 1, 1), logprobs=True), dict(gamma=3)]


@pytest.mark.slow
@pytest.mark.parametrize(
  "settings, how", [*zip(COMBINATIONS, SHAPES, strict=True)], ids=lambda each: " ".join(each)
)
def test_speculation_does_not_change_outputs_with_processors(settings, how):
  pair = tiny_pair.pair()
  want = pair.generate(SENTENCES, gamma=0, **settings, **SHORT)
  unchanged = pair.generate(SENTENCES, gamma=0, **SHORT)
  assert texts_of(want) != texts_of(unchanged)  # the settings have an effect
  found = pair.generate(SENTENCES, **how, **settings, **SHORT)
  assert texts_of(found) == texts_of(want)
  assert sum(len(output.tokens) for output in found) > sum(
    len(output.rounds.num_emitted) for output in found
  )


def texts_of(outputs):
  return [(output.text, output.tokens.tolist()) for output in outputs]


@pytest.mark.slow
def test_draft_equal_to_the_target_is_always_accepted_with_processors():
  """So drafts apply the same processors to q, above temperature 0 too."""
  pair = tiny_pair.pair("target")
  settings = dict(repetition_penalty=1.6, no_repeat_ngram_size=2, top_k=12, temperature=1.0)
  for how in (dict(gamma=3), dict(tree=(0, 0, 1, 2))):
    for output in pair.generate(SENTENCES[:2], **how, **settings, **SHORT):
      assert (output.rounds.num_accepted[:-1] == (3 if "gamma" in how else 2)).all()


@pytest.mark.slow
def test_hierarchical_draft_of_targets_is_always_accepted_with_processors():
  pair = tiny_pair.pair("target")

  def targets(sampling, tree, options):
    of_inner = dataclasses.replace(options, reread=4)
    inner = ModelDraft(pair.target.model, sampling, chain(2), of_inner)
    return HierarchicalDraft(pair.target.model, inner, sampling, tree, options)

  pair = tiny_pair.changed(
    pair, draft=targets, draft_params=(pair.target.params, pair.draft.params)
  )
  settings = dict(repetition_penalty=1.6, no_repeat_ngram_size=2, min_new_tokens=7, temperature=1.0)
  for output in pair.generate(SENTENCES[:2], gamma=3, **settings, **SHORT):
    assert (output.rounds.num_accepted[:-1] == 3).all() and len(output.tokens) >= 8


@pytest.mark.slow
def test_dynamic_trees_need_fewer_rounds_if_the_draft_has_the_processors():
  pair = tiny_pair.pair("target")
  processors = RepetitionPenalty(1.6), NoRepeatNgram(2), MinLength(0, 7, ids(EOS))
  tree, greedy = DynamicTree(12, 3), Sampling(0.0)
  prompt, keys = pair.prompt(SENTENCES), row_keys(0, 0, len(SENTENCES))
  decoder = pair.decoder(greedy, tree, processors=processors)
  decoders = [
    pair.decoder(greedy, chain(0), processors=processors),
    decoder,
    dataclasses.replace(decoder, draft=pair.draft.build(greedy, tree)),
  ]
  plain, dynamic, unprocessed = (
    decoder.run(pair.params, prompt, keys, max_new_tokens=16) for decoder in decoders
  )
  for result in (dynamic, unprocessed):
    np.testing.assert_array_equal(plain.tokens, result.tokens)
  rounds, more = (int((x.rounds.num_emitted > 0).sum()) for x in (dynamic, unprocessed))
  assert rounds < more and int(dynamic.lengths.sum()) > 2.5 * rounds


def test_values_of_settings_are_arguments_of_the_program():
  """Programs are compiled for the kinds of settings, and serve all their values."""
  pair = tiny_pair.pair()
  compiled = []

  def outputs(**settings):
    count = Decoder.run._cache_size()
    pair.generate(SENTENCES[:1], gamma=2, **settings)
    compiled.append(Decoder.run._cache_size() - count)

  swept = dict(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
  swept |= dict(no_repeat_ngram_size=2, min_new_tokens=3, suppress_tokens=[5, 6], seed=1)
  outputs(**swept, max_new_tokens=12, eos_token_id=1)
  outputs(**swept, max_new_tokens=12, eos_token_id=1)
  others = dict(temperature=1.3, top_k=9, top_p=0.5, min_p=0.2, repetition_penalty=1.7)
  others |= dict(no_repeat_ngram_size=3, min_new_tokens=5, suppress_tokens=[9], seed=2)
  for name, value in others.items():
    outputs(**{**swept, name: value}, max_new_tokens=12, eos_token_id=1)
  outputs(**swept, max_new_tokens=7, eos_token_id=1)
  outputs(**swept, max_new_tokens=16, eos_token_id=4)
  assert compiled[0] > 0 and not any(compiled[1:]), compiled


@pytest.mark.parametrize(
  "settings, words",
  [
    (dict(repetition_penalty=0.0), "repetition_penalty is 0.0"),
    (dict(no_repeat_ngram_size=-1), "no_repeat_ngram_size is -1"),
    (dict(bad_words_ids=[[]]), "bad_words_ids has the sequence []"),
    (dict(suppress_tokens=[-1]), "suppress_tokens has the sequence"),
    (dict(begin_suppress_tokens=[3.5]), "begin_suppress_tokens has the sequence [3.5]"),
    (dict(sequence_bias={(999999,): 1.0}), "sequence_bias has the sequence"),
    (dict(min_p=1.5), "min_p is 1.5"),
    (dict(typical_p=0.0), "typical_p is 0.0"),
    (dict(do_sample=True, temperature=0.0), "which is argmax"),
    (dict(max_length=1), "max_length is 1, and 1 tokens come before"),
    (dict(num_return_sequences=2), "all outputs would be equal"),
    (
      dict(num_beams=2, tree=(0, 0)),
      "a beam search has no tree, logprobs, fixed_width or lenience",
    ),
    (
      dict(num_beams=2, logprobs=True),
      "a beam search has no tree, logprobs, fixed_width or lenience",
    ),
    (dict(decoder_texts=["A"]), "There are 4 texts and 1 decoder prefixes"),
    (dict(task="translation"), "has no tasks"),
  ],
)
def test_invalid_settings_raise(settings, words):
  with pytest.raises(InputError) as caught:
    tiny_pair.pair().generate(SENTENCES, **settings)
  assert words in str(caught.value)


def test_settings_of_a_checkpoint_are_defaults():
  merged = GenerationConfig.merged
  file = dict(do_sample=True, temperature=0.5, max_length=30, no_repeat_ngram_size=3)
  assert merged(file, {}).sampling() == Sampling(0.5)
  assert merged(file, dict(temperature=0.0)).sampling().is_argmax
  assert merged(file, dict(do_sample=False)).sampling().is_argmax
  assert merged(file, dict(do_sample=True)).sampling() == Sampling(0.5)
  assert merged({}, dict(do_sample=True)).sampling() == Sampling(1.0)
  assert merged(file, {}).new_tokens([1, 4]) == [29, 26]
  assert merged(file, dict(max_new_tokens=7)).new_tokens([1, 4]) == [7, 7]
  assert merged(file, dict(no_repeat_ngram_size=0)).processors(9, (1,)) == ()
  assert merged(file, {}).processors(9, (1,)) == (NoRepeatNgram(3),)
  (shortest,) = merged({}, dict(min_length=9, min_new_tokens=2)).processors(9, (1,))
  assert (shortest.min_length, shortest.min_new_tokens) == (0, 2)  # as in transformers
  assert merged(dict(min_new_tokens=2), dict(min_length=9)).min_new_tokens is None
  task = dict(max_new_tokens=9, num_beams=1)
  assert merged(file | dict(num_beams=4), task, {}).new_tokens([4]) == [9]
  assert merged(file | dict(num_beams=4), task, dict(max_length=20)).new_tokens([4]) == [16]
  assert merged(file | dict(num_beams=4), task, dict(do_sample=None)).num_beams == 1
  pair = tiny_pair.changed(
    tiny_pair.pair(),
    generation=dict(min_new_tokens=4),
    tasks={"loud": dict(prefix="A ", min_new_tokens=9)},
  )
  config, prefix = generation_config(pair, "loud", {})
  assert (config.min_new_tokens, prefix) == (9, "A ")
  assert generation_config(pair, None, {})[0].min_new_tokens == 4
  assert generation_config(pair, "loud", dict(min_new_tokens=2))[0].min_new_tokens == 2


@pytest.mark.slow
def test_outputs_continue_decoder_prefixes():
  """A forced prefix is not part of the output, which is what the target writes after it."""
  pair = tiny_pair.pair()
  (whole,) = pair.generate(SENTENCES[:1], gamma=0, min_new_tokens=16, **SHORT)
  prefixes = [whole.tokens[:n].tolist() for n in (3, 0, 5)]
  texts = SENTENCES[:1] * 3
  for how in (dict(gamma=2, batch_size=3), dict(tree=(0, 0, 1), batch_size=3)):
    found = pair.generate(texts, decoder_input_ids=prefixes, **how, max_new_tokens=8)
    for output, prefix in zip(found, prefixes):
      start = len(prefix)
      assert output.tokens.tolist() == whole.tokens[start : start + len(output.tokens)].tolist()
      assert len(output.tokens) == 8 or output.finish_reason == "eos"
  with_start = [[0, *row] for row in prefixes]
  assert texts_of(found) == texts_of(
    pair.generate(texts, decoder_input_ids=with_start, **how, max_new_tokens=8)
  )
  ended = pair.generate(texts, decoder_input_ids=[[7, EOS, 8]] * 3, **how, max_new_tokens=8)
  assert all(len(output.tokens) for output in ended), "EOS in a prefix ends nothing"
  forced = ForcedPrefix.of([[7, 8], []])
  assert forced.tokens.array.tolist() == [[7, 8], [-1, -1]]


@pytest.mark.slow
def test_decoder_texts_are_target_texts_after_the_forced_first_token():
  """The first token of an output of NLLB is the target language."""
  pair = tiny_pair.pair()
  texts, begins, settings = SENTENCES[:2], ["", "a man"], dict(forced_bos_token_id=20, gamma=2)
  rows = [[20, *pair.vocabulary.encode_target(begin)] for begin in begins]
  want = pair.generate(texts, decoder_input_ids=rows, **settings, **SHORT)
  assert texts_of(pair.generate(texts, decoder_texts=begins, **settings, **SHORT)) == texts_of(want)
  other = pair.generate(texts, decoder_input_ids=[row[1:] for row in rows], **settings, **SHORT)
  assert texts_of(other) != texts_of(want)


@pytest.mark.parametrize("first", [pytest.param(None, marks=pytest.mark.slow), 20])
def test_trie_of_target_texts(first):
  """The idiom of docs/generate.md, without and with a forced first token."""
  pair = tiny_pair.pair()
  allowed = tiny_pair.SENTENCES[:6]
  forced = [] if first is None else [first]
  sequences = [[*forced, *pair.vocabulary.encode_target(text)] for text in allowed]
  settings = dict(forced_bos_token_id=first, max_new_tokens=64)
  constraint = TrieConstraint.of(sequences, pair.vocabulary.eos_id)
  (output,) = pair.generate(SENTENCES[:1], gamma=2, logits_processor=constraint, **settings)
  assert output.finish_reason == "eos" and output.tokens[:-1].tolist() in sequences


@pytest.mark.slow
def test_samples_of_one_source():
  """The first sample is that of a single output; the encoder runs once for all of them."""
  pair = tiny_pair.pair()
  sampled = dict(temperature=1.0, gamma=2, seed=3, **SHORT)
  first = pair.generate(SENTENCES, batch_size=2, **sampled)
  many = pair.generate(SENTENCES, num_return_sequences=3, batch_size=6, **sampled)
  assert len(many) == 12 and texts_of(many[::3]) == texts_of(first)
  assert len({output.text for output in many[:3]}) == 3


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_target():
  """For chains and trees they equal those of autoregressive decoding and of the model alone."""
  pair = tiny_pair.pair()
  settings = dict(repetition_penalty=1.5, logprobs=True, **SHORT)
  plain = pair.generate(SENTENCES[:2], gamma=0, **settings)
  for how in (dict(gamma=3), dict(tree=(0, 0, 1, 1))):
    for output, want in zip(pair.generate(SENTENCES[:2], **how, **settings), plain):
      np.testing.assert_allclose(output.logprobs, want.logprobs, atol=1e-4)
      np.testing.assert_allclose(output.model_logprobs, want.model_logprobs, atol=1e-4)
      assert output.logprob == pytest.approx(output.logprobs.sum())
  prompt, tokens = pair.prompt(SENTENCES[:1]), plain[0].tokens
  inputs = jnp.asarray(np.concatenate([[0], tokens[:-1]])[None], jnp.int32)
  _, cache = pair.target.model.prefill(pair.target.params, prompt, 32)
  logits = np.asarray(pair.target.model.extend(pair.target.params, cache, inputs)[0][0], np.float64)
  rows = np.arange(len(tokens))
  log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
  np.testing.assert_allclose(plain[0].model_logprobs, log_probs[rows, tokens], atol=1e-4)
  reference = penalized(lambda text: text, 1.5)
  adjusted = np.stack([reference(row, [0, *tokens[:i]]) for i, row in enumerate(logits.tolist())])
  log_probs = adjusted - np.log(np.exp(adjusted).sum(axis=1, keepdims=True))
  np.testing.assert_allclose(plain[0].logprobs, log_probs[rows, tokens], atol=1e-4)


@pytest.mark.parametrize(
  "settings",
  [
    lambda size: dict(bad_words_ids=[[5], [*range(3, size)]]),
    lambda size: dict(eos_token_id=[*range(3, size)], min_length=4),
  ],
  ids=["bad_words_ids", "eos_token_id"],
)
def test_programs_do_not_grow_with_lists_of_tokens(settings):
  pair = tiny_pair.pair()

  def num_equations(size):
    config = GenerationConfig(**settings(size))
    decoder = GenerateCall(pair, config, chain(1)).decoder()
    init = functools.partial(decoder.init, max_new_tokens=4)
    state = jax.eval_shape(init, pair.params, np.ones((1, 8), np.int32), jax.random.key(0))
    traced = jax.make_jaxpr(lambda decoder, state: decoder.round(pair.params, state))
    program = traced(decoder, state)
    return len(program.eqns), len(program.in_avals)

  assert num_equations(6) == num_equations(70)


@pytest.mark.slow
def test_outputs_end_at_stop_strings_and_at_any_eos():
  pair = tiny_pair.pair()
  (whole,) = pair.generate(SENTENCES[:1], min_new_tokens=16, **SHORT)
  (plain,) = pair.generate(SENTENCES[:1], **SHORT)
  assert plain.finish_reason in ("eos", "length")
  stop = whole.text[4:6]
  (cut,) = pair.generate(SENTENCES[:1], min_new_tokens=16, stop_strings=[stop], **SHORT)
  assert cut.finish_reason == "stop_string" and stop in cut.text
  assert whole.text.startswith(cut.text) and len(cut.tokens) < len(whole.tokens)
  assert stop not in pair.vocabulary.decode(cut.tokens[:-1])
  eos = int(whole.tokens[2])
  (ended,) = pair.generate(SENTENCES[:1], eos_token_id=[1, eos], **SHORT)
  assert ended.tokens[-1] in (1, eos) and ended.finish_reason == "eos"


@pytest.mark.slow
def test_user_functions_and_processors_apply_after_the_others():
  pair = tiny_pair.pair()
  (plain,) = pair.generate(SENTENCES[:1], **SHORT)
  banned = int(plain.tokens[0])

  def never(logits, tokens, length):
    return logits.at[banned].set(-jnp.inf)

  for own, gamma in ((never, 0), ([never], 2), (SequenceBias.excluding([(banned,)]), 2)):
    (output,) = pair.generate(SENTENCES[:1], logits_processor=own, gamma=gamma, **SHORT)
    assert banned not in output.tokens


def test_processors_with_equal_values_are_equal():
  one, other = SequenceBias.of({(1, 2): 0.5}), SequenceBias.of({(1, 2): 0.5})
  assert one == other and hash(one) == hash(other)
  assert one != SequenceBias.of({(1, 2): 0.25})
  assert dataclasses.replace(RepetitionPenalty(2.0), penalty=3.0) == RepetitionPenalty(3.0)


def test_trie_allows_exactly_its_sequences():
  """By comparison with a set of all sequences, after every beginning of one of them."""
  rng = np.random.default_rng(0)
  sequences = [rng.integers(2, 6, rng.integers(0, 5)).tolist() for _ in range(30)]
  constraint = TrieConstraint.of(sequences, EOS)
  allowed = {(*sequence, EOS) for sequence in sequences}
  texts = sorted({sequence[:n] for sequence in allowed for n in range(len(sequence))})
  texts.append((2,) * 7)  # no sequence begins with it, so that it is not constrained
  tokens = np.zeros((1, len(texts), 10), np.int32)
  for k, text in enumerate(texts):
    tokens[0, k, 1 : 1 + len(text)] = text
  lengths = np.array([[1 + len(text) for text in texts]], np.int32)
  one = np.ones(1, np.int32)
  prefixes = Prefixes(*map(jnp.asarray, (tokens, lengths, one, 10 * one, one[:, None])))
  logits = jnp.zeros((1, len(texts), 8))
  found = jax.jit(lambda logits: process((constraint,), logits, prefixes))(logits)
  for k, text in enumerate(texts):
    n = len(text)
    want = {sequence[n] for sequence in allowed if sequence[:n] == text and len(sequence) > n}
    assert {*np.flatnonzero(np.isfinite(found[0, k])).tolist()} == (want or {*range(8)})
  with pytest.raises(InputError, match="There are no sequences"):
    TrieConstraint.of([], EOS)


@pytest.mark.slow
def test_outputs_are_sequences_of_a_trie():
  """For trees and beams, and with the most probable sequence first."""
  pair = tiny_pair.pair()
  words = [pair.vocabulary.encode_target(text) for text in tiny_pair.SENTENCES[:20]]
  settings = dict(logits_processor=TrieConstraint.of(words, EOS), max_new_tokens=64)
  want = pair.generate(SENTENCES[:2], gamma=0, **settings)
  assert texts_of(pair.generate(SENTENCES[:2], tree=(0, 0, 1), **settings)) == texts_of(want)
  beams = pair.generate(SENTENCES[:1], num_beams=4, num_return_sequences=4, **settings)
  for output in (*want, *beams):
    assert output.text in tiny_pair.SENTENCES[:20] and output.finish_reason == "eos"
  assert len({output.text for output in beams}) == 4


@pytest.mark.slow
def test_beam_search_returns_each_possible_text_once():
  """A trie of two sequences has two texts, whatever the number of beams."""
  pair = tiny_pair.pair()
  words = [[7, 8, 9, 10], [7, 12]]
  settings = dict(logits_processor=TrieConstraint.of(words, EOS), max_new_tokens=9, gamma=2)
  beams = dict(num_beams=4, num_return_sequences=4, renormalize_logits=True)
  found = pair.generate(SENTENCES[:2], batch_size=2, **settings, **beams)
  assert [output.text for output in found[:2]] != [output.text for output in found[1::-1]]
  assert len(found) == 4
  for outputs in (found[:2], found[2:]):
    assert {(*output.tokens.tolist(),) for output in outputs} == {(*word, EOS) for word in words}
    # The first token, and all but one of the others, are certain.
    shares = [math.exp(output.score * len(output.tokens)) for output in outputs]
    assert sum(shares) == pytest.approx(1, abs=1e-4) and outputs[0].score > outputs[1].score
  one = dict(logits_processor=TrieConstraint.of(words[1:], EOS), decoder_input_ids=[[5, 6]])
  (output,) = pair.generate(SENTENCES[:1], num_beams=3, gamma=2, **one)
  assert output.tokens.tolist() == [*words[1], EOS] and output.score > -100


@pytest.mark.parametrize(
  "how, value",
  [
    (dict(gamma=2), math.inf),
    *(
      pytest.param(how, math.nan, marks=pytest.mark.slow)
      for how in (dict(gamma=0), dict(num_beams=2))
    ),
  ],
)
def test_processors_that_return_no_finite_logits_are_reported(how, value):
  def broken(logits, tokens, length):
    return jnp.where(length == 4, value, logits)

  with pytest.raises(InputError, match="row 0 .* cannot be decoded past token .*logits_processor"):
    tiny_pair.pair().generate(SENTENCES[:1], logits_processor=broken, min_new_tokens=8, **how)


@dataclasses.dataclass(frozen=True)
class OfOneNode(LogitsProcessor):
  """Fault: the logits of the first node stand for those of all nodes."""

  def __call__(self, logits, prefixes):
    return logits[:, :1]


def test_ids_outside_of_the_vocabulary_and_other_shapes_are_rejected():
  pair = tiny_pair.pair()
  for settings, words in (
    (dict(eos_token_id=10**6), "eos_token_id has the sequence [1000000]"),
    (dict(eos_token_id=[1, 10**6], num_beams=2), "eos_token_id has the sequence [1, 1000000]"),
    (dict(logits_processor=OfOneNode()), "OfOneNode() returns logits of shape (1, 1, "),
    (dict(logits_processor=OfOneNode(), num_beams=2), "OfOneNode() returns logits of shape"),
  ):
    with pytest.raises(InputError) as caught:
      pair.generate(SENTENCES[:1], **settings)
    assert words in str(caught.value)
  checkpoint = open_checkpoint(str(tiny_pair.folder() / "target"))
  config = dataclasses.replace(checkpoint.config, pad_id=10**6)
  words = str(tiny_pair.folder() / "vocabulary.model")
  with pytest.raises(InputError, match="pads sources with token 1000000.*correct pad_token_id"):
    load_pair((config, checkpoint.load(checkpoint.config)), vocabulary=words)


@pytest.mark.slow
def test_text_does_not_end_at_an_eos_of_the_vocabulary_that_is_not_one_of_the_call():
  pair = tiny_pair.pair()
  forced = dict(sequence_bias=[[[EOS], 1e4], [[EOS, 8], 3e4], [[8, 9], 3e4]], max_new_tokens=3)
  for how in (dict(gamma=2), dict(num_beams=2)):
    (output,) = pair.generate(SENTENCES[:1], eos_token_id=9, **forced, **how)
    assert output.tokens.tolist() == [EOS, 8, 9] and output.finish_reason == "eos"
    assert output.text == pair.vocabulary.decode([8, 9]) != ""
  assert "".join(pair.stream(SENTENCES[0], eos_token_id=9, **forced)) == output.text
  (ended,) = pair.generate(SENTENCES[:1], **forced)
  assert ended.tokens.tolist() == [EOS] and ended.text == ""


DRAFTS = "near", "random"
GUMBEL = dict(temperature=1.0, seed=5, **SHORT)


@pytest.mark.slow
def test_coupled_samples_do_not_depend_on_the_draft():
  """The text of a seed is that of autoregressive decoding, whatever gamma, tree and batch are."""
  own, other = (
    dataclasses.replace(tiny_pair.pair(name), verifier=GumbelVerifier) for name in DRAFTS
  )
  want = own.generate(SENTENCES, gamma=0, **GUMBEL)
  assert texts_of(want) != texts_of(own.generate(SENTENCES, gamma=0, **{**GUMBEL, "seed": 6}))
  for pair, how in (
    (own, dict(gamma=3, batch_size=4)),
    (own, dict(tree=(0, 0, 1, 1, 2))),
    (other, dict(gamma=2)),
  ):
    assert texts_of(pair.generate(SENTENCES, **how, **GUMBEL)) == texts_of(want)
  adjusted = dict(top_k=9, repetition_penalty=1.4)
  want = own.generate(SENTENCES, gamma=0, **adjusted, **GUMBEL)
  assert texts_of(own.generate(SENTENCES, gamma=3, **adjusted, **GUMBEL)) == texts_of(want)


@pytest.mark.slow
def test_coupled_draft_equal_to_the_target_is_always_accepted():
  pair = dataclasses.replace(tiny_pair.pair("target"), verifier=GumbelVerifier)
  for how, depth in ((dict(gamma=3), 3), (dict(tree=(0, 0, 1, 2)), 2)):
    for output in pair.generate(SENTENCES[:2], **how, **GUMBEL):
      assert (output.rounds.num_accepted[:-1] == depth).all()


@pytest.mark.slow
def test_coupled_samples_have_the_targets_distribution():
  """First tokens of many rows, against the softmax of the target's logits."""
  pair = tiny_pair.pair()
  count = 4000
  outputs = dataclasses.replace(pair, verifier=GumbelVerifier).generate(
    SENTENCES[:1],
    num_return_sequences=count,
    batch_size=count,
    gamma=1,
    temperature=1.0,
    max_new_tokens=2,
  )
  counts = np.bincount(
    [output.tokens[0] for output in outputs], minlength=pair.target.model.vocab_size
  )
  prompt = pair.prompt(SENTENCES[:1])
  _, cache = pair.target.model.prefill(pair.target.params, prompt, 8)
  logits = pair.target.model.extend(pair.target.params, cache, jnp.zeros((1, 1), jnp.int32))[0][
    0, 0
  ]
  assert tiny.p_value(counts, np.asarray(jax.nn.softmax(logits))) > tiny.LEVEL


@pytest.mark.slow
def test_beam_search_with_processors_is_that_of_plain_search():
  pair = tiny_pair.pair()
  base = dict(num_beams=3, num_return_sequences=3, max_new_tokens=16)
  settings = base | dict(
    no_repeat_ngram_size=2,
    min_new_tokens=6,
    eos_token_id=[1, 9],
    early_stopping="never",
    bad_words_ids=[[5, 6], [7]],
    decoder_input_ids=[[8, 9], [10]],
  )
  want = pair.generate(SENTENCES[:2], gamma=0, **settings)
  found = pair.generate(SENTENCES[:2], gamma=2, batch_size=2, **settings)
  assert texts_of(found) == texts_of(want)
  scores = [output.score for output in found]
  np.testing.assert_allclose(scores, [output.score for output in want], atol=1e-4)


def python_beam_search(log_probs_of, num_beams, max_new_tokens, penalty, early_stopping):
  """Return texts and scores of the beam search of transformers, one step at a time."""
  live, finished = [((), 0.0)], []
  for length in range(1, max_new_tokens + 1):
    scored = [
      ((*text, token), score + x)
      for text, score in live
      for token, x in enumerate(log_probs_of(text))
    ]
    scored = sorted(scored, key=lambda pair: -pair[1])[: 2 * num_beams]
    ends = [text[-1] == EOS or length == max_new_tokens for text, _ in scored]
    best = zip(scored[:num_beams], ends[:num_beams])
    finished += [(text, score / length**penalty) for (text, score), ended in best if ended]
    finished = sorted(finished, key=lambda pair: -pair[1])[:num_beams]
    live = [pair for pair, ended in zip(scored, ends) if not ended][:num_beams]
    if len(finished) == num_beams and live:
      longest = max_new_tokens if early_stopping == "never" and penalty > 0 else length
      if early_stopping is True or live[0][1] / longest**penalty <= finished[-1][1]:
        break
  return finished


@pytest.mark.slow
@pytest.mark.parametrize("penalty, early_stopping", [(1.0, False), (2.0, "never"), (0.5, True)])
def test_beam_search_of_transformers(penalty, early_stopping):
  """Against the definition in Python, with the target's logits after every text."""
  pair = tiny_pair.pair()
  prompt = pair.prompt(SENTENCES[:1])
  _, cache = pair.target.model.prefill(pair.target.params, prompt, 9)
  extend = jax.jit(lambda tokens: pair.target.model.extend(pair.target.params, cache, tokens)[0])

  def log_probs_of(text):
    tokens = np.zeros((1, 8), np.int32)
    tokens[0, 1 : 1 + len(text)] = text
    return jax.nn.log_softmax(extend(jnp.asarray(tokens))[0, len(text)]).tolist()

  want = python_beam_search(log_probs_of, 3, 8, penalty, early_stopping)
  settings = dict(num_beams=3, num_return_sequences=3, max_new_tokens=8)
  settings |= dict(length_penalty=penalty, early_stopping=early_stopping)
  found = pair.generate(SENTENCES[:1], **settings)
  assert [tuple(output.tokens.tolist()) for output in found] == [text for text, _ in want]
  scores = [output.score for output in found]
  np.testing.assert_allclose(scores, [score for _, score in want], atol=1e-4)
