"""Calls timed in turn, so that a machine that others use is as slow for each of them."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def timed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
  """Seconds that a call takes until its arrays are there, and its result."""
  since = time.perf_counter()
  result = jax.block_until_ready(call(*args, **kwargs))
  return time.perf_counter() - since, result


def interleaved_seconds(
  calls: Sequence[Callable[[], tuple[float, Any]]], repeats: int
) -> tuple[np.ndarray, list[Any]]:
  """Seconds [R, N] of N `timed` calls over `repeats` rounds of all in turn, and the last results.

  The first, uncounted round compiles and warms up. Every other round runs backwards, so that no
  call always follows the same neighbour.
  """
  results = [call()[1] for call in calls]
  seconds = np.zeros((repeats, len(calls)))
  for r in range(repeats):
    for i in range(len(calls)) if r % 2 else reversed(range(len(calls))):
      seconds[r, i], results[i] = calls[i]()
  return seconds, results


def ratio_range(ratio: float, of_repeats: np.ndarray) -> tuple[float, float] | tuple[None, None]:
  """Lowest and highest of a ratio over all repeats and over each alone [R]; None for one repeat.

  The first takes the median of each text, so that it may lie outside what single repeats give.
  """
  if len(of_repeats) < 2:
    return None, None
  each = [ratio, *of_repeats.tolist()]
  return min(each), max(each)


def interleaved_medians(
  calls: Sequence[Callable[[], Any]], repeats: int
) -> tuple[list[float], list[Any]]:
  """Median seconds of each call, and last results; see `interleaved_seconds`."""
  seconds, results = interleaved_seconds([functools.partial(timed, c) for c in calls], repeats)
  return list(np.median(seconds, axis=0)), results
