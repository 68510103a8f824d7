"""Sweeps: measure the settings that a file of records lacks, and show all records."""

import gc
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
from rich.console import Console

from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.measure.progress import Progress
from specdec_jax.measure.records import Record, append, missing, read, results_path
from specdec_jax.measure.tables import Table, terminal_text

Report = Callable[[float], None]  # function of the finished fraction of a step, from 0 to 1


class Step(NamedTuple):
  """Step of a sweep: settings that are measured by one call."""

  description: str  # text in front of the progress bar, such as "temperature 0"
  settings: Sequence[Record]  # without measurements
  measure: Callable[[Sequence[Record], Report], Iterable[Record]]  # of the missing settings


def measure_missing(results: pathlib.Path, steps: Sequence[Step]) -> list[Record]:
  """Measure the settings that `results` lacks, and return the records of all settings.

  Compiled programs are dropped between steps, because a process can hold only a limited number.
  """
  wanted = [setting for step in steps for setting in step.settings]
  todo = [(step, missing(results, step.settings)) for step in steps]
  num_missing = sum(len(settings) for _, settings in todo)
  if num_missing:
    note = f"measuring {num_missing} of {len(wanted)} settings for {results}"
  else:
    note = f"all settings were measured before ({results}); delete the file to measure again"
  print(note, file=sys.stderr, flush=True)
  with Progress() as bar:
    task, done = bar.add_task("measuring", total=num_missing), 0
    for step, settings in todo:
      if not settings:
        continue
      if done:
        jax.clear_caches()
        gc.collect()
      bar.update(task, description=step.description)

      def report(share: float, start: int = done, count: int = len(settings)) -> None:
        bar.update(task, completed=start + share * count)

      for record in step.measure(settings, report):
        append(results, record)
      done += len(settings)
      bar.update(task, completed=done)
  keys = {setting.key for setting in wanted}
  return [record for record in read(results) if record.key in keys]


def sweep(
  output_dir: str,
  steps: Iterable[Step] | Callable[[], Iterable[Step]],
  tables: Callable[[list[Record]], Iterable[Table]],
  page: Callable[[list[Record]], str] | None = None,
) -> list[Record]:
  """Measure missing settings, and return all records, after tables and a page of them.

  Args:
    output_dir: folder of `results.jsonl` and `report.html`, opened before the first step.
    tables: function that takes the records of all settings and returns the tables to print.
    page: function from these records to the content of `report.html`; None for no page.
  """
  results = results_path(output_dir)
  measured = measure_missing(results, [*(steps() if callable(steps) else steps)])
  report = None if page is None else results.with_name("report.html")
  if page is not None and report is not None:
    with atomic_write(report) as file:
      file.write(page(measured))
  show(tables(measured), results, report)
  return measured


def show(
  tables: Iterable[Table], results: str | pathlib.Path, report: pathlib.Path | None = None
) -> None:
  """Print tables, and the paths of the records and of the page."""
  console = Console(markup=False, soft_wrap=True)
  for table in tables:
    console.print(terminal_text(table))
  page = "" if report is None else f"; as a page: {report}"
  console.print(f"Records: {results} (measured once; delete the file to measure again){page}")
