"""How far a run is, on standard error: a bar on a terminal, elsewhere a line now and then.

Each step is also where a run ends that was asked to (`interrupt.check`).
"""

import sys
import time
from collections.abc import Iterable
from typing import Any

from rich import progress
from rich.console import Console

from specdec_jax import interrupt

EVERY = 30.0  # seconds between two lines


class Progress(progress.Progress):
  """rich's, gone when it is done.

  With `disable`, as where lines of output share its terminal, there is none.
  """

  def __init__(self, disable: bool = False):
    console = Console(stderr=True)
    hidden = disable or not console.is_terminal  # where rich would leave an empty line
    super().__init__(console=console, transient=True, disable=hidden)
    self._silent, self._said = disable or console.is_terminal, time.monotonic()

  def advance(self, task_id: progress.TaskID, advance: float = 1) -> None:
    super().advance(task_id, advance)
    self._say(task_id)

  def update(self, task_id: progress.TaskID, **fields: Any) -> None:
    super().update(task_id, **fields)
    self._say(task_id)

  def track(self, *args: Any, **settings: Any) -> Iterable:
    for item in super().track(*args, **settings):
      interrupt.check()
      yield item

  def _say(self, task_id: progress.TaskID) -> None:
    interrupt.check()
    now = time.monotonic()
    if self._silent or now - self._said < EVERY:
      return
    self._said, task = now, self._tasks[task_id]
    of = "" if task.total is None else f" of {task.total:g}"
    print(f"{task.description}: {task.completed:g}{of}", file=sys.stderr, flush=True)
