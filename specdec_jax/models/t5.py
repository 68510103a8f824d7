"""Encoder-decoders in Flax: T5, with the parameter names of t5x, and models like BART or T5Gemma.

Axis letters are those of `core.types`; in keys and values, D is the size of a head.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

from specdec_jax.models.config import T5Config
from specdec_jax.models.decoder import DecoderStack, KeysValues, empty_slots
from specdec_jax.models.layers import (
  MASKED,
  Attention,
  Dropout,
  Mlp,
  RelativePositionBias,
  Rotation,
  add_block,
  embedder,
  norm,
  normed,
  norms,
  residual_of,
  rotation,
  window_masks,
)
from specdec_jax.models.transformer import Cache, Transformer, TransformerModel

PAD_ID = 0  # also the first token of T5's decoder


class EncoderLayer(nn.Module):
  """Encoder layer: self-attention over the whole source, and a feed-forward block."""

  config: T5Config

  def setup(self):
    before, after = norms(self.config)
    if self.config.bias_per_layer:
      self.relpos_bias = RelativePositionBias(self.config, bidirectional=True)
    self.pre_attention_layer_norm = before()
    self.attention = Attention(self.config, self.config.layout.fused)
    self.post_attention_layer_norm = after()
    self.pre_mlp_layer_norm = before()
    self.mlp = Mlp(self.config)
    self.post_mlp_layer_norm = after()
    self.dropout = Dropout(self.config)

  def __call__(
    self,
    x: Float[Array, "B S E"],
    bias: Float[Array, "#B #H #S S"],
    deterministic: bool,
    rotation: Rotation | None = None,
  ) -> Float[Array, "B S E"]:
    h, after = normed(self.pre_attention_layer_norm, x), self.post_attention_layer_norm
    queries, keys_values = self.attention.queries_keys_values(h, rotation)
    residual = residual_of(self.config, x, after)
    h = self.attention(queries, keys_values, bias, deterministic, residual)
    x = add_block(self.config, x, self.dropout(h, deterministic), after)
    after = self.post_mlp_layer_norm
    residual = residual_of(self.config, x, after)
    h = self.mlp(normed(self.pre_mlp_layer_norm, x), deterministic, residual)
    return add_block(self.config, x, self.dropout(h, deterministic), after)


class Encoder(nn.Module):
  """Encoder of the source."""

  config: T5Config

  def setup(self):
    cfg = self.config
    if cfg.has_shared_bias:
      self.relpos_bias = RelativePositionBias(cfg, bidirectional=True)
    if cfg.num_positions is not None:
      shape = cfg.num_positions, cfg.emb_dim
      self.positions = self.param("positions", nn.initializers.normal(0.02), shape, jnp.float32)
    if cfg.embedding_norm:
      self.embedding_norm = norm(cfg)
    self.layers = [EncoderLayer(cfg) for _ in range(cfg.num_encoder_layers)]
    if cfg.has_final_norm:
      self.encoder_norm = norm(cfg)
    self.dropout = Dropout(cfg)

  def __call__(
    self, x: Float[Array, "B S E"], is_token: Bool[Array, "B S"], deterministic: bool
  ) -> Float[Array, "B S E"]:
    cfg, length = self.config, x.shape[1]
    positions = jnp.arange(length)
    distance = positions[:, None] - positions[None]
    biases = window_masks(cfg, is_token[:, None, None], distance[None, None])
    if cfg.has_shared_bias:
      relative = self.relpos_bias(positions[None], positions)
      biases = [relative + mask for mask in biases]
    if cfg.num_positions is not None:
      # Padding may extend past the last position.
      x = x + self.positions.at[positions[None]].get(mode="clip").astype(x.dtype)
    if cfg.embedding_norm:
      x = self.embedding_norm(x)
    x = self.dropout(x, deterministic)
    rotate = rotation(cfg, positions[None], length)
    for i, layer in enumerate(self.layers):
      bias = biases[i % len(biases)]
      if cfg.bias_per_layer:
        bias = layer.relpos_bias(positions[None], positions) + bias
      x = layer(x, bias, deterministic, rotate)
    return self.dropout(self.encoder_norm(x) if cfg.has_final_norm else x, deterministic)


class T5(Transformer):
  """Encoder-decoder, with the methods that `T5Model` and training call."""

  config: T5Config

  def setup(self):
    cfg = self.config
    self.token_embedder = embedder(cfg)
    if cfg.encoder_embeddings:
      self.encoder_embedder = embedder(cfg.encoder)
    self.encoder = Encoder(cfg.encoder)
    self.decoder = DecoderStack(cfg, self.feature_layers)

  def __call__(
    self, source: Shaped[Array, "B S *mels"], inputs: Int[Array, "B K"], deterministic: bool = True
  ) -> Float[Array, "B K V"]:
    """Return teacher-forced logits. The inputs are the targets, shifted right by one position."""
    cross, cross_bias = self.encode(source, deterministic)
    return self.on_source(inputs, cross, cross_bias, deterministic)

  def on_source(
    self,
    inputs: Int[Array, "B K"],
    cross: tuple[KeysValues, ...],
    cross_bias: Float[Array, "B 1 1 S"],
    deterministic: bool = True,
  ) -> Float[Array, "B K V"]:
    """Return teacher-forced logits, given the keys, values and bias of an encoded source."""
    x, embedding = self.token_embedder(inputs), self.token_embedder.embedding
    return self.decoder(x, embedding, cross, cross_bias, deterministic=deterministic)[0]

  def encode(
    self, source: Int[Array, "B S"], deterministic: bool = True
  ) -> tuple[tuple[KeysValues, ...], Float[Array, "B 1 1 S"]]:
    """Return keys, values and bias for cross-attention to a source.

    The tokens after the last one that is not `pad_id` are padding.
    """
    positions = jnp.arange(source.shape[1])[None]
    last = jnp.where(source != self.config.pad_id, positions, -1).max(axis=1, keepdims=True)
    is_token = positions <= last
    embed = self.encoder_embedder if self.config.encoder_embeddings else self.token_embedder
    encoded = self.encoder(embed(source), is_token, deterministic)
    cross_bias = jnp.where(is_token, 0.0, MASKED).astype(jnp.float32)[:, None, None, :]
    return self.decoder.cross_keys_values(encoded), cross_bias


@dataclasses.dataclass(frozen=True)
class T5Model(TransformerModel):
  """Encoder-decoder as a `Model`: `prefill` runs the encoder, `extend` the decoder."""

  config: T5Config

  module_type = T5

  def prompt_tokens(self, prompt: Int[Array, "B P"]) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    batch = len(prompt)
    start = jnp.full((batch, 1), self.config.start_id, jnp.int32)
    return start, jnp.ones(batch, jnp.int32)

  def prefill(
    self, params: Any, prompt: Int[Array, "B P"], num_slots: int
  ) -> tuple[Float[Array, "B C E"], Cache]:
    batch, config = len(prompt), self.config
    cross = T5(config).apply({"params": params}, prompt, method=T5.encode)
    cache = Cache(jnp.zeros(batch, jnp.int32), empty_slots(config, batch, num_slots), *cross)
    width = config.emb_dim * max(1, len(self.feature_layers))
    return jnp.zeros((batch, 1, width), config.layout.activations), cache
