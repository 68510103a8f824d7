"""Test programs that are compiled for TPUs: T5-XXL with T5-small, beams, trees, other families.

Run as a script, this file compiles the programs: libtpu needs its own settings before jax starts.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

GAMMA = 7  # default of `experiments.tpu_v4.report` and of `CompileSettings`
# Acceptance rates of a node's children, the defaults of `experiments.tpu_v4.report`.
RANKS = (0.75, 0.11, 0.04, 0.02, 0.01)
CHIP = 32e9  # bytes of HBM of a v4 chip
# Draft heads, and the highest allowed share of a decode step's bytes for drafting a round.
LEARNED = {"eagle": 0.08, "conditioned": 0.15}
HOST = "v6e:2x2"  # a host of four chips, of another generation
TABLE_2 = pathlib.Path(__file__).parents[2] / "experiments/tpu_v4/table2.jsonl"


def main(part: str) -> None:
  """Compile one of two parts, which take equally long, and print the checked values as JSON."""
  import jax
  import jax.numpy as jnp
  import tiny

  from experiments.tpu_v4 import compile as tpu_compile
  from experiments.tpu_v4.beams import BeamSettings, beam_programs
  from experiments.tpu_v4.examine import examine, hbm_bytes
  from specdec_jax.core.sampling import Sampling
  from specdec_jax.core.trees import DynamicTree
  from specdec_jax.drafts.heads import new_head
  from specdec_jax.models.layout import Layout
  from specdec_jax.models.sizes import t5_config
  from specdec_jax.theory import best_tree

  _, devices = tpu_compile.described("v4:2x2x1")
  xxl, small = (t5_config(size, layout=Layout(dtype=jnp.bfloat16)) for size in ("xxl", "small"))
  # Of full width, so that copies of a layer are as large, but with few layers, to compile sooner.
  shallow_target, shallow_draft = (
    dataclasses.replace(config, num_encoder_layers=layers, num_decoder_layers=layers)
    for config, layers in ((xxl, 2), (small, 1))
  )
  steps = "decode step", "verify"

  def examined(programs, *names, options=None):
    compiled = {name: programs[name]().compile(compiler_options=options) for name in names}
    return {name: examine(program)._asdict() for name, program in compiled.items()}

  def examined_hbm(programs, *names):
    return examined(programs, *names, options=tpu_compile.HBM_ONLY)

  def one_chip():
    # Each layer adds as many bytes as the layer before (to one in 10,000 of all 24), and to a
    # round as many as to its verification.
    two, one = hbm_bytes(parts(2), GAMMA), parts(1)
    one = hbm_bytes({name: one[name] for name in steps}, GAMMA)
    layer = {name: two[name] - one[name] for name in steps}
    layer |= {"round": layer["verify"], "draft step": 0}
    reports = {"hbm_bytes": {x: two[x] + (xxl.num_decoder_layers - 2) * layer[x] for x in two}}
    reports |= examined(parts(2), "speculative loop")
    learned = {kind: drafting(kind, GAMMA) for kind in LEARNED}
    # All draft tokens but the first are drafted in a loop, of which one iteration is counted.
    first, counted = drafting("conditioned", 1)["accessed"], learned["conditioned"]["accessed"]
    learned["conditioned"]["accessed"] = first + (GAMMA - 1) * (counted - first)
    return reports | {"learned": learned, "families": families()}

  def families():
    sizes = dict(vocab_size=2048, emb_dim=512, num_heads=8, head_dim=128, mlp_dim=1024)
    options = {
      "t5gemma": tiny.T5GEMMA | dict(num_kv_heads=4, encoder_sizes=(256, 2, 1, 128, 512)),
      "bart": tiny.BART | dict(num_positions=512),
    }
    reports = {}
    for family, fields in options.items():
      target, draft = (
        tiny.config(layers=layers, layout=Layout(dtype=jnp.bfloat16), **fields | sizes)
        for layers in (2, 1)
      )
      reports[family] = examined_hbm(tpu_compile.programs(target, draft, devices[:1]), *steps)
    return reports

  def drafting(kind: str, gamma: int):
    head = new_head(shallow_target, kind, gamma=GAMMA, emb_dim=1024, mlp_dim=4096)
    settings = tpu_compile.CompileSettings(gamma=gamma)
    programs = tpu_compile.programs(shallow_target, head, devices[:1], settings)
    return examined_hbm(programs, "drafting")["drafting"]

  def parts(layers: int):
    target = dataclasses.replace(xxl, num_encoder_layers=layers, num_decoder_layers=layers)
    programs = tpu_compile.programs(target, small, devices[:1])
    del programs["plain step"]  # accesses as many bytes as the decode step, to a thousandth
    return programs

  def others():
    sharded = tpu_compile.programs(shallow_target, shallow_draft, devices)
    whole = tpu_compile.programs(shallow_target, shallow_draft, devices[:1])
    tree_settings = tpu_compile.CompileSettings(gamma=best_tree(RANKS, 64, 8))
    tree = tpu_compile.programs(shallow_target, shallow_draft, devices[:1], tree_settings)
    head = new_head(
      shallow_target, "features", gamma=3, emb_dim=512, mlp_dim=1024, num_decoder_layers=1
    )
    dynamic_settings = tpu_compile.CompileSettings(
      gamma=DynamicTree(15, 3), sampling=Sampling(temperature=0.0)
    )
    dynamic = tpu_compile.programs(shallow_target, head, devices[:1], dynamic_settings)
    beams = beam_programs(shallow_target, shallow_draft, devices[:1], BeamSettings(gamma=2))
    # T5 1.1 small has six heads, which four chips cannot share.
    two_layers, one_layer = (
      dataclasses.replace(small, num_encoder_layers=layers, num_decoder_layers=layers)
      for layers in (2, 1)
    )
    six_heads = tpu_compile.programs(two_layers, two_layers, devices)
    host = tpu_compile.programs(one_layer, one_layer, tpu_compile.described(HOST)[1])
    reports = {
      "sharded": examined_hbm(sharded, *steps),
      "whole": examined_hbm(whole, *steps),
      "tree": examined_hbm(tree, "verify", "commit"),
      "dynamic": examined_hbm(dynamic, "drafting", "round"),
      "beams": examined_hbm(beams, "plain step", "round"),
      "six heads": examined(six_heads, "round"),
      "host": examined_hbm(host, "decode step"),
    }
    # Without the barrier, the compiler changes the layout of attention's kernels.
    jax.lax.optimization_barrier = lambda x: x
    jax.clear_caches()
    without_barrier = examined_hbm(whole, "verify")
    small_loop = tpu_compile.programs(one_layer, one_layer, devices[:1])
    without_barrier |= examined(small_loop, "speculative loop")
    return reports | {"without barrier": without_barrier}

  print(json.dumps({"one chip": one_chip, "others": others}[part]()))


@pytest.fixture(scope="module")
def reports():
  """Return the values that `main` prints, by name."""
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu, the compiler for TPU, is not installed (extra 'tpu')")
  # XLA_FLAGS of the other tests are for the CPU.
  env = os.environ | {"XLA_FLAGS": "", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  root = TABLE_2.parents[2]
  env["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests")])
  processes = [
    subprocess.Popen([sys.executable, __file__, part], stdout=subprocess.PIPE, env=env)
    for part in ("one chip", "others")
  ]
  reports = {}
  for process in processes:
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0
    reports |= json.loads(output)
  return reports


def verify_cost(programs: dict, steps: dict) -> float:
  """Return the bytes of a verification relative to those of a decode step."""
  return programs["verify"]["accessed"] / steps["decode step"]["accessed"]


def test_xxl_and_its_draft_fit_on_one_chip(reports):
  """The memory holds the 11.1e9 parameters in bfloat16, each of them once.

  It is that of two layers of the encoder and of the decoder, and of the weights of 22 more.
  """
  loop = reports["speculative loop"]
  others = 22 * 2 * (12 * 4096 * 4096 + 2 * 3 * 4096 * 10240)
  arguments, peak = loop["arguments"] + others, loop["peak"] + others
  assert 22e9 < arguments < peak < 1.05 * arguments < CHIP


def test_decoding_loop_copies_no_weights(reports):
  assert reports["speculative loop"]["weight_copies"] == []


def test_decoding_loop_does_not_communicate_with_the_host(reports):
  assert reports["speculative loop"]["host_transfers"] == 0


def test_round_accesses_at_most_a_quarter_more_bytes_than_a_step(reports):
  from experiments.tpu_v4.examine import over_a_step

  accessed = reports["hbm_bytes"]
  relative = over_a_step(accessed | {"plain step": accessed["decode step"]})
  # 24 decoder layers without the keys and values of cross-attention, and the logits.
  weights = 2 * (24 * (6 * 4096 * 4096 + 3 * 4096 * 10240) + 4096 * 32128)
  assert weights < accessed["decode step"] < 1.05 * weights, "each weight is read once"
  assert relative["verify"] <= 1.15
  assert relative["draft step"] <= 0.03
  assert relative["round"] <= 1.25


@pytest.mark.parametrize("kind", LEARNED)
def test_drafting_with_a_learned_head_accesses_few_bytes(reports, kind):
  """All seven draft tokens of a round are compared with a step of the 24-layer target.

  The head's bytes do not depend on the depth of the target.
  """
  drafting, accessed = reports["learned"][kind], reports["hbm_bytes"]
  assert drafting["weight_copies"] == [] and drafting["host_transfers"] == 0
  assert drafting["accessed"] < LEARNED[kind] * accessed["decode step"]
  round_ = accessed["round"] - (GAMMA * accessed["draft step"]) + drafting["accessed"]
  assert round_ < 1.25 * accessed["decode step"]


def test_verifying_a_tree_of_64_nodes_copies_no_weights_and_accesses_few_more_bytes(reports):
  """The target has two layers, because 24 layers take minutes to compile (experiments/tpu_v4)."""
  tree, step = reports["tree"], reports["whole"]["decode step"]["accessed"]
  assert tree["verify"]["weight_copies"] == tree["commit"]["weight_copies"] == []
  # The logits of 64 nodes are a larger share of two layers than of 24.
  assert tree["verify"]["accessed"] < 1.3 * step
  assert tree["commit"]["accessed"] < 0.02 * step


def test_round_with_a_dynamic_tree_copies_no_weights_and_accesses_few_more_bytes(reports):
  """The target has two layers. The head drafts three levels, and 16 nodes are verified."""
  dynamic, step = reports["dynamic"], reports["whole"]["decode step"]["accessed"]
  for program in dynamic.values():
    assert program["weight_copies"] == [] and program["host_transfers"] == 0
  drafting, round_ = (dynamic[name]["accessed"] for name in ("drafting", "round"))
  assert drafting < 0.4 * step
  assert step + drafting < round_ < 1.2 * step + drafting


def test_round_of_a_beam_search_copies_no_weights_and_accesses_few_more_bytes(reports):
  """Four beams: a round with gamma 2, over 12 nodes, is compared with a step over 4."""
  step, round_ = reports["beams"]["plain step"], reports["beams"]["round"]
  for program in (step, round_):
    assert program["weight_copies"] == [] and program["host_transfers"] == 0
  assert reports["whole"]["decode step"]["accessed"] < step["accessed"] < round_["accessed"]
  assert round_["accessed"] < 1.3 * step["accessed"]


def test_decode_step_uses_the_vector_unit_and_verification_the_matrix_unit(reports):
  """The report in experiments/tpu_v4 covers all layers."""
  step, verify = (reports["whole"][name] for name in ("decode step", "verify"))
  # Per layer: four matrices of self-attention, two of cross-attention, three of the MLP, and six of
  # activations; and the matrix of the logits.
  assert (step["convolutions"], step["matrix_converts"]) == (0, 2 * (9 + 6) + 1)
  # Per layer: nine matrices, and four matmuls of self- and cross-attention.
  assert (verify["convolutions"], verify["matrix_converts"]) == (2 * (9 + 4) + 1, 0)


def test_four_chips_share_weights_and_bytes(reports):
  for step, whole in reports["whole"].items():
    sharded = reports["sharded"][step]
    assert sharded["weight_copies"] == []
    assert sharded["collectives"] > 0
    assert sharded["arguments"] < 0.26 * whole["arguments"]
    assert sharded["accessed"] < 0.28 * whole["accessed"]


@pytest.mark.parametrize("family, kv_heads", [("t5gemma", 4), ("bart", 8)])
def test_families_compile_and_read_each_weight_once(reports, family, kv_heads):
  """Two layers of width 512 with 8 heads of size 128."""
  programs = reports["families"][family]
  for program in programs.values():
    assert program["weight_copies"] == [] and program["host_transfers"] == 0
  num_mlp = 3 if family == "t5gemma" else 2
  attention = 512 * 128 * (4 * 8 + 2 * kv_heads)  # without keys and values of the source
  weights = 2 * (2 * (attention + num_mlp * 512 * 1024) + 512 * 2048)
  # Keys and values of 128 source tokens and 137 slots.
  caches = 2 * 2 * 2 * kv_heads * (128 + 137) * 128
  assert weights + caches < programs["decode step"]["accessed"] < 1.1 * (weights + caches)
  assert programs["verify"]["accessed"] < 1.15 * programs["decode step"]["accessed"]


def test_six_heads_on_four_chips_are_replicated_without_messages_of_the_draft(reports):
  """T5 1.1 small: the draft is replicated on each chip, and so is the target's attention.

  Only the target's forward pass and verification send messages; seven draft steps would send 84.
  """
  round_ = reports["six heads"]["round"]
  assert 0 < round_["collectives"] < 30
  assert round_["weight_copies"] == []


def test_decode_step_compiles_for_another_tpu_and_reads_each_weight_once(reports):
  step = reports["host"]["decode step"]
  assert step["collectives"] > 0
  # Each chip holds the kernels of all six attention heads, and a quarter of the MLP and the logits.
  weights = 2 * (6 * 512 * 384 + (3 * 512 * 1024 + 512 * 32128) / 4)
  assert weights < step["accessed"] < 1.3 * weights, "each weight is read once, from HBM"
  assert step["optimal_seconds"] > 0


@pytest.mark.parametrize("topology", ["v4", "v9:2x2", "v5e:2x2x1", "v6e:2x99"])
def test_unknown_topology_raises(topology):
  from experiments.tpu_v4.compile import described
  from specdec_jax.errors import InputError

  with pytest.raises(InputError, match=f"^There is no topology '{topology}'; .*v5e:2x2, v5p:2x2x1"):
    described(topology)


def test_invalid_arguments_of_a_script_are_one_line():
  words = "-m experiments.tpu_v4.report --topology v4:1".split()
  root = pathlib.Path(__file__).parents[2]
  result = subprocess.run([sys.executable, *words], cwd=root, capture_output=True, text=True)
  assert (result.returncode, result.stdout) == (2, "")
  assert result.stderr.startswith("error: There is no topology 'v4:1'; give a chip")
  assert result.stderr.count("\n") == 1


def test_table_of_pairs_has_the_numbers_of_a_report(tmp_path):
  from experiments.tpu_v4.examine import compiled_pairs_table

  program = dict(arguments=20e9, peak=21e9, collectives=3, weight_copies=[])
  loop = program | dict(arguments=22e9, peak=23e9, weight_copies=["copy"])
  report = {
    "settings": dict(
      version="nllb", target="3.3b", draft="600m", topology="v4:1x1x1", nodes=0, gamma=7
    ),
    "programs": {"speculative loop": loop, "plain step": program, "round": program},
    "hbm_bytes": {"decode step": 5e9},
    "over_a_step": {"verify": 1.01, "draft step": 0.1, "round": 1.8},
  }
  parts = {name: report["programs"][name] for name in ("plain step", "round")}
  tree = report | dict(settings=report["settings"] | dict(nodes=64), programs=parts)
  paths = tmp_path / "report.json", tmp_path / "tree.json"
  for path, content in zip(paths, (report, tree)):
    path.write_text(json.dumps(content))
  first, second = compiled_pairs_table(*paths).rows
  numbers = "22.000", "23.000", "5.000", "1.010", "0.100", "1.800", "3, 3", "1"
  assert first == ("nllb 3.3b", "600m", "v4:1x1x1", "8", *numbers)
  assert second[3:6] == ("64", "-", "-")


def test_table_2_is_computed_from_the_compiled_costs():
  from experiments.paper.paper import load_table
  from experiments.tpu_v4 import table2 as tpu_table2

  row = load_table(4)[0]  # EnDe, T5-small, argmax, gamma 7, alpha 0.75
  costs = {"draft step": 2, "decode step": 100, "verify": 105}
  compiled = [
    {"program": name, "accessed": cost, "optimal_seconds": cost / 50}
    | {field: row[field] for field in tpu_table2.DEPENDS_ON[name]}
    for name, cost in costs.items()
  ]
  table = tpu_table2.table([row], compiled)
  cells = dict(zip(table.columns, table.rows[0]))
  for unit in "bytes", "seconds":
    assert (cells[f"c of {unit}"], cells[f"v of {unit}"]) == ("0.020", "1.050")
    assert cells[f"Theorem 8 of {unit}"] == f"{(1 - 0.75**8) / (1 - 0.75) / (7 * 0.02 + 1.05):.2f}"


def test_table_2_file_holds_all_programs_and_gives_the_published_table():
  from experiments.lib.formats import render
  from experiments.paper.paper import load_table
  from experiments.tpu_v4 import table2 as tpu_table2

  rows = load_table(4)
  compiled = tpu_table2.compile_missing(rows, TABLE_2)  # compiles nothing
  table = tpu_table2.table(rows, compiled)
  assert render(table, "markdown") == TABLE_2.with_suffix(".md").read_text()
  assert len(table.rows) == 12


def test_weight_copies_without_the_barrier_are_found(reports):
  # Two layers, each with the kernels of queries, keys, values and queries of cross-attention.
  assert reports["whole"]["verify"]["weight_copies"] == []
  copies = reports["without barrier"]["verify"]["weight_copies"]
  assert len(copies) == 8
  assert any("['layers_1']['self_attention']['query']['kernel']" in copy for copy in copies)
  # A decode step of one token copies none, with or without the barrier.
  whole = reports["whole"]
  assert verify_cost(whole, whole) < 1.15 < 1.3 < verify_cost(reports["without barrier"], whole)
  # Copies in loops are found too: the target's in the outer loop, the draft's in the inner one.
  in_loop = "\n".join(reports["without barrier"]["speculative loop"]["weight_copies"])
  assert "params.target['decoder']" in in_loop and "params.draft['decoder']" in in_loop


# Part of a round on four chips: a loop of six draft steps, each with a message. The draft's logits
# matrix is sliced for the loop, and rows of the embedding are looked up.
ROUND = """
%slice (param_0: bf16[512,32128], param_1: s32[]) -> bf16[512,8032] {
  %param_0 = bf16[512,32128]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = s32[]{:T(128)S(6)} parameter(1)
  ROOT %dynamic-slice.1 = bf16[512,8032]{1,0:T(8,128)(2,1)S(3)} dynamic-slice(%param_0, %param_1)
}

