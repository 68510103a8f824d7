"""Test the planner's kernels and times against compiled and measured programs of an H100."""

import pathlib

import pytest

from experiments.gpu.kernels import by_kind
from experiments.gpu.plan import gpu_plan_table
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


@pytest.mark.slow
def test_planned_times_of_chains_are_within_7_percent_of_measured_ones():
  measured = [*lines(FOLDER / "measured_gpu.jsonl"), *lines(FOLDER / "measured.jsonl")]
  rows = [*gpu_plan_table(measured).rows]
  errors = {row[0]: abs(float(row[-1].rstrip("%"))) for row in rows}
  chains = [float(row[-1].rstrip("%")) for row in rows if "tree" not in row[0]]
  assert len(chains) >= 15 and max(map(abs, chains)) < 7
  assert errors["tree of 64"] < 17 and errors["tree of 64, no drafting"] < 8
