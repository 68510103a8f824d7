"""A target, a draft and the vocabulary they share, loaded and ready to decode."""

from specdec_jax.pairs.composed import (
  cascaded_drafts,
  hierarchical_draft,
  known_draft,
  merged_drafts,
  own_sampling,
  stopping_draft,
  tree_draft,
)
from specdec_jax.pairs.load import (
  ASSETS,
  EMBEDDED,
  asset,
  is_bundled,
  load_pair,
  model_drafter,
  vocabulary_of,
)
from specdec_jax.pairs.pair import Pair, judge, rule_name
from specdec_jax.pairs.random_weights import random_drafter, random_pair
from specdec_jax.pairs.speculators import random_speculator, speculator
from specdec_jax.protocols import Drafter

__all__ = [
  "ASSETS",
  "EMBEDDED",
  "Drafter",
  "Pair",
  "asset",
  "cascaded_drafts",
  "hierarchical_draft",
  "is_bundled",
  "judge",
  "known_draft",
  "load_pair",
  "merged_drafts",
  "model_drafter",
  "own_sampling",
  "random_drafter",
  "random_pair",
  "random_speculator",
  "rule_name",
  "speculator",
  "stopping_draft",
  "tree_draft",
  "vocabulary_of",
]
