"""Layer skipping: some decoder layers of the target as a draft (Section 3.6; Zhang et al., 2024).

The draft reads the target's cache of these layers. The entries that it adds are discarded after
drafting; the target's forward pass over the draft tokens writes the same slots.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import Array
from jaxtyping import Float

from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, require_static
from specdec_jax.core.types import (
  DraftOptions,
  DraftSpec,
  Keys,
  Loaded,
  Model,
  Outcome,
  Proposal,
  WrappedDraft,
)
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError
from specdec_jax.models.families import Config, model_of
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.simulated import unwrapped, unwrapped_cache
from specdec_jax.models.t5 import T5Model


def layer_skip(target: Loaded, layers: Sequence[int]) -> DraftSpec:
  """Return a draft from some decoder layers of the target, its final norm and output projection.

  Args:
    target: a T5 or a decoder-only model of this project.
    layers: numbers of the decoder layers, from 0, in ascending order.
  """
  target_config = decoder_of(target.model).config
  require_layers(layers, target_config.num_decoder_layers)
  config, params = of_layers(target_config, target.params, layers)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> LayerSkipDraft:
    tree = require_static("layer skipping", tree)
    return LayerSkipDraft(ModelDraft(model_of(config), sampling, tree, options), tuple(layers))

  return DraftSpec(f"layers {','.join(map(str, layers))}", build, params)


def decoder_of(target: Model) -> T5Model | GPTModel:
  """Return a T5 or decoder-only target without the wrapper of simulated acceptance."""
  model = unwrapped(target)
  if not isinstance(model, T5Model | GPTModel):
    raise InputError(f"{type(model).__name__} has no decoder layers to draft with.")
  return model


def require_layers(layers: Sequence[int], count: int) -> None:
  """Raise InputError unless `layers` are some of `count` decoder layers, in ascending order."""
  if not layers or [*layers] != sorted({*layers}.intersection(range(count))):
    raise InputError(
      f"layers is {layers}; the target's decoder has layers 0 to {count - 1}: give some of them, "
      "in ascending order."
    )


def of_layers(config: Config, params: Any, layers: Sequence[int]) -> tuple[Config, Any]:
  """Return the config and the parameters, not copied, of only some of the decoder layers."""
  decoder = params["decoder"]
  selected = {f"layers_{i}": decoder[f"layers_{layer}"] for i, layer in enumerate(layers)}
  rest = {name: x for name, x in decoder.items() if not name.startswith("layers_")}
  config = dataclasses.replace(config, num_decoder_layers=len(layers))
  return config, {"decoder": rest | selected, "token_embedder": params["token_embedder"]}


def text_cache(context: Context) -> Any:
  """Return the target's cache, unwrapped; InputError if it lacks the text, as in a beam search."""
  cache = unwrapped_cache(context.target_cache)
  if not cache.layers:
    raise InputError(
      "The draft reads the text in the target's cache, which holds all beams of a beam search; "
      "give it another draft."
    )
  return cache


def cache_of_layers(cache: Any, layers: Sequence[int]) -> Any:
  """Return the cache of a target with only some of the decoder layers."""

  def select(per_layer: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(per_layer[layer] for layer in layers)

  cache = cache.replace(layers=select(cache.layers))
  return cache if cache.cross is None else cache.replace(cross=select(cache.cross))


@dataclasses.dataclass(frozen=True)
class LayerSkipDraft(WrappedDraft):
  """A draft that samples tokens from some layers of the target and uses the target's cache.

  It has no state and does not process the prompt. Its parameters are those of `draft`.
  """

  draft: ModelDraft
  layers: tuple[int, ...]

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    return ()

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    return state

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    cache = cache_of_layers(text_cache(context), self.layers)
    logits, _, cache = self.draft.model.extend(params, cache, context.last_token[:, None])
    return self.draft.propose_after(params, cache, context, logits[:, 0], rng)[0], state
