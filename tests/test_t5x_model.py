"""The t5x model class against t5x's own decoding, and through t5x's own infer.py and gin files."""

import dataclasses
import functools
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys

import gin
import jax
import numpy as np
import pytest
import tiny
import tiny_pair
from flax import core
from tiny import autoregressive_decode, speculative_decode

from specdec_jax import records
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import Tree, branching, chain
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.k_seq import KSeqVerifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.vocabulary import padded
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError
from specdec_jax.lossy_verifiers import TypicalVerifier
from specdec_jax.models.config import t5_config
from specdec_jax.models.t5 import T5Model
from specdec_jax.run import main

models = pytest.importorskip("t5x.models", reason="t5x is not installed: see docs/t5x.md")

import t5x_task  # noqa: E402
from t5x import binary_search, checkpoints, decoding, partitioning, train_state  # noqa: E402
from t5x.examples.t5 import network  # noqa: E402

from specdec_jax import t5x_model  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIMIT, EXAMPLES = 20, 5
PAIR = dict(target="target", draft="near", vocabulary="vocabulary.model")
TARGET = tiny.config(vocab_size=264)
SMALL = tiny.config(vocab_size=264, layers=1)


def with_endings(params):
  """The same with likelier EOS, so that some outputs end and others run into the limit."""
  kernel = params["decoder"]["logits_dense"]["kernel"]
  params["decoder"]["logits_dense"]["kernel"] = kernel.at[:, 1].multiply(3)
  return params


PARAMS = with_endings(tiny.params(TARGET, 2))
DRAFTS = {
  "target": (TARGET, PARAMS),
  "near": (TARGET, tiny.near(PARAMS, 3, 0.1)),
  "random": (SMALL, tiny.params(SMALL, 4)),
}
BATCH = {
  "encoder_input_tokens": tiny.sources(TARGET, 1, EXAMPLES),
  "decoder_input_tokens": np.zeros((EXAMPLES, LIMIT), np.int32),
}


def speculative(draft=SMALL, of_round=None, *, decoder_params=None, decode_fn=None, **sampling):
  """At temperature 0 unless `sampling`, as `temperature_sample` has it, says otherwise.

  `of_round` may hold gamma, tree, verifier and lenience.
  """
  sampling = {"temperature": 0.0, "topk": 0} | sampling
  return t5x_model.SpeculativeModel(
    t5x_model.t5x_network(TARGET),
    t5x_task.VOCABULARY,
    t5x_task.VOCABULARY,
    None,
    decode_fn=decode_fn or functools.partial(decoding.temperature_sample, **sampling),
    draft_module=t5x_model.t5x_network(draft),
    default_decoder_params=decoder_params,
    **of_round or {},
  )


def both(draft_params):
  """t5x hands frozen trees to a model."""
  return core.freeze({**PARAMS, "draft": draft_params})


@functools.cache
def plain():
  """t5x's own model of the target."""
  vocabulary = t5x_task.VOCABULARY
  return models.EncoderDecoderModel(
    t5x_model.t5x_network(TARGET), vocabulary, vocabulary, None, decoding.temperature_sample
  )


@functools.cache
def greedy():
  """What t5x's own `temperature_sample` writes at temperature 0, and log-probabilities of it."""
  how = {"temperature": 0.0, "topk": 0, "rescale_log_probs": False}
  decode = lambda p: plain().predict_batch_with_aux(p, BATCH, decoder_params=how)
  return jax.device_get(jax.jit(decode)(PARAMS))


RAGGED = 0, 0, 0, 1, 1, 2, 4


