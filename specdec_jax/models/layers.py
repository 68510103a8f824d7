"""Layers of the models: norms, attention, feed-forward blocks and positions.

Axis letters are those of `core.types`; in queries, keys and values, D is the size of a head.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from specdec_jax.core.arrays import expanded
from specdec_jax.models.config import TransformerConfig
from specdec_jax.models.kernels.gpu import Normed
from specdec_jax.models.layout import MASKED, soft_cap

Rotation = tuple[Array, Array]  # cosine and sine, each [B, 1, K, D / 2]

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
  "gelu": nn.gelu,
  "gelu_exact": functools.partial(nn.gelu, approximate=False),
  "relu": nn.relu,
  "silu": nn.silu,
}

_fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def _query_init(head_dim: int) -> Callable[..., Array]:
  """Return the initializer of a query projection. It includes the scale factor of attention."""

  def init(*args: Any) -> Array:
    return _fan_in(*args) / np.sqrt(head_dim)

  return init


class Dense(nn.Module):
  """Linear layer, with a bias if the model has biases.

  Attributes:
    dtype: dtype of the matmul with kernels 'xla'; None for that of the layout.
    biases: False if the layer has no bias even if the model has biases.
  """

  config: TransformerConfig
  features: int
  dtype: Any = None
  kernel_init: Any = _fan_in
  biases: bool = True

  @nn.compact
  def __call__(
    self, x: Float[Array, "*batch E"] | Normed, residual: Float[Array, "*batch F"] | None = None
  ) -> Float[Array, "*batch F"]:
    """Return the product; with kernels 'gpu', `residual` is added to it."""
    product = self._matmul(x, residual)
    if not (self.biases and self.config.biases):
      return product
    bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
    return product + expanded(bias.astype(product.dtype), product)

  def _matmul(
    self, x: Float[Array, "*batch E"] | Normed, residual: Float[Array, "*batch F"] | None = None
  ) -> Float[Array, "*batch F"]:
    layout = self.config.layout
    depth = (x.x if isinstance(x, Normed) else x).shape[-1]
    shape, shape_of_scales = layout.matrix_shapes(depth, self.features)
    if layout.is_quantized:
      kernel = self.param("kernel", nn.initializers.zeros, shape, jnp.dtype(layout.weights))
      ones = nn.initializers.ones
      scales = self.param("kernel_scale", ones, shape_of_scales, jnp.float32)
    else:
      kernel, scales = self.param("kernel", self.kernel_init, shape), None
    return layout.matmul(x, kernel, scales, self.features, self.dtype, residual)


class Logits(Dense):
  """Linear layer that computes float32 logits, of all tokens or of `num_output_tokens` of them."""

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, "*batch E"]) -> Float[Array, "*batch V"]:
    cfg = self.config
    logits = self._matmul(x)
    if cfg.logits_bias:
      bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
      logits += expanded(bias, logits)
    logits = soft_cap(logits, cfg.logits_cap)
    if cfg.num_output_tokens is None:
      return logits[..., : cfg.vocab_size]
    shape = (cfg.num_output_tokens,)
    tokens = self.param("output_tokens", nn.initializers.zeros, shape, jnp.int32)
    others = jnp.full((*logits.shape[:-1], cfg.vocab_size), MASKED, logits.dtype)
    return others.at[..., tokens].set(logits, mode="drop", unique_indices=True)


class RMSNorm(nn.Module):
  """T5's RMS norm, without mean subtraction or bias; the mean square is computed in float32.

  If `deferred`, the matmuls of the result compute it.
  """

  config: TransformerConfig
  deferred: bool = False

  @nn.compact
  def __call__(self, x: Float[Array, "*batch E"]) -> Float[Array, "*batch E"] | Normed:
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
    if self.deferred:
      return Normed(x, scale.astype(jnp.float32))
    return self.config.layout.rms_norm(x, scale)


class LayerNorm(nn.Module):
  """GPT-2's layer norm, with mean subtraction, scale and bias, computed in float32."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x: Float[Array, "*batch E"]) -> Float[Array, "*batch E"]:
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
    bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
    return self.config.layout.layer_norm(x, scale, bias)


def norm(config: TransformerConfig, deferred: bool = False) -> nn.Module:
  """Return the norm layer of a model: GPT-2's if the model has biases, otherwise T5's."""
  return LayerNorm(config) if config.biases else RMSNorm(config, deferred)


def norms(
  config: TransformerConfig,
) -> tuple[Callable[[], nn.Module | None], Callable[[], nn.Module | None]]:
  """Return functions that make the norms before and after a block; see `norm_position`."""
  position = config.norm_position
  return (
    lambda: norm(config, config.layout.fuses_blocks) if position in ("before", "both") else None,
    lambda: norm(config) if position in ("after", "both") else None,
  )


def normed(
  before: nn.Module | None, x: Float[Array, "*batch E"]
) -> Float[Array, "*batch E"] | Normed:
  """Return the input of a block, given the norm before the block; None for no norm."""
  return x if before is None else before(x)


