"""Decoders on the target's encoding: without its states, or with predicted ones (near EAGLE).

They are those of `drafts.heads.shared_encoder` with another conditioning of tokens:

  shared_encoder  none
  eagle_text      in the round of the token, a projection of the state that the head itself predicts
                  at its parent; once it is committed, as in 'features'

'eagle_text' is close to EAGLE (Li et al., 2024): training uses the target's features at all tokens,
and adds a loss between predicted and actual features. It differs in that it has its own width,
embeddings and logits, attends to the source, and trains without noise.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from specdec_jax.core.arrays import take
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, NodeLayout, Tree
from specdec_jax.core.types import Draft, DraftOptions, Extended, First, Tokens
from specdec_jax.drafts.heads.base import TargetOutputs, TrainingLogits, every_position
from specdec_jax.drafts.heads.shared_encoder import (
  SharedEncoderCache,
  SharedEncoderDraft,
  SharedEncoderHead,
  SharedEncoderModel,
  SharedEncoderT5,
  with_conditioning,
)
from specdec_jax.drafts.model import extend_last_tokens
from specdec_jax.models.decoder import KeysValues
from specdec_jax.models.families import Config
from specdec_jax.models.layers import Dense
from specdec_jax.models.t5 import T5


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainHead(SharedEncoderHead):
  """Decoder that uses the target's encoder, and none of its states."""

  kind: str = "shared_encoder"

  @property
  def module(self) -> "PlainT5":
    return PlainT5(self.t5, head=self)

  def draft(
    self, target: Config, sampling: Sampling, tree: AnyTree, options: DraftOptions
  ) -> Draft:
    model = PlainModel(self.t5, self)
    return SharedEncoderDraft(model, sampling, self.require_static(tree), options)


class PlainT5(SharedEncoderT5):
  """T5 whose decoder has no conditioning."""

  def setup(self):
    T5.setup(self)

  def after_each(
    self,
    inputs: Int[Array, "B T"],
    hidden: Float[Array, "B T E"],
    anchors: Int[Array, "B T"],
    cross: tuple[KeysValues, ...],
    cross_bias: Float[Array, "B 1 1 S"],
  ) -> Any:
    x, embedding = self.token_embedder(inputs), self.token_embedder.embedding
    return self.decoder(x, embedding, cross, cross_bias)[0]


@dataclasses.dataclass(frozen=True)
class PlainModel(SharedEncoderModel):
  """Model whose tokens have the conditioning of the empty cache, which is 0."""

  def condition(self, params: Any, cache: SharedEncoderCache, *args: Any) -> SharedEncoderCache:
    return cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleTextHead(SharedEncoderHead):
  """Decoder that predicts the target's hidden states; see the module docstring."""

  kind: str = "eagle_text"
  reads_features = True  # type: ignore[assignment]

  @property
  def module(self) -> "EagleTextT5":
    return EagleTextT5(self.t5, head=dataclasses.replace(self, offsets=1))

  def draft(
    self, target: Config, sampling: Sampling, tree: AnyTree, options: DraftOptions
  ) -> Draft:
    model = EagleTextModel(self.t5, self)
    return EagleTextDraft(model, sampling, self.require_static(tree), options)

  def training_logits(
    self, params: Any, target: Config, target_params: Any, outputs: TargetOutputs, stride: int
  ) -> TrainingLogits:
    """Return the logits at each token, which needs no anchors.

    The further loss is EAGLE's smooth L1 loss of the predicted features, averaged over their
    entries.
    """
    logits, predicted = self.after_each(params, outputs, jnp.zeros_like(outputs.inputs))
    error = jnp.abs(predicted[:, :-1] - lax.stop_gradient(outputs.hidden[:, 1:]))
    losses = jnp.where(error < 1, error**2 / 2, error - 0.5)
    is_token = outputs.targets[:, :-1] >= 0
    loss = (losses.mean(axis=-1) * is_token).sum() / jnp.maximum(is_token.sum(), 1)
    return TrainingLogits(logits[:, :, None], every_position(outputs.inputs), loss)


class EagleTextT5(SharedEncoderT5):
  """T5 whose decoder also predicts the target's hidden states."""

  def setup(self):
    super().setup()
    self.feature = Dense(self.config, self.head.state_dim)

  def condition_on_prediction(self, own: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
    """Return the conditioning of tokens whose parents have the output states `own`."""
    return self.condition(self.feature(own), 0)

  def after_each(
    self,
    inputs: Int[Array, "B T"],
    hidden: Float[Array, "B T E"],
    anchors: Int[Array, "B T"],
    cross: tuple[KeysValues, ...],
    cross_bias: Float[Array, "B 1 1 S"],
  ) -> Any:
    """Return the teacher-forced logits [B, T, V] and the predicted hidden states [B, T, E]."""
    x, embedding = self.token_embedder(inputs), self.token_embedder.embedding
    x = x + self.condition(hidden, 0)
    logits, own, _ = self.decoder(x, embedding, cross, cross_bias)
    return logits, self.feature(own)


@dataclasses.dataclass(frozen=True)
class EagleTextModel(SharedEncoderModel):
  """Draft model whose tokens are conditioned on the states that it predicts at their parents."""

  def extend(
    self, params: Any, cache: Any, tokens: Tokens, tree: NodeLayout | None = None, first: First = 0
  ) -> Extended:
    """Process a block, a level of the tree, and condition the children of its nodes."""
    logits, hidden, cache = super().extend(params, cache, tokens, tree, first)
    if isinstance(tree, Tree):
      cache = self.condition_children(params, cache, hidden, tree, first)
    return logits, hidden, cache

  def condition_children(
    self,
    params: Any,
    cache: SharedEncoderCache,
    hidden: Float[Array, "B K d"],
    tree: Tree,
    first: Int[Array, ""] | int,
  ) -> SharedEncoderCache:
    """Write the conditioning of the children of nodes `first` to `first + K - 1`."""
    children = first + 1  # of a chain
    if not tree.is_chain:
      assert isinstance(first, int)
      last = first + hidden.shape[1]
      nodes = [n for n, parent in enumerate(tree.parents, 1) if first <= parent < last]
      if not nodes:
        return cache
      hidden = take(hidden, [tree.parents[n - 1] - first for n in nodes])
      children = nodes[0]
    new = self.head.module.apply({"params": params}, hidden, method="condition_on_prediction")
    return with_conditioning(cache, new, cache.length + children)


@dataclasses.dataclass(frozen=True)
class EagleTextDraft(SharedEncoderDraft):
  """A draft that samples a chain or a static tree from such a model."""

  model: EagleTextModel

  def start_round(
    self, params: Any, state: Any, context: Context
  ) -> tuple[Float[Array, "B V"], Any]:
    model, hidden, slot = self.model, context.hidden[:, None], context.length - 1
    cache = model.condition(params, state, hidden, 0, slot)
    logits, own, cache = extend_last_tokens(model, params, cache, context, self.reread)
    return logits, model.condition_children(params, cache, own[:, None], self.tree, 0)