@pytest.mark.parametrize(
  "draft, depth, of_round",
  [
    ("target", 3, dict(gamma=3)),
    ("near", 7, dict(gamma=7)),
    ("random", 1, dict(gamma=1)),
    ("random", 4, dict(gamma=4)),
    ("near", 4, dict(gamma=4, verifier=BlockVerifier)),
    ("near", 2, dict(tree=branching(2, 2).parents)),
    ("target", 3, dict(tree=RAGGED)),
    ("near", 3, dict(tree=RAGGED, verifier=BlockVerifier)),
  ],
)
def test_greedy_is_t5x_temperature_sample(draft, depth, of_round):
  tokens, aux = greedy()
  lengths = (tokens != 0).sum(axis=1)
  assert lengths.min() < lengths.max() == LIMIT
  config, draft_params = DRAFTS[draft]
  model = speculative(config, of_round, rescale_log_probs=False)
  got, got_aux = jax.jit(model.predict_batch_with_aux)(both(draft_params), BATCH)
  np.testing.assert_array_equal(got, tokens)
  np.testing.assert_allclose(got_aux["scores"], aux["scores"], rtol=1e-5, atol=1e-5)
  rounds = jax.device_get(got_aux["rounds"])
  np.testing.assert_array_equal(rounds["num_tokens"], lengths)
  assert (rounds["not_finite"] == -1).all()
  if draft == "target":  # every guess stands
    assert rounds["num_rejected"].sum() == 0
    np.testing.assert_array_equal(rounds["num_rounds"], -(-lengths // (depth + 1)))
  else:
    assert rounds["num_rejected"].sum() > 0
    assert (rounds["num_rounds"] <= lengths).all()


@pytest.mark.parametrize(
  "draft, num_decodes, settings, of_round",
  [
    ("near", 4, {}, dict(gamma=2)),
    ("near", 2, dict(alpha=1.0), dict(gamma=3, draft_beams=4)),
    ("random", 1, {}, dict(gamma=1)),
  ],
)
def test_beams_are_t5xs(draft, num_decodes, settings, of_round):
  network, params = DRAFTS[draft]
  search = functools.partial(decoding.beam_search, **settings)
  how = dict(num_decodes=num_decodes, return_all_decodes=True)
  ours = speculative(network, of_round, decode_fn=search)
  found, aux = jax.jit(lambda p: ours.predict_batch_with_aux(p, BATCH, **how))(both(params))
  words = t5x_task.VOCABULARY
  theirs = models.EncoderDecoderModel(t5x_model.t5x_network(TARGET), words, words, None, search)
  wanted, scores = jax.jit(lambda p: theirs.predict_batch_with_aux(p, BATCH, **how))(PARAMS)
  np.testing.assert_array_equal(found, wanted)
  np.testing.assert_allclose(aux["scores"], scores["scores"], atol=1e-5)
  rounds = jax.device_get(aux["rounds"])
  assert rounds["num_rounds"].shape == (EXAMPLES, num_decodes)
  assert (rounds["num_rounds"] < rounds["num_steps"]).any() == (draft == "near")
  best, one = ours.predict_batch_with_aux(both(params), BATCH, num_decodes=num_decodes)
  np.testing.assert_array_equal(best, wanted[:, -1])
  assert one["rounds"]["num_rounds"].shape == (EXAMPLES,)


def test_greedy_scores_are_zero_as_in_t5x_unless_asked():
  _, aux = jax.jit(speculative().predict_batch_with_aux)(both(DRAFTS["random"][1]), BATCH)
  assert (aux["scores"] == 0).all()


def test_max_decode_steps_is_t5x():
  how = {"temperature": 0.0, "max_decode_steps": 6}
  decode = lambda p: plain().predict_batch_with_aux(p, BATCH, decoder_params=how)[0]
  want = jax.jit(decode)(PARAMS)
  params = both(DRAFTS["random"][1])
  got = jax.jit(speculative(max_decode_steps=6).predict_batch)(params, BATCH)
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
  "topk, topp, return_all, tree, verifier",
  [(4, 0.0, True, chain(3), TokenVerifier), (0, 0.6, False, branching(2, 2), KSeqVerifier)],
)
def test_several_decodes_are_ours_sorted_by_t5x_scores(topk, topp, return_all, tree, verifier):
  decodes, temperature, rng = 3, 0.7, jax.random.PRNGKey(5)
  config, draft_params = DRAFTS["near"]
  how_many = models.DecoderParams(num_decodes=decodes, return_all_decodes=return_all)
  of_round = dict(tree=tree.parents, verifier=verifier)
  model = speculative(config, of_round, decoder_params=how_many)
  how = {"temperature": temperature, "topk": topk, "topp": topp}
  predict = lambda p, key: model.predict_batch_with_aux(p, BATCH, key, how)
  tokens, aux = jax.device_get(jax.jit(predict)(both(draft_params), rng))

  # Our own loop, with a key for each row,
  sampling = Sampling(temperature, topk, topp or 1.0)
  independent = verifier is KSeqVerifier  # as it needs its siblings to be
  draft = ModelDraft(T5Model(config), sampling, tree, independent)
  source = np.repeat(BATCH["encoder_input_tokens"], decodes, axis=0)
  keys = jax.random.split(rng, len(source))
  common = dict(max_new_tokens=LIMIT, verifier=verifier(sampling))
  ours = speculative_decode(T5Model(TARGET), draft, PARAMS, draft_params, source, keys, **common)
  ours_tokens = np.asarray(ours.tokens)
  assert len({tuple(row) for row in ours_tokens[:decodes].tolist()}) > 1

  # scored by t5x's logits, adjusted by t5x.
  @jax.jit
  def log_probs(params):
    forced = {
      "encoder_input_tokens": source,
      "decoder_input_tokens": np.pad(ours_tokens, ((0, 0), (1, 0)))[:, :-1],
      "decoder_target_tokens": np.ones_like(ours_tokens),
    }
    logits = plain()._compute_logits(params, forced) / temperature
    mask = binary_search.topk_mask if topk else binary_search.topp_mask
    return jax.nn.log_softmax(mask(logits, topk or topp, decoding.NEG_INF))

  of_tokens = np.take_along_axis(np.asarray(log_probs(PARAMS)), ours_tokens[..., None], -1)[..., 0]
  is_text = np.arange(LIMIT) < np.asarray(ours.lengths)[:, None]
  scores = np.where(is_text, of_tokens, 0).sum(axis=1).reshape(EXAMPLES, decodes)
  order = np.argsort(scores, axis=1)
  scores = np.take_along_axis(scores, order, axis=1)
  want = np.take_along_axis(ours_tokens.reshape(EXAMPLES, decodes, -1), order[..., None], axis=1)
  if not return_all:
    scores, want = scores[:, -1], want[:, -1]
  np.testing.assert_array_equal(tokens, want)
  np.testing.assert_allclose(aux["scores"], scores, rtol=1e-4, atol=1e-4)


def test_scoring_is_the_target_alone():
  tokens = greedy()[0]
  batch = BATCH | {"decoder_target_tokens": tokens, "decoder_loss_weights": tokens > 0}
  want = jax.jit(plain().score_batch)(PARAMS, batch)
  got = jax.jit(speculative().score_batch)(both(DRAFTS["random"][1]), batch)
  np.testing.assert_array_equal(got, want)


def largest_constant(function, *args) -> int:
  """Characters of the longest line of a lowered program: a baked-in array is one line of hex."""
  lowered = jax.jit(function).lower(*args).as_text()
  return max(len(line) for line in lowered.splitlines() if "func.func" not in line)


def test_draft_parameters_are_arguments():
  draft_params = DRAFTS["random"][1]
  model, params = speculative(), both(draft_params)
  lowered = jax.jit(model.predict_batch).lower(params, BATCH).as_text()
  main = next(line for line in lowered.splitlines() if "@main(" in line)
  # Every parameter of both, and of the batch the tokens that are read.
  assert main.count("%arg") == len(jax.tree.leaves(params)) + 1
  bytes_of_table = draft_params["token_embedder"]["embedding"].nbytes
  assert largest_constant(model.predict_batch, params, BATCH) < bytes_of_table / 4
  baked = lambda params: model.predict_batch({**params, "draft": draft_params}, BATCH)
  assert largest_constant(baked, core.freeze(PARAMS)) > bytes_of_table


def test_bad_input_is_told():
  with pytest.raises(InputError, match="264 and the draft's 300"):
    speculative(tiny.config(vocab_size=300))
  with pytest.raises(InputError, match="float32_attention_logits True"):
    t5x_model.same_config(network.Transformer(network.T5Config(9, float32_attention_logits=True)))
  with pytest.raises(InputError, match="Dense; .*Transformer"):
    t5x_model.same_config(network.nn.Dense(3))


@pytest.mark.parametrize(
  "of_round, sentence",
  [
    (dict(gamma=0), "gamma is 0; it must be a whole number, from 1"),
    (dict(tree=3), "tree is 3; it must be a list .each a whole number. or None"),
    (dict(tree=(0, 0.5)), "tree is .0, 0.5.; it must be a list"),
    (dict(tree=(0, 3, 1)), "A tree has parents .0, 3, 1.; they must be"),
    (dict(verifier=3), "verifier is 3; it must be a function"),
    (dict(verifier=lambda sampling: 3), "verifier returns 3 for a sampling"),
    (dict(lenience=2), "lenience is 2; it must lie in"),
    (
      dict(verifier=BlockVerifier, lenience=0.5),
      "lenience is 0.5, but the verifier is BlockVerifier",
    ),
  ],
)
def test_rounds_that_cannot_be_are_told_before_a_checkpoint_is_read(of_round, sentence):
  with pytest.raises(InputError, match=sentence):
    speculative(SMALL, of_round)


def shapes(model, params=None, **call):
  """Shapes of tokens and scores; nothing is compiled."""
  params = both(DRAFTS["random"][1]) if params is None else params
  decode = lambda params: model.predict_batch_with_aux(params, BATCH, **call)
  tokens, aux = jax.eval_shape(decode, params)
  return tokens.shape, aux["scores"].shape


KEY = jax.random.PRNGKey(1)


@pytest.mark.parametrize(
  "call, sentence",
  [
    (dict(prompt_with_targets=True), "prompt_with_targets is True"),
    (dict(num_decodes=0), "num_decodes is 0; it must be a whole number, from 1"),
    (dict(decoder_params={"alpha": 0.6}), "decoder_params has alpha; .*gamma"),
    (dict(decoder_params={"max_decode_steps": 0}), "max_decode_steps is 0; .* from 1"),
    (dict(decoder_params={"max_decode_steps": LIMIT + 1}), "length is 20; make it 20 or less"),
    (dict(decoder_params={"tree": (1,)}), "A tree has parents .1,.; they must be"),
    (dict(decoder_params={"topk": 3, "topp": 0.5}), "topk is 3 and topp is 0.5"),
    (dict(rng=KEY, decoder_params={"decode_rng": KEY}), "two keys, rng and .*'decode_rng'"),
    (dict(params=core.freeze(PARAMS)), "parameters have no 'draft'.*PairCheckpointer"),
  ],
)
def test_calls_that_mean_nothing_are_told(call, sentence):
  with pytest.raises(InputError, match=sentence):
    shapes(speculative(), **call)


def test_a_call_may_have_a_tree_and_a_lossy_rule_of_its_own():
  how = {"tree": (0, 0, 1), "verifier": TypicalVerifier}
  assert shapes(speculative(), decoder_params=how) == ((EXAMPLES, LIMIT), (EXAMPLES,))


def test_t5x_own_decoder_params_are_the_default():
  all_of_two = models.DecoderParams(return_all_decodes=True, num_decodes=2)
  assert shapes(speculative(decoder_params=all_of_two)) == ((EXAMPLES, 2, LIMIT), (EXAMPLES, 2))
  model = speculative(decoder_params=models.DecoderParams(return_all_decodes=True))
  assert shapes(model) == ((EXAMPLES, 1, LIMIT), (EXAMPLES, 1))
  assert shapes(model, return_all_decodes=False) == ((EXAMPLES, LIMIT), (EXAMPLES,))


GIN = """
from __gin__ import dynamic_registration
import seqio
from specdec_jax import t5x_model
from specdec_jax.models import config
from t5x import decoding
from t5x import models
from t5x.examples.t5 import network
NETWORK = @t5x_model.t5x_network()
t5x_model.t5x_network.config = @config.t5_config()
config.t5_config.size = 'tiny'
config.t5_config.vocab_size = 264
config.t5_config.padded_vocab_size = None
MODEL = @t5x_model.SpeculativeModel()
t5x_model.SpeculativeModel:
  module = %NETWORK
  draft_module = %NETWORK
  input_vocabulary = @seqio.ByteVocabulary()
  output_vocabulary = @seqio.ByteVocabulary()
  optimizer_def = None
"""


@pytest.fixture
def bound():
  """Makes a model as gin does, with these bindings."""

  def make(bindings: str):
    gin.parse_config(GIN + bindings)
    return gin.query_parameter("MODEL/macro.value").scoped_configurable_fn()

  gin.clear_config()
  yield make
  gin.clear_config()


def test_t5x_own_bindings_are_obeyed(bound):
  model = bound("""
models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample
models.EncoderDecoderModel.predict_batch_with_aux:
  num_decodes = 3
  return_all_decodes = True
  decoder_params = {'max_decode_steps': 7}
decoding.temperature_sample:
  temperature = 0.5
  topk = 20
t5x_model.SpeculativeModel.tree = [0, 0]
""")
  want = dict(
    gamma=5, tree=[0, 0], verifier=TokenVerifier, lenience=1.0, temperature=0.5, topk=20, topp=0.0
  )
  assert model._settings == want | dict(max_decode_steps=None, rescale_log_probs=True)
  params = tiny.params(t5x_model.same_config(model.module), 0)
  assert shapes(model, {**params, "draft": params}) == ((EXAMPLES, 3, LIMIT), (EXAMPLES, 3))


def test_a_draft_of_ones_own_is_a_network_in_a_scope(bound):
  """And outputs are as many as are asked of the model itself."""
  model = bound("""
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 264
  num_decoder_layers = 3
t5x_model.SpeculativeModel.module = @network.Transformer()
t5x_model.SpeculativeModel.draft_module = @draft/network.Transformer()
draft/network.Transformer.config = @draft/network.T5Config()
draft/network.T5Config.num_decoder_layers = 1
t5x_model.SpeculativeModel.predict_batch_with_aux.num_decodes = 2
t5x_model.SpeculativeModel.predict_batch_with_aux.return_all_decodes = True
""")
  target, draft = (t5x_model.same_config(module) for module in (model.module, model._draft.module))
  assert (target.num_decoder_layers, draft.num_decoder_layers) == (3, 1)
  assert target == dataclasses.replace(draft, num_decoder_layers=3)
  params = {**tiny.params(target, 0), "draft": tiny.params(draft, 0)}
  assert shapes(model, params)[0] == (EXAMPLES, 2, LIMIT)


def test_without_bindings_it_decodes_as_t5x_does(bound):
  """By `temperature_sample` as it stands, whose default is the most probable token."""
  settings = bound("")._settings
  assert (settings["temperature"], settings["topk"], settings["topp"]) == (1.0, 1, 0.0)


@pytest.mark.parametrize(
  "bindings, sentence",
  [
    ("models.EncoderDecoderModel.decode_fn = @network.Transformer", "decode_fn is Transformer; "),
    (
      """models.EncoderDecoderModel.decode_fn = @decoding.beam_search
decoding.beam_search.max_decode_step = 3""",
      "decoding.beam_search is bound to max_decode_step; SpeculativeModel takes alpha",
    ),
    (
      """models.EncoderDecoderModel.decode_fn = @decoding.beam_search
t5x_model.SpeculativeModel.tree = (0, 0)""",
      "decode_fn is beam_search, whose draft searches",
    ),
    (
      "models.EncoderDecoderModel.decode_fn = @cold/decoding.temperature_sample",
      "decode_fn is temperature_sample; .*without a scope",
    ),
    (
      "decoding.temperature_sample.num_decodes = 2",
      "bound to num_decodes; .*from models.EncoderDecoderModel.predict_batch_with_aux",
    ),
  ],
)
def test_bindings_that_mean_nothing_here_are_told(bound, bindings, sentence):
  with pytest.raises(InputError, match=sentence):
    bound(bindings)


def test_beam_search_accepts_the_default_rule_bound_by_gin(bound):
  """Gin passes a subclass of TokenVerifier, as gin/t5x/infer.gin binds it."""
  search = """
from specdec_jax.core.verify import blocks
from specdec_jax.core.verify import tokens
models.EncoderDecoderModel.decode_fn = @decoding.beam_search
"""
  model = bound(search + "t5x_model.SpeculativeModel.verifier = @tokens.TokenVerifier")
  assert model._settings["draft_beams"] is None
  for verifier in (
    "@blocks.BlockVerifier",
    "@tokens.TokenVerifier\ntokens.TokenVerifier.lenience = 0.5",
  ):
    gin.clear_config()
    with pytest.raises(InputError, match="decode_fn is beam_search, whose draft searches"):
      bound(search + f"t5x_model.SpeculativeModel.verifier = {verifier}")


def test_constructor_arguments_bound_on_t5xs_model_are_inherited(bound):
  """All optional ones; the four required ones are bound on SpeculativeModel itself."""
  model = bound("""
t5x_model.SpeculativeModel.optimizer_def = 'adafactor'
models.EncoderDecoderModel:
  decode_fn = @decoding.beam_search
  feature_converter_cls = @seqio.PrefixLMFeatureConverter
  label_smoothing = 0.125
  z_loss = 0.25
  loss_normalizing_factor = 233472
  default_decoder_params = @models.DecoderParams()
models.DecoderParams.num_decodes = 3
""")
  arrived = {
    "module": model.module.config.vocab_size == 264,
    "input_vocabulary": model.input_vocabulary == t5x_task.VOCABULARY,
    "output_vocabulary": model.output_vocabulary == t5x_task.VOCABULARY,
    "optimizer_def": model.optimizer_def == "adafactor",
    "decode_fn": model._searches,
    "feature_converter_cls": model.FEATURE_CONVERTER_CLS.__name__ == "PrefixLMFeatureConverter",
    "label_smoothing": model._label_smoothing == 0.125,
    "z_loss": model._z_loss == 0.25,
    "loss_normalizing_factor": model._loss_normalizing_factor == 233472,
    "default_decoder_params": model._default_decoder_params.num_decodes == 3,
  }
  assert arrived == dict.fromkeys(inspect.signature(models.EncoderDecoderModel).parameters, True)


@pytest.mark.parametrize("vocab_size, extra_ids", [(4224, 100), (4096, 0)])
def test_sentinels_are_counted_by_the_table_of_the_network(bound, vocab_size, extra_ids):
  """Our vocabulary has 4,096 pieces; the bindings are those of gin/t5x/infer.gin."""
  text = (ROOT / "gin" / "t5x" / "infer.gin").read_text()
  at = text.index("seqio.SentencePieceVocabulary:")
  vocabulary = ROOT / "specdec_jax" / "assets" / "multi30k_ende" / "vocabulary.model"
  more = f"""
{text[at : text.index(chr(10) * 2, at)]}
seqio.SentencePieceVocabulary.sentencepiece_model_file = '{vocabulary}'
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = {vocab_size}
  emb_dim = 8
  num_heads = 1
  num_encoder_layers = 1
  num_decoder_layers = 1
  head_dim = 8
  mlp_dim = 8
  dtype = 'float32'
  mlp_activations = ('relu',)
  dropout_rate = 0.0
  logits_via_embedding = False
MODEL = @seqio.SentencePieceVocabulary()
"""
  assert bound(more).extra_ids == extra_ids


def test_bound_prompts_are_refused(bound):
  model = bound("models.EncoderDecoderModel.predict_batch_with_aux.prompt_with_targets = True")
  with pytest.raises(InputError, match="prompt_with_targets is True"):
    shapes(model, {})


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_networks_go_there_and_back(version):
  config = t5_config("tiny", version, vocab_size=264, padded_vocab_size=None)
  assert t5x_model.same_config(t5x_model.t5x_network(config)) == config


def test_baseline_decodes_what_our_own_does():
  source, keys = BATCH["encoder_input_tokens"], jax.random.split(jax.random.key(0), EXAMPLES)
  common = dict(max_new_tokens=LIMIT, sampling=Sampling(temperature=0.0))
  ours = autoregressive_decode(T5Model(TARGET), PARAMS, source, keys, **common)
  theirs = t5x_model.t5x_decode(TARGET, PARAMS, source, keys, **common)
  jax.tree.map(np.testing.assert_array_equal, theirs.tokens, ours.tokens)
  np.testing.assert_array_equal(theirs.lengths, ours.lengths)
  emitted = theirs.rounds.num_emitted
  np.testing.assert_array_equal(emitted, ours.rounds.num_emitted)
  assert theirs.num_rounds == ours.num_rounds


def test_speed_is_measured_over_t5xs_decoding(tmp_path):
  """By gin, at temperature 0; the outputs are t5x's own."""
  settings = {
    **{f"pairs.load_pair.{part}": str(tiny_pair.folder() / name) for part, name in PAIR.items()},
    "t5x_model.t5x_baseline.checkpoint": str(tiny_pair.folder() / "target"),
    "TEMPERATURES": (0.0,),
    "GAMMAS": (2,),
    "MAX_NEW_TOKENS": 12,
    "REPEATS": 1,
    "OUTPUT_DIR": str(tmp_path),
    "INPUT": str(tmp_path / "in.txt"),
  }
  (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in tiny_pair.SENTENCES[:3]))
  files = ["--gin_file=gin/runs/speedup.gin", "--gin_file=gin/t5x/baseline.gin"]
  flags = [f"--gin.{name}={value!r}" for name, value in settings.items()]
  try:
    assert main(["run", "--jax_compilation_cache_dir=", *files, *flags]) in (None, 0)
  finally:
    gin.clear_config()
  (record,) = records.read(str(tmp_path / "results.jsonl"))
  assert (record.baseline, record.identical, record.predicted_finite_length) == ("t5x", True, None)
  assert record.speedup > 0


