"""Arrays that tensorstore reads: zarr, in folders or in OCDBT, local or remote."""

from collections.abc import Mapping
from typing import Any

import tensorstore

from specdec_jax.checkpoints.stored import Stored
from specdec_jax.errors import InputError


def open_arrays(path: str, specs: Mapping[str, dict[str, Any]]) -> dict[str, Stored]:
  """Arrays by name, from tensorstore's descriptions of where they lie.

  All are opened at once, since each may be an answer to wait for. A chunk that is not there is an
  error and not zeros: no array of a T5 has a chunk of zeros, but a half-copied one lacks some.
  """
  strict = lambda spec: {**spec, "fill_missing_data_reads": False}
  opening = {k: tensorstore.open(strict(spec), open=True, read=True) for k, spec in specs.items()}
  return {k: _stored(path, k, _result(path, k, future)) for k, future in opening.items()}


def _stored(path: str, name: str, array: tensorstore.TensorStore) -> Stored:
  read = lambda index: _result(path, name, array[index].read())
  return Stored(tuple(array.shape), array.dtype.numpy_dtype, read)


def _result(path: str, name: str, future: tensorstore.Future):
  try:
    return future.result()
  except ValueError as error:
    reason = str(error).partition(" [")[0]  # tensorstore's own view of the matter follows
    raise InputError(f"{name} of {path} is damaged or not there: {reason}.") from error
