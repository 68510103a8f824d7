"""A small decoder that is told what the target knew where the round began: its anchor.

To the embedding of each token is added the target's state where it chose the round's first token,
and how many tokens ago that was. What was written before keeps what it was told then, so nothing of
the text is read again, and a pass over many tokens trains rounds of many lengths at once.

Axes: B batch, K tokens in a block, T cache slots, E embed of the target, d of the decoder, V
vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.core.arrays import write_slots
from specdec_jax.core.trees import NodeLayout
from specdec_jax.models.config import T5Config
from specdec_jax.models.decoder import KeysValues
from specdec_jax.models.layers import Dense, norm
from specdec_jax.models.t5 import T5, T5Cache, T5Model


class ConditionedT5(T5):
  """A T5 whose encoder is never asked. Of its cache the last of `layers` is what a token in each
  slot is told, [B, 1, T, d], which goes where the token goes.

  Attributes:
    offsets: tokens since an anchor that are told apart; all later ones are alike.
  """

  offsets: int = 1

  def setup(self):
    super().setup()
    self.state_norm, self.state = norm(self.config), Dense(self.config, self.config.emb_dim)
    shape = self.offsets, self.config.emb_dim
    self.age = self.param("age", jax.nn.initializers.normal(1.0), shape, jnp.float32)

  def condition(self, hidden: Array, offsets: Array | int) -> Array:
    """What tokens are told, [..., d], of states [..., E] so many tokens ago [...]."""
    age = self.age[jnp.minimum(offsets, self.offsets - 1)].astype(self.config.activations)
    return self.state(self.state_norm(hidden)) + age

  def after_each(
    self,
    inputs: Array,
    hidden: Array,
    offsets: Array,
    cross: tuple[KeysValues, ...],
    cross_bias: Array,
  ) -> Array:
    """Teacher-forced logits [B, K, V] of inputs [B, K] that are told `hidden` [B, K, E]."""
    x = self.token_embedder(inputs) + self.condition(hidden, offsets)
    return self.decoder(x, self.token_embedder.embedding, cross, cross_bias)[0]

  def extend(
    self, cache: T5Cache, tokens: Array, tree: NodeLayout | None = None, first: Array | int = 0
  ) -> tuple[Array, Array, T5Cache]:
    layers, told = cache.layers[:-1], cache.layers[-1][0]
    size = 1, tokens.shape[1], told.shape[3]
    read_row = lambda row, at: lax.dynamic_slice(row, (0, at, 0), size)[0]
    x = self.token_embedder(tokens) + jax.vmap(read_row)(told, cache.length + first)
    logits, hidden, read = self.read(cache.replace(layers=layers), x, tree, first)
    return logits, hidden, read.replace(layers=(*read.layers, (told,)))


@dataclasses.dataclass(frozen=True)
class ConditionedModel(T5Model):
  """It behind the `Model` contract; `condition` says what tokens to come are told.

  Attributes:
    offsets: of the module.
  """

  config: T5Config
  offsets: int

  def condition(
    self, params: Any, cache: T5Cache, hidden: Array, offsets: Array | int, slot: Array
  ) -> T5Cache:
    """The cache of K tokens that are to be read in the slots from `slot` [B] on, when the target's
    states [B, K or 1, E], so many tokens ago, [K] or all alike, are what they are told."""
    layers, told = cache.layers[:-1], cache.layers[-1][0]
    module = ConditionedT5(self.config, offsets=self.offsets)
    new = module.apply({"params": params}, hidden, offsets, method="condition")
    return cache.replace(layers=(*layers, (write_slots(told, new[:, None], slot),)))

  def extend(
    self,
    params: Any,
    cache: T5Cache,
    tokens: Array,
    tree: NodeLayout | None = None,
    first: Array | int = 0,
  ) -> tuple[Array, Array, T5Cache]:
    apply = ConditionedT5(self.config, offsets=self.offsets).apply
    return apply({"params": params}, cache, tokens, tree, first, method="extend")
