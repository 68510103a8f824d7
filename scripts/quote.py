"""Regenerate the tables of all pages from the records that each page names.

python scripts/quote.py            # rewrite README.md and experiments/
python scripts/quote.py --check    # list outdated pages without rewriting them
"""

import argparse
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence

from experiments.paper.pages import quoted
from experiments.paper.tabulate import CHECKOUT, named_table
from specdec_jax.atomic_files import atomic_write
from specdec_jax.measure.reporting.formats import render

METRICS = CHECKOUT / "docs" / "metrics.md"


def pages() -> list[pathlib.Path]:
  """Return the paths of all pages that can contain generated tables."""
  return [CHECKOUT / "README.md", *sorted(CHECKOUT.glob("experiments/**/*.md"))]


def outdated() -> Iterator[tuple[pathlib.Path, str]]:
  """Yield the path of each page with outdated tables, and the text of the page with new tables."""
  for path in pages():
    page = path.read_text(encoding="utf-8")
    current = quoted(page, functools.partial(_markdown, path.parent))
    if current != page:
      yield path, current


def _markdown(folder: pathlib.Path, words: Sequence[str]) -> str:
  """Format a table for a page in `folder`, with a link to the metrics page as its legend.

  `words` are the name of the table and its files of records.
  """
  name, *files = words
  table = named_table(name, [CHECKOUT / file for file in files])
  if table.legend:
    link = f"[Meaning of the columns]({os.path.relpath(METRICS, folder)})."
    table = dataclasses.replace(table, notes=(*table.notes, link), legend={})
  return render(table, "markdown")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--check", action="store_true", help="change nothing; exit with 1 if outdated"
  )
  check, changed = parser.parse_args().check, [*outdated()]
  for path, current in changed:
    print(path.relative_to(CHECKOUT))
    if not check:
      with atomic_write(path) as file:
        file.write(current)
  parser.exit(check and bool(changed))


if __name__ == "__main__":
  main()
