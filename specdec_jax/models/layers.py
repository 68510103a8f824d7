"""Layers: norms, attention over given keys and values, feed-forward, position bias.

Axes: B batch, K queries in a block, T key slots, H heads, D head dim, E embed, M mlp.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array, lax

from specdec_jax.kernels import skinny
from specdec_jax.models.config import TransformerConfig

MASKED = -1e10  # added to attention logits; exp() of it is exactly 0 in float32 and bfloat16

_fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def matmul(x: Array, kernel: Array) -> Array:
  """x [..., E] times kernel [E, F], as one product of two matrices.

  With the leading axes folded, the gradient of `kernel` is one transposed product too: on
  a CPU a training step takes three quarters of the time of the three-axis contraction.
  """
  return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


class Dense(nn.Module):
  """A linear layer, in `config.dtype` unless said otherwise; see `TransformerConfig.kernels`.

  It has a bias if the model has any, unless `biases` is False.
  """

  config: TransformerConfig
  features: int
  dtype: Any = None
  kernel_init: Any = _fan_in
  biases: bool = True

  @nn.compact
  def __call__(self, x: Array) -> Array:  # [..., E] -> [..., features]
    product = self._product(x)
    if not (self.biases and self.config.biases):
      return product
    bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
    return product + bias.astype(product.dtype)

  def _product(self, x: Array) -> Array:
    *rows, depth = x.shape
    if self.config.kernels == "skinny":
      shape = skinny.packed_shape(depth, self.features, self.config.in_pairs)
      panels = self.param("kernel", self.kernel_init, shape)
      product = skinny.matmul(x.reshape(-1, depth), panels)
      return product[:, : self.features].reshape(*rows, self.features)
    dtype = self.dtype or self.config.dtype
    kernel = self.param("kernel", self.kernel_init, (depth, self.features))
    return matmul(x.astype(dtype), kernel.astype(dtype))


class RMSNorm(nn.Module):
  """T5's layer norm: scaled by the root mean square, no mean, no bias; float32 inside."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x: Array) -> Array:  # [..., E]
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
    if self.config.kernels == "skinny":
      rows = x.reshape(-1, x.shape[-1])
      return skinny.rms_norm(rows, scale.astype(jnp.float32)).reshape(x.shape)
    x = x.astype(jnp.float32)
    x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    return x.astype(self.config.dtype) * scale.astype(self.config.dtype)


class LayerNorm(nn.Module):
  """GPT-2's layer norm: mean and variance, scale and bias; float32 inside."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x: Array) -> Array:  # [..., E]
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
    bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)
    return (x * scale + bias).astype(self.config.activations)


def norm(config: TransformerConfig) -> nn.Module:
  """The norm of a model: GPT-2's if it has biases, else T5's."""
  return LayerNorm(config) if config.biases else RMSNorm(config)


class Embed(nn.Embed):
  """A table of tokens, of which only the rows that are read change their type, not all at once."""

  def __call__(self, inputs: Array) -> Array:  # [...] -> [..., E]
    return jnp.take(self.embedding, inputs, axis=0).astype(self.dtype)


def embedder(config: TransformerConfig) -> Embed:
  """The table of a model's tokens."""
  init = nn.initializers.normal(config.embedding_std)
  shape = config.table_size, config.emb_dim
  return Embed(*shape, dtype=config.activations, embedding_init=init)


