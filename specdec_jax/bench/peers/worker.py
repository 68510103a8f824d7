"""Subprocesses that run and time the backends whose `process` is not None.

Each backend then has all cores to itself, and is idle while a different backend decodes.
"""

import concurrent.futures
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.bench.peers.comparison import Backend, Comparison, Generate
from specdec_jax.core.types import DecodeResult, Rounds
from specdec_jax.data.vocabulary import padded
from specdec_jax.measurement.timing import timed
from specdec_jax.models.t5 import PAD_ID

_GENERATE: dict[str, Generate] = {}  # backends that are loaded in this subprocess, by name


def decode_result(
  tokens: Sequence[int], num_target_calls: int, max_new_tokens: int
) -> DecodeResult:
  """Return the result of a backend that reports its target calls but not its rounds.

  Args:
    tokens: tokens of one output, including EOS.
    num_target_calls: number of target forward passes.
    max_new_tokens: length to which the tokens are padded.
  """
  array: Callable[..., Any] = np.asarray  # fields are typed as jax arrays; host arrays work as well
  no_rounds = array(np.zeros((0, 1), np.int32))
  return DecodeResult(
    tokens=array(padded([tokens], max_new_tokens)),
    lengths=array([len(tokens)]),
    rounds=Rounds(array(np.zeros((0, 1, 0), np.int32)), no_rounds, no_rounds, no_rounds),
    num_rounds=array(num_target_calls),
    not_finite=array([-1]),
  )


def start_process() -> concurrent.futures.Executor:
  """Return an executor with one new process, which is spawned so that it inherits no threads."""
  spawn = multiprocessing.get_context("spawn")
  return concurrent.futures.ProcessPoolExecutor(1, spawn, initializer=_exit_with_parent)


def _exit_with_parent() -> None:
  """Exit this process when its parent ends, even if the parent is killed."""
  parent = multiprocessing.parent_process()

  def watch(parent):
    parent.join()
    os._exit(1)

  threading.Thread(target=watch, args=[parent], daemon=True).start()


def in_subprocess(
  executor: concurrent.futures.Executor, backend: Backend, comparison: Comparison
) -> Callable[..., tuple[float, DecodeResult]]:
  """Load a backend in a subprocess and return a function that decodes there.

  The returned function takes the arguments of a `Decode`. It returns the seconds, which
  `after_idle` measures in the subprocess, and the result.
  """
  executor.submit(_load_here, backend, comparison._replace(pairs=())).result()

  def decode(prompt, rng, *, max_new_tokens, sampling):
    source = [token for token in np.asarray(prompt)[0].tolist() if token != PAD_ID]
    seed = int(jax.random.key_data(rng)[0, -1])
    args = backend.name, source, seed, max_new_tokens, sampling.temperature
    seconds, (tokens, num_target_calls) = executor.submit(_generate_here, *args).result()
    return seconds, decode_result(tokens, num_target_calls, max_new_tokens)

  return decode


def _load_here(backend: Backend, comparison: Comparison) -> None:
  load: Callable[[Comparison], Any] = backend.load
  _GENERATE[backend.name] = load(comparison)


def _generate_here(name: str, *args) -> tuple[float, tuple[list[int], int]]:
  return after_idle(_GENERATE[name], *args)


def after_idle(call: Callable, *args, **kwargs) -> tuple[float, Any]:
  """Time a call with `timing.timed`, wait with `_wait_until_idle`, and return time and result."""
  timed_call = timed(call, *args, **kwargs)
  _wait_until_idle()
  return timed_call


def _wait_until_idle(timeout: float = 1.0) -> None:
  """Wait until no thread of this process uses the CPU, but at most `timeout` seconds.

  OpenMP's threads spin for a while after a parallel region, waiting for more work.
  """
  deadline = time.perf_counter() + timeout
  busy = True
  while busy and time.perf_counter() < deadline:
    cpu_seconds = time.process_time()
    time.sleep(0.002)
    busy = time.process_time() - cpu_seconds > 0.0005
