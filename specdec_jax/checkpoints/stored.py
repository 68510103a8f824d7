"""Arrays on disk under their names in our tree, brought into memory one at a time."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Sharding

from specdec_jax.errors import InputError, shown
from specdec_jax.kernels import skinny
from specdec_jax.memory import require_memory
from specdec_jax.models.config import T5Config
from specdec_jax.models.families import AnyConfig, for_decoding, init_params

Index = tuple[slice, ...]  # one for each axis
Shardings = Any  # a tree of `Sharding` like the parameters', or a function to it from their shapes
MakesShardings = Callable[[Any], Any] | None  # the function only

TABLE = "token_embedder/embedding"
LOGITS = "decoder/logits_dense/kernel"

# Where parameters lie in what was saved: alone, in a train state of Flax or of some age of t5x.
_PLACES = ("", "params/", "target/", "optimizer/target/", "_optimizer/target/", "params/params/")
_NAMED = 8  # arrays that a message names
_FEW = 64  # layers


@dataclasses.dataclass(frozen=True)
class Stored:
  """An array on disk: nothing of it is in memory until `read` is called.

  It behaves as much like an array as `families.for_decoding` needs.

  Attributes:
    shape: of the array.
    dtype: as it is stored.
    read: an index -> the values there.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[Index], np.ndarray]

  @property
  def T(self) -> "Stored":
    return Stored(self.shape[::-1], self.dtype, lambda index: self.read(index[::-1]).T)

  def __truediv__(self, divisor) -> "Stored":
    """In float32; by a power of two, which rounds nothing, what is bfloat16 stays so."""
    exact = self.dtype == jnp.bfloat16 and math.frexp(divisor)[0] == 0.5
    kind = self.dtype if exact else np.dtype(np.float32)
    quotient = lambda values: (values.astype(np.float32) / divisor).astype(kind)
    return Stored(self.shape, kind, lambda index: quotient(self.read(index)))

  def packed(self, pairs: bool) -> "Stored":
    depth, width = self.shape
    shape = skinny.packed_shape(depth, width, pairs)
    return Stored(shape, self.dtype, lambda index: skinny.pack(self.whole(), pairs)[index])

  def whole(self) -> np.ndarray:
    return self.read((slice(None),) * len(self.shape))


def concatenate(arrays: Sequence[Stored], axis: int) -> Stored:
  """Arrays side by side, as one; to read a part of it is to read them all."""
  shape = list(arrays[0].shape)
  shape[axis] = sum(array.shape[axis] for array in arrays)
  read = lambda index: np.concatenate([array.whole() for array in arrays], axis)[index]
  return Stored(tuple(shape), arrays[0].dtype, read)


def equal(a: Stored, b: Stored) -> bool:
  """Whether two arrays, no scalars, are the same; a few rows of each are in memory at a time."""
  if a.shape != b.shape or not a.shape:
    return False
  bounds = itertools.pairwise([*range(0, a.shape[0], 4096), a.shape[0]])
  rows = [(slice(*pair), *(slice(None),) * (len(a.shape) - 1)) for pair in bounds]
  return all(np.array_equal(a.read(i), b.read(i)) for i in rows)


def split(array: Stored, count: int) -> list[Stored]:
  """Equal parts of the last axis, each read without the others."""
  width = array.shape[-1] // count

  def part(number: int) -> Stored:
    def read(index: Index) -> np.ndarray:
      start, stop, _ = index[-1].indices(width)
      columns = slice(number * width + start, number * width + stop)
      return array.read((*index[:-1], columns))

    return Stored((*array.shape[:-1], width), array.dtype, read)

  return [part(number) for number in range(count)]


