"""Test the contracts of every draft, verifier, tree and model; a line in CASES adds a new one."""

import dataclasses
import functools
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from jax.extend.core import jaxprs_in_params
from test_speculative import CONFIG as T5_CONFIG
from test_speculative import DRAFT_CONFIG as T5_DRAFT
from test_speculative import exact_joint, joint_of_loop, target_and_draft
from tiny import autoregressive_decode, speculative_decode

from specdec_jax import batching, registry
from specdec_jax.contrib.bild import HandOverDraft
from specdec_jax.contrib.cascade import CascadeDraft
from specdec_jax.contrib.fastest import FastestDraft
from specdec_jax.contrib.realigned import RealignedDraft
from specdec_jax.contrib.saturation import saturation
from specdec_jax.contrib.stopping import AdaptiveStoppingDraft, StoppingDraft
from specdec_jax.core.context import Encoded, PromptWithDraft, without_draft
from specdec_jax.core.decode import Decoder, NullDraft, unpacked_rounds
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.settings import HashableArray
from specdec_jax.core.trees import DynamicTree, Tree, branching, chain
from specdec_jax.core.types import DraftOptions, Params
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.drafts import dynamic as drafts_dynamic
from specdec_jax.drafts import hierarchical as drafts_hierarchical
from specdec_jax.drafts import model as drafts_model
from specdec_jax.drafts.dynamic import DynamicDraft
from specdec_jax.drafts.given import GivenDraft
from specdec_jax.drafts.heads import new_head
from specdec_jax.drafts.hierarchical import HierarchicalDraft, chain_with_siblings
from specdec_jax.drafts.layer_skip import layer_skip
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.ngram import NgramDraft, fit_ngrams
from specdec_jax.drafts.other_vocabulary import OtherVocabularyModel, OtherVocabularyParams
from specdec_jax.drafts.prompt_lookup import PromptLookupDraft
from specdec_jax.drafts.several import ForestDraft
from specdec_jax.drafts.stop_at_miss import StopAtMissDraft
from specdec_jax.exactness.checker import TableTest
from specdec_jax.exactness.tables import draft_with_verifier
from specdec_jax.load import head_draft
from specdec_jax.models.families import with_feature_layers
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.t5 import T5Model
from specdec_jax.models.whisper import DraftWhisper, WhisperModel

V, LIMIT = 6, 10
GREEDY, RANDOM, TOP_K = Sampling(temperature=0.0), Sampling(), Sampling(top_k=3)
GPT_CONFIG = tiny.gpt_config(vocab_size=V, layers=1)
GPT_DRAFT = tiny.gpt_config(vocab_size=V, layers=1, emb_dim=8, num_positions=None)


class Models(NamedTuple):
  """A target, a draft model, the parameters of both, and prompts [B, P] with 6 rows."""

  target: Any
  draft: Any
  params: Any
  draft_params: Any
  prompts: Any  # an array, or `Encoded`


@functools.cache
def autoregressive_outputs(of) -> Any:
  """Return the autoregressive output at temperature 0."""
  models, keys = of(), jax.random.split(jax.random.key(0), 6)
  how = dict(max_new_tokens=LIMIT, sampling=GREEDY)
  return autoregressive_decode(models.target, models.params, models.prompts, keys, **how)


@functools.cache
def t5() -> Models:
  prompts = tiny.sources(T5_CONFIG, 0, 6)
  return Models(T5Model(T5_CONFIG), T5Model(T5_DRAFT), *target_and_draft(), prompts)


@functools.cache
def gpt() -> Models:
  params = tiny.params(GPT_CONFIG, 2, peak=0.9), tiny.params(GPT_DRAFT, 2, peak=0.9)
  prompts = tiny.prompts(GPT_CONFIG, 0, [1, 2, 3, 4, 5, 6])
  return Models(GPTModel(GPT_CONFIG), GPTModel(GPT_DRAFT), *params, prompts)


@functools.cache
def quantized(weights: str) -> Models:
  """Return the T5 models with such weights, and a draft that can propose four of the tokens."""
  tokens = np.array([1, 2, 3, 5], np.int32)
  target = T5_CONFIG.with_layout(weights=weights)
  draft = dataclasses.replace(T5_DRAFT.with_layout(weights=weights), num_output_tokens=len(tokens))
  params, draft_params = target_and_draft()
  return t5()._replace(
    target=T5Model(target),
    draft=T5Model(draft),
    params=tiny.quantized(params, weights),
    draft_params=tiny.quantized(tiny.with_output_tokens(draft_params, tokens), weights),
  )


int8, int4 = functools.partial(quantized, "int8"), functools.partial(quantized, "int4")


@functools.cache
def family(name: str) -> Models:
  """Return models of another family of encoder-decoders."""
  config = dataclasses.replace(T5_CONFIG, **getattr(tiny, name))
  params = tiny.params(config, 4, peak=0.9)
  return t5()._replace(
    target=T5Model(config),
    draft=T5Model(config),
    params=params,
    draft_params=tiny.near(params, 5, 0.2),
  )


bart, t5gemma = functools.partial(family, "BART"), functools.partial(family, "T5GEMMA")


