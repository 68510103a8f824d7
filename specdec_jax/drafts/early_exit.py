"""Leaving the target early: its first layers and a trained head, read off by its own logits."""

import dataclasses
from typing import Any

from jax import Array

from specdec_jax.core.trees import AnyNodes, AnyTree
from specdec_jax.models.families import module_of
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.speculator import Head, SpeculatorConfig
from specdec_jax.models.t5 import T5Model


@dataclasses.dataclass(frozen=True)
class EarlyExitModel:
  """The `Model` that this makes, for `drafts.layers.LayerSkipDraft`.

  Its parameters are a pair: the head's, and those of the layers (`drafts.layers.of_layers`).

  Attributes:
    layers: the first of the target's. head: shape of the head.
  """

  layers: T5Model | GPTModel
  head: SpeculatorConfig

  @property
  def vocab_size(self) -> int:
    return self.layers.vocab_size

  @property
  def eos_id(self) -> int:
    return self.layers.eos_id

  def prompt_tokens(self, prompt: Array) -> tuple[Array, Array]:
    return self.layers.prompt_tokens(prompt)

  def prefill(self, params: Any, prompt: Array, num_slots: int) -> tuple[Array, Any]:
    return self.layers.prefill(params[1], prompt, num_slots)

  def extend(
    self,
    params: Any,
    cache: Any,
    tokens: Array,
    tree: AnyNodes | None = None,
    first: Array | int = 0,
  ) -> tuple[Array, Array, Any]:
    own, of_layers = params
    _, hidden, cache = self.layers.extend(of_layers, cache, tokens, tree, first)
    hidden = Head(self.head).apply({"params": own}, hidden)[..., 0, :]
    module = module_of(self.layers.config)
    return module.apply({"params": of_layers}, hidden, method="logits"), hidden, cache

  def commit(
    self, cache: Any, length: Array, tree: AnyTree | None = None, path: Array | None = None
  ) -> Any:
    return self.layers.commit(cache, length, tree, path)
