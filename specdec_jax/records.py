"""Records in files: appended whole or not at all, resumed, read back.

`results.jsonl` holds one JSON object a line. A run that is started again asks `missing` for the
settings still to measure.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import reprlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from specdec_jax.errors import InputError, require_types
from specdec_jax.record import SCHEMA, Record, key
from specdec_jax.version import __version__
from specdec_jax.writing import claim, naming, require_regular

FIELDS_OF_SCHEMA_1 = {"rule": "verifier"}  # old name: current name


@contextlib.contextmanager
def open_results(output_dir: str | os.PathLike) -> Iterator[str]:
  """The path of `results.jsonl` in `output_dir`, for this run alone while the context lasts.

  Both are made if need be: what cannot be written fails now, not after hours. Half a line that a
  killed run left at its end is dropped, with a warning.

  Raises:
    InputError: another run has the folder.
    OSError: the folder or the file cannot be written.
  """
  os.makedirs(output_dir, exist_ok=True)
  path = os.path.join(output_dir, "results.jsonl")
  require_regular(path)
  with open(os.path.join(output_dir, ".lock"), "a") as lock:
    claim(lock, output_dir)
    with _locked(path) as fd:
      _drop_torn_line(fd, path)
    yield path


def append(path: str | os.PathLike, record: Record) -> None:
  """Add `record` as one line, on disk when this returns, or raise and leave the file as it was.

  Half a line that a killed run left at the end is dropped first, with a warning. Runs may share
  a file.

  Raises:
    OSError: the file cannot be written, or its disk is full.
  """
  values = {name: _plain(value) for name, value in dataclasses.asdict(record).items()}
  line = json.dumps(values, allow_nan=False).encode() + b"\n"
  with _locked(path) as fd:
    size = _drop_torn_line(fd, path)
    try:
      with naming(path):
        written = os.write(fd, line)
        if written < len(line):  # the disk filled up; a second write says so
          os.write(fd, line[written:])
        os.fsync(fd)
    except BaseException:
      os.ftruncate(fd, size)
      raise


def read(path: str | os.PathLike) -> list[Record]:
  """The records in a file, in order; half a line at its end is left out with a warning.

  Raises:
    FileNotFoundError: no such file.
    InputError: a line that is no record, or one of a schema that this version does not know.
  """
  with open(path, "rb") as f:
    lines = f.read().splitlines(keepends=True)
  if lines and not lines[-1].endswith(b"\n") and _object(lines[-1]) is None:
    _warn_torn(path, len(lines.pop()))
  return [_parse(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]


def missing(path: str | os.PathLike, settings: Iterable[Record]) -> list[Record]:
  """Those of `settings` (records with nothing measured yet) that the file, if any, lacks."""
  done = {key(record) for record in read(path)} if os.path.exists(path) else set()
  return [setting for setting in settings if key(setting) not in done]


def _plain(value):
  """As JSON has it: numpy and jax scalars as Python's; no NaN or infinity, which JSON lacks."""
  value = value.item() if hasattr(value, "item") else value
  return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: bytes, where: str) -> Record:
  values = _object(line)
  if values is None:
    raise InputError(f"{where}: not a JSON object; mend or delete that line.")
  values = _upgraded(values)
  schema = values.get("schema")
  if schema != SCHEMA:
    raise InputError(
      f"{where}: a record of schema {reprlib.repr(schema)}, and this version of specdec_jax, "
      f"{__version__}, knows schema {SCHEMA}; read it with the version that wrote it "
      f"({reprlib.repr(values.get('specdec_version', 'not stated'))})."
    )
  try:
    require_types(Record, values)
  except InputError as error:
    raise InputError(f"{where}: {error} Mend or delete that line.") from None
  try:
    return Record(**values)
  except TypeError as error:
    fault = str(error).replace("Record.__init__() ", "")
    raise InputError(f"{where}: not a record of schema {SCHEMA}: {fault}.") from None


def _upgraded(values: dict[str, Any]) -> dict[str, Any]:
  """Return the fields of a record of schema 1 under the names of the current schema."""
  if values.get("schema") != 1:
    return values
  renamed = {FIELDS_OF_SCHEMA_1.get(name, name): value for name, value in values.items()}
  verifier = renamed.get("verifier")
  if isinstance(verifier, str):
    renamed["verifier"] = re.sub("Rule$", "Verifier", verifier)
  return renamed | {"schema": SCHEMA}


def _object(line: bytes) -> dict[str, Any] | None:
  """The JSON object that a line holds; None if it holds anything else, or numbers without bound."""
  try:
    values = json.loads(line, parse_int=_bounded, parse_float=_bounded, parse_constant=_bounded)
  except (ValueError, RecursionError):  # the latter: brackets a thousand deep
    return None
  return values if isinstance(values, dict) else None


def _bounded(text: str) -> int | float:
  value = float(text)
  if not abs(value) < 1e300:  # infinite, or not a number
    raise ValueError(text)
  return int(text) if text.lstrip("-").isdecimal() else value


@contextlib.contextmanager
def _locked(path: str | os.PathLike) -> Iterator[int]:
  """The file open for appending, with no other run writing to it."""
  fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
  try:
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield fd
  finally:
    os.close(fd)


def _drop_torn_line(fd: int, path) -> int:
  """Make the file end where a line ends, and give its size."""
  size = os.fstat(fd).st_size
  if not size or os.pread(fd, 1, size - 1) == b"\n":
    return size
  content = os.pread(fd, size, 0)
  start = content.rfind(b"\n") + 1
  if _object(content[start:]) is not None:  # written by hand, without the last newline
    return size + os.write(fd, b"\n")
  _warn_torn(path, size - start)
  os.ftruncate(fd, start)
  return start


def _warn_torn(path, length: int) -> None:
  warnings.warn(
    f"{path}: dropped {length} characters of half a record at its end, left by a killed run; "
    "its setting is measured again.",
    stacklevel=3,
  )
