"""Compare times that `specdec plan` predicts with measured ones."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.gpu.fit import BEFORE, is_xla, name_of, program_of, programs_of
from experiments.gpu.kernels import work_of
from experiments.gpu.predict import SOURCE_TOKENS
from specdec_jax.measure.kernel_times import KernelWork
from specdec_jax.measure.plan import CPU_TFLOPS, DEVICES, Counts, Device, PairShapes, Plan
from specdec_jax.measure.records import Record
from specdec_jax.measure.tables import Table
from specdec_jax.models.layout import Layout
from specdec_jax.models.sizes import t5_config

Line = dict[str, Any]  # a line of measured.jsonl or measured_gpu.jsonl


@functools.cache
def counts_of(
  target: str, draft: str | None, source: int, new_tokens: int, dtype: str = "bfloat16"
) -> Counts:
  """Return the work of a pair of sizes of T5 1.1."""
  options: dict[str, Any] = dict(
    layout=Layout(dtype=jnp.dtype(dtype), fused=True), tied_logits=False
  )
  small = t5_config(draft, **options) if draft else None
  return Counts(PairShapes(t5_config(target, **options), small, source, new_tokens))


def planned(line: Line) -> tuple[float, float] | None:
  """Return the predicted ms of a measured step or round on an H100, and its kernels, or None.

  Kernels are those of `specdec plan`, or those that XLA compiled for programs with more of them.
  """
  if "gamma" not in line or line.get("flags"):
    return None
  if (found := program_of(line)) is None and is_xla(line):
    return None
  gamma, batch, device = line["gamma"], line["batch_size"], DEVICES["h100"]
  counts = counts_of(line["target"], line["draft"], SOURCE_TOKENS, line["max_new_tokens"])
  plan = Plan(counts, device, batch)
  tokens = line["nodes"] or gamma + 1
  work, kernels = counts(batch, tokens - 1).target, plan.target_kernels(tokens)
  # The target's matrices were stored transposed.
  transposed = KernelWork(0, 0 if is_xla(line) else work[0, 0])
  if gamma and not line["null"]:
    work = work + counts(batch, gamma).draft
    kernels = kernels + plan.draft_kernels(gamma, line["nodes"])
  if found is not None and is_xla(line):
    kernels = np.array(work_of(found)[2:])
  us = 1e6 * plan.seconds(work, kernels) + device.times.us(transposed, device.gb_per_s)
  return us / 1e3, kernels[0]


def gpu_plan_table(measured: Sequence[Line]) -> Table:
  """Return a table of predicted and measured times of steps and rounds on an H100."""
  rows, errors = [], []
  for line in measured:
    if (found := planned(line)) is None:
      continue
    errors.append(100 * (found[0] / line["round_ms"] - 1))
    rows.append(
      (
        name_of(line),
        f"{line['batch_size']}",
        f"{line['temperature']:g}",
        programs_of(line),
        f"{found[1]:.0f}",
        f"{found[0]:.2f}",
        f"{line['round_ms']:.2f}",
        f"{errors[-1]:+.1f}%",
      )
    )
  columns = "program", "batch", "temperature", "kernels of", "kernels"
  notes = (
    f"Mean and largest error: {np.mean(np.abs(errors)):.1f}%, {max(np.abs(errors)):.1f}%.",
    "kernels of: gpu, programs with the kernels that `specdec plan` counts, which stored all "
    f"matrices of the target transposed. before: those of commit {BEFORE}, and xla: with "
    "kernels='xla'; these are counted in compiled programs.",
  )
  columns = *columns, "predicted ms", "measured ms", "error"
  return Table("Planned and measured on an H100", columns, tuple(rows), notes)


def cpu_plan_table(records: Sequence[Record]) -> Table:
  """Return a table of planned and measured costs of T5 1.1 on CPUs, at the measured bandwidth."""
  rows = []
  for r in records:
    times, threads = r.times, r.machine.threads or 1
    small = r.models.draft.removeprefix("t5_1.1_")
    if times.c is None or r.settings.tree or not (small in ("small", "base") or "copy" in small):
      continue
    draft = None if "copy" in small else small
    target, new_tokens = r.models.target.removeprefix("t5_1.1_"), r.settings.max_new_tokens or 64
    # The recorded bytes tell the length of sources.
    short = counts_of(target, draft, 1, new_tokens, "float32")
    config, missing = short.pair.target, 1e6 * (times.target_step_mb or 0)
    missing -= short(1, 0).target[:, 0].sum()
    slot = 8 * config.num_decoder_layers * config.num_heads * config.head_dim
    counts = counts_of(target, draft, 1 + round(missing / slot), new_tokens, "float32")
    device = Device(0, times.memory_gb_per_s or 0, CPU_TFLOPS * threads)
    plan, gamma = Plan(counts, device, r.settings.batch_size), r.settings.gamma
    step_ms = 1e3 * plan.target_s()
    pairs = (
      (step_ms, times.target_step_ms, ".1f"),
      (plan.c[gamma - 1], times.c, ".3f"),
      (plan.v[gamma - 1], times.verify_cost, ".2f"),
    )
    error = 100 * (step_ms / (times.target_step_ms or 1) - 1)
    cells = (f"{x:{spec}}" for pair in pairs for *both, spec in [pair] for x in both)
    names = r.machine.processor or "", r.models.target, r.models.draft, f"{gamma}"
    rows.append((*names, f"{times.memory_gb_per_s:.1f}", *cells, f"{error:+.1f}%"))
  columns = "processor|target|draft|gamma|GB/s|predicted step ms|measured step ms|predicted c"
  columns += "|measured c|predicted v|measured v|error of step"
  note = f"float32, batch 1, {CPU_TFLOPS:g} TFLOPS per core; GB/s was measured with each row."
  return Table("Planned and measured on CPUs", tuple(columns.split("|")), tuple(rows), (note,))