def write_checkpoint(folder: pathlib.Path, config, params, orbax: bool) -> str:
  """A checkpoint as T5X writes it, in its own format or Orbax's."""
  module = t5x_model.t5x_network(config)
  axes = module.init(jax.random.key(0), *(np.ones((1, 1)),) * 3, enable_dropout=False)[
    "params_axes"
  ]
  variables = core.freeze({"params": params, "params_axes": axes})
  state = train_state.InferenceState.create(variables)
  partitioner = partitioning.PjitPartitioner(num_partitions=1)
  if orbax:
    folder.mkdir()
    writer = checkpoints.OrbaxCheckpointManagerInterface(str(folder), state, partitioner)
  else:
    writer = checkpoints.Checkpointer(state, partitioner, str(folder))
  writer.save(state)
  if orbax:
    writer.close()
  return str(folder / "checkpoint_0")


@pytest.mark.parametrize("orbax", [True, False])
@pytest.mark.parametrize("wrong", ["target", "draft"])
def test_checkpoints_of_another_shape_are_named(tmp_path, orbax, wrong):
  one, other = (tiny.config(vocab_size=264, layers=1, mlp_dim=mlp_dim) for mlp_dim in (32, 16))
  paths = {}
  for role in ("target", "draft"):
    config = other if role == wrong else one
    paths[role] = write_checkpoint(tmp_path / role, config, tiny.params(config, 1), orbax)
  variables = t5x_model.t5x_network(one).init
  variables = jax.eval_shape(
    lambda key: variables(key, *(np.ones((1, 1)),) * 3, enable_dropout=False), jax.random.key(0)
  )
  both = core.freeze({kind: {**tree, "draft": tree} for kind, tree in variables.items()})
  restore = t5x_model.PairCheckpointer(
    train_state=train_state.InferenceState.create(both),
    partitioner=partitioning.PjitPartitioner(num_partitions=1),
    draft_path=paths["draft"],
  ).restore
  kernel = r"decoder/layers_0/mlp/wi_0/kernel \(found \(16, 16\), expected \(16, 32\)\)"
  with pytest.raises(InputError, match=f"The {wrong} is not .*{paths[wrong]}.* {kernel}"):
    restore(paths["target"])


