"""Small decoder that attends to the target's hidden states at all committed tokens.

It is the decoder in `conditioned` with one difference: when a round ends, its tokens get the hidden
states from which the target predicted them, in place of the state at the start of the round. The
next round computes their keys and values again. As in EAGLE (Li et al., 2024), each committed token
is thus read together with the target's state (a feature) before it.

Axis letters are those of `core.types`; d is the width of the head.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Key

from specdec_jax.core.arrays import gather
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree, NodePlacement
from specdec_jax.core.types import Context, Draft, Outcome, Proposal
from specdec_jax.drafts.dynamic import DynamicDraft
from specdec_jax.drafts.heads.base import decoder_config
from specdec_jax.drafts.heads.conditioned import (
  ConditionedDraft,
  ConditionedHead,
  ConditionedModel,
  ConditionedT5,
)
from specdec_jax.models.decoder import KeysValues
from specdec_jax.models.families import Config
from specdec_jax.models.t5 import T5Cache


@dataclasses.dataclass(frozen=True, eq=False)
class RoundsLayout:
  """Layout of a block that holds each token of a text twice: committed, and in its round.

  A committed token attends to the committed tokens up to itself. A token in its round attends to
  the committed tokens before the round, and to the tokens of the round up to itself.

  Attributes:
    anchors: for each token, position of the last committed token in its round, which is the first
      token of the round.
  """

  anchors: Int[Array, "B T"]

  def place(
    self, length: Int[Array, " B"], first: Any, num_nodes: int, num_slots: int
  ) -> NodePlacement:
    batch, text = self.anchors.shape
    position = jnp.arange(text)
    not_after = position <= position[:, None]
    start = self.anchors[:, :, None]
    before_round = position < start
    same_round = not_after & (self.anchors[:, None] == start)
    committed = jnp.broadcast_to(not_after, same_round.shape)
    positions = jnp.broadcast_to(jnp.tile(position, 2), (batch, 2 * text))
    visible = jnp.block([[committed, jnp.zeros_like(committed)], [before_round, same_round]])
    return NodePlacement(positions, positions, visible)


class FeaturesT5(ConditionedT5):
  """T5 whose decoder is conditioned on the target's hidden states at all committed tokens."""

  def after_each(
    self,
    inputs: Int[Array, "B T"],
    hidden: Float[Array, "B T E"],
    anchors: Int[Array, "B T"],
    cross: tuple[KeysValues, ...],
    cross_bias: Float[Array, "B 1 1 S"],
  ) -> Float[Array, "B T V"]:
    length = inputs.shape[1]
    offsets = jnp.arange(length) - anchors
    conditioning = [self.condition(hidden, 0), self.condition(gather(hidden, anchors), offsets)]
    x = jnp.tile(self.token_embedder(inputs), (1, 2, 1)) + jnp.concatenate(conditioning, axis=1)
    embedding, layout = self.token_embedder.embedding, RoundsLayout(anchors)
    _, hidden, _ = self.decoder(x, embedding, cross, cross_bias, tree=layout)
    return self.decoder.logits(hidden[:, length:], embedding)


@dataclasses.dataclass(frozen=True)
class FeaturesDraft(ConditionedDraft):
  """A draft that samples a chain or a static tree from a decoder over the target's hidden states.

  `reread` is at least the number of tokens that a round may commit.
  """

  def with_reread(self, num_tokens: int) -> "FeaturesDraft":
    return dataclasses.replace(self, reread=max(self.reread, num_tokens))

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    return with_features(self.model, params, super().observe(params, state, outcome), outcome)


@dataclasses.dataclass(frozen=True)
class DynamicFeaturesDraft(DynamicDraft):
  """A draft that proposes dynamic trees with a decoder over the target's hidden states.

  `reread` is the number of tokens that a round may commit.
  """

  model: ConditionedModel

  def empty_cache(self, params: Any, context: Context, num_slots: int) -> T5Cache:
    return self.model.empty_cache(context, num_slots)

  def propose(
    self, params: Any, state: Any, context: Context, rng: Key[Array, " B"]
  ) -> tuple[Proposal, Any]:
    cache, processed = state
    # The processed nodes: the last committed token, then `width` nodes per level.
    offsets = jnp.array([0, *np.repeat(np.arange(1, self.tree.depth), self.width)])
    hidden, slot = context.hidden[:, None], context.length - 1
    cache = self.model.condition(params, cache, hidden, offsets, slot)
    return super().propose(params, (cache, processed), context, rng)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    cache, processed = super().observe(params, state, outcome)
    return with_features(self.model, params, cache, outcome), processed


def with_features(
  model: ConditionedModel, params: Any, cache: T5Cache, outcome: Outcome
) -> T5Cache:
  """Return the cache after a round, with the hidden states that predicted the new tokens."""
  hidden, path = outcome.hidden, outcome.verification.path
  if path is not None:
    hidden = gather(hidden, jnp.pad(path, ((0, 0), (1, 0))))
  return model.condition(params, cache, hidden, 0, outcome.length - outcome.num_emitted)


@dataclasses.dataclass(frozen=True)
class FeaturesHead(ConditionedHead):
  """Learned draft head over the target's hidden states of the text (kind 'features')."""

  @property
  def module(self) -> FeaturesT5:
    return FeaturesT5(decoder_config(self.config), offsets=self.config.gamma)

  def draft(self, target: Config, sampling: Sampling, tree: AnyTree) -> Draft:
    model = ConditionedModel(decoder_config(self.config), self.config.gamma)
    if isinstance(tree, DynamicTree):
      width = min(8, self.config.vocab_size)
      return DynamicFeaturesDraft(model, tree, width, reread=tree.depth + 1)
    return FeaturesDraft(model, sampling, tree, reread=tree.depth + 1)
