"""Print one of the paper's tables with our records beside it.

  python scripts/tabulate.py --table 2 results.jsonl [more.jsonl ...]

Table 1 is computed and takes no records.
"""

import argparse
import pathlib

from specdec_jax.errors import InputError
from specdec_jax.records import read
from specdec_jax.reporting.formats import render
from specdec_jax.reporting.paper import load_table
from specdec_jax.reporting.tables import paper_table

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
  parser.error = lambda message: parser.exit(2, f"error: {message}.\n")
  parser.add_argument("results", nargs="*", help="files of records; later ones win")
  parser.add_argument("--table", type=int, required=True, help="1 to 5")
  parser.add_argument(
    "--format", default="terminal", help="terminal (default), markdown, csv or latex"
  )
  parser.add_argument("--output", help="a file; standard output unless told")
  parser.add_argument(
    "--paper_task", default="EnDe", help="what stands beside our task: EnDe, CNNDM"
  )
  parser.add_argument(
    "--paper_draft", help="what stands beside a draft that the paper lacks; T5-small unless told"
  )
  parser.add_argument(
    "--paper_target",
    help="m_p of Table 3; unless told 'T5-XXL (PAPER_TASK)', or of the family that all records are",
  )
  args = parser.parse_args()
  try:
    paper_rows = load_table(args.table, CONFIGS)
    if args.table != 1 and not args.results:
      raise InputError(f"Table {args.table} is of records; name a results.jsonl.")
    records = [record for path in args.results for record in read(path)]
    choice = args.paper_task, args.paper_draft, args.paper_target
    text = render(paper_table(args.table, records, paper_rows, *choice), args.format)
    if args.output:
      pathlib.Path(args.output).write_text(text, encoding="utf-8")
    else:
      print(text, end="")
  except InputError as error:
    parser.exit(2, f"error: {error}\n")
  except OSError as error:
    parser.exit(2, f"error: cannot use '{error.filename}': {error.strerror}.\n")


if __name__ == "__main__":
  main()
