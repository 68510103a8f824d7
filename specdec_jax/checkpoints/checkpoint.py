"""Opened checkpoints, and the loading of their parameters."""

import dataclasses
import functools
import inspect
import os
import pathlib
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from specdec_jax.checkpoints import hub
from specdec_jax.checkpoints.formats import LOGITS, MAX_NAMED, TABLE, Leaf, reported
from specdec_jax.core.memory import require_memory
from specdec_jax.data.vocabularies import find_vocabulary, open_vocabulary_of_model
from specdec_jax.data.vocabulary import ModelTokens, Vocabulary
from specdec_jax.errors import InputError
from specdec_jax.models.families import for_decoding, init_params
from specdec_jax.models.whisper import SpeechTokens

# A tree of `Sharding` with the structure of the parameters, or a function that returns it, given
# their shapes and, if it has a parameter `config`, the configuration of the model.
Shardings = Any
ShardingsFn = Callable[..., Any] | None  # the function only

_OUTPUTS = {"logits_dense", "correction"}  # layers with one column per token
_NORM = "decoder/decoder_norm/scale"
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
# Parts of a path that many checkpoints have.
_STEP = re.compile(r"(checkpoint(_\d+|s)?|snapshots|[0-9a-f]{40}|\d+|state|default|params|\.?)")