@functools.cache
def whisper() -> Models:
  """Return a Whisper, a draft with an encoder of its own, and prompts of unequal lengths."""
  config, rng = dataclasses.replace(T5_CONFIG, **tiny.WHISPER), np.random.default_rng(0)
  params = tiny.params(config, 4, peak=0.9)
  sources = rng.normal(size=(2, 6, 8, config.emb_dim)).astype(np.float32)
  tokens, lengths = rng.integers(2, V, (6, 4)), np.array([1, 2, 3, 4, 2, 1])
  prompts = Encoded(sources[0], tokens.astype(np.int32), lengths.astype(np.int32), sources[1])
  draft_params = tiny.near(params, 5, 0.2)
  return Models(WhisperModel(config), DraftWhisper(config), params, draft_params, prompts)


@functools.cache
def deep() -> Models:
  """Return the T5 models with a target that has three decoder layers."""
  config = dataclasses.replace(T5_CONFIG, num_decoder_layers=3)
  return t5()._replace(target=T5Model(config), params=tiny.params(config, 4, peak=0.9))


@functools.cache
def deep_features() -> Models:
  """Return the same models, where the target's hidden states are the outputs of two layers."""
  return deep()._replace(target=with_feature_layers(deep().target, (0, 2)))


@functools.cache
def deep_gpt() -> Models:
  """Return the decoder-only models with a target that has three layers."""
  config = dataclasses.replace(GPT_CONFIG, num_decoder_layers=3)
  return gpt()._replace(target=GPTModel(config), params=tiny.params(config, 4, peak=0.9))


def with_texts(of):
  """Return models whose prompts have drafts: outputs, four of them changed, and none."""

  @functools.cache
  def models() -> Models:
    out = autoregressive_outputs(of)
    texts, lengths = np.asarray(out.tokens), np.asarray(out.lengths)
    replaced, random = texts[1].copy(), np.random.default_rng(0).integers(2, V, LIMIT)
    replaced[1] = 5 - replaced[1]
    inserted, deleted = np.insert(texts[2], 1, 3)[:LIMIT], np.append(texts[3][1:], 0)
    rows = np.stack([texts[0], replaced, inserted, deleted, random, texts[5]]).astype(np.int32)
    prompts = PromptWithDraft(of().prompts, rows, lengths * (np.arange(6) != 5))
    return of()._replace(prompts=prompts)

  return models


# Drafts: functions of (models, sampling, tree) that return a draft and its parameters.


def model(models: Models, sampling: Sampling, tree: Tree):
  return ModelDraft(models.draft, sampling, tree), models.draft_params


def near(models: Models, sampling: Sampling, tree: Tree):
  """Draft: the target with noise in its parameters, whose tokens are often accepted."""
  return ModelDraft(models.target, sampling, tree), tiny.near(models.params, 5, 0.2)


def other_vocabulary(models: Models, sampling: Sampling, tree: Tree):
  """Draft with 8 tokens, of which it shares EOS, padding and two others with the target."""
  config = dataclasses.replace(models.draft.config, vocab_size=8)
  params = OtherVocabularyParams(
    model=tiny.params(config, 6, peak=0.9),
    partners=jnp.array([0, 1, -1, 6, 3, -1]),
    inputs=jnp.array([0, 1, 7, 6, 3, 2]),
    spellings=jnp.array([[-1, -1], [1, -1], [5, 7], [6, -1], [3, -1], [2, -1]]),
  )
  return ModelDraft(OtherVocabularyModel(T5Model(config), models.target), sampling, tree), params


INDEPENDENT = DraftOptions(independent_siblings=True)


def rereading(num_tokens: int) -> DraftOptions:
  return DraftOptions(reread=num_tokens)


def given(models: Models, sampling: Sampling, tree: Tree):
  """Draft with the texts of the prompts, and else the draft model."""
  drafts = (ModelDraft(models.draft, sampling, chain(2), rereading(count)) for count in (2, 8))
  none = HashableArray(np.zeros(V, bool))
  return GivenDraft(*drafts, tree.depth, V, none), models.draft_params


def given_only(models: Models, sampling: Sampling, tree: Tree):
  """Draft with the texts of the prompts for a verifier that needs all tokens of a proposal."""
  none = HashableArray(np.zeros(V, bool))
  return GivenDraft(NullDraft(), NullDraft(), tree.depth, V, none, False), ()


def independent(models: Models, sampling: Sampling, tree: Tree):
  return ModelDraft(models.draft, sampling, tree, INDEPENDENT), models.draft_params


def named(name: str, **settings: Any):
  """Return a draft of the registry, for a vocabulary whose texts are token ids."""
  vocabulary = mock.MagicMock(Vocabulary, __len__=lambda vocabulary: V, start_id=0)
  vocabulary.encode_output = lambda text: [*map(int, text.split()), 1]
  vocabulary.fingerprint = lambda: "ids"

  def draft(models: Models, sampling: Sampling, tree: Tree):
    factory = registry.draft(name, **settings)(tiny.loaded(vocabulary))
    return factory.build(sampling, tree), factory.params

  return draft


@functools.cache
def outputs() -> str:
  """Write texts of the task to a file and return its path."""
  rows = np.random.default_rng(0).integers(2, V, (8, 20)).tolist()
  path = tiny_pair.folder() / "outputs.txt"
  path.write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))
  return str(path)


