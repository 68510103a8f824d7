"""Contract of learned draft heads: small modules trained for one target, which is usually frozen.

Most heads reuse results of the target, such as its hidden states or the encoded source. A new kind
of head needs one file with a subclass of `DraftHead`, and one entry in `registry.HEADS`.

Axis letters are those of `core.types`. A is the number of anchors per text: the positions of a
training text from which the head drafts.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Int, Key, Shaped

from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, Tree, require_static
from specdec_jax.core.types import Draft, DraftOptions
from specdec_jax.drafts.layer_skip import require_layers
from specdec_jax.errors import InputError
from specdec_jax.models.config import T5Config, TransformerConfig
from specdec_jax.models.decoder import KeysValues
from specdec_jax.models.families import Config
from specdec_jax.models.simulated import unwrapped_cache

# Cross-attention keys and values of a layer of the target, and their bias; None without an encoder.
Source = tuple[KeysValues, Array] | tuple[None, None]


class TargetOutputs(NamedTuple):
  """Outputs of the teacher-forced target for a batch of texts.

  Attributes:
    inputs: for each token of the text, the token before it.
    hidden: hidden state from which the target predicted each input; 0 for the first input.
    cache: cache of the target. It holds the source or the prompt, and all inputs. Its `length` does
      not count the inputs.
    rng: key for the random choices of training, such as the anchors; None for fixed anchors.
    targets: tokens of the text, padded with -1.
    progress: fraction of all training steps that are completed.
  """

  inputs: Int[Array, "B T"]
  hidden: Float[Array, "B T E"]
  cache: Any
  rng: Key[Array, ""] | None
  source: Int[Array, "B S"]
  targets: Int[Array, "B T"]
  progress: Float[Array, ""] | float


class TrainingLogits(NamedTuple):
  """Teacher-forced logits of draft tokens, from which training computes the loss.

  Attributes:
    positions: positions of the predicted tokens in the text.
    loss: further loss, such as that of predicted hidden states.
  """

  logits: Float[Array, "B A N V"]
  positions: Int[Array, "B A N"]
  loss: Float[Array, ""] | float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftHead(TransformerConfig, abc.ABC):
  """Learned draft head: its sizes, and how it is initialized, trained and used as a draft.

  A subclass has fields for its own settings, and implements one kind of head or several
  (`registry.HEADS`). The sizes of `TransformerConfig` are those of the head's own layers, if it has
  any; attention heads are of the target's size.

  Attributes:
    state_dim: width of the target's hidden states, E.
    uses_cross_attention: whether the head attends to the target's cross-attention keys and values.
    uses_target_logits: whether the head computes its logits with the target's parameters.
  """

  embedding_std: ClassVar[float] = 1.0
  logits_divisor: ClassVar[float] = 1.0
  needs_encoder: ClassVar[bool] = False
  uses_cross_attention: ClassVar[bool] = False
  uses_target_logits: ClassVar[bool] = False

  kind: str
  state_dim: int
  has_encoder: bool = True
  emb_dim: int = 160
  mlp_dim: int = 512
  num_decoder_layers: int = 2

  @property
  def feature_layers(self) -> tuple[int, ...]:
    """Layers of the target whose outputs the head reads; () for those after the final norm."""
    return ()

  @property
  def t5(self) -> T5Config:
    """Configuration of a T5 whose decoder is the head."""
    names = {field.name for field in dataclasses.fields(T5Config)} & vars(self).keys()
    return T5Config(**{"num_encoder_layers": 1} | {name: getattr(self, name) for name in names})

  @abc.abstractmethod
  def init(self, rng: Key[Array, ""]) -> Any:
    """Return random parameters of the head (float32)."""

  @abc.abstractmethod
  def draft(
    self, target: Config, sampling: Sampling, tree: AnyTree, options: DraftOptions
  ) -> Draft:
    """Return the draft that proposes with this head; InputError if it cannot propose `tree`."""

  def draft_params(self, target: Config, params: Any, target_params: Any) -> Any:
    """Return the parameters of the draft; by default those of the head."""
    return params

  @abc.abstractmethod
  def training_logits(
    self, params: Any, target: Config, target_params: Any, outputs: TargetOutputs, stride: int
  ) -> TrainingLogits:
    """Return the logits of draft tokens for the training loss.

    `stride` is the distance between anchors in tokens; heads with an anchor per token ignore it.
    """

  def require_target(self, target: TransformerConfig) -> None:
    """Raise InputError if the target lacks the encoder, shape or layers that the head needs."""
    if self.needs_encoder and not target.has_encoder:
      raise InputError(
        f"A draft of kind {self.kind!r} needs a source, and this target has no encoder."
      )
    expected: tuple[Any, ...] = self.has_encoder, self.state_dim
    width = target.emb_dim * max(1, len(self.feature_layers))
    actual: tuple[Any, ...] = target.has_encoder, width
    if self.uses_cross_attention and self.has_encoder:
      expected += self.kv_heads, self.head_dim
      actual += target.kv_heads, target.head_dim
    if expected != actual:
      raise InputError(
        f"The draft is for a target with (encoder, width of states, heads) {expected}, this one "
        f"has {actual}; use the target that it was trained on."
      )
    if self.feature_layers:
      require_layers(self.feature_layers, target.num_decoder_layers)

  def require_static(self, tree: AnyTree) -> Tree:
    """Return `tree`, or raise InputError if it is dynamic."""
    return require_static(f"a draft of kind {self.kind!r}", tree)

  def example_source(self) -> tuple[KeysValues, Array]:
    """Return zeros as keys, values and bias of one source token."""
    keys = jnp.zeros((1, self.kv_heads, 1, self.head_dim), jnp.float32)
    return (keys, keys), jnp.zeros((1, 1, 1, 1), jnp.float32)


def require_depth(gamma: int, depth: int) -> None:
  """Raise InputError if `depth` exceeds the number of consecutive draft tokens of a head."""
  if depth > gamma:
    raise InputError(
      f"gamma is {depth}, but this draft proposes at most {gamma} consecutive draft tokens; "
      "lower gamma."
    )


def target_cache(context: Context) -> Any:
  """Return the target's cache without the wrapper that simulated acceptance adds to it."""
  return unwrapped_cache(context.target_cache)


def gather_positions(
  x: ArrayLike, positions: Int[Array, "B A N"], fill_value: int = 0
) -> Shaped[Array, "B A N *rest"]:
  """Return the entries of `x` [B, T, ...] at `positions`, or `fill_value` past its end."""
  x, rows = jnp.asarray(x), jnp.arange(len(positions))[:, None, None]
  return x.at[rows, positions].get(mode="fill", fill_value=fill_value)


def round_positions(
  inputs: Int[Array, "B T"], rng: Key[Array, ""] | None, stride: int, gamma: int
) -> Int[Array, "B A N"]:
  """Return the positions of gamma draft tokens after each anchor, starting with the anchor's own.

  Every `stride`-th token is an anchor. The first is a random one of the first `stride` tokens; if
  `rng` is None, it is the first token.
  """
  batch, length = inputs.shape
  offset = 0 if rng is None else jax.random.randint(rng, (), 0, stride)
  anchors = offset + stride * jnp.arange(max(1, length // stride))
  return jnp.broadcast_to(anchors[:, None] + jnp.arange(gamma)[None], (batch, len(anchors), gamma))


def every_position(inputs: Int[Array, "B T"]) -> Int[Array, "B T 1"]:
  """Return the positions of all tokens, for training with one draft token per anchor."""
  batch, length = inputs.shape
  return jnp.broadcast_to(jnp.arange(length)[None, :, None], (batch, length, 1))
