"""t5x's own T5 and `temperature_sample` or `beam_search`, one compiled program as ours is."""

import functools
import importlib.util

from specdec_jax.peers.contest import Competitor, Contest, Decode

if importlib.util.find_spec("t5x"):
  # Now, not when it is used: t5x makes itself known to gin, which takes nothing more then.
  from specdec_jax.t5x_model import t5x_baseline


def temperature_sample() -> Competitor:
  """One token a pass of the target."""

  def load(contest: Contest) -> Decode:
    return t5x_baseline(contest.pair, contest.target).decode

  return Competitor("t5x", ("t5x",), load)


def beam_search() -> Competitor:
  """`decoding.beam_search`, where there are beams."""

  def load(contest: Contest) -> Decode:
    decode = t5x_baseline(contest.pair, contest.target).decode
    return functools.partial(decode, beams=contest.beams)

  return Competitor("t5x", ("t5x",), load, searches="only")
