"""Matmuls that XLA compiles to few kernels for GPUs (kernels 'gpu').

For a few rows, each kernel takes at least 1.6 microseconds on an H100, so that the number of
kernels determines the time of a small draft. XLA fuses neither a norm nor a residual connection
with a matmul of one row, which it compiles to a reduction if the matrix is small. Therefore the
norm is computed after the matmul, or both are written as one reduction. Small matrices are
transposed, [F, E], because such a reduction is one kernel only if the entries of a sum are
adjacent. Large ones are not, except in int4: on an H100, XLA reads them faster as [E, F].
"""

import math
import operator
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Float, Shaped

from specdec_jax.core.arrays import expanded

# XLA compiles products of one row and matrices below this size to reductions.
REDUCED = 10_000_000
MAX_REDUCED_ROWS = 16  # number of queries of a head up to which attention is written as reductions


class Normed(NamedTuple):
  """Input of an RMS norm that the matmul after it computes.

  Attributes:
    x: not normalized.
    scale: scale of the norm, float32.
  """

  x: Float[Array, "*batch E"]
  scale: Float[Array, " E"]


def is_transposed(shape: tuple[int, ...], weights: str = "float") -> bool:
  """Return whether a matrix of a shape, or of its transpose, is stored as [F, E]."""
  return math.prod(shape) < REDUCED or weights == "int4"


def inverse_rms(mean_square: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Return the factor of an RMS norm."""
  return lax.rsqrt(mean_square + 1e-6)


def matmul(
  x: Float[Array, "*batch E"] | Normed,
  kernel: Shaped[Array, "rows columns"],
  scales: Float[Array, "F ..."] | None,
  dtype: Any,
  residual: Float[Array, "*batch F"] | None = None,
) -> Float[Array, "*batch F"]:
  """Return x times a matrix, times the scales of int8 or int4 columns, plus a residual connection.

  The matrix is [F, E] if `is_transposed`, otherwise [E, F]. The result has the given dtype, or that
  of `residual`. XLA reads an int4 matrix with scales of groups as it is in reductions only, and
  otherwise converts it first.
  """
  x, norm_scale = x if isinstance(x, Normed) else (x, None)
  *rows, depth = x.shape
  dtype_of_result = dtype if residual is None else residual.dtype
  is_int4, transposed = kernel.dtype == jnp.int4, is_transposed(kernel.shape, kernel.dtype.name)
  if x.size == depth and transposed:
    product = _reduced(x, norm_scale, kernel, scales, residual)
    return product.astype(dtype_of_result).reshape(*rows, -1)
  factor: Any = 1 if scales is None or is_int4 else expanded(scales, x)
  if norm_scale is not None:
    x = x.astype(jnp.float32)
    factor = factor * inverse_rms(jnp.mean(jnp.square(x), axis=-1, keepdims=True))
    x = x * expanded(norm_scale, x)
  if is_int4:
    kernel = _scaled(kernel, scales)
  if is_int4 and x.size <= MAX_REDUCED_ROWS * depth:
    terms = tuple(kernel * row for row in x.astype(jnp.float32).reshape(-1, 1, depth))
    sums = lax.reduce(terms, (jnp.float32(0),) * len(terms), _add, (1,))
    product = jnp.stack(sums).reshape(*rows, -1)
  else:
    x, matrix = x.astype(dtype), kernel.T if transposed else kernel
    product = jnp.matmul(x, matrix.astype(dtype), preferred_element_type=jnp.float32)
  product = (product * factor).astype(dtype_of_result)
  return product if residual is None else residual + product


def attention_sum(
  products: Float[Array, "B G R T D"], axis: Literal[3, 4]
) -> Float[Array, "B G R sums"]:
  """Return the sum over T (axis 3) or D (axis 4), computed in float32.

  XLA would make this axis adjacent in memory, and the threads of a GPU would then exchange the
  terms of each sum. With the other axis adjacent, a thread adds the terms of its own sums. XLA
  would gather sharded arrays for it, but sharded models have other kernels.
  """
  order = (0, 1, 2, 3, 4) if axis == 3 else (0, 1, 2, 4, 3)
  terms = with_layout_constraint(products.astype(jnp.float32), Layout(order))
  return terms.sum(axis).astype(products.dtype)


def _add(a: Any, b: Any) -> Any:
  return tuple(map(operator.add, a, b))


def _scaled(
  kernel: Shaped[Array, "F E"], scales: Float[Array, "F ..."] | None
) -> Float[Array, "F E"]:
  """Return a matrix in float32, multiplied by the scales of its rows or of groups in them."""
  kernel = kernel.astype(jnp.float32)
  if scales is None:
    return kernel
  scales = scales.reshape(len(scales), -1, 1)
  return (kernel.reshape(*scales.shape[:2], -1) * scales).reshape(kernel.shape)


def _reduced(
  x: Float[Array, "*ones E"],
  norm_scale: Float[Array, " E"] | None,
  kernel: Shaped[Array, "F E"],
  scales: Float[Array, "F ..."] | None,
  residual: Float[Array, "*ones F"] | None,
) -> Float[Array, " F"]:
  """Return the float32 result of `matmul` for one row, computed by one reduction."""
  x, kernel = x.reshape(1, -1).astype(jnp.float32), _scaled(kernel, scales)
  if norm_scale is not None:
    terms = kernel * (x * norm_scale[None]), jnp.broadcast_to(x * x, kernel.shape)
    product, squares = lax.reduce(terms, (jnp.float32(0), jnp.float32(0)), _add, (1,))
    return product * inverse_rms(squares / x.size)
  terms = kernel * x
  if residual is not None:
    residual = residual.reshape(-1, 1).astype(jnp.float32)
    terms = terms + jnp.pad(residual, ((0, 0), (0, x.size - 1)))
  return terms.sum(axis=1)