class Dropout(nn.Module):
  """Dropout with one mask for all positions of a row, as in t5x: cheap, and rarely redrawn."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x: Array, deterministic: bool) -> Array:  # [B, K, ...]
    return nn.Dropout(self.config.dropout_rate, broadcast_dims=(-2,))(
      x, deterministic=deterministic
    )


class Attention(nn.Module):
  """Multi-head attention without scaling (T5 folds it into the query's initialiser).

  Projections are apart from the attending, so that a caller can keep keys and values.
  """

  config: TransformerConfig
  fused: bool = False  # one product for queries, keys and values

  def setup(self):
    cfg = self.config
    width = cfg.num_heads * cfg.head_dim
    if self.fused:
      self.query_key_value = Dense(cfg, 3 * width)
    else:
      query_init = lambda *args: _fan_in(*args) / np.sqrt(cfg.head_dim)
      self.query = Dense(cfg, width, kernel_init=query_init)
      self.key = Dense(cfg, width)
      self.value = Dense(cfg, width)
    self.out = Dense(cfg, cfg.emb_dim)
    self.dropout = Dropout(cfg)

  def queries(self, x: Array) -> Array:
    """[B, H, K, D] of x [B, K, E]."""
    return self._heads(self.query(x))

  def keys_values(self, x: Array) -> tuple[Array, Array]:
    """Keys and values [B, H, T, D] of x [B, T, E]."""
    return self._heads(self.key(x)), self._heads(self.value(x))

  def queries_keys_values(self, x: Array) -> tuple[Array, tuple[Array, Array]]:
    """All three of x [B, K, E], each [B, H, K, D], for self-attention."""
    if not self.fused:
      return self.queries(x), self.keys_values(x)
    query, key, value = jnp.split(self.query_key_value(x), 3, axis=-1)
    return self._heads(query), (self._heads(key), self._heads(value))

  def __call__(self, queries, keys_values, bias: Array, deterministic: bool = True) -> Array:
    """Queries [B, H, K, D] attend to [B, H, T, D] under bias [B|1, H|1, K|1, T]: [B, K, E]."""
    keys, values = keys_values
    if self.config.kernels == "skinny":
      mixed = skinny.attend(queries.swapaxes(1, 2), keys, values, bias, MASKED)
      return self.out(mixed.reshape(*mixed.shape[:2], -1))
    logits = jnp.einsum("bhkd,bhtd->bhkt", queries, keys)
    weights = nn.softmax(logits + bias.astype(logits.dtype))
    weights = self.dropout(weights, deterministic)
    mixed = jnp.einsum("bhkt,bhtd->bkhd", weights, values)
    return self.out(mixed.reshape(*mixed.shape[:2], -1))

  def _heads(self, x: Array) -> Array:  # [B, K, H * D] -> [B, H, K, D]
    cfg = self.config
    # On a TPU the order of axes wanted here would reach back through the product to its kernel, of
    # which each step would make a copy in another layout. The compiler for CPUs drops the barrier.
    x = lax.optimization_barrier(x)
    return x.reshape(*x.shape[:2], cfg.num_heads, cfg.head_dim).swapaxes(1, 2)


class Mlp(nn.Module):
  """Feed-forward block: activation(x wi) wo (1.0), or (activation(x wi_0) * x wi_1) wo (1.1)."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x: Array, deterministic: bool = True) -> Array:  # [B, K, E]
    cfg = self.config
    activation = {"gelu": nn.gelu, "relu": nn.relu}[cfg.activation]
    if cfg.gated and cfg.fused:
      gate, linear = jnp.split(Dense(cfg, 2 * cfg.mlp_dim, name="wi")(x), 2, axis=-1)
      h = activation(gate) * linear
    elif cfg.gated:
      h = activation(Dense(cfg, cfg.mlp_dim, name="wi_0")(x))
      h = h * Dense(cfg, cfg.mlp_dim, name="wi_1")(x)
    else:
      h = activation(Dense(cfg, cfg.mlp_dim, name="wi")(x))
    return Dense(cfg, cfg.emb_dim, name="wo")(Dropout(cfg, name="dropout")(h, deterministic))


class RelativePositionBias(nn.Module):
  """T5's learned bias per head and bucketed distance, shared by the layers of a stack."""

  config: TransformerConfig
  bidirectional: bool
  num_buckets: int = 32
  max_distance: int = 128

  @nn.compact
  def __call__(self, query_positions: Array, key_positions: Array) -> Array:
    """Bias [B, H, K, T] of queries at absolute positions [B, K] to keys at [T] or [B, T]."""
    table = self.param(
      "rel_embedding",
      nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
      (self.config.num_heads, self.num_buckets),
      jnp.float32,
    )
    keys = key_positions if key_positions.ndim == 1 else key_positions[:, None]
    distance = keys - query_positions[..., None]  # [B, K, T]
    # Bucket boundaries come from a logarithm: looked up in a table made once by numpy,
    # so that they cannot move with the backend's rounding. Distances past max_distance
    # share one bucket, so the table ends there.
    reach = self.max_distance
    buckets = jnp.asarray(self._bucket(np.arange(-reach, reach + 1)))
    bucket = buckets[jnp.clip(distance, -reach, reach) + reach]
    return jnp.moveaxis(table.T[bucket], -1, 1).astype(self.config.activations)

  def _bucket(self, distance: np.ndarray) -> np.ndarray:
    """Bucket of each key position minus query position."""
    buckets, offset = self.num_buckets, 0
    if self.bidirectional:
      buckets //= 2
      offset = np.where(distance > 0, buckets, 0)
      n = np.abs(distance)
    else:
      n = np.maximum(-distance, 0)
    exact = buckets // 2
    eps = np.finfo(np.float32).eps
    large = np.log(n.astype(np.float32) / exact + eps) / np.log(self.max_distance / exact)
    large = np.minimum(exact + (large * (buckets - exact)).astype(np.int32), buckets - 1)
    return (offset + np.where(n < exact, n, large)).astype(np.int32)
