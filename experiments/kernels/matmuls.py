"""Time matmuls with few rows on this CPU, with this project's kernel and with XLA:

python -m experiments.kernels.matmuls > experiments/kernels/results.jsonl

Many matrices of shape [512, 3072] are used in turn, so that each matrix is read from memory. One
matrix of shape [512, 512] is used repeatedly and stays in the cache, so only arithmetic takes time.
In both cases, the operations per second of the kernel are compared with the peak. The peak is the
throughput of numpy's matmul of two [2048, 2048] matrices, with numpy's default number of threads.
"""

import functools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.measure.costs import interleaved_medians, timed
from specdec_jax.measure.machine import provenance
from specdec_jax.measure.tables import Table, number_text
from specdec_jax.models.kernels import skinny

MATMULS_LEGEND = {
  "of one row": "time / time of one row",
  "of peak": "operations per second / those of numpy's matmul of two [2048, 2048] matrices",
  "hot": "the same share for a [512, 512] matrix in the cache",
  "XLA, us": "time of XLA's matmul with float32 weights",
}

ROWS = 1, 2, 4, 6, 8, 12, 24, 64
DEPTH, WIDTH, HOT_WIDTH = 512, 3072, 512
BYTES = 200 << 20  # total size of the matrices that are used in turn; larger than a CPU's cache
HOT_CALLS, REPEATS = 64, 15


def chained(matmul: Callable[[Array, Array], Array]) -> Callable[..., Array]:
  """Return a function that computes the product of x and each of its other arguments in sequence.

  As in a model, each input depends on the previous result, so the matmuls cannot run in parallel.
  """

  @jax.jit
  def run(x, *matrices):
    out = jnp.zeros((), x.dtype)
    for matrix in matrices:
      out = matmul(x + 1e-30 * out, matrix)[0, 0].astype(x.dtype)
    return out

  return run


def repeated(x: Array, panels: Array) -> Array:
  """Compute the same product `HOT_CALLS` times, where each input depends on the previous result."""

  def body(_, out):
    return skinny.matmul(x + 1e-30 * out, panels)[0, 0].astype(x.dtype)

  return jax.lax.fori_loop(0, HOT_CALLS, body, jnp.zeros((), x.dtype))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
  return rng.standard_normal(shape).astype(np.float32)


def matmuls_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Return a table of times of matmuls with few rows."""
  first = rows[0]
  one_row_us = {row["weights"]: row["us"] for row in rows if row["rows"] == 1}
  cells = tuple(
    (
      row["weights"],
      f"{row['rows']}",
      f"{row['us']:.0f}",
      f"{row['us'] / one_row_us[row['weights']]:.2f}",
      f"{row['gb_per_s']:.0f}",
      f"{row['share_of_peak']:.0%}",
      f"{row['hot_share_of_peak']:.0%}",
      number_text(row["xla_us"], ".0f"),
    )
    for row in rows
  )
  return Table(
    "Matmuls with a [512, 3072] matrix in memory",
    ("weights", "rows", "us", "of one row", "GB/s", "of peak", "hot", "XLA, us"),
    cells,
    (
      f"Medians, {first['processor']}, {first['threads']} threads, commit {first['commit']} of "
      f"{str(first['date'])[:10]}. The peak is {first['peak_gflops']:.0f} billion operations per "
      "second.",
    ),
    MATMULS_LEGEND,
  )


def main() -> None:
  if not skinny.is_available():
    raise SystemExit(
      "error: the kernel does not run here; it needs a single CPU device and a C++ compiler."
    )
  rng = np.random.default_rng(0)
  square = normal(rng, 2048, 2048)
  peak_seconds = statistics.median(timed(square.dot, square)[0] for _ in range(REPEATS))
  peak = 2 * len(square) ** 3 / peak_seconds
  # Name -> (dtype of the weights, whether x is bfloat16 too and weights are packed in pairs).
  kinds = {"float32": ("float32", False), "bfloat16": ("bfloat16", False)}
  if skinny.is_available(jnp.bfloat16):
    kinds["bfloat16, x too"] = "bfloat16", True
  for name, (dtype, pairs) in kinds.items():
    itemsize = jnp.dtype(dtype).itemsize
    count = BYTES // (DEPTH * WIDTH * itemsize)
    matrices = [normal(rng, DEPTH, WIDTH) for _ in range(count)]
    packed = [jnp.asarray(skinny.pack(matrix, pairs), dtype) for matrix in matrices]
    plain = [jnp.asarray(matrix) for matrix in matrices] if dtype == "float32" else []
    hot = jnp.asarray(skinny.pack(normal(rng, DEPTH, HOT_WIDTH), pairs), dtype)
    with_kernel, with_xla = chained(skinny.matmul), chained(jnp.matmul)
    with_hot_matrix = jax.jit(repeated)
    for rows in ROWS:
      x = jnp.asarray(normal(rng, rows, DEPTH))
      calls = [
        functools.partial(with_kernel, x, *packed),
        functools.partial(with_hot_matrix, x, hot),
        functools.partial(with_xla, x, *plain),
      ]
      medians, _ = interleaved_medians(calls if plain else calls[:2], REPEATS)
      seconds = np.array(medians) / np.array([count, HOT_CALLS, count])[: len(medians)]
      record = dict(
        weights=name,
        rows=rows,
        us=1e6 * seconds[0],
        gb_per_s=DEPTH * WIDTH * itemsize / seconds[0] / 1e9,
        share_of_peak=2 * rows * DEPTH * WIDTH / seconds[0] / peak,
        hot_share_of_peak=2 * rows * DEPTH * HOT_WIDTH / seconds[1] / peak,
        xla_us=1e6 * seconds[2] if plain else None,
        peak_gflops=peak / 1e9,
        **provenance(),
      )
      print(json.dumps(record), flush=True)


if __name__ == "__main__":
  main()
