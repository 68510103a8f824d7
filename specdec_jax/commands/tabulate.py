"""Any table by its name: the paper's with our records in them, records as they are, the status.

The paper's tables and our records are those of the checkout that this package lies in.
"""

import json
import pathlib
from collections.abc import Sequence

from specdec_jax.errors import InputError
from specdec_jax.records import read
from specdec_jax.reporting.beams import beams_table
from specdec_jax.reporting.drafts import drafts_table
from specdec_jax.reporting.lengths import lengths_table
from specdec_jax.reporting.pages import measured_table
from specdec_jax.reporting.paper import load_table
from specdec_jax.reporting.runs import (
  acceptance_table,
  execution_table,
  online_table,
  products_table,
  training_table,
)
from specdec_jax.reporting.status import (
  COMPILED_TABLE,
  RECORDS,
  claims,
  status_counts,
  status_table,
)
from specdec_jax.reporting.tables import Table, paper_table

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS, EXPERIMENTS = CHECKOUT / "configs", CHECKOUT / "experiments"


def named_table(name: str, results: Sequence[str | pathlib.Path]) -> Table:
  """A table of the paper's by its number, 'measured', 'lengths', 'acceptance', 'online', 'drafts',
  'beams', 'status', 'status-counts', 'tree-speeds', 'execution', 'products' or 'training'.

  Args:
    name: of the table.
    results: files of records; later ones win. None for Table 1 and the status; for tree-speeds
      the reports of a chain and of a tree (`scripts/compile_tpu.py`); for training the
      `metrics.jsonl` of trainings, each in a file called as its row is to be.

  Raises:
    InputError: there is no such table, or no record.
  """
  if name in ("status", "status-counts"):
    from specdec_jax.tpu.table2 import predicted  # loads jax

    paper = {number: load_table(number, CONFIGS) for number in range(1, 6)}
    kept = {file: read(EXPERIMENTS / file) for file in RECORDS}
    lines = (EXPERIMENTS / COMPILED_TABLE).read_text().splitlines()
    of_each = claims(paper, kept, predicted(paper[2], [*map(json.loads, lines)], "accessed"))
    return status_table(of_each) if name == "status" else status_counts(of_each)
  if name == "tree-speeds":
    from specdec_jax.tpu.tree_speeds import tree_speeds_table  # loads jax

    of_chain, of_tree = (json.loads(pathlib.Path(path).read_text()) for path in results)
    return tree_speeds_table(of_chain, of_tree)
  if name in (of_lines := {"execution": execution_table, "products": products_table}):
    (path,) = results
    return of_lines[name](_lines(path))
  if name == "training":
    return training_table({pathlib.Path(path).stem: _lines(path) for path in results})
  of_records = {
    "measured": measured_table,
    "lengths": lengths_table,
    "acceptance": acceptance_table,
    "online": online_table,
    "drafts": drafts_table,
    "beams": beams_table,
  }
  if name not in ("1", "2", "3", "4", "5", *of_records):
    known = "1 to 5, 'measured', 'lengths', 'acceptance', 'online', 'drafts', 'beams' and 'status'"
    raise InputError(f"There is no table {name!r}; there are {known}.")
  records = [record for path in results for record in read(path)]
  if name != "1" and not records:
    raise InputError(f"Table {name} is of records; name a results.jsonl.")
  if name in of_records:
    return of_records[name](records)
  return paper_table(int(name), records, load_table(int(name), CONFIGS))


def _lines(path: str | pathlib.Path) -> list[dict]:
  return [*map(json.loads, pathlib.Path(path).read_text().splitlines())]
