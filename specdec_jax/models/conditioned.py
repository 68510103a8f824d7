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

from specdec_jax.core.trees import AnyNodes
from specdec_jax.models.config import T5Config
from specdec_jax.models.decoder import KeysValues, write
from specdec_jax.models.layers import Dense, norm
from specdec_jax.models.t5 import T5, T5Cache, T5Model


class ConditionedT5(T5):
  """A T5 whose encoder is never asked. Of its cache the last of `layers` is what a token in each
  slot is told, [B, 1, T, d], which goes where the token goes.

  Attributes:
    ages: tokens since an anchor that are told apart; all later ones are alike.
  """

  ages: int = 1

  def setup(self):
    super().setup()
    self.state_norm, self.state = norm(self.config), Dense(self.config, self.config.emb_dim)
    shape = self.ages, self.config.emb_dim
    self.age = self.param("age", jax.nn.initializers.normal(1.0), shape, jnp.float32)

  def tell(self, hidden: Array, ages: Array | int) -> Array:
    """What tokens are told, [..., d], of states [..., E] so many tokens ago [...]."""
    age = self.age[jnp.minimum(ages, self.ages - 1)].astype(self.config.activations)
    return self.state(self.state_norm(hidden)) + age

  def after_each(
    self,
    inputs: Array,
    hidden: Array,
    ages: Array,
    cross: tuple[KeysValues, ...],
    cross_bias: Array,
  ) -> Array:
    """Teacher-forced logits [B, K, V] of inputs [B, K] that are told `hidden` [B, K, E]."""
    x = self.token_embedder(inputs) + self.tell(hidden, ages)
    return self.decoder(x, self.token_embedder.embedding, cross, cross_bias)[0]

  def extend(
    self, cache: T5Cache, tokens: Array, tree: AnyNodes | None = None, first: Array | int = 0
  ) -> tuple[Array, Array, T5Cache]:
    layers, told = cache.layers[:-1], cache.layers[-1][0]
    size = 1, tokens.shape[1], told.shape[3]
    read_row = lambda row, at: lax.dynamic_slice(row, (0, at, 0), size)[0]
    x = self.token_embedder(tokens) + jax.vmap(read_row)(told, cache.length + first)
    logits, hidden, read = self.read(cache.replace(layers=layers), x, tree, first)
    return logits, hidden, read.replace(layers=(*read.layers, (told,)))


@dataclasses.dataclass(frozen=True)
class ConditionedModel(T5Model):
  """It behind the `Model` contract; `tell` says what tokens to come are told.

  Attributes:
    ages: of the module.
  """

  config: T5Config
  ages: int

  def tell(
    self, params: Any, cache: T5Cache, hidden: Array, ages: Array | int, slot: Array
  ) -> T5Cache:
    """The cache of K tokens that are to be read in the slots from `slot` [B] on, when the target's
    states [B, K or 1, E], so many tokens ago, [K] or all alike, are what they are told."""
    layers, told = cache.layers[:-1], cache.layers[-1][0]
    module = ConditionedT5(self.config, ages=self.ages)
    new = module.apply({"params": params}, hidden, ages, method="tell")
    return cache.replace(layers=(*layers, (write(told, new[:, None], slot),)))

  def extend(
    self,
    params: Any,
    cache: T5Cache,
    tokens: Array,
    tree: AnyNodes | None = None,
    first: Array | int = 0,
  ) -> tuple[Array, Array, T5Cache]:
    apply = ConditionedT5(self.config, ages=self.ages).apply
    return apply({"params": params}, cache, tokens, tree, first, method="extend")