def bigrams(models: Models, sampling: Sampling, tree: Tree):
  text = np.random.default_rng(0).integers(1, V, (8, 20)).tolist()
  return NgramDraft(2, V, sampling, tree), fit_ngrams(text, V)


def hierarchical(models: Models, sampling: Sampling, tree: Tree):
  """Hierarchical draft in which the target drafts for the draft model."""
  inner = ModelDraft(models.target, sampling, chain(2), rereading(4))
  draft = HierarchicalDraft(models.draft, inner, sampling, tree)
  return draft, (models.draft_params, models.params)


def hierarchical_trees(models: Models, sampling: Sampling, tree: Tree):
  inner = ModelDraft(models.target, sampling, branching(2, 1), rereading(4))
  draft = HierarchicalDraft(models.draft, inner, sampling, chain_with_siblings(tree.depth, 2))
  return draft, (models.draft_params, models.params)


def two_levels(models: Models, sampling: Sampling, tree: Tree):
  """Two-level hierarchical draft in which the target drafts at each level. All tokens are accepted,
  so the lower levels have the maximum number of tokens to reread."""
  cheapest = ModelDraft(models.target, sampling, chain(1), rereading(6))
  middle = HierarchicalDraft(models.target, cheapest, sampling, chain(2), rereading(4))
  draft = HierarchicalDraft(models.target, middle, sampling, tree)
  return draft, (models.params, (models.params, models.params))


def layers(models: Models, sampling: Sampling, tree: Tree):
  """Draft with the last layer of the target."""
  last = models.target.config.num_decoder_layers - 1
  factory = layer_skip(tiny.loaded(None, models.target, models.params), [last])
  return factory.build(sampling, tree), factory.params


def saturated(threshold: float | None):
  """Return a draft with the first two of three layers, or all of them, of the target."""

  def draft(models: Models, sampling: Sampling, tree: Tree):
    loaded = tiny.loaded(None, models.target, models.params)
    factory = saturation(loaded, [0, 1, 2], threshold)
    return factory.build(sampling, tree), factory.params

  return draft


def stopping(models: Models, sampling: Sampling, tree: Tree):
  """Draft with the target, which sometimes stops early."""
  return StoppingDraft(ModelDraft(models.target, sampling, tree), 0.13), models.params


def hand_over(models: Models, sampling: Sampling, tree: Tree):
  return HandOverDraft(ModelDraft(models.target, sampling, tree), 0.4), models.params


def adaptive_stopping(models: Models, sampling: Sampling, tree: Tree):
  draft = ModelDraft(models.target, sampling, tree)
  return AdaptiveStoppingDraft(draft, 0.13, goal=0.8, step=0.1), models.params


def known(models: Models, sampling: Sampling, tree: Tree):
  return StopAtMissDraft(PromptLookupDraft(V, tree, 2)), ()


def cascade(models: Models, sampling: Sampling, tree: Tree):
  """Cascade of one token of the target, two tokens of the draft model, and prompt lookup."""
  drafts = (
    ModelDraft(models.target, sampling, chain(1), rereading(5)),
    ModelDraft(models.draft, sampling, chain(2), rereading(6)),
    PromptLookupDraft(V, chain(1), 2),
  )
  return CascadeDraft(drafts, V), (models.params, models.draft_params, ())


def fastest(models: Models, sampling: Sampling, tree: Tree):
  """Choice between the target and the draft model, which are tried after two idle rounds."""
  on_time, late = (
    tuple(ModelDraft(m, sampling, tree, rereading(count)) for m in (models.target, models.draft))
    for count in (4, 12)
  )
  draft = FastestDraft(on_time, late, (0.8, 0.8), (0.1, 0.1), V, patience=2)
  return draft, (tiny.near(models.params, 5, 0.2), models.draft_params)


def learned(kind: str, layers: tuple[int, ...] | None = None):
  """Return a learned head with random parameters."""

  def draft(models: Models, sampling: Sampling, tree: Tree):
    sizes = dict(emb_dim=8, mlp_dim=16, num_encoder_layers=1, num_decoder_layers=1, rank=4)
    settings = dict(gamma=4, offsets=4, layers=layers)
    head = new_head(models.target.config, kind, **settings, **sizes)
    own = tiny_pair.random_params(head, 1)
    made = head_draft(kind, head, own, tiny.loaded(None, models.target, models.params))
    return made.build(sampling, tree), made.params

  return draft


def on_the_table(models: Models, sampling: Sampling, tree: Tree):
  """A head with the target's token embeddings, of which four tokens have logits."""
  width, target = models.target.config.emb_dim, models.target.config
  sizes = dict(emb_dim=width, mlp_dim=16, num_decoder_layers=1)
  head: Any = new_head(target, "conditioned", table_tokens=4, **sizes)
  own = tiny_pair.random_params(head, 1)
  own["decoder"]["logits_dense"] = {"output_tokens": jnp.array([1, 2, 3, 5], jnp.int32)}
  assert "token_embedder" not in own
  made = head_draft("head", head, own, tiny.loaded(None, models.target, models.params))
  assert made.params["decoder"]["logits_dense"]["kernel"].shape == (width, 4)
  return made.build(sampling, tree), made.params


def free(models: Models, sampling: Sampling, tree: Tree):
  return NullDraft(tree), ()


