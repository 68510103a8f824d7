"""Compare the t5x model class with t5x's own decoding, also through infer.py and gin files."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from flax import core
from tiny import autoregressive_decode, speculative_decode

from specdec_jax.contrib.k_seq import KSeqVerifier
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import Tree, branching, chain
from specdec_jax.core.types import DraftOptions
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.lossy import TypicalVerifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.vocabulary import padded
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError
from specdec_jax.load import load_pair
from specdec_jax.measure import records
from specdec_jax.measure.speed import own_baseline
from specdec_jax.models.sizes import t5_config
from specdec_jax.models.t5 import T5Model
from specdec_jax.random_models import random_pair
from specdec_jax.run import main

models = pytest.importorskip("t5x.models", reason="t5x is not installed: see docs/t5x.md")

import t5x_task  # noqa: E402
from t5x import binary_search, checkpoints, decoding, partitioning, train_state  # noqa: E402
from t5x.examples.t5 import network  # noqa: E402

from specdec_jax import t5x  # noqa: E402

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIMIT, EXAMPLES = 20, 5
PAIR = dict(target="target", draft="near", vocabulary="vocabulary.model")
TARGET = tiny.config(vocab_size=264)
SMALL = tiny.config(vocab_size=264, layers=1)


def with_endings(params):
  """Make EOS more probable, so that some outputs end and others reach the limit."""
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


def speculative(draft=SMALL, decoder_params=None, **decoding):
  """Return a model that decodes at temperature 0 by default, with attributes of `t5x.Decoding`."""
  return t5x.SpeculativeModel(
    t5x.t5x_network(TARGET),
    t5x_task.VOCABULARY,
    t5x_task.VOCABULARY,
    None,
    draft_module=t5x.t5x_network(draft),
    decoding=t5x.Decoding(**{"temperature": 0.0} | decoding),
    default_decoder_params=decoder_params,
  )


def both(draft_params):
  """Return parameters of target and draft as a frozen tree, as t5x passes them to a model."""
  return core.freeze({**PARAMS, "draft": draft_params})


@functools.cache
def plain():
  """Return t5x's own model of the target."""
  vocabulary = t5x_task.VOCABULARY
  return models.EncoderDecoderModel(
    t5x.t5x_network(TARGET), vocabulary, vocabulary, None, decoding.temperature_sample
  )


@functools.cache
def greedy():
  """Return outputs of t5x's `temperature_sample` at temperature 0, and their log-probabilities."""
  decoder_params = {"temperature": 0.0, "topk": 0, "rescale_log_probs": False}

  @jax.jit
  def decode(params):
    return plain().predict_batch_with_aux(params, BATCH, decoder_params=decoder_params)

  return jax.device_get(decode(PARAMS))


RAGGED = 0, 0, 0, 1, 1, 2, 4


