"""The gin files that come with the project, by name: a checkout's own, or the installed package's.

`setup.py` puts a copy of the checkout's `gin/` into the package that it installs.
"""

import pathlib

from specdec_jax.errors import InputError

_PACKAGE = pathlib.Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / "gin_files"
HOME = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent  # holds gin/


def runs() -> dict[str, pathlib.Path]:
  """What can be run, by name: `gin/runs/` and the quickstart."""
  found = [HOME / "gin" / "quickstart.gin", *sorted((HOME / "gin" / "runs").glob("*.gin"))]
  return {path.stem: path for path in found if path.is_file()}


def named(name: str) -> str:
  """Path of what can be run by this name.

  Raises:
    InputError: nothing can.
  """
  if name not in runs():
    raise InputError(
      f"'{name}' is neither a flag, which starts with --, nor a name of what can be run; --help "
      "lists both."
    )
  return str(runs()[name])


def file(name: str) -> str:
  """Path of what lies in `gin/` under this name, for gin files to use."""
  return str(HOME / "gin" / name)


def summary(path: pathlib.Path) -> str:
  """The first sentence of the comment that a gin file begins with."""
  lines = path.read_text(encoding="utf-8").splitlines()
  end = next((i for i, line in enumerate(lines) if not line.lstrip("# ")), len(lines))
  return " ".join(line.removeprefix("# ") for line in lines[:end]).rstrip(":.").partition(". ")[0]
