"""Non-autoregressive draft with its own encoder (Spec-Drafter; Xia et al., 2023).

The head is a small T5. In each round, one pass of its decoder covers the tokens that the last round
committed, and then gamma slots, one for each position after the text. A slot is a learned
embedding, and its logits are those of the token at its position. The slots attend to the committed
text, to the source and to each other, in both directions. Given the text, the draft tokens are
independent of each other. Committed tokens attend only to earlier tokens, so their keys and values
are cached.

Training uses glancing targets (GLAT; Qian et al., 2021). The head first predicts the tokens of all
slots. Some slots of each round then get the embedding of their target token in addition to their
own, and the head learns to predict the tokens of the other slots. There are more such slots where
the first prediction has more errors.

Axis letters are those of `core.types`, except that T counts target tokens in training and N counts
slots per anchor (gamma). A is the number of anchors per text, and d is the width of the head.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from specdec_jax.core.arrays import gather
from specdec_jax.core.processors import Processors
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, NodePlacement
from specdec_jax.core.types import Context, Proposal
from specdec_jax.drafts.heads.base import (
  DraftHead,
  DraftLogits,
  TargetOutputs,
  decoder_config,
  gather_positions,
  require_depth,
  round_positions,
)
from specdec_jax.drafts.heads.stateless import LevelwiseDraft
from specdec_jax.models.decoder import KeysValues
from specdec_jax.models.families import Config
from specdec_jax.models.t5 import T5, T5Cache, T5Model

# Number of slots whose target token is shown in training, relative to the number of wrong tokens in
# the first prediction: at the start and at the end of training, as in GLAT.
GLANCING_RATIO = 0.5, 0.3


@dataclasses.dataclass(frozen=True, eq=False)
class SlotsLayout:
  """Layout of a block that holds tokens of the text, and then the slots of one or more rounds.

  A token attends to the tokens up to itself. A slot attends to the tokens up to the anchor of its
  round, and to all slots of its round.

  Attributes:
    num_tokens: number of tokens in the block.
    anchors: position of the last committed token of each round.
    gamma: number of slots per round.
  """

  num_tokens: int
  anchors: Int[Array, "B A"]
  gamma: int

  def place(
    self, length: Int[Array, " B"], first: Any, num_nodes: int, num_slots: int
  ) -> NodePlacement:
    token_positions = length[:, None] + jnp.arange(self.num_tokens)
    slot_anchors = jnp.repeat(self.anchors, self.gamma, axis=1)  # [B, A N]
    rounds, offsets = jnp.divmod(jnp.arange(slot_anchors.shape[1]), self.gamma)
    slot_positions = slot_anchors + 1 + offsets
    cached = jnp.arange(num_slots)
    # For each entry of the cache, the index of its slot; negative for a token.
    index = cached - token_positions[:, -1:] - 1  # [B, num_slots]
    key_positions = gather(slot_positions, jnp.clip(index, 0, slot_anchors.shape[1] - 1))
    is_committed = cached <= slot_anchors[..., None]
    same_round = (index // self.gamma)[:, None] == rounds[:, None]
    visible = [cached <= token_positions[..., None], is_committed | same_round]
    return NodePlacement(
      jnp.concatenate([token_positions, slot_positions], axis=1),
      jnp.where(index < 0, cached, key_positions),
      jnp.concatenate(visible, axis=1),
    )


class DrafterT5(T5):
  """T5 whose decoder predicts the tokens of gamma slots after the text.

  Attributes:
    gamma: number of slots per round.
  """

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
    """Return the logits of the slots of rounds that start at the anchors.

    Args:
      source: source tokens.
      inputs: tokens of the text.
      anchors: position of the last committed token of each round.
      shown: token whose embedding is added to that of each slot; -1 for none.
    """
    cross, cross_bias = self.encode(source)
    empty = T5Cache(jnp.zeros(len(inputs), jnp.int32), (), cross, cross_bias)
    hidden, _ = self._run(empty, inputs, anchors, shown)
    return self.logits(hidden.reshape(*anchors.shape, self.gamma, -1))

  def next_slots(
    self, cache: T5Cache, tokens: Int[Array, "B K"], length: Int[Array, " B"], depth: int
  ) -> tuple[Float[Array, "B D V"], T5Cache]:
    """Return the logits of the first `depth` slots after the text, and the cache with the tokens.

    Args:
      cache: cache of the head.
      tokens: tokens from position `cache.length` on, which include the last committed one. Those
        past the end of the text are ignored.
      length: number of committed tokens.
      depth: number of slots whose logits are returned.
    """
    hidden, layers = self._run(cache, tokens, length[:, None] - 1)
    return self.logits(hidden[:, :depth]), cache.replace(layers=layers)

  def _run(
    self,
    cache: T5Cache,
    tokens: Int[Array, "B K"],
    anchors: Int[Array, "B A"],
    shown: Int[Array, "B A N"] | None = None,
  ) -> tuple[Float[Array, "B slots d"], tuple[KeysValues, ...]]:
    """Return the hidden states of all slots, and the keys and values of each layer.

    A cache without layers is not written to.
    """
    batch, num_tokens = tokens.shape
    x, embedding = self.token_embedder(tokens), self.token_embedder.embedding
    slots = jnp.broadcast_to(self.places.astype(x.dtype), (*anchors.shape, *self.places.shape))
    if shown is not None:
      embedded = self.token_embedder(jnp.maximum(shown, 0))
      slots = slots + jnp.where(shown[..., None] >= 0, embedded, 0)
    x = jnp.concatenate([x, slots.reshape(batch, -1, x.shape[-1])], axis=1)
    layout = SlotsLayout(num_tokens, anchors, self.gamma)
    cached, length = cache.layers or None, cache.length
    _, hidden, layers = self.decoder(
      x, embedding, cache.cross, cache.cross_bias, cached, length, layout
    )
    return hidden[:, num_tokens:], layers


@dataclasses.dataclass(frozen=True)
class DrafterDraft(LevelwiseDraft):
  """A draft that fills the slots after the text in one pass.

  All nodes of one depth of the tree have the logits of the same slot. The pass covers all slots
  that the head was trained with, because they attend to each other. The parameters are those of the
  head, and the state is its cache.

  Attributes:
    head: the head.
    sampling, tree, width, processors: see `LevelwiseDraft`.
    reread: number of committed tokens in the pass; at least the number of tokens that a round may
      commit.

  Raises:
    InputError: the tree is deeper than the head can propose, or a dynamic tree has more draft
      tokens than there are candidates.
  """

  head: "DrafterHead"
  sampling: Sampling
  tree: AnyTree
  width: int
  reread: int
  processors: Processors = ()

  def __post_init__(self):
    require_depth(self.head.config, self.tree.depth)
    super().__post_init__()

  def with_reread(self, num_tokens: int) -> "DrafterDraft":
    return dataclasses.replace(self, reread=max(self.reread, num_tokens))

  def with_processors(self, processors: Processors) -> "DrafterDraft":
    return dataclasses.replace(self, processors=processors)

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> T5Cache:
    # The slots in `context` suffice for the proposed tree; the head may have more slots.
    num_slots = context.tokens.shape[1] + self.head.config.gamma
    return T5Model(self.head.module.config).prefill(params, context.prompt, num_slots)[1]

  def propose(
    self, params: Any, state: T5Cache, context: Context, rng: Key[Array, " B"]
  ) -> tuple[Proposal, T5Cache]:
    start = jnp.maximum(context.length - self.reread, 0)
    tokens = gather(context.tokens, start[:, None] + jnp.arange(self.reread))
    logits, state = self.head.module.apply(
      {"params": params},
      state.replace(length=start),
      tokens,
      context.length,
      self.tree.depth,
      method="next_slots",
    )

    def step(
      states: Float[Array, "B M 0"], level: int, previous: Int[Array, "B M"]
    ) -> tuple[Float[Array, "B M V"], Float[Array, "B M 0"]]:
      shape = *previous.shape, logits.shape[-1]
      return jnp.broadcast_to(logits[:, level, None], shape), jnp.zeros((*previous.shape, 0))

    return self.propose_levels(step, jnp.zeros((len(tokens), 1, 0)), context, rng), state


@dataclasses.dataclass(frozen=True)
class DrafterHead(DraftHead):
  """Learned draft head that fills slots after the text in one pass (kind 'drafter')."""

  needs_encoder = True

  @property
  def module(self) -> DrafterT5:
    return DrafterT5(decoder_config(self.config), gamma=self.config.gamma)

  def init(self, rng: Key[Array, ""]) -> Any:
    tokens = jnp.zeros((1, 1), jnp.int32)
    return self.module.init(rng, tokens, tokens, tokens, method="after_anchors")["params"]

  def draft(self, target: Config, sampling: Sampling, tree: AnyTree) -> DrafterDraft:
    width = min(8, self.config.vocab_size)
    return DrafterDraft(self, sampling, tree, width, reread=tree.depth + 1)

  def training_logits(self, target: Config, stride: int) -> DraftLogits:
    """Return the function that computes the logits of the slots of each anchor.

    In training, with glancing targets, the slots whose tokens are shown have positions past the end
    of the text, so they are not part of the loss.
    """
    module = self.module

    def draft_logits(
      params: Any, frozen: Any, outputs: TargetOutputs
    ) -> tuple[Float[Array, "B A N V"], Int[Array, "B A N"]]:
      def logits_of(shown: Int[Array, "B A N"] | None) -> Float[Array, "B A N V"]:
        anchors = positions[..., 0]
        arguments = outputs.source, outputs.inputs, anchors, shown
        return module.apply({"params": params}, *arguments, method="after_anchors")

      if outputs.rng is None:
        positions = round_positions(outputs.inputs, None, stride, self.config.gamma)
        return logits_of(None), positions
      anchors_rng, glancing_rng = jax.random.split(outputs.rng)
      positions = round_positions(outputs.inputs, anchors_rng, stride, self.config.gamma)
      targets = gather_positions(outputs.targets, positions)
      is_wrong = logits_of(None).argmax(axis=-1) != targets
      first, last = GLANCING_RATIO
      ratio = first + outputs.progress * (last - first)
      is_shown = slots_to_show(glancing_rng, is_wrong, targets > 0, ratio)
      logits = logits_of(jnp.where(is_shown, targets, -1))
      return logits, jnp.where(is_shown, outputs.inputs.shape[1], positions)

    return draft_logits


def slots_to_show(
  rng: Key[Array, ""],
  is_wrong: Bool[Array, "B A N"],
  is_token: Bool[Array, "B A N"],
  ratio: Float[Array, ""] | float,
) -> Bool[Array, "B A N"]:
  """Select at random the slots whose target tokens are shown, from all slots inside the text.

  Args:
    rng: random key.
    is_wrong: whether the predicted token of a slot differs from its target token.
    is_token: whether a slot is inside the text.
    ratio: number of shown tokens of each anchor, relative to its number of wrong ones. The product
      is rounded.
  """
  count = jnp.round(ratio * (is_wrong & is_token).sum(axis=-1, keepdims=True))
  order = jnp.where(is_token, jax.random.uniform(rng, is_token.shape), 1.0).argsort(axis=-1)
  return order.argsort(axis=-1) < count
