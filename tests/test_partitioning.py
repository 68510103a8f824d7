"""Test models sharded across devices: outputs are unchanged and arrays are sharded.

Tests that need several devices run `partitioned.py` in one process with eight virtual devices, or
in two processes with four virtual devices each.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import partitioned
import pytest
import tiny
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import branching, chain
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError
from specdec_jax.models.families import Config, for_decoding, init_params
from specdec_jax.models.partitioning import (
  REPLICATED,
  RULES,
  make_mesh,
  param_shardings,
  state_shardings,
)
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.models.sizes import named_config, t5_config
from specdec_jax.models.t5 import T5Model

pytestmark = pytest.mark.slow

SCRIPT = pathlib.Path(__file__).resolve().with_name("partitioned.py")
MESH = AbstractMesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)


def start(*arguments) -> subprocess.Popen:
  command = [sys.executable, str(SCRIPT), *map(str, arguments)]
  environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}  # of the package `experiments`
  pipe = subprocess.PIPE
  return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def result_of(process: subprocess.Popen) -> dict:
  """Return the JSON on the last line of a finished process's output."""
  out, err = process.communicate(timeout=300)
  assert process.returncode == 0, err[-2000:]
  return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def eight():
  """Return the results of one process with eight devices."""
  return result_of(start(8))


@pytest.mark.parametrize("family, run", [("t5", "tree"), ("gpt", "chain")])
def test_outputs_and_rounds_equal_those_of_one_device(eight, family, run):
  one, many = (eight[f"{family} {n}"]["runs"][run]["decoded"] for n in (1, 4))
  assert one == many
  accepted = sum(map(sum, one["rounds"][1]))
  assert accepted > len(one["lengths"]), "too few draft tokens were accepted for a meaningful test"


def test_replicated_draft_steps_have_no_collectives(eight):
  """The draft's steps form a loop of known length, and no such loop contains a collective."""
  instructions, executed = eight["gpt 4"]["runs"]["chain"]["messages"]
  assert instructions == executed > 0


