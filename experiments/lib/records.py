"""Texts and columns of records, and rows of JSON, in tables of studies."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.measure.records import Record
from specdec_jax.measure.tables import Column


def sampling_text(r: Record) -> str:
  """Return the temperature of a record, and its top-k and top-p if they are set."""
  settings = r.settings
  top_k = f" top-{settings.top_k}" if settings.top_k else ""
  top_p = f" top-p {settings.top_p:g}" if settings.top_p < 1 else ""
  return f"{settings.temperature:g}{top_k}{top_p}"


def models_text(r: Record, draft: bool = True) -> str:
  """Return the task, the target and (if `draft`) the draft; without a task, their labels."""
  if r.settings.task is None:
    names = [r.target_label, r.draft_label]
  else:
    names = [r.settings.task, r.models.target, r.models.draft]
  return ", ".join(names if draft else names[:-1])


def measured_with(records: Sequence[Record]) -> str:
  """Return a sentence with the commit and the date of each measurement, without duplicates."""

  def text(commit: str | None, date: str | None) -> str:
    if not (commit and date):
      return "an unrecorded commit"
    changes = " with uncommitted changes" * commit.endswith("+")
    return f"commit {commit.removesuffix('+')}{changes} of {date[:10]}"

  commits = dict.fromkeys(text(r.origin.commit, r.origin.date) for r in records)
  return f"Measured with {'; '.join(commits)}."


def _bandwidth_bound(r: Any) -> float | None:
  if r.times.c is None:
    return None
  round_mb = r.settings.gamma * r.times.draft_step_mb + r.times.verify_mb
  return r.outputs.tokens_per_round * r.times.target_step_mb / round_mb


DRAFT_MB = Column("MB", "times.draft_mb", ".1f")
BANDWIDTH_BOUND = Column("bandwidth-bound", _bandwidth_bound, ".2f")


def lines(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """Return the objects in a file of JSON lines."""
  return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def measured_on(rows: Sequence[Mapping[str, Any]]) -> str:
  """Return the processors, the commits and the date of rows of JSON."""
  first, commits = rows[0], dict.fromkeys(row["commit"] or "unrecorded" for row in rows)
  name = "commit" if len(commits) == 1 else "commits"
  processors = " and ".join(dict.fromkeys(row["processor"] for row in rows))
  return f"{processors}, {name} {', '.join(commits)} of {str(first['date'])[:10]}."
