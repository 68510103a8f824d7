"""Reader of T5X checkpoints: msgpack files that contain arrays or refer to zarr arrays."""

import posixpath

from specdec_jax.checkpoints.files import kvstore
from specdec_jax.checkpoints.flax_msgpack import read_flat
from specdec_jax.checkpoints.stored import Checkpoint, StoredArray, infer_config, select_params
from specdec_jax.checkpoints.zarr import open_arrays
from specdec_jax.errors import InputError

INDEX = "checkpoint"
_ELSEWHERE = "PLACEHOLDER://"  # in early versions of Orbax, prefix of a reference to an array


def open_t5x(folder: str, index: str = INDEX) -> Checkpoint:
  """Open a T5X checkpoint of a T5.

  Args:
    folder: folder of the checkpoint, such as `checkpoint_1000000`.
    index: name of the msgpack file in `folder`. An old checkpoint consists of this file alone.

  Raises:
    InputError: the checkpoint is damaged or contains no T5.
  """
  path = folder if index == INDEX else posixpath.join(folder, index)
  params = select_params(path, read_flat(folder, index))
  inline = {name: value for name, value in params.items() if isinstance(value, StoredArray)}
  specs = {name: _zarr(folder, name, x) for name, x in params.items() if name not in inline}
  arrays = inline | open_arrays(path, specs)
  return Checkpoint(path, infer_config(path, arrays), arrays)


def _zarr(folder: str, name: str, value) -> dict:
  """Return the tensorstore spec of an array that the index refers to.

  Only the path in the reference is used. Its driver and bucket may be wrong, because a checkpoint
  can be copied after it is written; shape and chunks are in the metadata of the array itself.
  """
  match value:
    case str() if value.startswith(_ELSEWHERE):
      inside = value.removeprefix(_ELSEWHERE)
    case {"path": str(inside)} | {"kvstore": {"path": str(inside)}} if inside:
      pass
    case _:
      raise InputError(f"{name} in {folder}/{INDEX} is {value!r}; expected an array.")
  store = kvstore(folder)
  store["path"] += inside.rstrip("/") + "/"
  return {"driver": "zarr", "kvstore": store}
