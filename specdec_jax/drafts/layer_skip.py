"""Layer skipping: some decoder layers of the target as a draft (Section 3.6; Zhang et al., 2024).

The draft reads the target's cache of these layers. The entries that it adds are discarded after
drafting; the target's forward pass over the draft tokens writes the same slots.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import Array
from jaxtyping import Float, Key

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, require_static
from specdec_jax.core.types import Context, Outcome, Proposal
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError, require_types
from specdec_jax.loading import DraftFactory, LoadedTarget
from specdec_jax.models.families import Config, model_of
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.simulated import unwrapped, unwrapped_cache
from specdec_jax.models.t5 import T5Model
from specdec_jax.wrappers import WrappedDraft


def layer_skip(target: LoadedTarget, layers: Sequence[int]) -> DraftFactory:
  """Return a draft from some decoder layers of the target, its final norm and output projection.

  Args:
    target: a T5 or a decoder-only model of this project.
    layers: numbers of the decoder layers, from 0, in ascending order.

  Raises:
    InputError: `layers` is empty or not ascending, the target does not have these layers, or it is
      neither a T5 nor a decoder-only model of this project.
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
  """Return the configuration and the parameters of a model with only some of the decoder layers.

  The parameters are not copied. Those of an encoder are left out.
  """
  decoder = params["decoder"]
  selected = {f"layers_{i}": decoder[f"layers_{layer}"] for i, layer in enumerate(layers)}
  rest = {name: x for name, x in decoder.items() if not name.startswith("layers_")}
  config = dataclasses.replace(config, num_decoder_layers=len(layers))
  return config, {"decoder": rest | selected, "token_embedder": params["token_embedder"]}


@dataclasses.dataclass(frozen=True)
class LayerSkipDraft(WrappedDraft):
  """A draft that samples tokens from some layers of the target and uses the target's cache.

  It has no state and does not process the prompt. Its parameters are those of `draft`.

  Attributes:
    draft: draft that samples from the model that consists of these layers.
    layers: numbers of these layers in the target.
  """

  draft: ModelDraft
  layers: tuple[int, ...]
  reads_target_cache = True

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    return ()

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    return state

  def propose(
    self, params: Any, state: Any, context: Context, rng: Key[Array, " B *depths"]
  ) -> tuple[Proposal, Any]:
    cache = unwrapped_cache(context.target_cache)
    cache = cache.replace(layers=self._select(cache.layers))
    if hasattr(cache, "cross"):
      cache = cache.replace(cross=self._select(cache.cross))
    logits, _, cache = self.draft.model.extend(params, cache, context.last_token[:, None])
    return self.draft.propose_after(params, cache, context, logits[:, 0], rng)[0], state

  def _select(self, per_layer: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(per_layer[layer] for layer in self.layers)
