"""Decoder of encoder-decoders and of decoder-only models, which processes blocks of tokens.

The decoder of an encoder-decoder also attends to a source. The decoder has four uses: the
teacher-forced pass (a block of all tokens, without a cache), the prefill of a decoder-only model (a
block of the prompt), the decode step (a block of one token) and parallel verification (a block of K
tokens, which are a chain or a tree).

Axis letters are those of `core.types`; in keys and values, D is the size of a head.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

from specdec_jax.core.arrays import write_slots
from specdec_jax.core.trees import NodeLayout, place_chain
from specdec_jax.models.config import TransformerConfig
from specdec_jax.models.layers import (
  Attention,
  Dropout,
  Logits,
  Mlp,
  RelativePositionBias,
  Rotation,
  add_block,
  norm,
  normed,
  norms,
  residual_of,
  rotation,
  window_masks,
)
from specdec_jax.models.layout import matmul, soft_cap

# Each [B, G, T, D]; [B, G, S, D] for cross-attention. With kernels 'gpu', a cache has one array
# [B, 2 G, T, D], which is written at once.
KeysValues = tuple[Array, ...]


class DecoderLayer(nn.Module):
  """Decoder layer: causal self-attention, cross-attention if there is a source, feed-forward."""

  config: TransformerConfig

  def setup(self):
    cfg = self.config
    before, after = norms(cfg)
    if cfg.bias_per_layer:
      self.relpos_bias = RelativePositionBias(cfg, bidirectional=False)
    self.pre_self_attention_layer_norm = before()
    self.self_attention = Attention(cfg, cfg.layout.fused)
    self.post_self_attention_layer_norm = after()
    if cfg.has_encoder:
      self.pre_cross_attention_layer_norm = before()
      self.encoder_decoder_attention = Attention(cfg)
      self.post_cross_attention_layer_norm = after()
    self.pre_mlp_layer_norm = before()
    self.mlp = Mlp(cfg)
    self.post_mlp_layer_norm = after()
    self.dropout = Dropout(cfg)

  def __call__(
    self,
    x: Float[Array, "B K E"],
    bias: Float[Array, "#B #H #K T"],
    cross: KeysValues | None,
    cross_bias: Float[Array, "sources 1 1 S"] | None,
    cached: KeysValues | None = None,
    slot: Int[Array, " B"] | None = None,
    deterministic: bool = True,
    rotation: Rotation | None = None,
  ) -> tuple[Float[Array, "B K E"], KeysValues]:
    """Return the output of the layer, and the keys and values of the block.

    If `cached` is given, the second result is instead `cached`, with the keys and values of the
    block written to the slots from `slot` on.
    """
    cfg = self.config
    h = normed(self.pre_self_attention_layer_norm, x)
    queries, keys_values = self.self_attention.queries_keys_values(h, rotation)
    if cached is not None and slot is not None:
      if len(cached) == 1:
        keys_values = (jnp.concatenate(keys_values, axis=1),)
      keys_values = tuple(write_slots(x, new, slot) for x, new in zip(cached, keys_values))
      if len(cached) == 1:  # otherwise XLA repeats the write in each kernel that reads the cache
        keys_values = lax.optimization_barrier(keys_values)
    after = self.post_self_attention_layer_norm
    residual = residual_of(cfg, x, after)
    h = self.self_attention(queries, keys_values, bias, deterministic, residual)
    x = add_block(cfg, x, self.dropout(h, deterministic), after)
    if cfg.has_encoder:
      assert cross is not None and cross_bias is not None
      h = normed(self.pre_cross_attention_layer_norm, x)
      after = self.post_cross_attention_layer_norm
      residual = residual_of(cfg, x, after)
      h = self.encoder_decoder_attention.to_source(h, cross, cross_bias, deterministic, residual)
      x = add_block(cfg, x, self.dropout(h, deterministic), after)
    after = self.post_mlp_layer_norm
    h = self.mlp(normed(self.pre_mlp_layer_norm, x), deterministic, residual_of(cfg, x, after))
    x = add_block(cfg, x, self.dropout(h, deterministic), after)
    return x, keys_values


class DecoderStack(nn.Module):
  """Stack of decoder layers, with positions, a final norm and logits.

  Attributes:
    feature_layers: layers whose outputs are the hidden states, one after the other along the last
      axis; by default, hidden states are those after the final norm.
  """

  config: TransformerConfig
  feature_layers: tuple[int, ...] = ()

  def setup(self):
    cfg = self.config
    if cfg.has_shared_bias:
      self.relpos_bias = RelativePositionBias(cfg, bidirectional=False)
    if cfg.num_positions is not None:
      shape = cfg.num_positions, cfg.emb_dim
      self.positions = self.param("positions", nn.initializers.normal(0.02), shape, jnp.float32)
    if cfg.embedding_norm:
      self.embedding_norm = norm(cfg)
    self.layers = [DecoderLayer(cfg) for _ in range(cfg.num_decoder_layers)]
    if cfg.has_final_norm:
      self.decoder_norm = norm(cfg)
    self.dropout = Dropout(cfg)
    if not cfg.tied_logits:
      self.logits_dense = Logits(cfg, cfg.output_size)

  def cross_keys_values(self, encoded: Float[Array, "B S E"]) -> tuple[KeysValues, ...]:
    """Return keys and values of the encoded source for each layer, computed once per source."""
    return tuple(layer.encoder_decoder_attention.keys_values(encoded) for layer in self.layers)

  def __call__(
    self,
    x: Float[Array, "B K E"],
    embedding: Float[Array, "rows E"],
    cross: tuple[KeysValues, ...] | None = None,
    cross_bias: Float[Array, "sources 1 1 S"] | None = None,
    cached: tuple[KeysValues, ...] | None = None,
    length: Int[Array, " B"] | None = None,
    tree: NodeLayout | None = None,
    first: Int[Array, ""] | int = 0,
    deterministic: bool = True,
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K states"], tuple[KeysValues, ...]]:
    """Process a block of tokens, as `core.types.Model.extend` does.

    `x` has the embedded tokens. Without a cache (`cached`), the block has all tokens. `embedding`
    is used for tied logits only. Dropout is applied unless `deterministic`. Return logits in
    float32, hidden states, and for each layer keys and values (see `DecoderLayer`).
    """
    cfg = self.config
    batch, block, _ = x.shape
    length = jnp.zeros(batch, jnp.int32) if length is None else length
    num_slots = block if cached is None else cached[0][0].shape[2]
    place = place_chain if tree is None else tree.place
    positions, key_positions, visible = place(length, first, block, num_slots)
    keys = key_positions[None, None] if key_positions.ndim == 1 else key_positions[:, None]
    distance = positions[..., None] - keys  # [B, K, T]
    biases = window_masks(cfg, visible[:, None], distance[:, None])
    if cfg.has_shared_bias:
      relative = self.relpos_bias(positions, key_positions)
      biases = [relative + mask for mask in biases]
    if cfg.layout.kernels == "gpu" and block > 1:  # otherwise XLA computes them again in each layer
      biases = lax.optimization_barrier(biases)
    if cfg.num_positions is not None:
      x = x + self.positions.at[positions].get(mode="clip").astype(x.dtype)
    if cfg.embedding_norm:
      x = self.embedding_norm(x)
    x = self.dropout(x, deterministic)
    rotate = rotation(cfg, positions, num_slots)
    layer_keys_values, outputs = [], []
    for i, layer in enumerate(self.layers):
      bias = biases[i % len(biases)]
      if cfg.bias_per_layer:
        bias = layer.relpos_bias(positions, key_positions) + bias
      x, keys_values = layer(
        x,
        bias,
        None if cross is None else cross[i],
        cross_bias,
        None if cached is None else cached[i],
        length + first,
        deterministic,
        rotate,
      )
      layer_keys_values.append(keys_values)
      outputs.append(x)
    x = self.decoder_norm(x) if cfg.has_final_norm else x
    x = self.dropout(x, deterministic)
    features = [outputs[i] for i in self.feature_layers]
    hidden = jnp.concatenate(features, axis=-1) if features else x
    return self.logits(x, embedding), hidden, tuple(layer_keys_values)

  def logits(
    self, x: Float[Array, "*batch E"], embedding: Float[Array, "rows E"]
  ) -> Float[Array, "*batch V"]:
    """Return the float32 logits of hidden states after the final norm."""
    if self.config.tied_logits:
      logits = matmul(x.astype(jnp.float32) / self.config.logits_divisor, embedding.T)
      logits = soft_cap(logits, self.config.logits_cap)
    else:
      logits = self.logits_dense(x)
    return logits[..., : self.config.vocab_size]


def empty_slots(config: TransformerConfig, batch: int, num_slots: int) -> tuple[KeysValues, ...]:
  """Return keys and values of an empty cache for each layer."""
  arrays = 1 if config.layout.kernels == "gpu" else 2
  shape = batch, 2 // arrays * config.kv_heads, num_slots, config.head_dim
  return ((jnp.zeros(shape, config.layout.activations),) * arrays,) * config.num_decoder_layers


def commit(cache: Any, length: Int[Array, " B"], path: Int[Array, "B D"] | None = None) -> Any:
  """Return the cache with `length` tokens in each row.

  If `path` is given, the slots from `cache.length` on hold a tree of depth D. The nodes of the path
  are moved to the slots right after the first node of the tree: in each array, D slots are gathered
  and written as one slice. The other slots do not change.
  """
  if path is None:
    return cache.replace(length=length)
  sources = (cache.length[:, None] + path)[:, None, :, None]

  def move_path(slots: Shaped[Array, "B H T D"]) -> Shaped[Array, "B H T D"]:
    return write_slots(slots, jnp.take_along_axis(slots, sources, axis=2), cache.length + 1)

  return cache.replace(length=length, layers=jax.tree.map(move_path, cache.layers))
