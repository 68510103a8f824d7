"""The target as its own draft: some of its decoder's layers (Section 3.6; Zhang et al., 2024).

What it reads is the target's own cache, of the layers it has; what it wrote there is forgotten
after the round, as the target's pass over the guesses writes it anew.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import Array

from specdec_jax.core.trees import Tree
from specdec_jax.core.types import Context, Draft, DraftFactory, Model, OnTarget, Proposal
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError, require_types
from specdec_jax.models.families import Config, model_of
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.models.t5 import T5Model


def layer_skip(vocabulary: Vocabulary, layers: Sequence[int]) -> OnTarget:
  """Some layers of the target's decoder, with its norm and logits, as draft.

  Args:
    vocabulary: of the pair.
    layers: of the decoder, from 0, in ascending order.

  Raises:
    InputError: there are none, or the target has no such layers (once it is known).
  """
  require_types(layer_skip, locals())

  def on_target(target: Model, params: Any) -> DraftFactory:
    own = target.model if isinstance(target, SimulatedModel) else target
    if not isinstance(own, T5Model | GPTModel):
      raise InputError(f"{type(own).__name__} has no layers of a decoder to draft with.")
    count = own.config.num_decoder_layers
    if not layers or [*layers] != sorted({*layers}.intersection(range(count))):
      raise InputError(
        f"layers is {layers}; the target's decoder has layers 0 to {count - 1}: give some of them, "
        "in ascending order."
      )
    fewer, shared = of_layers(own.config, params, layers)
    make = lambda sampling, tree: LayerSkipDraft(
      ModelDraft(model_of(fewer), sampling, tree), tuple(layers)
    )
    return DraftFactory(f"layers {','.join(map(str, layers))}", make, shared)

  return OnTarget(on_target)


def of_layers(config: Config, params: Any, layers: Sequence[int]) -> tuple[Config, Any]:
  """Shape and parameters, the same arrays, of a model that is some of another's decoder layers."""
  kept = {f"layers_{i}": params["decoder"][f"layers_{layer}"] for i, layer in enumerate(layers)}
  rest = {name: x for name, x in params["decoder"].items() if not name.startswith("layers_")}
  fewer = dataclasses.replace(config, num_decoder_layers=len(layers))
  return fewer, {"decoder": rest | kept, "token_embedder": params["token_embedder"]}


@dataclasses.dataclass(frozen=True)
class LayerSkipDraft(Draft):
  """Guesses drawn from a model that is some of the target's layers, by `Context.target`.

  It keeps nothing, and reads no prompt. Its parameters are arrays of the target's.

  Attributes:
    draft: of those layers.
    layers: which they are.
  """

  draft: ModelDraft
  layers: tuple[int, ...]
  tree: Tree = dataclasses.field(init=False)

  def __post_init__(self):
    object.__setattr__(self, "tree", self.draft.tree)

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    cache = getattr(context.target, "model", context.target)  # of a target whose alpha is simulated
    of_layers = lambda fields: tuple(fields[layer] for layer in self.layers)
    cache = cache.replace(layers=of_layers(cache.layers))
    if hasattr(cache, "cross"):
      cache = cache.replace(cross=of_layers(cache.cross))
    logits, _, cache = self.draft.model.extend(params, cache, context.newest[:, None])
    return self.draft.guess(params, cache, logits[:, 0], rng)[0], state
