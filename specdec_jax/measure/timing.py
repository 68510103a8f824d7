"""Interleaved timing of calls, so that load from other programs affects all of them equally."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def timed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
  """Return the seconds that a call takes until its result is ready, and the result."""
  since = time.perf_counter()
  result = jax.block_until_ready(call(*args, **kwargs))
  return time.perf_counter() - since, result


def interleaved_seconds(
  calls: Sequence[Callable[[], tuple[float, Any]]], repeats: int
) -> tuple[np.ndarray, list[Any]]:
  """Time several calls in turn, `repeats` times.

  Before the first repeat, each call runs once untimed, to compile and to warm up. Every second
  repeat runs in reverse order, so that no call always follows the same one.

  Args:
    calls: functions that return their seconds and their result, as `timed` does.
    repeats: number of timed repeats.

  Returns:
    Seconds [repeats, calls], and the last result of each call.
  """
  results = [call()[1] for call in calls]
  seconds = np.zeros((repeats, len(calls)))
  for r in range(repeats):
    for i in range(len(calls)) if r % 2 else reversed(range(len(calls))):
      seconds[r, i], results[i] = calls[i]()
  return seconds, results


def ratio_range(ratio: float, repeat_ratios: np.ndarray) -> tuple[float, float] | tuple[None, None]:
  """Return the range that covers a ratio and its values in single repeats.

  Args:
    ratio: ratio of times that are medians over the repeats; it may lie outside the range of the
      single repeats.
    repeat_ratios: [repeats], ratio in each repeat.

  Returns:
    The range, or (None, None) if there is only one repeat.
  """
  if len(repeat_ratios) < 2:
    return None, None
  ratios = [ratio, *repeat_ratios.tolist()]
  return min(ratios), max(ratios)


def interleaved_medians(
  calls: Sequence[Callable[[], Any]], repeats: int
) -> tuple[list[float], list[Any]]:
  """Return the median seconds of each call and its last result; see `interleaved_seconds`."""
  seconds, results = interleaved_seconds([functools.partial(timed, c) for c in calls], repeats)
  return list(np.median(seconds, axis=0)), results
