"""Models over many devices: the same outputs, and arrays in pieces.

What needs devices runs in processes that have eight virtual ones, or four each (`partitioned.py`).
"""

import json
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
from specdec_jax.models.config import named_config, t5_config
from specdec_jax.models.families import Config, for_decoding, init_params
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.models.t5 import T5Model
from specdec_jax.partitioning import (
  REPLICATED,
  RULES,
  make_mesh,
  param_shardings,
  state_shardings,
)

SCRIPT = pathlib.Path(__file__).resolve().with_name("partitioned.py")
MESH = AbstractMesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)


def start(*arguments) -> subprocess.Popen:
  command = [sys.executable, str(SCRIPT), *map(str, arguments)]
  return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def found(process: subprocess.Popen) -> dict:
  out, err = process.communicate(timeout=300)
  assert process.returncode == 0, err[-2000:]
  return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def eight():
  """What one process with eight devices decoded."""
  return found(start(8))


@pytest.mark.parametrize(
  "family, model_parallel, run",
  [("t5", 4, "tree"), ("gpt", 4, "chain"), ("gpt", 8, "chain")],
)
def test_outputs_and_rounds_are_those_of_one_device(eight, family, model_parallel, run):
  one, many = (eight[f"{family} {n}"]["runs"][run]["decoded"] for n in (1, model_parallel))
  assert one == many
  accepted = sum(map(sum, one["rounds"][1]))
  assert accepted > len(one["lengths"]), "too few guesses were accepted to tell anything"


@pytest.mark.parametrize("model_parallel", [4, 8])
def test_steps_of_a_replicated_draft_exchange_no_messages(eight, model_parallel):
  """No message is in a loop of known length, as the draft's steps are."""
  instructions, executed = eight[f"gpt {model_parallel}"]["runs"]["chain"]["messages"]
  assert instructions == executed > 0