%lookup (param_2: bf16[32128,512], param_3: s32[1024]) -> bf16[1024,512] {
  %param_2 = bf16[32128,512]{1,0:T(8,128)(2,1)} parameter(0)
  %param_3 = s32[1024]{0:T(1024)} parameter(1)
  ROOT %gather.1 = bf16[1024,512]{1,0:T(8,128)(2,1)} gather(%param_2, %param_3)
}

%body (state: (s32[], f32[])) -> (s32[], f32[]) {
  %state = (s32[]{:T(128)}, f32[]{:T(128)}) parameter(0)
  %step = s32[]{:T(128)} get-tuple-element(%state), index=0
  %of_chip = f32[]{:T(128)} get-tuple-element(%state), index=1
  %all-reduce.1 = f32[]{:T(128)} all-reduce(%of_chip), channel_id=1, to_apply=%add
  ROOT %next = (s32[]{:T(128)}, f32[]{:T(128)}) tuple(%step, %all-reduce.1)
}

%condition (state.1: (s32[], f32[])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, f32[]{:T(128)}) parameter(0)
  %limit = s32[]{:T(128)} constant(6)
  %step.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%step.1, %limit), direction=LT
}

ENTRY %main (kernel: bf16[512,32128], table: bf16[32128,512]) -> (s32[], f32[]) {
  %kernel = bf16[512,32128]{1,0} parameter(0), metadata={op_name="draft['logits_dense']['kernel']"}
  %table = bf16[32128,512]{1,0} parameter(1), metadata={op_name="draft['embedding']"}
  %zero = s32[]{:T(128)} constant(0)
  %start = s32[]{:T(128)} copy(%zero)
  %tokens = s32[1024]{0:T(1024)} broadcast(%start), dimensions={}
  %sliced = bf16[512,8032]{1,0:T(8,128)(2,1)S(3)} fusion(%kernel, %zero), kind=kLoop, calls=%slice
  %rows = bf16[1024,512]{1,0:T(8,128)(2,1)} fusion(%table, %tokens), kind=kLoop, calls=%lookup
  %sum = f32[]{:T(128)} custom-call(%sliced, %rows)
  %all-reduce.2 = f32[]{:T(128)} all-reduce(%sum), channel_id=2, to_apply=%add
  %first = (s32[]{:T(128)}, f32[]{:T(128)}) tuple(%start, %all-reduce.2)
  ROOT %while.1 = (s32[]{:T(128)}, f32[]{:T(128)}) while(%first), condition=%condition, body=%body
}
"""


def test_collectives_in_a_loop_count_once_per_iteration():
  from experiments.tpu_v4.hlo import executed_collectives

  assert executed_collectives(ROUND) == 1 + 6
  assert executed_collectives(ROUND.replace("constant(0)", "constant(2)")) == 1 + 4
  unknown = ROUND.replace("compare(%step.1, %limit), direction=LT", "custom-call(%step.1)")
  assert executed_collectives(unknown) == 1 + 1


def test_copied_slice_of_a_matrix_is_found_and_a_lookup_of_rows_is_not():
  from experiments.tpu_v4.hlo import weight_copies

  assert weight_copies(ROUND) == ["sliced (bf16[512,8032]) of draft['logits_dense']['kernel']"]


if __name__ == "__main__":
  main(sys.argv[1])