def test_the_draft_is_whole_on_each_device():
  """Unless a verifier for its own axes says otherwise; the target is cut as ever."""
  inputs = {"encoder_input_tokens": (1, 1), "decoder_input_tokens": (1, 1)}
  variables = jax.eval_shape(
    lambda key: speculative().get_initial_variables(key, inputs), jax.random.key(0)
  )
  state = train_state.InferenceState.create(variables)

  def pieces(*additional):
    rules = partitioning.standard_logical_axis_rules(additional_rules=additional)
    partitioner = partitioning.PjitPartitioner(num_partitions=1, logical_axis_rules=rules)
    axes = partitioner.get_mesh_axes(state).params
    bias = axes["decoder"]["relpos_bias"]["rel_embedding"][0]
    is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)
    draft = jax.tree.leaves(core.unfreeze(axes["draft"]), is_leaf=is_spec)
    return bias, sum("model" in spec for spec in draft)

  assert pieces() == ("model", 0)
  of_one_layer = 6  # wi_0, wi_1 and wo, in encoder and decoder
  assert pieces(("draft_mlp", "model")) == ("model", of_one_layer)


def test_the_drafts_q_is_whole_on_each_device():
  """Without a constraint on q [B, N, V] each draft step over several devices sends messages."""
  rules = partitioning.standard_logical_axis_rules()
  partitioner = partitioning.PjitPartitioner(num_partitions=1, logical_axis_rules=rules)
  predict = partitioner.partition(speculative(SMALL, dict(gamma=3)).predict_batch, None, None)
  text = predict.lower(both(DRAFTS["random"][1]), BATCH).as_text()
  assert re.search(rf"sharding_constraint .*{{}}, {{}}\]> : tensor<{EXAMPLES}x3x264xf32>", text)


