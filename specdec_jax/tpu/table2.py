"""The paper's Table 2 by the compiler for TPU v4: c, v(gamma) and the speedups they predict.

Targets and drafts are of the paper's sizes, T5 1.1 in bfloat16 on one chip, one row at a time.
Nothing is run: only alpha is the paper's.
"""

import importlib.metadata
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from specdec_jax.core import theory
from specdec_jax.core.sampling import Sampling
from specdec_jax.errors import InputError
from specdec_jax.machine import commit
from specdec_jax.models.config import t5_config
from specdec_jax.reporting.tables import Table
from specdec_jax.tpu import compile as tpu_compile
from specdec_jax.tpu.examine import examine

# The paper does not say how long its texts are: T5's own 512 pieces of an article, and room for a
# long sentence.
SOURCE_TOKENS = {"EnDe": 128, "CNNDM": 512}
MAX_NEW_TOKENS = 128
TOPOLOGY = "v4:1x1x1"

# What of a row each program depends on: slots of a cache count with gamma.
DEPENDS_ON = {
  "draft step": ("task", "gamma", "temperature", "m_q"),
  "decode step": ("task", "gamma"),
  "verify": ("task", "gamma"),
}

Row = Mapping[str, Any]  # of the paper's tables, as `reporting.paper.load_table` gives them
Compiled = dict[str, Any]  # a line of the file

NOTES = (
  "T5 1.1 XXL with each draft, bfloat16, batch 1, one TPU v4 chip, "
  f"{SOURCE_TOKENS['EnDe']} source tokens (EnDe) or {SOURCE_TOKENS['CNNDM']} (CNN/DM), "
  f"{MAX_NEW_TOKENS} new ones. The paper does not say how long its texts are.",
  "alpha and gamma are the paper's, as are its c (profiler traces), EXP (Theorem 8 with v = 1) and "
  "EMP (measured, over T5X); everything right of them is computed from compiled programs.",
  "c: a draft step over a decode step; v: a pass over gamma + 1 tokens over one; speed: "
  "E[tokens] / (gamma c + v), E[tokens] of Equation 1. Of bytes: read from HBM and written there, "
  "as the compiler counts them; of seconds: its own estimate of the same programs.",
)


def compile_missing(rows: Sequence[Row], path: pathlib.Path) -> list[Compiled]:
  """What the compiler says of every program behind `rows`: what `path` has, and the rest.

  A program that is not in the file is compiled and added to it, one JSON object a line; one that
  is stopped and started again goes on. All together take half an hour on two busy cores.

  Args:
    rows: of the paper's Table 2: task, m_q, temperature, gamma.
    path: of the file.

  Raises:
    InputError: libtpu, the compiler, is not installed, or the file has lines of another kind.
  """
  try:
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {_key(line["program"], line) for line in found}
  except (ValueError, KeyError, TypeError) as error:
    raise InputError(
      f"{path} has lines that are no compiled programs ({error!r}); delete them, or name another "
      "file."
    ) from None
  for name in DEPENDS_ON:
    for row in rows:
      if _key(name, row) in done:
        continue
      _, devices = tpu_compile.described(TOPOLOGY)
      programs = tpu_compile.programs(
        t5_config("xxl", dtype=jnp.bfloat16),
        t5_config(row["m_q"].removeprefix("T5-"), dtype=jnp.bfloat16),
        devices,
        gamma=int(row["gamma"]),
        source_tokens=SOURCE_TOKENS[row["task"]],
        max_new_tokens=MAX_NEW_TOKENS,
        sampling=Sampling(row["temperature"]),
      )
      since = time.perf_counter()
      program = programs[name]().compile(compiler_options=tpu_compile.HBM_ONLY)
      line = {
        "program": name,
        **{field: row[field] for field in DEPENDS_ON[name]},
        **examine(program)._asdict(),
        "compile_seconds": round(time.perf_counter() - since, 1),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
        **{name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
      }
      with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
      found.append(line)
      done.add(_key(name, row))
  return found


def predicted(rows: Sequence[Row], found: Sequence[Compiled], unit: str) -> list[dict[str, Any]]:
  """Each row with the c and v that were compiled, and the speed that they predict.

  Args:
    rows: of the paper's Table 2, which has alpha.
    found: what `compile_missing` gave of them.
    unit: "accessed", by bytes, or "optimal_seconds".
  """
  by_key = {_key(line["program"], line): line[unit] for line in found}
  costs = []
  for row in rows:
    draft, step, verify = (by_key[_key(name, row)] for name in DEPENDS_ON)
    c, v = draft / step, verify / step
    speed = float(theory.walltime_improvement(row["alpha"], int(row["gamma"]), c, v))
    costs.append({**row, "c": c, "v": v, "speed": speed})
  return costs


def table(rows: Sequence[Row], found: Sequence[Compiled]) -> Table:
  """The twelve rows with what was compiled beside what the paper has.

  Args:
    rows: of the paper's Table 4, which has Table 2's and its c, EXP and EMP.
    found: what `compile_missing` gave of them.
  """
  columns = "task|draft|temp|gamma|alpha|paper c|paper EXP|paper EMP"
  for unit in ("bytes", "seconds"):
    columns += f"|c of {unit}|v of {unit}|speed of {unit}"
  cells = []
  both = (predicted(rows, found, unit) for unit in ("accessed", "optimal_seconds"))
  for row, *costs in zip(rows, *both):
    line = f"{row['task']}|{row['m_q']}|{row['temperature']:g}|{int(row['gamma'])}"
    line += f"|{row['alpha']:.2f}|{row['c']:.2f}|{row['exp']:.1f}|{row['emp']:.1f}"
    line += "".join(f"|{of['c']:.3f}|{of['v']:.3f}|{of['speed']:.2f}" for of in costs)
    cells.append(tuple(line.split("|")))
  return Table("Table 2 by the compiler for TPU v4", tuple(columns.split("|")), tuple(cells), NOTES)


def _key(program: str, row: Mapping[str, Any]) -> tuple:
  return program, *(row[field] for field in DEPENDS_ON[program])
