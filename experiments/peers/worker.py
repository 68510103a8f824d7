"""Subprocesses that run and time the backends whose `process` is not None.

Each backend then has all cores to itself, and is idle while a different backend decodes. The
subprocess may run the Python of another virtual environment, for backends whose packages cannot be
installed together.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.peers.comparison import Backend, Comparison, Generate
from specdec_jax.core.types import DecodeResult, Rounds
from specdec_jax.data.vocabulary import PAD_ID, padded
from specdec_jax.measure.costs import timed

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


class Process:
  """Subprocess that calls functions, one at a time. It ends when it is closed, or with its parent.

  Args:
    python: Python to run, of a virtual environment that has this package; None for the same one.
  """

  def __init__(self, python: str | None = None):
    self._connection, end = multiprocessing.Pipe()
    paths = sys.path if python is None else [str(pathlib.Path(__file__).parents[3])]
    self._process = subprocess.Popen(
      [python or sys.executable, "-c", f"from {__name__} import serve; serve({end.fileno()})"],
      env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
      pass_fds=[end.fileno()],
      stdin=subprocess.DEVNULL,
    )
    end.close()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self._connection.close()
    self._process.wait()

  def call(self, function: Callable, *args) -> Any:
    """Return `function(*args)`, computed in the subprocess; functions are pickled by name.

    Raises:
      RuntimeError: the function raised an exception; or the process has ended.
    """
    try:
      self._connection.send((function, args))
      result, error = self._connection.recv()
    except (EOFError, BrokenPipeError, ConnectionResetError):
      error = f"it ended with exit code {self._process.wait()}"
    if error:
      raise RuntimeError(f"A subprocess failed: {error}")
    return result


def serve(file_descriptor: int) -> None:
  """Call the functions that a `Process` sends, until its end of the connection is closed."""
  connection = multiprocessing.connection.Connection(file_descriptor)
  with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
    while True:
      function, args = connection.recv()
      try:
        answer = function(*args), None
      except Exception:
        answer = None, traceback.format_exc()
      connection.send(answer)


def in_subprocess(
  process: Process, backend: Backend, comparison: Comparison
) -> Callable[..., tuple[float, DecodeResult]]:
  """Load a backend in a subprocess and return a function that decodes there.

  The returned function takes the arguments of a `Decode`. It returns the seconds, which
  `after_idle` measures in the subprocess, and the result.
  """
  process.call(_load_here, backend, comparison._replace(pairs=()))

  def decode(prompt, rng, *, max_new_tokens, sampling):
    source = [token for token in np.asarray(prompt)[0].tolist() if token != PAD_ID]
    seed = int(jax.random.key_data(rng)[0, -1])
    args = backend.name, source, seed, max_new_tokens, sampling.temperature
    seconds, (tokens, num_target_calls) = process.call(_generate_here, *args)
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
