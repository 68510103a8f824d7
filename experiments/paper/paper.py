"""The paper's tables, as stored in `configs`."""

import csv
import pathlib

from specdec_jax.errors import InputError

_TEXT_COLUMNS = ("task", "m_p", "m_q")


def load_table(
  number: int, folder: str | pathlib.Path = "configs"
) -> list[dict[str, str | float | None]]:
  """Return the rows of the paper's Table `number` (1 to 5), each as a dict of values by column.

  The table is read from a CSV file in `folder`. Cells that the paper omits are None.

  Raises:
    InputError: there is no such table or file, or a numeric cell is not a number.
  """
  if number not in range(1, 6):
    raise InputError(f"Table {number!r} is not in the paper; it has Tables 1 to 5.")
  path = pathlib.Path(folder, f"table{number}.csv")
  if not path.is_file():
    raise InputError(f"{path} is not a file; give the folder of the paper's tables, configs.")
  with path.open(newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
  return [{name: _value(path, name, cell) for name, cell in row.items()} for row in rows]


def _value(path: pathlib.Path, name: str, cell: str) -> str | float | None:
  if name in _TEXT_COLUMNS or not cell:
    return cell or None
  try:
    return float(cell)
  except ValueError:
    raise InputError(f"{path}: {name} is {cell!r}; it must be a number.") from None