def first_heads(params, config):
  """Parameters of a T5 of more heads, cut to the first heads, as many as `config` has."""
  width = config.num_heads * config.head_dim

  def cut(path, x):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if "rel_embedding" in name:
      return x[: config.num_heads]
    if name.endswith("/out/kernel"):
      return x[:width]
    return x[:, :width] if name.endswith(("query/kernel", "key/kernel", "value/kernel")) else x

  return jax.tree.map_with_path(cut, params)


# Read last: shapes and a task that a CPU runs in seconds.
TINY = """
from __gin__ import dynamic_registration
import seqio
import t5x_task
from specdec_jax.models import config
from t5x import utils
from t5x.examples.t5 import network

MIXTURE_OR_TASK_NAME = 'specdec_bytes'
TASK_FEATURE_LENGTHS = {'inputs': 24, 'targets': 20}
VOCABULARY = @seqio.ByteVocabulary()
DRAFT_SIZE = 'tiny'
GAMMA = 3
config.t5_config:
  vocab_size = 264
  padded_vocab_size = None
  dtype = 'float32'
  num_heads = 6
network.T5Config:
  vocab_size = 264
  dtype = 'float32'
  num_heads = 8
utils.RestoreCheckpointConfig.dtype = 'float32'
utils.DatasetConfig.batch_size = 4
"""


