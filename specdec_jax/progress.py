"""How far a run is, on standard error: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from typing import Any

from rich import progress
from rich.console import Console

EVERY = 30.0  # seconds between two lines


class Progress(progress.Progress):
  """rich's, gone when it is done.

  With `disable`, as where lines of output share its terminal, there is none.
  """

  def __init__(self, disable: bool = False):
    super().__init__(console=Console(stderr=True), transient=True, disable=disable)
    self._said = time.monotonic()

  def advance(self, task_id: progress.TaskID, advance: float = 1) -> None:
    super().advance(task_id, advance)
    self._say(task_id)

  def update(self, task_id: progress.TaskID, **fields: Any) -> None:
    super().update(task_id, **fields)
    self._say(task_id)

  def _say(self, task_id: progress.TaskID) -> None:
    now = time.monotonic()
    if self.disable or self.console.is_terminal or now - self._said < EVERY:
      return
    self._said, task = now, self._tasks[task_id]
    of = "" if task.total is None else f" of {task.total:g}"
    print(f"{task.description}: {task.completed:g}{of}", file=sys.stderr, flush=True)
