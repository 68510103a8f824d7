"""Quantization of weight matrices: symmetric, to int8 or int4.

An int8 column has one scale. In int4, each group of gcd(E, 128) entries of a column has its own.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

MAX_QUANTIZED = {"int8": 127, "int4": 7}
GROUP = 128


def num_groups(weights: str, depth: int) -> tuple[int, ...]:
  """Return the axes of scales before that of columns: none for int8, the groups for int4."""
  return (depth // math.gcd(depth, GROUP),) if weights == "int4" else ()


def quantize(
  kernel: Float[np.ndarray, "E F"], weights: str = "int8"
) -> tuple[Shaped[np.ndarray, "E F"], Float[np.ndarray, "*groups F"]]:
  """Return the int8 or int4 matrix and the float32 scales whose product is closest to `kernel`.

  The largest absolute value of a column or group is 127 or 7 times its scale, so that each value
  changes by at most half a scale. Columns and groups of zeros have scale 1.
  """
  scales = column_scales(kernel, weights)
  values = np.rint(_grouped(kernel, weights) / scales[..., None, :])
  return values.reshape(kernel.shape).astype(jnp.dtype(weights)), scales


def column_scales(
  kernel: Float[np.ndarray, "E F"], weights: str = "int8"
) -> Float[np.ndarray, "*groups F"]:
  """Return the scales of the columns of a matrix; see `quantize`."""
  largest = np.abs(_grouped(kernel, weights)).max(axis=-2)
  if not np.isfinite(largest).all():
    raise ValueError(f"{weights} cannot represent NaN or infinity, and it has them")
  unit = np.float32(MAX_QUANTIZED[weights])
  return np.where(largest > 0, largest / unit, np.float32(1)).astype(np.float32)


def _grouped(kernel: Float[np.ndarray, "E F"], weights: str) -> np.ndarray:
  depth, width = kernel.shape
  return np.asarray(kernel, np.float32).reshape(*num_groups(weights, depth), -1, width)
