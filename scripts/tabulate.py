"""Print one of the paper's tables together with our records.

  python scripts/tabulate.py --table 2 results.jsonl [more.jsonl ...]

Table 1 is computed and takes no records. `--table measured` shows any records of measured speeds.
`--table status` shows the reproduction status of each number that the paper prints, from the
`experiments` of this checkout.
"""

import argparse

from experiments.paper.tabulate import named_table
from specdec_jax.atomic_files import atomic_write, require_distinct_files
from specdec_jax.errors import InputError
from specdec_jax.measure.reporting.formats import render


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "results", nargs="*", help="files of records; for equal settings the last record is used"
  )
  parser.add_argument("--table", required=True, help="1 to 5, measured or status")
  parser.add_argument(
    "--format", default="terminal", help="terminal (default), markdown, csv or latex"
  )
  parser.add_argument("--output", help="output file; defaults to standard output")
  args = parser.parse_args()
  try:
    if args.output:
      require_distinct_files(args.output, *args.results)
    text = render(named_table(args.table, args.results), args.format)
    if args.output:
      with atomic_write(args.output) as file:
        file.write(text)
    else:
      print(text, end="")
  except InputError as error:
    parser.exit(2, f"error: {error}\n")
  except OSError as error:
    parser.exit(2, f"error: cannot use '{error.filename}': {error.strerror}.\n")


if __name__ == "__main__":
  main()
