"""Non-autoregressive draft with its own encoder (Spec-Drafter; Xia et al., 2023).

The head is a small T5. In each round, one pass of its decoder covers the tokens that the last round
committed, and then gamma placeholders: learned embeddings, one for each position after the text,
whose logits are those of the token at that position. The placeholders attend to the committed text,
to the source and to each other, in both directions. Given the text, the draft tokens are
independent of each other. Committed tokens attend only to earlier tokens, so their keys and values
are cached.

Training uses glancing targets (GLAT; Qian et al., 2021). After a first prediction, the embeddings
of some target tokens, more if there are more errors, are added to their placeholders, and the head
learns to predict the tokens of the other placeholders.

Axis letters are those of `core.types`, except that T counts target tokens in training and N counts
placeholders per anchor (gamma). A is the number of anchors per text, and d the width of the head.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from specdec_jax.core.arrays import gather
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, NodePlacement
from specdec_jax.core.types import DraftOptions, Keys, Proposal
from specdec_jax.drafts.heads.base import (
  DraftHead,
  TargetOutputs,
  TrainingLogits,
  gather_positions,
  round_positions,
)
from specdec_jax.drafts.heads.stateless import SpeculatorDraft
from specdec_jax.models.decoder import KeysValues
from specdec_jax.models.families import Config
from specdec_jax.models.t5 import T5, T5Model
from specdec_jax.models.transformer import Cache

# Number of target tokens that are shown in training, relative to the number of wrong tokens in the
# first prediction: at the start and at the end of training, as in GLAT.
GLANCING_RATIO = 0.5, 0.3


@dataclasses.dataclass(frozen=True, eq=False)
class PlaceholdersLayout:
  """Layout of a block that holds tokens of the text, and then the placeholders of some rounds.

  A token attends to the tokens up to itself. A placeholder attends to the tokens up to the anchor
  of its round, the last committed token, and to all placeholders of its round.
  """

  num_tokens: int
  anchors: Int[Array, "B A"]
  gamma: int

  def place(
    self, length: Int[Array, " B"], first: Any, num_nodes: int, num_slots: int
  ) -> NodePlacement:
    token_positions = length[:, None] + jnp.arange(self.num_tokens)[None]
    anchors = jnp.repeat(self.anchors, self.gamma, axis=1)  # [B, A N], that of each placeholder
    rounds, offsets = jnp.divmod(jnp.arange(anchors.shape[1])[None], self.gamma)
    positions = anchors + 1 + offsets
    slots = jnp.arange(num_slots)[None]
    # For each slot of the cache, the index of its placeholder; negative for a token.
    index = slots - token_positions[:, -1:] - 1  # [B, num_slots]
    key_positions = gather(positions, jnp.clip(index, 0, anchors.shape[1] - 1))
    is_committed = slots[None] <= anchors[..., None]
    same_round = (index // self.gamma)[:, None] == rounds[..., None]
    visible = [slots[None] <= token_positions[..., None], is_committed | same_round]
    return NodePlacement(
      jnp.concatenate([token_positions, positions], axis=1),
      jnp.where(index < 0, slots, key_positions),
      jnp.concatenate(visible, axis=1),
    )


class DrafterT5(T5):
  """T5 whose decoder predicts the tokens of gamma placeholders after the text."""

  gamma: int = 1

  def setup(self):
    super().setup()
    shape = self.gamma, self.config.emb_dim
    self.places = self.param("places", nn.initializers.normal(1.0), shape, jnp.float32)

  def after_anchors(
    self,
    source: Int[Array, "B S"],
    inputs: Int[Array, "B T"],
    anchors: Int[Array, "B A"],
    shown: Int[Array, "B A N"] | None = None,
  ) -> Float[Array, "B A N V"]:
    """Return the logits of the placeholders of rounds whose last committed tokens are at `anchors`.

    `shown` are tokens whose embeddings are added to the placeholders; -1 for none.
    """
    cross, cross_bias = self.encode(source)
    empty = Cache(jnp.zeros(len(inputs), jnp.int32), (), cross, cross_bias)
    hidden, _ = self._run(empty, inputs, anchors, shown)
    return self.logits(hidden.reshape(*anchors.shape, self.gamma, -1))

  def next_logits(
    self, cache: Cache, tokens: Int[Array, "B K"], length: Int[Array, " B"], depth: int
  ) -> tuple[Float[Array, "B D V"], Cache]:
    """Return the logits of the next `depth` tokens, and the cache with the given tokens.

    `tokens` start at position `cache.length`; those from position `length` on are ignored.
    """
    hidden, layers = self._run(cache, tokens, length[:, None] - 1)
    return self.logits(hidden[:, :depth]), cache.replace(layers=layers)

  def _run(
    self,
    cache: Cache,
    tokens: Int[Array, "B K"],
    anchors: Int[Array, "B A"],
    shown: Int[Array, "B A N"] | None = None,
  ) -> tuple[Float[Array, "B AN d"], tuple[KeysValues, ...]]:
    """Return the hidden states of all placeholders, and the keys and values of each layer.

    A cache without layers is not written to.
    """
    batch, num_tokens = tokens.shape
    x, embedding = self.token_embedder(tokens), self.token_embedder.embedding
    shape = *anchors.shape, *self.places.shape
    placeholders = jnp.broadcast_to(self.places.astype(x.dtype), shape)
    if shown is not None:
      embedded = self.token_embedder(jnp.maximum(shown, 0))
      placeholders = placeholders + jnp.where(shown[..., None] >= 0, embedded, 0)
    x = jnp.concatenate([x, placeholders.reshape(batch, -1, x.shape[-1])], axis=1)
    layout = PlaceholdersLayout(num_tokens, anchors, self.gamma)
    cached, length = cache.layers or None, cache.length
    _, hidden, layers = self.decoder(
      x, embedding, cache.cross, cache.cross_bias, cached, length, layout
    )
    return hidden[:, num_tokens:], layers


@dataclasses.dataclass(frozen=True)
class DrafterDraft(SpeculatorDraft):
  """A draft that predicts all draft tokens in one pass.

  All nodes of one depth of the tree have the logits of the same placeholder. The pass covers all
  placeholders that the head was trained with, because they attend to each other. The parameters are
  those of the head, and the state is its cache.
  """

  @property
  def reread(self) -> int:
    """Number of committed tokens in the pass, which covers those that a round may commit."""
    return max(self.options.reread, self.tree.depth + 1)

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Cache:
    # The slots in `context` suffice for the proposed tree; there may be more placeholders.
    num_slots = context.tokens.shape[1] + self.head.gamma
    return T5Model(self.head.t5).prefill(params, context.prompt, num_slots)[1]

  def propose(
    self, params: Any, state: Cache, context: Context, rng: Keys
  ) -> tuple[Proposal, Cache]:
    count = min(self.reread, context.tokens.shape[1])
    start = jnp.maximum(context.length - count, 0)
    tokens = gather(context.tokens, start[:, None] + jnp.arange(count)[None])
    logits, state = self.head.module.apply(
      {"params": params},
      state.replace(length=start),
      tokens,
      context.length,
      self.tree.depth,
      method="next_logits",
    )

    def step(
      states: Float[Array, "B M 0"], level: int, previous: Int[Array, "B M"]
    ) -> tuple[Float[Array, "B M V"], Float[Array, "B M 0"]]:
      shape = *previous.shape, logits.shape[-1]
      return jnp.broadcast_to(logits[:, level, None], shape), jnp.zeros((*previous.shape, 0))

    return self.propose_levels(step, jnp.zeros((len(tokens), 1, 0)), context, rng), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterHead(DraftHead):
  """Learned draft head of Spec-Drafter, a T5 with gamma placeholders."""

  kind: str = "drafter"
  gamma: int = 8
  num_encoder_layers: int = 4
  any_depth = False
  needs_encoder = True

  @property
  def module(self) -> DrafterT5:
    return DrafterT5(self.t5, gamma=self.gamma)

  def init(self, rng: Key[Array, ""]) -> Any:
    tokens = jnp.zeros((1, 1), jnp.int32)
    return self.module.init(rng, tokens, tokens, tokens, method="after_anchors")["params"]

  def draft(
    self, target: Config, sampling: Sampling, tree: AnyTree, options: DraftOptions
  ) -> DrafterDraft:
    return DrafterDraft(self, sampling, tree, options, target)

  def training_logits(
    self, params: Any, target: Config, target_params: Any, outputs: TargetOutputs, stride: int
  ) -> TrainingLogits:
    """Return the logits of the placeholders of each anchor.

    Shown target tokens get positions past the end of the text, so they are not part of the loss.
    """

    def logits_of(shown: Int[Array, "B A N"] | None) -> Float[Array, "B A N V"]:
      source, inputs, anchors = outputs.source, outputs.inputs, positions[..., 0]
      variables = {"params": params}
      return self.module.apply(variables, source, inputs, anchors, shown, method="after_anchors")

    if outputs.rng is None:
      positions = round_positions(outputs.inputs, None, stride, self.gamma)
      return TrainingLogits(logits_of(None), positions)
    anchors_rng, glancing_rng = jax.random.split(outputs.rng)
    positions = round_positions(outputs.inputs, anchors_rng, stride, self.gamma)
    targets = gather_positions(outputs.targets, positions, -1)
    is_wrong = logits_of(None).argmax(axis=-1) != targets
    first, last = GLANCING_RATIO
    ratio = first + outputs.progress * (last - first)
    is_shown = tokens_to_show(glancing_rng, is_wrong, targets >= 0, ratio)
    logits = logits_of(jnp.where(is_shown, targets, -1))
    return TrainingLogits(logits, jnp.where(is_shown, outputs.inputs.shape[1], positions))


def tokens_to_show(
  rng: Key[Array, ""],
  is_wrong: Bool[Array, "B A N"],
  is_token: Bool[Array, "B A N"],
  ratio: Float[Array, ""] | float,
) -> Bool[Array, "B A N"]:
  """Select tokens at random, `ratio` times the number of wrong predictions per anchor, rounded."""
  count = jnp.round(ratio * (is_wrong & is_token).sum(axis=-1, keepdims=True))
  order = jnp.where(is_token, jax.random.uniform(rng, is_token.shape), 1.0).argsort(axis=-1)
  return order.argsort(axis=-1) < count
