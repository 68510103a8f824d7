"""Small decoders as drafts that read the source as their target has encoded it.

They have their own table, their own text and no encoder: keys and values of the source are those of
the target's last layers, which they learned to ask.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from specdec_jax.core.types import Context, Proposal
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.speculator import target_cache
from specdec_jax.models.conditioned import ConditionedModel
from specdec_jax.models.decoder import empty_slots
from specdec_jax.models.t5 import T5Cache, T5Model


@dataclasses.dataclass(frozen=True)
class SharedEncoderDraft(ModelDraft):
  """As `ModelDraft`, of a T5 without an encoder."""

  model: T5Model

  def init(self, params: Any, context: Context, hidden: Array) -> Any:
    config, cache = self.model.config, target_cache(context)
    batch, num_slots = context.tokens.shape
    return T5Cache(
      length=jnp.zeros(batch, jnp.int32),
      layers=empty_slots(config, batch, num_slots),
      cross=cache.cross[-config.num_decoder_layers :],
      cross_bias=cache.cross_bias,
    )


@dataclasses.dataclass(frozen=True)
class ConditionedDraft(SharedEncoderDraft):
  """As `SharedEncoderDraft`, told at each token what the target knew where the round began."""

  model: ConditionedModel

  def init(self, params: Any, context: Context, hidden: Array) -> Any:
    cache, config = super().init(params, context, hidden), self.model.config
    batch, num_slots = context.tokens.shape
    told = jnp.zeros((batch, 1, num_slots, config.emb_dim), config.activations)
    return cache.replace(layers=(*cache.layers, (told,)))

  def condition(
    self, params: Any, cache: Any, hidden: Array, offsets: Array | int, slot: Array
  ) -> Any:
    return self.model.condition(params, cache, hidden, offsets, slot)

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    offsets, slot = jnp.asarray(self.tree.depths), context.length - 1
    state = self.condition(params, state, context.hidden[:, None], offsets, slot)
    return super().propose(params, state, context, rng)
