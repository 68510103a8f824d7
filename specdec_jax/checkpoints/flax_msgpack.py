"""Flax's msgpack files, mapped into memory: an array is read where it lies."""

import mmap
from typing import Any

import jax.numpy as jnp
import msgpack
import numpy as np
from flax import serialization, traverse_util

from specdec_jax.checkpoints import files
from specdec_jax.checkpoints.stored import Stored
from specdec_jax.errors import InputError

_ARRAY = 1  # Flax's number for a msgpack extension that is an array
_HEADERS = {0xC7: 3, 0xC8: 4, 0xC9: 6, **dict.fromkeys(range(0xD4, 0xD9), 2)}  # bytes, by kind
# Maps that stand for one array: tensorstore's description, and Flax's pieces of more than 1 GB.
_is_array = lambda tree: not tree.keys().isdisjoint(("kvstore", "__msgpack_chunked_array__"))


def read_flat(folder: str, name: str) -> dict[str, Any]:
  """What `flax.serialization.to_bytes` wrote, by names like `a/b`; arrays are `Stored`.

  Raises:
    InputError: the file is damaged or no msgpack.
  """
  try:
    with files.local(folder, name) as path, open(path, "rb") as file:
      data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    unpacker = msgpack.Unpacker(data, max_buffer_size=2**31 - 1)
    tree = _tree(unpacker, data)
    if not isinstance(tree, dict) or unpacker.tell() != len(data):
      raise ValueError("it is not one map of names")
    return traverse_util.flatten_dict(tree, sep="/", is_leaf=lambda _, value: _is_array(value))
  except Exception as error:  # msgpack has many ways to say that a file is damaged
    message = f"{folder}/{name} is damaged, incomplete or not Flax's msgpack: {error!r}."
    raise InputError(message) from error


def _tree(unpacker: msgpack.Unpacker, data: mmap.mmap):
  """The value that the unpacker has come to, its arrays passed over."""
  start = unpacker.tell()
  if data[start] >> 4 == 0x8 or data[start] in (0xDE, 0xDF):  # a map
    tree = {unpacker.unpack(): _tree(unpacker, data) for _ in range(unpacker.read_map_header())}
    if not _is_array(tree):
      return tree
  else:
    unpacker.skip()
  return _leaf(data, start, unpacker.tell())


def _leaf(data: mmap.mmap, start: int, end: int):
  """The value between two places; an array as `Stored`."""
  restore = lambda: serialization.msgpack_restore(data[start:end])
  header = _HEADERS.get(data[start])
  if header and data[start + header - 1] == _ARRAY:  # (shape, dtype, values)
    about = msgpack.Unpacker()
    about.feed(data[start + header : min(end, start + header + 256)])
    about.read_array_header()
    shape, dtype = tuple(about.unpack()), jnp.dtype(about.unpack())
    count = int(np.prod(shape))
    at = end - count * dtype.itemsize
    values = np.frombuffer(data, dtype, count, at).reshape(shape)
    return Stored(shape, dtype, values.__getitem__)
  value = restore()
  if isinstance(value, np.ndarray):
    return Stored(value.shape, value.dtype, lambda index: restore()[index])
  return value