def dynamic(models: Models, sampling: Sampling, tree: DynamicTree):
  return DynamicDraft(models.draft, tree, width=2), models.draft_params


def dynamic_near(models: Models, sampling: Sampling, tree: DynamicTree):
  return DynamicDraft(models.target, tree, width=2), tiny.near(models.params, 5, 0.2)


def dynamic_itself(models: Models, sampling: Sampling, tree: DynamicTree):
  return DynamicDraft(models.target, tree, width=2), models.params


def forest_draft(models: Models, sampling: Sampling, tree: Tree):
  """Forest of a chain of the draft model, a tree of the target, and prompt lookup."""
  drafts = (
    ModelDraft(models.draft, sampling, chain(2), rereading(3)),
    ModelDraft(models.target, sampling, branching(2, 1), rereading(3)),
    PromptLookupDraft(V, chain(2), 2),
  )
  return ForestDraft(drafts, V), (models.draft_params, models.params, ())


def realigned(models: Models, sampling: Sampling, tree: Tree):
  draft = ModelDraft(models.target, sampling, tree, rereading(tree.depth + 1))
  return RealignedDraft(draft, 2, V), tiny.near(models.params, 5, 0.2)


retrieval = named("retrieval", target_text=outputs(), max_context=3, num_matches=16)
RAGGED = Tree((0, 0, 1, 1, 2, 4))
GREEDY_RAGGED = Tree(RAGGED.parents, greedy_siblings=True)
CASES = {
  "chain": (t5, model, chain(3), TokenVerifier),
  "int8, few tokens": (int8, model, RAGGED, TokenVerifier),
  "int4, few tokens": (int4, model, chain(3), TokenVerifier),
  "prompt lookup": (t5, named("prompt_lookup"), chain(2), TokenVerifier),
  "prompt lookup, tree": (gpt, named("prompt_lookup"), branching(2, 1), TokenVerifier),
  "n-grams": (t5, named("ngrams", target_text=outputs()), RAGGED, TokenVerifier),
  "prompt lookup or n-grams": (
    gpt,
    named("prompt_lookup_or_ngrams", target_text=outputs()),
    chain(2),
    TokenVerifier,
  ),
  "lookahead": (t5, named("lookahead", window=3, num_ngrams=2), chain(2), TokenVerifier),
  "retrieval": (t5, retrieval, RAGGED, TokenVerifier),
  "retrieval, dynamic": (
    gpt,
    retrieval,
    DynamicTree(5, 2),
    TokenVerifier,
  ),
  "layers": (t5, layers, chain(3), BlockVerifier),
  "layers, GPT": (gpt, layers, RAGGED, TokenVerifier),
  "saturation": (deep, saturated(0.4), chain(3), TokenVerifier),
  "saturation, GPT": (deep_gpt, saturated(None), RAGGED, TokenVerifier),
  "known": (gpt, known, chain(5), TokenVerifier),
  "stopping": (t5, stopping, chain(4), TokenVerifier),
  "stopping, adaptive": (t5, adaptive_stopping, chain(4), TokenVerifier),
  "hand over": (t5, hand_over, chain(4), TokenVerifier),
  "cascade": (gpt, cascade, chain(4), TokenVerifier),
  "fastest": (gpt, fastest, chain(3), TokenVerifier),
  "heads": (gpt, learned("heads"), RAGGED, TokenVerifier),
  "EAGLE": (t5, learned("eagle"), RAGGED, TokenVerifier),
  "EAGLE, dynamic": (gpt, learned("eagle"), DynamicTree(9, 3), TokenVerifier),
  "one pass": (t5, learned("parallel"), chain(3), BlockVerifier),
  "look-ahead embeddings": (t5, learned("pass"), chain(3), TokenVerifier),
  "early exit": (gpt, learned("early_exit"), chain(3), TokenVerifier),
  "early exit, chosen layers": (deep, learned("early_exit", (0, 2)), RAGGED, TokenVerifier),
  "shared encoder": (t5, learned("shared_encoder"), RAGGED, TokenVerifier),
  "conditioned": (t5, learned("conditioned"), RAGGED, TokenVerifier),
  "features": (t5, learned("features"), RAGGED, TokenVerifier),
  "EAGLE, text": (t5, learned("eagle_text"), RAGGED, TokenVerifier),
  "drafter": (t5, learned("drafter"), RAGGED, TokenVerifier),
  "fused features, dynamic": (
    deep_features,
    learned("features", (0, 2)),
    DynamicTree(9, 3),
    TokenVerifier,
  ),
  "uniform": (t5, named("uniform"), branching(2, 1), TokenVerifier),
  "hierarchical": (t5, hierarchical, chain(4), TokenVerifier),
  "hierarchical, trees": (t5, hierarchical_trees, chain(4), TokenVerifier),
  "hierarchical, GPT": (gpt, two_levels, chain(3), BlockVerifier),
  "bigrams": (t5, bigrams, chain(2), BlockVerifier),
  "dynamic": (t5, dynamic_near, DynamicTree(6, 3), TokenVerifier),
  "dynamic, GPT": (gpt, dynamic, DynamicTree(3, 4), TokenVerifier),
  "dynamic of itself": (t5, dynamic_itself, DynamicTree(4, 2), TokenVerifier),
  "drafts joined": (t5, forest_draft, Tree((0, 0, 0, 0, 1, 2, 3, 4)), TokenVerifier),
  "drafts merged": (t5, forest_draft, Tree((0, 0, 0, 0, 1, 2, 3, 4)), registry.verifier("merging")),
  "realigned": (t5, realigned, chain(4), TokenVerifier),
  "token recycling": (
    t5,
    named("recycled_tokens", target_text=outputs(), num_successors=4, max_ngram=2),
    RAGGED,
    TokenVerifier,
  ),
  "free": (t5, free, RAGGED, TokenVerifier),
  "blocks": (t5, model, chain(3), BlockVerifier),
  "tree": (t5, near, RAGGED, TokenVerifier),
  "other vocabulary": (t5, other_vocabulary, RAGGED, TokenVerifier),
  "tree, GPT": (gpt, model, RAGGED, TokenVerifier),
  "tree, blocks": (t5, near, branching(2, 2), BlockVerifier),
  "BART": (bart, model, RAGGED, TokenVerifier),
  "T5Gemma": (t5gemma, model, chain(3), BlockVerifier),
  "T5Gemma, dynamic": (t5gemma, dynamic, DynamicTree(6, 3), TokenVerifier),
  "T5Gemma, conditioned": (t5gemma, learned("conditioned"), RAGGED, TokenVerifier),
  "Whisper": (whisper, model, RAGGED, TokenVerifier),
  "Whisper, target's table": (whisper, on_the_table, RAGGED, TokenVerifier),
  "Whisper, conditioned": (whisper, learned("conditioned"), chain(3), BlockVerifier),
  "given": (with_texts(t5), given, chain(8), TokenVerifier),
  "given, GPT": (with_texts(gpt), given, chain(4), TokenVerifier),
  "given, Whisper": (with_texts(whisper), given, chain(8), TokenVerifier),
  "given, all": (with_texts(t5), given_only, chain(8), BlockVerifier),
  "k-seq": (t5, independent, branching(2, 2), registry.verifier("k_seq")),
  "paths": (t5, near, RAGGED, registry.verifier("paths")),
  "paths, GPT": (gpt, model, RAGGED, registry.verifier("paths")),
  "rejection": (t5, independent, branching(2, 2), registry.verifier("rejection")),
  "greedy siblings": (t5, model, GREEDY_RAGGED, TokenVerifier),
  "typical": (t5, model, RAGGED, registry.verifier("typical")),
  "top-beta": (gpt, model, chain(2), registry.verifier("top_beta")),
  "rollback": (t5, hand_over, chain(4), registry.verifier("rollback")),
}
# The default run tests these cases; the others are slow.
QUICK = {
  "chain",
  "prompt lookup, tree",
  "token recycling",
  "conditioned",
  "dynamic",
  "tree, GPT",
  "tree, blocks",
}


