"""Tables by name: those of the paper, of a study, and of any records."""

import importlib
import inspect
import pathlib
from collections.abc import Iterable, Sequence

from experiments.lib.records import lines, measured_with
from experiments.paper.paper import load_table
from experiments.paper.paper_tables import paper_table
from specdec_jax import registry
from specdec_jax.errors import InputError
from specdec_jax.measure.records import Record, read
from specdec_jax.measure.tables import Table, number_text, speed_table

# Name of a table -> module in `experiments` with its function, as in `lengths_table`. Functions of
# these tables take records,
RECORDS = {
  "measured": "lib.tables",
  "lengths": "trees.trees",
  "acceptance": "table3.acceptance",
  "online": "learned_drafts.online",
  "reproduced": "paper.reproduce",
  "drafts": "drafts.drafts",
  "sizes": "sizes.sizes",
  "code": "model_free_drafts.given_outputs",
  "layers": "methods.search_layers",
  "beams": "beams.beams",
  "throughput": "throughput.throughput",
  "gammas": "throughput.throughput",
  "formats": "peers.compare",
  "cpu-plan": "gpu.plan",
}
# lines of JSON,
LINES = {
  "bild": "methods.bild",
  "execution": "execution.execution",
  "outputs": "exactness.outputs",
  "matmuls": "kernels.matmuls",
  "parity": "generate.compare",
  "calls": "generate.calls",
  "bleu": "multi30k_ende.quantized",
  "processors": "processors.processors",
  "gpu-changes": "gpu.predict",  # compiled programs
  "gpu-parts": "gpu.predict",
  "gpu-drafts": "gpu.predict",
  "gpu-alphas": "gpu.predict",
  "gpu-trees": "gpu.predict",
  "gpu-head-trees": "gpu.predict",
  "gpu-sizes": "gpu.predict",
  "gpu-weights": "gpu.predict",
  "gpu-speed": "gpu.measure",
  "gpu-batches": "gpu.measure",
  "gpu-identity": "gpu.measure",
  "gpu-plan": "gpu.plan",
  "gpu-fit": "gpu.fit",  # measured programs
  "gpu-profile": "gpu.fit",
  "given": "given.given",
  "speech-drafts": "speech.speech",
  "speech-programs": "speech.speech",
  "speech-batches": "speech.batches",
  "speech-compiled": "speech.batches",
}
# paths, or nothing.
PATHS = {
  "tree-speeds": "tpu_v4.tree_speeds",  # a report of `tpu_v4.report` on a chain, and one on a tree
  "dynamic-speeds": "tpu_v4.tree_speeds",  # a file of records, and reports on dynamic trees
  "compiled-pairs": "tpu_v4.examine",  # reports
  "compiled-batches": "tpu_v4.examine",
  "training": "lib.tables",  # copies of `metrics.jsonl`; the name of a copy is the name of its row
  "status": "paper.status",
  "status-counts": "paper.status",
  "draft-names": "lib.tables",
  "drafts-on-the-shelf": "lib.tables",
  "verifier-names": "lib.tables",
}

TRAINING_LEGEND = {
  "minutes": "time of all steps, compilation included",
  "tokens/s": "target tokens per second in the last epoch",
  "loss": "loss on the validation text",
  "acceptance length": "on the validation text at temperature 0, in rounds that begin at every "
  "fourth token",
  "accuracy": "how often the argmax is the target's, on the validation text",
}


def named_table(name: str, paths: Sequence[str | pathlib.Path]) -> Table:
  """Return the table with a given name.

  Args:
    name: '1' to '5' for a table of the paper, or a key of `RECORDS`, `LINES` or `PATHS`.
    paths: input files. If several records have the same setting, a table of the paper shows the
      last one.

  Raises:
    InputError: there is no table of this name, or there are no records.
  """
  if name in ("1", "2", "3", "4", "5"):
    return paper_table(int(name), _records(paths), load_table(int(name)))
  modules = {**RECORDS, **LINES, **PATHS}
  if name not in modules:
    raise InputError(f"There is no table {name!r}; there are 1 to 5, {', '.join(modules)}.")
  module = importlib.import_module(f"experiments.{modules[name]}")
  table = getattr(module, f"{name.replace('-', '_')}_table")
  if name in PATHS:
    return table(*paths)
  rows = _records(paths) if name in RECORDS else [row for path in paths for row in lines(path)]
  if not rows:
    raise InputError(f"Table {name} needs records; name a results.jsonl.")
  return table(rows)


def _records(paths: Sequence[str | pathlib.Path]) -> list[Record]:
  return [record for path in paths for record in read(path)]


def measured_table(records: Sequence[Record]) -> Table:
  """Return a table of predicted and measured speedups with one row per record."""
  return speed_table(records, [measured_with(records)])


def draft_names_table() -> Table:
  """Return the named drafts that are not on the shelf, with their settings."""
  return Table("Drafts by name", ("draft", "use it when", "settings"), _drafts(False))


def drafts_on_the_shelf_table() -> Table:
  """Return the named drafts on the shelf, with their settings."""
  return Table("Drafts on the shelf", ("draft", "what it does", "settings"), _drafts(True))


def _drafts(on_shelf: bool) -> tuple[tuple[str, ...], ...]:
  rows = []
  for name, entry in registry.DRAFTS.items():
    known = registry.draft_parameters(name, {})
    required = [each for each, x in known.items() if x.default is inspect.Parameter.empty]
    settings = dict.fromkeys([*registry.parameters(entry.path), *required])
    if entry.is_on_shelf == on_shelf:
      rows.append((f"`{name}`", entry.use, _flags(settings, required)))
  return tuple(rows)


def verifier_names_table() -> Table:
  """Return the named verifiers with their settings."""
  rows = []
  for name, entry in registry.VERIFIERS.items():
    path, shelf = f"`{entry.path.rpartition(':')[2]}`", "yes" if entry.is_on_shelf else "no"
    rows.append((f"`{name}`", path, entry.use, shelf, _flags(registry.parameters(entry.path))))
  columns = "verifier", "class", "method", "on the shelf", "settings"
  return Table("Verifiers by name", columns, tuple(rows))


def _flags(settings: Iterable[str], required: Sequence[str] = ()) -> str:
  texts = (f"`{registry.flag_of(each)}`" + " (required)" * (each in required) for each in settings)
  return ", ".join(texts) or "-"


def training_table(*paths: str | pathlib.Path) -> Table:
  """Return a table of times and validation scores of training runs, from their `metrics.jsonl`."""
  runs = {pathlib.Path(path).stem: lines(path) for path in paths}
  cells = tuple(
    (
      name,
      f"{epochs[-1]['step']}",
      f"{sum(line['seconds'] for line in epochs) / 60:.0f}",
      f"{epochs[-1]['tokens_per_s']:.0f}",
      f"{epochs[-1]['valid_loss']:.3f}",
      number_text(epochs[-1].get("valid_acceptance_length"), ".2f"),
      number_text(epochs[-1].get("valid_accuracy"), ".3f"),
    )
    for name, epochs in runs.items()
  )
  columns = "draft", "steps", "minutes", "tokens/s", "loss", "acceptance length", "accuracy"
  return Table("Trainings", columns, cells, (), TRAINING_LEGEND)
