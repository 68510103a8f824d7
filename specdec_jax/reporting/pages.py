"""Tables in pages of Markdown, made anew from the records that each names.

A page holds

    <!-- table: 4 experiments/table4/results.jsonl -->
    ...
    <!-- end of table -->

and what stands between is the table of that name, of those records: never typed.
"""

import re
from collections.abc import Callable, Sequence

from specdec_jax.records import Record
from specdec_jax.reporting.speeds import COLUMNS, LEGEND, cell
from specdec_jax.reporting.tables import MISSING, Table, measured_with

_BLOCK = re.compile(r"(<!-- table: ([^\n]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)

# What a title says where all records agree in it; where they do not, it is a column.
_SETTINGS: dict[str, Callable[[Record], str]] = {
  "task": lambda r: r.task or MISSING,
  "target": lambda r: r.target if r.task else r.target_label,
  "draft": lambda r: (
    (r.draft if r.task else r.draft_label) + (" (simulated)" if r.acceptance == "simulated" else "")
  ),
  "texts": lambda r: f"{r.num_examples} texts",
  "batch": lambda r: f"batch {r.batch_size}",
  "dtype": lambda r: r.dtype,
  "kernels": lambda r: f"{r.kernels} kernels",
  "over": lambda r: f"over {'our own plain decoding' if r.baseline == 'own' else r.baseline}",
  "device": lambda r: r.device,
}


def measured_table(records: Sequence[Record]) -> Table:
  """Measured settings, a row each: predictions beside what was measured, and when and where."""
  values = {name: [of(r) for r in records] for name, of in _SETTINGS.items()}
  varying = [name for name in _SETTINGS if len({*values[name]}) > 1]
  shared = [values[name][0] for name in _SETTINGS if name not in varying]
  shared = [value for value in shared if value != MISSING]
  rows = tuple(
    (*(values[name][i] for name in varying), *(cell(column, r) for column in COLUMNS.values()))
    for i, r in enumerate(records)
  )
  return Table(", ".join(shared), (*varying, *COLUMNS), rows, (LEGEND, measured_with(records)))


def quoted(page: str, make: Callable[[Sequence[str]], str]) -> str:
  """The page with each of its tables made anew; `make` gets the words of a table's comment."""
  return _BLOCK.sub(lambda found: f"{found[1]}{make(found[2].split())}{found[3]}", page)
