"""Checkpoints whose arrays are usually on disk and are read into memory one at a time."""

import dataclasses
import functools
import inspect
import itertools
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Sharding

from specdec_jax.core.memory import require_memory
from specdec_jax.drafts.heads import AnyConfig, init_params
from specdec_jax.errors import InputError
from specdec_jax.models.config import T5Config
from specdec_jax.models.families import for_decoding
from specdec_jax.models.kernels import skinny
from specdec_jax.models.quantization import column_scales, param_dtype, quantize

Index = tuple[slice, ...]  # one slice per axis
# How weights are loaded; see `load.load_pair`.
LoadedWeights = Literal["float", "stored", "int8"]
# A tree of `Sharding` with the structure of the parameters, or a function that returns it, given
# their shapes and, if it has a parameter `config`, the configuration of the model.
Shardings = Any
ShardingsFn = Callable[..., Any] | None  # the function only

TABLE = "token_embedder/embedding"
LOGITS = "decoder/logits_dense/kernel"
OUTPUTS = {"logits_dense", "correction"}  # layers with one column per token

# Prefixes of parameters in a checkpoint: without a train state, in a train state of Flax, or in
# train states of several versions of t5x.
_PREFIXES = ("", "params/", "target/", "optimizer/target/", "_optimizer/target/", "params/params/")
_MAX_NAMED = 8  # maximum number of arrays that a message names


