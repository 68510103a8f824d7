"""Atomic file writes: a file has its old content until its new content is complete."""

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
  """Open a new file for writing. It replaces `path` if the context exits without an exception.

  The new file is written next to `path` and has its permissions. If `path` is a symbolic link, the
  file that it points to is replaced. Devices, pipes and files behind devices (/dev/stdout) are
  appended to. Text is in UTF-8.
  """
  encoding = None if "b" in mode else "utf-8"
  old = os.stat(path) if os.path.exists(path) else None
  if old and (not stat.S_ISREG(old.st_mode) or os.fspath(path).startswith("/dev/")):
    with open(path, mode.replace("w", "a"), encoding=encoding) as file:
      yield file
    return
  path = os.path.realpath(path)
  part = f"{path}.{os.getpid()}.part"
  try:
    with open(part, mode, encoding=encoding) as file:
      if old:
        os.chmod(part, stat.S_IMODE(old.st_mode))
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(part, path)
  except BaseException:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(part)
    raise
