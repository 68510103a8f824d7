"""The target as its own draft: some of its decoder's layers (Section 3.6; Zhang et al., 2024).

What it reads is the target's own cache, of the layers it has; what it wrote there is forgotten
after the round, as the target's pass over the guesses writes it anew.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import Array

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, require_static
from specdec_jax.core.types import (
  Context,
  DraftFactory,
  LoadedTarget,
  Outcome,
  Proposal,
  WrappedDraft,
)
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError, require_types
from specdec_jax.models.families import Config, model_of
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.simulated import unwrapped
from specdec_jax.models.t5 import T5Model


def layer_skip(target: LoadedTarget, layers: Sequence[int]) -> DraftFactory:
  """Load some layers of the target's decoder, with its final norm and logits, as draft.

  Args:
    target: a T5 or a decoder-only model of this project.
    layers: layers of the decoder, from 0, in ascending order.

  Raises:
    InputError: there are no layers, or the target does not have them.
  """
  require_types(layer_skip, locals())
  model = unwrapped(target.model)
  if not isinstance(model, T5Model | GPTModel):
    raise InputError(f"{type(model).__name__} has no decoder layers to draft with.")
  count = model.config.num_decoder_layers
  if not layers or [*layers] != sorted({*layers}.intersection(range(count))):
    raise InputError(
      f"layers is {layers}; the target's decoder has layers 0 to {count - 1}: give some of them, "
      "in ascending order."
    )
  config, params = of_layers(model.config, target.params, layers)

  def build(sampling: Sampling, tree: AnyTree) -> LayerSkipDraft:
    tree = require_static("layer skipping", tree)
    return LayerSkipDraft(ModelDraft(model_of(config), sampling, tree), tuple(layers))

  return DraftFactory(f"layers {','.join(map(str, layers))}", build, params)


def of_layers(config: Config, params: Any, layers: Sequence[int]) -> tuple[Config, Any]:
  """Shape and parameters, the same arrays, of a model that is some of another's decoder layers."""
  kept = {f"layers_{i}": params["decoder"][f"layers_{layer}"] for i, layer in enumerate(layers)}
  rest = {name: x for name, x in params["decoder"].items() if not name.startswith("layers_")}
  fewer = dataclasses.replace(config, num_decoder_layers=len(layers))
  return fewer, {"decoder": rest | kept, "token_embedder": params["token_embedder"]}


@dataclasses.dataclass(frozen=True)
class LayerSkipDraft(WrappedDraft):
  """Guesses drawn from a model that is some of the target's layers, by `Context.target`.

  It keeps nothing, and reads no prompt. Its parameters are arrays of the target's.

  Attributes:
    draft: of those layers.
    layers: which they are.
  """

  draft: ModelDraft
  layers: tuple[int, ...]
  reads_target_cache = True

  def init(self, params: Any, context: Context, hidden: Array) -> Any:
    return ()

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    return state

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    cache = getattr(
      context.target_cache, "model", context.target_cache
    )  # of a target whose alpha is simulated
    of_layers = lambda fields: tuple(fields[layer] for layer in self.layers)
    cache = cache.replace(layers=of_layers(cache.layers))
    if hasattr(cache, "cross"):
      cache = cache.replace(cross=of_layers(cache.cross))
    logits, _, cache = self.draft.model.extend(params, cache, context.last_token[:, None])
    return self.draft.propose_after(params, cache, logits[:, 0], rng)[0], state
