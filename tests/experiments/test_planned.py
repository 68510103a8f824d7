"""Test the planner's kernels and times against compiled and measured programs of an H100."""

import pathlib

import pytest

from experiments.gpu.kernels import by_kind
from experiments.gpu.plan import fitted, gpu_plan_table
from experiments.gpu.predict import Setting, kernels_of
from experiments.lib.records import lines
from specdec_jax.measure import plan
from specdec_jax.models.sizes import t5_config

FOLDER = pathlib.Path(__file__).parents[2] / "experiments/gpu"
PASSES = [
  *(("draft step", size, 1) for size in ("small", "base", "large", "xl")),
  ("decode step", "xxl", 1),
  *(("verify", "xxl", tokens) for tokens in (6, 16, 32, 64)),
]


def compiled(setting: Setting) -> dict[str, float]:
  """Return the kernels that XLA compiled for a GPU, by kind."""
  found = kernels_of(lines(FOLDER / "compiled_gpu.jsonl"), setting)
  return {kind: sum(of_kind.values()) for kind, of_kind in by_kind(found).items()}


@pytest.mark.parametrize("program, size, tokens", PASSES)
def test_kernels_of_passes_are_those_of_compiled_programs(program, size, tokens):
  tree = dict(gamma=8, nodes=tokens) if tokens > 6 else {}
  draft = size if program == "draft step" else "small"
  want = compiled(Setting(program, draft, **tree))
  found = plan.pass_kernels(t5_config(size), 1, tokens)
  assert sum(found.values()) == pytest.approx(sum(want.values()), rel=0.1)
  for kind, n in want.items():
    assert found[kind] == pytest.approx(n, rel=0.12, abs=4), kind


@pytest.mark.parametrize("kind", plan.HEAD_KERNELS)
def test_kernels_of_heads_are_those_of_compiled_programs(kind):
  per_round, per_token = plan.HEAD_KERNELS[kind]
  want = sum(compiled(Setting("drafting", kind)).values())
  assert per_round + 5 * per_token == pytest.approx(want, rel=0.05)


def test_planned_times_are_within_15_percent_of_measured_ones():
  measured = [*lines(FOLDER / "measured_gpu.jsonl"), *lines(FOLDER / "measured.jsonl")]
  share, fixed_us = fitted(measured)
  assert (round(share, 2), round(fixed_us, 2)) == (plan.GPU_SHARE, plan.GPU_FIXED_US)
  rows = gpu_plan_table(measured).rows
  errors = [float(row[-1].rstrip("%")) for row in rows if row[-1] != "fitted"]
  assert len(errors) == len(rows) - 2 > 15 and max(map(abs, errors)) < 15
