"""The decoder of both families, block-wise: T5's attends to a source too, a GPT's has none.

It serves three calls: the teacher-forced pass (a block of all tokens and no cache), the decode
step (a block of one) and parallel verification (a block of K tokens, a chain or a tree).

Axes: B batch, S source tokens, K tokens in a block, T cache slots, L layers, H heads,
D head dim, E embed, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specdec_jax.core.arrays import write_slots
from specdec_jax.core.trees import NodeLayout, place_chain
from specdec_jax.models.config import TransformerConfig
from specdec_jax.models.layers import (
  MASKED,
  Attention,
  Dense,
  Dropout,
  Mlp,
  RelativePositionBias,
  matmul,
  norm,
)

KeysValues = tuple[Array, Array]  # each [B, H, T, D]


class DecoderLayer(nn.Module):
  """Causal self-attention, attention to the source if there is one, feed-forward."""

  config: TransformerConfig

  def setup(self):
    cfg = self.config
    self.pre_self_attention_layer_norm = norm(cfg)
    self.self_attention = Attention(cfg, cfg.fused)
    if cfg.has_encoder:
      self.pre_cross_attention_layer_norm = norm(cfg)
      self.encoder_decoder_attention = Attention(cfg)
    self.pre_mlp_layer_norm = norm(cfg)
    self.mlp = Mlp(cfg)
    self.dropout = Dropout(cfg)

  def __call__(self, x, bias, cross, cross_bias, cached=None, slot=None, deterministic=True):
    """x [B, K, E] -> (x, keys and values), the latter put from `slot` [B] of `cached` on."""
    h = self.pre_self_attention_layer_norm(x)
    queries, keys_values = self.self_attention.queries_keys_values(h)
    if cached is not None:
      keys_values = tuple(write_slots(c, new, slot) for c, new in zip(cached, keys_values))
    h = self.self_attention(queries, keys_values, bias, deterministic)
    x = x + self.dropout(h, deterministic)
    if self.config.has_encoder:
      queries = self.encoder_decoder_attention.queries(self.pre_cross_attention_layer_norm(x))
      h = self.encoder_decoder_attention(queries, cross, cross_bias, deterministic)
      x = x + self.dropout(h, deterministic)
    h = self.mlp(self.pre_mlp_layer_norm(x), deterministic)
    return x + self.dropout(h, deterministic), keys_values


class Decoder(nn.Module):
  """A block of tokens, the cache behind it and the encoded source, if any -> logits."""

  config: TransformerConfig

  def setup(self):
    cfg = self.config
    if cfg.num_positions is None:
      self.relpos_bias = RelativePositionBias(cfg, bidirectional=False)
    else:
      shape = cfg.num_positions, cfg.emb_dim
      self.positions = self.param("positions", nn.initializers.normal(0.02), shape, jnp.float32)
    self.layers = [DecoderLayer(cfg) for _ in range(cfg.num_decoder_layers)]
    self.decoder_norm = norm(cfg)
    self.dropout = Dropout(cfg)
    if not cfg.tied_logits:
      self.logits_dense = Dense(cfg, cfg.table_size, jnp.float32, biases=False)

  def cross_keys_values(self, encoded: Array) -> tuple[KeysValues, ...]:
    """Keys and values of the encoded source [B, S, E] for each layer, computed once."""
    return tuple(layer.encoder_decoder_attention.keys_values(encoded) for layer in self.layers)

  def __call__(
    self,
    x: Array,
    embedding: Array,
    cross: tuple[KeysValues, ...] | None = None,
    cross_bias: Array | None = None,
    cached: tuple[KeysValues, ...] | None = None,
    length: Array | None = None,
    tree: NodeLayout | None = None,
    first: Array | int = 0,
    deterministic: bool = True,
  ) -> tuple[Array, Array, tuple[KeysValues, ...]]:
    """x [B, K, E] -> (logits [B, K, V] float32, last states [B, K, E], keys and values by layer).

    With a cache of `length` [B] tokens x are nodes first..first+K-1 of a tree, or of a chain.
    """
    batch, block, _ = x.shape
    length = jnp.zeros(batch, jnp.int32) if length is None else length
    num_slots = block if cached is None else cached[0][0].shape[2]
    place = place_chain if tree is None else tree.place
    positions, key_positions, visible = place(length, first, block, num_slots)
    bias = jnp.where(visible, 0.0, MASKED)[:, None]
    if self.config.num_positions is None:
      bias = self.relpos_bias(positions, key_positions) + bias
    else:
      x = x + self.positions.at[positions].get(mode="clip").astype(x.dtype)
    x = self.dropout(x, deterministic)
    kept = []
    for i, layer in enumerate(self.layers):
      x, keys_values = layer(
        x, bias, cross and cross[i], cross_bias, cached and cached[i], length + first, deterministic
      )
      kept.append(keys_values)
    x = self.dropout(self.decoder_norm(x), deterministic)
    return self.logits(x, embedding), x, tuple(kept)

  def logits(self, x: Array, embedding: Array) -> Array:
    """[..., V] float32 of last states [..., E]."""
    if self.config.tied_logits:
      logits = matmul(x.astype(jnp.float32) / self.config.logits_divisor, embedding.T)
    else:
      logits = self.logits_dense(x)
    return logits[..., : self.config.vocab_size]


def empty_slots(config: TransformerConfig, batch: int, num_slots: int) -> tuple[KeysValues, ...]:
  """A cache of no tokens yet, for each layer."""
  empty = jnp.zeros((batch, config.num_heads, num_slots, config.head_dim), config.activations)
  return ((empty, empty),) * config.num_decoder_layers


def commit(cache: Any, length: Array, path: Array | None = None) -> Any:
  """A cache of either family when it holds `length` [B] tokens.

  With a path [B, D] the slots from cache.length on hold a tree, whose nodes `path` go right behind
  its first: a gather of D slots and a write of one slice for each array, never a whole cache put
  in order.
  """
  if path is None:
    return cache.replace(length=length)
  at = (cache.length[:, None] + path)[:, None, :, None]

  def move(slots: Array) -> Array:
    return write_slots(slots, jnp.take_along_axis(slots, at, axis=2), cache.length + 1)

  return cache.replace(length=length, layers=jax.tree.map(move, cache.layers))
