"""Names of drafts, verifiers and draft heads. An entry is imported when it is used."""

import importlib
from typing import Any

# Kind of a learned draft head: its class.
HEADS = {
  "heads": "specdec_jax.drafts.heads.medusa:MedusaHead",
  "eagle": "specdec_jax.drafts.heads.eagle:EagleHead",
  "parallel": "specdec_jax.drafts.heads.parallel:ParallelHead",
  "pass": "specdec_jax.contrib.pass_embeddings:PassHead",
  "early_exit": "specdec_jax.contrib.early_exit:EarlyExitHead",
  "shared_encoder": "specdec_jax.drafts.heads.shared_encoder:SharedEncoderHead",
  "conditioned": "specdec_jax.drafts.heads.shared_encoder:SharedEncoderHead",
  "features": "specdec_jax.drafts.heads.shared_encoder:SharedEncoderHead",
  "eagle_text": "specdec_jax.drafts.heads.shared_encoder:SharedEncoderHead",
  "drafter": "specdec_jax.contrib.drafter:DrafterHead",
}


def imported(entry: str) -> Any:
  """Return the object `module:name`."""
  module, _, name = entry.partition(":")
  return getattr(importlib.import_module(module), name)
