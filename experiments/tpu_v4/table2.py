"""Predict the paper's Table 2 with the compiler for TPU v4: c, v(gamma) and the speedups.

  python -m experiments.tpu_v4.table2 table2.jsonl --format markdown

Targets and drafts have the paper's sizes: T5 1.1 in bfloat16 on one chip, one row at a time. No
program is run, and only alpha and gamma are taken from the paper.
"""

import argparse
import importlib.metadata
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from experiments.lib import script
from experiments.lib.formats import render
from experiments.paper.paper import PaperRow, load_table
from experiments.tpu_v4 import compile as tpu_compile
from experiments.tpu_v4.examine import examine
from specdec_jax import theory
from specdec_jax.core.sampling import Sampling
from specdec_jax.measure.machine import commit
from specdec_jax.measure.tables import Table
from specdec_jax.models.layout import Layout
from specdec_jax.models.sizes import t5_config

# The paper does not give lengths. T5 processes the first 512 pieces of an article, and 128 pieces
# are enough for a long sentence.
SOURCE_TOKENS = {"EnDe": 128, "CNNDM": 512}
MAX_NEW_TOKENS = 128
TOPOLOGY = "v4:1x1x1"

# Columns of a row that each program depends on. All programs depend on gamma, because the cache has
# a slot for each draft token.
DEPENDS_ON = {
  "draft step": ("task", "gamma", "temperature", "m_q"),
  "decode step": ("task", "gamma"),
  "verify": ("task", "gamma"),
}

Compiled = dict[str, Any]  # a line of the file of `compile_missing`

NOTES = (
  "T5 1.1 XXL with each draft, bfloat16, batch 1, one TPU v4 chip, "
  f"{SOURCE_TOKENS['EnDe']} source tokens (EnDe) or {SOURCE_TOKENS['CNNDM']} (CNN/DM), "
  f"{MAX_NEW_TOKENS} new tokens. The paper does not give these lengths.",
  "alpha and gamma are the paper's, as are its c (profiler traces), EXP (Theorem 8 with v = 1) and "
  "EMP (measured, relative to T5X). Everything to the right of them is computed from compiled "
  "programs.",
  "c: a draft step / a decode step. v: a target pass over gamma + 1 tokens / a decode step.",
  "Theorem 8: the expected speed, E[tokens] / (gamma c + v), at the paper's alpha.",
  "of bytes: bytes read from and written to HBM, as the compiler counts them. of seconds: the "
  "compiler's own time estimate for the same programs.",
)


def compile_missing(rows: Sequence[PaperRow], path: pathlib.Path) -> list[Compiled]:
  """Compile the programs that `rows` need, and return the properties of all compiled programs.

  Only programs that the file `path` lacks are compiled. Their properties are appended to it, one
  JSON object per line, so an interrupted run resumes. All programs of Table 2 together take half an
  hour on two busy cores.

  Args:
    rows: rows of the paper's Table 2, with task, m_q, temperature and gamma.
    path: file of compiled programs.
  """
  text = path.read_text() if path.exists() else ""
  compiled = [json.loads(line) for line in text.splitlines()]
  done = {_key(line["program"], line) for line in compiled}
  for name in DEPENDS_ON:
    for row in rows:
      if _key(name, row) in done:
        continue
      _, devices = tpu_compile.described(TOPOLOGY)
      settings = tpu_compile.CompileSettings(
        gamma=int(row["gamma"]),
        source_tokens=SOURCE_TOKENS[row["task"]],
        max_new_tokens=MAX_NEW_TOKENS,
        sampling=Sampling(row["temperature"]),
      )
      layout = Layout(dtype=jnp.bfloat16)
      programs = tpu_compile.programs(
        t5_config("xxl", layout=layout),
        t5_config(row["m_q"].removeprefix("T5-"), layout=layout),
        devices,
        settings,
      )
      started = time.perf_counter()
      program = programs[name]().compile(compiler_options=tpu_compile.HBM_ONLY)
      line = {
        "program": name,
        **{field: row[field] for field in DEPENDS_ON[name]},
        **examine(program)._asdict(),
        "compile_seconds": round(time.perf_counter() - started, 1),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
        **{name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
      }
      with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
      compiled.append(line)
      done.add(_key(name, row))
  return compiled


def predicted(
  rows: Sequence[PaperRow], compiled: Sequence[Compiled], unit: str
) -> list[dict[str, Any]]:
  """Return each row with the c and v of its compiled programs, and the speedup that they predict.

  Args:
    rows: rows of the paper's Table 2, which contain alpha.
    compiled: result of `compile_missing` for these rows.
    unit: unit of the costs: 'accessed' for bytes, or 'optimal_seconds'.
  """
  cost_of = {_key(line["program"], line): line[unit] for line in compiled}
  predictions = []
  for row in rows:
    draft, step, verify = (cost_of[_key(name, row)] for name in DEPENDS_ON)
    c, v = draft / step, verify / step
    speed = float(theory.walltime_improvement(row["alpha"], int(row["gamma"]), c, v))
    predictions.append({**row, "c": c, "v": v, "speed": speed})
  return predictions


def table(rows: Sequence[PaperRow], compiled: Sequence[Compiled]) -> Table:
  """Return a table with the compiler's predictions of Table 2 next to the paper's values.

  Args:
    rows: rows of the paper's Table 4: the settings of Table 2, with the columns c, EXP and EMP.
    compiled: result of `compile_missing` for these rows.
  """
  columns = "task|draft|temp|gamma|alpha|paper c|paper EXP|paper EMP"
  for unit in ("bytes", "seconds"):
    columns += f"|c of {unit}|v of {unit}|Theorem 8 of {unit}"
  cells = []
  by_bytes = predicted(rows, compiled, "accessed")
  by_seconds = predicted(rows, compiled, "optimal_seconds")
  for row, *predictions in zip(rows, by_bytes, by_seconds):
    line = f"{row['task']}|{row['m_q']}|{row['temperature']:g}|{int(row['gamma'])}"
    line += f"|{row['alpha']:.2f}|{row['c']:.2f}|{row['exp']:.1f}|{row['emp']:.1f}"
    for p in predictions:
      line += f"|{p['c']:.3f}|{p['v']:.3f}|{p['speed']:.2f}"
    cells.append(tuple(line.split("|")))
  return Table("Table 2 by the compiler for TPU v4", tuple(columns.split("|")), tuple(cells), NOTES)


def _key(program: str, row: Mapping[str, Any]) -> tuple:
  return program, *(row[field] for field in DEPENDS_ON[program])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("compiled", type=pathlib.Path, help="file for the compiled programs")
  parser.add_argument("--format", default="terminal", help="terminal (default), markdown or csv")
  args = parser.parse_args()
  rows = load_table(4)
  print(render(table(rows, compile_missing(rows, args.compiled)), args.format), end="")


if __name__ == "__main__":
  script.run(main)
