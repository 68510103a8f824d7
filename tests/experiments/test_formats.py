"""Test that tables have the same cells in all formats."""

import csv
import io

from test_record_tables import TABLE

from experiments.lib.formats import render


def test_csv_has_headings_and_cells():
  assert list(csv.reader(io.StringIO(render(TABLE, "csv")))) == [
    list(row) for row in (TABLE.columns, *TABLE.rows)
  ]


def test_markdown_has_the_same_number_of_columns_in_every_line():
  text = render(TABLE, "markdown")
  lines = [line for line in text.splitlines() if line.startswith("|")]
  assert len(lines) == 2 + len(TABLE.rows)
  assert {line.replace(r"\|", "").count("|") for line in lines} == {len(TABLE.columns) + 1}
  assert "A title" in text and "- A note." in text


def test_latex_has_one_line_per_row_and_escapes():
  text = render(TABLE, "latex")
  lines = [line for line in text.splitlines() if line.endswith(r"\\")]
  assert len(lines) == 1 + len(TABLE.rows)
  assert {line.replace(r"\&", "").count("&") for line in lines} == {len(TABLE.columns) - 1}
  assert r"a\_b \& 100\% \{x\}" in text and r"back\textbackslash slash" in text
  assert r"\begin{tabular}{lrr}" in text and r"\caption{A title}" in text
  assert [text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
