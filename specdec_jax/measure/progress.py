"""Progress on standard error: a bar on a terminal, otherwise at most one line per 30 seconds.

Each update also calls `interrupt.check`, which ends the run if the run has received a signal.
"""

import sys
import time
from collections.abc import Iterable
from typing import Any

from rich import progress
from rich.console import Console

from specdec_jax import interrupt

EVERY = 30.0  # minimum seconds between lines


class Progress(progress.Progress):
  """Progress bar of rich that disappears when it is complete.

  If stderr is not a terminal, progress is printed as lines.

  Args:
    disable: whether to show neither a bar nor lines, for example because the output of the run is
      on the same terminal.
  """

  def __init__(self, disable: bool = False):
    console = Console(stderr=True)
    hidden = disable or not console.is_terminal  # without a terminal rich prints an empty line
    super().__init__(console=console, transient=True, disable=hidden)
    self._prints_lines = not (disable or console.is_terminal)
    self._last_line = time.monotonic()

  def advance(self, task_id: progress.TaskID, advance: float = 1) -> None:
    super().advance(task_id, advance)
    self._report(task_id)

  def update(self, task_id: progress.TaskID, **fields: Any) -> None:
    super().update(task_id, **fields)
    self._report(task_id)

  def track(self, *args: Any, **settings: Any) -> Iterable:
    for item in super().track(*args, **settings):
      interrupt.check()
      yield item

  def _report(self, task_id: progress.TaskID) -> None:
    """Print a line if one is due. Raise `interrupt.Interrupted` if a signal was received."""
    interrupt.check()
    now = time.monotonic()
    if not self._prints_lines or now - self._last_line < EVERY:
      return
    self._last_line, task = now, self._tasks[task_id]
    total = "" if task.total is None else f" of {task.total:g}"
    left = f", {task.time_remaining / 60:.0f} minutes left" if task.time_remaining else ""
    print(f"{task.description}: {task.completed:.3g}{total}{left}", file=sys.stderr, flush=True)
