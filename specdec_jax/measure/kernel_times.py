"""Predict the time of a program on a GPU from what its kernels do.

A GPU runs a program as a sequence of kernels. The time is linear in four quantities, so that those
of parts add up, and constants can be fitted by least squares (experiments/gpu/fit.py).
"""

from typing import NamedTuple


class KernelWork(NamedTuple):
  """Work of the kernels of a program.

  Attributes:
    num_bytes: bytes that they read and write.
    transposed: of these, bytes of matmuls with a large matrix that is stored transposed.
    kernels: number of kernels.
    queries: sum over the kernels that compute a whole attention by reductions of their queries, of
      all heads of a row of the batch.
  """

  num_bytes: float
  transposed: float = 0.0
  kernels: float = 0.0
  queries: float = 0.0


class KernelTimes(NamedTuple):
  """Constants of a device; by default, only bytes take time.

  Attributes:
    share: share of the bandwidth that kernels reach.
    transposed: additional time per byte of a matmul with a large transposed matrix, relative to
      that of other bytes.
    fixed_us: microseconds that each kernel adds to those of its bytes.
    query_us: microseconds that each query adds to a kernel of a whole attention.
  """

  share: float = 1.0
  transposed: float = 0.0
  fixed_us: float = 0.0
  query_us: float = 0.0

  def us(self, work: KernelWork, gb_per_s: float) -> float:
    """Return the predicted microseconds on a device of this bandwidth."""
    num_bytes = work.num_bytes + self.transposed * work.transposed
    fixed = self.fixed_us * work.kernels + self.query_us * work.queries
    return num_bytes / self.share / gb_per_s / 1e3 + fixed


# Fitted to measured rows of T5-XXL on an H100, with `experiments.gpu.fit`.
GPU_TIMES = KernelTimes(0.956, 0.134, 1.476, 0.0128)
