"""Calls timed in turn, so that a machine that others use is as slow for each of them."""

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np


def interleaved_medians(
  calls: Sequence[Callable[[], object]], repeats: int
) -> tuple[list[float], list[object]]:
  """Median seconds of each call over `repeats` rounds of all of them in turn, and last results.

  The first, uncounted round compiles and warms up.
  """
  results = [jax.block_until_ready(call()) for call in calls]
  seconds = np.zeros((repeats, len(calls)))
  for r in range(repeats):
    # Every other round runs backwards, so that no call always follows the same neighbour.
    for i in range(len(calls)) if r % 2 else reversed(range(len(calls))):
      since = time.perf_counter()
      results[i] = jax.block_until_ready(calls[i]())
      seconds[r, i] = time.perf_counter() - since
  return list(np.median(seconds, axis=0)), results
