"""Tables by name: the paper's tables, tables of records, the reproduction status, and others.

The paper's values are read from `configs`, in the checkout or in the installed package. The
reproduction status also needs the records in `experiments`, which only a checkout has.
"""

import json
import pathlib
from collections.abc import Sequence

from experiments.paper.other_tables import (
  execution_table,
  matmuls_table,
  parity_table,
  processors_table,
  training_table,
)
from experiments.paper.paper import load_table
from experiments.paper.paper_tables import paper_table
from experiments.paper.status import COMPILED_TABLE, RECORDS, claims, status_counts, status_table
from experiments.record_tables import (
  acceptance_table,
  beams_table,
  drafts_table,
  gammas_table,
  layers_table,
  lengths_table,
  measured_table,
  online_table,
  throughput_table,
)
from specdec_jax import gin_files
from specdec_jax.errors import InputError
from specdec_jax.measure.records import read
from specdec_jax.measure.reporting.tables import Table

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS, EXPERIMENTS = gin_files.HOME / "configs", CHECKOUT / "experiments"

PAPER_TABLES = ("1", "2", "3", "4", "5")
RECORD_TABLES = {
  "measured": measured_table,
  "lengths": lengths_table,
  "acceptance": acceptance_table,
  "online": online_table,
  "drafts": drafts_table,
  "layers": layers_table,
  "beams": beams_table,
  "throughput": throughput_table,
  "gammas": gammas_table,
}
JSON_TABLES = {
  "execution": execution_table,
  "matmuls": matmuls_table,
  "parity": parity_table,
  "processors": processors_table,
}


def named_table(name: str, results: Sequence[str | pathlib.Path]) -> Table:
  """Return the table with a given name.

  Args:
    name: '1' to '5' for a table of the paper; 'measured', 'lengths', 'acceptance', 'online',
      'drafts', 'layers', 'beams', 'throughput' or 'gammas' for a table of records; 'status' or
      'status-counts'; 'tree-speeds', 'dynamic-speeds', 'compiled-pairs' or 'compiled-batches';
      'execution', 'matmuls', 'parity' or 'processors'; or 'training'.
    results: input files. Most tables need files of records; if several records have the same
      setting, a table of the paper shows the last one. Table 1 and the status need no files.
      'tree-speeds' needs two reports of `scripts/compile_tpu.py`: on a chain, then on a tree.
      'dynamic-speeds' needs a file of records, and then reports on dynamic trees. 'compiled-pairs'
      and 'compiled-batches' need reports.
      'execution', 'matmuls', 'parity' and 'processors' need a file of JSON lines. 'training' needs
      copies of `metrics.jsonl`; the name of a copy is the name of its row.

  Raises:
    InputError: there is no table of this name, or there are no records.
  """
  if name in ("status", "status-counts"):
    return _status(counts=name == "status-counts")
  if name == "tree-speeds":
    from experiments.tpu_v4.tree_speeds import tree_speeds_table  # imports jax

    chain, tree = (json.loads(pathlib.Path(path).read_text()) for path in results)
    return tree_speeds_table(chain, tree)
  if name == "dynamic-speeds":
    from experiments.tpu_v4.tree_speeds import dynamic_speeds_table  # imports jax

    path, *paths = results
    return dynamic_speeds_table(
      read(path), [json.loads(pathlib.Path(p).read_text()) for p in paths]
    )
  if name == "compiled-pairs":
    from experiments.tpu_v4.examine import pairs_table  # imports jax

    return pairs_table([json.loads(pathlib.Path(path).read_text()) for path in results])
  if name == "compiled-batches":
    from experiments.tpu_v4.examine import batches_table  # imports jax

    return batches_table([json.loads(pathlib.Path(path).read_text()) for path in results])
  if name in JSON_TABLES:
    (path,) = results
    return JSON_TABLES[name](_read_json_lines(path))
  if name == "training":
    return training_table({pathlib.Path(path).stem: _read_json_lines(path) for path in results})
  if name not in (*PAPER_TABLES, *RECORD_TABLES):
    known = "1 to 5, 'measured', 'lengths', 'acceptance', 'online', 'drafts', 'beams' and 'status'"
    raise InputError(f"There is no table {name!r}; there are {known}.")
  records = [record for path in results for record in read(path)]
  if name != "1" and not records:
    raise InputError(f"Table {name} needs records; name a results.jsonl.")
  if name in RECORD_TABLES:
    return RECORD_TABLES[name](records)
  return paper_table(int(name), records, load_table(int(name), CONFIGS))


def _status(counts: bool) -> Table:
  """Return `status_counts` of the paper's numbers if `counts` is True, otherwise `status_table`."""
  from experiments.tpu_v4.table2 import predicted  # imports jax

  paper = {number: load_table(number, CONFIGS) for number in range(1, 6)}
  records = {file: read(EXPERIMENTS / file) for file in RECORDS}
  compiled = predicted(paper[2], _read_json_lines(EXPERIMENTS / COMPILED_TABLE), "accessed")
  claimed = claims(paper, records, compiled)
  return status_counts(claimed) if counts else status_table(claimed)


def _read_json_lines(path: str | pathlib.Path) -> list[dict]:
  return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
