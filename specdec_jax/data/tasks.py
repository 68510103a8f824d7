"""Tasks, read through seqio; importing this module registers them where seqio is installed.

Seqio and TensorFlow are the extra `tasks`. Without them this module can be imported, as the gin
files of tasks do, and what needs them raises InputError.
"""

import importlib.util
import itertools
from typing import Any, Literal

from specdec_jax.errors import InputError, require_count, require_types

_HAS_SEQIO = importlib.util.find_spec("seqio") is not None
_MISSING = (
  "needs seqio and TensorFlow, which are not installed; run pip install 'specdec_jax[tasks]' (in a "
  "checkout pip install -e '.[tasks]'), or read a file of text, one per line, with "
  "--gin.TEXTS='@text.read_lines()' and --gin.INPUT."
)
_OF_SEQIO = "T5_VOCABULARY", "WORD_PIECES", "PreparedTfds", "WordPieceVocabulary"
_OF_SEQIO += "add_task", "text_pairs"

if _HAS_SEQIO:
  from specdec_jax.data.seqio_tasks import (  # noqa: F401  part of this module
    T5_VOCABULARY,
    WORD_PIECES,
    PreparedTfds,
    WordPieceVocabulary,
    add_task,
    text_pairs,
  )


def sources(
  task: str,
  split: str = "test",
  limit: int | None = None,
  side: Literal["inputs", "targets"] = "inputs",
) -> list[str]:
  """What a model reads in a task, as text: `Pair.encode` makes of it the tokens that seqio makes.

  Args:
    task: registered here, by `add_task` or by any module that seqio's tasks are defined in.
    split: of it.
    limit: the first so many, or all.
    side: 'targets' for what it is to write, to compare outputs with.

  Raises:
    InputError: seqio is not installed, there is no such task or split, or TFDS's data is not
      prepared on this machine.
  """
  require_types(sources, locals())
  if limit is not None:
    require_count("limit", limit)
  if not _HAS_SEQIO:
    raise InputError(f"Task {task} {_MISSING}")
  import seqio

  if task not in seqio.TaskRegistry.names():
    raise InputError(
      f"There is no task {task}; there are {', '.join(sorted(seqio.TaskRegistry.names()))}."
    )
  found = seqio.TaskRegistry.get(task)
  if split not in found.splits:
    raise InputError(f"Task {task} has no split {split}; it has {', '.join(found.splits)}.")
  dataset = found.source.get_dataset(split=split, shuffle=False)
  is_text = lambda step: step is not seqio.preprocessors.tokenize
  for step in itertools.takewhile(is_text, found.preprocessors):
    dataset = step(dataset)
  rows = dataset.take(-1 if limit is None else limit).as_numpy_iterator()
  return [row[side].decode() for row in rows]


def __getattr__(name: str) -> Any:
  """Say what is missing where `seqio_tasks` could not be imported."""
  if not _HAS_SEQIO and name in _OF_SEQIO:
    raise InputError(f"tasks.{name} {_MISSING}")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
