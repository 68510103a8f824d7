"""Files written whole or not at all, by one run at a time where it matters.

A file takes the place of the one before it in one step, once it is complete and on the disk:
whatever ends a run, whoever reads finds the old one or the new one.
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
def written(path: str | os.PathLike, mode: str = "w", alone: bool = False) -> Iterator[IO]:
  """A file to write that is at `path` when the context ends well; if it does not, nothing changed.

  It keeps the mode of the file that it replaces. A symbolic link stays, and what it names is
  replaced. Devices, pipes and the file that standard output goes to are written to instead.

  Args:
    path: where to.
    mode: "w" for text, in UTF-8; "wb" for bytes.
    alone: whether to refuse while another run that asked for the same is at it. Without, both write
      a whole file, and the last one stays.

  Raises:
    InputError: another run is writing it.
    OSError: it cannot be written.
  """
  path, encoding = os.fspath(path), None if "b" in mode else "utf-8"
  folder, name = os.path.split(os.path.realpath(path))
  hidden = os.path.join(folder, f".{name}.")
  try:
    if (stream := _stream(path)) is not None:
      with open(stream, mode, encoding=encoding) as file:
        yield file
      return
    with _locked(f"{hidden}lock", path) if alone else contextlib.nullcontext():
      part = f"{hidden}{uuid.uuid4().hex[:8]}.part"
      new = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
      try:
        with open(new, mode, encoding=encoding) as file:
          with contextlib.suppress(FileNotFoundError):
            os.fchmod(new, stat.S_IMODE(os.stat(path).st_mode))
          yield file
          file.flush()
          os.fsync(new)
        os.replace(part, os.path.join(folder, name))
      except BaseException:
        pathlib.Path(part).unlink(missing_ok=True)
        raise
  except OSError as error:
    ours = error.filename is None or str(error.filename).startswith(hidden)
    if ours and error.errno is not None:  # without, it has a message, which a name would hide
      error.filename = path
    raise


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
  """Give an OSError of the context the name of the file that is used, if it has none."""
  try:
    yield
  except OSError as error:
    if error.filename is None and error.errno is not None:
      error.filename = os.fspath(path)
    raise


def require_regular(path: str | os.PathLike) -> None:
  """Raise InputError if there is something at `path` that is no file to read to its end.

  A device may have no end, and opening a pipe waits for who writes to it.
  """
  if os.path.exists(path) and not os.path.isfile(path):
    raise InputError(f"{path} is not a regular file; delete it, or choose another folder.")


def claim(file: IO, path: str | os.PathLike) -> None:
  """Lock an open file for this run until it is closed; the kernel sees to that however a run ends.

  Raises:
    InputError: another run has it; `path` is what the user knows it by.
  """
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise InputError(
      f"another run is writing to {path}; wait for it to end, or write somewhere else."
    ) from error


def require_apart(output: str, *inputs: str) -> None:
  """Raise InputError if `output` is one of the files read, by whatever name; '-' as elsewhere."""
  there = _about(output, 1)
  for path in inputs:
    here = _about(path, 0)
    if there and here and stat.S_ISREG(there.st_mode) and os.path.samestat(there, here):
      raise InputError(
        f"output '{output}' and input '{path}' are the same file; name another output."
      )


def _about(path: str, standard: int) -> os.stat_result | None:
  try:
    return os.fstat(standard) if path == "-" else os.stat(path)
  except OSError:  # it is not there yet, or closed
    return None


def _stream(path: str) -> int | None:
  """A descriptor to write to, if `path` cannot be replaced; None for a file, or one to be."""
  try:
    fd = os.open(path, os.O_WRONLY)  # waits for who reads a pipe; refuses a folder
  except FileNotFoundError:
    if not os.path.basename(path):
      raise
    return None
  about = os.fstat(fd)
  for standard in {1, 2} - {fd}:
    there = _about("-", standard)
    if there and os.path.samestat(about, there):
      os.close(fd)
      return os.dup(standard)  # which goes on where the file ends; `fd` would start it anew
  if not stat.S_ISREG(about.st_mode):
    return fd
  os.close(fd)
  return None


@contextlib.contextmanager
def _locked(lock: str, path: str) -> Iterator[None]:
  """A file of its own is locked: what is at `path` may be replaced. It is there meanwhile only."""
  while True:
    with open(lock, "a") as file:
      claim(file, path)
      if not os.fstat(file.fileno()).st_nlink:
        continue  # it is another run's, which has removed it since it was opened
      try:
        yield
      finally:
        if not os.fstat(file.fileno()).st_size:  # with something in it, it is the user's own
          pathlib.Path(lock).unlink(missing_ok=True)
      return
