"""EAGLE with attention to the text, as published (Li et al., 2024).

The head is a decoder over the embedding of each token and the target's hidden state before it (its
feature), as in `features`. It also predicts the feature after each token. Within a round, where the
target's features are not known, each draft token is read together with the predicted feature of its
parent. Training uses the target's features at all tokens, and adds EAGLE's loss between predicted
features and the target's. Unlike in EAGLE, the head has its own width, embeddings and logits, and
features have no noise in training.

Axis letters are those of `core.types`; d is the width of the head.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from specdec_jax.core.arrays import take
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, NodeLayout, Tree
from specdec_jax.core.types import Context, Draft
from specdec_jax.drafts.heads.base import (
  DraftLogits,
  TargetOutputs,
  decoder_config,
  every_position,
)
from specdec_jax.drafts.heads.conditioned import ConditionedHead, ConditionedModel, ConditionedT5
from specdec_jax.drafts.heads.features import FeaturesDraft
from specdec_jax.drafts.model import extend_last_tokens
from specdec_jax.models.decoder import KeysValues
from specdec_jax.models.families import Config
from specdec_jax.models.layers import Dense
from specdec_jax.models.t5 import T5Cache


class EagleT5(ConditionedT5):
  """T5 whose decoder reads and predicts hidden states of the target.

  Attributes:
    state_dim: width of the target's hidden states, E.
  """

  state_dim: int = 1

  def setup(self):
    super().setup()
    self.feature = Dense(self.config, self.state_dim)

  def after_each(
    self,
    inputs: Int[Array, "B T"],
    hidden: Float[Array, "B T E"],
    anchors: Int[Array, "B T"],
    cross: tuple[KeysValues, ...],
    cross_bias: Float[Array, "B 1 1 S"],
  ) -> Float[Array, "B T V"]:
    return self.logits_and_features(inputs, hidden, cross, cross_bias)[0]

  def logits_and_features(
    self,
    inputs: Int[Array, "B T"],
    hidden: Float[Array, "B T E"],
    cross: tuple[KeysValues, ...],
    cross_bias: Float[Array, "B 1 1 S"],
  ) -> tuple[Float[Array, "B T V"], Float[Array, "B T E"]]:
    """Return teacher-forced logits and predicted hidden states of the target after each input.

    `hidden` is the state from which the target predicted each input.
    """
    x = self.token_embedder(inputs) + self.condition(hidden, 0)
    logits, own, _ = self.decoder(x, self.token_embedder.embedding, cross, cross_bias)
    return logits, self.feature(own)

  def condition_on_prediction(self, own: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
    """Return the conditioning vectors of tokens whose parents have the output states `own`."""
    return self.condition(self.feature(own), 0)


@dataclasses.dataclass(frozen=True)
class EagleModel(ConditionedModel):
  """Draft model that conditions draft tokens on its own predictions of the target's states.

  Attributes:
    state_dim: width of the target's hidden states, E.
  """

  state_dim: int = 1

  @property
  def module(self) -> EagleT5:
    return EagleT5(self.config, offsets=self.offsets, state_dim=self.state_dim)

  def extend(
    self,
    params: Any,
    cache: T5Cache,
    tokens: Int[Array, "B K"],
    tree: NodeLayout | None = None,
    first: Int[Array, ""] | int = 0,
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K d"], T5Cache]:
    """Process a block; in a round, that is with a tree, also condition the children of its nodes.

    The block is a level of the tree. Without a tree, the tokens are committed ones.
    """
    logits, hidden, cache = super().extend(params, cache, tokens, tree, first)
    if isinstance(tree, Tree):
      cache = self.condition_children(params, cache, hidden, tree, first)
    return logits, hidden, cache

  def condition_children(
    self,
    params: Any,
    cache: T5Cache,
    hidden: Float[Array, "B K d"],
    tree: Tree,
    first: Int[Array, ""] | int,
  ) -> T5Cache:
    """Write the conditioning of the children of nodes `first` to `first + K - 1`.

    Args:
      params: parameters of the model.
      cache: cache of the model; the first node of the tree is in slot `cache.length`.
      hidden: output states of the model at these nodes.
      tree: tree of the round.
      first: index of the first node.
    """
    children = first + 1  # of a chain
    if not tree.is_chain:
      assert isinstance(first, int)
      last = first + hidden.shape[1]
      nodes = [n for n, parent in enumerate(tree.parents, 1) if first <= parent < last]
      if not nodes:
        return cache
      hidden = take(hidden, [tree.parents[n - 1] - first for n in nodes])
      children = nodes[0]
    new = self.module.apply({"params": params}, hidden, method="condition_on_prediction")
    return self.write_conditioning(cache, new, cache.length + children)


@dataclasses.dataclass(frozen=True)
class EagleTextDraft(FeaturesDraft):
  """A draft that samples a chain or a static tree, and predicts the target's states on the way."""

  model: EagleModel

  def start_round(
    self, params: Any, state: Any, context: Context
  ) -> tuple[Float[Array, "B V"], Any]:
    cache = self.condition(params, state, context.hidden[:, None], 0, context.length - 1)
    logits, hidden, cache = extend_last_tokens(self.model, params, cache, context, self.reread)
    return logits, self.model.condition_children(params, cache, hidden[:, None], self.tree, 0)


@dataclasses.dataclass(frozen=True)
class EagleTextHead(ConditionedHead):
  """Learned draft head of EAGLE with attention to the text (kind 'eagle_text')."""

  @property
  def module(self) -> EagleT5:
    return self._model.module

  @property
  def _model(self) -> EagleModel:
    return EagleModel(decoder_config(self.config), 1, self.config.state_dim)

  def draft(self, target: Config, sampling: Sampling, tree: AnyTree) -> Draft:
    tree = self.require_static(tree)
    return EagleTextDraft(self._model, sampling, tree, reread=tree.depth + 1)

  def training_logits(self, target: Config, stride: int) -> DraftLogits:
    """Return the function that computes logits at each token, given the target's features.

    Each token is an anchor with one draft token, for any `stride`.
    """

    def draft_logits(
      params: Any, frozen: Any, outputs: TargetOutputs
    ) -> tuple[Float[Array, "B T 1 V"], Int[Array, "B T 1"]]:
      return self._predictions(params, outputs)[0][:, :, None], every_position(outputs.inputs)

    return draft_logits

  def feature_loss(
    self, params: Any, outputs: TargetOutputs, is_token: Bool[Array, "B T"]
  ) -> Float[Array, ""]:
    """Return EAGLE's smooth L1 loss of the predicted features, averaged over their entries."""
    predicted = self._predictions(params, outputs)[1][:, :-1]
    error = jnp.abs(predicted - lax.stop_gradient(outputs.hidden[:, 1:]))
    losses = jnp.where(error < 1, error**2 / 2, error - 0.5)
    mask = is_token[:, :-1]
    return (losses.mean(axis=-1) * mask).sum() / jnp.maximum(mask.sum(), 1)

  def _predictions(
    self, params: Any, outputs: TargetOutputs
  ) -> tuple[Float[Array, "B T V"], Float[Array, "B T E"]]:
    """Return teacher-forced logits and predicted features after each input."""
    return self.module.apply(
      {"params": params},
      outputs.inputs,
      outputs.hidden,
      outputs.cache.cross[-self.config.num_decoder_layers :],
      outputs.cache.cross_bias,
      method="logits_and_features",
    )
