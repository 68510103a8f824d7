"""T5 encoder-decoder in Flax, with t5x's parameter tree and a block-wise decoder.

One decoder serves three calls: the teacher-forced pass (a block of all tokens and no
cache), the decode step (a block of one) and parallel verification (a block of gamma + 1).

Axes: B batch, S source tokens, K tokens in a block, T cache slots, L layers, H heads,
D head dim, E embed, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array, lax

from specdec_jax.models.config import T5Config
from specdec_jax.models.layers import (
  MASKED,
  Attention,
  Dense,
  Dropout,
  Mlp,
  RelativePositionBias,
  RMSNorm,
  matmul,
)
from specdec_jax.protocols import Model

PAD_ID = 0  # also T5's first decoder token


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
  layers: tuple[tuple[Array, Array], ...]
  cross: tuple[tuple[Array, Array], ...]
  cross_bias: Array


class EncoderLayer(nn.Module):
  """Self-attention over the whole source, then feed-forward."""

  config: T5Config

  def setup(self):
    self.pre_attention_layer_norm = RMSNorm(self.config)
    self.attention = Attention(self.config, self.config.fused)
    self.pre_mlp_layer_norm = RMSNorm(self.config)
    self.mlp = Mlp(self.config)
    self.dropout = Dropout(self.config)

  def __call__(self, x: Array, bias: Array, deterministic: bool) -> Array:
    h = self.pre_attention_layer_norm(x)
    h = self.attention(*self.attention.queries_keys_values(h), bias, deterministic)
    x = x + self.dropout(h, deterministic)
    h = self.mlp(self.pre_mlp_layer_norm(x), deterministic)
    return x + self.dropout(h, deterministic)


class DecoderLayer(nn.Module):
  """Causal self-attention, attention to the source, feed-forward."""

  config: T5Config

  def setup(self):
    self.pre_self_attention_layer_norm = RMSNorm(self.config)
    self.self_attention = Attention(self.config, self.config.fused)
    self.pre_cross_attention_layer_norm = RMSNorm(self.config)
    self.encoder_decoder_attention = Attention(self.config)
    self.pre_mlp_layer_norm = RMSNorm(self.config)
    self.mlp = Mlp(self.config)
    self.dropout = Dropout(self.config)

  def __call__(self, x, bias, cross, cross_bias, cached=None, length=None, deterministic=True):
    """x [B, K, E] -> (x, keys and values), the latter put at `length` of `cached` [B, H, T, D]."""
    h = self.pre_self_attention_layer_norm(x)
    queries, keys_values = self.self_attention.queries_keys_values(h)
    if cached is not None:
      keys_values = tuple(_write(c, new, length) for c, new in zip(cached, keys_values))
    h = self.self_attention(queries, keys_values, bias, deterministic)
    x = x + self.dropout(h, deterministic)
    queries = self.encoder_decoder_attention.queries(self.pre_cross_attention_layer_norm(x))
    h = self.encoder_decoder_attention(queries, cross, cross_bias, deterministic)
    x = x + self.dropout(h, deterministic)
    h = self.mlp(self.pre_mlp_layer_norm(x), deterministic)
    return x + self.dropout(h, deterministic), keys_values


class Encoder(nn.Module):
  """Source tokens -> one vector each."""

  config: T5Config

  def setup(self):
    cfg = self.config
    self.relpos_bias = RelativePositionBias(cfg, bidirectional=True)
    self.layers = [EncoderLayer(cfg) for _ in range(cfg.num_encoder_layers)]
    self.encoder_norm = RMSNorm(cfg)
    self.dropout = Dropout(cfg)

  def __call__(self, x: Array, cross_bias: Array, deterministic: bool) -> Array:  # [B, S, E]
    positions = jnp.arange(x.shape[1])[None]
    bias = self.relpos_bias(positions, x.shape[1]) + cross_bias
    x = self.dropout(x, deterministic)
    for layer in self.layers:
      x = layer(x, bias, deterministic)
    return self.dropout(self.encoder_norm(x), deterministic)


class Decoder(nn.Module):
  """A block of target tokens, the cache behind it and the encoded source -> logits."""

  config: T5Config

  def setup(self):
    cfg = self.config
    self.relpos_bias = RelativePositionBias(cfg, bidirectional=False)
    self.layers = [DecoderLayer(cfg) for _ in range(cfg.num_decoder_layers)]
    self.decoder_norm = RMSNorm(cfg)
    self.dropout = Dropout(cfg)
    if not cfg.tied_logits:
      self.logits_dense = Dense(cfg, cfg.table_size, jnp.float32)

  def cross_keys_values(self, encoded: Array) -> tuple[tuple[Array, Array], ...]:
    """Keys and values of the encoded source [B, S, E] for each layer, computed once."""
    return tuple(layer.encoder_decoder_attention.keys_values(encoded) for layer in self.layers)

  def __call__(self, x, cross, cross_bias, embedding, cached=None, length=None, deterministic=True):
    """x [B, K, E] -> (logits [B, K, V] float32, keys and values of each layer)."""
    batch, block, _ = x.shape
    start = jnp.zeros((batch, 1), jnp.int32) if length is None else length[:, None]
    num_slots = block if cached is None else cached[0][0].shape[2]
    positions = start + jnp.arange(block)  # [B, K]
    future = jnp.arange(num_slots) > positions[..., None]  # [B, K, T]
    bias = self.relpos_bias(positions, num_slots) + jnp.where(future, MASKED, 0.0)[:, None]
    x = self.dropout(x, deterministic)
    kept = []
    for i, layer in enumerate(self.layers):
      x, keys_values = layer(
        x, bias, cross[i], cross_bias, cached and cached[i], length, deterministic
      )
      kept.append(keys_values)
    x = self.dropout(self.decoder_norm(x), deterministic)
    if self.config.tied_logits:
      logits = matmul(x.astype(jnp.float32) / jnp.sqrt(x.shape[-1]), embedding.T)
    else:
      logits = self.logits_dense(x)
    return logits[..., : self.config.vocab_size], tuple(kept)


class T5(nn.Module):
  """The encoder-decoder, with the methods that `t5_model` and training call."""

  config: T5Config

  def setup(self):
    cfg = self.config
    self.token_embedder = nn.Embed(
      cfg.table_size, cfg.emb_dim, dtype=cfg.dtype, embedding_init=nn.initializers.normal(1.0)
    )
    self.encoder = Encoder(cfg)
    self.decoder = Decoder(cfg)

  def __call__(self, source: Array, inputs: Array, deterministic: bool = True) -> Array:
    """Teacher-forced logits [B, K, V] of decoder inputs [B, K] (targets shifted right)."""
    cross, cross_bias = self.encode(source, deterministic)
    x = self.token_embedder(inputs)
    embedding = self.token_embedder.embedding
    return self.decoder(x, cross, cross_bias, embedding, deterministic=deterministic)[0]

  def encode(self, source: Array, deterministic: bool = True):
    """Cross-attention keys, values and bias of source tokens [B, S], padded with PAD_ID."""
    cross_bias = jnp.where(source != PAD_ID, 0.0, MASKED)[:, None, None, :]
    encoded = self.encoder(self.token_embedder(source), cross_bias, deterministic)
    return self.decoder.cross_keys_values(encoded), cross_bias

  def extend(self, cache: T5Cache, tokens: Array) -> tuple[Array, T5Cache]:
    """Append a block [B, K] to each row at its own length; logits [B, K, V] follow each token."""
    logits, layers = self.decoder(
      self.token_embedder(tokens),
      cache.cross,
      cache.cross_bias,
      self.token_embedder.embedding,
      cache.layers,
      cache.length,
    )
    return logits, cache.replace(layers=layers, length=cache.length + tokens.shape[1])


@functools.cache
def t5_model(config: T5Config) -> Model:
  """T5 behind the `Model` contract: `start` runs the encoder, `extend` the decoder."""
  module = T5(config)

  def begin(source: Array) -> tuple[Array, Array]:
    batch = source.shape[0]
    return jnp.full((batch, 1), PAD_ID, jnp.int32), jnp.ones(batch, jnp.int32)

  def start(params, source: Array, num_slots: int) -> T5Cache:
    cross, cross_bias = module.apply({"params": params}, source, method=T5.encode)
    shape = (source.shape[0], config.num_heads, num_slots, config.head_dim)
    empty = jnp.zeros(shape, config.dtype)
    return T5Cache(
      length=jnp.zeros(source.shape[0], jnp.int32),
      layers=((empty, empty),) * config.num_decoder_layers,
      cross=cross,
      cross_bias=cross_bias,
    )

  def extend(params, cache: T5Cache, tokens: Array) -> tuple[Array, T5Cache]:
    return module.apply({"params": params}, cache, tokens, method=T5.extend)

  return Model(begin=begin, start=start, extend=extend, vocab_size=config.vocab_size)


def init_params(config: T5Config, rng: Array):
  """Random parameters in t5x's tree (float32)."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  return T5(config).init(rng, tokens, tokens)["params"]


