"""Tasks of seqio. Importing this module registers the paper's tasks if seqio is installed.

The extra `tasks` of this package installs seqio and TensorFlow. Without them, the gin files of
tasks can still import this module, but using its names raises InputError.
"""

import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.errors import InputError, require_count

_HAS_SEQIO = importlib.util.find_spec("seqio") is not None
_MISSING = (
  "needs seqio and TensorFlow, which are not installed; run pip install 'specdec_jax[tasks]' (in a "
  "checkout pip install -e '.[tasks]'), or use text files instead (docs/data.md)."
)
_SEQIO_NAMES = "T5_VOCABULARY", "prepared_tfds", "add_task", "text_pairs"

if _HAS_SEQIO:
  from specdec_jax.data.seqio_tasks import (  # noqa: F401  names of this module
    T5_VOCABULARY,
    add_task,
    prepared_tfds,
    text_pairs,
  )


def sources(
  task: str,
  split: str = "test",
  limit: int | None = None,
  side: Literal["inputs", "targets"] = "inputs",
) -> list[str]:
  """Return the inputs of a task as texts, which `Pair.encode` tokenizes as seqio would.

  Args:
    task: name of a task registered by this module, by `add_task` or by any imported module.
    limit: maximum number of examples to read; None to read all.
    side: 'inputs', or 'targets' to return the reference outputs instead.

  Raises:
    InputError: seqio is not installed, there is no such task or split, or its dataset is not
      prepared on this machine.
  """
  if limit is not None:
    require_count("limit", limit)
  if not _HAS_SEQIO:
    raise InputError(f"Task {task} {_MISSING}")
  import seqio

  if task not in seqio.TaskRegistry.names():
    raise InputError(
      f"There is no task {task}; there are {', '.join(sorted(seqio.TaskRegistry.names()))}."
    )
  registered = seqio.TaskRegistry.get(task)
  if split not in registered.splits:
    raise InputError(f"Task {task} has no split {split}; it has {', '.join(registered.splits)}.")
  try:
    dataset = registered.source.get_dataset(split=split, shuffle=False)
  except AssertionError as error:  # from TFDS
    reason = str(error).partition(". ")[0]
    raise InputError(f"{reason}; `tfds build` prepares it (docs/data.md).") from error
  for step in registered.preprocessors:
    if step is seqio.preprocessors.tokenize:
      break
    dataset = step(dataset)
  rows = dataset.take(-1 if limit is None else limit).as_numpy_iterator()
  return [row[side].decode() for row in rows]


def targets_file(task: str, split: str = "train", limit: int = 100_000) -> str:
  """Write up to `limit` reference outputs of a task to a file, one per line; return its path."""
  return str(_text_file(task, split, limit, "targets"))


def text_folder(
  task: str, splits: Sequence[str] = ("train", "validation"), limit: int = 1_000_000
) -> str:
  """Write the texts of a task to files, for training runs, and return their folder.

  Each split has two files with up to `limit` texts, one per line: `SPLIT.inputs` and
  `SPLIT.targets`. For `task`, see `sources`.
  """
  files = [
    _text_file(task, split, limit, side) for split in splits for side in ("inputs", "targets")
  ]
  return str(files[0].parent)


def _text_file(
  task: str, split: str, limit: int, side: Literal["inputs", "targets"]
) -> pathlib.Path:
  """Return the file of one side of a split; a file that exists is not written again."""
  path = pathlib.Path("runs") / "tasks" / f"{task}_{limit}" / f"{split}.{side}"
  if not path.is_file():
    texts = sources(task, split, limit, side)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
      file.writelines(" ".join(text.split()) + "\n" for text in texts)
  return path


def __getattr__(name: str) -> Any:
  """Raise AttributeError, or InputError if the name is missing because seqio is not installed."""
  if not _HAS_SEQIO and name in _SEQIO_NAMES:
    raise InputError(f"tasks.{name} {_MISSING}")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
