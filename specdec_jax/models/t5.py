"""T5 encoder-decoder in Flax, with t5x's parameter tree.

Axes: B batch, S source tokens, K tokens in a block, T cache slots, H heads, D head dim, E embed,
V vocabulary.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array

from specdec_jax.core.trees import AnyTree, NodeLayout
from specdec_jax.models.config import T5Config
from specdec_jax.models.decoder import Decoder, KeysValues, commit, empty_slots
from specdec_jax.models.layers import (
  MASKED,
  Attention,
  Dropout,
  Mlp,
  RelativePositionBias,
  embedder,
  norm,
)

PAD_ID = 0  # also T5's first decoder token
EOS_ID = 1


@struct.dataclass
class T5Cache:
  """What a decoder needs of the tokens behind it.

  Attributes:
    length: [B], tokens each row holds; slots at or past it are masked, then overwritten.
    layers: per layer, keys and values of self-attention, each [B, H, T, D].
    cross: per layer, keys and values of the encoded source, each [B, H, S, D].
    cross_bias: [B, 1, 1, S], 0 at source tokens and MASKED at padding.
  """

  length: Array
  layers: tuple[KeysValues, ...]
  cross: tuple[KeysValues, ...]
  cross_bias: Array


class EncoderLayer(nn.Module):
  """Self-attention over the whole source, then feed-forward."""

  config: T5Config

  def setup(self):
    self.pre_attention_layer_norm = norm(self.config)
    self.attention = Attention(self.config, self.config.fused)
    self.pre_mlp_layer_norm = norm(self.config)
    self.mlp = Mlp(self.config)
    self.dropout = Dropout(self.config)

  def __call__(self, x: Array, bias: Array, deterministic: bool) -> Array:
    h = self.pre_attention_layer_norm(x)
    h = self.attention(*self.attention.queries_keys_values(h), bias, deterministic)
    x = x + self.dropout(h, deterministic)
    h = self.mlp(self.pre_mlp_layer_norm(x), deterministic)
    return x + self.dropout(h, deterministic)


class Encoder(nn.Module):
  """Source tokens -> one vector each."""

  config: T5Config

  def setup(self):
    cfg = self.config
    self.relpos_bias = RelativePositionBias(cfg, bidirectional=True)
    self.layers = [EncoderLayer(cfg) for _ in range(cfg.num_encoder_layers)]
    self.encoder_norm = norm(cfg)
    self.dropout = Dropout(cfg)

  def __call__(self, x: Array, cross_bias: Array, deterministic: bool) -> Array:  # [B, S, E]
    positions = jnp.arange(x.shape[1])[None]
    bias = self.relpos_bias(positions, jnp.arange(x.shape[1])) + cross_bias
    x = self.dropout(x, deterministic)
    for layer in self.layers:
      x = layer(x, bias, deterministic)
    return self.dropout(self.encoder_norm(x), deterministic)


class T5(nn.Module):
  """The encoder-decoder, with the methods that `T5Model` and training call."""

  config: T5Config

  def setup(self):
    cfg = self.config
    self.token_embedder = embedder(cfg)
    self.encoder = Encoder(cfg)
    self.decoder = Decoder(cfg)

  def __call__(self, source: Array, inputs: Array, deterministic: bool = True) -> Array:
    """Teacher-forced logits [B, K, V] of decoder inputs [B, K] (targets shifted right)."""
    cross, cross_bias = self.encode(source, deterministic)
    return self.on_source(inputs, cross, cross_bias, deterministic)

  def on_source(
    self,
    inputs: Array,
    cross: tuple[KeysValues, ...],
    cross_bias: Array,
    deterministic: bool = True,
  ) -> Array:
    """The same of a source that has been encoded."""
    x, embedding = self.token_embedder(inputs), self.token_embedder.embedding
    return self.decoder(x, embedding, cross, cross_bias, deterministic=deterministic)[0]

  def encode(self, source: Array, deterministic: bool = True):
    """Cross-attention keys, values and bias of source tokens [B, S], padded with PAD_ID."""
    cross_bias = jnp.where(source != PAD_ID, 0.0, MASKED)[:, None, None, :]
    encoded = self.encoder(self.token_embedder(source), cross_bias, deterministic)
    return self.decoder.cross_keys_values(encoded), cross_bias

  def extend(
    self, cache: T5Cache, tokens: Array, tree: NodeLayout | None = None, first: Array | int = 0
  ) -> tuple[Array, Array, T5Cache]:
    """Read a block [B, K] behind what each row holds; logits [B, K, V] follow each token."""
    return self.read(cache, self.token_embedder(tokens), tree, first)

  def read(
    self, cache: T5Cache, x: Array, tree: NodeLayout | None = None, first: Array | int = 0
  ) -> tuple[Array, Array, T5Cache]:
    """`extend` by embedded tokens [B, K, E], or what stands for some."""
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

  def logits(self, hidden: Array) -> Array:
    """[..., V] of last states [..., E]."""
    return self.decoder.logits(hidden, self.token_embedder.embedding)


@dataclasses.dataclass(frozen=True)
class T5Model:
  """T5 behind the `Model` contract: `prefill` runs the encoder, `extend` the decoder.

  Attributes:
    config: its shape.
  """

  config: T5Config

  @property
  def eos_id(self) -> int:
    return EOS_ID

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  def prompt_tokens(self, prompt: Array) -> tuple[Array, Array]:
    batch = len(prompt)
    return jnp.full((batch, 1), PAD_ID, jnp.int32), jnp.ones(batch, jnp.int32)

  def prefill(self, params: Any, prompt: Array, num_slots: int) -> tuple[Array, T5Cache]:
    batch, config = len(prompt), self.config
    cross, cross_bias = T5(config).apply({"params": params}, prompt, method=T5.encode)
    cache = T5Cache(
      length=jnp.zeros(batch, jnp.int32),
      layers=empty_slots(config, batch, num_slots),
      cross=cross,
      cross_bias=cross_bias,
    )
    return jnp.zeros((batch, 1, config.emb_dim), config.activations), cache

  def extend(
    self,
    params: Any,
    cache: T5Cache,
    tokens: Array,
    tree: NodeLayout | None = None,
    first: Array | int = 0,
  ) -> tuple[Array, Array, T5Cache]:
    return T5(self.config).apply({"params": params}, cache, tokens, tree, first, method=T5.extend)

  def commit(
    self, cache: T5Cache, length: Array, tree: AnyTree | None = None, path: Array | None = None
  ) -> T5Cache:
    return commit(cache, length, path)
