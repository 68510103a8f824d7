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
  if not np.isfinite(largest).all():
    raise ValueError("int8 cannot represent NaN or infinity, and it has them")
  return np.where(largest > 0, largest / np.float32(MAX_INT8), np.float32(1)).astype(np.float32)


def param_dtype(path: tuple[Any, ...], array: Any, config: Any) -> Any:
  """Return the dtype of a parameter in memory.

  It is `config.dtype`, except for int8 matrices, their float32 scales and token ids. Token
  embeddings have the dtype of activations: XLA for CPUs cannot look up rows of a bfloat16 table,
  and would convert the whole table to float32 for each text.
  """
  if np.issubdtype(array.dtype, np.integer) or path[-1].key == "kernel_scale":
    return array.dtype
  return config.activations if path[-1].key == "embedding" else config.dtype
