"""Exact speculative decoding in JAX.

```python
import specdec_jax

pair = specdec_jax.load_pair()
print(pair.generate(["A man runs."], gamma=5)[0])
```

Every public name is an attribute of this module. A name is imported when it is first used, so
`import specdec_jax` is fast. The import may add a flag to XLA_FLAGS (`xla_flags.disable_ynn`), so
it should come before JAX is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from specdec_jax.version import __version__
from specdec_jax.xla_flags import disable_ynn

if TYPE_CHECKING:
  from specdec_jax.adaptive import AdaptiveDecoder
  from specdec_jax.api import Pair, load_pair, random_pair
  from specdec_jax.beam_search import (
    BeamDraft,
    BeamResult,
    BeamSearcher,
    NullBeamDraft,
    TreeBeamDraft,
  )
  from specdec_jax.core.decode import Decoder, DecodeState, NullDraft
  from specdec_jax.core.processors import LogitsProcessor, Prefixes
  from specdec_jax.core.sampling import Sampling
  from specdec_jax.core.trees import DynamicTree, Tree, branching, chain
  from specdec_jax.core.types import (
    Context,
    DecodeResult,
    Draft,
    Model,
    Outcome,
    Params,
    Proposal,
    Rounds,
    Verification,
    Verifier,
  )
  from specdec_jax.core.verify.blocks import BlockVerifier
  from specdec_jax.core.verify.tokens import TokenVerifier
  from specdec_jax.drafts.backoff import BackoffDraft, backoff_ngrams
  from specdec_jax.drafts.cascade import CascadeDraft
  from specdec_jax.drafts.dynamic import DynamicDraft
  from specdec_jax.drafts.fallback import FallbackDraft, prompt_lookup_or_ngrams
  from specdec_jax.drafts.forest import ForestDraft
  from specdec_jax.drafts.heads.pass_embeddings import PaSSDraft
  from specdec_jax.drafts.heads.stateless import SpeculatorDraft
  from specdec_jax.drafts.hierarchical import HierarchicalDraft
  from specdec_jax.drafts.layer_skip import LayerSkipDraft, layer_skip
  from specdec_jax.drafts.lookahead import LookaheadDraft, lookahead
  from specdec_jax.drafts.model import ModelDraft
  from specdec_jax.drafts.ngram import NgramDraft, bigram, unigram
  from specdec_jax.drafts.prompt_lookup import PromptLookupDraft, prompt_lookup
  from specdec_jax.drafts.recycling import RecyclingDraft
  from specdec_jax.drafts.retrieval import RetrievalDraft, retrieval
  from specdec_jax.drafts.stop_at_miss import StopAtMissDraft
  from specdec_jax.drafts.stopping import StoppingDraft
  from specdec_jax.drafts.uniform import UniformDraft, uniform
  from specdec_jax.errors import InputError
  from specdec_jax.execution import speculative_execution
  from specdec_jax.extended_theory import best_tree
  from specdec_jax.generation import GenerationConfig
  from specdec_jax.loading import DecodeSettings, DraftFactory, LoadedTarget
  from specdec_jax.logits_processors import (
    ForcedTokens,
    FunctionProcessor,
    MinLength,
    NoRepeatNgram,
    RepetitionPenalty,
    SequenceBias,
  )
  from specdec_jax.models.config import GPTConfig, T5Config
  from specdec_jax.models.gpt import GPTModel
  from specdec_jax.models.sizes import gpt_config, t5_config
  from specdec_jax.models.t5 import T5Model
  from specdec_jax.outputs import Output
  from specdec_jax.pairs.composed import (
    cascade_draft,
    draft_sampling,
    forest_draft,
    hierarchical_draft,
    recycling_draft,
    stop_at_miss_draft,
    stopping_draft,
    tree_draft,
  )
  from specdec_jax.pairs.speculators import speculator
  from specdec_jax.partitioning import make_mesh, param_shardings, sharded
  from specdec_jax.theory import (
    best_gamma,
    expected_tokens,
    operations_factor,
    walltime_improvement,
  )
  from specdec_jax.tries import TrieConstraint
  from specdec_jax.verifiers.gumbel import GumbelVerifier
  from specdec_jax.verifiers.k_seq import KSeqVerifier
  from specdec_jax.verifiers.lossy import TopBetaVerifier, TypicalVerifier
  from specdec_jax.verifiers.merging import MergingVerifier
  from specdec_jax.wrappers import WrappedDraft, WrappedModel

# The module of `specdec_jax` that defines each public name. docs/api documents exactly these names.
_DEFINED_IN = {
  "AdaptiveDecoder": "adaptive",
  "BackoffDraft": "drafts.backoff",
  "BeamDraft": "beam_search",
  "BeamResult": "beam_search",
  "BeamSearcher": "beam_search",
  "BlockVerifier": "core.verify.blocks",
  "CascadeDraft": "drafts.cascade",
  "Context": "core.types",
  "DecodeResult": "core.types",
  "DecodeSettings": "loading",
  "DecodeState": "core.decode",
  "Decoder": "core.decode",
  "Draft": "core.types",
  "DraftFactory": "loading",
  "DynamicDraft": "drafts.dynamic",
  "DynamicTree": "core.trees",
  "FallbackDraft": "drafts.fallback",
  "ForcedTokens": "logits_processors",
  "ForestDraft": "drafts.forest",
  "FunctionProcessor": "logits_processors",
  "GPTConfig": "models.config",
  "GPTModel": "models.gpt",
  "GenerationConfig": "generation",
  "GumbelVerifier": "verifiers.gumbel",
  "HierarchicalDraft": "drafts.hierarchical",
  "InputError": "errors",
  "KSeqVerifier": "verifiers.k_seq",
  "LayerSkipDraft": "drafts.layer_skip",
  "LoadedTarget": "loading",
  "LogitsProcessor": "core.processors",
  "LookaheadDraft": "drafts.lookahead",
  "MergingVerifier": "verifiers.merging",
  "MinLength": "logits_processors",
  "Model": "core.types",
  "ModelDraft": "drafts.model",
  "NgramDraft": "drafts.ngram",
  "NoRepeatNgram": "logits_processors",
  "NullBeamDraft": "beam_search",
  "NullDraft": "core.decode",
  "Outcome": "core.types",
  "Output": "outputs",
  "PaSSDraft": "drafts.heads.pass_embeddings",
  "Pair": "api",
  "Params": "core.types",
  "Prefixes": "core.processors",
  "PromptLookupDraft": "drafts.prompt_lookup",
  "Proposal": "core.types",
  "RecyclingDraft": "drafts.recycling",
  "RepetitionPenalty": "logits_processors",
  "RetrievalDraft": "drafts.retrieval",
  "Rounds": "core.types",
  "Sampling": "core.sampling",
  "SequenceBias": "logits_processors",
  "SpeculatorDraft": "drafts.heads.stateless",
  "StopAtMissDraft": "drafts.stop_at_miss",
  "StoppingDraft": "drafts.stopping",
  "T5Config": "models.config",
  "T5Model": "models.t5",
  "TokenVerifier": "core.verify.tokens",
  "TopBetaVerifier": "verifiers.lossy",
  "Tree": "core.trees",
  "TreeBeamDraft": "beam_search",
  "TrieConstraint": "tries",
  "TypicalVerifier": "verifiers.lossy",
  "UniformDraft": "drafts.uniform",
  "Verification": "core.types",
  "Verifier": "core.types",
  "WrappedDraft": "wrappers",
  "WrappedModel": "wrappers",
  "backoff_ngrams": "drafts.backoff",
  "best_gamma": "theory",
  "best_tree": "extended_theory",
  "bigram": "drafts.ngram",
  "branching": "core.trees",
  "cascade_draft": "pairs.composed",
  "chain": "core.trees",
  "draft_sampling": "pairs.composed",
  "expected_tokens": "theory",
  "forest_draft": "pairs.composed",
  "gpt_config": "models.sizes",
  "hierarchical_draft": "pairs.composed",
  "layer_skip": "drafts.layer_skip",
  "load_pair": "api",
  "lookahead": "drafts.lookahead",
  "make_mesh": "partitioning",
  "operations_factor": "theory",
  "param_shardings": "partitioning",
  "prompt_lookup": "drafts.prompt_lookup",
  "prompt_lookup_or_ngrams": "drafts.fallback",
  "random_pair": "api",
  "recycling_draft": "pairs.composed",
  "retrieval": "drafts.retrieval",
  "sharded": "partitioning",
  "speculative_execution": "execution",
  "speculator": "pairs.speculators",
  "stop_at_miss_draft": "pairs.composed",
  "stopping_draft": "pairs.composed",
  "t5_config": "models.sizes",
  "tree_draft": "pairs.composed",
  "uniform": "drafts.uniform",
  "unigram": "drafts.ngram",
  "walltime_improvement": "theory",
}

__all__ = ["__version__", *_DEFINED_IN]

disable_ynn()


def __getattr__(name: str) -> Any:
  if name not in _DEFINED_IN:
    raise AttributeError(f"module 'specdec_jax' has no attribute {name!r}")
  return getattr(importlib.import_module(f"specdec_jax.{_DEFINED_IN[name]}"), name)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
