"""Exact speculative decoding in JAX.

```python
import specdec_jax

pair = specdec_jax.load_pair()
print(pair.generate(["A man runs."], gamma=5)[0])
```

The output is exactly that of the target, up to floating-point rounding: the same tokens with
argmax, except for ties, and the same distribution with sampling (docs/exactness.md).

Names that are not in `__all__` are reached through their modules. The import may add a flag to
XLA_FLAGS (`xla.disable_ynn`), so it should come before JAX is first used.
"""

# ruff: noqa: E402, I001
__version__ = "0.1.0"

from specdec_jax.xla import disable_ynn

disable_ynn()

from specdec_jax.beams import BeamSearcher
from specdec_jax.core.decode import Decoder, NullDraft
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.types import DraftSpec, Loaded, Params
from specdec_jax.core.processors import LogitsProcessor, TrieConstraint
from specdec_jax.core.sampling import Sampling, distribution, sample, sample_logits
from specdec_jax.core.trees import DynamicTree, Tree, branching, chain
from specdec_jax.core.types import (
  DecodeResult,
  Draft,
  Model,
  Outcome,
  Proposal,
  Verification,
  Verifier,
)
from specdec_jax.core.context import Context
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.tokens import TokenVerifier, accepted_path
from specdec_jax.drafts.backoff import backoff_ngrams
from specdec_jax.drafts.composed import tree_draft
from specdec_jax.drafts.layer_skip import layer_skip
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.errors import InputError
from specdec_jax.generate import Output
from specdec_jax.load import load_pair, speculator
from specdec_jax.models.config import GPTConfig, T5Config
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.sizes import gpt_config, t5_config
from specdec_jax.models.t5 import T5Model
from specdec_jax.pair import Pair
from specdec_jax.random_models import random_pair
from specdec_jax.theory import best_gamma, expected_tokens, walltime_improvement

__all__ = [
  "BeamSearcher",
  "BlockVerifier",
  "Context",
  "DecodeResult",
  "DecodeSettings",
  "Decoder",
  "Draft",
  "DraftSpec",
  "DynamicTree",
  "GPTConfig",
  "GPTModel",
  "GenerationConfig",
  "InputError",
  "Loaded",
  "LogitsProcessor",
  "Model",
  "ModelDraft",
  "NullDraft",
  "Outcome",
  "Output",
  "Pair",
  "Params",
  "Proposal",
  "Sampling",
  "T5Config",
  "T5Model",
  "TokenVerifier",
  "Tree",
  "TrieConstraint",
  "Verification",
  "Verifier",
  "accepted_path",
  "backoff_ngrams",
  "best_gamma",
  "branching",
  "chain",
  "distribution",
  "expected_tokens",
  "gpt_config",
  "layer_skip",
  "load_pair",
  "prompt_lookup",
  "random_pair",
  "sample",
  "sample_logits",
  "speculator",
  "t5_config",
  "tree_draft",
  "walltime_improvement",
]
