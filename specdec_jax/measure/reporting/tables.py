"""Tables of text cells, and the texts that tables of records share."""

import dataclasses
from collections.abc import Mapping, Sequence

from specdec_jax.measure.records import Record

MISSING = "-"


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of text cells; `formats.render` formats it.

  Attributes:
    title: title, without line breaks.
    columns: distinct headings of the columns.
    rows: cells of each row, one per column.
    notes: sentences about the whole table.
    legend: explanations by heading; a key may also name several headings.
  """

  title: str
  columns: tuple[str, ...]
  rows: tuple[tuple[str, ...], ...]
  notes: tuple[str, ...]
  legend: Mapping[str, str] = dataclasses.field(default_factory=dict)


def legend_lines(legend: Mapping[str, str]) -> list[str]:
  """Return one line per entry of a legend."""
  return [f"{heading}: {meaning}" for heading, meaning in legend.items()]


def models_text(r: Record, draft: bool = True) -> str:
  """Return the task, the target and (if `draft` is True) the draft of a record.

  Without a task, return only the paths or names of the models (`Record.target_label`).
  """
  if r.task is None:
    names = [r.target_label, r.draft_label]
  else:
    names = [r.task, r.target, r.draft]
  return ", ".join(names if draft else names[:-1])


def measured_with(records: Sequence[Record]) -> str:
  """Return a sentence with the commit and the date of each measurement, without duplicates."""
  commits = dict.fromkeys(
    f"commit {r.commit} of {r.date[:10]}" if r.commit and r.date else "an unrecorded commit"
    for r in records
  )
  return f"Measured with {'; '.join(commits)}."


def sampling_text(r: Record) -> str:
  """Return the temperature of a record, and its top-k and top-p if they are set."""
  top_k = f" top-{r.top_k}" if r.top_k else ""
  top_p = f" top-p {r.top_p:g}" if r.top_p < 1 else ""
  return f"{r.temperature:g}{top_k}{top_p}"


def number_text(value: float | None, spec: str) -> str:
  """Format a number, or return MISSING if it is None."""
  return MISSING if value is None else format(value, spec)
