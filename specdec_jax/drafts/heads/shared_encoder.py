"""Small decoder that attends to the target's encoding of the source.

It has token embeddings and a cache of the text, but no encoder. In training and in decoding, its
layers attend to the cross-attention keys and values of the target's last layers.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Key

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import Context
from specdec_jax.drafts.heads.base import (
  DraftHead,
  DraftLogits,
  TargetOutputs,
  decoder_config,
  every_position,
  target_cache,
)
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.models.config import T5Config
from specdec_jax.models.decoder import empty_slots
from specdec_jax.models.families import Config
from specdec_jax.models.t5 import T5, T5Cache, T5Model


@dataclasses.dataclass(frozen=True)
class SharedEncoderDraft(ModelDraft):
  """A draft that samples from a T5 decoder, which attends to the target's encoded source."""

  model: T5Model

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    return empty_cache(self.model.config, context, context.tokens.shape[1])


def empty_cache(config: T5Config, context: Context, num_slots: int) -> T5Cache:
  """Return a cache without tokens, which holds the source as encoded by the target."""
  cache, batch = target_cache(context), len(context.tokens)
  return T5Cache(
    length=jnp.zeros(batch, jnp.int32),
    layers=empty_slots(config, batch, num_slots),
    cross=cache.cross[-config.num_decoder_layers :],
    cross_bias=cache.cross_bias,
  )


@dataclasses.dataclass(frozen=True)
class SharedEncoderHead(DraftHead):
  """Learned draft head with a decoder that uses the target's encoder (kind 'shared_encoder')."""

  needs_encoder = True
  uses_cross_attention = True

  def init(self, rng: Key[Array, ""]) -> Any:
    config, tokens = self.config, jnp.zeros((1, self.config.gamma), jnp.int32)
    source, bias = self.example_source()
    cross = (source,) * config.num_decoder_layers
    cache = T5Cache(jnp.zeros(1, jnp.int32), empty_slots(config, 1, config.gamma), cross, bias)
    return T5(decoder_config(config)).init(rng, cache, tokens, method=T5.extend)["params"]

  def draft(self, target: Config, sampling: Sampling, tree: AnyTree) -> SharedEncoderDraft:
    model = T5Model(decoder_config(self.config))
    return SharedEncoderDraft(model, sampling, self.require_static(tree))

  def training_logits(self, target: Config, stride: int) -> DraftLogits:
    """Return the function that computes logits at each token.

    Each token is an anchor with one draft token, for any `stride`.
    """
    config, module = self.config, T5(decoder_config(self.config))

    def draft_logits(
      params: Any, frozen: Any, outputs: TargetOutputs
    ) -> tuple[Float[Array, "B T 1 V"], Int[Array, "B T 1"]]:
      logits = module.apply(
        {"params": params},
        outputs.inputs,
        cross=outputs.cache.cross[-config.num_decoder_layers :],
        cross_bias=outputs.cache.cross_bias,
        method="on_source",
      )
      return logits[:, :, None], every_position(outputs.inputs)

    return draft_logits
