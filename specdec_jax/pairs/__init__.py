"""Pairs of a target and a draft that share a vocabulary, loaded and ready to decode."""

from specdec_jax.core.loading import DraftFactory
from specdec_jax.drafts.composed import (
  cascade_draft,
  draft_sampling,
  forest_draft,
  hierarchical_draft,
  recycling_draft,
  stop_at_miss_draft,
  stopping_draft,
  tree_draft,
)
from specdec_jax.pairs.load import (
  ASSETS,
  EMBEDDED,
  GenerationWarning,
  asset,
  checkpoint_draft,
  frequent_tokens,
  is_bundled,
  load_pair,
  vocabulary_of,
)
from specdec_jax.pairs.pair import LoadedPair, verifier_from, verifier_name
from specdec_jax.pairs.random_weights import random_draft, random_pair
from specdec_jax.pairs.speculators import random_speculator, speculator

__all__ = [
  "ASSETS",
  "EMBEDDED",
  "DraftFactory",
  "GenerationWarning",
  "LoadedPair",
  "asset",
  "cascade_draft",
  "hierarchical_draft",
  "is_bundled",
  "verifier_from",
  "stop_at_miss_draft",
  "load_pair",
  "forest_draft",
  "frequent_tokens",
  "checkpoint_draft",
  "draft_sampling",
  "random_draft",
  "random_pair",
  "random_speculator",
  "recycling_draft",
  "verifier_name",
  "speculator",
  "stopping_draft",
  "tree_draft",
  "vocabulary_of",
]