def marked(cases, quick=QUICK):
  """Return parameters of a test: the cases, with a mark unless they are quick."""
  return [pytest.param(x, marks=() if x in quick else pytest.mark.slow, id=x) for x in cases]


EXACT = [name for name, (*_, verifier) in CASES.items() if verifier(RANDOM).exact]
# Cases whose joint distribution is sampled by whole loops; single rounds of others are sampled on
# tables, below. With top-k a node may have fewer possible children than the tree.
SAMPLED = [
  ("stopping", "temperature 1"),
  *(
    pytest.param(case, method, marks=pytest.mark.slow)
    for case, method in [
      ("tree, blocks", "top-k"),
      ("hierarchical", "temperature 1"),
      ("dynamic", "temperature 1"),
      ("T5Gemma", "temperature 1"),
    ]
  ),
]


def speculate(case: str, sampling: Sampling, rows=range(6)):
  """Decode with new objects; equal objects share one compiled program."""
  models_of, draft_of, tree, verifier = CASES[case]
  models = models_of()
  draft, draft_params = draft_of(models, sampling, tree)
  rows = np.array(rows)
  prompts, keys = models.prompts[rows], jax.random.split(jax.random.key(0), 6)[rows]
  params, how = (
    (models.params, draft_params),
    dict(max_new_tokens=LIMIT, verifier=verifier(sampling)),
  )
  return speculative_decode(models.target, draft, *params, prompts, keys, **how)


@pytest.mark.parametrize("case", marked(EXACT))
def test_greedy_output_equals_autoregressive_decoding(case):
  plain, ours = autoregressive_outputs(CASES[case][0]), speculate(case, GREEDY)
  np.testing.assert_array_equal(ours.tokens, plain.tokens)
  np.testing.assert_array_equal(ours.lengths, plain.lengths)
  assert (np.asarray(ours.not_finite) == -1).all()


def on_device(prompts: Any) -> Any:
  return jax.tree.map(jnp.asarray, prompts)


def with_positions(models: Models, count: int) -> Models:
  """Return the models with a target that has the first `count` of 64 learned positions."""
  config = dataclasses.replace(models.target.config, num_positions=64)
  params = tiny.params(config.with_layout(weights="float"), 2, peak=0.9)
  params = (
    params if config.layout.weights == "float" else tiny.quantized(params, config.layout.weights)
  )
  params = jax.tree_util.tree_map_with_path(
    lambda path, x: x[:count] if path[-1].key == "positions" else x, params
  )
  target = dataclasses.replace(
    models.target, config=dataclasses.replace(config, num_positions=count)
  )
  return models._replace(target=target, params=params)


