"""Beam search, plain and speculative: w likeliest texts instead of one (the paper's A.4)."""

from specdec_jax.beam_search.drafts import BeamDraft, ModelBeamDraft, NullBeamDraft, TreeBeamDraft
from specdec_jax.beam_search.search import Found, beam_search, best, speculative_beam_search

__all__ = [
  "BeamDraft",
  "Found",
  "ModelBeamDraft",
  "NullBeamDraft",
  "TreeBeamDraft",
  "beam_search",
  "best",
  "speculative_beam_search",
]
