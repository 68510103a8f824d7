"""Layer skipping: some decoder layers of the target as a draft (Section 3.6; Zhang et al., 2024).

The draft reads the target's cache of these layers. The entries that it adds are discarded after
drafting; the target's forward pass over the draft tokens writes the same slots.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, NodePlacement, require_static
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


@dataclasses.dataclass(frozen=True, eq=False)
class EachTokenLayout:
  """Layout of a block of all tokens of a text, each of which is the first token of a round.

  The block follows the slots of a cache that already holds these tokens, after `length` others.
  Each token attends to the slots of the tokens before it, and to itself in the block.
  """

  length: Int[Array, " B"]

  def place(
    self, length: Int[Array, " B"], first: Any, num_nodes: int, num_slots: int
  ) -> NodePlacement:
    positions = self.length[:, None] + jnp.arange(num_nodes)
    cached = jnp.broadcast_to(
      jnp.arange(num_slots - num_nodes), (len(positions), num_slots - num_nodes)
    )
    is_before = cached[:, None] < positions[..., None]
    is_itself = jnp.broadcast_to(jnp.eye(num_nodes, dtype=bool), (*positions.shape, num_nodes))
    return NodePlacement(
      positions,
      key_positions=jnp.concatenate([cached, positions], axis=1),
      visible=jnp.concatenate([is_before, is_itself], axis=2),
    )


def logits_at_each_token(
  model: Model, params: Any, cache: Any, inputs: Int[Array, "B T"]
) -> Float[Array, "B T V"]:
  """Compute the logits of the first draft token in a round that begins at each token of a text.

  In decoding, the keys and values of committed tokens are those of the complete target, and only
  those of the last committed token are computed by the draft. `cache`, that of the target with only
  these layers, holds all inputs, but its `length` does not count them.
  """
  batch, num_tokens = inputs.shape
  num_slots = cache.layers[0][0].shape[2]
  layout = EachTokenLayout(cache.length)
  block_slots = ((0, 0), (0, 0), (0, num_tokens), (0, 0))
  layers = jax.tree.map(lambda slots: jnp.pad(slots, block_slots), cache.layers)
  cache = cache.replace(layers=layers, length=jnp.full(batch, num_slots, jnp.int32))
  return model.extend(params, cache, inputs, layout)[0]


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
