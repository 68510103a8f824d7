"""Regenerate the tables of all pages from the records that each page names.

python scripts/quote.py            # rewrite README.md and experiments/
python scripts/quote.py --check    # list outdated pages without rewriting them

A page contains blocks such as

    <!-- table: 4 experiments/table4/results.jsonl -->
    ...
    <!-- end of table -->

The text between the two comments is the named table of the named records. It is never edited by
hand.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import re
import sys
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # for `experiments`

from experiments.tables import named_table
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.measure.tables import render

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- table: ([^\n]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def pages() -> list[pathlib.Path]:
  """Return the paths of all pages that can contain generated tables."""
  return [ROOT / "README.md", *sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("experiments/**/*.md")])]


def outdated() -> Iterator[tuple[pathlib.Path, str]]:
  """Yield the path of each page with outdated tables, and the text of the page with new tables."""
  for path in pages():
    page = path.read_text(encoding="utf-8")
    current = BLOCK.sub(functools.partial(regenerated, path.parent), page)
    if current != page:
      yield path, current


def regenerated(folder: pathlib.Path, block: re.Match) -> str:
  return block[1] + markdown(folder, block[2]) + block[3]


def markdown(folder: pathlib.Path, words: str) -> str:
  """Format a table for a page in `folder`, with a link to the metrics page as its legend.

  `words` are the name of the table and its files of records.
  """
  name, *files = words.split()
  table = named_table(name, [ROOT / file for file in files])
  if table.legend:
    link = f"[Meaning of the columns]({os.path.relpath(ROOT / 'docs' / 'metrics.md', folder)})."
    table = dataclasses.replace(table, notes=(*table.notes, link), legend={})
  return render(table, "markdown")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--check", action="store_true", help="change nothing; exit with 1 if outdated"
  )
  check, changed = parser.parse_args().check, [*outdated()]
  for path, current in changed:
    print(path.relative_to(ROOT))
    if not check:
      with atomic_write(path) as file:
        file.write(current)
  parser.exit(check and bool(changed))


if __name__ == "__main__":
  main()
