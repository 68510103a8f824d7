"""Download of public data sets into a folder, as `specdec data multi30k` does.

The folder is `data`, or the one that the environment variable SPECDEC_DATA names. The gin files of
runs and tasks read texts from this folder. `assets/data_sets.csv` lists every file with its address
and checksum. The three data sets of the paper are also prepared for seqio by TensorFlow Datasets if
the extra `tasks` is installed.
"""

import csv
import gzip
import hashlib
import pathlib
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import NamedTuple

from specdec_jax.atomic_files import atomic_write
from specdec_jax.data.tfds import prepare_tfds
from specdec_jax.errors import InputError
from specdec_jax.gin_files import PACKAGE, data_folder

CONTENTS = {
  "multi30k": "31,014 captions, English-German; for research and education",
  "wmt14": "ten WMT news tests, 2008 to 2020, English-German; with TFDS all of WMT14; for research",
  "cnn_dm": "CNN/DailyMail: articles and highlights, through TFDS; for research",
  "lm1b": "12,216 held-out news sentences, and with TFDS the One Billion Word Benchmark",
  "realsumm": "100 articles of CNN/DM with the published summaries of T5-11B; CC BY 4.0",
  "scitldr": "abstracts of papers with summaries of one sentence; Apache-2.0",
  "tatoeba": "17,565 short sentences, English-German",
  "t5_vocabulary": "T5's SentencePiece model; Apache-2.0",
}
TFDS = {
  "wmt14": "wmt14_translate/de-en:1.0.0",
  "cnn_dm": "cnn_dailymail:3.4.0",
  "lm1b": "lm1b:1.1.0",
}
_TIMEOUT_S = 60


class RemoteFile(NamedTuple):
  """File of a data set.

  Attributes:
    data_set: name of the data set.
    path: path in the data folder. The file is compressed if the path ends with `.gz`.
    url: address.
    sha256: SHA-256 of the content that the address serves.
  """

  data_set: str
  path: str
  url: str
  sha256: str


def remote_files() -> list[RemoteFile]:
  """Return the files of all data sets."""
  with open(PACKAGE / "assets" / "data_sets.csv", encoding="utf-8", newline="") as file:
    rows = csv.reader(file)
    next(rows)  # names of the columns
    return [RemoteFile(*row) for row in rows]


def fetch(names: Sequence[str] = (), files: Sequence[RemoteFile] | None = None) -> None:
  """Download data sets, or list them if no name is given.

  A file that exists with the right content is not downloaded again. Data sets in `TFDS` are then
  prepared by TensorFlow Datasets (`prepare_tfds`).

  Args:
    names: names of data sets, keys of `CONTENTS`.
    files: files to choose from; by default `remote_files()`.

  Raises:
    InputError: there is no such data set, a file cannot be downloaded or has another checksum than
      expected, or `prepare_tfds` fails.
  """
  folder = pathlib.Path(data_folder())
  if not names:
    print(f"specdec data NAME ... downloads into the folder {folder}:")
    for name, contents in CONTENTS.items():
      print(f"  {name:<14} {contents}")
  for name in names:
    if name not in CONTENTS:
      raise InputError(f"There is no data set {name}; there are {', '.join(CONTENTS)}.")
  for name in names:
    listed = remote_files() if files is None else files
    chosen = [file for file in listed if file.data_set == name]
    for file in chosen:
      path = folder / file.path
      if path.is_file() and hashlib.sha256(_content(path, file)).hexdigest() == file.sha256:
        print(f"{path} is there")
      else:
        _download(file, path)
        print(path)
    if name in TFDS:
      prepare_tfds(TFDS[name], is_required=not chosen)


def _is_compressed_here(file: RemoteFile) -> bool:
  return file.path.endswith(".gz") and not file.url.endswith(".gz")


def _content(path: pathlib.Path, file: RemoteFile) -> bytes:
  """Return the content that the address served when the file was downloaded."""
  content = path.read_bytes()
  return gzip.decompress(content) if _is_compressed_here(file) else content


def _download(file: RemoteFile, path: pathlib.Path) -> None:
  try:
    with urllib.request.urlopen(file.url, timeout=_TIMEOUT_S) as response:
      content = response.read()
  except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
    reason = getattr(error, "reason", error)
    raise InputError(
      f"{file.url} cannot be downloaded: {reason}. If this machine is offline, run specdec data "
      f"{file.data_set} on another one, and copy its folder {data_folder()}."
    ) from error
  found = hashlib.sha256(content).hexdigest()
  if found != file.sha256:
    raise InputError(
      f"{file.url} has changed: its checksum is {found}, but {file.sha256} was expected."
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  with atomic_write(path, "wb") as output:
    output.write(gzip.compress(content, mtime=0) if _is_compressed_here(file) else content)
