"""Early exit: the target's first layers and final norm, and a trained residual block.

The target's output projection turns the output of the block into logits.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Key

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, NodeLayout
from specdec_jax.drafts.heads.base import (
  DraftHead,
  DraftLogits,
  SpeculatorConfig,
  TargetOutputs,
  every_position,
)
from specdec_jax.drafts.heads.stateless import ResidualBlocks
from specdec_jax.drafts.layer_skip import LayerSkipDraft, of_layers
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.models.families import Config, model_of, module_of
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.t5 import T5Model
from specdec_jax.wrappers import WrappedModel


@dataclasses.dataclass(frozen=True)
class EarlyExitModel(WrappedModel):
  """Model that consists of the first layers of a target, followed by a draft head.

  `drafts.layer_skip.LayerSkipDraft` drafts with it. Its parameters are (parameters of the head,
  parameters of the layers); `drafts.layer_skip.of_layers` returns the parameters of the layers.

  Attributes:
    model: the first layers of the target.
    head: configuration of the head.
  """

  model: T5Model | GPTModel
  head: SpeculatorConfig

  def prefill(
    self, params: Any, prompt: Int[Array, "B P"], num_slots: int
  ) -> tuple[Float[Array, "B C E"], Any]:
    return self.model.prefill(params[1], prompt, num_slots)

  def extend(
    self,
    params: Any,
    cache: Any,
    tokens: Int[Array, "B K"],
    tree: NodeLayout | None = None,
    first: Int[Array, ""] | int = 0,
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K E"], Any]:
    head_params, layer_params = params
    _, hidden, cache = self.model.extend(layer_params, cache, tokens, tree, first)
    hidden = ResidualBlocks(self.head).apply({"params": head_params}, hidden)[..., 0, :]
    module = module_of(self.model.config)
    return module.apply({"params": layer_params}, hidden, method="logits"), hidden, cache


@dataclasses.dataclass(frozen=True)
class EarlyExitHead(DraftHead):
  """Learned draft head after `config.exit_layers` layers of the target (kind 'early_exit')."""

  def init(self, rng: Key[Array, ""]) -> Any:
    hidden = jnp.zeros((1, self.config.state_dim))
    return ResidualBlocks(self.config).init(rng, hidden)["params"]

  def draft(self, target: Config, sampling: Sampling, tree: AnyTree) -> LayerSkipDraft:
    layers = tuple(range(self.config.exit_layers))
    exit_target = dataclasses.replace(target, num_decoder_layers=len(layers))
    model = EarlyExitModel(model_of(exit_target), self.config)
    return LayerSkipDraft(ModelDraft(model, sampling, self.require_static(tree)), layers)

  def draft_params(self, target: Config, params: Any, target_params: Any) -> Any:
    return params, of_layers(target, target_params, range(self.config.exit_layers))[1]

  def training_logits(self, target: Config, stride: int) -> DraftLogits:
    """Return the function that computes logits at each token.

    Each token is an anchor with one draft token, for any `stride`.
    """
    config = self.config

    def draft_logits(
      params: Any, frozen: Any, outputs: TargetOutputs
    ) -> tuple[Float[Array, "B T 1 V"], Int[Array, "B T 1"]]:
      exit_config, exit_params = of_layers(target, frozen, range(config.exit_layers))
      model = EarlyExitModel(model_of(exit_config), config)
      cache = outputs.cache.replace(layers=outputs.cache.layers[: config.exit_layers])
      if config.has_encoder:
        cache = cache.replace(cross=cache.cross[: config.exit_layers])
      logits, _, _ = model.extend((params, exit_params), cache, outputs.inputs)
      return logits[:, :, None], every_position(outputs.inputs)

    return draft_logits
