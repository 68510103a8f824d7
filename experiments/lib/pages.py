"""Tables in pages, which `scripts/quote.py` writes from the records that each page names.

A page contains blocks such as

    <!-- table: 4 experiments/table4/results.jsonl -->
    ...
    <!-- end of table -->

The text between the two comments is the named table of the named records. It is never edited by
hand.
"""

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Iterator

from experiments.lib.formats import render
from experiments.lib.tables import named_table

ROOT = pathlib.Path(__file__).resolve().parents[2]
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
