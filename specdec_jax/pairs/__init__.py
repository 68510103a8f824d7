"""A target, a draft and the vocabulary they share, loaded and ready to decode."""

from specdec_jax.pairs.load import (
  ASSETS,
  EMBEDDED,
  asset,
  checkpoint_name,
  hierarchical_draft,
  load_pair,
)
from specdec_jax.pairs.pair import Pair, judge, rule_name
from specdec_jax.pairs.random_weights import random_pair
from specdec_jax.protocols import Drafter

__all__ = [
  "ASSETS",
  "EMBEDDED",
  "Drafter",
  "Pair",
  "asset",
  "checkpoint_name",
  "hierarchical_draft",
  "judge",
  "load_pair",
  "random_pair",
  "rule_name",
]
