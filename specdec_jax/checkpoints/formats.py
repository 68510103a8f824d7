"""Readers of checkpoint files: safetensors, Flax's msgpack, T5X and Orbax.

They return arrays by name without reading their values. An array is a memory-mapped array of numpy
or an array of tensorstore, so that only the slices that are used are read.
"""

import contextlib
import dataclasses
import json
import math
import mmap
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import msgpack
import numpy as np
import tensorstore
from flax import serialization, traverse_util
from safetensors import SafetensorError, safe_open

from specdec_jax.checkpoints import files
from specdec_jax.errors import InputError
from specdec_jax.models.config import T5Config

TABLE = "token_embedder/embedding"
LOGITS = "decoder/logits_dense/kernel"
T5X_INDEX, ORBAX_METADATA = "checkpoint", "_METADATA"

# Prefixes of parameters in a checkpoint: without a train state, in a train state of Flax, or in
# train states of several versions of t5x.
_PREFIXES = ("", "params/", "target/", "optimizer/target/", "_optimizer/target/", "params/params/")
MAX_NAMED = 8  # maximum number of arrays that a message names
# Dtypes of safetensors.
_DTYPES = {"F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16", "BOOL": "bool"}
_DTYPES |= {"U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}
_ARRAY = 1  # type of the msgpack extension in which Flax stores an array
# Size in bytes of the header of an extension, by the first byte of the header.
_HEADERS = {0xC7: 3, 0xC8: 4, 0xC9: 6, **dict.fromkeys(range(0xD4, 0xD9), 2)}
_CHUNKED = "__msgpack_chunked_array__"  # key of a map that has an array of more than 1 GB
_ELSEWHERE = "PLACEHOLDER://"  # in early versions of Orbax, prefix of a reference to an array


@dataclasses.dataclass(frozen=True)
class Leaf:
  """Parameter in a checkpoint, with the values `array / divisor + plus`.

  `array` is an array of numpy, which may be memory-mapped, or of tensorstore.
  """

  array: Any
  divisor: float = 1.0
  plus: float = 0.0

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(self.array.shape)

  @property
  def dtype(self) -> np.dtype:
    """Dtype that has the values exactly, or float32 if they are rounded."""
    stored = np.dtype(getattr(self.array.dtype, "numpy_dtype", self.array.dtype))
    # A bfloat16 that is divided by a power of two is not rounded.
    is_exact = self.divisor == 1 or (stored == jnp.bfloat16 and math.frexp(self.divisor)[0] == 0.5)
    return stored if is_exact and not self.plus else np.dtype(np.float32)

  def read(self, index: Any = ...) -> np.ndarray:
    """Read the values at an index, which has a slice per axis."""
    values = np.asarray(self.array[index])
    if self.divisor != 1:
      values = values.astype(np.float32) / self.divisor
    return values.astype(np.float32) + self.plus if self.plus else values


def read_safetensors(folder: str, part: str) -> dict[str, np.ndarray]:
  """Return the arrays of a safetensors file by name, memory-mapped."""
  try:
    with files.local_copy(folder, part) as path:
      safe_open(path, framework="numpy")  # checks the header and the size of the file
      data = np.memmap(path, np.uint8, "r")
  except (SafetensorError, OSError, ValueError) as error:
    raise InputError(f"{folder}/{part} is damaged or missing: {error}.") from error
  first = 8 + int.from_bytes(data[:8].tobytes(), "little")
  arrays = {}
  for name, about in json.loads(data[8:first].tobytes()).items():
    if name == "__metadata__":
      continue
    if about["dtype"] not in _DTYPES:
      raise InputError(f"{name} in {folder}/{part} has the dtype {about['dtype']}.")
    start, end = about["data_offsets"]
    values = data[first + start : first + end].view(jnp.dtype(_DTYPES[about["dtype"]]))
    arrays[name] = values.reshape(about["shape"])
  return arrays


def read_msgpack(folder: str, name: str) -> dict[str, Any]:
  """Read a file that `flax.serialization.to_bytes` wrote; return a dict with names such as `a/b`.

  Arrays are memory-mapped. References to arrays in other files (tensorstore specs) are dicts.
  """
  try:
    with files.local_copy(folder, name) as path, open(path, "rb") as file:
      data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    unpacker = msgpack.Unpacker(data, max_buffer_size=2**31 - 1)
    tree = _tree(unpacker, data)
    if not isinstance(tree, dict) or unpacker.tell() != len(data):
      raise ValueError("the file is not one map of names")
    return traverse_util.flatten_dict(tree, sep="/", is_leaf=lambda _, value: "kvstore" in value)
  except Exception as error:  # msgpack raises many types of exceptions for damaged files
    message = f"{folder}/{name} is damaged, incomplete or not Flax's msgpack: {error!r}."
    raise InputError(message) from error


def _tree(unpacker: msgpack.Unpacker, data: mmap.mmap) -> Any:
  """Return the value at the unpacker's position; the content of arrays is skipped."""
  start = unpacker.tell()
  if data[start] >> 4 == 0x8 or data[start] in (0xDE, 0xDF):  # a map
    tree = {unpacker.unpack(): _tree(unpacker, data) for _ in range(unpacker.read_map_header())}
    return _from_chunks(tree) if _CHUNKED in tree else tree
  unpacker.skip()
  end, header = unpacker.tell(), _HEADERS.get(data[start])
  if not (header and data[start + header - 1] == _ARRAY):
    return serialization.msgpack_restore(data[start:end])
  # The content is the tuple (shape, dtype, values).
  fields = msgpack.Unpacker()
  fields.feed(data[start + header : min(end, start + header + 256)])
  fields.read_array_header()
  shape, dtype = tuple(fields.unpack()), jnp.dtype(fields.unpack())
  count = math.prod(shape)
  return np.frombuffer(data, dtype, count, end - count * dtype.itemsize).reshape(shape)


def _from_chunks(tree: dict[str, Any]) -> tensorstore.TensorStore:
  """Return an array of more than 1 GB, of which Flax writes the flat values in several chunks."""
  shape, chunks = (
    [tree[name][str(i)] for i in range(len(tree[name]))] for name in ("shape", "chunks")
  )

  def read(domain: tensorstore.IndexDomain, out: np.ndarray, _: Any) -> None:
    out[...] = np.concatenate(chunks).reshape(shape)[domain.index_exp]

  return tensorstore.virtual_chunked(read, dtype=chunks[0].dtype, shape=shape)


def read_t5x(folder: str, index: str = T5X_INDEX) -> dict[str, Any]:
  """Return the parameters of a T5 in a checkpoint of T5X, such as `checkpoint_1000000`.

  `index` is the msgpack file in `folder`; an old checkpoint consists of this file alone.
  """
  path = folder if index == T5X_INDEX else posixpath.join(folder, index)
  params = _select_params(path, read_msgpack(folder, index))
  arrays = {name: value for name, value in params.items() if hasattr(value, "shape")}
  specs = {name: _zarr(folder, name, x) for name, x in params.items() if name not in arrays}
  return arrays | _open_zarr(path, specs)


def _zarr(folder: str, name: str, value: Any) -> dict:
  """Return the tensorstore spec of an array that the index refers to.

  Only the path in the reference is used: a copied checkpoint may have another driver or bucket.
  """
  match value:
    case str() if value.startswith(_ELSEWHERE):
      inside = value.removeprefix(_ELSEWHERE)
    case {"path": str(inside)} | {"kvstore": {"path": str(inside)}} if inside:
      pass
    case _:
      raise InputError(f"{name} in {folder}/{T5X_INDEX} is {value!r}; expected an array.")
  store = files.kvstore(folder)
  store["path"] += inside.rstrip("/") + "/"
  return {"driver": "zarr", "kvstore": store}


def read_orbax(folder: str) -> dict[str, Any]:
  """Return the parameters of a T5 that `StandardCheckpointer` or `PyTreeCheckpointer` wrote.

  Tensorstore reads the arrays, because Orbax would restore the whole train state.
  """
  metadata = files.read_json(folder, ORBAX_METADATA)
  keys = [
    [str(key["key"]) for key in leaf["key_metadata"]] for leaf in metadata["tree_metadata"].values()
  ]
  base = files.kvstore(folder)

  def spec(name: str) -> dict:
    if metadata.get("use_ocdbt", True):
      store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
      store = {**base, "path": base["path"] + f"{name}/"}
    return {"driver": "zarr3" if metadata.get("use_zarr3") else "zarr", "kvstore": store}

  specs = {"/".join(key): spec(".".join(key)) for key in keys}
  return _open_zarr(folder, _select_params(folder, specs))


def _open_zarr(path: str, specs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
  """Open the arrays that tensorstore specs describe, concurrently, since a server may be remote.

  A missing chunk is an error and is not read as zeros, because an incomplete copy of a checkpoint
  lacks chunks. A complete one lacks only chunks of zeros, and no array of a T5 has one.
  """
  futures = {
    name: tensorstore.open({**spec, "fill_missing_data_reads": False}, open=True, read=True)
    for name, spec in specs.items()
  }
  arrays = {}
  for name, future in futures.items():
    with reported(path, name):
      arrays[name] = future.result()
  return arrays


@contextlib.contextmanager
def reported(path: str, name: str) -> Iterator[None]:
  """Raise InputError if tensorstore fails to read the array `name` of the checkpoint `path`."""
  try:
    yield
  except InputError:
    raise
  except ValueError as error:
    reason = str(error).partition(" [")[0]  # the rest describes tensorstore's internal state
    raise InputError(f"{name} of {path} is damaged or missing: {reason}.") from error


Value = TypeVar("Value")


def _select_params(path: str, saved: Mapping[str, Value]) -> dict[str, Value]:
  """Return the values of a train state that are parameters of the model, without their prefix."""
  for prefix in _PREFIXES:
    if prefix + TABLE in saved:
      return {k.removeprefix(prefix): x for k, x in saved.items() if k.startswith(prefix)}
  some = ", ".join(list(saved)[:MAX_NAMED]) or "nothing"
  raise InputError(f"{path} contains no T5: it has no array {TABLE}, but {some}.")


def infer_config(path: str, arrays: Mapping[str, Any]) -> T5Config:
  """Infer the config of a T5 from the shapes of its arrays; a gated MLP uses GELU, others ReLU."""

  def num_layers(stack: str) -> int:
    matches = (re.match(rf"{stack}/(layers_\d+)/", name) for name in arrays)
    return len({match[1] for match in matches if match})

  try:
    rows, emb_dim = arrays[TABLE].shape
    num_heads, _ = arrays["encoder/relpos_bias/rel_embedding"].shape
    _, width = arrays["encoder/layers_0/attention/query/kernel"].shape
    mlp_dim, _ = arrays["encoder/layers_0/mlp/wo/kernel"].shape
    head_dim = width // num_heads
  except KeyError as error:
    scanned = any(name.startswith("encoder/encoder/") for name in arrays)
    reason = "they are those of scalable_t5, with scanned layers" if scanned else error
    raise InputError(f"{path} does not have the arrays of a T5 in t5x: {reason}.") from error
  gated = "encoder/layers_0/mlp/wi_0/kernel" in arrays
  return T5Config(
    vocab_size=rows,
    emb_dim=emb_dim,
    num_heads=num_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    num_encoder_layers=num_layers("encoder"),
    num_decoder_layers=num_layers("decoder"),
    gated=gated,
    activation="gelu" if gated else "relu",
    tied_logits=LOGITS not in arrays,
  )
