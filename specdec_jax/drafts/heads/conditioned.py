"""Small decoder conditioned on the target's hidden state at the start of the round.

Like the decoder in `shared_encoder`, it attends to the target's encoding of the source. It adds two
vectors to the embedding of each token: a projection of the target's hidden state at the start of
the round that processes the token, and an embedding of the token's offset, which is the number of
tokens since the start of that round. Tokens of earlier rounds keep their conditioning, so the text
is never processed again. In training, one pass over a text covers rounds of many lengths.

Axis letters are those of `core.types`; d is the width of the head, and M the number of hidden
states (K or 1).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Key

from specdec_jax.core.arrays import gather, write_slots
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, NodeLayout
from specdec_jax.core.types import Context, Draft
from specdec_jax.drafts.heads.base import (
  DraftHead,
  DraftLogits,
  TargetOutputs,
  decoder_config,
  every_position,
)
from specdec_jax.drafts.heads.shared_encoder import SharedEncoderDraft, empty_cache
from specdec_jax.drafts.layer_skip import require_layers
from specdec_jax.models.config import T5Config, TransformerConfig
from specdec_jax.models.decoder import KeysValues
from specdec_jax.models.families import Config
from specdec_jax.models.layers import Dense, norm
from specdec_jax.models.t5 import T5, T5Cache, T5Model


class ConditionedT5(T5):
  """T5 whose decoder is conditioned on the target's hidden states; its encoder is never used.

  Its cache has an additional entry in `layers`: an array [B, 1, T, d] of the vectors that
  `condition` returned for the token in each slot. They are thus committed together with the tokens.

  Attributes:
    offsets: number of offsets, from 0, that have an embedding; larger offsets share the last
      embedding. The offset of a token is the number of tokens since the start of the round.
  """

  offsets: int = 1

  def setup(self):
    super().setup()
    self.state_norm, self.state = norm(self.config), Dense(self.config, self.config.emb_dim)
    shape = self.offsets, self.config.emb_dim
    # "age" is the name of the parameter in checkpoints.
    self.age = self.param("age", jax.nn.initializers.normal(1.0), shape, jnp.float32)

  def condition(
    self, hidden: Float[Array, "*batch E"], offsets: Int[Array, "*offsets"] | int
  ) -> Float[Array, "*tokens d"]:
    """Return the conditioning vectors of tokens: each is added to the embedding of its token.

    Args:
      hidden: for each token, hidden state of the target at the start of the round that processes
        it.
      offsets: number of tokens from the start of that round to each token. It broadcasts against
        the leading axes of `hidden`.
    """
    embedded = self.age[jnp.minimum(offsets, self.offsets - 1)].astype(self.config.activations)
    return self.state(self.state_norm(hidden)) + embedded

  def after_each(
    self,
    inputs: Int[Array, "B T"],
    hidden: Float[Array, "B T E"],
    anchors: Int[Array, "B T"],
    cross: tuple[KeysValues, ...],
    cross_bias: Float[Array, "B 1 1 S"],
  ) -> Float[Array, "B T V"]:
    """Return the teacher-forced logits after each input.

    Args:
      inputs: input tokens.
      hidden: for each input, hidden state from which the target predicted it.
      anchors: for each input, position of the last committed token in the round that processes it.
      cross: cross-attention keys and values of each layer.
      cross_bias: bias of cross-attention.
    """
    offsets = jnp.arange(inputs.shape[1]) - anchors
    x = self.token_embedder(inputs) + self.condition(gather(hidden, anchors), offsets)
    return self.decoder(x, self.token_embedder.embedding, cross, cross_bias)[0]

  def extend(
    self,
    cache: T5Cache,
    tokens: Int[Array, "B K"],
    tree: NodeLayout | None = None,
    first: Int[Array, ""] | int = 0,
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K d"], T5Cache]:
    layers, conditioning = cache.layers[:-1], cache.layers[-1][0]
    size = 1, tokens.shape[1], conditioning.shape[3]

    def read_row(row: Float[Array, "1 T d"], slot: Int[Array, ""]) -> Float[Array, "K d"]:
      return lax.dynamic_slice(row, (0, slot, 0), size)[0]

    x = self.token_embedder(tokens) + jax.vmap(read_row)(conditioning, cache.length + first)
    logits, hidden, extended = self.extend_embedded(cache.replace(layers=layers), x, tree, first)
    return logits, hidden, extended.replace(layers=(*extended.layers, (conditioning,)))


@dataclasses.dataclass(frozen=True)
class ConditionedModel(T5Model):
  """Draft model with a conditioned decoder.

  Attributes:
    offsets: see `ConditionedT5`.
  """

  config: T5Config
  offsets: int

  @property
  def module(self) -> ConditionedT5:
    return ConditionedT5(self.config, offsets=self.offsets)

  def empty_cache(self, context: Context, num_slots: int) -> T5Cache:
    """Return a cache without tokens, which holds the source as encoded by the target."""
    cache, config = empty_cache(self.config, context, num_slots), self.config
    shape = len(context.tokens), 1, num_slots, config.emb_dim
    return cache.replace(layers=(*cache.layers, (jnp.zeros(shape, config.activations),)))

  def condition(
    self,
    params: Any,
    cache: T5Cache,
    hidden: Float[Array, "B M E"],
    offsets: Int[Array, " K"] | int,
    slot: Int[Array, " B"],
  ) -> T5Cache:
    """Write to the cache the vectors that condition the next tokens, and return the cache.

    Args:
      params: parameters of the model.
      cache: cache of the model.
      hidden: for each token, hidden state of the target at the start of the round that processes
        it; or a single state if one round processes all tokens.
      offsets: number of tokens from the start of the round to each token.
      slot: slot of the first token.
    """
    new = self.module.apply({"params": params}, hidden, offsets, method="condition")
    return self.write_conditioning(cache, new, slot)

  def write_conditioning(
    self, cache: T5Cache, new: Float[Array, "B M d"], slot: Int[Array, " B"]
  ) -> T5Cache:
    """Return the cache with conditioning vectors in the slots from `slot` on."""
    written = write_slots(cache.layers[-1][0], new[:, None], slot)
    return cache.replace(layers=(*cache.layers[:-1], (written,)))

  def extend(
    self,
    params: Any,
    cache: T5Cache,
    tokens: Int[Array, "B K"],
    tree: NodeLayout | None = None,
    first: Int[Array, ""] | int = 0,
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K d"], T5Cache]:
    return self.module.apply({"params": params}, cache, tokens, tree, first, method="extend")


@dataclasses.dataclass(frozen=True)
class ConditionedDraft(SharedEncoderDraft):
  """A draft that samples a chain or a static tree from a conditioned decoder."""

  model: ConditionedModel

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    return self.model.empty_cache(context, context.tokens.shape[1])

  def condition(
    self,
    params: Any,
    cache: Any,
    hidden: Float[Array, "B M E"],
    offsets: Int[Array, " K"] | int,
    slot: Int[Array, " B"],
  ) -> Any:
    return self.model.condition(params, cache, hidden, offsets, slot)

  def start_round(
    self, params: Any, state: Any, context: Context
  ) -> tuple[Float[Array, "B V"], Any]:
    offsets, slot = jnp.asarray(self.tree.depths), context.length - 1
    state = self.condition(params, state, context.hidden[:, None], offsets, slot)
    return super().start_round(params, state, context)


@dataclasses.dataclass(frozen=True)
class ConditionedHead(DraftHead):
  """Learned draft head with a conditioned decoder (kind 'conditioned')."""

  needs_encoder = True
  uses_cross_attention = True

  @property
  def module(self) -> ConditionedT5:
    return ConditionedT5(decoder_config(self.config), offsets=self.config.gamma)

  @property
  def feature_layers(self) -> tuple[int, ...]:
    return self.config.layers or ()

  def require_target(self, target: TransformerConfig) -> None:
    super().require_target(target)
    if self.config.layers is not None:
      require_layers(self.config.layers, target.num_decoder_layers)

  def init(self, rng: Key[Array, ""]) -> Any:
    config, tokens = self.config, jnp.zeros((1, self.config.gamma), jnp.int32)
    source, bias = self.example_source()
    cross, anchors = (source,) * config.num_decoder_layers, jnp.zeros_like(tokens)
    hidden = jnp.zeros((*tokens.shape, config.state_dim))
    return self.module.init(rng, tokens, hidden, anchors, cross, bias, method="after_each")[
      "params"
    ]

  def draft(self, target: Config, sampling: Sampling, tree: AnyTree) -> Draft:
    model = ConditionedModel(decoder_config(self.config), self.config.gamma)
    return ConditionedDraft(model, sampling, self.require_static(tree))

  def training_logits(self, target: Config, stride: int) -> DraftLogits:
    """Return the function that computes logits at each token, conditioned on its anchor.

    The anchor of a token is the last anchor at or before the token, or the first token if there is
    none. In validation, every `stride`-th token is an anchor. In training, each token is an anchor
    with probability 1 / `stride`, because rounds have many lengths.
    """
    config, module = self.config, self.module

    def draft_logits(
      params: Any, frozen: Any, outputs: TargetOutputs
    ) -> tuple[Float[Array, "B T 1 V"], Int[Array, "B T 1"]]:
      batch, length = outputs.inputs.shape
      positions = jnp.arange(length)
      is_anchor = jnp.broadcast_to(positions % stride == 0, (batch, length))
      if outputs.rng is not None:
        is_anchor = jax.random.bernoulli(outputs.rng, 1 / stride, (batch, length))
      anchors = lax.cummax(jnp.where(is_anchor, positions, 0), axis=1)
      logits = module.apply(
        {"params": params},
        outputs.inputs,
        outputs.hidden,
        anchors,
        outputs.cache.cross[-config.num_decoder_layers :],
        outputs.cache.cross_bias,
        method="after_each",
      )
      return logits[:, :, None], every_position(outputs.inputs)

    return draft_logits