class Generation(NamedTuple):
  """Settings of a checkpoint for transformers' `generate`, by their names in transformers.

  Attributes:
    settings: settings of the model, supported or not.
    tasks: for each task in `task_specific_params` of config.json, its settings, and its `prefix`.
  """

  settings: Mapping[str, Any] = types.MappingProxyType({})
  tasks: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Opened checkpoint of a model or draft head; its arrays are listed, but not loaded.

  Attributes:
    path: path or name on the Hub as the user gave it, or a description of a model in memory.
    config: `T5Config`, `GPTConfig`, or the `DraftHead` of a draft head. If the format does not
      record the size of the vocabulary, vocab_size is the number of rows of the embedding table.
    arrays: arrays by parameter name, such as `encoder/layers_0/attention/query/kernel`.
    vocabulary: fingerprint of the vocabulary that the model was trained with, if recorded.
    speech: tokens of prompts, for a Whisper; otherwise None.
    folder: folder of the files, or an old T5X checkpoint's single file; None for a model in memory.
  """

  path: str
  config: Any
  arrays: Mapping[str, Leaf]
  vocabulary: str | None = None
  eos_ids: tuple[int, ...] = ()
  generation: Generation = Generation()
  speech: SpeechTokens | None = None
  folder: str | None = None

  @property
  def name(self) -> str:
    """Name of the checkpoint in records: the last part of the path that is not generic."""
    parts = [part for part in self.path.split("/") if not _STEP.fullmatch(part)]
    return parts[-1] if parts else self.path

  @property
  def recorded_path(self) -> str | None:
    """Path in records, for a bundled model relative to the project; None for a model in memory."""
    resolved = pathlib.Path(self.path).resolve()
    if self.folder is not None and resolved.is_relative_to(_PACKAGE):
      return resolved.relative_to(_PACKAGE.parent).as_posix()
    return self.path if self.folder is not None else None

  def open_vocabulary(
    self,
    path: str | os.PathLike | None = None,
    extra_ids: int | Literal["auto"] = "auto",
    source_language: str | None = None,
  ) -> Vocabulary:
    """Open the vocabulary of the model; the arguments are those of `load.load_pair`."""
    if path is None and self.folder is None:
      raise InputError("The target is a model in memory; give its vocabulary too.")
    name = os.fspath(path) if path else ""
    found = hub.resolve(name, hub.VOCABULARY) if name else find_vocabulary(self.folder or "")
    if found is None:
      raise InputError(
        f"The target {self.path} has no vocabulary with it; expected tokenizer.json, spiece.model "
        "or other files of its tokenizer in its folder. Give its file as vocabulary "
        "(--vocabulary on the command line)."
      )
    tokens = ModelTokens(self.config.has_encoder, self.eos_ids, self.config.pad_id, source_language)
    words = open_vocabulary_of_model(found, self.config.vocab_size, extra_ids, tokens)
    if self.speech is not None:
      words.fit(self.config.vocab_size)  # tokenizers of some Whispers lack the timestamps
    return words

  def load(
    self,
    config: Any,
    dtype: Any = None,
    shardings: Shardings = None,
    other_arrays: Any = (),
    output_tokens: Sequence[int] | None = None,
  ) -> Any:
    """Return the parameters of the model, by default in the dtype of its layout.

    Arrays are read one at a time to limit peak memory. Before, InputError is raised if they do not
    fit config or memory.

    Args:
      config: config of the model to load. If its layout is `fused` and that of the checkpoint is
        not, matrices are concatenated when they are read, as in `families.for_decoding`.
      shardings: a tree of `Sharding`, or a function that returns one (`Shardings`), such as
        `partitioning.param_shardings` with a mesh. Each device reads only its shard. None places
        the parameters on the default device.
      other_arrays: arrays that must fit in memory too, such as the target's for a draft.
      output_tokens: the tokens that have logits if `config.num_output_tokens` is set.
    """
    config = config if dtype is None else config.with_layout(dtype=dtype)
    if callable(shardings):
      shardings = make_shardings(shardings, config)
    places = traverse_util.flatten_dict(shardings or {}, sep="/")
    tokens = None if output_tokens is None else np.asarray(output_tokens, np.int32)
    arrays: dict[str, _Array] = {}
    for name, leaves in self._leaves(config).items():
      arrays |= _arrays(config, name, leaves, tokens)
    if tokens is not None and not any(name.endswith("/output_tokens") for name in arrays):
      raise InputError(f"{self.path} has no logits of its own, so it can propose any token.")

    def struct(name: str, array: _Array) -> jax.ShapeDtypeStruct:
      dtype = config.layout.param_dtype(name.rpartition("/")[2], array.dtype)
      return jax.ShapeDtypeStruct(array.shape, dtype, sharding=places.get(name))

    structs = {name: struct(name, array) for name, array in arrays.items()}
    require_memory(
      f"the model in {self.path}{' with its target' if jax.tree.leaves(other_arrays) else ''}",
      (structs, other_arrays),
      "load a smaller one, or in bfloat16",
    )
    params = {name: _place(self.path, name, x, structs[name]) for name, x in arrays.items()}
    return traverse_util.unflatten_dict(params, sep="/")

  def _leaves(self, config: Any) -> dict[str, list[Leaf]]:
    """Return, for each parameter of a model, what is concatenated along its last axis."""
    as_stored: dict[str, Any] = dict(num_output_tokens=None)
    fuse = config.layout.fused and not self.config.layout.fused
    if fuse:
      as_stored |= dict(tied_logits=self.config.tied_logits)
    stored_config = dataclasses.replace(config, **as_stored).with_layout(
      kernels="xla", weights="float", fused=config.layout.fused and not fuse
    )
    self.require_shapes(param_shapes(stored_config))
    leaves = dict(self.arrays)
    if fuse and stored_config.tied_logits:  # as in `for_decoding`
      leaves[LOGITS] = dataclasses.replace(leaves[TABLE], array=leaves[TABLE].array.T)
      leaves[_NORM] = dataclasses.replace(leaves[_NORM], divisor=stored_config.logits_divisor)
      stored_config = dataclasses.replace(stored_config, tied_logits=False)
    tree = traverse_util.unflatten_dict({name: [x] for name, x in leaves.items()}, sep="/")
    if fuse:
      tree = for_decoding(stored_config, tree, lambda parts, axis: sum(parts, []))[1]
    return traverse_util.flatten_dict(tree, sep="/")

  def require_shapes(self, params: Any) -> None:
    """Raise InputError unless the arrays have the names and shapes of the parameters `params`."""

    def shape(x: Any) -> tuple:
      return x.shape if jnp.issubdtype(x.dtype, jnp.floating) else (x.dtype.name, *x.shape)

    stored = {name: shape(array) for name, array in self.arrays.items()}
    expected = {name: shape(x) for name, x in traverse_util.flatten_dict(params, sep="/").items()}
    wrong = sorted(
      name for name in stored.keys() | expected.keys() if stored.get(name) != expected.get(name)
    )
    if wrong:
      some = ", ".join(
        f"{name} (found {stored.get(name, 'nothing')}, expected {expected.get(name, 'nothing')})"
        for name in wrong[:MAX_NAMED]
      )
      rest = f" and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
      raise InputError(
        f"{self.path} does not fit the shape of the model: {len(wrong)} arrays differ, "
        f"{some}{rest}."
      )


class _Array(NamedTuple):
  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[Any], np.ndarray]


def _arrays(
  config: Any, name: str, leaves: Sequence[Leaf], tokens: np.ndarray | None
) -> dict[str, _Array]:
  """Return the arrays of a parameter: itself, or its panels, integers, scales and tokens."""
  path, _, kind = name.rpartition("/")
  columns = tokens if path.rpartition("/")[2] in _OUTPUTS else None
  layout, shape, dtype = config.layout, leaves[0].shape, leaves[0].dtype
  as_stored = kind != "kernel" or layout.kernels == "xla" and not layout.is_quantized
  if len(leaves) == 1 and columns is None and as_stored:
    return {name: _Array(shape, dtype, leaves[0].read)}
  width = sum(leaf.shape[-1] for leaf in leaves) if columns is None else len(columns)
  dtype = dtype if {leaf.dtype for leaf in leaves} == {dtype} else np.dtype(np.float32)

  def whole() -> np.ndarray:
    values = np.concatenate([x.read() for x in leaves], -1) if leaves[1:] else leaves[0].read()
    return values if columns is None else values[..., columns]

  if kind != "kernel":
    return {name: _Array((*shape[:-1], width), dtype, lambda index: whole()[index])}
  shape, shape_of_scales = layout.matrix_shapes(shape[0], width)
  dtype = jnp.dtype(layout.weights) if layout.is_quantized else dtype
  arrays = {name: _Array(shape, dtype, lambda i: layout.matrix(whole())[i])}
  if layout.is_quantized:
    of_scales = shape_of_scales, np.dtype(np.float32)
    arrays[f"{name}_scale"] = _Array(*of_scales, lambda i: layout.scales(whole())[i])
  if columns is not None:
    arrays[f"{path}/output_tokens"] = _Array(columns.shape, columns.dtype, columns.__getitem__)
  return arrays


def _place(path: str, name: str, array: _Array, struct: jax.ShapeDtypeStruct) -> jax.Array:
  """Read an array into the memory of its devices; each device reads only its shard.

  Values are copied, since they may view a file whose memory an array on a CPU would share.
  """

  def read(index: Any) -> np.ndarray:
    with reported(path, name):
      return np.array(array.read(index), struct.dtype, order="C")

  if struct.sharding is None:
    placed = jax.device_put(read(...))
  else:
    placed = jax.make_array_from_callback(struct.shape, struct.sharding, read)
  # Otherwise the next array would be read while two copies of this one are in memory.
  return placed.block_until_ready()


def make_shardings(shardings: Callable[..., Any], config: Any) -> Any:
  """Return the shardings that a user's function returns for the shapes of a model's parameters."""
  shapes = param_shapes(config)
  takes_config = "config" in inspect.signature(shardings).parameters
  return shardings(shapes, config=config) if takes_config else shardings(shapes)


@functools.cache
def param_shapes(config: Any) -> Any:
  """Return the shapes and dtypes of a model's parameters as a tree of `jax.ShapeDtypeStruct`."""
  return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def path_of_record(recorded: str) -> str:
  """Return the path of a checkpoint, given its path in records (`Checkpoint.recorded_path`)."""
  bundled = _PACKAGE.parent / recorded
  return str(bundled) if bundled.resolve().is_relative_to(_PACKAGE) else recorded
