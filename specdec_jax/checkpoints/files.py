"""Functions that access both local files and files in Google Cloud Storage (`gs://`)."""

import contextlib
import errno
import itertools
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import tensorstore

from specdec_jax.data.text import read_fields
from specdec_jax.errors import InputError

_BLOCK = 1 << 26  # maximum number of bytes of a remote file in memory
_SECONDS = 40  # time limit for listing a remote folder
# tensorstore's default is 32 retries, which take a quarter of an hour without a network.
_FEW_RETRIES = {"gcs_request_retries": {"max_retries": 3}}


def kvstore(folder: str) -> dict[str, str]:
  """Return the spec of a tensorstore `KvStore` for a local or remote folder."""
  if not _is_remote(folder):
    return {"driver": "file", "path": os.path.join(os.path.abspath(folder), "")}
  bucket, _, inside = folder.removeprefix("gs://").partition("/")
  return {"driver": "gcs", "bucket": bucket, "path": os.path.join(inside, "")}


def is_file(folder: str, name: str) -> bool:
  """Return True if a folder contains a file `name`."""
  if not _is_remote(folder):
    return os.path.isfile(os.path.join(folder, name))
  return bool(_keys(folder, name, name + "\0"))


def list_names(folder: str, start: str, end: str) -> list[str]:
  """Return the sorted names in a folder for which start <= name < end; [] if there is no folder."""
  if not _is_remote(folder):
    entries = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in entries if start <= name < end)
  return sorted({key.partition("/")[0] for key in _keys(folder, start, end)})


@contextlib.contextmanager
def local_copy(folder: str, name: str) -> Iterator[str]:
  """Yield the local path of a file; a remote file is copied to a temporary file for the context.

  A memory map that is created in the context stays valid after the context exits.
  """
  if not _is_remote(folder):
    yield os.path.join(folder, name)
    return
  store = tensorstore.KvStore.open(kvstore(folder)).result()

  def read(start: int, end: int | None) -> bytes:
    result = store.read(name, byte_range=slice(start, end)).result()
    if result.state == "missing":
      raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{folder}/{name}")
    return result.value

  with tempfile.NamedTemporaryFile() as copy:
    for offset in itertools.count(0, _BLOCK):
      try:
        copy.write(read(offset, offset + _BLOCK))
      except ValueError:  # the file ends before offset + _BLOCK
        # If it ends at `offset`, a read from there fails too, so read from the byte before.
        back = min(offset, 1)
        copy.write(read(offset - back, None)[back:])
        break
    copy.flush()
    yield copy.name


def read_json(folder: str, name: str) -> dict[str, Any]:
  """Return the fields of a JSON file, or raise InputError if it is damaged or missing."""
  try:
    with local_copy(folder, name) as path:
      return read_fields(pathlib.Path(path))
  except (FileNotFoundError, ValueError) as error:
    raise InputError(f"{folder}/{name} is damaged or missing: {error}.") from error


def _is_remote(path: str) -> bool:
  return path.startswith("gs://")


def _keys(folder: str, start: str, end: str) -> list[str]:
  try:
    store = tensorstore.KvStore.open({**kvstore(folder), "context": _FEW_RETRIES}).result()
    keys = store.list(tensorstore.KvStore.KeyRange(start, end)).result(timeout=_SECONDS)
    return [key.decode() for key in keys]
  except TimeoutError:
    raise InputError(f"{folder} cannot be read: no answer within {_SECONDS} seconds.") from None
  except ValueError as error:
    raise InputError(f"{folder} cannot be read: {str(error).partition(' [')[0]}.") from error
