"""The gin files that come with the project, by name: a checkout's own, or the installed package's.

`setup.py` puts a copy of the checkout's `gin/` into the package that it installs.
"""

import pathlib
import sys

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


def lines(name: str) -> list[str]:
  """Return the lines of a text that lies in `gin/` under this name, for gin files to use."""
  return pathlib.Path(file(name)).read_text(encoding="utf-8").splitlines()


def default(
  path: str,
  macro: str,
  expected: str = "a text file, one text per line",
  instead: str | None = None,
  how: str = "",
  task: str | None = None,
  run_task: str | None = None,
) -> str:
  """Return the default value of a gin macro that names a file or folder outside the package.

  Args:
    path: the default.
    macro: name of the macro.
    expected: what the macro should name.
    instead: path of a bundled text to return where the default does not exist; standard error says
      so.
    how: how to get the default, for the error.
    task: task whose text the default is.
    run_task: task of the run; gin files of tasks bind it. Without one the default fits any run.

  Raises:
    InputError: the default does not exist and there is no `instead`, or it is of another task.
  """
  example = f"as in --gin.{macro}='\"PATH\"'"
  if task and run_task and task != run_task:
    raise InputError(
      f"{macro} is {path} by default, which is text of {task}, but the task of this run is "
      f"{run_task}; set {macro} to outputs of that task in a text file, one per line, {example}."
    )
  if pathlib.Path(path).exists():
    return path
  if instead is None:
    raise InputError(
      f"{path}, the default of {macro}, does not exist; set {macro} to {expected}, {example}{how}."
    )
  print(
    f"note: {path}, the default of {macro}, does not exist; using the sentences of the quickstart, "
    f"{instead}. To use a file of your own, set {macro}, {example}.",
    file=sys.stderr,
  )
  return instead


def summary(path: pathlib.Path) -> str:
  """The first sentence of the comment that a gin file begins with."""
  lines = path.read_text(encoding="utf-8").splitlines()
  end = next((i for i, line in enumerate(lines) if not line.lstrip("# ")), len(lines))
  return " ".join(line.removeprefix("# ") for line in lines[:end]).rstrip(":.").partition(". ")[0]
