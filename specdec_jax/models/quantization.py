"""Quantization of weight matrices to int8: symmetric, with a scale per output column."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int8

MAX_INT8 = 127


def quantize(
  kernel: Float[np.ndarray, "E F"],
) -> tuple[Int8[np.ndarray, "E F"], Float[np.ndarray, " F"]]:
  """Return the int8 matrix and the float32 scales whose product is closest to `kernel`.

  The largest absolute value of a column is 127 times its scale, so that each value changes by at
  most half a scale. Columns of zeros have scale 1.
  """
  scale = column_scales(kernel)
  return np.rint(np.asarray(kernel, np.float32) / scale).astype(np.int8), scale


def column_scales(kernel: Float[np.ndarray, "E F"]) -> Float[np.ndarray, " F"]:
  """Return the scales of the columns of a matrix; see `quantize`."""
  largest = np.abs(np.asarray(kernel, np.float32)).max(axis=0)
  return np.where(largest > 0, largest / np.float32(MAX_INT8), np.float32(1)).astype(np.float32)


def has_own_dtype(path: tuple[Any, ...], array: Any) -> bool:
  """Return True for parameters that do not have the dtype of their model.

  These are int8 matrices, their float32 scales, and token ids.

  Args:
    path: path of the parameter in the tree of parameters, as in `jax.tree_util`.
    array: the parameter, or any object with its dtype.
  """
  return np.issubdtype(array.dtype, np.integer) or path[-1].key == "kernel_scale"
