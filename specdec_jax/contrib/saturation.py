"""Early exit decided per token: a draft from as many of the target's layers as a token needs.

After each of some decoder layers, the target's final norm and output projection give a distribution
(CALM; Schuster et al., 2022). A token exits if this distribution is confident enough, or if its
most probable token is the one after the layer before: it is saturated. The keys and values of the
layers that are skipped are computed from the state at the exit.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from specdec_jax.contrib.stopping import confidence
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, NodeLayout, require_static
from specdec_jax.core.types import (
  DraftOptions,
  DraftSpec,
  Extended,
  First,
  Loaded,
  Tokens,
  WrappedModel,
)
from specdec_jax.drafts.layer_skip import (
  LayerSkipDraft,
  cache_of_layers,
  decoder_of,
  of_layers,
  require_layers,
)
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import require_number
from specdec_jax.models.families import model_of, module_of
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.t5 import T5Model


def saturation(target: Loaded, layers: Sequence[int], threshold: float | None = None) -> DraftSpec:
  """Return a draft that decides for each token how many decoder layers of the target it runs.

  Args:
    target: a T5 or a decoder-only model of this project.
    layers: numbers of the decoder layers, from 0, in ascending order.
    threshold: probability of the most probable token from which a token exits; None to exit if the
      most probable token did not change.
  """
  config = decoder_of(target.model).config
  require_layers(layers, config.num_decoder_layers)
  if threshold is not None:
    threshold = require_number("threshold", threshold, 0, 1)
  config, params = of_layers(config, target.params, layers)
  model = SaturationModel(model_of(config), threshold)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> LayerSkipDraft:
    tree = require_static("early exit", tree)
    return LayerSkipDraft(ModelDraft(model, sampling, tree, options), tuple(layers))

  rule = "unchanged" if threshold is None else f"at {threshold:g}"
  return DraftSpec(f"layers {','.join(map(str, layers))}, exit {rule}", build, params)


@dataclasses.dataclass(frozen=True)
class SaturationModel(WrappedModel):
  """Some layers of a target, of which each token runs the first ones.

  `model` has these layers. A layer is not run if all tokens of the block have exited.
  """

  model: T5Model | GPTModel
  threshold: float | None

  def extend(
    self, params: Any, cache: Any, tokens: Tokens, tree: NodeLayout | None = None, first: First = 0
  ) -> Extended:
    config = dataclasses.replace(self.model.config, num_decoder_layers=1)

    def run(layer: int, x: Array) -> tuple[Array, Array, Any]:
      cfg = dataclasses.replace(config, embedding_norm=config.embedding_norm and layer == 0)
      module = module_of(cfg).clone(feature_layers=(0,))  # the state is that before the final norm
      args = cache_of_layers(cache, [layer]), x, tree, first
      method = "extend_embedded" if layer else "extend"
      _, of_layer = of_layers(cfg, params, [layer])
      if layer and "positions" in of_layer["decoder"]:  # they are added before the first layer
        of_layer["decoder"]["positions"] = jnp.zeros_like(of_layer["decoder"]["positions"])
      logits, x, after = module.apply({"params": of_layer}, *args, method=method)
      return logits, x, after.layers[0]

    def go_on(layer: int, logits: Array, x: Array, exited: Array) -> tuple[Any, ...]:
      new_logits, new_x, keys_values = run(layer, x)
      new = jnp.where(exited[..., None], logits, new_logits)
      x = jnp.where(exited[..., None], x, new_x)
      return new, x, exited | self.exits(new_logits, logits), keys_values

    def skip(layer: int, logits: Array, x: Array, exited: Array) -> tuple[Any, ...]:
      return logits, x, exited, run(layer, x)[2]  # the compiler drops the rest of the layer

    logits, x, keys_values = run(0, tokens)
    exited, written = self.exits(logits, None), [keys_values]
    for layer in range(1, self.model.config.num_decoder_layers):
      branches = (functools.partial(branch, layer) for branch in (skip, go_on))
      logits, x, exited, keys_values = lax.cond(exited.all(), *branches, logits, x, exited)
      written.append(keys_values)
    return logits, x, cache.replace(layers=tuple(written))

  def exits(
    self, logits: Float[Array, "B K V"], before: Float[Array, "B K V"] | None
  ) -> Bool[Array, "B K"]:
    """Return whether tokens exit, given the logits after a layer and after the layer before."""
    if self.threshold is not None:
      return confidence(logits) >= self.threshold
    if before is None:
      return jnp.zeros(logits.shape[:-1], bool)
    return logits.argmax(axis=-1) == before.argmax(axis=-1)
