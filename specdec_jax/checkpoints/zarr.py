"""Reader of zarr arrays, which may be in folders or in OCDBT, local or remote."""

from collections.abc import Mapping
from typing import Any

import tensorstore

from specdec_jax.checkpoints.stored import StoredArray
from specdec_jax.errors import InputError


def open_arrays(path: str, specs: Mapping[str, dict[str, Any]]) -> dict[str, StoredArray]:
  """Open the arrays that tensorstore specs describe, and return them by name.

  All arrays are opened concurrently, since each may wait for a remote server. A missing chunk is an
  error and is not read as zeros, because an incomplete copy of a checkpoint lacks chunks. A
  complete checkpoint lacks only chunks of zeros, and no array of a T5 has a chunk of zeros.

  Args:
    path: path of the checkpoint, for messages.
    specs: tensorstore spec of each array, by name.

  Raises:
    InputError: an array is damaged or missing.
  """
  futures = {
    name: tensorstore.open({**spec, "fill_missing_data_reads": False}, open=True, read=True)
    for name, spec in specs.items()
  }
  return {name: _stored(path, name, _result(path, name, x)) for name, x in futures.items()}


def _stored(path: str, name: str, array: tensorstore.TensorStore) -> StoredArray:
  def read(index):
    return _result(path, name, array[index].read())

  return StoredArray(tuple(array.shape), array.dtype.numpy_dtype, read)


def _result(path: str, name: str, future: tensorstore.Future):
  try:
    return future.result()
  except ValueError as error:
    reason = str(error).partition(" [")[0]  # the rest describes tensorstore's internal state
    raise InputError(f"{name} of {path} is damaged or missing: {reason}.") from error
