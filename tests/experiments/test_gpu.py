"""Programs that are compiled for an H100, their kernels, and the script for a machine with a GPU.

Run as a script, this file compiles programs: the compiler needs settings before jax starts.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments.gpu.kernels import Kernel, array_bytes, kernels, work_of
from experiments.lib.records import lines
from specdec_jax import theory
from specdec_jax.measure.kernel_times import GPU_TIMES, KernelTimes, KernelWork

FOLDER = pathlib.Path(__file__).parents[2] / "experiments/gpu"
COMPILED, COMPILED_GPU = FOLDER / "compiled.jsonl", FOLDER / "compiled_gpu.jsonl"

# A product of a row and a matrix; a loop of four steps with a write to a cache, and a branch.
PROGRAM = """
HloModule jit_round

%product (p.0: bf16[1,8], p.1: bf16[8,16]) -> bf16[1,16] {
  %p.0 = bf16[1,8]{1,0} parameter(0)
  %p.1 = bf16[8,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[1,16]{1,0} dot(%p.0, %p.1), metadata={op_name="jit(f)/target/wi._matmul/dot"}
}

%write (p.2: bf16[100,4], p.3: bf16[1,4], p.4: s32[]) -> bf16[100,4] {
  %p.2 = bf16[100,4]{1,0} parameter(0)
  %p.3 = bf16[1,4]{1,0} parameter(1)
  %p.4 = s32[] parameter(2)
  ROOT %update = bf16[100,4]{1,0} dynamic-update-slice(%p.2, %p.3, %p.4, %p.4)
}

%lookup (p.5: bf16[100,4], p.6: s32[]) -> bf16[1,4] {
  %p.5 = bf16[100,4]{1,0} parameter(0)
  %p.6 = s32[] parameter(1)
  %view = bf16[100,4]{1,0} bitcast(%p.5)
  ROOT %row = bf16[1,4]{1,0} dynamic-slice(%view, %p.6, %p.6), dynamic_slice_sizes={1,4}
}

%body (s.0: (s32[], bf16[100,4])) -> (s32[], bf16[100,4]) {
  %s.0 = (s32[], bf16[100,4]{1,0}) parameter(0)
  %step = s32[] get-tuple-element(%s.0), index=0
  %cache = bf16[100,4]{1,0} get-tuple-element(%s.0), index=1
  %new = bf16[1,4]{1,0} fusion(%cache, %step), kind=kLoop, calls=%lookup
  %written = bf16[100,4]{1,0} fusion(%cache, %new, %step), kind=kLoop, calls=%write
  ROOT %next = (s32[], bf16[100,4]{1,0}) tuple(%step, %written)
}

%condition (s.1: (s32[], bf16[100,4])) -> pred[] {
  %s.1 = (s32[], bf16[100,4]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%s.1), index=0
  ROOT %lt = pred[] compare(%at, %at), direction=LT
}

%few (b.0: s32[]) -> s32[] {
  ROOT %b.0 = s32[] parameter(0)
}

%many (b.1: s32[]) -> s32[] {
  %b.1 = s32[] parameter(0)
  ROOT %copy.2 = s32[] copy(%b.1)
}

ENTRY %main (x: bf16[1,8], w: bf16[8,16], cache.1: bf16[100,4]) -> bf16[1,16] {
  %x = bf16[1,8]{1,0} parameter(0)
  %w = bf16[8,16]{1,0} parameter(1)
  %cache.1 = bf16[100,4]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %start = s32[] copy(%zero), metadata={op_name="jit(f)/add"}
  %p = f32[3]{0} negate(%x), metadata={op_name="jit(f)/target/self_attention/q,k->qk/dot_general"}
  %n = f32[5]{0} negate(%x), metadata={op_name="jit(f)/target/pre_self_attention_norm/mul"}
  %state = (s32[], bf16[100,4]{1,0}) tuple(%start, %cache.1)
  %loop = (s32[], /*index=1*/bf16[100,4]{1,0}) while(%state), condition=%condition, body=%body, \
metadata={op_name="jit(f)/draft/while"}, backend_config={"known_trip_count":{"n":"4"}}
  %branch = s32[] conditional(%start, %start, %start), branch_computations={%few, %many}
  ROOT %y = bf16[1,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%product, \
metadata={op_name="jit(f)/target/wi._matmul/dot_general"}
}
"""


def main() -> None:
  """Compile a draft step and a round of T5-small with itself, and print their kernels as JSON."""
  import dataclasses

  import jax.numpy as jnp

  from experiments.gpu.kernels import report
  from experiments.tpu_v4.compile import CompileSettings, described, programs
  from specdec_jax.core.sampling import Sampling
  from specdec_jax.models.layout import Layout
  from specdec_jax.models.sizes import t5_config

  _, devices = described("h100:1")
  small = t5_config(
    "small",
    layout=Layout(dtype=jnp.bfloat16, fused=True, kernels="gpu"),
    num_encoder_layers=1,
  )
  one, two = (dataclasses.replace(small, num_decoder_layers=layers) for layers in (1, 2))
  settings = CompileSettings(4, source_tokens=40, sampling=Sampling(0.0))
  names = "draft step", "round"
  found = [programs(config, config, devices, settings) for config in (one, two)]
  print(json.dumps([report({name: each[name] for name in names})["programs"] for each in found]))


def test_kernels_of_a_program():
  lookup, write = 8 + 8 + 4, 8 + 8 + 4  # a row is read and written; and the index
  assert kernels(PROGRAM) == {
    Kernel("target", "matmul", 2 * (8 + 8 * 16 + 16)): 1,
    Kernel("draft", "other", lookup): 4,
    Kernel("draft", "write", write): 4,
    Kernel("draft", "other", 4 + 4 + 1): 4,  # the condition
    Kernel("draft", "other", 4 + 4): 1,  # the longer branch, which has no name
    Kernel("rest", "other", 4 + 4): 1,
    Kernel("target", "attention", 16 + 12): 1,
    Kernel("target", "norm", 16 + 20): 1,
  }


def test_bytes_of_shapes():
  shapes = {"(bf16[2,3]{1,0}, pred[5]{0})": 17, "f32[]": 4, "s4[3]": 2, "f8e4m3fn[10]": 10}
  assert {shape: array_bytes(shape) for shape in shapes} == shapes


def test_times_of_kernels():
  large = Kernel("target", "matmul", 6_000_000, transposed=True)
  attention, small = Kernel("target", "attention", 10, queries=4), Kernel("draft", "other", 10)
  work = work_of({large: 2, attention: 3, small: 5})
  assert work == KernelWork(12_000_080, 12_000_000, 10, 12)
  times = KernelTimes(share=0.5, transposed=0.1, fixed_us=2, query_us=3)
  assert times.us(work, 1000) == pytest.approx(24.00016 + 2.4 + 2 * 10 + 3 * 12)


@pytest.mark.slow
def test_constants_are_fitted_and_predict_rows_that_are_left_out():
  from experiments.gpu import fit

  rows = fit.rows_of([*lines(FOLDER / "measured_gpu.jsonl"), *lines(FOLDER / "measured.jsonl")])
  np.testing.assert_allclose(fit.fitted(rows), GPU_TIMES, rtol=0.02)
  assert len(rows) >= 15
  for i, row in enumerate(rows):
    others = fit.fitted([*rows[:i], *rows[i + 1 :]])
    assert max(abs(fit.error_of(row)), abs(fit.error_of(row, others))) < 0.07, row.line


def test_expected_speed_of_a_batch_waits_for_its_slowest_row():
  from experiments.gpu.measure import gpu_speed_table

  measured = lines(FOLDER / "measured.jsonl")
  table = gpu_speed_table(measured)
  (line,) = (x for x in measured if x.get("batch_size") == 8 and x["gamma"] == 3)
  cells = dict(zip(table.columns, table.rows[measured.index(line)]))
  rng, left, rounds = np.random.default_rng(0), np.full((5000, 8), 64), np.zeros(5000)
  while (left > 0).any():
    rounds += (left > 0).any(axis=1)
    accepted = rng.random((*left.shape, 3)) < 0.75
    left -= 1 + np.cumprod(accepted, axis=-1).sum(axis=-1)
  ms = line["start_ms"] + (rounds.mean() - 1) * line["round_ms"]
  expected = float(cells["expected tokens/s"].replace(",", ""))
  assert expected == pytest.approx(8 * 64 / ms * 1e3, rel=0.01)
  assert expected < 0.9 * line["tokens_per_s"]  # copies of one text
  assert sum("copies of one text" in note for note in table.notes) == 2


def test_the_papers_alphas_put_base_before_small_in_translation():
  from experiments.gpu.predict import gpu_alphas_table

  speeds = {row[:3]: float(row[-1]) for row in gpu_alphas_table(lines(COMPILED_GPU)).rows}
  for temperature in ("0", "1"):
    small, base, large = (
      speeds["EnDe", temperature, f"T5-{size}"] for size in ("small", "base", "large")
    )
    assert base > small > large


def test_tokens_of_trees_are_those_of_the_theory():
  from experiments.gpu.predict import RANKS, tree_tokens

  tokens = [tree_tokens([RANKS] * 8, nodes) for nodes in (16, 32, 64)]
  want = [theory.tree_tokens(theory.best_tree(RANKS, nodes, 8), RANKS) for nodes in (16, 32, 64)]
  assert tokens == pytest.approx(want)
  falling = [tuple(x * 0.9**depth for x in RANKS) for depth in range(8)]
  assert tree_tokens(falling, 1) == 1 and tree_tokens(falling, 2) == pytest.approx(1 + RANKS[0])
  assert tree_tokens(falling, 64) < tokens[-1]


def test_records_have_all_settings():
  from experiments.gpu import predict

  files = {COMPILED: predict.SETTINGS, COMPILED_GPU: predict.GPU_SETTINGS}
  for path, settings in files.items():
    before = path.read_text()
    predict.compile_missing(settings, path)  # compiles nothing
    assert path.read_text() == before


def test_programs_compile_for_an_h100_without_one():
  from experiments.tpu_v4.compile import gpu_compiler

  if gpu_compiler() is None:
    pytest.skip("the compiler for GPU is not installed (extra 'gpu-compiler')")
  env = os.environ | {"XLA_FLAGS": ""}
  root = FOLDER.parents[1]
  env["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests")])
  done = subprocess.run([sys.executable, __file__], env=env, stdout=subprocess.PIPE, check=True)
  one, two = json.loads(done.stdout)
  layers = {
    name: sum(two[name]["kernels"].values()) - sum(one[name]["kernels"].values()) for name in one
  }
  assert 8 <= layers["draft step"] <= 12  # a layer has 10; 23 with kernels 'xla'
  # A pass over two tokens, three draft steps, and a target pass over five tokens.
  assert 5 * 8 <= layers["round"] <= 5 * 16
  weights = 2 * (6 * 512 * 384 + 3 * 512 * 1024)
  assert weights <= two["draft step"]["bytes"] - one["draft step"]["bytes"] <= 1.5 * weights
  assert all(us > 0 for us in two["round"]["us"].values())


def test_batches_of_different_texts_wait_unless_they_are_continuous():
  from experiments.gpu.measure import gpu_batches_table
  from experiments.lib.records import lines

  rows = gpu_batches_table(lines(FOLDER / "measured.jsonl")).rows
  waiting, continuous = ([float(row[i]) for row in rows] for i in (3, 4))
  assert 2.7 > waiting[0] > waiting[1] > waiting[2] > 2 and set(continuous) == {2.73}
  assert [row[-1] == "-" for row in rows] == [False, False, True]  # batch 128 was not measured


def test_rounds_of_continuous_batching_are_those_of_the_loop():
  from types import SimpleNamespace

  from experiments.gpu.measure import _num_rounds

  # Texts of 3, 1, 1 and 2 rounds: the second row decodes the last three, after 4 rounds.
  num_emitted = np.arange(3)[:, None] < np.array([3, 1, 1, 2])
  result = SimpleNamespace(rounds=SimpleNamespace(num_emitted=num_emitted), num_rounds=3)
  assert _num_rounds(dict(continuous=True, batch_size=2), [result]) == 4
  assert _num_rounds(dict(batch_size=2), [result, result]) == 6


# One setting of each kind of part, by its place in the part. Quantized weights are only options of
# the pair. `auto`, `tests`, `table2` and `transformers` call other code, which has tests.
@pytest.mark.slow
@pytest.mark.parametrize(
  ("part", "place"),
  [("speed", -1), ("batches", 1), ("continuous", 0), ("trees", 0), ("ende", -1)]
  + [("whisper", 1), ("cnndm", 0)],
)
def test_parts_run_with_small_models(tmp_path, part, place):
  from experiments.gpu import measure

  run = measure.Run(tmp_path, "tiny", "tiny", 2, 4)
  setting = run.missing(part)[place]
  if setting.get("head"):
    setting |= dict(gamma=2, nodes=4)  # which is compiled in seconds
  (found,) = measure.PARTS[part].measure(run, [setting])
  texts = setting.get("num_texts", setting["batch_size"]) / setting["batch_size"]
  assert found["tokens_per_row"] == 4 * texts and 0 < found["rounds"] <= 4 * texts
  line = {**setting, **found, "device": "cpu", "jax": "", "commit": "", "date": ""}
  assert len(measure.gpu_speed_table([line]).rows) == 1


def test_script_measures_each_setting_once(tmp_path):
  sizes = "--target=tiny", "--draft=tiny", "--num_texts=2", "--max_new_tokens=6"
  run = [sys.executable, "-m", "experiments.gpu.measure", str(tmp_path), *sizes]
  parts = "xla", "identity"
  env = os.environ | {"JAX_PLATFORMS": "cpu"}

  def printed(*options, parts=parts):
    command = [*run, *options, "--parts", *parts]
    return subprocess.run(
      command, cwd=FOLDER.parents[1], env=env, stdout=subprocess.PIPE, text=True, check=True
    ).stdout

  assert "xla: 2 settings" in printed("--dry_run") and not [*tmp_path.iterdir()]
  failed = printed("--target=unknown", parts=("xla", "int8"))  # each is tried
  assert [f"{part}: failed with exit status 2" in failed for part in ("xla", "int8")] == [True] * 2
  assert "xla: done" in printed()
  text = (tmp_path / "results.jsonl").read_text()
  found = [json.loads(line) for line in text.splitlines()]
  assert [line["part"] for line in found] == [part for part in parts for _ in range(2)]
  for line in found:
    if line["part"] == "identity":
      assert line["texts"] == 2 and not any(n for *_, n in line["different"])
    else:
      assert line["tokens_per_row"] == 6 and line["total_ms"] > 0 and "commit" in line
  assert "settings" not in printed()
  assert (tmp_path / "results.jsonl").read_text() == text


if __name__ == "__main__":
  main()
