"""Test drafts that have another vocabulary than the target."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair

from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import DynamicTree, branching, chain
from specdec_jax.core.types import DraftOptions
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.pieces import SentencePieces, train_sentence_pieces
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.data.vocabulary import PAD_ID, Vocabulary
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.other_vocabulary import (
  MAX_PIECES,
  OtherVocabularyModel,
  other_vocabulary_params,
  spell,
)
from specdec_jax.errors import InputError
from specdec_jax.load import checkpoint_draft, load_pair
from specdec_jax.models.families import model_of
from specdec_jax.pair import Pair

pytestmark = pytest.mark.slow

TEXTS = tiny_pair.SENTENCES[:6]
LIMIT = dict(max_new_tokens=12)


class Pieces(Vocabulary):
  """Vocabulary of given pieces, in which a text begins with padding."""

  start_id = PAD_ID

  def __init__(self, *pieces: str):
    self.path, self.listed = "pieces", pieces
    self.eos_id = pieces.index("</s>")

  def __len__(self):
    return len(self.listed)

  def all_pieces(self):
    return [*self.listed]

  def pieces(self, ids):
    return [self.listed[i].replace("_", " ") for i in ids]

  def encode(self, text):
    raise NotImplementedError

  decode = encode


TARGET = Pieces("<pad>", "</s>", "<unk>", "_a", "b", "_abc", "cab", "xx", "bb")
DRAFT = Pieces("<pad>", "b", "<unk>", "c", "ab", "</s>", "_a", "bb", "_", "")


def tables(target: Vocabulary, draft: Vocabulary, has_encoder: bool = True):
  found = other_vocabulary_params((), target, draft, has_encoder)
  return [np.asarray(x).tolist() for x in found[1:]]


def test_tables_of_small_vocabularies():
  partners, inputs, spellings = tables(TARGET, DRAFT)
  assert partners == [0, 5, 2, 6, 1, -1, -1, -1, 7]
  # "_abc" is "_" + "ab" + "c" or "_a" + "b" + "c", "cab" is "c" + "ab", and "xx" is unknown.
  assert inputs == [0, 5, 2, 6, 1, 3, 4, 2, 7]
  none = [-1, -1]
  assert spellings[5] in ([8, 4, 3], [6, 1, 3])
  assert spellings[:5] == [[-1, *none], [5, *none], [2, *none], [6, *none], [1, *none]]
  assert spellings[6:] == [[3, 4, -1], [2, *none], [7, *none]]


def test_decoder_only_prompts_are_translated_token_by_token():
  partners, inputs, spellings = tables(TARGET, DRAFT, has_encoder=False)
  assert partners == [0, 5, 2, 6, 1, -1, -1, -1, 7]
  assert spellings == [[token] for token in inputs]


def test_long_spellings_are_dropped_after_the_maximum():
  letters = "abcdefghijkl"
  target, draft = Pieces("<pad>", "</s>", "a", letters), Pieces("<pad>", "</s>", *letters)
  _, inputs, spellings = tables(target, draft)
  assert spellings[3] == [*range(2, 2 + MAX_PIECES)] and inputs[3] == 13


def test_only_the_first_of_equal_texts_has_a_partner():
  class Marked(Pieces):
    """Vocabulary of another type, whose stored pieces are not texts."""

    def all_pieces(self):
      return [f"#{piece}" for piece in self.listed]

  target = Pieces("<pad>", "</s>", "a", "a", "b")
  draft = Marked("</s>", "b", "<pad>", "b", "a")
  assert tables(target, draft)[0] == [0, 0, 4, -1, 1]


def test_vocabularies_without_common_pieces_raise():
  with pytest.raises(InputError, match="no piece in common"):
    tables(Pieces("<pad>", "</s>", "a"), Pieces("<pad>", "</s>", "b"))


def test_prompts_are_spelled_and_truncated():
  spellings = jnp.asarray([[-1, -1, -1], [9, -1, -1], [2, 3, 4], [5, 6, -1], [7, -1, -1]])
  prompts = jnp.asarray([[2, 3, 1, 0], [2, 4, 2, 1], [2, 2, 2, 1], [4, 1, 0, 0]])
  assert spell(spellings, prompts).tolist() == [
    [2, 3, 4, 5, 6, 9, 0, 0],
    [2, 3, 4, 7, 2, 3, 4, 9],  # fits exactly
    [2, 3, 4, 2, 3, 4, 2, 9],  # two tokens are dropped before EOS
    [7, 9, 0, 0, 0, 0, 0, 0],
  ]
  one = spellings[:, :1]
  assert spell(one, prompts).tolist() == [[2, 5, 9, 0], [2, 7, 2, 9], [2, 2, 2, 9], [7, 9, 0, 0]]


def test_word_pieces_and_sentence_pieces_share_tokens_of_equal_text():
  words = open_vocabulary(str(tiny_pair.gpt_folder() / "vocabulary.txt"))
  pieces = open_vocabulary(str(tiny_pair.folder() / "vocabulary.model"))
  for target, draft in ((words, pieces), (pieces, words)):
    partners, inputs, spellings = tables(target, draft)
    shared = [i for i in range(3, len(target)) if partners[i] >= 0 and i != target.eos_id]
    assert len(shared) > 20
    assert target.pieces(shared) == draft.pieces([partners[i] for i in shared])
    assert partners[target.eos_id] == inputs[target.eos_id] == draft.eos_id
    for i in {*range(3, len(target))} - {*shared}:
      spelled = [token for token in spellings[i] if token >= 0]
      known = "".join(draft.pieces(spelled)) == target.pieces([i])[0]
      assert known or draft.all_pieces()[spelled[0]] in ("<unk>", "[UNK]")


@functools.cache
def small_vocabulary() -> str:
  """Return the path of a vocabulary of 60 pieces; `small` of `tiny_pair` is a model for it.

  It is trained on reversed sentences, so that it has the same letters and other longer pieces.
  """
  path = str(tiny_pair.folder() / "small.model")
  train_sentence_pieces([text[::-1] for text in tiny_pair.SENTENCES], path, 60)
  return path


def small(target, **options):
  model = str(tiny_pair.folder() / "small")
  return checkpoint_draft(target, model, vocabulary=small_vocabulary(), **options)


@functools.cache
def pair() -> Pair:
  target, words = (str(tiny_pair.folder() / name) for name in ("target", "vocabulary.model"))
  return load_pair(target, small, words, max_source_tokens=24)


def decode(pair: Pair, temperature: float, tree, texts=TEXTS):
  decode = pair.decode_fn(Sampling(temperature=temperature), tree)
  return decode(pair.prompt(texts), jax.random.split(jax.random.key(1), len(texts)), **LIMIT)


def test_q_is_the_draft_distribution_restricted_to_shared_tokens(temperature=0.5):
  """The expected q comes from teacher-forced logits of the draft model, in numpy."""
  whole_text, params = DraftOptions(reread=5), pair().draft.params
  draft = pair().draft.build(Sampling(temperature=temperature), chain(3), whole_text)
  words, own = pair().vocabulary, SentencePieces(small_vocabulary())
  prompt, batch = pair().prompt(TEXTS), len(TEXTS)
  text = np.random.default_rng(0).integers(3, len(words), (batch, 5))  # any tokens
  text[:, 0] = PAD_ID
  tokens = jnp.pad(jnp.asarray(text, jnp.int32), ((0, 0), (0, 8)))
  context = Context(prompt, tokens, jnp.full(batch, 5, jnp.int32), None, jnp.zeros((batch, 1)))
  keys = jax.random.split(jax.random.key(0), batch)

  @jax.jit
  def propose(params, context, keys):
    state = draft.init(params, context, jnp.zeros((batch, 1, 1)))
    return draft.propose(params, state, context, keys)[0]

  proposal = propose(params, context, keys)

  pieces, own_pieces = words.all_pieces(), own.all_pieces()
  partner = [own_pieces.index(piece) if piece in own_pieces else None for piece in pieces]
  shared = [i for i, token in enumerate(partner) if token is not None]
  assert 20 < len(shared) < len(words) and {PAD_ID, words.eos_id} < {*shared}
  partners, inputs, spellings = (np.asarray(x) for x in params[1:])
  assert partners.tolist() == [-1 if token is None else token for token in partner]
  assert any(i not in shared for i in text.flat)
  assert any(len(row[row >= 0]) > 1 for row in spellings[np.ravel(prompt)])
  spelled = [[t for i in row if i for t in spellings[i] if t >= 0] for row in np.asarray(prompt)]
  source = np.zeros((batch, 2 * prompt.shape[1]), np.int32)
  for row, filled in zip(source, spelled):
    row[: len(filled)] = filled
  text = np.concatenate([text, np.asarray(proposal.tokens)[:, :-1]], axis=1)
  assert isinstance(draft.model, OtherVocabularyModel)
  forced = tiny.teacher_forced(draft.model.model.config)
  logits = forced(params.model, jnp.asarray(source), jnp.asarray(inputs[text]))[:, 4:]
  weights = np.exp(np.asarray(logits, np.float64) / temperature)
  expected = np.zeros(proposal.q.shape)
  for i in shared:
    expected[..., i] = weights[..., partner[i]]
  expected /= expected.sum(axis=-1, keepdims=True)
  np.testing.assert_allclose(proposal.q, expected, atol=1e-5)
  assert pair().draft.name == f"small, {len(shared)} shared tokens"


def test_greedy_outputs_of_a_dynamic_tree_are_the_targets():
  plain, ours = decode(pair(), 0.0, chain(0)), decode(pair(), 0.0, DynamicTree(6, 3))
  np.testing.assert_array_equal(ours.tokens, plain.tokens)


def test_equal_vocabulary_does_not_change_the_rounds(temperature=1.0):
  shared = tiny_pair.pair()
  near, words = (str(tiny_pair.folder() / name) for name in ("near", "vocabulary.model"))
  wrapped = shared.with_draft(checkpoint_draft(shared.target, near, vocabulary=words))
  one, other = (decode(each, temperature, chain(3)) for each in (shared, wrapped))
  assert one.rounds.acceptance_counts()[0].sum() > 10
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_array_equal(x, y)


def test_permuted_vocabulary_does_not_change_the_rounds():
  """The draft's tokens are those of the target in another order, with another EOS."""
  config, order = tiny.gpt_config(8, 1), [0, 4, 6, 1, 7, 3, 5, 2]
  pieces = ["<pad>", "</s>", *"abcdef"]
  target, draft = Pieces(*pieces), Pieces(*(pieces[i] for i in order))
  params = tiny.params(config, 0, peak=0.9)
  near = tiny.near(params, 1, 0.2)
  decoder = near["decoder"]
  kernel = decoder["logits_dense"]["kernel"][:, np.array(order)]
  moved = {
    **near,
    "token_embedder": {"embedding": near["token_embedder"]["embedding"][np.array(order)]},
    "decoder": {**decoder, "logits_dense": {**decoder["logits_dense"], "kernel": kernel}},
  }
  model = model_of(config)
  config = dataclasses.replace(config, eos_id=draft.eos_id)
  other = OtherVocabularyModel(model_of(config), model)
  moved = other_vocabulary_params(moved, target, draft, config.has_encoder)
  rng, prompts = jax.random.key(0), np.array([[2, 3, 4, 1], [5, 1, 0, 0], [7, 6, 1, 0]])
  outs = [
    tiny.speculative_decode(
      *(model, ModelDraft(drafting, Sampling(), branching(2, 1)), params, of_draft, prompts, rng),
      max_new_tokens=12,
      verifier=TokenVerifier(Sampling()),
    )
    for drafting, of_draft in ((model, near), (other, moved))
  ]
  assert outs[0].rounds.acceptance_counts()[0].sum() > 5
  for x, y in zip(jax.tree.leaves(outs[0]), jax.tree.leaves(outs[1]), strict=True):
    np.testing.assert_array_equal(x, y)


