"""Predict the speedups of the paper's Table 2, with c and v, by compiling for TPU v4.

No TPU is needed:

  python scripts/compile_table2.py table2.jsonl --format markdown

Programs whose results are already in the file are not compiled again. See
experiments/tpu_v4/README.md.
"""

import argparse
import pathlib

from experiments.paper.paper import load_table
from experiments.tpu_v4 import table2 as tpu_table2
from specdec_jax.errors import InputError
from specdec_jax.measure.reporting.formats import render

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("compiled", type=pathlib.Path, help="file for the compiled programs")
  parser.add_argument("--format", default="terminal", help="terminal (default), markdown or csv")
  args = parser.parse_args()
  try:
    rows = load_table(4, ROOT / "configs")
    compiled = tpu_table2.compile_missing(rows, args.compiled)
    print(render(tpu_table2.table(rows, compiled), args.format), end="")
  except InputError as error:
    parser.exit(2, f"error: {error}\n")
  except OSError as error:
    parser.exit(2, f"error: cannot use '{error.filename}': {error.strerror}.\n")


if __name__ == "__main__":
  main()
