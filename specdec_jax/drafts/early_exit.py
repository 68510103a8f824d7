"""Early exit: the first layers of the target and a trained head, with the target's own logits."""

import dataclasses
from typing import Any

from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.trees import NodeLayout
from specdec_jax.core.types import WrappedModel
from specdec_jax.models.families import module_of
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.speculator import Head, SpeculatorConfig
from specdec_jax.models.t5 import T5Model


@dataclasses.dataclass(frozen=True)
class EarlyExitModel(WrappedModel):
  """Model of the first layers of a target, for `drafts.layer_skip.LayerSkipDraft`.

  Its parameters are a pair: those of the head, and those of the layers
  (`drafts.layer_skip.of_layers`).

  Attributes:
    model: the first layers of the target.
    head: shape of the head.
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
    hidden = Head(self.head).apply({"params": head_params}, hidden)[..., 0, :]
    module = module_of(self.model.config)
    return module.apply({"params": layer_params}, hidden, method="logits"), hidden, cache