def test_error_of_a_draft_with_another_vocabulary_says_what_to_do():
  target, words = (str(tiny_pair.folder() / name) for name in ("target", "vocabulary.model"))
  with pytest.raises(InputError, match="a vocabulary of its own .--draft other_vocabulary"):
    load_pair(target, str(tiny_pair.folder() / "small"), words)


def test_draft_with_another_format_of_prompts_raises():
  loaded, words = tiny_pair.gpt_pair().target, small_vocabulary()
  with pytest.raises(InputError, match="another format of prompts"):
    checkpoint_draft(loaded, str(tiny_pair.folder() / "small"), vocabulary=words)


def test_padding_and_start_tokens_are_those_of_each_model():
  """The target pads with 1 and starts with 0; the draft pads with 3 and starts with 2."""
  target, draft = Pieces("<s>", "<pad>", "_x", "</s>"), Pieces("_z", "_x", "<s>", "<pad>", "</s>")
  target.pad_id, draft.pad_id = 1, 3
  found = other_vocabulary_params((), target, draft, True, starts=(0, 2))
  assert found.partners.tolist() == [2, 3, 1, 4]
  assert found.inputs.tolist() == [2, 3, 1, 4]
  spelled = spell(found.spellings, jnp.asarray([[2, 3, 1, 1]]), draft.pad_id)
  assert spelled.tolist() == [[1, 4, 3, 3]]
