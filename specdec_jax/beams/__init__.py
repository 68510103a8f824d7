"""Beam search, plain and speculative: w likeliest texts instead of one (the paper's A.4)."""

from specdec_jax.beams.drafts import BeamDraft, ModelBeams, NoBeams, TreeBeams
from specdec_jax.beams.search import Found, beam_search, best, speculative_beam_search

__all__ = [
  "BeamDraft",
  "Found",
  "ModelBeams",
  "NoBeams",
  "TreeBeams",
  "beam_search",
  "best",
  "speculative_beam_search",
]
