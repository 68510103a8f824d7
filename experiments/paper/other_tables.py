"""Tables of training runs, matmuls, logits processors and other measurements made by scripts."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.measure.reporting.tables import Table, number_text

TRAINING_LEGEND = {
  "minutes": "time of all steps, compilation included",
  "tokens/s": "target tokens per second in the last epoch",
  "loss": "loss on the validation text",
  "acceptance length": "on the validation text at temperature 0, in rounds that begin at every "
  "fourth token",
  "accuracy": "how often the argmax is the target's, on the validation text",
}

EXECUTION_LEGEND = {
  "beta": "probability that the guess is accepted",
  "accepted": "share of guesses that were accepted",
  "F, G": "times of the two functions",
  "sequential": "F + G",
  "expected": "beta max(F, G) + (1 - beta) (F + G)",
}

PARITY_LEGEND = {
  "ties": "other texts whose scores differ by less than 1e-4",
  "difference": "largest difference between log-probabilities of tokens, or scores of beams",
}

PROCESSORS_LEGEND = {
  "batch N": "time of a round with the setting / without it",
  "added, ms": "time that the setting adds to a round",
}

MATMULS_LEGEND = {
  "of one row": "time / time of one row",
  "of peak": "operations per second / those of numpy's matmul of two [2048, 2048] matrices",
  "hot": "the same share for a [512, 512] matrix in the cache",
  "XLA, us": "time of XLA's matmul with float32 weights",
}


def execution_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Return a table of the measurements made by `scripts/measure_execution.py`."""
  cells = tuple(
    (
      f"{row['beta']:.2f}",
      f"{row['kept']:.2f}",
      f"{row['f_ms']:g}",
      f"{row['g_ms']:g}",
      f"{row['in_turn_ms']:g}",
      f"{row['expected_ms']:.1f}",
      f"{row['measured_ms']:.1f}",
    )
    for row in rows
  )
  first = rows[0]
  return Table(
    "Stochastic speculative execution, milliseconds",
    ("beta", "accepted", "F", "G", "sequential", "expected", "measured"),
    cells,
    (
      f"Means of {first['trials']} runs per row, {first['processor']}, commit {first['commit']} of "
      f"{str(first['date'])[:10]}.",
    ),
    EXECUTION_LEGEND,
  )


def matmuls_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Return a table of times of matmuls with few rows (`scripts/measure_matmuls.py`)."""
  first = rows[0]
  one_row_us = {row["weights"]: row["us"] for row in rows if row["rows"] == 1}
  cells = tuple(
    (
      row["weights"],
      f"{row['rows']}",
      f"{row['us']:.0f}",
      f"{row['us'] / one_row_us[row['weights']]:.2f}",
      f"{row['gb_per_s']:.0f}",
      f"{row['share_of_peak']:.0%}",
      f"{row['hot_share_of_peak']:.0%}",
      number_text(row["xla_us"], ".0f"),
    )
    for row in rows
  )
  return Table(
    "Matmuls with a [512, 3072] matrix in memory",
    ("weights", "rows", "us", "of one row", "GB/s", "of peak", "hot", "XLA, us"),
    cells,
    (
      f"Medians, {first['processor']}, {first['threads']} threads, commit {first['commit']} of "
      f"{str(first['date'])[:10]}. The peak is {first['peak_gflops']:.0f} billion operations per "
      "second.",
    ),
    MATMULS_LEGEND,
  )


def parity_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Return a table of the comparisons made by `scripts/compare_generate.py`."""

  def draft_tokens(run: Mapping[str, Any]) -> str:
    return f"gamma {run['gamma']}" if "gamma" in run else f"tree of {len(run['tree']) + 1} nodes"

  cells = tuple(
    (
      row["setting"],
      f"{row['beams']}",
      draft_tokens(json.loads(row["run"])),
      f"{row['equal']}",
      f"{row['ties']}",
      f"{row['texts'] - row['equal'] - row['ties']}",
      f"{row['largest_difference']:.1g}",
    )
    for row in rows
  )
  first = rows[0]
  return Table(
    "Outputs compared with transformers' generate",
    ("setting", "beams", "draft tokens", "equal", "ties", "other", "difference"),
    cells,
    (f"{first['texts']} texts per row, batch 8. {_provenance(rows)}",),
    PARITY_LEGEND,
  )


def processors_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Return a table of times of logits processors (`scripts/measure_processors.py`)."""
  sizes = sorted({row["batch_size"] for row in rows})
  by_setting: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
  for row in rows:
    by_setting.setdefault((row["setting"], row["compared_with"]), {})[row["batch_size"]] = row
  cells = tuple(
    (
      *setting,
      *(f"{by_size[size]['ratio']:.3f}" for size in sizes),
      *(f"{by_size[size]['added_ms']:.2f}" for size in sizes),
    )
    for setting, by_size in by_setting.items()
  )
  columns = [f"batch {size}" for size in sizes] + [f"added, ms (batch {size})" for size in sizes]
  first = rows[0]
  return Table(
    "Time of logits processors and filters in a round",
    ("setting", "compared with", *columns),
    cells,
    (
      f"Gamma {first['gamma']}, medians of {first['repeats']} interleaved repeats. "
      f"{_provenance(rows)}",
    ),
    PROCESSORS_LEGEND,
  )


def _provenance(rows: Sequence[Mapping[str, Any]]) -> str:
  first, commits = rows[0], dict.fromkeys(row["commit"] for row in rows)
  name = "commit" if len(commits) == 1 else "commits"
  return f"{first['processor']}, {name} {', '.join(commits)} of {str(first['date'])[:10]}."


def training_table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
  """Return a table of times and validation scores of training runs, from their `metrics.jsonl`."""
  cells = tuple(
    (
      name,
      f"{lines[-1]['step']}",
      f"{sum(line['seconds'] for line in lines) / 60:.0f}",
      f"{lines[-1]['tokens_per_s']:.0f}",
      f"{lines[-1]['valid_loss']:.3f}",
      number_text(lines[-1].get("valid_acceptance_length"), ".2f"),
      number_text(lines[-1].get("valid_accuracy"), ".3f"),
    )
    for name, lines in runs.items()
  )
  columns = "draft", "steps", "minutes", "tokens/s", "loss", "acceptance length", "accuracy"
  return Table("Trainings", columns, cells, (), TRAINING_LEGEND)