class Checkpoint(NamedTuple):
  """A model on disk, opened: what it holds is known, and none of it is in memory.

  Attributes:
    path: where it lies.
    config: its shape; vocab_size counts the rows of its table unless the format says better.
    arrays: by name in our tree, `encoder/layers_0/attention/query/kernel`.
    vocabulary: fingerprint of the one it was trained with, if that is stated.
    eos_ids: end what the model writes, as far as that is stated.
    generation: file and settings of `pretrained.generation_settings`, which are not applied here.
  """

  path: str
  config: AnyConfig
  arrays: Mapping[str, Stored]
  vocabulary: str | None = None
  eos_ids: tuple[int, ...] = ()
  generation: tuple[str, Mapping[str, Any]] = ("", {})

  def load(
    self,
    config: AnyConfig,
    dtype: Any = None,
    shardings: Shardings = None,
    stored_weights: bool = False,
    beside: Any = (),
  ):
    """The parameters; `load.load_params` says more.

    With `stored_weights`, matrices that are stored as bfloat16 stay so if `kernels.skinny` will
    widen them as it reads them: half the bytes, and the same products. Those are not for several
    devices: give no shardings. `beside` are the arrays of the target, where this is its draft: both
    must fit in memory, which is checked before anything is read.
    """
    fuse = config.fused and not self.config.fused
    apart = dataclasses.replace(config, kernels="xla")
    if fuse:
      apart = dataclasses.replace(apart, fused=False, tied_logits=self.config.tied_logits)
    layers = config.num_decoder_layers + getattr(config, "num_encoder_layers", 0)
    # Or a damaged number would have a billion of them traced; a module may have none of its few.
    if layers > max(len(self.arrays), _FEW):
      raise InputError(
        f"{self.path} does not fit the shape of the model: it holds {len(self.arrays)} arrays, too "
        f"few for {layers} layers."
      )
    self.require(param_shapes(apart))
    tree = traverse_util.unflatten_dict(dict(self.arrays), sep="/")
    if fuse:
      tree = for_decoding(apart, tree, concatenate)[1]
    dtype = config.dtype if dtype is None else dtype
    if callable(shardings):
      shardings = make_shardings(shardings, config)

    in_panels = lambda path: config.kernels != "xla" and path[-1].key == "kernel"

    def kind(path, array):
      stays = in_panels(path) and stored_weights and array.dtype == jnp.bfloat16
      return jnp.bfloat16 if stays else dtype

    places = jax.tree.map(lambda _: None, tree) if shardings is None else shardings
    size = lambda path, array, place: jax.ShapeDtypeStruct(
      array.shape, kind(path, array), sharding=place
    )
    sizes = jax.tree_util.tree_map_with_path(size, tree, places)
    require_memory(
      f"the model in {self.path}{' with its target' if jax.tree.leaves(beside) else ''}",
      (sizes, beside),
      "load a smaller one, or in bfloat16",
    )
    if shardings is not None:
      return jax.tree.map(lambda array, sharding: _place(array, dtype, sharding), tree, shardings)

    def place(path, array):
      packed = array.packed(config.in_pairs) if in_panels(path) else array
      return _place(packed, kind(path, array))

    return jax.tree_util.tree_map_with_path(place, tree)

  def require(self, wanted) -> None:
    """Raise InputError, with names, unless these are the arrays of a tree of parameters."""
    shape = lambda x: x.shape if jnp.issubdtype(x.dtype, jnp.floating) else (x.dtype.name, *x.shape)
    found = {name: shape(array) for name, array in self.arrays.items()}
    wanted = {k: shape(x) for k, x in traverse_util.flatten_dict(wanted, sep="/").items()}
    wrong = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
    if wrong:
      tell = lambda k: f"{k} (found {found.get(k, 'nothing')}, expected {wanted.get(k, 'nothing')})"
      more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
      raise InputError(
        f"{self.path} does not fit the shape of the model: {len(wrong)} arrays differ, "
        f"{', '.join(map(tell, wrong[:_NAMED]))}{more}."
      )


def _place(array: Stored, dtype, sharding: Sharding | None = None) -> jax.Array:
  """Read an array onto its devices, each only the part that it holds.

  Values are copied, since they may be a view of a file, and a device may keep what it is given.
  """
  if sharding is None:
    placed = jax.device_put(np.array(array.whole(), dtype, order="C"))
  else:
    read = lambda index: np.array(array.read(index), dtype, order="C")
    placed = jax.make_array_from_callback(array.shape, sharding, read)
  return placed.block_until_ready()  # or the next would be read while this one is still here twice


def make_shardings(shardings: Callable[[Any], Any], config: AnyConfig) -> Any:
  """The tree of shardings that a user's function makes of the shapes of a model's parameters.

  Raises:
    InputError: it makes something else.
  """
  shapes = param_shapes(config)
  made = shardings(shapes)
  structure: Any = jax.tree.structure
  is_tree = structure(made) == structure(shapes)
  if not is_tree or not all(isinstance(place, Sharding) for place in jax.tree.leaves(made)):
    raise InputError(
      f"The function given as shardings returns {shown(made)}; it must return a tree like the "
      "parameters', with a jax.sharding.Sharding for each."
    )
  return made


@functools.cache
def param_shapes(config: AnyConfig):
  """The parameters of a model of this shape as a tree of `jax.ShapeDtypeStruct`."""
  return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


Leaf = TypeVar("Leaf")


def parameters(path: str, saved: Mapping[str, Leaf]) -> dict[str, Leaf]:
  """What is parameters among all that was saved, a train state say, by name in our tree."""
  for place in _PLACES:
    if place + TABLE in saved:
      return {k.removeprefix(place): x for k, x in saved.items() if k.startswith(place)}
  some = ", ".join(list(saved)[:_NAMED]) or "nothing"
  raise InputError(f"{path} holds no T5, for nothing in it is called {TABLE}; it has {some}.")


def inferred_config(path: str, arrays: Mapping[str, Stored]) -> T5Config:
  """The shape of a T5, as its arrays tell it; gated is taken for GELU and not gated for ReLU."""
  layers = lambda stack: {k.split("/")[1] for k in arrays if re.match(rf"{stack}/layers_\d+/", k)}
  try:
    rows, emb_dim = arrays[TABLE].shape
    num_heads, _ = arrays["encoder/relpos_bias/rel_embedding"].shape
    _, width = arrays["encoder/layers_0/attention/query/kernel"].shape
    mlp_dim, _ = arrays["encoder/layers_0/mlp/wo/kernel"].shape
    head_dim = width // num_heads
  except (KeyError, ValueError, ZeroDivisionError) as error:
    raise InputError(f"{path} is not laid out as t5x lays out a T5: {error}.") from error
  gated = "encoder/layers_0/mlp/wi_0/kernel" in arrays
  return T5Config(
    vocab_size=rows,
    emb_dim=emb_dim,
    num_heads=num_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    num_encoder_layers=len(layers("encoder")),
    num_decoder_layers=len(layers("decoder")),
    gated=gated,
    activation="gelu" if gated else "relu",
    tied_logits=LOGITS not in arrays,
  )
