"""Backends that run t5x's T5 with `temperature_sample` or `beam_search`, as compiled programs."""

import functools
import importlib.util

from experiments.peers.comparison import Backend, Comparison, Decode

if importlib.util.find_spec("t5x"):
  # Imported here and not on use: t5x registers itself with gin, which later locks its registry.
  from specdec_jax.t5x import t5x_baseline


def temperature_sample() -> Backend:
  """Return the t5x backend for autoregressive decoding."""

  def load(comparison: Comparison) -> Decode:
    return t5x_baseline(comparison.pair).decode

  return Backend("t5x", ("t5x",), load)


def beam_search() -> Backend:
  """Return the t5x backend that supports beam search only."""

  def load(comparison: Comparison) -> Decode:
    decode = t5x_baseline(comparison.pair).decode
    return functools.partial(decode, beams=comparison.workload.beams)

  return Backend("t5x", ("t5x",), load, searches="only")
