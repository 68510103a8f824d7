"""Functions that find the project's gin files, in the checkout or in the installed package.

A run is a gin file that `specdec NAME` executes: a file in `gin/runs/`, or the quickstart.
`setup.py` copies the folder `gin/` of the checkout into the package that it installs.
"""

import difflib
import os
import pathlib
import sys
from collections.abc import Callable

from specdec_jax.errors import InputError

PACKAGE = pathlib.Path(__file__).resolve().parent
_INSTALLED = PACKAGE / "gin_files"
HOME = _INSTALLED if _INSTALLED.is_dir() else PACKAGE.parent  # the folder that contains gin/

# Names of runs by purpose, as `specdec --help` lists them. All other runs measure.
TAKES_NAMES = ("reproduce",)  # runs whose arguments are names, not runs
USE = (
  "quickstart",
  "translate",
  "generate",
  "decode",
  "serve",
  "speedup",
  "check_exactness",
)
TRAIN = "train_"  # prefix of the names of runs that train
# Folders of the data sets that docs/data.md downloads.
_DATA_SETS = "multi30k", "wmt_newstest_ende", "lm1b_sample", "t5_vocab"
REPRODUCE = (
  "reproduce",
  "table2",
  "table3",
  "table3_gpt_like",
  "table4",
  "table5",
  "given_outputs",
)


def runs() -> dict[str, pathlib.Path]:
  """Return a mapping from the name of each run to the path of its gin file."""
  paths = [HOME / "gin" / "quickstart.gin", *sorted((HOME / "gin" / "runs").glob("*.gin"))]
  return {path.stem: path for path in paths if path.is_file()}


def find_run(name: str) -> str:
  """Return the path of the gin file of a run, given its name or a prefix that no other name has.

  Raises:
    InputError: no run has that name or prefix, or several runs have that prefix.
  """
  found = runs()
  matches = [name] if name in found else [run for run in found if name and run.startswith(name)]
  if len(matches) != 1:
    near = difflib.get_close_matches(name, found, 1)
    hint = f"did you mean {near[0]}?" if near else "--help lists both."
    raise InputError(
      f"'{name}' is neither a flag, which starts with --, nor the name of a run; {hint}"
    )
  return str(found[matches[0]])


def groups() -> dict[str, dict[str, pathlib.Path]]:
  """Return the runs grouped by purpose: use, train, measure, reproduce."""
  found: dict[str, dict[str, pathlib.Path]] = {
    purpose: {} for purpose in ("use", "train", "measure", "reproduce")
  }
  for name, path in runs().items():
    if name in USE:
      purpose = "use"
    elif name.startswith(TRAIN):
      purpose = "train"
    else:
      purpose = "reproduce" if name in REPRODUCE else "measure"
    found[purpose][name] = path
  return found


def measures(name: str) -> bool:
  """Return whether a run measures or checks models, which takes minutes."""
  return name in ("speedup", "check_exactness") or not (name in USE or name.startswith(TRAIN))


def file(name: str) -> str:
  """Return the path of the file `name` in `gin/`; gin files call this function."""
  return str(HOME / "gin" / name)


def lines(name: str) -> list[str]:
  """Return the lines of the text file `name` in `gin/`; gin files call this function."""
  return pathlib.Path(file(name)).read_text(encoding="utf-8").splitlines()


def data_folder() -> str:
  """Return the folder of data sets: `$SPECDEC_DATA`, or `data` in the current folder."""
  return os.environ.get("SPECDEC_DATA") or "data"


def default(
  path: str,
  macro: str,
  expected: str = "a text file, one text per line",
  instead: str | None = None,
  how: str = "",
  task: str | None = None,
  run_task: str | None = None,
  run_targets: Callable[[], str] | None = None,
) -> str:
  """Return the default value of a gin macro that names a file or folder outside the package.

  Args:
    path: the default. If it begins with `data/`, it is in the folder of data sets (`data_folder`).
    macro: name of the macro.
    expected: description of the file that the macro should name.
    instead: path, relative to `gin/`, of a bundled text to use if the default does not exist; a
      note is then printed on standard error. If it is None, InputError is raised.
    how: how to get the default, for the message.
    task: task that the text of the default belongs to. If it is None, the default fits any run.
    run_task: task of the run; gin files in `gin/tasks/` bind it. If it is None, any default fits.
    run_targets: function that returns the path of a text of the run's task, to use if the default
      belongs to a different task. If it is None, InputError is raised.

  Raises:
    InputError: the default does not exist and `instead` is None, or the default belongs to a
      different task.
  """
  example = f"as in --gin.{macro}='\"PATH\"'"
  if task and run_task and task != run_task:
    if run_targets is not None:
      return run_targets()
    raise InputError(
      f"{macro} is {path} by default, which is text of {task}, but the task of this run is "
      f"{run_task}; set {macro} to outputs of that task in a text file, one per line, {example}."
    )
  parts = pathlib.PurePath(path).parts
  if parts[0] == "data":
    path = os.path.join(data_folder(), *parts[1:])
    if len(parts) > 1 and parts[1] in _DATA_SETS:
      how = ", or download it as in docs/data.md"
  if pathlib.Path(path).exists():
    return path
  if instead is None:
    raise InputError(
      f"{path}, the default of {macro}, does not exist; set {macro} to {expected}, {example}{how}."
    )
  print(
    f"note: {path}, the default of {macro}, does not exist; using {file(instead)}. To use a file "
    f"of your own, set {macro}, {example}{how}.",
    file=sys.stderr,
  )
  return file(instead)


def header(path: pathlib.Path) -> str:
  """Return the comment at the top of a gin file."""
  lines = path.read_text(encoding="utf-8").splitlines()
  end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
  return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:end])


def summary(path: pathlib.Path) -> str:
  """Return the first sentence of the comment at the top of a gin file."""
  paragraph = header(path).partition("\n\n")[0]
  return " ".join(paragraph.split("\n")).rstrip(":.").partition(". ")[0]
