"""Speculative decoding as a t5x model, and t5x's own decoding as a baseline.

t5x's `infer.py` runs the model. `gin/t5x/` holds the bindings, and `docs/t5x.md` explains the
commands. No other package of this project imports t5x itself.
"""

from specdec_jax.t5x.baseline import t5x_baseline, t5x_decode
from specdec_jax.t5x.checkpointer import PairCheckpointer
from specdec_jax.t5x.model import Decoding, SpeculativeModel, count_rounds
from specdec_jax.t5x.networks import extra_ids, same_config, t5x_network

__all__ = [
  "Decoding",
  "PairCheckpointer",
  "SpeculativeModel",
  "count_rounds",
  "extra_ids",
  "same_config",
  "t5x_baseline",
  "t5x_decode",
  "t5x_network",
]
