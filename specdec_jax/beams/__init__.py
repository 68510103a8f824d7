"""Plain and speculative beam search, which approximates the w most probable texts (Appendix A.4).

Axis letters in addition to those of `core.types`:

  w  beams of the search, as in Appendix A.4     u  beams of the draft
  F  nodes of a forest: the w last tokens        M  nodes of a verify block, which one target
     of the live beams, then N draft tokens         forward pass covers
  X  slots of a text (T: slots of a cache)       Q  verified nodes cached before a pass
  J  verified nodes after a pass: Q + M
"""

from specdec_jax.beams.drafts import (
  BeamDraft,
  ModelBeamDraft,
  NullBeamDraft,
  TreeBeamDraft,
  beam_draft,
)
from specdec_jax.beams.search import BeamResult, BeamSearcher
from specdec_jax.beams.step import Scorer

__all__ = [
  "BeamDraft",
  "BeamResult",
  "BeamSearcher",
  "ModelBeamDraft",
  "NullBeamDraft",
  "Scorer",
  "TreeBeamDraft",
  "beam_draft",
]
