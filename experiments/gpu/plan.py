"""Compare times that `specdec plan` predicts with measured ones."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.gpu.predict import COMPILED, SETTINGS, SOURCE_TOKENS, Setting, kernels_of
from experiments.lib.records import lines
from specdec_jax.measure.plan import CPU_TFLOPS, DEVICES, Counts, Device, PairShapes, Plan
from specdec_jax.measure.records import Record
from specdec_jax.measure.tables import Table
from specdec_jax.models.layout import Layout
from specdec_jax.models.sizes import t5_config

Line = dict[str, Any]  # a line of measured.jsonl or measured_gpu.jsonl
PARTS = "speed", "xla", "reduced", "batches"
BEFORE = "8ecd799"  # commit of programs with twice as many kernels


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


def planned(line: Line, device: Device = DEVICES["h100"]) -> tuple[float, float] | None:
  """Return the predicted ms of a measured step or round, and its kernels, or None.

  Kernels are those of `specdec plan`, or those that XLA compiled for the programs before.
  """
  gamma, batch, null = line["gamma"], line["batch_size"], line["null"]
  counts = counts_of(line["target"], line["draft"], SOURCE_TOKENS, line["max_new_tokens"])
  plan = Plan(counts, device, batch)
  tokens = line["nodes"] or gamma + 1
  work = counts(batch, tokens - 1).target
  kernels = plan.target_kernels(tokens)
  if gamma and not null:
    work = work + counts(batch, gamma).draft
    kernels += plan.draft_kernels(gamma)
  if line["commit"] == BEFORE or line.get("kernels") == "xla":
    name = "verify" if null else "round" if gamma else "plain step"
    shape = dict(batch_size=batch, max_new_tokens=line["max_new_tokens"])
    setting = Setting(name, gamma=gamma or 5, **shape)
    if setting not in SETTINGS or line["nodes"]:
      return None
    kernels = sum(kernels_of(lines(COMPILED), setting).values())
  return 1e3 * plan.seconds(work, kernels), kernels


def fitted(measured: Sequence[Line]) -> tuple[float, float]:
  """Return the share of the bandwidth and the microseconds per kernel that fit two measured rows.

  These are the first rows: a step and a round.
  """
  rows, targets = [], []
  for line in measured[:2]:
    # A device without limits; with its bandwidth; and with a microsecond per kernel.
    units: Any = dict(share=np.inf, fixed_us=0.0), dict(share=1.0, fixed_us=0.0)
    units += (dict(share=np.inf, fixed_us=1.0),)
    none, full, fixed = (planned(line, DEVICES["h100"]._replace(**unit))[0] for unit in units)
    rows.append((full - none, fixed - none))
    targets.append(line["round_ms"] - none)
  inverse, fixed_us = np.linalg.solve(rows, targets)
  return float(1 / inverse), float(fixed_us)


def gpu_plan_table(measured: Sequence[Line]) -> Table:
  """Return a table of predicted and measured times of steps and rounds on an H100."""
  rows, errors = [], []
  for i, line in enumerate(measured):
    if line["part"] not in PARTS or line["part"] != "reduced" and line.get("flags"):
      continue
    if (found := planned(line)) is None:
      continue
    error = found[0] / line["round_ms"] - 1
    errors += [] if i < 2 else [abs(error)]
    shape = f"tree of {line['nodes']}" if line["nodes"] else f"gamma {line['gamma']}"
    name = "step" if not line["gamma"] else shape + ", without drafting" * line["null"]
    programs = "before" if line["commit"] == BEFORE else line["part"].replace("speed", "gpu")
    rows.append(
      (
        name,
        f"{line['batch_size']}",
        f"{line['temperature']:g}",
        programs,
        f"{found[1]:.0f}",
        f"{found[0]:.2f}",
        f"{line['round_ms']:.2f}",
        "fitted" if i < 2 else f"{100 * error:+.1f}%",
      )
    )
  columns = (
    "program",
    "batch",
    "temperature",
    "kernels of",
    "kernels",
    "predicted ms",
    "measured ms",
  )
  notes = (
    f"Mean and largest error of the rows that were not fitted: {100 * np.mean(errors):.1f}%, "
    f"{100 * max(errors):.1f}%.",
    "kernels of: gpu, programs with the kernels that `specdec plan` counts. before: those of "
    f"commit {BEFORE}, and xla: with kernels='xla'; these are counted in compiled programs. "
    "reduced: REDUCED = 20M. Rows with flags of XLA are left out.",
  )
  return Table("Planned and measured on an H100", (*columns, "error"), tuple(rows), notes)


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
