"""T5X's checkpoints: a msgpack index with arrays in it or beside it in zarr, or all in one file."""

import posixpath

from specdec_jax.checkpoints.files import kvstore
from specdec_jax.checkpoints.flax_msgpack import read_flat
from specdec_jax.checkpoints.stored import Checkpoint, Stored, inferred_config, parameters
from specdec_jax.checkpoints.zarr import open_arrays
from specdec_jax.errors import InputError

INDEX = "checkpoint"
_ELSEWHERE = "PLACEHOLDER://"  # early Orbax's way to say where an array lies


def open_t5x(folder: str, index: str = INDEX) -> Checkpoint:
  """A checkpoint that T5X wrote: folder `checkpoint_1000000`, or a single file by name `index`.

  Raises:
    InputError: it is damaged, or holds no T5.
  """
  path = folder if index == INDEX else posixpath.join(folder, index)
  found = parameters(path, read_flat(folder, index))
  inside = {name: value for name, value in found.items() if isinstance(value, Stored)}
  beside = {name: _zarr(folder, name, value) for name, value in found.items() if name not in inside}
  arrays = inside | open_arrays(path, beside)
  return Checkpoint(path, inferred_config(path, arrays), arrays)


def _zarr(folder: str, name: str, value) -> dict:
  """Where an array lies that is not in the index.

  Of what the index says only the path is used: driver and bucket are those of the day it was
  written, and shape and chunks lie beside the array.
  """
  match value:
    case str() if value.startswith(_ELSEWHERE):
      inside = value.removeprefix(_ELSEWHERE)
    case {"path": str(inside)} | {"kvstore": {"path": str(inside)}} if inside:
      pass
    case _:
      raise InputError(f"{name} in {folder}/{INDEX} is {value!r}; expected an array.")
  if inside.startswith("/") or ".." in inside.split("/"):
    raise InputError(f"{name} in {folder}/{INDEX} is said to lie in {inside}, outside that folder.")
  store = kvstore(folder)
  store["path"] += inside.rstrip("/") + "/"
  return {"driver": "zarr", "kvstore": store}
