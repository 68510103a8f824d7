"""Formatting of a `tables.Table` for a terminal, and as Markdown, CSV or LaTeX."""

import csv
import io
import re
import textwrap

import rich.table
from rich import box
from rich.console import Console
from rich.text import Text

from specdec_jax.errors import InputError
from specdec_jax.reporting.tables import Table, legend_lines

_WIDTH = 100  # characters per line of notes


def render(table: Table, fmt: str) -> str:
  """Format a table. The text ends in a newline.

  Args:
    table: table to format.
    fmt: 'terminal', 'markdown', 'csv' or 'latex'. LaTeX is a float with caption and label, and
      needs the package booktabs. CSV has only headings and cells; the other formats also have the
      title, the notes and the legend.

  Raises:
    InputError: there is no such format.
  """
  if fmt not in _WRITERS:
    raise InputError(f"There is no format {fmt!r}; choose one of {', '.join(_WRITERS)}.")
  return _WRITERS[fmt](table)


def _terminal(table: Table) -> str:
  grid = rich.table.Table(title=Text(table.title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
  for heading, right in zip(table.columns, _right_aligned(table)):
    # One word per line, because headings are longer than the cells below them.
    grid.add_column(
      Text(heading.replace(" ", "\n")), justify="right" if right else "left", no_wrap=True
    )
  for row in table.rows:
    grid.add_row(*map(Text, row))
  # A terminal may wrap long lines, but rich must not truncate a cell.
  out = io.StringIO()
  Console(file=out, width=10_000).print(grid)
  lines = [line.rstrip() for line in out.getvalue().splitlines()]
  footer = [*legend_lines(table.legend), *table.notes]
  notes = [textwrap.fill(note, _WIDTH, subsequent_indent="  ") for note in footer]
  return "\n".join([*lines, *notes]) + "\n"


def _markdown(table: Table) -> str:
  def line(cells):
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

  rules = ("---:" if right else "---" for right in _right_aligned(table))
  lines = [f"**{table.title}**", "", line(table.columns), line(rules), *map(line, table.rows)]
  footer = [*legend_lines(table.legend), *table.notes]
  return "\n".join([*lines, "", *(f"- {note}" for note in footer)]) + "\n"


def _csv(table: Table) -> str:
  out = io.StringIO()
  csv.writer(out, lineterminator="\n").writerows([table.columns, *table.rows])
  return out.getvalue()


_LATEX = str.maketrans(
  {
    **{char: rf"\{char}" for char in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
  }
)


def _latex(table: Table) -> str:
  def line(cells):
    return " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\"

  columns = "".join("r" if right else "l" for right in _right_aligned(table))
  label = re.sub(r"\W+", "-", table.title.casefold()).strip("-")
  return "\n".join(
    [
      r"\begin{table}",
      r"\centering",
      rf"\caption{{{table.title.translate(_LATEX)}}}",
      rf"\label{{tab:{label}}}",
      rf"\begin{{tabular}}{{{columns}}}",
      r"\toprule",
      line(table.columns),
      r"\midrule",
      *map(line, table.rows),
      r"\bottomrule",
      r"\end{tabular}",
      *(f"% {note}" for note in (*legend_lines(table.legend), *table.notes)),
      r"\end{table}",
      "",
    ]
  )


_WRITERS = {"terminal": _terminal, "markdown": _markdown, "csv": _csv, "latex": _latex}


def _right_aligned(table: Table) -> list[bool]:
  """Return for each column whether all its cells are numbers or missing."""
  columns = zip(*table.rows) if table.rows else [()] * len(table.columns)
  return [all(cell[:1] in "+-0123456789" for cell in column) for column in columns]
