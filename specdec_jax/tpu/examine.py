"""What was compiled for a TPU: bytes, memory, operations, copies of weights; as a report."""

import re
import time
from typing import Any, NamedTuple

from jax.stages import Compiled

from specdec_jax.core.trees import Tree
from specdec_jax.reporting.tables import MISSING, Table
from specdec_jax.tpu.compile import HBM_ONLY, Chip, Programs
from specdec_jax.tpu.hlo import (
  convolutions,
  estimated_cycles,
  executed_collectives,
  matrix_converts,
)
from specdec_jax.tpu.weight_copies import weight_copies

LOOPS = "speculative loop", "plain loop"

LEGEND = (
  "All numbers are of one chip. accessed: bytes read and written as the compiler counts them, in "
  "memory on the chip too, and the body of a loop once, so that of the two loops it is the start "
  "and one round. HBM: the same compiled to use HBM alone; in a round all steps of the draft. of a "
  "step: HBM bytes over a decode step's; a round's over a plain step's, which samples and commits "
  "too. HBM ms: the time that those bytes take at the published {rate:g} GB/s; nothing was run. "
  "collectives: messages between chips as executed, those in a loop of known length times that "
  "length."
)


class Program(NamedTuple):
  """What the compiler says of one program: bytes and operations on each chip.

  Attributes:
    arguments: weights, and what else is passed in.
    temporaries: what it needs besides.
    peak: most memory in use at any time.
    accessed: bytes read and written; the body of a loop counts once.
    operations: arithmetic, likewise.
    optimal_seconds: the compiler's own estimate, likewise. Compiled for HBM alone it is the bytes
      at a share of the chip's bandwidth; else it is negative, without meaning, where an
      instruction has none (-1).
    weight_copies: see the function.
    host_transfers: instructions that talk to the host.
    collectives: messages to other chips as executed: `hlo.executed_collectives`.
    convolutions: instructions for the matrix unit. matrix_converts: conversions of whole matrices
      for the vector unit. estimated_cycles: by the compiler's own cost model, each loop of known
      length as often as it runs. See the functions in `hlo`.
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
  """What there is to know of a compiled program."""
  memory: Any = compiled.memory_analysis()
  cost: Any = compiled.cost_analysis()
  hlo = compiled.as_text() or ""
  count = lambda ops: len(re.findall(rf" ({ops})(-start)?\(", hlo))
  return Program(
    arguments=memory.argument_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    peak=memory.peak_memory_in_bytes,
    accessed=round(cost["bytes accessed"]),
    operations=round(cost["flops"]),
    optimal_seconds=cost["optimal_seconds"],
    weight_copies=weight_copies(hlo),
    host_transfers=count("infeed|outfeed|send|recv"),
    collectives=executed_collectives(hlo),
    convolutions=convolutions(hlo),
    matrix_converts=matrix_converts(hlo),
    estimated_cycles=estimated_cycles(hlo),
  )


def hbm_bytes(programs: Programs, gamma: int | Tree) -> dict[str, int]:
  """What each part of a round reads from HBM and writes there, the round with all of its steps."""
  compiled = {
    name: lower().compile(compiler_options=HBM_ONLY)
    for name, lower in programs.items()
    if name not in LOOPS
  }
  accessed = {name: examine(program).accessed for name, program in compiled.items()}
  if not isinstance(gamma, Tree) and "draft step" in accessed:
    # The draft's gamma guesses are a first call and a loop of gamma - 1 steps; one was counted. A
    # tree is drafted without a loop.
    accessed["round"] += max(0, gamma - 2) * accessed["draft step"]
  return accessed


def over_a_step(accessed: dict[str, int]) -> dict[str, float]:
  """Bytes of a round over those of a plain step, and where there are such programs, of a pass over
  all nodes, of a draft step or all drafting, and of what commits a tree's path, over those of a
  decode step.

  'verify' and 'draft step' are v(gamma) and c (Definition 7) of a machine that waits for memory
  alone.
  """
  return {
    "round": accessed["round"] / accessed["plain step"],
    **{
      name: accessed[name] / accessed["decode step"]
      for name in ("verify", "draft step", "drafting", "commit")
      if name in accessed
    },
  }


def report(programs: Programs, gamma: int | Tree) -> dict[str, Any]:
  """All that the compiler says of `programs`; takes minutes.

  Returns:
    'programs': for each the fields of `Program` and the 'seconds' it took to compile. 'hbm_bytes'
    and 'over_a_step': of the functions.
  """
  found = {}
  for name, lower in programs.items():
    since = time.perf_counter()
    program = examine(lower().compile())
    found[name] = {**program._asdict(), "seconds": round(time.perf_counter() - since, 1)}
  accessed = hbm_bytes(programs, gamma)
  return {"programs": found, "hbm_bytes": accessed, "over_a_step": over_a_step(accessed)}


def report_table(report: dict[str, Any], title: str, chip: Chip) -> Table:
  """A report for people; `chip` is what it was compiled for."""
  columns = "program|arguments GB|temporaries GB|peak GB|accessed GB|HBM GB|of a step|HBM ms"
  columns += "|GFLOP|weight copies|collectives|compiled s"
  giga = lambda amount: f"{amount / 1e9:.3f}"
  rows = []
  for name, program in report["programs"].items():
    hbm, ratio = report["hbm_bytes"].get(name), report["over_a_step"].get(name)
    rows.append(
      (
        name,
        *(giga(program[field]) for field in ("arguments", "temporaries", "peak", "accessed")),
        giga(hbm) if hbm else MISSING,
        f"{ratio:.3f}" if ratio else MISSING,
        f"{hbm / chip.hbm_gb_per_s / 1e6:.2f}" if hbm else MISSING,
        f"{program['operations'] / 1e9:.1f}",
        f"{len(program['weight_copies'])}",
        f"{program['collectives']}",
        f"{program['seconds']:.0f}",
      )
    )
  peak = max(program["peak"] for program in report["programs"].values()) / 1e9
  fits = f"At most {peak:.1f} GB of the chip's {chip.hbm_gb:g} are in use."
  legend = LEGEND.format(rate=chip.hbm_gb_per_s)
  return Table(title, tuple(columns.split("|")), tuple(rows), (fits, legend))