TREE = """
from specdec_jax.core.verify import blocks
TREE = (0, 0, 1)
RULE = @blocks.BlockVerifier
"""


BEAMS = """
from t5x import decoding
from t5x import models
models.EncoderDecoderModel.decode_fn = @decoding.beam_search
models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 2
models.EncoderDecoderModel.predict_batch_with_aux.return_all_decodes = True
"""


def infer(tmp_path, use_orbax: bool, num_partitions: int, more: str):
  """Return the rows that t5x's infer.py writes with our gin files and `more`, one for each of
  `t5x_task.LINES`; the target and the draft with their parameters; and the source tokens.

  The whole way that a user goes, on weights and a task that are tiny, on four devices, which can
  share the target's 8 heads and not the draft's 6.
  """
  common = dict(vocab_size=264, padded_vocab_size=None)
  config, draft_config = (t5_config("tiny", num_heads=heads, **common) for heads in (8, 6))
  params = with_endings(tiny.params(config, 6))
  draft = tiny.near(first_heads(params, draft_config), 7, 0.1)
  (tmp_path / "tiny.gin").write_text(TINY + more)
  files = ("t5x/examples/t5/t5_1_1/tiny.gin", "gin/t5x/infer.gin", "gin/t5x/wmt_ende.gin")
  bindings = {
    "CHECKPOINT_PATH": write_checkpoint(tmp_path / "target", config, params, use_orbax),
    "DRAFT_CHECKPOINT_PATH": write_checkpoint(
      tmp_path / "draft", draft_config, draft, not use_orbax
    ),
    "INFER_OUTPUT_DIR": str(tmp_path / "out"),
    "infer.use_orbax": use_orbax,  # says which of t5x's two hooks is used
    "partitioning.PjitPartitioner.num_partitions": num_partitions,
  }
  command = [sys.executable, "-m", "t5x.infer"]
  command += [f"--gin_file={file}" for file in (*files, tmp_path / "tiny.gin")]
  command += [f"--gin.{name}={value!r}" for name, value in bindings.items()]
  path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]  # t5x may lie there
  env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"}
  env["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
  done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
  assert done.returncode == 0, done.stderr[-4000:]

  (written,) = (tmp_path / "out").glob("*.jsonl-*-of-00001")
  rows = [json.loads(line) for line in written.read_text().splitlines()]
  prompts = ["say: " + line for line in t5x_task.LINES]
  assert [row["inputs"]["inputs_pretokenized"] for row in rows] == prompts
  source = padded([[*t5x_task.VOCABULARY.encode(prompt), 1] for prompt in prompts], 24)
  return rows, (config, params), (draft_config, draft), source


def text_of(tokens) -> str:
  return t5x_task.VOCABULARY.decode_tf(tokens).numpy().decode()


@pytest.mark.parametrize(
  "use_orbax, num_partitions, more, tree, verifier",
  [(True, 4, "", chain(3), TokenVerifier), (False, 2, TREE, Tree((0, 0, 1)), BlockVerifier)],
  ids=["chain", "tree"],
)
def test_t5x_infer_runs_our_gin_files(tmp_path, use_orbax, num_partitions, more, tree, verifier):
  rows, target, of_draft, source = infer(tmp_path, use_orbax, num_partitions, more)
  (config, params), (draft_config, draft) = target, of_draft
  keys = jax.random.split(jax.random.key(0), len(source))
  sampling, limit = Sampling(temperature=0.0), dict(max_new_tokens=LIMIT)
  theirs = jax.device_get(
    t5x_model.t5x_decode(config, params, source, keys, sampling=sampling, **limit)
  )
  assert theirs.lengths.min() < LIMIT
  for row, tokens in zip(rows, theirs.tokens):
    assert row["prediction"] == text_of(tokens)
    assert row["aux"]["scores"] == 0
  pair = T5Model(config), ModelDraft(T5Model(draft_config), sampling, tree), params, draft
  ours = speculative_decode(*pair, source, keys, verifier=verifier(sampling), **limit)
  for name, counts in t5x_model.count_rounds(ours).items():
    assert [row["aux"]["rounds"][name] for row in rows] == counts.tolist()
  assert ours.rounds.num_accepted.sum() > 0


def test_t5x_infer_searches_with_our_gin_files(tmp_path):
  """gin/t5x/infer.gin binds a verifier, which gin passes as a subclass; the beams are t5x's own."""
  rows, (config, params), _, source = infer(tmp_path, True, 4, BEAMS)
  words, how = t5x_task.VOCABULARY, dict(num_decodes=2, return_all_decodes=True)
  theirs = models.EncoderDecoderModel(
    t5x_model.t5x_network(config), words, words, None, decoding.beam_search
  )
  batch = {
    "encoder_input_tokens": np.asarray(source),
    "decoder_input_tokens": np.zeros((len(source), LIMIT), np.int32),
  }
  wanted, aux = jax.jit(lambda p: theirs.predict_batch_with_aux(p, batch, **how))(params)
  for row, texts, scores in zip(rows, wanted, aux["scores"], strict=True):
    assert row["prediction"] == [text_of(tokens) for tokens in texts]
    np.testing.assert_allclose(row["aux"]["scores"], scores, rtol=1e-5)
    assert max(row["aux"]["rounds"]["num_rounds"]) <= max(row["aux"]["rounds"]["num_steps"])
