"""Layout of a model's parameters in memory, and the operations that depend on it.

Axis letters are those of `core.types`; in queries, keys and values, D is the size of a head.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

from specdec_jax.core.arrays import expanded
from specdec_jax.errors import InputError
from specdec_jax.models.kernels import gpu, skinny
from specdec_jax.models.kernels.gpu import Normed
from specdec_jax.models.quantization import MAX_QUANTIZED, column_scales, num_groups, quantize

MASKED = -1e10  # added to attention logits; exp(MASKED) is exactly 0 in float32 and bfloat16

_PART = 256  # number of queries that attend at a time on a CPU

Weights = Literal["float", "stored", "int8", "int4"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """Layout of a model's parameters in memory; see `for_device`.

  Attributes:
    kernels: 'xla'; 'skinny' for `kernels.skinny`, which decodes faster on a CPU; or 'gpu' for
      `kernels.gpu`, with which XLA compiles fewer kernels. With 'skinny', the matrices of linear
      layers are packed in panels (`skinny.pack`), and may be bfloat16; with 'gpu', small ones are
      transposed (`gpu.is_transposed`).
    weights: 'float' for matrices of linear layers in `dtype`; 'stored' if matrices that are stored
      in bfloat16 stay so with kernels 'skinny', which convert them and give the same result;
      'int8' or 'int4' if they are quantized (`quantization.quantize`).
    dtype: float32 or bfloat16. It is the dtype of matmuls, except that 'xla' computes logits in
      float32. It is also the dtype of activations, unless `kernels` is 'skinny'.
    fused: whether parameters are those of `families.for_decoding`, with fewer, larger matmuls.

  Raises:
    InputError: there are no such weights.
  """

  kernels: Literal["xla", "skinny", "gpu"] = "xla"
  weights: Weights = "float"
  dtype: Any = jnp.float32
  fused: bool = False

  def __post_init__(self):
    if self.weights not in ("float", "stored", *MAX_QUANTIZED):
      raise InputError(f"weights is {self.weights!r}; give 'float', 'stored', 'int8' or 'int4'.")
    if self.weights == "int4" and self.kernels == "skinny":
      object.__setattr__(self, "kernels", "xla")  # there is no such kernel

  @property
  def activations(self) -> Any:
    """Dtype of activations: float32 if `kernels` is 'skinny', otherwise `dtype`."""
    return jnp.float32 if self.kernels == "skinny" else self.dtype

  @property
  def is_quantized(self) -> bool:
    """Return whether the matrices of linear layers are int8 or int4."""
    return self.weights in MAX_QUANTIZED

  @property
  def fuses_blocks(self) -> bool:
    """Return whether matmuls compute the norm before them and add the residual after them."""
    return self.kernels == "gpu"

  def transposes(self, shape: tuple[int, ...]) -> bool:
    """Return whether a matrix [E, F] of a shape is [F, E] in memory."""
    return self.kernels == "gpu" and gpu.is_transposed(shape, self.weights)

  def matrix_shapes(self, depth: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes in memory of a matrix [E, F] and, if it is quantized, of its scales."""
    groups = num_groups(self.weights, depth)
    if self.kernels == "skinny":
      shape = skinny.packed_shape(depth, width, self._in_pairs, self.weights == "int8")
      return shape, (shape[0] * skinny.PANEL,)
    if self.transposes((depth, width)):
      return (width, depth), (width, *groups)
    return (depth, width), (*groups, width)

  def matrix(self, kernel: Float[np.ndarray, "E F"]) -> Shaped[np.ndarray, "..."]:
    """Return a matrix as it is in memory."""
    values = quantize(kernel, self.weights)[0] if self.is_quantized else kernel
    if self.transposes(kernel.shape):
      return values.T
    return skinny.pack(values, self._in_pairs) if self.kernels == "skinny" else values

  def scales(self, kernel: Float[np.ndarray, "E F"]) -> Float[np.ndarray, "..."]:
    """Return the scales of a quantized matrix as they are in memory."""
    scales = column_scales(kernel, self.weights)
    if self.transposes(kernel.shape):
      return scales.T
    padding = -len(scales) % skinny.PANEL if self.kernels == "skinny" else 0
    return np.pad(scales, (0, padding), constant_values=1) if padding else scales

  def param_dtype(self, name: str, dtype: Any) -> Any:
    """Return the dtype in memory of a parameter of a name, such as 'kernel', and a stored dtype.

    It is `dtype` of the layout, except for quantized matrices, their float32 scales, token ids and
    matrices that stay as stored. Token embeddings have the dtype of activations: XLA for CPUs
    cannot look up rows of a bfloat16 table, and would convert the whole table for each text.
    """
    stays = self.weights == "stored" and self.kernels == "skinny" and dtype == jnp.bfloat16
    if jnp.issubdtype(dtype, jnp.integer) or name == "kernel_scale" or stays and name == "kernel":
      return dtype
    return self.activations if name == "embedding" else self.dtype

  def matmul(
    self,
    x: Float[Array, "*batch E"] | Normed,
    kernel: Shaped[Array, "..."],
    scales: Float[Array, "..."] | None,
    width: int,
    dtype: Any = None,
    residual: Float[Array, "*batch F"] | None = None,
  ) -> Float[Array, "*batch F"]:
    """Return x times a matrix of `width` columns, given as it is in memory.

    `dtype` is that of the matmul, except with kernels 'skinny'; by default that of the layout. If
    the layout `fuses_blocks`, x may be `Normed`, and `residual` is added.
    """
    dtype = dtype or self.dtype
    if self.kernels == "gpu":
      return gpu.matmul(x, kernel, scales, dtype, residual)
    assert not isinstance(x, Normed)
    if self.kernels == "skinny":
      product = skinny.matmul(x.reshape(-1, x.shape[-1]), kernel, scales)
      return product[:, :width].reshape(*x.shape[:-1], width)
    if self.weights == "int4":
      assert scales is not None
      return _grouped_matmul(x, kernel, scales, dtype)
    product = matmul(x.astype(dtype), kernel.astype(dtype))
    return product if scales is None else product * expanded(scales.astype(dtype), product)

  def rms_norm(
    self, x: Float[Array, "*batch E"], scale: Float[Array, " E"]
  ) -> Float[Array, "*batch E"]:
    """Return T5's RMS norm of x."""
    if self.kernels == "skinny":
      rows = x.reshape(-1, x.shape[-1])
      return skinny.rms_norm(rows, scale.astype(jnp.float32)).reshape(x.shape)
    x = x.astype(jnp.float32)
    x = x * gpu.inverse_rms(jnp.mean(jnp.square(x), axis=-1, keepdims=True))
    return x.astype(self.dtype) * expanded(scale.astype(self.dtype), x)

  def layer_norm(
    self, x: Float[Array, "*batch E"], scale: Float[Array, " E"], bias: Float[Array, " E"]
  ) -> Float[Array, "*batch E"]:
    """Return GPT-2's layer norm of x."""
    if self.kernels == "skinny":
      rows = x.reshape(-1, x.shape[-1])
      scale, bias = scale.astype(jnp.float32), bias.astype(jnp.float32)
      return skinny.layer_norm(rows, scale, bias).reshape(x.shape)
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)
    return (x * expanded(scale, x) + expanded(bias, x)).astype(self.activations)

  def attend(
    self,
    queries: Float[Array, "B H K D"],
    keys: Float[Array, "B G T D"],
    values: Float[Array, "B G T D"],
    bias: Float[Array, "#B #H #K T"],
    cap: float | None = None,
    dropout: Callable[[Array], Array] = lambda weights: weights,
  ) -> Float[Array, "B K HD"]:
    """Return attention without scaling; each head of keys and values serves H / G of queries.

    Args:
      bias: added to the attention logits.
      cap: soft cap of the logits before the bias is added.
      dropout: applied to the attention weights, except with kernels 'skinny'.
    """
    batch, heads, block, dim = queries.shape
    if self.kernels == "skinny" and block > _PART:
      return _attend_in_parts(queries, keys, values, bias, cap)
    if self.kernels == "skinny":
      mixed = skinny.attend(queries.swapaxes(1, 2), keys, values, bias, MASKED, cap)
      return mixed.reshape(batch, block, -1)
    # Each head of keys and values serves R heads of queries, so their queries are R * K rows.
    grouped = queries.reshape(batch, keys.shape[1], -1, dim)
    # XLA for GPUs fuses reductions, but not matmuls, with the rest of attention.
    reduces = self.kernels == "gpu" and 1 < grouped.shape[2] <= gpu.MAX_REDUCED_ROWS
    if reduces:
      products = keys[:, :, None] * grouped[:, :, :, None]
      logits = gpu.attention_sum(products, 4)
    else:
      logits = jnp.einsum("bgqd,bgtd->bgqt", grouped, keys)
    logits = soft_cap(logits.reshape(batch, heads, block, -1), cap)
    weights = nn.softmax(logits + bias.astype(logits.dtype))
    weights = dropout(weights).reshape(*grouped.shape[:3], -1)
    if reduces:
      products = values[:, :, None] * weights[..., None]
      mixed = gpu.attention_sum(products, 3).swapaxes(1, 2)
    else:
      mixed = jnp.einsum("bgqt,bgtd->bqgd", weights, values)  # [B, R * K, G, D]
    mixed = mixed.reshape(batch, -1, block, keys.shape[1], dim).transpose(0, 2, 3, 1, 4)
    return mixed.reshape(batch, block, -1)

  @property
  def _in_pairs(self) -> bool:
    """Return whether panels have the layout for bfloat16 matmuls (`pairs` of `skinny.pack`)."""
    return self.dtype == jnp.bfloat16


