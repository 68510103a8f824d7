"""Atomic file writes, and locks that let only one run at a time write to a file.

A new file is written next to the old one. Once it is complete and synced to the disk, it replaces
the old file in one step. However a run ends, a reader finds either the old file or the new one.
"""

import contextlib
import fcntl
import os
import pathlib
import stat
import uuid
from collections.abc import Iterator
from typing import IO

from specdec_jax.errors import InputError


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "w", exclusive: bool = False) -> Iterator[IO]:
  """Open a new file for writing. It replaces `path` if the context exits without an exception.

  After an exception, `path` is unchanged. The new file gets the permissions of the old one. If
  `path` is a symbolic link, the file that it points to is replaced. Devices, pipes and the file to
  which standard output or standard error is redirected are not replaced, but written to directly.

  Args:
    path: file to write.
    mode: "w" for text in UTF-8; "wb" for bytes.
    exclusive: whether to raise InputError if another run is writing to `path` exclusively. If
      False, concurrent runs each write a complete file, and the one completed last remains.

  Raises:
    InputError: `exclusive` is True and another run is writing to `path`.
    OSError: `path` cannot be written.
  """
  path, encoding = os.fspath(path), None if "b" in mode else "utf-8"
  folder, name = os.path.split(os.path.realpath(path))
  hidden = os.path.join(folder, f".{name}.")
  try:
    if (stream := _open_stream(path)) is not None:
      with open(stream, mode, encoding=encoding) as file:
        yield file
      return
    with _locked(f"{hidden}lock", path) if exclusive else contextlib.nullcontext():
      part = f"{hidden}{uuid.uuid4().hex[:8]}.part"
      fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
      try:
        with open(fd, mode, encoding=encoding) as file:
          with contextlib.suppress(FileNotFoundError):
            os.fchmod(fd, stat.S_IMODE(os.stat(path).st_mode))
          yield file
          file.flush()
          os.fsync(fd)
        os.replace(part, os.path.join(folder, name))
      except BaseException:
        pathlib.Path(part).unlink(missing_ok=True)
        raise
  except OSError as error:
    is_ours = error.filename is None or str(error.filename).startswith(hidden)
    # An OSError without a number has a message, which a file name would hide.
    if is_ours and error.errno is not None:
      error.filename = path
    raise


@contextlib.contextmanager
def name_in_errors(path: str | os.PathLike) -> Iterator[None]:
  """Add the file name `path` to an OSError that is raised in the context without a file name."""
  try:
    yield
  except OSError as error:
    if error.filename is None and error.errno is not None:
      error.filename = os.fspath(path)
    raise


def require_regular_file(path: str | os.PathLike) -> None:
  """Raise InputError if `path` exists and is not a regular file.

  Reading a device may never end, and opening a pipe blocks until another process opens it.
  """
  if os.path.exists(path) and not os.path.isfile(path):
    raise InputError(f"{path} is not a regular file; delete it, or choose another folder.")


def lock_file(file: IO, path: str | os.PathLike) -> None:
  """Lock an open file until it is closed. The kernel releases the lock however the run ends.

  Args:
    file: the open file.
    path: path that the user gave, for the message.

  Raises:
    InputError: another run holds the lock.
  """
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise InputError(
      f"another run is writing to {path}; wait for it to end, or write somewhere else."
    ) from error


def require_distinct_files(output: str, *inputs: str) -> None:
  """Raise InputError if `output` and one of `inputs` are the same regular file.

  Files are compared by inode, so links to a file count as the file. "-" stands for standard output
  if it is `output`, and for standard input if it is one of `inputs`.
  """
  output_stat = _stat(output, standard_fd=1)
  for path in inputs:
    input_stat = _stat(path, standard_fd=0)
    if output_stat is None or input_stat is None or not stat.S_ISREG(output_stat.st_mode):
      continue
    if os.path.samestat(output_stat, input_stat):
      raise InputError(
        f"output '{output}' and input '{path}' are the same file; name another output."
      )


def _stat(path: str, standard_fd: int) -> os.stat_result | None:
  """Return the status of a file or, for "-", of a standard stream; None if an OSError occurs."""
  try:
    return os.fstat(standard_fd) if path == "-" else os.stat(path)
  except OSError:  # the file does not exist yet, or the stream is closed
    return None


def _open_stream(path: str) -> int | None:
  """Return a descriptor for writing to `path` directly, or None if the file may be replaced.

  Devices, pipes and the file behind standard output or standard error must not be replaced.
  """
  try:
    fd = os.open(path, os.O_WRONLY)  # blocks until a pipe has a reader; fails for a folder
  except FileNotFoundError:
    if not os.path.basename(path):
      raise
    return None
  status = os.fstat(fd)
  for standard_fd in {1, 2} - {fd}:
    standard_status = _stat("-", standard_fd)
    if standard_status and os.path.samestat(status, standard_status):
      os.close(fd)
      return os.dup(standard_fd)  # it shares the offset, where `fd` would overwrite from the start
  if not stat.S_ISREG(status.st_mode):
    return fd
  os.close(fd)
  return None


@contextlib.contextmanager
def _locked(lock: str, path: str) -> Iterator[None]:
  """Hold a lock on the file `lock` in the context.

  `path` itself is not locked, because writing replaces that file.
  """
  while True:
    with open(lock, "a") as file:
      lock_file(file, path)
      if not os.fstat(file.fileno()).st_nlink:
        continue  # the run that held the lock removed the file after it was opened here
      try:
        yield
      finally:
        # A lock file is empty. A file of that name with content belongs to the user.
        if not os.fstat(file.fileno()).st_size:
          pathlib.Path(lock).unlink(missing_ok=True)
      return
