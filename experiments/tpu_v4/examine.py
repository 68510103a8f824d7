"""Report bytes, memory, operations and weight copies of programs compiled for a TPU."""

import json
import pathlib
import re
import time
from typing import Any, NamedTuple

from jax.stages import Compiled

from experiments.tpu_v4.compile import CHIPS, HBM_ONLY, Chip, Programs
from experiments.tpu_v4.hlo import (
  convolutions,
  estimated_cycles,
  executed_collectives,
  matrix_converts,
  weight_copies,
)
from specdec_jax.core.trees import AnyTree
from specdec_jax.measure.tables import MISSING, Table

LOOPS = "speculative loop", "plain loop"

LEGEND = (
  "All numbers are for one chip. No program was run.",
  "accessed: bytes read and written as the compiler counts them, on-chip memory included. A loop "
  "body counts once, so a decoding loop is counted as its start and one round.",
  "HBM: the same for the program compiled to use HBM only; a round includes all draft steps.",
  "of a step: HBM bytes / those of a decode step; for a round, those of an autoregressive step, "
  "which also samples and commits.",
  "HBM ms: time of these bytes at the published {rate:g} GB/s.",
  "collectives: messages between chips as executed; in a loop of known length, times that length.",
)


class Program(NamedTuple):
  """Properties of one compiled program, per chip.

  Attributes:
    arguments: bytes of the arguments, weights included.
    temporaries: bytes of temporary memory.
    peak: bytes of memory in use at the peak.
    accessed: bytes read and written; a loop body counts once.
    operations: arithmetic operations; a loop body counts once.
    optimal_seconds: the compiler's estimate of the time; a loop body counts once. In a program that
      is compiled for HBM only, it is `accessed` divided by a fraction of the chip's bandwidth. In
      other programs it has no meaning if the compiler has no estimate for some instruction; such an
      instruction counts as -1, so the sum may be negative.
    weight_copies: descriptions of copied weights; see `hlo.weight_copies`.
    host_transfers: number of instructions that communicate with the host.
    collectives: number of collective operations in one run; see `hlo.executed_collectives`.
    convolutions: number of instructions for the matrix unit; see `hlo.convolutions`.
    matrix_converts: number of conversions of whole matrices for the vector unit; see
      `hlo.matrix_converts`.
    estimated_cycles: number of cycles of one run by the compiler's own cost model; see
      `hlo.estimated_cycles`.
  """

  arguments: int
  temporaries: int
  peak: int
  accessed: int
  operations: int
  optimal_seconds: float
  weight_copies: list[str]
  host_transfers: int
  collectives: int
  convolutions: int
  matrix_converts: int
  estimated_cycles: int


def examine(compiled: Compiled) -> Program:
  """Return the compiler's report on a compiled program."""
  memory: Any = compiled.memory_analysis()
  cost: Any = compiled.cost_analysis()
  hlo = compiled.as_text() or ""
  return Program(
    arguments=memory.argument_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    peak=memory.peak_memory_in_bytes,
    accessed=round(cost["bytes accessed"]),
    operations=round(cost["flops"]),
    optimal_seconds=cost["optimal_seconds"],
    weight_copies=weight_copies(hlo),
    host_transfers=len(re.findall(r" (infeed|outfeed|send|recv)(-start)?\(", hlo)),
    collectives=executed_collectives(hlo),
    convolutions=convolutions(hlo),
    matrix_converts=matrix_converts(hlo),
    estimated_cycles=estimated_cycles(hlo),
  )


def hbm_bytes(programs: Programs, gamma: int | AnyTree) -> dict[str, int]:
  """Return the bytes that each program except the loops reads from and writes to HBM.

  The programs are compiled to use HBM only. The entry of 'round' includes all draft steps. `gamma`
  is the number of draft tokens per round, or the tree, for which the programs were made.
  """
  compiled = {
    name: lower().compile(compiler_options=HBM_ONLY)
    for name, lower in programs.items()
    if name not in LOOPS
  }
  accessed = {name: examine(program).accessed for name, program in compiled.items()}
  if isinstance(gamma, int) and "draft step" in accessed:
    # A chain is drafted by a first step and a loop of gamma - 1 steps, of which the compiler counts
    # one. A tree is drafted without a loop.
    accessed["round"] += max(0, gamma - 2) * accessed["draft step"]
  return accessed


def over_a_step(accessed: dict[str, int]) -> dict[str, float]:
  """Return the bytes accessed by a round and its parts, relative to autoregressive decoding.

  'round' is relative to 'plain step', which includes sampling and the update of the decoding state.
  The parts are relative to 'decode step', which includes neither. They are 'verify' (a target
  forward pass over all nodes), 'draft step' or 'drafting', and 'commit' (of the accepted path of a
  tree). Parts that were not compiled are omitted. If memory bandwidth alone limits the speed,
  'verify' is the verify cost v and 'draft step' is the cost coefficient c (Definition 7).
  """
  return {
    "round": accessed["round"] / accessed["plain step"],
    **{
      name: accessed[name] / accessed["decode step"]
      for name in ("verify", "draft step", "drafting", "commit")
      if name in accessed
    },
  }