def for_device(
  dtype: str = "float32", kernels: str = "auto", weights: Weights | None = "float"
) -> Layout:
  """Return the layout for decoding on the first device.

  Args:
    dtype: 'float32' or 'bfloat16'.
    kernels: 'xla' or 'gpu'; 'auto' for 'gpu' on a GPU and, if available, 'skinny' on a CPU.
    weights: see `Layout`; None for the default of a draft: 'int8' if kernels are 'skinny' and
      `dtype` is 'bfloat16', which is faster, and otherwise 'stored'.

  Raises:
    InputError: there is no such dtype, or there are no such kernels or weights.
  """
  chosen: Any = kernels
  if kernels not in ("auto", "gpu", "xla"):
    raise InputError(f"kernels is {kernels!r}; use 'auto', 'gpu' or 'xla'.")
  if kernels == "auto":
    on_gpu = jax.default_backend() == "gpu"
    chosen = "gpu" if on_gpu else "skinny" if skinny.is_available(named_dtype(dtype)) else "xla"
  if weights is None:
    weights = "int8" if chosen == "skinny" and dtype == "bfloat16" else "stored"
  return Layout(kernels=chosen, weights=weights, dtype=named_dtype(dtype), fused=True)


def named_dtype(name: str):
  """Return the dtype 'float32' or 'bfloat16'; raise InputError for any other name."""
  if name not in ("float32", "bfloat16"):
    raise InputError(f"dtype is {name!r}; use 'float32' or 'bfloat16'.")
  return jnp.dtype(name)


