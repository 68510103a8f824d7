"""Tables in Markdown pages, generated from the records that each table names.

A page contains blocks such as

    <!-- table: 4 experiments/table4/results.jsonl -->
    ...
    <!-- end of table -->

The text between the two comments is the named table of the named records. It is never edited by
hand.
"""

import re
from collections.abc import Callable, Sequence

from specdec_jax.records import Record
from specdec_jax.reporting.speeds import COLUMNS, LEGEND, cell
from specdec_jax.reporting.tables import MISSING, Table, measured_with

_BLOCK = re.compile(r"(<!-- table: ([^\n]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)

# Settings that are part of the title if all records agree in them, and columns otherwise.
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
  "baseline": lambda r: (
    "over our own autoregressive decoding" if r.baseline == "own" else f"over {r.baseline}"
  ),
  "device": lambda r: r.device,
}


def measured_table(records: Sequence[Record]) -> Table:
  """Return a table of predicted and measured speedups with one row per record."""
  settings = {name: [text(r) for r in records] for name, text in _SETTINGS.items()}
  varying = [name for name, values in settings.items() if len({*values}) > 1]
  shared = [values[0] for name, values in settings.items() if name not in varying]
  title = ", ".join(value for value in shared if value != MISSING)
  rows = tuple(
    (*(settings[name][i] for name in varying), *(cell(column, r) for column in COLUMNS.values()))
    for i, r in enumerate(records)
  )
  return Table(title, (*varying, *COLUMNS), rows, (measured_with(records),), LEGEND)


def quoted(page: str, make_table: Callable[[Sequence[str]], str]) -> str:
  """Return the page with each of its tables replaced by `make_table(words of its comment)`."""

  def replace_block(match: re.Match) -> str:
    return f"{match[1]}{make_table(match[2].split())}{match[3]}"

  return _BLOCK.sub(replace_block, page)