@dataclasses.dataclass(frozen=True)
class StoredArray:
  """Array that is usually on disk. Its values are read when `read` is called.

  The class has the array methods that `families.for_decoding` needs.

  Attributes:
    shape: shape of the array.
    dtype: dtype of the stored values.
    read: function that reads the values at an index, which is a tuple of slices.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[Index], np.ndarray]

  @property
  def T(self) -> "StoredArray":
    return StoredArray(self.shape[::-1], self.dtype, lambda index: self.read(index[::-1]).T)

  def __truediv__(self, divisor) -> "StoredArray":
    """Return the quotient, in float32 unless bfloat16 is exact.

    A bfloat16 array divided by a power of two stays in bfloat16, because nothing is rounded.
    """
    is_exact = self.dtype == jnp.bfloat16 and math.frexp(divisor)[0] == 0.5
    dtype = self.dtype if is_exact else np.dtype(np.float32)

    def read(index: Index) -> np.ndarray:
      return (self.read(index).astype(np.float32) / divisor).astype(dtype)

    return StoredArray(self.shape, dtype, read)

  def __add__(self, number: float) -> "StoredArray":
    """Return the sum with a number, in float32."""
    return StoredArray(
      self.shape, np.dtype(np.float32), lambda index: self.read(index).astype(np.float32) + number
    )

  def rows(self, start: int) -> "StoredArray":
    """Return the rows from `start` on."""
    shape = (max(0, self.shape[0] - start), *self.shape[1:])
    return StoredArray(shape, self.dtype, lambda index: self.whole()[start:][index])

  def packed(self, pairs: bool) -> "StoredArray":
    """Return this matrix packed in panels (`kernels.skinny.pack`)."""
    depth, width = self.shape
    shape = skinny.packed_shape(depth, width, pairs, self.dtype == np.int8)
    return StoredArray(shape, self.dtype, lambda index: skinny.pack(self.whole(), pairs)[index])

  def quantized(self, num_scales: int) -> "dict[str, StoredArray]":
    """Return this matrix in int8 and its scales, padded to `num_scales` (`quantization.quantize`).

    The values are read once for each of them, so that only one is in memory.
    """

    def scales(index: Index) -> np.ndarray:
      scale = column_scales(self.whole())
      return np.pad(scale, (0, num_scales - len(scale)), constant_values=1)[index]

    return {
      "kernel": StoredArray(
        self.shape, np.dtype(np.int8), lambda index: quantize(self.whole())[0][index]
      ),
      "kernel_scale": StoredArray((num_scales,), np.dtype(np.float32), scales),
    }

  def columns(self, numbers: np.ndarray) -> "StoredArray":
    """Return some of the columns of a matrix, or some of the entries of a vector."""
    shape = (*self.shape[:-1], len(numbers))
    return StoredArray(shape, self.dtype, lambda index: self.whole()[..., numbers][index])

  def whole(self) -> np.ndarray:
    """Read the whole array."""
    return self.read((slice(None),) * len(self.shape))


def concatenate(arrays: Sequence[StoredArray], axis: int) -> StoredArray:
  """Return the lazy concatenation of arrays. Reading any part of the result reads all arrays."""
  shape = list(arrays[0].shape)
  shape[axis] = sum(array.shape[axis] for array in arrays)

  def read(index: Index) -> np.ndarray:
    return np.concatenate([array.whole() for array in arrays], axis)[index]

  return StoredArray(tuple(shape), arrays[0].dtype, read)


def equal(a: StoredArray, b: StoredArray) -> bool:
  """Return True if two arrays have the same shape and values, reading 4,096 rows at a time.

  Scalars are never equal.
  """
  if a.shape != b.shape or not a.shape:
    return False
  bounds = itertools.pairwise([*range(0, a.shape[0], 4096), a.shape[0]])
  rows = [(slice(*pair), *(slice(None),) * (len(a.shape) - 1)) for pair in bounds]
  return all(np.array_equal(a.read(i), b.read(i)) for i in rows)


def split(array: StoredArray, count: int) -> list[StoredArray]:
  """Split an array along its last axis into `count` equal parts that are read independently."""
  width = array.shape[-1] // count

  def part(number: int) -> StoredArray:
    def read(index: Index) -> np.ndarray:
      start, stop, _ = index[-1].indices(width)
      columns = slice(number * width + start, number * width + stop)
      return array.read((*index[:-1], columns))

    return StoredArray((*array.shape[:-1], width), array.dtype, read)

  return [part(number) for number in range(count)]


class Generation(NamedTuple):
  """Generation settings of a checkpoint that change the output of transformers' `generate`.

  Attributes:
    file: source of the settings, for messages: generation_config.json or, if there is no such file,
      config.json; "its generation_config" for a model of transformers in memory; "" if the
      checkpoint does not record settings.
    settings: settings that apply and differ from their neutral values.
    tasks: for each task in `task_specific_params` of config.json, its settings that apply and
      differ from their neutral values, and its `prefix`.
  """

  file: str = ""
  settings: Mapping[str, Any] = types.MappingProxyType({})
  tasks: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({})


class Checkpoint(NamedTuple):
  """Opened checkpoint of a model or draft head; its arrays are listed, but not loaded.

  Attributes:
    path: path of the checkpoint, or a description of a model in memory.
    config: config of the model. If the format does not record the size of the vocabulary,
      vocab_size is the number of rows of the embedding table.
    arrays: arrays by parameter name, such as `encoder/layers_0/attention/query/kernel`.
    vocabulary: fingerprint of the vocabulary that the model was trained with, if recorded.
    eos_ids: ids of the tokens that end a text, if recorded.
    generation: generation settings, if recorded.
  """

  path: str
  config: AnyConfig
  arrays: Mapping[str, StoredArray]
  vocabulary: str | None = None
  eos_ids: tuple[int, ...] = ()
  generation: Generation = Generation()

  def load(
    self,
    config: AnyConfig,
    dtype: Any = None,
    shardings: Shardings = None,
    stored_weights: bool = False,
    other_arrays: Any = (),
    output_tokens: Sequence[int] | None = None,
  ):
    """Return the parameters of the model.

    Args:
      config: config of the model to load; see `load.load_params`.
      dtype: dtype of the parameters; defaults to `config.dtype`.
      shardings: shardings of the parameters; see `load.load_params`.
      stored_weights: whether matrices that are stored in bfloat16 stay in bfloat16 if
        `config.kernels` is 'skinny'. They then take half the bytes; matmuls convert them and give
        the same result. Such matrices cannot be sharded, so `shardings` must be None.
      other_arrays: arrays that must fit in memory together with the parameters. For a draft these
        are the parameters of its target.
      output_tokens: the tokens that have logits if `config.num_output_tokens` is set.

    Raises:
      InputError: the arrays do not have the names and shapes that the config requires, or they do
        not fit in memory. Both are checked before any array is read.
    """
    fuse = config.fused and not self.config.fused
    stored_config = dataclasses.replace(
      config, kernels="xla", weights="float", num_output_tokens=None
    )
    if fuse:
      stored_config = dataclasses.replace(
        stored_config, fused=False, tied_logits=self.config.tied_logits
      )
    self.require_shapes(param_shapes(stored_config))
    tree = traverse_util.unflatten_dict(dict(self.arrays), sep="/")
    if fuse:
      tree = for_decoding(stored_config, tree, concatenate)[1]
    if dtype is not None:
      config = dataclasses.replace(config, dtype=dtype)
    if output_tokens is not None:
      if not any(OUTPUTS & {*path} for path in traverse_util.flatten_dict(tree)):
        raise InputError(f"{self.path} has no logits of its own, so it can propose any token.")
      tree = _with_output_tokens(tree, np.asarray(output_tokens, np.int32))
    if config.weights == "int8":
      tree = _quantized(tree, skinny.PANEL if config.kernels != "xla" else 1)
    if callable(shardings):
      shardings = make_shardings(shardings, config)

    def in_panels(path) -> bool:
      return config.kernels != "xla" and path[-1].key == "kernel"

    def dtype_of(path, array):
      stays = in_panels(path) and stored_weights and array.dtype == jnp.bfloat16
      return jnp.bfloat16 if stays else param_dtype(path, array, config)

    def struct_of(path, array, sharding):
      return jax.ShapeDtypeStruct(array.shape, dtype_of(path, array), sharding=sharding)

    sharding_of = jax.tree.map(lambda _: None, tree) if shardings is None else shardings
    structs = jax.tree_util.tree_map_with_path(struct_of, tree, sharding_of)
    require_memory(
      f"the model in {self.path}{' with its target' if jax.tree.leaves(other_arrays) else ''}",
      (structs, other_arrays),
      "load a smaller one, or in bfloat16",
    )
    if shardings is not None:
      return jax.tree_util.tree_map_with_path(
        lambda path, array, sharding: _place(array, dtype_of(path, array), sharding),
        tree,
        shardings,
      )

    def place(path, array):
      packed = array.packed(config.in_pairs) if in_panels(path) else array
      return _place(packed, dtype_of(path, array))

    return jax.tree_util.tree_map_with_path(place, tree)

  def require_shapes(self, params) -> None:
    """Raise InputError unless the arrays have the names and shapes of the parameters `params`."""

    def shape(x):
      return x.shape if jnp.issubdtype(x.dtype, jnp.floating) else (x.dtype.name, *x.shape)

    def describe(name: str) -> str:
      stored, expected = (shapes.get(name, "nothing") for shapes in (stored_shapes, wanted_shapes))
      return f"{name} (found {stored}, expected {expected})"

    stored_shapes = {name: shape(array) for name, array in self.arrays.items()}
    flat_params = traverse_util.flatten_dict(params, sep="/")
    wanted_shapes = {name: shape(x) for name, x in flat_params.items()}
    names = stored_shapes.keys() | wanted_shapes.keys()
    wrong = sorted(name for name in names if stored_shapes.get(name) != wanted_shapes.get(name))
    if wrong:
      rest = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
      raise InputError(
        f"{self.path} does not fit the shape of the model: {len(wrong)} arrays differ, "
        f"{', '.join(map(describe, wrong[:_MAX_NAMED]))}{rest}."
      )


def _with_output_tokens(tree: Any, tokens: np.ndarray) -> Any:
  """Return a tree of parameters whose matrices of logits have only the columns of `tokens`."""
  if not isinstance(tree, dict):
    return tree
  reduced = {name: _with_output_tokens(value, tokens) for name, value in tree.items()}
  for name in OUTPUTS & tree.keys():
    reduced[name] = {
      **{part: array.columns(tokens) for part, array in tree[name].items()},
      "output_tokens": StoredArray(tokens.shape, tokens.dtype, lambda index: tokens[index]),
    }
  return reduced


def _quantized(tree: Any, panel: int) -> Any:
  """Return a tree of parameters with int8 matrices; scales are padded to a multiple of `panel`."""
  if not isinstance(tree, dict):
    return tree
  quantized = {name: _quantized(value, panel) for name, value in tree.items()}
  if isinstance(kernel := tree.get("kernel"), StoredArray):
    quantized |= kernel.quantized(-(-kernel.shape[1] // panel) * panel)
  return quantized


def _place(array: StoredArray, dtype, sharding: Sharding | None = None) -> jax.Array:
  """Read an array into the memory of its devices; each device reads only its shard.

  Values are copied, because they may be a view of a file, and an array on a CPU device may share
  the memory that it is created from.
  """
  if sharding is None:
    placed = jax.device_put(np.array(array.whole(), dtype, order="C"))
  else:

    def read(index: Any) -> np.ndarray:
      return np.array(array.read(index), dtype, order="C")

    placed = jax.make_array_from_callback(array.shape, sharding, read)
  # Otherwise the next array would be read while two copies of this one are in memory.
  return placed.block_until_ready()


def make_shardings(shardings: Callable[..., Any], config: AnyConfig) -> Any:
  """Return the shardings that a user's function returns for the shapes of a model's parameters."""
  shapes = param_shapes(config)
  takes_config = "config" in inspect.signature(shardings).parameters
  return shardings(shapes, config=config) if takes_config else shardings(shapes)


@functools.cache
def param_shapes(config: AnyConfig):
  """Return the shapes and dtypes of a model's parameters as a tree of `jax.ShapeDtypeStruct`."""
  return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


Leaf = TypeVar("Leaf")


def select_params(path: str, saved: Mapping[str, Leaf]) -> dict[str, Leaf]:
  """Select the values of a checkpoint that are parameters of the model.

  The other values are those of a train state, such as the state of the optimizer.

  Args:
    path: path of the checkpoint, for messages.
    saved: all values of the checkpoint by name. Names of parameters may have a prefix, which is
      removed.

  Raises:
    InputError: the checkpoint contains no embedding table, so it is not a T5.
  """
  for prefix in _PREFIXES:
    if prefix + TABLE in saved:
      return {k.removeprefix(prefix): x for k, x in saved.items() if k.startswith(prefix)}
  some = ", ".join(list(saved)[:_MAX_NAMED]) or "nothing"
  raise InputError(f"{path} contains no T5: it has no array {TABLE}, but {some}.")


def infer_config(path: str, arrays: Mapping[str, StoredArray]) -> T5Config:
  """Infer the config of a T5 from the shapes of its arrays.

  A gated MLP is assumed to use GELU, and an MLP without a gate is assumed to use ReLU.

  Raises:
    InputError: the arrays are not those of a T5 in t5x.
  """

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
    raise InputError(f"{path} does not have the arrays of a T5 in t5x: {error}.") from error
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