def test_eight_devices_hold_pieces_of_the_target_and_of_its_cache(eight):
  """[E, H D] = [16, 32], [E, M] = [16, 32], [E, V] = [16, 16], keys of [B, H] = [8, 4]."""
  assert eight["t5 1"]["runs"]["tree"]["caches"] == [[8, 4]]
  for model_parallel, data_parallel in ((4, 2), (2, 4)):
    over, batch = eight[f"t5 {model_parallel}"], 8 // data_parallel
    target, draft = over["target"], over["draft"]
    for name, whole, piece in (
      ("decoder/layers_0/self_attention/query/kernel", [16, 32], [16, 32 // model_parallel]),
      ("encoder/layers_0/attention/out/kernel", [32, 16], [32 // model_parallel, 16]),
      ("encoder/layers_0/mlp/wi_1/kernel", [16, 32], [16, 32 // model_parallel]),
      ("decoder/layers_0/mlp/wo/kernel", [32, 16], [32 // model_parallel, 16]),
      ("decoder/logits_dense/kernel", [16, 16], [16, 16 // model_parallel]),
      ("token_embedder/embedding", [16, 16], [16 // model_parallel, 16]),
      ("decoder/relpos_bias/rel_embedding", [4, 32], [4 // model_parallel, 32]),
    ):
      assert (target[name], draft[name]) == (piece, whole)
    for run in over["runs"].values():  # the target's, and the draft's, which is cut by rows only
      assert run["caches"] == [[batch, 4 // model_parallel], [batch, 4]]


def test_of_a_gpt_biases_are_cut_as_what_they_are_added_to(eight):
  """Its cache too, by rows and heads; its table of positions, and what no cut axis is in, not."""
  over = eight["gpt 4"]
  assert over["runs"]["chain"]["caches"] == [[4, 1], [4, 4]]
  for name, piece in (
    ("layers_0/self_attention/query/kernel", [16, 8]),
    ("layers_0/self_attention/query/bias", [8]),
    ("layers_0/self_attention/out/kernel", [8, 16]),
    ("layers_0/self_attention/out/bias", [16]),
    ("layers_0/mlp/wi/bias", [8]),
    ("layers_0/mlp/wo/bias", [16]),
    ("layers_0/pre_mlp_layer_norm/bias", [16]),
    ("positions", [24, 16]),
  ):
    assert over["target"][f"decoder/{name}"] == piece, name


def test_training_over_eight_devices_is_training_on_one(eight):
  """Texts are shared out over two, the frozen target and the layer that learns over four."""
  one, many = partitioned.trained(1), eight["trained 4"]
  for alone, together in zip(one["metrics"], many["metrics"], strict=True):
    for name in ("train_loss", "valid_loss", "valid_acceptance_length"):
      assert together[name] == pytest.approx(alone[name], rel=1e-3), name
  assert many["pieces"]["logits_dense/kernel"] == [16, 4]


def test_two_processes_decode_together_as_one_device_does(eight):
  with socket.socket() as unused:
    unused.bind(("127.0.0.1", 0))
    port = unused.getsockname()[1]
  for both in [found(process) for process in [start(4, port, 0), start(4, port, 1)]]:
    assert both["t5 4"]["runs"]["tree"]["decoded"] == eight["t5 1"]["runs"]["tree"]["decoded"]
    assert both["t5 4"]["runs"]["tree"]["caches"] == [[4, 1], [4, 4]]
    assert both["t5 4"]["target"] == eight["t5 4"]["target"]


# What the rules say, which needs no devices.


def specs(tree) -> dict:
  leaves = jax.tree.leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): x.spec for path, x in leaves}


def shapes(config: Config):
  return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


@pytest.mark.parametrize("version, size", [("1.0", "xxl"), ("1.1", "xxl"), ("lamda", "137b")])
def test_of_large_models_every_matrix_is_cut_and_no_norm(version, size):
  stacks = ("decoder",) if version == "lamda" else ("encoder", "decoder")
  config = named_config(version, size, **{f"num_{stack}_layers": 1 for stack in stacks})
  for name, spec in specs(param_shardings(shapes(config), MESH)).items():
    assert ("model" in spec) == (not name.endswith("scale")), name


def test_heads_that_do_not_divide_keep_attention_whole():
  config = t5_config("small", num_encoder_layers=1, num_decoder_layers=1)  # 6 heads, 4 devices
  found = specs(param_shardings(shapes(config), MESH))
  for name, spec in found.items():
    whole = "attention/" in name or "rel_embedding" in name or name.endswith("scale")
    assert ("model" in spec) == (not whole), name


def test_heads_that_nothing_tells_are_cut_where_the_width_divides():
  """25 heads of 64 in GPT-2 XL, on 4 devices; 50,257 tokens do not divide."""
  config = named_config("gpt2", "xl", num_decoder_layers=1)
  found = specs(param_shardings(shapes(config), MESH))
  attention = "decoder/layers_0/self_attention"
  assert found[f"{attention}/query/kernel"] == PartitionSpec(None, "model")
  assert found[f"{attention}/out/kernel"] == PartitionSpec("model", None)
  assert "model" not in found["token_embedder/embedding"]


@pytest.mark.parametrize("tree", [chain(3), branching(2, 3)], ids=["chain", "tree"])
def test_of_the_state_every_array_is_cut_by_rows_and_keys_by_heads(tree):
  config = t5_config("tiny")
  model = T5Model(config)
  target = SimulatedModel(model, 0.5, eos_id=model.eos_id)
  draft = ModelDraft(model, Sampling(), tree)
  params, prompt = shapes(config), jax.ShapeDtypeStruct((8, 7), jnp.int32)
  state = jax.eval_shape(lambda p, x: tiny.start(target, draft, p, p, x, 5), params, prompt)
  rows, one_axis = {8: "data", config.num_heads: "model"}, ("hidden", "cross_bias")
  found, arrays = specs(state_shardings(state, MESH)), jax.tree.leaves(state)
  for (name, spec), array in zip(found.items(), arrays, strict=True):
    expected = [rows.get(size) for size in array.shape[: 1 if name in one_axis else 2]]
    if array.shape:
      assert [*spec, None][: len(expected)] == expected, name
  odd = jax.eval_shape(lambda x: x[:3], state.tokens)  # three rows on two devices
  assert state_shardings({"tokens": odd}, MESH)["tokens"].spec == PartitionSpec(None)


def test_what_lies_joined_at_root_may_be_replicated_and_not_cut():
  config = t5_config("tiny")
  fused = jax.eval_shape(lambda p: for_decoding(config, p)[1], shapes(config))
  with pytest.raises(InputError, match="side by side"):
    param_shardings(fused, MESH)
  assert not any("model" in s for s in specs(param_shardings(fused, MESH, REPLICATED)).values())


@pytest.mark.parametrize("rule", [("head", "model"), ("heads", "modle")])
def test_a_mistyped_rule_is_refused(rule):
  with pytest.raises(InputError, match=rf"a rule cuts '{rule[0]}' over '{rule[1]}'"):
    param_shardings(shapes(t5_config("tiny")), MESH, (*RULES, rule))


@pytest.mark.parametrize("model_parallel", [0, 3])
def test_a_mesh_takes_a_divisor_of_the_devices(model_parallel):
  with pytest.raises(InputError, match="model_parallel is"):
    make_mesh(model_parallel, jax.devices() * 4)