def add_block(
  config: TransformerConfig,
  x: Float[Array, "*batch E"],
  block: Float[Array, "*batch E"],
  after: nn.Module | None,
) -> Float[Array, "*batch E"]:
  """Add the output of a block to the residual stream `x`; see `TransformerConfig.norm_position`."""
  if after is None:
    return x + block if residual_of(config, x, after) is None else block
  return after(x + block) if config.norm_position == "after" else x + after(block)


def residual_of(
  config: TransformerConfig, x: Float[Array, "*batch E"], after: nn.Module | None
) -> Float[Array, "*batch E"] | None:
  """Return the residual stream if the last matmul of a block adds it, instead of `add_block`."""
  return x if config.layout.fuses_blocks and after is None else None


class Embed(nn.Embed):
  """Token embeddings. Only the rows that are looked up are converted to the activation dtype."""

  def __call__(self, inputs: Int[Array, "*batch"]) -> Float[Array, "*batch E"]:
    return jnp.take(self.embedding, inputs, axis=0).astype(self.dtype)


def embedder(config: TransformerConfig) -> Embed:
  """Return the module of a model's token embeddings."""
  init = nn.initializers.normal(config.embedding_std)
  shape = config.table_size, config.emb_dim
  return Embed(*shape, dtype=config.layout.activations, embedding_init=init)


