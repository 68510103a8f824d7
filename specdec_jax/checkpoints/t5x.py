"""Reader of T5X checkpoints: a msgpack file with all arrays, or with references to zarr arrays."""

import posixpath

from specdec_jax.checkpoints.files import kvstore
from specdec_jax.checkpoints.flax_msgpack import read_flat
from specdec_jax.checkpoints.stored import Checkpoint, StoredArray, infer_config, select_params
from specdec_jax.checkpoints.zarr import open_arrays
from specdec_jax.errors import InputError

INDEX = "checkpoint"
_ELSEWHERE = "PLACEHOLDER://"  # prefix of a reference to an array in early versions of Orbax


def open_t5x(folder: str, index: str = INDEX) -> Checkpoint:
  """Open a T5 in a T5X checkpoint.

  Args:
    folder: the folder of the checkpoint, such as `checkpoint_1000000`.
    index: name of the msgpack file in it; for an old checkpoint, the name of its single file.

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

  Only the path of the reference is used: its driver and bucket are those where the checkpoint was
  first written, and the array's own metadata has its shape and chunks.
  """
  match value:
    case str() if value.startswith(_ELSEWHERE):
      inside = value.removeprefix(_ELSEWHERE)
    case {"path": str(inside)} | {"kvstore": {"path": str(inside)}} if inside:
      pass
    case _:
      raise InputError(f"{name} in {folder}/{INDEX} is {value!r}; expected an array.")
  if inside.startswith("/") or ".." in inside.split("/"):
    raise InputError(
      f"{name} in {folder}/{INDEX} refers to {inside}, which is outside that folder."
    )
  store = kvstore(folder)
  store["path"] += inside.rstrip("/") + "/"
  return {"driver": "zarr", "kvstore": store}
