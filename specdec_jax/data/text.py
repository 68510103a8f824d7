"""Functions that read lines of text from files or standard input."""

import gzip
import itertools
import json
import pathlib
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from specdec_jax.errors import InputError, require_count


def read_lines(
  path: str, limit: int | None = None, prefix: str = "", num_words: int | None = None
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
  file = pathlib.Path(path)
  if path != "-" and (not file.exists() or file.is_dir()):
    raise InputError(f"There is no text file at {path}.")
  if path == "-":
    lines = [*itertools.islice(read_stdin_lines(), limit)]
  else:
    raw = file.read_bytes()
    try:
      text = (gzip.decompress(raw) if path.endswith(".gz") else raw).decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
      raise InputError(f"{path} is not UTF-8 text: {error}.") from error
    lines = text.split("\n")
    lines = (lines[:-1] if lines[-1] == "" else lines)[:limit]
    lines = [line.rstrip("\r") for line in lines]
  if num_words is not None:
    require_count("num_words", num_words)
    lines = [" ".join(line.split()[:num_words]) for line in lines]
  return [prefix + line if line.strip() else line for line in lines]


def read_sources(path: str, prefix: str = "") -> list[dict[str, Any]]:
  """Return the sources of a file: the lines of a text file, or the objects of a JSON Lines file.

  If the name of the file ends in .jsonl or .jsonl.gz, each line is a JSON object. Its source is the
  field 'source' or, if there is none, the field 'text'. `prefix` is prepended to each source that
  is not blank. Each result has the field 'source' and the other fields of its JSON object.
  """
  return [_source(line, path, i, prefix) for i, line in enumerate(read_lines(path), 1)]


def iter_sources(lines: Iterable[bytes], path: str, prefix: str = "") -> Iterator[dict[str, Any]]:
  """Yield the sources of a file, named `path`, as soon as lines are read; see `read_sources`."""
  for number, raw in enumerate(lines, 1):
    try:
      line = raw.decode("utf-8").removesuffix("\n").rstrip("\r")
    except UnicodeDecodeError as error:
      raise InputError(f"{path} is not UTF-8 text: {error}.") from error
    yield _source(line, path, number, prefix)


def _source(line: str, path: str, number: int, prefix: str) -> dict[str, Any]:
  fields: Any = {"source": line}
  if path.removesuffix(".gz").endswith(".jsonl"):
    try:
      fields = json.loads(line)
    except ValueError:
      fields = None
    if isinstance(fields, dict) and "source" not in fields:
      fields["source"] = fields.pop("text", None)
    if not (isinstance(fields, dict) and isinstance(fields["source"], str)):
      raise InputError(
        f"{path}, line {number} is not a JSON object with a text as 'source' or 'text'."
      )
  text = fields["source"]
  return fields | {"source": prefix + text if text.strip() else text}


def read_stdin_lines(prefix: str = "") -> Iterator[str]:
  """Yield each line of standard input as soon as it is complete, with `prefix` unless blank."""
  for fields in iter_sources(sys.stdin.buffer, "standard input", prefix):
    yield fields["source"]
