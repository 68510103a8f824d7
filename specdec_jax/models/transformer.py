"""What encoder-decoders and decoder-only models share: the cache, and the calls of the decoder.

Axis letters are those of `core.types`; in keys and values, D is the size of a head.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.arrays import repeat_rows
from specdec_jax.core.trees import AnyTree, NodeLayout
from specdec_jax.core.types import Extended, First, Length, Path, Tokens
from specdec_jax.models.config import TransformerConfig
from specdec_jax.models.decoder import KeysValues, commit
from specdec_jax.models.layers import MASKED


@struct.dataclass
class Cache:
  """Cache of a decoder: the committed tokens except the last one, and the encoded source.

  Attributes:
    cross: for each layer, keys and values of the encoded sources, both of shape [sources, G, S, D].
      If there are fewer sources than rows, consecutive rows share a source. None without encoder.
    cross_bias: bias of cross-attention: 0 at source tokens and MASKED at padding.
  """

  length: Int[Array, " B"]
  layers: tuple[KeysValues, ...]
  cross: tuple[KeysValues, ...] | None = None
  cross_bias: Float[Array, "sources 1 1 S"] | None = None

  def repeat_rows(self, count: int) -> "Cache":
    """Return the cache for `count` texts per row, which share the encoded source of the row."""
    length, layers = repeat_rows((self.length, self.layers), count)
    return self.replace(length=length, layers=layers)

  def pad_sources(self, width: int) -> "Cache":
    """Return the cache with sources that are padded to `width` tokens."""
    assert self.cross_bias is not None
    pad = 0, width - self.cross_bias.shape[3]
    cross = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), pad, (0, 0))), self.cross)
    bias = jnp.pad(self.cross_bias, ((0, 0), (0, 0), (0, 0), pad), constant_values=MASKED)
    return self.replace(cross=cross, cross_bias=bias)


class Transformer(nn.Module):
  """Model with a decoder; subclasses set up `token_embedder` and `decoder`."""

  config: Any  # a TransformerConfig
  feature_layers: tuple[int, ...] = ()

  def extend(
    self, cache: Cache, tokens: Tokens, tree: NodeLayout | None = None, first: First = 0
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K states"], Cache]:
    """Process a block of tokens that follows the cached tokens; see `core.types.Model.extend`."""
    return self.extend_embedded(cache, self.token_embedder(tokens), tree, first)

  def extend_embedded(
    self, cache: Cache, x: Float[Array, "B K E"], tree: NodeLayout | None = None, first: First = 0
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K states"], Cache]:
    """Process a block of token embeddings, or of vectors that replace token embeddings."""
    logits, hidden, layers = self.decoder(
      x,
      self.token_embedder.embedding,
      cache.cross,
      cache.cross_bias,
      cache.layers,
      cache.length,
      tree,
      first,
    )
    return logits, hidden, cache.replace(layers=layers)

  def logits(self, hidden: Float[Array, "*batch E"]) -> Float[Array, "*batch V"]:
    """Return the logits of hidden states after the final norm."""
    return self.decoder.logits(hidden, self.token_embedder.embedding)


@dataclasses.dataclass(frozen=True)
class TransformerModel(abc.ABC):
  """A `Transformer` as a `Model`, without `prompt_tokens` and `prefill`."""

  config: TransformerConfig
  feature_layers: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
  module_type: ClassVar[type[Transformer]]

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  @property
  def eos_id(self) -> int:
    return self.config.eos_id

  def extend(
    self, params: Any, cache: Any, tokens: Tokens, tree: NodeLayout | None = None, first: First = 0
  ) -> Extended:
    module = self.module_type(self.config, self.feature_layers)
    return module.apply({"params": params}, cache, tokens, tree, first, method="extend")

  def commit(
    self, cache: Any, length: Length, tree: AnyTree | None = None, path: Path = None
  ) -> Any:
    return commit(cache, length, path)
