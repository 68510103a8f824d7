"""Gin files of the project: runs by name, and functions that gin files call.

A run is a gin file that `specdec NAME` executes. `setup.py` copies the folder `gin/` of the
checkout into the package that it installs.
"""

import os
import pathlib
import sys

from specdec_jax.data.text import data_folder
from specdec_jax.errors import InputError

PACKAGE = pathlib.Path(__file__).resolve().parent
_INSTALLED = PACKAGE / "gin_files"
HOME = _INSTALLED if _INSTALLED.is_dir() else PACKAGE.parent  # the folder that contains gin/


def runs() -> dict[str, pathlib.Path]:
  """Return the gin file of each run by name: runs of the package, then those in `experiments`."""
  paths = [HOME / "gin" / "quickstart.gin", *sorted((HOME / "gin" / "runs").glob("*.gin"))]
  studies = sorted(pathlib.Path("experiments").glob("*/*.gin"))
  found: dict[str, pathlib.Path] = {}
  for path in (*paths, *studies):
    found.setdefault(path.stem, path)
  return found


def find_run(name: str) -> pathlib.Path:
  """Return the gin file of a run, or raise InputError if there is no run with that name."""
  if name not in (found := runs()):
    where = "" if os.path.isdir("experiments") else "; studies need a clone as the current folder"
    raise InputError(f"There is no run {name!r}; there are {', '.join(found)}{where}.")
  return found[name]


def file(name: str) -> str:
  """Return the path of the file `name` in `gin/`; gin files call this function."""
  return str(HOME / "gin" / name)


def lines(name: str) -> list[str]:
  """Return the lines of the text file `name` in `gin/`; gin files call this function."""
  return pathlib.Path(file(name)).read_text(encoding="utf-8").splitlines()


def default(path: str, macro: str, instead: str | None = None) -> str:
  """Return the default value of a gin macro that names a file or folder outside the package.

  Args:
    path: the default. If it begins with `data/`, it is in the folder of data sets (`data_folder`).
    macro: name of the macro.
    instead: path, relative to `gin/`, of a bundled text to use if the default does not exist; a
      note is then printed on standard error. If it is None, InputError is raised.
  """
  first, *rest = pathlib.PurePath(path).parts
  path = os.path.join(data_folder() if first == "data" else first, *rest)
  if os.path.exists(path):
    return path
  missing = f"{path}, the default of {macro}, does not exist"
  advice = f"--{macro.lower()} names another one; docs/data.md says where to get data."
  if instead is None:
    raise InputError(f"{missing}; {advice}")
  print(f"note: {missing}; using {file(instead)}. {advice}", file=sys.stderr)
  return file(instead)


def header(path: str | os.PathLike) -> str:
  """Return the comment at the top of a gin file, which is in the current folder or in `HOME`."""
  path = path if os.path.exists(path) else HOME / path
  comment = []
  for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
    if not line.startswith("#"):
      break
    comment.append(line.removeprefix("#").removeprefix(" "))
  return "\n".join(comment)


def summary(path: str | os.PathLike) -> str:
  """Return the first sentence of the comment at the top of a gin file."""
  paragraph = header(path).partition("\n\n")[0]
  return " ".join(paragraph.split()).rstrip(":.").partition(". ")[0]
