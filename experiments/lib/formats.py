"""Tables as Markdown, CSV and LaTeX."""

import re

from specdec_jax.errors import InputError
from specdec_jax.measure.tables import Table, terminal_text


def render(table: Table, fmt: str) -> str:
  """Format a table. The text ends in a newline.

  Args:
    fmt: 'terminal', 'markdown', 'csv' or 'latex'. LaTeX code is a float with a caption, and has
      notes and legend as comments. CSV has only headings and cells. CSV and LaTeX need pandas.

  Raises:
    InputError: there is no such format, or pandas is not installed.
  """
  formats = {"terminal": terminal_text, "markdown": _markdown, "csv": _csv, "latex": _latex}
  if fmt not in formats:
    raise InputError(f"There is no format {fmt!r}; choose one of {', '.join(formats)}.")
  return formats[fmt](table)


def _markdown(table: Table) -> str:
  def line(cells):
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

  rules = ("---:" if right else "---" for right in table.right_aligned)
  lines = [f"**{table.title}**", "", line(table.columns), line(rules), *map(line, table.rows)]
  return "\n".join([*lines, "", *(f"- {note}" for note in table.footer)]) + "\n"


def _frame(table: Table):
  try:
    import pandas
  except ImportError as error:
    raise InputError(
      f"Tables in this format need pandas ({error}); pip install 'specdec_jax[experiments]'"
    ) from error
  return pandas.DataFrame(table.rows, columns=[*table.columns], dtype=str)


def _csv(table: Table) -> str:
  return _frame(table).to_csv(index=False, lineterminator="\n")


def _latex(table: Table) -> str:
  styled = _frame(table).style.hide(axis="index").format(escape="latex")
  tabular = styled.format_index(escape="latex", axis="columns").to_latex(
    hrules=True,
    caption=re.sub(r"([&%$#_{}])", r"\\\1", table.title),
    position_float="centering",
    column_format="".join("r" if right else "l" for right in table.right_aligned),
  )
  notes = "".join(f"% {note}\n" for note in table.footer)
  return f"% Needs \\usepackage{{booktabs}} and \\usepackage[T1]{{fontenc}}.\n{tabular}{notes}"
