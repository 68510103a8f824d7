"""Files on this machine and in Google Cloud Storage (`gs://`), found and read the same way."""

import contextlib
import errno
import itertools
import os
import tempfile
from collections.abc import Iterator

import tensorstore

from specdec_jax.errors import InputError

_BLOCK = 1 << 26  # bytes of a remote file that are in memory at a time


def kvstore(folder: str) -> dict[str, str]:
  """A folder as tensorstore has it described."""
  if not _is_remote(folder):
    return {"driver": "file", "path": os.path.join(os.path.abspath(folder), "")}
  bucket, _, inside = folder.removeprefix("gs://").partition("/")
  return {"driver": "gcs", "bucket": bucket, "path": os.path.join(inside, "")}


def is_file(folder: str, name: str) -> bool:
  if not _is_remote(folder):
    return os.path.isfile(os.path.join(folder, name))
  return bool(_keys(folder, name, name + "\0"))


def names(folder: str, start: str, end: str) -> list[str]:
  """What lies in a folder from name `start` on and before `end`; nothing if there is no folder."""
  if not _is_remote(folder):
    found = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in found if start <= name < end)
  return sorted({key.partition("/")[0] for key in _keys(folder, start, end)})


@contextlib.contextmanager
def local(folder: str, name: str) -> Iterator[str]:
  """A file's path on this machine: a remote one is copied to disk, and gone again afterwards.

  What was mapped into memory meanwhile stays.
  """
  if not _is_remote(folder):
    yield os.path.join(folder, name)
    return
  store = tensorstore.KvStore.open(kvstore(folder)).result()

  def read(start: int, end: int | None) -> bytes:
    found = store.read(name, byte_range=slice(start, end)).result()
    if found.state == "missing":
      raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{folder}/{name}")
    return found.value

  with tempfile.NamedTemporaryFile() as copy:
    for at in itertools.count(0, _BLOCK):
      try:
        copy.write(read(at, at + _BLOCK))
      except ValueError:  # fewer bytes are left, or none: then there is nothing to ask for at `at`
        back = min(at, 1)
        copy.write(read(at - back, None)[back:])
        break
    copy.flush()
    yield copy.name


def _is_remote(path: str) -> bool:
  return path.startswith("gs://")


def _keys(folder: str, start: str, end: str) -> list[str]:
  """Names of all files under a remote folder that lie between two names."""
  try:
    store = tensorstore.KvStore.open(kvstore(folder)).result()
    return [k.decode() for k in store.list(tensorstore.KvStore.KeyRange(start, end)).result()]
  except ValueError as error:
    raise InputError(f"{folder} cannot be read: {str(error).partition(' [')[0]}.") from error
