"""Journal that stores finished outputs, so that an interrupted run can resume."""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import BinaryIO


class Journal:
  """File that has the settings of a run in its first line, and an output record in each later line.

  Attributes:
    records: records of the finished outputs, including the outputs of an earlier run with the same
      settings.
  """

  def __init__(self, path: pathlib.Path, settings: dict, file: BinaryIO):
    self._path, self._file = path, file
    self.records: list[dict] = []
    lines = path.read_bytes().split(b"\n")[:-1]  # without a line that was not written completely
    with contextlib.suppress(ValueError):
      if lines and json.loads(lines[0]) == settings:
        self.records = [json.loads(line) for line in lines[1:]]
    file.truncate(0)
    self._write([settings, *self.records])

  def append(self, records: list[dict]) -> None:
    """Append records. They are not lost if the run is killed."""
    self.records += records
    self._write(records)

  def _write(self, records: list[dict]) -> None:
    self._file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
    self._file.flush()  # without fsync, which would take as long as decoding a short text


@contextlib.contextmanager
def open_journal(output: str, settings: dict) -> Iterator[Journal]:
  """Open the journal of the file `output`, and delete it when the context exits.

  After an exception, a journal that has records is kept, so that the next run resumes. A journal of
  a run with different settings is replaced. The caller must hold the lock of `output`.

  Args:
    output: path of the output file. The journal is a hidden file next to it.
    settings: everything that the outputs depend on, as JSON values.

  Raises:
    InputError: the path of the journal is not that of a regular file.
    OSError: the journal cannot be written.
  """
  path = pathlib.Path(output)
  path = path.with_name(f".{path.name}.journal")
  with open(path, "ab") as file:
    journal = Journal(path, settings, file)
    try:
      yield journal
    except BaseException:
      if not journal.records:
        path.unlink()
      raise
  path.unlink()