def report(programs: Programs, gamma: int | AnyTree) -> dict[str, Any]:
  """Compile `programs` and return their properties; this takes minutes.

  Returns:
    'programs': for each program, the fields of `Program` and the 'seconds' of compilation.
    'hbm_bytes' and 'over_a_step': results of the functions with these names.
  """
  reports = {}
  for name, lower in programs.items():
    started = time.perf_counter()
    program = examine(lower().compile())
    reports[name] = {**program._asdict(), "seconds": round(time.perf_counter() - started, 1)}
  accessed = hbm_bytes(programs, gamma)
  return {"programs": reports, "hbm_bytes": accessed, "over_a_step": over_a_step(accessed)}


def report_table(report: dict[str, Any], title: str, chip: Chip) -> Table:
  """Return a report as a table; `chip` is the TPU that the programs were compiled for."""
  columns = "program|arguments GB|temporaries GB|peak GB|accessed GB|HBM GB|of a step|HBM ms"
  columns += "|GFLOP|weight copies|collectives|compiled s"
  rows = []
  for name, program in report["programs"].items():
    hbm, ratio = report["hbm_bytes"].get(name), report["over_a_step"].get(name)
    rows.append(
      (
        name,
        *(_giga(program[field]) for field in ("arguments", "temporaries", "peak", "accessed")),
        _giga(hbm) if hbm else MISSING,
        f"{ratio:.3f}" if ratio else MISSING,
        f"{hbm / chip.device.gb_per_s / 1e6:.2f}" if hbm else MISSING,
        f"{program['operations'] / 1e9:.1f}",
        f"{len(program['weight_copies'])}",
        f"{program['collectives']}",
        f"{program['seconds']:.0f}",
      )
    )
  peak = max(program["peak"] for program in report["programs"].values()) / 1e9
  memory = f"At most {peak:.1f} GB of the chip's {chip.device.memory_gb:g} GB are in use."
  legend = (entry.format(rate=chip.device.gb_per_s) for entry in LEGEND)
  return Table(title, tuple(columns.split("|")), tuple(rows), (memory, *legend))


def read_report(path: str) -> dict[str, Any]:
  """Return a report of `experiments.tpu_v4.report` from its file."""
  return json.loads(pathlib.Path(path).read_text())


def compiled_pairs_table(*paths: str) -> Table:
  """Return a table with one row for each file of a report on a pair of models."""
  columns = "target|draft|chips|nodes|arguments GB|peak GB|step HBM GB|verify / step"
  columns += "|draft step / step|round / step|messages of a step, a round|weight copies"
  rows = []
  for report in map(read_report, paths):
    settings, programs, relative = (report[x] for x in ("settings", "programs", "over_a_step"))
    loop = programs.get("speculative loop")
    rows.append(
      (
        f"{settings['version']} {settings['target']}",
        settings["draft"],
        settings["topology"],
        f"{settings['nodes'] or settings['gamma'] + 1}",
        *(_giga(loop[field]) if loop else MISSING for field in ("arguments", "peak")),
        _giga(report["hbm_bytes"]["decode step"]),
        *(f"{relative[name]:.3f}" for name in ("verify", "draft step", "round")),
        ", ".join(f"{programs[name]['collectives']}" for name in ("plain step", "round")),
        f"{sum(len(program['weight_copies']) for program in programs.values())}",
      )
    )
  notes = (
    "All numbers are for one chip. No program was run.",
    "nodes: tokens that the target verifies in a round. arguments, peak: of the speculative loop, "
    "encoders included. HBM, of a step: as in the reports.",
  )
  return Table("Pairs compiled for TPU", tuple(columns.split("|")), tuple(rows), notes)


def compiled_batches_table(*paths: str) -> Table:
  """Return a table with one row for each file of a report on a batch size."""
  columns = "batch|gamma|step HBM GB|round HBM GB|round / step, bytes|step TFLOP|round TFLOP"
  columns += "|round / step, operations|tokens per round to pay"
  rows = []
  for report in map(read_report, paths):
    settings, chip = report["settings"], CHIPS[report["settings"]["topology"].split(":")[0]]
    hbm = [report["hbm_bytes"][name] / 1e9 for name in ("plain step", "round")]
    operations = [report["programs"][name]["operations"] / 1e12 for name in ("plain step", "round")]
    step, round_ = (
      max(gigabytes / chip.device.gb_per_s, tera / chip.device.tflops)
      for gigabytes, tera in zip(hbm, operations)
    )
    rows.append(
      (
        f"{settings['batch_size']}",
        f"{settings['gamma']}",
        *(f"{amount:.2f}" for amount in hbm),
        f"{hbm[1] / hbm[0]:.2f}",
        *(f"{amount:.3f}" for amount in operations),
        f"{operations[1] / operations[0]:.2f}",
        f"{round_ / step:.2f}",
      )
    )
  notes = (
    "All numbers are for one chip. No program was run.",
    "tokens per round to pay: round / step, where the time of each is that of its bytes or that of "
    "its operations at the peak of the chip, whichever is longer.",
  )
  return Table("A round for several batch sizes", tuple(columns.split("|")), tuple(rows), notes)


def _giga(amount: float) -> str:
  return f"{amount / 1e9:.3f}"