@functools.cache
def endless_outputs(of) -> Any:
  """Return the autoregressive output of a target with 64 positions, without EOS."""
  models, keys = with_positions(of(), 64), jax.random.split(jax.random.key(0), 6)
  how = dict(max_new_tokens=LIMIT, sampling=GREEDY, eos_id=-1)
  return autoregressive_decode(models.target, models.params, models.prompts, keys, **how)


# Cases that differ in the nodes that the target processes, or in drafts that use its layers.
AT_THE_END = [
  "chain",
  "tree",
  "tree, GPT",
  "dynamic",
  "dynamic, GPT",
  "paths, GPT",
  "BART",
  "Whisper",
]
AT_THE_END += ["int8, few tokens", "hierarchical, GPT", "other vocabulary", "layers"]
AT_THE_END += ["early exit", "conditioned"]


@pytest.mark.parametrize("case", marked(AT_THE_END, {"chain", "dynamic"}))
def test_texts_end_at_the_last_position(case):
  """The target has as many positions as the longest text needs, and none for nodes after it."""
  models_of, draft_of, tree, verifier = CASES[case]
  models = with_positions(models_of(), LIMIT)
  draft, draft_params = draft_of(models, GREEDY, tree)
  params, keys = (models.params, draft_params), jax.random.split(jax.random.key(0), 6)
  how = dict(max_new_tokens=LIMIT + 5, verifier=verifier(GREEDY), eos_id=-1)
  ours = speculative_decode(models.target, draft, *params, models.prompts, keys, **how)
  lengths = LIMIT + 1 - np.asarray(models.target.prompt_tokens(on_device(models.prompts))[1])
  np.testing.assert_array_equal(ours.lengths, lengths)
  plain = np.asarray(endless_outputs(models_of).tokens)
  for row, length in enumerate(lengths):
    np.testing.assert_array_equal(ours.tokens[row, :length], plain[row, :length])


def same_rows(one, other, rows: list[int]) -> None:
  """Assert that these rows of one batch, rounds included, are the rows of the other batch."""
  np.testing.assert_array_equal(np.asarray(one.tokens)[rows], other.tokens)
  ran = int(other.num_rounds)
  for of_one, of_other in zip(jax.tree.leaves(one.rounds), jax.tree.leaves(other.rounds)):
    np.testing.assert_array_equal(np.asarray(of_one)[:ran, rows], np.asarray(of_other)[:ran])


# Drafts that select their tokens deterministically use no random numbers, and some that sample run
# the same code as another case. They are compiled once, at temperature 0.
DETERMINISTIC = {"token recycling", "prompt lookup, tree", "retrieval, dynamic", "lookahead"}
DETERMINISTIC |= {"dynamic", "EAGLE, dynamic", "fused features, dynamic", "other vocabulary"}
DETERMINISTIC |= {"tree, GPT"}


def sampling_of(case: str) -> Sampling:
  return GREEDY if case in DETERMINISTIC else RANDOM


@functools.cache
def in_batch(case: str):
  return speculate(case, sampling_of(case))


# Cases whose drafts have the state of another case, or nearly so.
SAME_STATE = {"greedy siblings", "int8, few tokens", "int4, few tokens", "BART", "T5Gemma"}
SAME_STATE |= {"blocks", "tree", "tree, blocks", "k-seq", "paths", "paths, GPT", "rejection"}
SAME_STATE |= {"typical", "top-beta", "drafts merged", "bigrams", "retrieval", "prompt lookup"}
SAME_STATE |= {"prompt lookup or n-grams", "known", "stopping", "hand over", "free"}
SAME_STATE |= {"dynamic of itself", "dynamic, GPT", "T5Gemma, dynamic", "T5Gemma, conditioned"}
SAME_STATE |= {"layers, GPT", "saturation, GPT", "early exit", "early exit, chosen layers", "EAGLE"}
SAME_STATE |= {"EAGLE, text", "features", "shared encoder", "look-ahead embeddings"}
SAME_STATE |= {"hierarchical, trees", "hierarchical, GPT", "rollback", "one pass", "drafter"}
SAME_STATE |= {"stopping, adaptive", "retrieval, dynamic", "uniform"}
OWN_STATE = [case for case in CASES if case not in SAME_STATE]


@pytest.mark.parametrize("case", marked(OWN_STATE))
def test_rows_do_not_depend_on_their_neighbors_and_equal_objects_share_programs(case):
  whole = in_batch(case)
  speculate(case, sampling_of(case))  # compiles, if the program was forgotten
  compiled = Decoder.run._cache_size()
  rows = [3, 3, 5, 5, 5, 0]  # other neighbors, in other places
  same_rows(whole, speculate(case, sampling_of(case), rows), rows)
  assert Decoder.run._cache_size() == compiled


