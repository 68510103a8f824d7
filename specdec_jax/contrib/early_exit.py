"""Early exit: some layers of the target, its final norm, and a trained residual block.

The target's output projection turns the output of the block into logits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Key

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, NodeLayout, NodePlacement
from specdec_jax.core.types import DraftOptions, Extended, First, Model, Tokens, WrappedModel
from specdec_jax.drafts.heads.base import (
  DraftHead,
  TargetOutputs,
  TrainingLogits,
  every_position,
)
from specdec_jax.drafts.heads.stateless import ResidualBlocks
from specdec_jax.drafts.layer_skip import (
  LayerSkipDraft,
  cache_of_layers,
  of_layers,
  require_layers,
)
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.models.config import TransformerConfig
from specdec_jax.models.families import Config, model_of, module_of
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.t5 import T5Model


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
    positions = self.length[:, None] + jnp.arange(num_nodes)[None]
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
class EarlyExitModel(WrappedModel):
  """Some layers of a target, followed by a draft head.

  Its parameters are (parameters of the head, parameters of the layers as from `of_layers`).
  """

  model: T5Model | GPTModel
  head: DraftHead

  def prefill(
    self, params: Any, prompt: Int[Array, "B P"], num_slots: int
  ) -> tuple[Float[Array, "B C E"], Any]:
    return self.model.prefill(params[1], prompt, num_slots)

  def extend(
    self, params: Any, cache: Any, tokens: Tokens, tree: NodeLayout | None = None, first: First = 0
  ) -> Extended:
    head_params, layer_params = params
    _, hidden, cache = self.model.extend(layer_params, cache, tokens, tree, first)
    hidden = ResidualBlocks(self.head).apply({"params": head_params}, hidden)[..., 0, :]
    module = module_of(self.model.config)
    return module.apply({"params": layer_params}, hidden, method="logits"), hidden, cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyExitHead(DraftHead):
  """Learned draft head after some decoder layers of the target, in ascending order."""

  uses_target_logits = True

  kind: str = "early_exit"
  layers: tuple[int, ...] = (0,)

  def init(self, rng: Key[Array, ""]) -> Any:
    return ResidualBlocks(self).init(rng, jnp.zeros((1, self.state_dim)))["params"]

  def draft(
    self, target: Config, sampling: Sampling, tree: AnyTree, options: DraftOptions
  ) -> LayerSkipDraft:
    exit_target = dataclasses.replace(target, num_decoder_layers=len(self.layers))
    model = EarlyExitModel(model_of(exit_target), self)
    draft = ModelDraft(model, sampling, self.require_static(tree), options)
    return LayerSkipDraft(draft, self.layers)

  def draft_params(self, target: Config, params: Any, target_params: Any) -> Any:
    return params, of_layers(target, target_params, self.layers)[1]

  def require_target(self, target: TransformerConfig) -> None:
    super().require_target(target)
    require_layers(self.layers, target.num_decoder_layers)

  def training_logits(
    self, params: Any, target: Config, target_params: Any, outputs: TargetOutputs, stride: int
  ) -> TrainingLogits:
    exit_config, exit_params = of_layers(target, target_params, self.layers)
    model = EarlyExitModel(model_of(exit_config), self)
    cache = cache_of_layers(outputs.cache, self.layers)
    logits = logits_at_each_token(model, (params, exit_params), cache, outputs.inputs)
    return TrainingLogits(logits[:, :, None], every_position(outputs.inputs))
