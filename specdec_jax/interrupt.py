"""Handling of SIGINT and SIGTERM, so that either signal ends a command at any point.

Python ignores an exception that a signal handler raises inside a callback of the garbage collector
(jax installs one), a finalizer or a callback of a weak reference: the exception is passed to
`sys.unraisablehook`, and the program continues. `handle_signals` therefore raises the exception
again, and a flag is set that loops read with `check`.
"""

import contextlib
import fcntl
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_SIGNAL = (
  0.05  # seconds within which two signals count as one: `timeout` sends its signal twice
)
_RETRY = 0.01  # seconds until an ignored exception is raised again
_NEXT_RETRY = 1.0  # seconds until it is raised once more, unless `stop_raising` is called

_received: int | None = None


class Interrupted(KeyboardInterrupt):
  """Exception that is raised when SIGINT or SIGTERM arrives; `number` is the signal's number."""

  def __init__(self, number: int):
    super().__init__(number)
    self.number = number


def check() -> None:
  """Raise Interrupted if a signal has been received and this is the main thread."""
  if _received is not None and threading.current_thread() is threading.main_thread():
    raise Interrupted(_received)


@contextlib.contextmanager
def handle_signals() -> Iterator[None]:
  """Raise Interrupted in the main thread at the first SIGINT or SIGTERM in the context.

  A second signal ends the process immediately, even inside a native call that has released the
  interpreter lock, such as a running XLA program. A signal that was ignored before stays ignored.
  After the context, a handled signal has its default action: it ends the process.
  """
  numbers = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
  for number in numbers:
    signal.signal(number, _handle)
  previous_hook = sys.unraisablehook

  def hook(unraisable) -> None:
    if isinstance(unraisable.exc_value, Interrupted):
      # In a loop of collections the next exception could be raised in a callback again.
      gc.callbacks.clear()
      signal.signal(signal.SIGALRM, _raise_again)
      signal.setitimer(signal.ITIMER_REAL, _RETRY)
    else:
      previous_hook(unraisable)

  sys.unraisablehook = hook
  _watch(numbers)
  try:
    yield
  finally:
    _restore()


def _handle(number: int, frame: object) -> None:
  global _received
  if _received is not None:
    return  # the same signal, sent a second time during the pause below
  _received = number
  time.sleep(_SAME_SIGNAL)
  _restore()
  raise Interrupted(number)


def _raise_again(number: int, frame: object) -> None:
  # If this exception is raised while the hook runs, it is ignored too. The timer then raises it
  # once more.
  signal.setitimer(signal.ITIMER_REAL, _NEXT_RETRY)
  check()


def stop_raising() -> None:
  """Cancel the timer that raises Interrupted again. Call this after catching Interrupted."""
  signal.setitimer(signal.ITIMER_REAL, 0)


def _restore() -> None:
  for number in _SIGNALS:
    if signal.getsignal(number) is _handle:
      signal.signal(number, signal.SIG_DFL)


def _watch(numbers: Sequence[int]) -> None:
  """Start a thread that ends the process at a second signal, even if `_handle` cannot run.

  Python runs `_handle` in the main thread, which may be inside a native call. The wakeup descriptor
  receives each signal's number regardless.
  """
  pipe = os.pipe()
  # Duplicate the ends to descriptors from 3 on: a closed standard stream leaves 0, 1 or 2 free.
  reader, writer = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in pipe)
  for end in pipe:
    os.close(end)
  os.set_blocking(writer, False)
  signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

  def watch() -> None:
    first = None
    while arrived := os.read(reader, 1):
      if arrived[0] in numbers:
        now = time.monotonic()
        if first is None:
          first = now
        elif now - first > _SAME_SIGNAL:
          os._exit(128 + arrived[0])

  threading.Thread(target=watch, daemon=True).start()
