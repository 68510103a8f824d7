"""Decoding by other libraries, timed in processes of their own.

Each then has the cores as if it were alone, and is idle while another decodes.
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

from specdec_jax.core.types import DecodeResult, Rounds
from specdec_jax.data.vocabulary import padded
from specdec_jax.measurement.timing import timed
from specdec_jax.models.t5 import PAD_ID
from specdec_jax.peers.contest import Competitor, Contest, Generate

_GENERATE: dict[str, Generate] = {}  # in a process of its own: what it has loaded, by name


def decoded(tokens: Sequence[int], num_passes: int, max_new_tokens: int) -> DecodeResult:
  """A text by its tokens, EOS among them, and passes of the target; rounds are not told apart."""
  array: Callable[..., Any] = np.asarray  # on the host is as good
  none = array(np.zeros((0, 1), np.int32))
  return DecodeResult(
    tokens=array(padded([tokens], max_new_tokens)),
    lengths=array([len(tokens)]),
    rounds=Rounds(array(np.zeros((0, 1, 0), np.int32)), none, none, none),
    num_rounds=array(num_passes),
    not_finite=array([-1]),
  )


def process() -> concurrent.futures.Executor:
  """A process of its own, new: it has none of this one's threads."""
  spawn = multiprocessing.get_context("spawn")
  return concurrent.futures.ProcessPoolExecutor(1, spawn, initializer=_end_with_parent)


def _end_with_parent() -> None:
  """End this process when the one that began it does, though it be killed."""
  parent = multiprocessing.parent_process()

  def watch(parent):
    parent.join()
    os._exit(1)

  threading.Thread(target=watch, args=[parent], daemon=True).start()


def elsewhere(
  worker: concurrent.futures.Executor, competitor: Competitor, contest: Contest
) -> Callable[..., tuple[float, DecodeResult]]:
  """A competitor's decoding in a process of its own, timed there: `rested` of a `Decode`."""
  worker.submit(_load_here, competitor, contest._replace(pairs=())).result()

  def decode(prompt, rng, *, max_new_tokens, sampling):
    source = [token for token in np.asarray(prompt)[0].tolist() if token != PAD_ID]
    key = int(jax.random.key_data(rng)[0, -1])
    how = source, key, max_new_tokens, sampling.temperature
    seconds, (tokens, num_passes) = worker.submit(_generate_here, competitor.name, *how).result()
    return seconds, decoded(tokens, num_passes, max_new_tokens)

  return decode


def _load_here(competitor: Competitor, contest: Contest) -> None:
  load: Callable[[Contest], Any] = competitor.load
  _GENERATE[competitor.name] = load(contest)


def _generate_here(name: str, *args) -> tuple[float, tuple[list[int], int]]:
  return rested(_GENERATE[name], *args)


def rested(call: Callable, *args, **kwargs) -> tuple[float, Any]:
  """`timing.timed`; ends when no thread of this process runs."""
  result = timed(call, *args, **kwargs)
  _rest()
  return result


def _rest(longest: float = 1.0) -> None:
  """Wait until no thread of this process runs: those of OpenMP look out for work for a while."""
  until = time.perf_counter() + longest
  busy = True
  while busy and time.perf_counter() < until:
    since = time.process_time()
    time.sleep(0.002)
    busy = time.process_time() - since > 0.0005
