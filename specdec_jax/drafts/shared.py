"""A small decoder as draft that reads the source as its target has encoded it.

It has its own table, its own text and no encoder: keys and values of the source are those of the
target's last layers, which it learned to ask.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.speculator import target_cache
from specdec_jax.models.decoder import empty_slots
from specdec_jax.models.t5 import T5Cache, T5Model
from specdec_jax.protocols import Context


@dataclasses.dataclass(frozen=True)
class SharedDraft(ModelDraft):
  """As `ModelDraft`, of a T5 without an encoder."""

  model: T5Model

  def start(self, params: Any, context: Context, hidden: Array) -> Any:
    config, cache = self.model.config, target_cache(context)
    batch, num_slots = context.tokens.shape
    return T5Cache(
      length=jnp.zeros(batch, jnp.int32),
      layers=empty_slots(config, batch, num_slots),
      cross=cache.cross[-config.num_decoder_layers :],
      cross_bias=cache.cross_bias,
    )
