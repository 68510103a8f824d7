"""Print one of the paper's tables together with our records.

  python scripts/tabulate.py --table 2 results.jsonl [more.jsonl ...]

Table 1 is computed and takes no records. `--table measured` shows any records of measured speeds.
`--table status` shows the reproduction status of the numbers of the paper's tables, from the
`experiments` of this clone.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # for `experiments`

from experiments.lib import script
from experiments.lib.formats import render
from experiments.lib.tables import LINES, PATHS, RECORDS, named_table
from specdec_jax.core.atomic_files import atomic_write


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "results", nargs="*", help="files of records; for equal settings the last record is used"
  )
  names = ["1", "2", "3", "4", "5", *RECORDS, *LINES, *PATHS]
  parser.add_argument("--table", required=True, choices=names)
  parser.add_argument(
    "--format", default="terminal", help="terminal (default), markdown, csv or latex"
  )
  parser.add_argument("--output", help="output file; defaults to standard output")
  args = parser.parse_args()
  text = render(named_table(args.table, args.results), args.format)
  if args.output:
    with atomic_write(args.output) as file:
      file.write(text)
  else:
    print(text, end="")


if __name__ == "__main__":
  script.run(main)