def for_decoding(config: T5Config, params, concatenate=jnp.concatenate):
  """The same model with fewer, larger products: (config, params).

  Queries, keys and values of self-attention come from one matrix, as do both halves of a gated
  feed-forward, and tied logits get a matrix of their own, since a product with a transposed table
  is slow on a CPU; what T5 divides them by goes into the norm before. To be called once, when a
  model is loaded; costs a copy of those matrices, or none where they are still on disk
  (`checkpoints.stored`) and `concatenate` is of such arrays.
  """
  side_by_side = lambda *names: (
    lambda parts: {"kernel": concatenate([parts.pop(name)["kernel"] for name in names], axis=1)}
  )
  query_key_value, wi = side_by_side("query", "key", "value"), side_by_side("wi_0", "wi_1")

  def fuse(name: str, tree):
    if not isinstance(tree, dict):
      return tree
    tree = {k: fuse(k, v) for k, v in tree.items()}
    if name in ("attention", "self_attention"):
      tree["query_key_value"] = query_key_value(tree)
    if name == "mlp" and config.gated:
      tree["wi"] = wi(tree)
    return tree

  if config.fused:
    return config, params
  params = fuse("", params)
  if config.tied_logits:
    decoder = params["decoder"]
    decoder["logits_dense"] = {"kernel": params["token_embedder"]["embedding"].T}
    decoder["decoder_norm"]["scale"] = decoder["decoder_norm"]["scale"] / config.emb_dim**0.5
  return dataclasses.replace(config, fused=True, tied_logits=False), params


def _write(cache: Array, block: Array, length: Array) -> Array:
  """Replace slots length..length+K-1 of each row of cache [B, H, T, D] by block [B, H, K, D]."""
  write_row = lambda row, new, at: lax.dynamic_update_slice(row, new, (0, at, 0))
  return jax.vmap(write_row)(cache, block.astype(cache.dtype), length)
