"""Progress on standard error: a bar on a terminal, otherwise at most one line per 30 seconds."""

import math
import sys
import time
from typing import Any

from rich import progress
from rich.console import Console

EVERY = 30.0  # minimum seconds between lines


class Progress(progress.Progress):
  """Progress bar of rich that disappears when it is complete.

  Args:
    disable: whether to show neither a bar nor lines, for example because the output of the run is
      on the same terminal.
  """

  def __init__(self, disable: bool = False):
    console = Console(stderr=True)
    hidden = disable or not console.is_terminal  # without a terminal rich prints an empty line
    super().__init__(console=console, transient=True, disable=hidden)
    prints_lines = not (disable or console.is_terminal)
    self._next_line = time.monotonic() + EVERY if prints_lines else math.inf

  def advance(self, task_id: progress.TaskID, advance: float = 1) -> None:
    super().advance(task_id, advance)
    self._print_line(task_id)

  def update(self, task_id: progress.TaskID, **fields: Any) -> None:
    super().update(task_id, **fields)
    self._print_line(task_id)

  def _print_line(self, task_id: progress.TaskID) -> None:
    if time.monotonic() < self._next_line:
      return
    self._next_line, task = time.monotonic() + EVERY, self._tasks[task_id]
    total = "" if task.total is None else f" of {task.total:g}"
    print(f"{task.description}: {round(task.completed, 2):g}{total}", file=sys.stderr, flush=True)
