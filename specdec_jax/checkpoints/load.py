"""A checkpoint of any kind -> its parameters in our tree, on their devices."""

import pathlib
import posixpath
import re
from typing import Any

from specdec_jax.checkpoints import files, folder, hub, huggingface, orbax, pretrained, t5x
from specdec_jax.checkpoints.stored import Checkpoint, Shardings
from specdec_jax.errors import InputError
from specdec_jax.models.families import Config

# Where a trainer's step keeps what is wanted here.
_ITEMS = ("", "state", "default", "params")
_STEP = re.compile(r"(checkpoint(_\d+|s)?|snapshots|[0-9a-f]{40}|\d+|state|default|params|\.?)")
_UNFINISHED = re.compile(r"\.(orbax-checkpoint-)?tmp")


def open_checkpoint(path: str) -> Checkpoint:
  """A checkpoint of T5X, Orbax, Hugging Face or this project; nothing is ever unpickled.

  Args:
    path: local or `gs://`; a folder, or the one file of an old T5X checkpoint; or a name on the
      Hugging Face Hub, from which it is fetched (`hub.resolve`).

  Raises:
    InputError: there is none, half of one, or one of several would have to be chosen.
  """
  path = hub.resolve(path.rstrip("/"))
  parent, name = posixpath.split(path)
  if _UNFINISHED.search(name):
    raise InputError(f"{path} was never finished: it is named as what is still being written.")
  if files.is_file(parent, name):
    return t5x.open_t5x(parent, name)
  if files.is_file(path, folder.PARAMS):
    return folder.open_folder(path)
  if files.is_file(path, pretrained.CONFIG):
    return huggingface.open_huggingface(path)
  for opened, mark in ((orbax.open_orbax, orbax.METADATA), (t5x.open_t5x, t5x.INDEX)):
    for item in _ITEMS:
      inside = posixpath.join(path, item).rstrip("/")
      if files.is_file(inside, mark):
        return opened(inside)
  steps = files.names(path, "checkpoint_", "checkpoint`") or files.names(path, "0", ":")
  steps = [step for step in steps if not _UNFINISHED.search(step)]
  expected = "expected what T5X, Orbax, Hugging Face's save_pretrained or save_model wrote"
  advice = f"name one of {', '.join(steps)} in it" if steps else expected
  raise InputError(f"There is no model in {path}; {advice}.")


def load_params(path: str, config: Config, dtype: Any = None, shardings: Shardings = None):
  """The parameters of a checkpoint, read one array at a time: there is never a second copy of all.

  Args:
    path: of a checkpoint; see `open_checkpoint`.
    config: the shape that is wanted. Where it is `fused` and the checkpoint is not, matrices are
      laid side by side as they are read, as `families.for_decoding` does.
    dtype: of the parameters; None for the config's.
    shardings: tree of `jax.sharding.Sharding` like the parameters, or a function to it from the
      tree of their shapes; each device then reads what it holds. None for the default device.

  Raises:
    InputError: as `open_checkpoint`; or names and shapes that differ from what is wanted, told by
      name.
  """
  return open_checkpoint(path).load(config, dtype, shardings)


def recorded_path(path: str) -> str:
  """A checkpoint's path for records: as it was given, or from the package on for a bundled one."""
  package = pathlib.Path(__file__).resolve().parents[1]
  resolved = pathlib.Path(path).resolve()
  if not resolved.is_relative_to(package):
    return path
  return resolved.relative_to(package.parent).as_posix()


def checkpoint_name(path: str) -> str:
  """What a checkpoint is called in records: the last part of its path that is no step."""
  parts = [part for part in path.split("/") if not _STEP.fullmatch(part)]
  return parts[-1] if parts else path
