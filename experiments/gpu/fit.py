"""Fit the constants of `specdec_jax.measure.kernel_times` to measured rows on an H100.

The unknowns are those of a linear model, so they follow from least squares of relative errors. Rows
with a profile and neither draft tokens nor a tree count as three: the times of large matmuls, of
attention, and of all other kernels, as shares of the profile.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.gpu.kernels import Kernels, work_of
from experiments.gpu.predict import COMPILED, COMPILED_GPU, REDUCED, Setting, is_of, kernels_of
from experiments.lib.records import lines
from specdec_jax.measure.kernel_times import GPU_TIMES, KernelTimes
from specdec_jax.measure.plan import DEVICES
from specdec_jax.measure.tables import Table
from specdec_jax.models.kernels import gpu

Line = dict[str, Any]  # a line of measured.jsonl or measured_gpu.jsonl
BEFORE = "8ecd799"  # commit of programs with twice as many kernels
PARTS = "matmul", "attention", "rest"
GB_PER_S = DEVICES["h100"].gb_per_s


class Row(NamedTuple):
  """A line of a measured program, and the kernels that were compiled for it."""

  line: Line
  kernels: Kernels


def is_xla(line: Line) -> bool:
  """Return whether a line was measured with the kernels for TPUs."""
  return line["commit"] == BEFORE or line["kernels"] == "xla"


def program_of(line: Line) -> Kernels | None:
  """Return the kernels of a measured step or round, without those of a draft that takes no time.

  None if its flags differ from those of the compiled programs, or it was not compiled.
  """
  reduced = REDUCED if line["part"] == "reduced" else None
  if "gamma" not in line or line.get("flags") and not reduced:
    return None
  fields = {x: line[x] for x in ("nodes", "batch_size", "max_new_tokens", "temperature")}
  name = "round" if line["gamma"] else "plain step"
  draft = "parallel" if line["null"] and line["nodes"] else "small"  # all target passes are alike
  setting = Setting(name, draft, gamma=line["gamma"] or 5, reduced=reduced, **fields)
  xla = is_xla(line)
  compiled = _compiled(COMPILED if xla else COMPILED_GPU)
  if not any(is_of(each, setting) for each in compiled):
    return None
  found = kernels_of(compiled, setting, transposed=not xla, xla=xla)
  return {k: n for k, n in found.items() if not (line["null"] and k.part == "draft")}


_compiled = functools.cache(lines)


def name_of(line: Line) -> str:
  """Return the name of a measured step or round."""
  shape = f"tree of {line['nodes']}" if line["nodes"] else f"gamma {line['gamma']}"
  return shape + ", no drafting" * line["null"] if line["gamma"] else "step"


def programs_of(line: Line) -> str:
  """Return which kernels a line was measured with: before, xla, reduced or gpu."""
  return "before" if line["commit"] == BEFORE else line["part"].replace("speed", "gpu")


def rows_of(measured: Sequence[Line]) -> list[Row]:
  """Return the measured steps and rounds that were compiled."""
  found = ((line, program_of(line)) for line in measured)
  return [Row(line, kernels) for line, kernels in found if kernels is not None]


def observations(row: Row) -> list[tuple[Kernels, float]]:
  """Return the kernels of a row and their microseconds; or those of its parts, from its profile."""
  line, us = row.line, 1e3 * row.line["round_ms"]
  if "profile" not in line or line["nodes"] or line["gamma"] and not line["null"]:
    return [(row.kernels, us)]
  if line["part"] == "reduced":  # reductions over large matrices have the names of small ones
    return [(row.kernels, us)]
  profiled: collections.Counter[str] = collections.Counter()
  for name, _, profiled_us in line["profile"]:
    is_matmul, is_attention = name.startswith(("gemm", "nvjet")), name == "fusion"
    profiled["matmul" if is_matmul else "attention" if is_attention else "rest"] += profiled_us
  parts: dict[str, Any] = {part: {} for part in PARTS}
  for kernel, n in row.kernels.items():
    is_large = kernel.kind == "matmul" and kernel.num_bytes > 2 * gpu.REDUCED
    part = "matmul" if is_large else "attention" if kernel.kind == "attention" else "rest"
    parts[part][kernel] = n
  return [(parts[part], us * profiled[part] / profiled.total()) for part in PARTS]


def fitted(rows: Sequence[Row]) -> KernelTimes:
  """Return the constants with the least squared error, relative to the time of each row.

  Rows of the part `reduced` are left out, and so are predictions.
  """
  factors, times = [], []
  for row in (each for each in rows if each.line["part"] != "reduced"):
    for kernels, us in observations(row):
      weight = 1e-3 / row.line["round_ms"]
      factors.append(weight * np.array(work_of(kernels)))
      times.append(weight * us)
  solution = np.linalg.lstsq(np.array(factors), np.array(times))[0]
  per_byte, per_transposed, *others = map(float, solution)
  return KernelTimes(1e-3 / per_byte / GB_PER_S, per_transposed / per_byte, *others)


def error_of(row: Row, times: KernelTimes = GPU_TIMES) -> float:
  """Return predicted / measured time - 1."""
  return times.us(work_of(row.kernels), GB_PER_S) / 1e3 / row.line["round_ms"] - 1


def gpu_fit_table(measured: Sequence[Line]) -> Table:
  """Return a table of predicted and measured times, and of what each row says on the constants."""
  rows, cells = rows_of(measured), []
  for i, row in enumerate(rows):
    line, others = row.line, fitted([*rows[:i], *rows[i + 1 :]])
    error, left_out = error_of(row), error_of(row, others)
    shifts = [100 * (x / y - 1) for x, y in zip(others, GPU_TIMES)]
    cells.append(
      (
        name_of(line),
        f"{line['batch_size']}",
        f"{line['temperature']:g}",
        programs_of(line),
        f"{sum(row.kernels.values()):.0f}",
        f"{line['round_ms']:.2f}",
        f"{(1 + error) * line['round_ms']:.2f}",
        f"{100 * error:+.1f}%",
        f"{100 * left_out:+.1f}%",
        *(f"{shift:+.1f}%" for shift in shifts),
      )
    )
  largest = [max(abs(float(row[i].rstrip("%"))) for row in cells) for i in (7, 8)]
  notes = (
    f"Bandwidth: {GPU_TIMES.share:.3f} of {GB_PER_S:g} GB/s. Large matmuls take "
    f"{100 * GPU_TIMES.transposed:.0f}% longer per byte if the matrix is transposed. Each "
    f"kernel adds {GPU_TIMES.fixed_us:g} us, and one of attention "
    f"{GPU_TIMES.query_us:g} us more for each query of each head.",
    f"Largest errors: {largest[0]:.1f}% with all rows, and {largest[1]:.1f}% left out. left out: "
    "error if the constants are fitted to the other rows; the last columns: how much they then "
    "change. The two rows of reduced are in no fit.",
    f"kernels of: before, commit {BEFORE}; gpu, commit 2f29bccccd; xla and reduced, the same with "
    "kernels='xla' and with REDUCED = 20M. Large matrices are transposed in gpu and reduced only. "
    "Rows with other flags are left out.",
  )
  columns = "program", "batch", "temperature", "kernels of", "kernels", "measured ms"
  errors = "predicted ms", "error", "left out"
  constants = "share", "transposed", "fixed", "query"
  return Table("Fitted and measured times", (*columns, *errors, *constants), tuple(cells), notes)


def gpu_profile_table(measured: Sequence[Line]) -> Table:
  """Return a table of the parts of profiled programs: measured and predicted."""
  cells = []
  for row in rows_of(measured):
    if len(found := observations(row)) == len(PARTS):
      times = [(us, GPU_TIMES.us(work_of(kernels), GB_PER_S)) for kernels, us in found]
      name = f"{name_of(row.line)}, {programs_of(row.line)}"
      temperature = f"{row.line['temperature']:g}"
      cells.append((name, temperature, *(f"{us:.0f}" for both in times for us in both)))
  columns = (f"{part} {of}" for part in PARTS for of in ("us", "predicted"))
  note = (
    "Measured: shares of the profile times the time without the profiler, which adds 3%. matmul: "
    "the 145 large ones of a pass, which are Triton kernels; reductions count as the rest."
  )
  columns = "program", "temperature", *columns
  return Table("Parts of measured programs", columns, tuple(cells), (note,))
