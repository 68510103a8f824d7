"""What the compiler for TPUs says of T5-XXL with T5-small, and of LaMDA: what must hold.

As a script this is the process that asks it: libtpu wants settings of its own before jax starts.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

GAMMA = 7
RANKS = (
  0.75,
  0.11,
  0.04,
  0.02,
  0.01,
)  # how often children stand; as scripts/compile_tpu.py has them
CHIP = 32e9  # bytes
# Of a step's bytes, at most, for all guesses.
LEARNED = {"heads": 0.05, "eagle": 0.08, "parallel": 0.03, "anchored": 0.15}
HOSTS = "v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"  # of four chips
TABLE_2 = pathlib.Path(__file__).parents[1] / "experiments/tpu_v4/table2.jsonl"


def main(part: str) -> None:
  """Prints what the tests look at, as JSON: one of two parts, which take as long as each other."""
  import jax
  import jax.numpy as jnp

  from specdec_jax.core.sampling import Sampling
  from specdec_jax.core.theory import best_tree
  from specdec_jax.models.config import named_config, t5_config
  from specdec_jax.models.speculator import speculator_config
  from specdec_jax.tpu import compile as tpu_compile
  from specdec_jax.tpu.beams import beam_programs
  from specdec_jax.tpu.examine import examine, hbm_bytes

  _, devices = tpu_compile.described("v4:2x2x1")
  xxl, small = (t5_config(size, dtype=jnp.bfloat16) for size in ("xxl", "small"))
  # As wide, so that a layer's copies are as large, but compiled sooner.
  shallow = [
    dataclasses.replace(config, num_encoder_layers=layers, num_decoder_layers=layers)
    for config, layers in ((xxl, 2), (small, 1))
  ]
  steps = "decode step", "verify"

  def examined(programs, *names, options=None):
    compiled = {name: programs[name]().compile(compiler_options=options) for name in names}
    return {name: examine(program)._asdict() for name, program in compiled.items()}

  def of_one_chip():
    programs = tpu_compile.programs(xxl, small, devices[:1], gamma=GAMMA)
    found = {"loop": examined(programs, "speculative loop")["speculative loop"]}
    # Bytes grow with each layer by as many as with the one before (to one in 10,000 of all 24).
    of_one, of_two = (hbm_bytes(parts(layers), GAMMA) for layers in (1, 2))
    more = xxl.num_decoder_layers - 2
    found["hbm_bytes"] = {n: of_two[n] + more * (of_two[n] - of_one[n]) for n in of_two}
    learned = {kind: drafting(kind, GAMMA) for kind in LEARNED}
    # Of the loop that makes all of its guesses but the first, one turn is counted.
    one, both = drafting("anchored", 1)["accessed"], learned["anchored"]["accessed"]
    learned["anchored"]["accessed"] = one + (GAMMA - 1) * (both - one)
    return found | {"learned": learned}

  def drafting(kind: str, gamma: int):
    module = speculator_config(shallow[0], kind, gamma=GAMMA, emb_dim=1024, mlp_dim=4096)
    programs = tpu_compile.programs(shallow[0], module, devices[:1], gamma=gamma)
    return examined(programs, "drafting", options=tpu_compile.HBM_ONLY)["drafting"]

  def parts(layers: int):
    target = dataclasses.replace(xxl, num_encoder_layers=layers, num_decoder_layers=layers)
    programs = tpu_compile.programs(target, small, devices[:1], gamma=GAMMA)
    del programs["plain step"]  # as many bytes as the decode step, to a thousandth
    return programs

  def of_others():
    cut = tpu_compile.programs(*shallow, devices, gamma=GAMMA)
    found = {"cut": examined(cut, *steps, options=tpu_compile.HBM_ONLY)}
    whole = tpu_compile.programs(*shallow, devices[:1], gamma=GAMMA)
    found["whole"] = examined(whole, *steps, options=tpu_compile.HBM_ONLY)
    tree = best_tree(RANKS, 64, 8)
    branching = tpu_compile.programs(*shallow, devices[:1], gamma=tree)
    found["tree"] = examined(branching, "verify", "commit", options=tpu_compile.HBM_ONLY)
    searching = beam_programs(*shallow, devices[:1], gamma=2)
    found["beams"] = examined(searching, "plain step", "round", options=tpu_compile.HBM_ONLY)
    lamda = [
      named_config("lamda", size, dtype=jnp.bfloat16, num_decoder_layers=layers)
      for size, layers in (("137b", 2), ("100m", 1))
    ]
    _, sixteen = tpu_compile.described("v4:2x2x4")
    over = tpu_compile.programs(*lamda, sixteen, gamma=GAMMA, sampling=Sampling(top_k=40))
    found["lamda"] = examined(over, *steps, options=tpu_compile.HBM_ONLY)
    # Six heads, which four chips cannot share.
    two_layers, one_layer = (
      dataclasses.replace(small, num_encoder_layers=layers, num_decoder_layers=layers)
      for layers in (2, 1)
    )
    six = tpu_compile.programs(two_layers, two_layers, devices, gamma=GAMMA)
    found["six heads"] = examined(six, "round")
    found["hosts"] = {}
    for topology in HOSTS:
      _, host = tpu_compile.described(topology)
      step = tpu_compile.programs(one_layer, one_layer, host)
      found["hosts"] |= {topology: examined(step, "decode step", options=tpu_compile.HBM_ONLY)}
    # As attention would be without what keeps its kernels in their layout.
    jax.lax.optimization_barrier = lambda x: x
    jax.clear_caches()
    found["broken"] = examined(whole, "verify", options=tpu_compile.HBM_ONLY)
    found["broken"] |= examined(whole, "speculative loop")
    return found

  print(json.dumps({"one chip": of_one_chip, "others": of_others}[part]()))


@pytest.fixture(scope="module")
def found():
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu, the compiler for TPU, is not installed (extra 'tpu')")
  # XLA's flags of the other tests are for the CPU.
  env = os.environ | {"XLA_FLAGS": "", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  runs = [
    subprocess.Popen([sys.executable, __file__, part], stdout=subprocess.PIPE, env=env)
    for part in ("one chip", "others")
  ]
  found = {}
  for run in runs:
    said, _ = run.communicate(timeout=1200)
    assert run.returncode == 0
    found |= json.loads(said)
  return found


def verify_cost(programs: dict, steps: dict) -> float:
  return programs["verify"]["accessed"] / steps["decode step"]["accessed"]


def test_xxl_and_its_draft_fit_on_one_chip(found):
  # 11.1e9 parameters in bfloat16 are all there, and nothing is there twice.
  loop = found["loop"]
  assert 22e9 < loop["arguments"] < loop["peak"] < 1.05 * loop["arguments"] < CHIP


def test_loop_copies_no_weights(found):
  assert found["loop"]["weight_copies"] == []


def test_loop_stays_on_the_chip(found):
  assert found["loop"]["host_transfers"] == 0


def test_bytes_of_a_round(found):
  from specdec_jax.tpu.examine import over_a_step

  accessed = found["hbm_bytes"]
  over = over_a_step(accessed | {"plain step": accessed["decode step"]})
  # A decoder's 24 layers, without the keys and values of attention to the source, and logits.
  weights = 2 * (24 * (6 * 4096 * 4096 + 3 * 4096 * 10240) + 4096 * 32128)
  assert weights < accessed["decode step"] < 1.05 * weights, "each weight is read once"
  assert over["verify"] <= 1.15
  assert over["draft step"] <= 0.03
  assert over["round"] <= 1.25


@pytest.mark.parametrize("kind", LEARNED)
def test_bytes_of_what_a_module_on_the_targets_states_guesses(found, kind):
  """All seven guesses of a round, over a step of the target, whose depth they do not depend on."""
  drafting, accessed = found["learned"][kind], found["hbm_bytes"]
  assert drafting["weight_copies"] == [] and drafting["host_transfers"] == 0
  assert drafting["accessed"] < LEARNED[kind] * accessed["decode step"]
  round_ = accessed["round"] - (GAMMA * accessed["draft step"]) + drafting["accessed"]
  assert round_ < 1.25 * accessed["decode step"]


def test_two_layers_over_a_tree_of_64_nodes(found):
  """A whole round with all 24 takes minutes to compile: experiments/tpu_v4 has it."""
  tree, step = found["tree"], found["whole"]["decode step"]["accessed"]
  assert tree["verify"]["weight_copies"] == tree["commit"]["weight_copies"] == []
  # Beside two layers logits of 64 nodes weigh more than beside 24.
  assert tree["verify"]["accessed"] < 1.3 * step
  assert tree["commit"]["accessed"] < 0.02 * step


def test_rounds_of_a_beam_search(found):
  """Four beams, two steps ahead: what a pass over 12 nodes reads, beside one over 4."""
  step, round_ = found["beams"]["plain step"], found["beams"]["round"]
  for program in (step, round_):
    assert program["weight_copies"] == [] and program["host_transfers"] == 0
  assert found["whole"]["decode step"]["accessed"] < step["accessed"] < round_["accessed"]
  assert round_["accessed"] < 1.3 * step["accessed"]


def test_one_row_is_multiplied_by_the_vector_unit(found):
  """And the eight rows of a verification by the matrix unit: what experiments/tpu_v4 says of it."""
  step, verify = (found["whole"][name] for name in ("decode step", "verify"))
  # Of each layer four matrices of self-attention, two of attention to the source, three of the MLP,
  # and six of activations; and the logits'.
  assert (step["convolutions"], step["matrix_converts"]) == (0, 2 * (9 + 6) + 1)
  # Nine, and four of attention to the cache and to the source.
  assert (verify["convolutions"], verify["matrix_converts"]) == (2 * (9 + 4) + 1, 0)


def test_four_chips_share_the_work(found):
  for step, whole in found["whole"].items():
    cut = found["cut"][step]
    assert cut["weight_copies"] == []
    assert cut["collectives"] > 0
    assert cut["arguments"] < 0.26 * whole["arguments"]
    assert cut["accessed"] < 0.28 * whole["accessed"]


def test_sixteen_chips_share_two_layers_of_lamda(found):
  for program in found["lamda"].values():
    assert program["weight_copies"] == []
    assert program["host_transfers"] == 0
    assert program["collectives"] > 0
  # Both layers and logits, of which a chip has a sixteenth.
  weights = 2 * (2 * (4 * 8192 * 16384 + 3 * 8192 * 65536) + 8192 * 32000) / 16
  assert weights < found["lamda"]["decode step"]["accessed"] < 1.05 * weights
  assert verify_cost(found["lamda"], found["lamda"]) < 1.15


def test_heads_that_chips_cannot_share(found):
  """T5 1.1 small's six over four: the draft is whole on each chip, the target's attention too.

  Only the target's pass and acceptance exchange messages; seven draft steps would send 84.
  """
  round_ = found["six heads"]["round"]
  assert 0 < round_["collectives"] < 30
  assert round_["weight_copies"] == []


@pytest.mark.parametrize("topology", HOSTS)
def test_tpus_that_people_rent(found, topology):
  step = found["hosts"][topology]["decode step"]
  assert step["collectives"] > 0
  # Attention's kernels of six heads are whole on each chip, those of the MLP and logits a quarter.
  weights = 2 * (6 * 512 * 384 + (3 * 512 * 1024 + 512 * 32128) / 4)
  assert weights < step["accessed"] < 1.3 * weights, "each weight is read once, from HBM"
  assert step["optimal_seconds"] > 0


@pytest.mark.parametrize("topology", ["v4", "v4-8", "v9:2x2", "v5e:2x2x1", "v5e:0x2", "v6e:2x99"])
def test_topology_that_is_not(topology):
  from specdec_jax.errors import InputError
  from specdec_jax.tpu.compile import described

  with pytest.raises(InputError, match=f"^There is no topology '{topology}'; .*v5e:2x2, v5p:2x2x1"):
    described(topology)


def paper_rows():
  from specdec_jax.reporting.paper import load_table

  return load_table(4, TABLE_2.parents[2] / "configs")


def test_table_2_predicts_with_the_costs_that_were_compiled():
  from specdec_jax.tpu import table2 as tpu_table2

  row = paper_rows()[0]  # EnDe, T5-small, argmax, gamma 7, alpha 0.75
  costs = {"draft step": 2, "decode step": 100, "verify": 105}
  found = [
    {"program": name, "accessed": cost, "optimal_seconds": cost / 50}
    | {field: row[field] for field in tpu_table2.DEPENDS_ON[name]}
    for name, cost in costs.items()
  ]
  table = tpu_table2.table([row], found)
  cells = dict(zip(table.columns, table.rows[0]))
  for unit in "bytes", "seconds":
    assert (cells[f"c of {unit}"], cells[f"v of {unit}"]) == ("0.020", "1.050")
    assert cells[f"speed of {unit}"] == f"{(1 - 0.75**8) / (1 - 0.75) / (7 * 0.02 + 1.05):.2f}"


def test_table_2_is_made_of_its_file():
  from specdec_jax.reporting.formats import render
  from specdec_jax.tpu import table2 as tpu_table2

  rows = paper_rows()
  found = tpu_table2.compile_missing(rows, TABLE_2)  # nothing is missing
  table = tpu_table2.table(rows, found)
  assert render(table, "markdown") == TABLE_2.with_suffix(".md").read_text()
  assert len(table.rows) == 12


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"program": "warp"}', '{"program": "verify"}'])
def test_table_2_of_another_file(line, tmp_path):
  from specdec_jax.errors import InputError
  from specdec_jax.tpu import table2 as tpu_table2

  path = tmp_path / "table2.jsonl"
  path.write_text(line + "\n")
  with pytest.raises(InputError, match="table2.jsonl has lines that are no compiled programs"):
    tpu_table2.compile_missing(paper_rows(), path)


def test_copies_of_weights_are_seen(found):
  # Two layers, each with queries, keys, values and queries to the source.
  assert found["whole"]["verify"]["weight_copies"] == []
  copies = found["broken"]["verify"]["weight_copies"]
  assert len(copies) == 8
  assert any("['layers_1']['self_attention']['query']['kernel']" in copy for copy in copies)
  # A step of one token copies none, with or without.
  whole = found["whole"]
  assert verify_cost(whole, whole) < 1.15 < 1.3 < verify_cost(found["broken"], whole)
  # In the loops too: of the target's in the outer one, of the draft's in the one within.
  in_loop = "\n".join(found["broken"]["speculative loop"]["weight_copies"])
  assert "target_params['decoder']" in in_loop and "draft_params['decoder']" in in_loop


# Of a round over four chips: a loop of six draft steps, each with a message, and the draft's logits
# matrix sliced for the loop. Rows of the embedding are looked up.
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


def test_messages_in_a_loop_count_as_often_as_it_runs():
  from specdec_jax.tpu.hlo import executed_collectives

  assert executed_collectives(ROUND) == 1 + 6
  assert executed_collectives(ROUND.replace("constant(0)", "constant(2)")) == 1 + 4
  unknown = ROUND.replace("compare(%step.1, %limit), direction=LT", "custom-call(%step.1)")
  assert executed_collectives(unknown) == 1 + 1


def test_a_copied_slice_of_a_matrix_is_seen():
  """Not rows that are looked up, however many."""
  from specdec_jax.tpu.weight_copies import weight_copies

  assert weight_copies(ROUND) == ["sliced (bf16[512,8032]) of draft['logits_dense']['kernel']"]


if __name__ == "__main__":
  main(sys.argv[1])
