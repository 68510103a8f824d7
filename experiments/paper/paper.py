"""The paper's tables, as stored in `configs`."""

import csv
import pathlib
from collections.abc import Mapping
from typing import Any

PaperRow = Mapping[str, Any]

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