class Dropout(nn.Module):
  """Dropout with one mask for all positions of a row, as in t5x."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x: Float[Array, "*shape"], deterministic: bool) -> Float[Array, "*shape"]:
    return nn.Dropout(self.config.dropout_rate, broadcast_dims=(-2,))(
      x, deterministic=deterministic
    )


class Attention(nn.Module):
  """Multi-head attention without a scale factor, which T5 merges into the initializer of queries.

  The projections are separate methods, so that the caller can cache keys and values. There are G
  heads of keys and values (`TransformerConfig.kv_heads`).
  """

  config: TransformerConfig
  fused: bool = False

  def setup(self):
    cfg = self.config
    width, kv_width = cfg.num_heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    if self.fused:
      self.query_key_value = Dense(cfg, width + 2 * kv_width)
    else:
      self.query = Dense(cfg, width, kernel_init=_query_init(cfg.head_dim))
      self.key = Dense(cfg, kv_width)
      self.value = Dense(cfg, kv_width)
    self.out = Dense(cfg, cfg.emb_dim)
    self.dropout = Dropout(cfg)

  def queries(self, x: Float[Array, "B K E"] | Normed) -> Float[Array, "B H K D"]:
    """Return the queries of a block of tokens."""
    return self._split_heads(self.query(x))

  def keys_values(
    self, x: Float[Array, "B T E"] | Normed
  ) -> tuple[Float[Array, "B G T D"], Float[Array, "B G T D"]]:
    """Return the keys and values of tokens."""
    return self._split_heads(self.key(x)), self._split_heads(self.value(x))

  def queries_keys_values(
    self, x: Float[Array, "B K E"] | Normed, rotation: Rotation | None = None
  ) -> tuple[Float[Array, "B H K D"], tuple[Float[Array, "B G K D"], Float[Array, "B G K D"]]]:
    """Return the queries, keys and values of tokens for self-attention."""
    if self.fused:
      width, kv_width = (
        n * self.config.head_dim for n in (self.config.num_heads, self.config.kv_heads)
      )
      parts = jnp.split(self.query_key_value(x), (width, width + kv_width), axis=-1)
      query, key, value = map(self._split_heads, parts)
    else:
      query, (key, value) = self.queries(x), self.keys_values(x)
    if rotation is not None:
      query, key = _rotate(query, rotation), _rotate(key, rotation)
    return query, (key, value)

  def __call__(
    self,
    queries: Float[Array, "B H K D"],
    keys_values: tuple[Float[Array, "B heads T D"], ...],
    bias: Float[Array, "#B #H #K T"],
    deterministic: bool = True,
    residual: Float[Array, "B K E"] | None = None,
  ) -> Float[Array, "B K E"]:
    """Attend to keys and values, with a bias that is added to the attention logits."""
    cfg = self.config
    keys, values = jnp.split(keys_values[0], 2, axis=1) if len(keys_values) == 1 else keys_values

    def dropout(weights: Float[Array, "B H K T"]) -> Float[Array, "B H K T"]:
      return self.dropout(weights, deterministic)

    mixed = cfg.layout.attend(queries, keys, values, bias, cfg.attention_cap, dropout)
    return self.out(mixed, residual)

  def to_source(
    self,
    x: Float[Array, "B K E"] | Normed,
    cross: tuple[Float[Array, "sources G S D"], ...],
    bias: Float[Array, "sources 1 1 S"],
    deterministic: bool = True,
    residual: Float[Array, "B K E"] | None = None,
  ) -> Float[Array, "B K E"]:
    """Attend from a block of tokens to encoded sources.

    If there are fewer sources than rows, consecutive rows share a source: their tokens are then
    queries of one row of keys and values.
    """
    queries = self.query(x)
    batch, block, width = queries.shape
    queries = self._split_heads(queries.reshape(len(bias), -1, width))
    if residual is not None:
      residual = residual.reshape(len(bias), -1, residual.shape[-1])
    return self(queries, cross, bias, deterministic, residual).reshape(batch, block, -1)

  def _split_heads(self, x: Float[Array, "B K HD"]) -> Float[Array, "B H K D"]:
    cfg = self.config
    # Without the barrier, the TPU compiler propagates the layout of the result through the matmul
    # to its matrix, and each step copies the matrix to a different layout. The CPU compiler drops
    # the barrier. On a GPU, it would prevent the fusion of the matmul with what follows.
    x = x if cfg.layout.kernels == "gpu" else lax.optimization_barrier(x)
    return x.reshape(*x.shape[:2], -1, cfg.head_dim).swapaxes(1, 2)


class Mlp(nn.Module):
  """Feed-forward block. T5 1.0: activation(x wi) wo. T5 1.1: (activation(x wi_0) * (x wi_1)) wo."""

  config: TransformerConfig

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "B K E"] | Normed,
    deterministic: bool = True,
    residual: Float[Array, "B K E"] | None = None,
  ) -> Float[Array, "B K E"]:
    cfg = self.config
    activation = _ACTIVATIONS[cfg.activation]
    if cfg.gated and cfg.layout.fused:
      gate, linear = jnp.split(Dense(cfg, 2 * cfg.mlp_dim, name="wi")(x), 2, axis=-1)
      h = activation(gate) * linear
    elif cfg.gated:
      h = activation(Dense(cfg, cfg.mlp_dim, name="wi_0")(x))
      h = h * Dense(cfg, cfg.mlp_dim, name="wi_1")(x)
    else:
      h = activation(Dense(cfg, cfg.mlp_dim, name="wi")(x))
    h = Dropout(cfg, name="dropout")(h, deterministic)
    return Dense(cfg, cfg.emb_dim, name="wo")(h, residual)


def window_masks(
  config: TransformerConfig,
  visible: Bool[Array, "B 1 #K T"],
  distance: Int[Array, "#B 1 K T"],
) -> list[Float[Array, "B 1 #K T"]]:
  """Return masks of attention logits, 0 or MASKED: one, or those of even and of odd layers.

  Args:
    visible: True where a query may attend to a key.
    distance: position of the query minus position of the key.
  """
  masked = jnp.asarray(MASKED, config.layout.activations)
  mask = jnp.where(visible, 0.0, masked)
  if config.window is None or config.window >= distance.shape[-1]:
    return [mask]
  is_near = jnp.abs(distance) < config.window
  return [jnp.where(visible & is_near, 0.0, masked), mask]


def rotation(
  config: TransformerConfig, positions: Int[Array, "B K"], num_positions: int
) -> Rotation | None:
  """Return the rotation of queries and keys at positions below `num_positions` (Su et al., 2021).

  It is None if the model has no rotary positions. numpy computes a table of all positions, so that
  the values at a position do not depend on the shape of a block.
  """
  if config.rope_theta is None:
    return None
  dim = config.head_dim
  exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
  frequencies = np.float32(1) / np.float32(config.rope_theta) ** exponents
  angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies
  cos, sin = (
    jnp.asarray(table).at[positions].get(mode="clip")[:, None]
    for table in (np.cos(angles), np.sin(angles))
  )
  return cos, sin


def _rotate(x: Float[Array, "B H K D"], rotation: Rotation) -> Float[Array, "B H K D"]:
  """Rotate the pairs of entries i and i + D / 2 of queries or keys."""
  cos, sin = rotation
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = first * cos - second * sin, second * cos + first * sin
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class RelativePositionBias(nn.Module):
  """T5's learned bias for each head and bucket of distances."""

  config: TransformerConfig
  bidirectional: bool
  num_buckets: int = 32
  max_distance: int = 128

  @nn.compact
  def __call__(
    self,
    query_positions: Int[Array, "B K"],
    key_positions: Int[Array, " T"] | Int[Array, "B T"],
  ) -> Float[Array, "B H K T"]:
    """Return the bias of attention logits between queries and keys at the given positions."""
    table = self.param(
      "rel_embedding",
      nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
      (self.config.num_heads, self.num_buckets),
      jnp.float32,
    )
    keys = key_positions[None, None] if key_positions.ndim == 1 else key_positions[:, None]
    distance = keys - query_positions[..., None]  # [B, K, T]
    # The bucket of a distance depends on a logarithm. numpy computes a table of all buckets, so
    # that rounding on the device cannot move the boundaries of buckets. Distances past max_distance
    # share one bucket, so the table ends at max_distance.
    reach = self.max_distance
    buckets = jnp.asarray(self._bucket(np.arange(-reach, reach + 1)))
    bucket = buckets[jnp.clip(distance, -reach, reach) + reach]
    return jnp.moveaxis(table.T[bucket], -1, 1).astype(self.config.layout.activations)

  def _bucket(self, distance: np.ndarray) -> np.ndarray:
    """Return the bucket of each distance. A distance is key position minus query position."""
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
