"""Reader of Flax's msgpack files. They are memory-mapped, and arrays are read when needed."""

import mmap
from typing import Any

import jax.numpy as jnp
import msgpack
import numpy as np
from flax import serialization, traverse_util

from specdec_jax.checkpoints import files
from specdec_jax.checkpoints.stored import StoredArray
from specdec_jax.errors import InputError

_ARRAY = 1  # type of the msgpack extension in which Flax stores an array
# Size in bytes of the header of an extension, by the first byte of the header.
_HEADERS = {0xC7: 3, 0xC8: 4, 0xC9: 6, **dict.fromkeys(range(0xD4, 0xD9), 2)}
# Keys of maps that represent one array: a tensorstore spec, or Flax's chunks of more than 1 GB.
_ARRAY_KEYS = ("kvstore", "__msgpack_chunked_array__")


def read_flat(folder: str, name: str) -> dict[str, Any]:
  """Read a file that `flax.serialization.to_bytes` wrote; return a dict with names such as `a/b`.

  Arrays are returned as `StoredArray`; their values are not kept in memory. References to arrays in
  other files (tensorstore specs) are returned as dicts.

  Raises:
    InputError: the file is missing, damaged or not Flax's msgpack.
  """
  try:
    with files.local_copy(folder, name) as path, open(path, "rb") as file:
      data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    unpacker = msgpack.Unpacker(data, max_buffer_size=2**31 - 1)
    tree = _tree(unpacker, data)
    if not isinstance(tree, dict) or unpacker.tell() != len(data):
      raise ValueError("the file is not one map of names")
    return traverse_util.flatten_dict(tree, sep="/", is_leaf=lambda _, value: _is_array(value))
  except Exception as error:  # msgpack raises many types of exceptions for damaged files
    message = f"{folder}/{name} is damaged, incomplete or not Flax's msgpack: {error!r}."
    raise InputError(message) from error


def _is_array(tree: dict) -> bool:
  return not tree.keys().isdisjoint(_ARRAY_KEYS)


def _tree(unpacker: msgpack.Unpacker, data: mmap.mmap):
  """Return the value at the unpacker's position; the content of arrays is skipped."""
  start = unpacker.tell()
  if data[start] >> 4 == 0x8 or data[start] in (0xDE, 0xDF):  # a map
    tree = {unpacker.unpack(): _tree(unpacker, data) for _ in range(unpacker.read_map_header())}
    if not _is_array(tree):
      return tree
  else:
    unpacker.skip()
  return _leaf(data, start, unpacker.tell())


def _leaf(data: mmap.mmap, start: int, end: int):
  """Return the value that is stored in data[start:end]; an array is returned as `StoredArray`."""

  def restore():
    return serialization.msgpack_restore(data[start:end])

  header = _HEADERS.get(data[start])
  if header and data[start + header - 1] == _ARRAY:
    # The content is the tuple (shape, dtype, values).
    fields = msgpack.Unpacker()
    fields.feed(data[start + header : min(end, start + header + 256)])
    fields.read_array_header()
    shape, dtype = tuple(fields.unpack()), jnp.dtype(fields.unpack())
    count = int(np.prod(shape))
    offset = end - count * dtype.itemsize
    values = np.frombuffer(data, dtype, count, offset).reshape(shape)
    return StoredArray(shape, dtype, values.__getitem__)
  value = restore()
  if isinstance(value, np.ndarray):
    return StoredArray(value.shape, value.dtype, lambda index: restore()[index])
  return value
