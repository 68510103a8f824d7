"""Functions that read lines of text from files or standard input."""

import gzip
import itertools
import json
import os
import pathlib
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

from specdec_jax.errors import InputError, require_count, require_text


def data_folder() -> str:
  """Return the folder of data sets: `$SPECDEC_DATA`, or `data` in the current folder."""
  return os.environ.get("SPECDEC_DATA") or "data"


def read_lines(
  path: str | os.PathLike, limit: int | None = None, prefix: str = "", num_words: int | None = None
) -> list[str]:
  """Return the lines of a UTF-8 text.

  Only a newline ends a line, because newstest2009 contains U+0085 inside sentences.

  Args:
    path: path of a file or pipe; '-' for standard input. A file is decompressed if its name ends in
      .gz.
    limit: maximum number of lines to return; None to return all.
    prefix: text prepended to each line that is not blank, such as the prefix of a T5 task.
    num_words: number of words to keep of each line, so that a decoder-only model continues it; None
      to keep all.
  """
  if limit is not None:
    require_count("limit", limit)
  require_text("prefix", prefix)
  path = os.fspath(path)
  if path != "-" and (not os.path.exists(path) or os.path.isdir(path)):
    raise InputError(f"There is no text file at {path}.")
  if path == "-":
    lines = [*itertools.islice(decoded_lines(sys.stdin.buffer, "standard input"), limit)]
  else:
    with open_file(path, "rb") as file:
      lines = [*itertools.islice(decoded_lines(file, path), limit)]
  if num_words is not None:
    require_count("num_words", num_words)
    lines = [" ".join(line.split()[:num_words]) for line in lines]
  return [prefix + line if line.strip() else line for line in lines]


def read_fields(path: pathlib.Path) -> dict[str, Any]:
  """Return the fields of a JSON file, or raise ValueError if it has anything but a JSON object."""
  fields = json.loads(path.read_text(encoding="utf-8"))
  if not isinstance(fields, dict):
    raise ValueError(f"it has a JSON {type(fields).__name__}, not fields in braces")
  return fields


def open_file(path: str, mode: str) -> IO:
  """Open a file, which is compressed if its name ends in .gz. Text is in UTF-8."""
  open_it: Any = gzip.open if path.lower().endswith(".gz") else open
  return open_it(path, mode, encoding=None if "b" in mode else "utf-8")


def decoded_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
  """Yield the lines of the open text `name` as they are read, without a byte order mark."""
  try:
    for number, line in enumerate(file):
      yield line.decode("utf-8" if number else "utf-8-sig").removesuffix("\n").rstrip("\r")
  except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise InputError(f"{name} is not UTF-8 text: {error}.") from error