def test_target_and_its_cache_are_sharded_across_eight_devices(eight):
  """Sizes: [E, H D] = [16, 32], [E, M] = [16, 32], [E, V] = [16, 16], and [B, H] = [8, 4]."""
  assert eight["t5 1"]["runs"]["tree"]["caches"] == [[8, 4]]
  for model_parallel, data_parallel in ((4, 2), (2, 4)):
    results, batch = eight[f"t5 {model_parallel}"], 8 // data_parallel
    target, draft = results["target"], results["draft"]
    for name, whole, shard in (
      ("decoder/layers_0/self_attention/query/kernel", [16, 32], [16, 32 // model_parallel]),
      ("encoder/layers_0/attention/out/kernel", [32, 16], [32 // model_parallel, 16]),
      ("encoder/layers_0/mlp/wi_1/kernel", [16, 32], [16, 32 // model_parallel]),
      ("decoder/layers_0/mlp/wo/kernel", [32, 16], [32 // model_parallel, 16]),
      ("decoder/logits_dense/kernel", [16, 16], [16, 16 // model_parallel]),
      ("token_embedder/embedding", [16, 16], [16 // model_parallel, 16]),
      ("decoder/relpos_bias/rel_embedding", [4, 32], [4 // model_parallel, 32]),
    ):
      assert (target[name], draft[name]) == (shard, whole)
    for run in results["runs"].values():  # the draft's cache is sharded by rows only
      assert run["caches"] == [[batch, 4 // model_parallel], [batch, 4]]


def test_gpt_biases_are_sharded_like_the_activations_they_are_added_to(eight):
  """The cache is sharded by rows and heads; arrays without a sharded axis are replicated."""
  results = eight["gpt 4"]
  assert results["runs"]["chain"]["caches"] == [[4, 1], [4, 4]]
  for name, shard in (
    ("layers_0/self_attention/query/kernel", [16, 8]),
    ("layers_0/self_attention/query/bias", [8]),
    ("layers_0/self_attention/out/kernel", [8, 16]),
    ("layers_0/self_attention/out/bias", [16]),
    ("layers_0/mlp/wi/bias", [8]),
    ("layers_0/mlp/wo/bias", [16]),
    ("layers_0/pre_mlp_layer_norm/bias", [16]),
    ("positions", [24, 16]),
  ):
    assert results["target"][f"decoder/{name}"] == shard, name


@pytest.mark.parametrize("model_parallel, kv_width", [(4, 8), (8, 32)])
def test_heads_of_t5gemma_are_not_divided(eight, model_parallel, kv_width):
  """The decoder has 8 heads of size 8, and 4 of keys and values; the encoder has 2 and 1."""
  results = eight[f"t5gemma {model_parallel}"]
  for name, shard in (
    ("decoder/layers_0/self_attention/query/kernel", [16, 64 // model_parallel]),
    ("decoder/layers_0/self_attention/key/kernel", [16, kv_width]),
    ("decoder/layers_0/self_attention/value/kernel", [16, kv_width]),
    ("decoder/layers_0/self_attention/out/kernel", [64 // model_parallel, 16]),
    ("decoder/layers_0/encoder_decoder_attention/key/kernel", [24, kv_width]),
    ("decoder/layers_0/post_mlp_layer_norm/scale", [16]),
    ("encoder/layers_0/attention/query/kernel", [24, 16]),
    ("encoder/layers_0/attention/key/kernel", [24, 8]),
    ("encoder/layers_0/mlp/wi_0/kernel", [24, 32 // model_parallel]),
    ("token_embedder/embedding", [16 // model_parallel, 16]),
    ("encoder_embedder/embedding", [16 // model_parallel, 24]),
  ):
    assert results["target"][name] == shard, name


@pytest.mark.parametrize("model_parallel, width", [(4, 8), (8, 32)])
def test_heads_and_biases_of_bart_are_not_divided(eight, model_parallel, width):
  """There are 4 heads of size 8 and no relative position bias."""
  results = eight[f"bart {model_parallel}"]["target"]
  for name, shard in (
    ("decoder/layers_0/self_attention/key/kernel", [16, width]),
    ("decoder/layers_0/self_attention/key/bias", [width]),
    ("decoder/layers_0/encoder_decoder_attention/out/kernel", [width, 16]),
    ("encoder/layers_0/attention/query/bias", [width]),
    ("decoder/layers_0/post_mlp_layer_norm/bias", [16]),
    ("decoder/embedding_norm/scale", [16]),
    ("decoder/logits_dense/bias", [16 // model_parallel]),
    ("encoder/positions", [64, 16]),
    ("decoder/positions", [64, 16]),
  ):
    assert results[name] == shard, name


def test_training_on_eight_devices_has_the_metrics_of_one_device(eight):
  """Texts are sharded across two groups of four devices, and the models across each group."""
  one, many = partitioned.trained(1), eight["trained 4"]
  for alone, together in zip(one["metrics"], many["metrics"], strict=True):
    for name in ("train_loss", "valid_loss", "valid_acceptance_length"):
      assert together[name] == pytest.approx(alone[name], rel=1e-3), name
  assert many["shard_shapes"]["logits_dense/kernel"] == [16, 4]


def test_sharded_teacher_writes_the_outputs_of_the_target(eight):
  many, one = eight["taught"]
  assert many == one and len({*map(tuple, one)}) > 10


def test_two_processes_have_the_output_of_one_device(eight):
  with socket.socket() as unused:
    unused.bind(("127.0.0.1", 0))
    port = unused.getsockname()[1]
  for results in [result_of(process) for process in [start(4, port, 0), start(4, port, 1)]]:
    assert results["t5 4"]["runs"]["tree"]["decoded"] == eight["t5 1"]["runs"]["tree"]["decoded"]
    assert results["t5 4"]["runs"]["tree"]["caches"] == [[4, 1], [4, 4]]
    assert results["t5 4"]["target"] == eight["t5 4"]["target"]


# Sharding rules, which need no devices.


def specs(tree) -> dict:
  leaves = jax.tree.leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): x.spec for path, x in leaves}


def shapes(config: Config):
  return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


@pytest.mark.parametrize("version, size", [("1.0", "xxl"), ("1.1", "xxl"), ("lamda", "137b")])
def test_large_models_shard_every_matrix_and_replicate_norms(version, size):
  stacks = ("decoder",) if version == "lamda" else ("encoder", "decoder")
  config = named_config(version, size, **{f"num_{stack}_layers": 1 for stack in stacks})
  for name, spec in specs(param_shardings(shapes(config), MESH)).items():
    assert ("model" in spec) == (not name.endswith("scale")), name


def test_attention_is_replicated_when_devices_do_not_divide_heads():
  config = t5_config("small", num_encoder_layers=1, num_decoder_layers=1)  # 6 heads, 4 devices
  for name, spec in specs(param_shardings(shapes(config), MESH)).items():
    whole = "attention/" in name or "rel_embedding" in name or name.endswith("scale")
    assert ("model" in spec) == (not whole), name


def test_gpt2_attention_is_sharded_by_width_when_heads_do_not_divide():
  """GPT-2 XL has 25 heads of 64, whose width 4 devices divide, and 50,257 tokens.

  With its configuration, heads are not divided.
  """
  config = named_config("gpt2", "xl", num_decoder_layers=1)
  attention = "decoder/layers_0/self_attention"
  for given, axis in ((None, "model"), (config, None)):
    sharding = specs(param_shardings(shapes(config), MESH, config=given))
    assert sharding[f"{attention}/query/kernel"] == PartitionSpec(None, axis)
    assert sharding[f"{attention}/out/kernel"] == PartitionSpec(axis, None)
    assert "model" not in sharding["token_embedder/embedding"]


@pytest.mark.parametrize("tree", [chain(3), branching(2, 3)], ids=["chain", "tree"])
def test_state_is_sharded_by_rows_and_cached_keys_by_heads(tree):
  config = t5_config("tiny")
  model = T5Model(config)
  target = SimulatedModel(model, 0.5, eos_id=model.eos_id)
  draft = ModelDraft(model, Sampling(), tree)
  params, prompt = shapes(config), jax.ShapeDtypeStruct((8, 7), jnp.int32)
  state = jax.eval_shape(lambda p, x: tiny.start(target, draft, p, p, x, 5), params, prompt)
  rows, one_axis = {8: "data", config.num_heads: "model"}, ("hidden", "cross_bias")
  sharding, arrays = specs(state_shardings(state, MESH)), jax.tree.leaves(state)
  for (name, spec), array in zip(sharding.items(), arrays, strict=True):
    expected = [rows.get(size) for size in array.shape[: 1 if name in one_axis else 2]]
    if array.shape:
      assert [*spec, None][: len(expected)] == expected, name
  odd = jax.eval_shape(lambda x: x[:3], state.tokens)  # three rows on two devices
  assert state_shardings({"tokens": odd}, MESH)["tokens"].spec == PartitionSpec(None)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("options", [tiny.T5GEMMA, tiny.BART, {}], ids=["t5gemma", "bart", "t5"])
def test_scales_of_families_are_sharded_like_columns(options, weights):
  config = tiny.config(**options).with_layout(weights=weights)
  sharding = specs(param_shardings(shapes(config), MESH, config=config))
  scales = [name for name in sharding if name.endswith("kernel_scale")]
  assert scales
  for name in scales:
    assert sharding[name][-1] == sharding[name.removesuffix("_scale")][1], name
    assert len(sharding[name]) == {"int8": 1, "int4": 2}[weights] and not any(sharding[name][:-1])


def test_fused_matrices_can_be_replicated_but_not_sharded():
  config = t5_config("tiny")
  fused = jax.eval_shape(lambda p: for_decoding(config, p)[1], shapes(config))
  with pytest.raises(InputError, match="side by side"):
    param_shardings(fused, MESH)
  assert not any("model" in s for s in specs(param_shardings(fused, MESH, REPLICATED)).values())


@pytest.mark.parametrize("rule", [("head", "model"), ("heads", "modle")])
def test_mistyped_rule_is_rejected(rule):
  with pytest.raises(InputError, match=rf"a rule cuts '{rule[0]}' over '{rule[1]}'"):
    param_shardings(shapes(t5_config("tiny")), MESH, (*RULES, rule))


@pytest.mark.parametrize("model_parallel", [0, 3])
def test_model_parallel_that_does_not_divide_the_devices_is_rejected(model_parallel):
  with pytest.raises(InputError, match="model_parallel is"):
    make_mesh(model_parallel, jax.devices() * 4)


def test_error_names_the_devices_of_other_processes():
  with pytest.raises(InputError, match="are 1 devices; .* give jax.devices.. for those of all"):
    make_mesh(2)