@pytest.mark.parametrize("case", marked(OWN_STATE))
def test_each_text_is_decoded_in_any_slot_as_in_a_batch(case):
  """Six texts of unequal lengths are decoded in two slots."""
  sampling = sampling_of(case)
  models_of, draft_of, tree, verifier = CASES[case]
  models = models_of()
  draft, draft_params = draft_of(models, sampling, tree)
  decoder = Decoder(models.target, draft, verifier(sampling))
  params, keys = Params(models.params, draft_params), jax.random.split(jax.random.key(0), 6)
  init = functools.partial(decoder.init, max_new_tokens=LIMIT)
  if not jax.tree.leaves(jax.eval_shape(init, params, on_device(models.prompts), keys).draft_state):
    return  # without state of the draft, all of the state is that of other cases
  whole = in_batch(case)
  prompts = without_draft(models.prompts)
  is_text = not isinstance(prompts, Encoded)
  lengths = (prompts != 0).sum(axis=1).tolist() if is_text else [8] * 6
  limits = np.full(6, LIMIT)
  found = batching.decode_texts(
    decoder,
    params,
    batching.Texts(models.prompts.__getitem__, lengths, keys, limits),
    batch_size=2,
    max_new_tokens=LIMIT,
    has_encoder=is_text and models.target.config.has_encoder,
  )
  seen = []
  for text, result, row in found:
    seen.append(text)
    ran = (result.rounds.num_emitted[:, row] > 0).sum()
    np.testing.assert_array_equal(result.tokens[row], whole.tokens[text])
    for of_slot, of_batch in zip(*map(jax.tree.leaves, (result.rounds, whole.rounds)), strict=True):
      np.testing.assert_array_equal(of_slot[:ran, row], of_batch[:ran, text])
  assert sorted(seen) == [*range(6)]


@pytest.mark.parametrize("of_paths, of_tree", [("paths", "tree"), ("paths, GPT", "tree, GPT")])
@pytest.mark.parametrize("sampling", [RANDOM], ids=["random"])
@pytest.mark.slow
def test_batch_of_paths_gives_the_rounds_of_the_tree(of_paths, of_tree, sampling):
  paths, tree = (speculate(case, sampling) for case in (of_paths, of_tree))
  same_rows(paths, tree, [*range(6)])
  # A row other than the first one, which has nodes 1 and 3, was kept.
  assert np.isin(paths.rounds.path, (2, 4)).any()


def test_single_rows_equal_the_batch():
  case = "conditioned"
  for row in range(6):
    same_rows(in_batch(case), speculate(case, RANDOM, [row]), [row])


@pytest.mark.parametrize("case", marked(OWN_STATE))
def test_recorded_rounds_add_up_to_the_text(case):
  out = in_batch(case)
  models_of, draft_of, requested_tree, _ = CASES[case]
  tree = draft_of(models_of(), sampling_of(case), requested_tree)[
    0
  ].tree  # which may differ from the requested one
  rounds = jax.tree.map(np.asarray, out.rounds)
  for row, length in enumerate(np.asarray(out.lengths)):
    text = []
    for r in range(int(out.num_rounds)):
      n, count = rounds.num_accepted[r, row], rounds.num_emitted[r, row]
      path = range(1, n + 1) if rounds.path is None else rounds.path[r, row, :n]
      parents = tree.parents if rounds.parents is None else rounds.parents[r, row]
      assert [0, *path][:-1] == [parents[node - 1] for node in path]
      emitted = [
        *rounds.draft_tokens[r, row][[node - 1 for node in path]],
        rounds.next_token[r, row],
      ]
      text += emitted[:count]
    assert text == np.asarray(out.tokens)[row, :length].tolist()


@functools.cache
def target_of(models_of):
  """Return a function that returns the configuration and the parameters of a target."""
  return lambda: (models_of().target.config, models_of().params)


@pytest.mark.parametrize("case, method", SAMPLED)
def test_samples_have_the_targets_joint_distribution(case, method):
  sampling = {"temperature 1": RANDOM, "top-k": TOP_K}[method]
  models_of, draft_of, tree, verifier = CASES[case]
  models = models_of()
  draft, draft_params = draft_of(models, sampling, tree)
  decode = functools.partial(
    *(speculative_decode, models.target, draft, models.params, draft_params),
    verifier=verifier(sampling),
  )
  exact = exact_joint(method, target_of(models_of))
  assert tiny.p_value(joint_of_loop(decode)[0], exact) > tiny.LEVEL


# Cases that differ in how draft tokens come about. They are tested with the verifier of the case.
ON_TABLES = ["chain", "known", "dynamic", "conditioned", "hierarchical", "drafts merged"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_TABLES)
def test_rounds_on_tables_have_the_distribution_of_the_tables(case):
  """Rounds of the draft with its verifier, as `specdec check` runs them."""
  models_of, draft_of, tree, verifier = CASES[case]
  models = models_of()
  draft, draft_params = draft_of(models, RANDOM, tree)
  decoder = Decoder(models.target, draft, verifier(RANDOM))
  params = Params(models.params, draft_params)
  found = draft_with_verifier(decoder, params, jnp.asarray(models.prompts), 0, 2**11)
  test = TableTest(*found, is_alone=False)
  assert test.counts.num_tokens[0] >= 2**11 - 6 and min(test.p_values) > tiny.LEVEL