def matmul(x: Float[Array, "*batch E"], kernel: Float[Array, "E F"]) -> Float[Array, "*batch F"]:
  """Multiply `x` by a matrix after merging all leading axes of `x` into one.

  Then the gradient with respect to `kernel` is also a single matmul. On a CPU, a training step
  takes three quarters of the time that it takes without merging.
  """
  return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


def soft_cap(logits: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
  """Return logits that are limited to (-cap, cap); unchanged if `cap` is None."""
  return logits if cap is None else cap * jnp.tanh(logits / cap)


def _attend_in_parts(
  queries: Float[Array, "B H K D"],
  keys: Float[Array, "B G T D"],
  values: Float[Array, "B G T D"],
  bias: Float[Array, "#B #H #K T"],
  cap: float | None,
) -> Float[Array, "B K HD"]:
  """Attend as `Layout.attend` does, from _PART queries at a time, whose logits stay in a cache."""
  batch, heads, block, dim = queries.shape
  parts = -(-block // _PART)

  def split(x: Float[Array, "b h K X"]) -> Float[Array, "parts b h part X"]:
    x = jnp.pad(x, ((0, 0), (0, 0), (0, parts * _PART - block), (0, 0)))
    return jnp.moveaxis(x.reshape(*x.shape[:2], parts, _PART, x.shape[3]), 2, 0)

  def attend(part: tuple[Array, Array | None]) -> Float[Array, "B H part D"]:
    queries, own_bias = part
    grouped = queries.reshape(batch, keys.shape[1], -1, dim)
    logits = jnp.einsum("bgqd,bgtd->bgqt", grouped, keys).reshape(batch, heads, _PART, -1)
    logits = soft_cap(logits, cap) + (bias if own_bias is None else own_bias)
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    mixed = jnp.einsum("bgqt,bgtd->bgqd", weights.reshape(*grouped.shape[:3], -1), values)
    return mixed.reshape(queries.shape) / weights.sum(axis=-1, keepdims=True)

  mixed = lax.map(attend, (split(queries), None if bias.shape[2] == 1 else split(bias)))
  return (
    jnp.moveaxis(mixed, 0, 2)
    .reshape(batch, heads, -1, dim)[:, :, :block]
    .swapaxes(1, 2)
    .reshape(batch, block, -1)
  )


def _grouped_matmul(
  x: Float[Array, "*batch E"], kernel: Int[Array, "E F"], scales: Float[Array, "G F"], dtype: Any
) -> Float[Array, "*batch F"]:
  """Multiply `x` by an int4 matrix; each group of its rows has scales of its own.

  XLA for TPUs reads the int4 values, but would first convert the matrix to float32 if `x` had a
  single row, which is therefore computed twice.
  """
  *batch, depth = x.shape
  rows = x.reshape(-1, len(scales), depth // len(scales)).astype(dtype)
  rows = jnp.broadcast_to(rows, (2, *rows.shape[1:])) if len(rows) == 1 else rows
  groups = kernel.astype(dtype).reshape(*rows.shape[1:], -1)
  products = jnp.einsum("rgi,gif->grf", rows, groups, preferred_element_type=jnp.float32)
  sums = (products * scales[:, None]).sum(axis=0)
  return sums[: math.prod(batch)].astype(dtype).reshape(*batch, -1)