@pytest.mark.parametrize(
  "draft, depth, round_settings",
  [
    ("target", 3, dict(gamma=3)),
    ("near", 4, dict(gamma=4, verifier=BlockVerifier)),
    ("near", 3, dict(tree=RAGGED, verifier=BlockVerifier)),
  ],
)
def test_greedy_decoding_equals_temperature_sample_of_t5x(draft, depth, round_settings):
  tokens, aux = greedy()
  lengths = (tokens != 0).sum(axis=1)
  assert lengths.min() < lengths.max() == LIMIT
  config, draft_params = DRAFTS[draft]
  model = speculative(config, rescale_log_probs=False, **round_settings)
  got, got_aux = jax.jit(model.predict_batch_with_aux)(both(draft_params), BATCH)
  np.testing.assert_array_equal(got, tokens)
  np.testing.assert_allclose(got_aux["scores"], aux["scores"], rtol=1e-5, atol=1e-5)
  rounds = jax.device_get(got_aux["rounds"])
  np.testing.assert_array_equal(rounds["num_tokens"], lengths)
  assert (rounds["not_finite"] == -1).all()
  if draft == "target":  # every draft token is accepted
    assert rounds["num_rejected"].sum() == 0
    np.testing.assert_array_equal(rounds["num_rounds"], -(-lengths // (depth + 1)))
  else:
    assert rounds["num_rejected"].sum() > 0
    assert (rounds["num_rounds"] <= lengths).all()


@pytest.mark.parametrize(
  "draft, num_decodes, alpha, settings",
  [
    ("near", 2, 0.6, dict(gamma=3, draft_beams=4)),
  ],
)
def test_beam_search_equals_that_of_t5x(draft, num_decodes, alpha, settings):
  network, params = DRAFTS[draft]
  ours = speculative(network, beam_search=True, alpha=alpha, **settings)
  vocabulary, search = t5x_task.VOCABULARY, functools.partial(decoding.beam_search, alpha=alpha)
  theirs = models.EncoderDecoderModel(t5x.t5x_network(TARGET), vocabulary, vocabulary, None, search)

  def predict_all(model, params):
    return model.predict_batch_with_aux(
      params, BATCH, num_decodes=num_decodes, return_all_decodes=True
    )

  tokens, aux = jax.jit(functools.partial(predict_all, ours))(both(params))
  expected, expected_aux = jax.jit(functools.partial(predict_all, theirs))(PARAMS)
  np.testing.assert_array_equal(tokens, expected)
  np.testing.assert_allclose(aux["scores"], expected_aux["scores"], atol=1e-5)
  rounds = jax.device_get(aux["rounds"])
  assert rounds["num_rounds"].shape == (EXAMPLES, num_decodes)
  assert (rounds["num_rounds"] < rounds["num_steps"]).any() == (draft == "near")
  best, best_aux = ours.predict_batch_with_aux(both(params), BATCH, num_decodes=num_decodes)
  np.testing.assert_array_equal(best, expected[:, -1])
  assert best_aux["rounds"]["num_rounds"].shape == (EXAMPLES,)


def test_max_decode_steps_limits_outputs_as_in_t5x():
  decoder_params = {"temperature": 0.0, "max_decode_steps": 6}

  @jax.jit
  def decode(params):
    return plain().predict_batch_with_aux(params, BATCH, decoder_params=decoder_params)

  predict = speculative(max_decode_steps=6).predict_batch_with_aux
  tokens, aux = jax.jit(predict)(both(DRAFTS["random"][1]), BATCH)
  np.testing.assert_array_equal(tokens, decode(PARAMS)[0])
  assert (aux["scores"] == 0).all()  # as in t5x, if probabilities are rescaled


def no_repetition(logits, state):
  """A callback that excludes the last token, and every third token after an even one."""
  last = jnp.take_along_axis(state.sequences, state.cur_index[:, None], axis=1)
  token = jnp.arange(logits.shape[-1])
  excluded = (token == last) | ((token % 3 == 0) & (last % 2 == 0) & (token > 1))
  assert state.cur_token.shape == last.shape
  return jnp.where(excluded, -1e7, logits)


@pytest.mark.parametrize(
  "prompted, callback, steps",
  [(True, None, 6), (True, no_repetition, None)],
)
def test_prompts_and_callbacks_have_the_outputs_of_t5x(prompted, callback, steps):
  """Rows have prompts of different lengths, with EOS, which t5x removes."""
  rng = np.random.default_rng(5)
  lengths = np.arange(EXAMPLES) % 5
  inputs = rng.integers(2, TARGET.vocab_size, (EXAMPLES, LIMIT)).astype(np.int32)
  inputs = np.where((np.arange(LIMIT) > 0) & (np.arange(LIMIT) <= lengths[:, None]), inputs, 0)
  inputs[np.arange(EXAMPLES), lengths + 1] = t5x_task.VOCABULARY.eos_id
  batch = BATCH | {"decoder_input_tokens": inputs}
  settings = {"temperature": 0.0, "rescale_log_probs": False, "max_decode_steps": steps}
  options = dict(prompt_with_targets=prompted)
  theirs = settings | {"topk": 0, "logit_callback_fn": callback}

  @jax.jit
  def decode(params):
    return plain().predict_batch_with_aux(params, batch, decoder_params=theirs, **options)

  want, want_aux = decode(PARAMS)
  config, draft_params = DRAFTS["near"]
  for round_settings in (dict(gamma=3), dict(tree=RAGGED)):
    model = speculative(config, logit_callback_fn=callback, **settings, **round_settings)
    decode_ours = functools.partial(model.predict_batch_with_aux, **options)
    found, aux = jax.jit(decode_ours)(both(draft_params), batch)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_allclose(aux["scores"], want_aux["scores"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  "topk, topp, return_all, tree, verifier, batch_size",
  [
    (4, 0.0, True, chain(3), TokenVerifier, None),
    (0, 0.6, False, branching(2, 2), KSeqVerifier, 2),
  ],
)
def test_several_decodes_are_sorted_by_the_scores_of_t5x(
  topk, topp, return_all, tree, verifier, batch_size
):
  decodes, temperature, rng = 3, 0.7, jax.random.PRNGKey(5)
  config, draft_params = DRAFTS["near"]
  decoder_params = models.DecoderParams(num_decodes=decodes, return_all_decodes=return_all)
  round_settings = dict(tree=tree.parents, verifier=verifier, batch_size=batch_size)
  model = speculative(config, decoder_params, **round_settings)

  @jax.jit
  def predict(params, key):
    sampling = {"temperature": temperature, "topk": topk, "topp": topp}
    return model.predict_batch_with_aux(params, BATCH, key, sampling)

  tokens, aux = jax.device_get(predict(both(draft_params), rng))

  # Expected outputs: those of `Decoder`, with one key per row.
  sampling = Sampling(temperature, topk, topp or 1.0)
  options = DraftOptions(independent_siblings=verifier is KSeqVerifier)
  draft = ModelDraft(T5Model(config), sampling, tree, options)
  source = np.repeat(BATCH["encoder_input_tokens"], decodes, axis=0)
  keys = jax.random.split(rng, len(source))
  ours = speculative_decode(
    T5Model(TARGET),
    draft,
    PARAMS,
    draft_params,
    source,
    keys,
    max_new_tokens=LIMIT,
    verifier=verifier(sampling),
  )
  ours_tokens = np.asarray(ours.tokens)
  assert len({tuple(row) for row in ours_tokens[:decodes].tolist()}) > 1

  # Expected scores: from logits of t5x, with t5x's top-k or top-p.
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

  token_log_probs = np.take_along_axis(
    np.asarray(log_probs(PARAMS)), ours_tokens[..., None], axis=-1
  )[..., 0]
  is_text = np.arange(LIMIT) < np.asarray(ours.lengths)[:, None]
  scores = np.where(is_text, token_log_probs, 0).sum(axis=1).reshape(EXAMPLES, decodes)
  order = np.argsort(scores, axis=1)
  scores = np.take_along_axis(scores, order, axis=1)
  expected = np.take_along_axis(
    ours_tokens.reshape(EXAMPLES, decodes, -1), order[..., None], axis=1
  )
  if not return_all:
    scores, expected = scores[:, -1], expected[:, -1]
  np.testing.assert_array_equal(tokens, expected)
  np.testing.assert_allclose(aux["scores"], scores, rtol=1e-4, atol=1e-4)


def test_scores_of_given_outputs_do_not_depend_on_the_draft():
  tokens = greedy()[0]
  batch = BATCH | {"decoder_target_tokens": tokens, "decoder_loss_weights": tokens > 0}
  expected = jax.jit(plain().score_batch)(PARAMS, batch)
  scores = jax.jit(speculative().score_batch)(both(DRAFTS["random"][1]), batch)
  np.testing.assert_array_equal(scores, expected)


def test_draft_parameters_are_arguments():
  model, params = speculative(), both(DRAFTS["random"][1])
  lowered = jax.jit(model.predict_batch).lower(params, BATCH).as_text()
  main = next(line for line in lowered.splitlines() if "@main(" in line)
  # All parameters of both models, and the tokens of the batch.
  assert main.count("%arg") == len(jax.tree.leaves(params)) + 1


def test_unsupported_networks_are_reported():
  with pytest.raises(InputError, match="264 and the draft's 300"):
    speculative(tiny.config(vocab_size=300))
  with pytest.raises(InputError, match="float32_attention_logits True"):
    t5x.same_config(network.Transformer(network.T5Config(9, float32_attention_logits=True)))
  with pytest.raises(InputError, match="Dense; .*Transformer"):
    t5x.same_config(network.nn.Dense(3))


@pytest.mark.parametrize(
  "settings, sentence",
  [
    (dict(gamma=0, beam_search=True), "gamma is 0; it must be a whole number, from 1"),
    (dict(tree=(0, 3, 1)), "A tree has parents .0, 3, 1.; they must be"),
    (dict(lenience=2), "lenience is 2; it must lie in"),
    (dict(topk=3, topp=0.5), "topk is 3 and topp is 0.5"),
    (dict(batch_size=0), "batch_size is 0"),
    (
      dict(verifier=BlockVerifier, lenience=0.5),
      "lenience is 0.5, but the verifier is BlockVerifier",
    ),
  ],
)
def test_impossible_settings_are_reported_before_a_checkpoint_is_read(settings, sentence):
  with pytest.raises(InputError, match=sentence):
    t5x.Decoding(**settings)


def shapes(model, params=None, **call):
  """Return the shapes of tokens and scores without compiling."""
  params = both(DRAFTS["random"][1]) if params is None else params
  decode = functools.partial(model.predict_batch_with_aux, batch=BATCH, **call)
  tokens, aux = jax.eval_shape(decode, params)
  return tokens.shape, aux["scores"].shape


KEY = jax.random.PRNGKey(1)


@pytest.mark.parametrize(
  "call, sentence",
  [
    (dict(num_decodes=0), "num_decodes is 0; it must be a whole number, from 1"),
    (dict(decoder_params={"beta": 0.6}), "decoder_params has beta; .*gamma"),
    (dict(decoder_params={"max_decode_steps": LIMIT + 1}), "length is 20; make it 20 or less"),
    (dict(decoder_params={"tree": (1,)}), "A tree has parents .1,.; they must be"),
    (dict(rng=KEY, decoder_params={"decode_rng": KEY}), "two keys, rng and .*'decode_rng'"),
    (dict(params=core.freeze(PARAMS)), "parameters have no 'draft'.*PairCheckpointer"),
  ],
)
def test_unsupported_calls_are_reported(call, sentence):
  with pytest.raises(InputError, match=sentence):
    shapes(speculative(), **call)


def test_a_call_may_set_a_tree_and_a_lossy_verifier():
  settings = {"tree": (0, 0, 1), "verifier": TypicalVerifier}
  assert shapes(speculative(), decoder_params=settings) == ((EXAMPLES, LIMIT), (EXAMPLES,))


def test_decoder_params_of_t5x_are_the_defaults():
  all_of_two = models.DecoderParams(return_all_decodes=True, num_decodes=2)
  assert shapes(speculative(decoder_params=all_of_two)) == ((EXAMPLES, 2, LIMIT), (EXAMPLES, 2))
  model = speculative(decoder_params=models.DecoderParams(return_all_decodes=True))
  assert shapes(model) == ((EXAMPLES, 1, LIMIT), (EXAMPLES, 1))
  assert shapes(model, return_all_decodes=False) == ((EXAMPLES, LIMIT), (EXAMPLES,))


def test_a_custom_draft_is_a_network_in_a_scope():
  gin.parse_config("""
from __gin__ import dynamic_registration
import seqio
from specdec_jax import t5x
from t5x.examples.t5 import network
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 264
  num_decoder_layers = 3
t5x.SpeculativeModel:
  module = @network.Transformer()
  draft_module = @draft/network.Transformer()
  input_vocabulary = @seqio.ByteVocabulary()
  output_vocabulary = @seqio.ByteVocabulary()
  optimizer_def = None
  decoding = @t5x.Decoding()
t5x.Decoding.tree = (0, 0)
draft/network.Transformer.config = @draft/network.T5Config()
draft/network.T5Config.num_decoder_layers = 1
MODEL = @t5x.SpeculativeModel()
""")
  try:
    model = gin.query_parameter("MODEL/macro.value").scoped_configurable_fn()
  finally:
    gin.clear_config()
  target, draft = (t5x.same_config(module) for module in (model.module, model._draft.module))
  assert (target.num_decoder_layers, draft.num_decoder_layers) == (3, 1)
  assert target == dataclasses.replace(draft, num_decoder_layers=3)
  params = {**tiny.params(target, 0), "draft": tiny.params(draft, 0)}
  assert model.decoding.tree == (0, 0)
  assert shapes(model, params, num_decodes=2, return_all_decodes=True)[0] == (EXAMPLES, 2, LIMIT)


@pytest.mark.parametrize("vocab_size, expected", [(4224, 100), (4096, 0)])
def test_number_of_sentinels_follows_from_the_table_of_the_network(vocab_size, expected):
  """The bundled vocabulary has 4,096 pieces."""
  vocabulary = ROOT / "specdec_jax" / "assets" / "multi30k_ende" / "vocabulary.model"
  network = t5x.t5x_network(tiny.config(vocab_size=vocab_size))
  assert t5x.extra_ids(network, str(vocabulary)) == expected


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_same_config_inverts_t5x_network(version):
  config = t5_config("tiny", version, vocab_size=264, padded_vocab_size=None)
  assert t5x.same_config(t5x.t5x_network(config)) == config


def test_baseline_equals_autoregressive_decoding():
  source, keys = BATCH["encoder_input_tokens"], jax.random.split(jax.random.key(0), EXAMPLES)
  common = dict(max_new_tokens=LIMIT, sampling=Sampling(temperature=0.0))
  ours = autoregressive_decode(T5Model(TARGET), PARAMS, source, keys, **common)
  theirs = t5x.t5x_decode(TARGET, PARAMS, source, keys, **common)
  jax.tree.map(np.testing.assert_array_equal, theirs.tokens, ours.tokens)
  np.testing.assert_array_equal(theirs.lengths, ours.lengths)
  emitted = theirs.rounds.num_emitted
  np.testing.assert_array_equal(emitted, ours.rounds.num_emitted)
  assert theirs.num_rounds == ours.num_rounds


def test_speed_is_measured_against_t5x(tmp_path):
  """Run the gin files at temperature 0, where the outputs are those of t5x."""
  settings = {
    **{f"load.load_pair.{part}": str(tiny_pair.folder() / name) for part, name in PAIR.items()},
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
  assert (
    record.settings.baseline,
    record.outputs.identical,
    record.times.predicted_finite_length,
  ) == ("t5x", True, None)
  assert record.times.speedup > 0


@pytest.mark.parametrize("source", ["path", "random weights"])
def test_baseline_has_the_weights_of_the_pair_or_random_ones(source):
  if source == "path":
    pair = load_pair(
      *(str(tiny_pair.folder() / PAIR[part]) for part in ("target", "draft", "vocabulary"))
    )
  else:
    pair = random_pair("tiny", "tiny", 0.5)
  prompt, keys = pair.prompt(tiny_pair.SENTENCES[:2]), row_keys(0, 0, 2)
  sampling = dict(max_new_tokens=6, sampling=Sampling(0.0))
  ours, theirs = (
    of(pair).decode(prompt, keys, **sampling) for of in (own_baseline, t5x.t5x_baseline)
  )
  if source == "path":
    np.testing.assert_array_equal(theirs.tokens, ours.tokens)
  np.testing.assert_array_equal(theirs.lengths, ours.lengths)
  nameless = tiny_pair.changed(pair, path=None)
  if source == "path":
    with pytest.raises(InputError, match="a model in memory"):
      t5x.t5x_baseline(nameless)


def write_checkpoint(folder: pathlib.Path, config, params, orbax: bool) -> str:
  """Write a checkpoint in the format of T5X or of Orbax, and return its path."""
  module = t5x.t5x_network(config)
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
def test_checkpoints_of_another_shape_are_reported(tmp_path, orbax, wrong):
  one, other = (tiny.config(vocab_size=264, layers=1, mlp_dim=mlp_dim) for mlp_dim in (32, 16))
  paths = {}
  for role in ("target", "draft"):
    config = other if role == wrong else one
    paths[role] = write_checkpoint(tmp_path / role, config, tiny.params(config, 1), orbax)
  variables = t5x.t5x_network(one).init
  variables = jax.eval_shape(
    lambda key: variables(key, *(np.ones((1, 1)),) * 3, enable_dropout=False), jax.random.key(0)
  )
  both = core.freeze({kind: {**tree, "draft": tree} for kind, tree in variables.items()})
  restore = t5x.PairCheckpointer(
    train_state=train_state.InferenceState.create(both),
    partitioner=partitioning.PjitPartitioner(num_partitions=1),
    draft_path=paths["draft"],
  ).restore
  kernel = r"decoder/layers_0/mlp/wi_0/kernel \(found \(16, 16\), expected \(16, 32\)\)"
  with pytest.raises(InputError, match=f"The {wrong} is not .*{paths[wrong]}.* {kernel}"):
    restore(paths["target"])


def test_draft_is_replicated_unless_rules_shard_it():
  """The target is sharded in both cases."""
  inputs = {"encoder_input_tokens": (1, 1), "decoder_input_tokens": (1, 1)}
  variables = jax.eval_shape(
    lambda key: speculative().get_initial_variables(key, inputs), jax.random.key(0)
  )
  state = train_state.InferenceState.create(variables)

  def sharded_axes(*additional):
    """Return the axis of the target's biases, and the number of sharded parameters of the draft."""
    rules = partitioning.standard_logical_axis_rules(additional_rules=additional)
    partitioner = partitioning.PjitPartitioner(num_partitions=1, logical_axis_rules=rules)
    axes = partitioner.get_mesh_axes(state).params
    bias = axes["decoder"]["relpos_bias"]["rel_embedding"][0]
    draft = jax.tree.leaves(
      core.unfreeze(axes["draft"]), is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
    )
    return bias, sum("model" in spec for spec in draft)

  assert sharded_axes() == ("model", 0)
  num_kernels = 6  # of one layer: wi_0, wi_1 and wo, in encoder and decoder
  assert sharded_axes(("draft_mlp", "model")) == ("model", num_kernels)


def test_q_of_the_draft_is_replicated():
  """Without a constraint on q [B, N, V], devices communicate in each draft step."""
  rules = partitioning.standard_logical_axis_rules()
  partitioner = partitioning.PjitPartitioner(num_partitions=1, logical_axis_rules=rules)
  model = speculative(SMALL, gamma=3, temperature=1.0)
  predict = partitioner.partition(model.predict_batch, None, None)
  text = predict.lower(both(DRAFTS["random"][1]), BATCH).as_text()
  assert re.search(rf"sharding_constraint .*{{}}, {{}}\]> : tensor<{EXAMPLES}x3x264xf32>", text)


def first_heads(params, config):
  """Return parameters of a T5 with only the first heads, as many as `config` has."""
  width = config.num_heads * config.head_dim

  def cut(path, x):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if "rel_embedding" in name:
      return x[: config.num_heads]
    if name.endswith("/out/kernel"):
      return x[:width]
    return x[:, :width] if name.endswith(("query/kernel", "key/kernel", "value/kernel")) else x

  return jax.tree.map_with_path(cut, params)


# The last gin file: shapes and a task that a CPU runs in seconds.
TINY = """
from __gin__ import dynamic_registration
import seqio
import t5x_task
from specdec_jax import t5x
from specdec_jax.models import sizes
from t5x import utils
from t5x.examples.t5 import network

MIXTURE_OR_TASK_NAME = 'specdec_bytes'
TASK_FEATURE_LENGTHS = {'inputs': 24, 'targets': 20}
VOCABULARY = @seqio.ByteVocabulary()
DRAFT_SIZE = 'tiny'
GAMMA = 3
sizes.t5_config:
  vocab_size = 264
  padded_vocab_size = None
  num_heads = 6
t5x.t5x_network.dtype = 'float32'
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
VERIFIER = @blocks.BlockVerifier
"""


BEAMS = """
from t5x import models
BEAM_SEARCH = True
models.DecoderParams.num_decodes = 2
models.DecoderParams.return_all_decodes = True
"""


def infer(tmp_path, use_orbax: bool, num_partitions: int, bindings_text: str):
  """Run t5x's infer.py with the gin files of this project, as a user does, and with tiny weights.

  There are four devices, across which the 8 heads of the target can be sharded, and the 6 heads of
  the draft cannot.

  Returns:
    The rows that infer.py writes, one for each of `t5x_task.LINES`; configuration and parameters of
    the target and of the draft; and the source tokens.
  """
  common = dict(vocab_size=264, padded_vocab_size=None)
  config, draft_config = (t5_config("tiny", num_heads=heads, **common) for heads in (8, 6))
  params = with_endings(tiny.params(config, 6))
  draft = tiny.near(first_heads(params, draft_config), 7, 0.1)
  (tmp_path / "tiny.gin").write_text(TINY + bindings_text)
  files = ("t5x/examples/t5/t5_1_1/tiny.gin", "gin/t5x/infer.gin", "gin/t5x/wmt_ende.gin")
  bindings = {
    "CHECKPOINT_PATH": write_checkpoint(tmp_path / "target", config, params, use_orbax),
    "DRAFT_CHECKPOINT_PATH": write_checkpoint(
      tmp_path / "draft", draft_config, draft, not use_orbax
    ),
    "INFER_OUTPUT_DIR": str(tmp_path / "out"),
    "infer.use_orbax": use_orbax,  # selects one of t5x's two hooks
    "partitioning.PjitPartitioner.num_partitions": num_partitions,
  }
  command = [sys.executable, "-m", "t5x.infer"]
  command += [f"--gin_file={file}" for file in (*files, tmp_path / "tiny.gin")]
  command += [f"--gin.{name}={value!r}" for name, value in bindings.items()]
  path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]  # t5x may be there
  env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"}
  env["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
  process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
  assert process.returncode == 0, process.stderr[-4000:]

  (output,) = (tmp_path / "out").glob("*.jsonl-*-of-00001")
  lines = output.read_text().splitlines()
  rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # Infinity is not JSON
  prompts = ["say: " + line for line in t5x_task.LINES]
  assert [row["inputs"]["inputs_pretokenized"] for row in rows] == prompts
  source = padded([[*t5x_task.VOCABULARY.encode(prompt), 1] for prompt in prompts], 24)
  return rows, (config, params), (draft_config, draft), source


def text_of(tokens) -> str:
  return t5x_task.VOCABULARY.decode_tf(tokens).numpy().decode()


def test_t5x_infer_runs_the_gin_files(tmp_path):
  """With a tree and block verification; the other test has the default gamma."""
  rows, (config, params), (draft_config, draft_params), source = infer(tmp_path, False, 2, TREE)
  keys = jax.random.split(jax.random.key(0), len(source))
  sampling, limit = Sampling(temperature=0.0), dict(max_new_tokens=LIMIT)
  theirs = jax.device_get(t5x.t5x_decode(config, params, source, keys, sampling=sampling, **limit))
  assert theirs.lengths.min() < LIMIT
  for row, tokens in zip(rows, theirs.tokens):
    assert row["prediction"] == text_of(tokens)
    assert row["aux"]["scores"] == 0
  draft = ModelDraft(T5Model(draft_config), sampling, Tree((0, 0, 1)))
  limit["verifier"] = BlockVerifier(sampling)
  ours = speculative_decode(T5Model(config), draft, params, draft_params, source, keys, **limit)
  for name, counts in t5x.count_rounds(ours).items():
    assert [row["aux"]["rounds"][name] for row in rows] == counts.tolist()
  assert ours.rounds.num_accepted.sum() > 0


def test_t5x_infer_runs_beam_search_with_the_gin_files(tmp_path):
  rows, (config, params), _, source = infer(tmp_path, True, 4, BEAMS)
  vocabulary = t5x_task.VOCABULARY
  theirs = models.EncoderDecoderModel(
    t5x.t5x_network(config), vocabulary, vocabulary, None, decoding.beam_search
  )
  batch = {
    "encoder_input_tokens": np.asarray(source),
    "decoder_input_tokens": np.zeros((len(source), LIMIT), np.int32),
  }

  @jax.jit
  def predict(params):
    return theirs.predict_batch_with_aux(params, batch, num_decodes=2, return_all_decodes=True)

  expected, aux = predict(params)
  for row, texts, scores in zip(rows, expected, aux["scores"], strict=True):
    assert row["prediction"] == [text_of(tokens) for tokens in texts]
    np.testing.assert_allclose(row["aux"]["scores"], scores, rtol=1e-5)
    assert max(row["aux"]["rounds"]["num_rounds"]) <= max(row["aux"]["rounds"]["num_steps"])
