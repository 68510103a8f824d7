"""Contract and configuration of learned draft heads: small modules on a target's hidden states.

A head is trained with its target frozen and drafts only for that target. A new kind of head is one
file here with a subclass of `DraftHead`, and one entry in `drafts.heads.HEADS`.

Axis letters as in `core.types`, and A anchors per text: positions at which a training text is
drafted from.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Int, Key, Shaped

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, Tree, require_static
from specdec_jax.core.types import Context, Draft
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.config import T5Config, TransformerConfig
from specdec_jax.models.decoder import KeysValues
from specdec_jax.models.families import Config
from specdec_jax.models.simulated import unwrapped_cache

# Cross-attention keys and values of one layer of the target, and their bias; None without encoder.
Source = tuple[KeysValues, Array] | tuple[None, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculatorConfig(TransformerConfig):
  """Configuration of a learned draft head.

  `emb_dim` is the width of the head itself. The number and the size of its attention heads are
  those of the target.

  Attributes:
    kind: name of the head in `drafts.heads.HEADS`.
    state_dim: E of the target.
    gamma: number of consecutive draft tokens that the head is trained for. Heads of kind 'heads',
      'parallel' and 'pass' propose at most this many; the others may propose more.
    rank: rank of the correction of 'parallel'.
    exit_layers: for 'early_exit', number of the target's layers that run before the head.
    has_encoder: whether the target has an encoder.
  """

  embedding_std: ClassVar[float] = 1.0
  logits_divisor: ClassVar[float] = 1.0

  kind: str
  state_dim: int
  gamma: int
  rank: int = 64
  exit_layers: int = 1
  has_encoder: bool = True

  def __post_init__(self):
    super().__post_init__()
    for name in ("state_dim", "gamma", "rank", "exit_layers"):
      require_count(name, getattr(self, name))


class TargetOutputs(NamedTuple):
  """Outputs of the teacher-forced target for a batch.

  Attributes:
    inputs: token before each token of the text.
    hidden: the target's hidden state that predicted each of `inputs`; 0 for the first.
    cache: the target's cache of length 0, with the source, and with all of `inputs` in its slots.
    rng: key for the random choice of anchors; None for fixed anchors.
  """

  inputs: Int[Array, "B T"]
  hidden: Float[Array, "B T E"]
  cache: Any
  rng: Key[Array, ""] | None


# (parameters, target parameters, target outputs) -> logits [B, A, N, V] of the draft tokens, and
# the positions [B, A, N] in the text of the tokens that they predict.
DraftLogits = Callable[[Any, Any, TargetOutputs], tuple[Array, Array]]


@dataclasses.dataclass(frozen=True)
class DraftHead(abc.ABC):
  """Learned draft head of one kind: its parameters, its draft and its training logits.

  Attributes:
    config: configuration of the head.
    needs_encoder: whether the head attends to the target's encoder and cannot do without it.
    uses_cross_attention: whether the head attends to the source, if the target has an encoder, by
      the target's cross-attention keys and values.
  """

  config: SpeculatorConfig
  needs_encoder: ClassVar[bool] = False
  uses_cross_attention: ClassVar[bool] = False

  @abc.abstractmethod
  def init(self, rng: Key[Array, ""]) -> Any:
    """Return random parameters (float32)."""

  @abc.abstractmethod
  def draft(self, target: Config, sampling: Sampling, tree: AnyTree) -> Draft:
    """Return the draft for a target.

    Raises:
      InputError: the head cannot propose this tree.
    """

  def draft_params(self, target: Config, params: Any, target_params: Any) -> Any:
    """Return the parameters of the draft; by default they are those of the head."""
    return params

  @abc.abstractmethod
  def training_logits(self, target: Config, stride: int) -> DraftLogits:
    """Return the function that computes teacher-forced logits, for the training loss.

    Args:
      target: configuration of the target.
      stride: distance between anchors, in tokens.
    """

  def require_target(self, target: Config) -> None:
    """Raise InputError if the head is for a target of another shape."""
    config = self.config
    if self.needs_encoder and not target.has_encoder:
      raise InputError(
        f"A draft of kind {config.kind!r} shares an encoder, and this target has none."
      )
    expected: tuple[Any, ...] = config.has_encoder, config.state_dim
    actual: tuple[Any, ...] = target.has_encoder, target.emb_dim
    if self.uses_cross_attention and config.has_encoder:
      expected += config.num_heads, config.head_dim
      actual += target.num_heads, target.head_dim
    if expected != actual or config.exit_layers > target.num_decoder_layers:
      raise InputError(
        f"The draft is for a target with (encoder, emb_dim, heads) {expected}, this one has "
        f"{actual}; use the target that it was trained on."
      )

  def require_static(self, tree: AnyTree) -> Tree:
    """Return the tree, or raise InputError if it is dynamic."""
    return require_static(f"a draft of kind {self.config.kind!r}", tree)

  def example_source(self) -> tuple[KeysValues, Array]:
    """Return example keys, values and bias of one source token, to initialize parameters."""
    keys = jnp.zeros((1, self.config.num_heads, 1, self.config.head_dim))
    return (keys, keys), jnp.zeros((1, 1, 1, 1))


def require_depth(config: SpeculatorConfig, depth: int) -> None:
  """Raise InputError if a head has been trained for fewer consecutive draft tokens than `depth`."""
  if depth > config.gamma:
    raise InputError(
      f"gamma is {depth}, but this draft makes up to {config.gamma} guesses in a row; lower gamma."
    )


def decoder_config(config: SpeculatorConfig) -> T5Config:
  """Return the configuration of a T5 whose decoder is the head; its encoder is never used."""
  shared = {
    field.name: getattr(config, field.name) for field in dataclasses.fields(TransformerConfig)
  }
  return T5Config(**shared, num_encoder_layers=1)


def target_cache(context: Context) -> Any:
  """Return the cache of the target, without the wrapper of simulated acceptance."""
  return unwrapped_cache(context.target_cache)


def gather_positions(x: ArrayLike, positions: Int[Array, "B A N"]) -> Shaped[Array, "B A N *rest"]:
  """Return the entries of x [B, T, ...] at positions; 0 past the end of x."""
  x, rows = jnp.asarray(x), jnp.arange(len(positions))[:, None, None]
  return x.at[rows, positions].get(mode="fill", fill_value=0)


def every_position(inputs: Int[Array, "B T"]) -> Int[Array, "B T 1"]:
  """Return positions that make each token of the text an anchor with one draft token."""
  batch, length = inputs.shape
  return jnp.broadcast_to(jnp.arange(length)[None, :, None], (batch, length, 1))
