"""The paper's tables, as stored in `configs`."""

import csv
import pathlib
from collections.abc import Mapping
from typing import Any

PaperRow = Mapping[str, Any]

# Start of the names, in records, of models that are declared to be the paper's own.
PAPERS_OWN = "the paper's "

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"


def load_table(number: int) -> list[PaperRow]:
  """Return the rows of the paper's Table `number` (1 to 5), each as a dict of values by column.

  Cells that the paper omits are None.
  """
  with (CONFIGS / f"table{number}.csv").open(newline="", encoding="utf-8") as file:
    return [
      {name: _value(name, cell) for name, cell in row.items()} for row in csv.DictReader(file)
    ]


def _value(name: str, cell: str) -> str | float | None:
  is_text = name in ("task", "m_p", "m_q")
  return (cell if is_text else float(cell)) if cell else None


def target_and_task(row: PaperRow) -> tuple[str, str]:
  """Return the target and the task of a row of Tables 2 to 5.

  Only Table 3 prints targets; the target of the other tables is T5-XXL. Table 5 prints no task; its
  task is EnDe. In Table 3, targets other than T5-XXL have the task '-'.
  """
  target, _, task = row.get("m_p", f"T5-XXL ({row.get('task', 'EnDe')})").partition(" (")
  return (target, task.rstrip(")")) if target == "T5-XXL" else (row["m_p"], "-")
