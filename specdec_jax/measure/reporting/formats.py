"""Formatting of a `tables.Table` for a terminal, and as Markdown, CSV or LaTeX."""

import io
import re
import textwrap
from collections.abc import Mapping

import rich.table
from rich import box
from rich.console import Console
from rich.text import Text

from specdec_jax.errors import InputError
from specdec_jax.measure.reporting.tables import Table, legend_lines

_WIDTH = 100  # characters per line of notes


def render(table: Table, fmt: str) -> str:
  """Format a table. The text ends in a newline.

  Args:
    table: table to format.
    fmt: 'terminal', 'markdown', 'csv' or 'latex'. The LaTeX code is a float with caption and
      label. CSV and LaTeX need pandas. CSV has only headings and cells; the other formats also
      have the title, the notes and the legend (in LaTeX, notes and legend are comments).

  Raises:
    InputError: there is no such format, or pandas is needed and is not installed.
  """
  if fmt not in _WRITERS:
    raise InputError(f"There is no format {fmt!r}; choose one of {', '.join(_WRITERS)}.")
  return _WRITERS[fmt](table)


def _terminal(table: Table) -> str:
  grid = rich.table.Table(title=Text(table.title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
  for heading, right in zip(table.columns, _right_aligned(table)):
    # One word per line, because headings are longer than the cells below them.
    grid.add_column(
      Text(heading.replace("temperature", "temp").replace(" ", "\n")),
      justify="right" if right else "left",
      no_wrap=True,
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


def _frame(table: Table, translation: Mapping[int, str] = {}):
  """Return the cells as a pandas DataFrame, with characters replaced as in `str.translate`.

  Raises:
    InputError: pandas is not installed.
  """
  try:
    import pandas
  except ImportError as error:
    raise InputError(
      f"Tables in this format need pandas ({error}); pip install 'specdec_jax[experiments]'"
    ) from error
  rows = [[cell.translate(translation) for cell in row] for row in table.rows]
  columns = [heading.translate(translation) for heading in table.columns]
  return pandas.DataFrame(rows, columns=columns, dtype=str)


def _csv(table: Table) -> str:
  return _frame(table).to_csv(index=False, lineterminator="\n")


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
  # The caption of a numbered table does not repeat its number, which is the label.
  number = re.match(r"Table \d+(?=: )", table.title)
  caption = table.title[number.end() + 2 :] if number else table.title
  caption = caption[:1].upper() + caption[1:]
  label = re.sub(r"\W+", "-", (number[0] if number else table.columns[0]).casefold()).strip("-")
  tabular = (
    _frame(table, _LATEX)
    .style.hide(axis="index")
    .to_latex(
      hrules=True,
      caption=caption.translate(_LATEX),
      label=f"tab:{label}",
      position_float="centering",
      column_format="".join("r" if right else "l" for right in _right_aligned(table)),
    )
  )
  notes = "".join(f"% {note}\n" for note in (*legend_lines(table.legend), *table.notes))
  return f"% Needs \\usepackage{{booktabs}}.\n{tabular}{notes}"


_WRITERS = {"terminal": _terminal, "markdown": _markdown, "csv": _csv, "latex": _latex}


def _right_aligned(table: Table) -> list[bool]:
  """Return for each column whether all its cells start like numbers.

  A missing value ('-') counts as a number.
  """
  columns = zip(*table.rows) if table.rows else [()] * len(table.columns)
  return [all(cell[:1] in "+-0123456789" for cell in column) for column in columns]
