"""Time of products of few rows with a matrix on this CPU, ours and XLA's, beside what it could do:

python scripts/measure_products.py > experiments/kernels/results.jsonl

Of a matrix [512, 3072], one after the other of so many that each comes from memory, and of one of
[512, 512] again and again, which stays in the cache, where only arithmetic can take time. The peak
is numpy's product of two matrices of [2048, 2048], on as many threads.
"""

import functools
import json
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.kernels import skinny
from specdec_jax.machine import provenance
from specdec_jax.measurement.timing import interleaved_medians, timed

ROWS = 1, 2, 4, 6, 8, 12, 24, 64
DEPTH, WIDTH, HOT_WIDTH = 512, 3072, 512
BYTES = 200 << 20  # of the matrices that are read in turn: more than a processor's cache
HOT_CALLS, REPEATS = 64, 15


def chained(product: Callable[[Array, Array], Array]) -> Callable[..., Array]:
  """All products of x with matrices, each after the one before, as in a model."""

  @jax.jit
  def run(x, *matrices):
    out = jnp.zeros((), x.dtype)
    for matrix in matrices:
      out = product(x + 1e-30 * out, matrix)[0, 0].astype(x.dtype)
    return out

  return run


def again_and_again(x: Array, panels: Array) -> Array:
  first = lambda out: skinny.matmul(x + 1e-30 * out, panels)[0, 0].astype(x.dtype)
  return jax.lax.fori_loop(0, HOT_CALLS, lambda _, out: first(out), jnp.zeros((), x.dtype))


def main() -> None:
  if not skinny.ready():
    raise SystemExit("error: the kernel does not run here: it wants one CPU and a C++ compiler.")
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  square = draw(2048, 2048)
  peak = (
    2 * len(square) ** 3 / statistics.median(timed(square.dot, square)[0] for _ in range(REPEATS))
  )
  kinds = {"float32": ("float32", False), "bfloat16": ("bfloat16", False)}
  if skinny.ready(jnp.bfloat16):
    kinds["bfloat16, x too"] = "bfloat16", True
  for name, (dtype, pairs) in kinds.items():
    count = BYTES // (DEPTH * WIDTH * jnp.dtype(dtype).itemsize)
    kernels = [draw(DEPTH, WIDTH) for _ in range(count)]
    packed = [jnp.asarray(skinny.pack(kernel, pairs), dtype) for kernel in kernels]
    plain = [jnp.asarray(kernel) for kernel in kernels] if dtype == "float32" else []
    hot = jnp.asarray(skinny.pack(draw(DEPTH, HOT_WIDTH), pairs), dtype)
    ours, theirs, repeated = chained(skinny.matmul), chained(jnp.matmul), jax.jit(again_and_again)
    for rows in ROWS:
      x = jnp.asarray(draw(rows, DEPTH))
      calls = [
        functools.partial(ours, x, *packed),
        functools.partial(repeated, x, hot),
        functools.partial(theirs, x, *plain),
      ]
      medians, _ = interleaved_medians(calls if plain else calls[:2], REPEATS)
      per_product = np.array(medians) / np.array([count, HOT_CALLS, count])[: len(medians)]
      record = dict(
        weights=name,
        rows=rows,
        us=1e6 * per_product[0],
        gb_per_s=DEPTH * WIDTH * jnp.dtype(dtype).itemsize / per_product[0] / 1e9,
        share_of_peak=2 * rows * DEPTH * WIDTH / per_product[0] / peak,
        hot_share_of_peak=2 * rows * DEPTH * HOT_WIDTH / per_product[1] / peak,
        xla_us=1e6 * per_product[2] if plain else None,
        peak_gflops=peak / 1e9,
        **provenance(),
      )
      print(json.dumps(record), flush=True)


if __name__ == "__main__":
  main()
