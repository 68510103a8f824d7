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
from flax import struct
from jax import Array, lax

from specdec_jax.models.config import T5Config
from specdec_jax.models.decoder import KeysValues
from specdec_jax.models.layers import Dense, norm
from specdec_jax.models.t5 import T5, T5Cache, T5Model
from specdec_jax.trees import AnyTree


@struct.dataclass
class AnchoredCache(T5Cache):
  """A cache, and what a token at each place of the text is told, [B, T, d]."""

  told: Array


class Anchored(T5):
  """A T5 whose encoder is never asked.

  Attributes:
    ages: tokens since an anchor that are told apart; all later ones are alike.
  """

  ages: int = 1

  def setup(self):
    super().setup()
    self.state_norm, self.state = norm(self.config), Dense(self.config, self.config.emb_dim)
    shape = self.ages, self.config.emb_dim
    self.age = self.param("age", jax.nn.initializers.normal(1.0), shape, jnp.float32)

  def tell(self, hidden: Array, ages: Array) -> Array:
    """What tokens [...] are told, [..., d], of states [..., E] so many tokens ago [...]."""
    return self.state(self.state_norm(hidden)) + self.age[jnp.minimum(ages, self.ages - 1)].astype(
      self.config.activations
    )

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
    self, cache: AnchoredCache, tokens: Array, tree: AnyTree | None = None, first: Array | int = 0
  ) -> tuple[Array, Array, T5Cache]:
    depths = first + jnp.arange(tokens.shape[1])
    if tree is not None and not tree.is_chain:
      depths = jnp.asarray(tree.depths)[depths]
    places = cache.length[:, None] + depths
    told = jnp.take_along_axis(cache.told, places[..., None], axis=1)
    return self.read(cache, self.token_embedder(tokens) + told, tree, first)


@dataclasses.dataclass(frozen=True)
class AnchoredModel(T5Model):
  """It behind the `Model` contract; `anchor` says what the tokens to come are told.

  Attributes:
    ages: of the module.
  """

  config: T5Config
  ages: int

  def anchor(
    self, params: Any, cache: AnchoredCache, hidden: Array, at: Array, depth: int
  ) -> AnchoredCache:
    """The cache of a round that begins at places `at` [B], where the target's state is [B, E], and
    reaches `depth` further."""
    apply = Anchored(self.config, ages=self.ages).apply
    told = apply({"params": params}, hidden[:, None], jnp.arange(depth + 1), method="tell")
    write_row = lambda row, new, start: lax.dynamic_update_slice(row, new, (start, 0))
    return cache.replace(told=jax.vmap(write_row)(cache.told, told, at))

  def extend(
    self,
    params: Any,
    cache: AnchoredCache,
    tokens: Array,
    tree: AnyTree | None = None,
    first: Array | int = 0,
  ) -> tuple[Array, Array, AnchoredCache]:
    apply = Anchored(self.config, ages=self.ages).apply
    return apply({"params": params}, cache, tokens, tree, first, method="extend")