@pytest.mark.parametrize(
  "case", marked(["tree, GPT", "dynamic", "hierarchical, GPT"], {"tree, GPT"})
)
def test_incremental_draft_state_equals_a_full_reread(case, monkeypatch):
  """After each of three rounds, the draft proposes the same tokens as after rereading the whole
  text.

  The target's hidden state, which the draft may read, comes from a forward pass over the text
  without its last token.
  """
  models_of, draft_of, tree, verifier = CASES[case]
  models, keys = models_of(), jax.random.split(jax.random.key(0), 6)
  draft, draft_params = draft_of(models, RANDOM, tree)
  params = models.params, draft_params
  state = tiny.start(models.target, draft, *params, models.prompts, LIMIT)
  state = state._replace(rng=keys)
  decoder = Decoder(models.target, draft, verifier(RANDOM), eos_id=-1)
  step = jax.jit(functools.partial(decoder.round, Params(*params)))
  propose, anew = (
    jax.jit(lambda kept, context: draft.propose(draft_params, kept, context, keys)[0])
    for _ in range(2)
  )
  count, read, of_prompt = (
    state.tokens.shape[1],
    drafts_model.extend_last_tokens,
    state.draft_state,
  )
  unread = models.target.commit(state.target_cache, 0 * state.length)
  of_text = jax.jit(lambda tokens: models.target.extend(models.params, unread, tokens)[1])
  for _ in range(3):
    if case == "tree, GPT":  # the first of its prompts is one token, which has no token before it
      want = np.pad(of_text(state.tokens), ((0, 0), (1, 0), (0, 0)))
      want = want[np.arange(6), state.length - 1]
      np.testing.assert_allclose(state.hidden, want, atol=1e-5)
    state = step(state)
    if case == "fastest":  # the choice depends on earlier rounds; only the caches are new
      of_prompt = state.draft_state._replace(inner=of_prompt.inner)
    got = propose(state.draft_state, state.context)
    with monkeypatch.context() as patched:
      for module in drafts_model, drafts_dynamic, drafts_hierarchical:
        patched.setattr(module, "extend_last_tokens", lambda *args: read(*args[:4], count))
      want = anew(of_prompt, state.context)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(one, other, atol=1e-5)
  rounds = unpacked_rounds(decoder.draft.tree, state.rounds)
  assert np.asarray(rounds.num_accepted[:3]).max() > 1


def gathered(jaxpr) -> set[tuple[int, ...]]:
  """Return the shapes of all arrays from which a program gathers, including its loops and calls."""
  found = {eqn.invars[0].aval.shape for eqn in jaxpr.eqns if eqn.primitive.name == "gather"}
  inner = [gathered(each) for eqn in jaxpr.eqns for each in jaxprs_in_params(eqn.params)]
  return found.union(*inner)


def program(case: str) -> Any:
  """Return the program that decodes a case."""
  models_of, draft_of, tree, verifier = CASES[case]
  models = models_of()
  draft, draft_params = draft_of(models, TOP_K, tree)
  decoder = Decoder(models.target, draft, verifier(TOP_K))
  run = functools.partial(decoder.run.__wrapped__, decoder, max_new_tokens=LIMIT)
  params, prompts = Params(models.params, draft_params), models.prompts[:2]
  return jax.make_jaxpr(run)(params, prompts, jax.random.key(0)).jaxpr


def dtypes(jaxpr) -> set[str]:
  """Return the dtypes of all results in a program that are not weak or empty."""
  results = [x.aval for eqn in jaxpr.eqns for x in eqn.outvars]
  found = {str(x.dtype) for x in results if x.size and not x.weak_type}
  inner = [dtypes(each) for eqn in jaxpr.eqns for each in jaxprs_in_params(eqn.params)]
  return found.union(*inner)


@pytest.mark.parametrize("case", marked(CASES))
def test_no_program_computes_in_float64_where_jax_enables_it(case):
  program(case)  # makes the arrays of the test itself, which have 32 bits
  with jax.enable_x64(True):
    assert "float64" not in dtypes(program(case))


@pytest.mark.parametrize("case", marked(CASES))
def test_no_program_depends_on_implicit_rank_promotion(case):
  with jax.numpy_rank_promotion("raise"):
    program(case)


@pytest.mark.parametrize("of", [t5, gpt])
def test_chain_does_not_gather_from_caches_and_a_tree_does(of):
  models, sampling = of(), RANDOM

  def shapes(tree: Tree) -> tuple[set, set]:
    """Return the shapes of the caches, and of the arrays from which a round gathers."""
    draft = ModelDraft(models.draft, sampling, tree)
    params = models.params, models.draft_params
    decoder = Decoder(models.target, draft, TokenVerifier(sampling))
    keys = jax.random.split(jax.random.key(0), 6)
    init = functools.partial(decoder.init, rng=keys, max_new_tokens=LIMIT)
    state = jax.eval_shape(init, Params(*params), models.prompts)
    layers = state.target_cache.layers, state.draft_state.layers
    caches = {x.shape for x in jax.tree.leaves(layers)}
    round_of = functools.partial(decoder.round, Params(*params))
    return caches, gathered(jax.make_jaxpr(round_of)(state).jaxpr)

  caches, of_chain = shapes(chain(3))
  assert of_chain and not caches & of_chain
  caches, of_tree = shapes(RAGGED)
  assert caches <= of_tree
