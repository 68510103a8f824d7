"""Functions that open and load checkpoints of any supported format."""

import dataclasses
import os
import posixpath
import re
from typing import Any

from specdec_jax.checkpoints import files, formats, hub, save
from specdec_jax.checkpoints.checkpoint import Checkpoint
from specdec_jax.checkpoints.formats import Leaf
from specdec_jax.checkpoints.huggingface import CONFIG, open_huggingface, open_in_memory
from specdec_jax.errors import InputError
from specdec_jax.models.layout import named_dtype

# Subfolders of a checkpoint of a training step that may contain the parameters.
_ITEMS = ("", "state", "default", "params")
_UNFINISHED = re.compile(r"\.(orbax-checkpoint-)?tmp")


def open_checkpoint(model: Any) -> Checkpoint:
  """Open a checkpoint of T5X, Orbax, Hugging Face or this project, without loading its arrays.

  Args:
    model: a folder, or the single file of an old T5X checkpoint; both may be local (a string or
      `pathlib.Path`) or `gs://`. Or the name of a model on the Hugging Face Hub, which is then
      downloaded (`hub.resolve`). Or a model in memory; see `huggingface.open_in_memory`. Pickled
      files are never read.

  Raises:
    InputError: there is no checkpoint at this path, it is damaged, incomplete or not supported, or
      it is a folder of checkpoints, one per training step.
  """
  if not isinstance(model, str | os.PathLike):
    return open_in_memory(model)
  model = os.fspath(model)
  folder = hub.resolve(model.rstrip("/"))
  if files.is_file(folder, save.PARAMS):
    checkpoint = save.open_folder(folder)
  elif files.is_file(folder, CONFIG):
    checkpoint = open_huggingface(folder)
  else:
    checkpoint = _open_t5(folder)
  return dataclasses.replace(checkpoint, path=model, folder=folder)


def is_in_memory(model: Any) -> bool:
  """Return whether `model` has a `state_dict` or is (config, arrays), as `open_in_memory` takes."""
  return hasattr(model, "state_dict") or (isinstance(model, tuple) and len(model) == 2)


def _open_t5(path: str) -> Checkpoint:
  """Open a checkpoint of T5X or Orbax."""
  parent, name = posixpath.split(path)
  if _UNFINISHED.search(name):
    raise InputError(f"{path} was never finished: its name is that of a checkpoint being written.")
  if files.is_file(parent, name):
    return _t5(path, formats.read_t5x(parent, name))
  for read, marker in (
    (formats.read_orbax, formats.ORBAX_METADATA),
    (formats.read_t5x, formats.T5X_INDEX),
  ):
    for item in _ITEMS:
      inside = posixpath.join(path, item).rstrip("/")
      if files.is_file(inside, marker):
        return _t5(inside, read(inside))
  steps = files.list_names(path, "checkpoint_", "checkpoint`") or files.list_names(path, "0", ":")
  steps = [step for step in steps if not _UNFINISHED.search(step)]
  expected = "expected a checkpoint of T5X, Orbax, Hugging Face's save_pretrained or save_model"
  advice = f"name one of {', '.join(steps)} in it" if steps else expected
  raise InputError(f"There is no model in {path}; {advice}.")


def _t5(path: str, arrays: dict[str, Any]) -> Checkpoint:
  leaves = {name: Leaf(array) for name, array in arrays.items()}
  return Checkpoint(path, formats.infer_config(path, arrays), leaves)


def load_model(folder: str, dtype: str = "float32") -> tuple[Any, Any]:
  """Return the config and the parameters, in `dtype`, of a checkpoint."""
  checkpoint = open_checkpoint(folder)
  config = checkpoint.config.with_layout(dtype=named_dtype(dtype))
  return config, checkpoint.load(config)
