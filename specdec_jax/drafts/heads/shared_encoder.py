"""Small decoders that attend to the target's encoding of the source, and to its hidden states.

The decoder has token embeddings and a cache of the text, but no encoder. Its layers attend to the
cross-attention keys and values of the target's last layers. There are two kinds, which differ in
the vector that is added to the embedding of a token, its conditioning:

  conditioned  a projection of the target's hidden state at the start of the round that processes
               the token, plus an embedding of the number of tokens since then (the offset)
  features     the same in the round of the token; once it is committed, a projection of the state
               from which the target predicted it

In 'features', the next round computes the keys and values of the last round's tokens again. In
EAGLE (Li et al., 2024), too, each committed token is read together with the target's state before
it, its feature. `contrib.eagle_text` has two further kinds.

Axis letters are those of `core.types`; d is the width of the head, and M the number of hidden
states (K or 1).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int, Key

from specdec_jax.core.arrays import expanded, gather, write_slots
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree, NodeLayout, NodePlacement
from specdec_jax.core.types import (
  Draft,
  DraftOptions,
  Extended,
  First,
  Keys,
  Length,
  Outcome,
  Path,
  Proposal,
  Tokens,
)
from specdec_jax.drafts.dynamic import DynamicDraft
from specdec_jax.drafts.heads.base import (
  DraftHead,
  TargetOutputs,
  TrainingLogits,
  every_position,
  target_cache,
)
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError
from specdec_jax.models.config import T5Config, TransformerConfig
from specdec_jax.models.decoder import KeysValues, empty_slots
from specdec_jax.models.families import Config
from specdec_jax.models.layers import Dense, norm
from specdec_jax.models.layout import Layout
from specdec_jax.models.t5 import T5, T5Model
from specdec_jax.models.transformer import Cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedEncoderHead(DraftHead):
  """Decoder that uses the target's encoder; see the module docstring.

  Attributes:
    layers: decoder layers of the target, ascending, whose concatenated outputs are the hidden
      states (EAGLE-3; Li et al., 2025). By default they are the states after the final norm.
    offsets: number of offsets, from 0, that have an embedding; larger ones share the last.
    table_tokens: number of tokens that have logits, if token embeddings and logits are those of the
      target's table; the parameter `output_tokens` has their ids. The head is then as wide as the
      target, and its file holds its layers only. None for a table of its own.
  """

  kind: str = "conditioned"
  layers: tuple[int, ...] = ()
  offsets: int = 8
  table_tokens: int | None = None
  needs_encoder = True
  uses_cross_attention = True

  @property
  def reads_features(self) -> bool:
    """Return whether committed tokens are conditioned on the states that predicted them."""
    return self.kind == "features"

  @property
  def feature_layers(self) -> tuple[int, ...]:
    return self.layers

  @property
  def t5(self) -> T5Config:
    config = super().t5
    count = self.table_tokens
    return config if count is None else dataclasses.replace(config, num_output_tokens=count)

  @property
  def module(self) -> "SharedEncoderT5":
    return SharedEncoderT5(self.t5, head=self)

  def init(self, rng: Key[Array, ""]) -> Any:
    source, bias = self.example_source()
    tokens, cross = jnp.zeros((1, 1), jnp.int32), (source,) * self.num_decoder_layers
    hidden = jnp.zeros((1, 1, self.state_dim), jnp.float32)
    inputs = tokens, hidden, tokens, cross, bias
    params = self.module.init(rng, *inputs, method="after_each")["params"]
    if self.table_tokens is not None:
      del params["token_embedder"]
      logits = params["decoder"]["logits_dense"]
      params["decoder"]["logits_dense"] = {"output_tokens": logits["output_tokens"]}
    return params

  def draft_params(self, target: Config, params: Any, target_params: Any) -> Any:
    if self.table_tokens is None:
      return params
    embedder, decoder = target_params["token_embedder"], params["decoder"]
    kernel = embedder["embedding"][decoder["logits_dense"]["output_tokens"]].T
    logits = {"kernel": kernel}
    if self.layout != Layout(dtype=self.layout.dtype):
      kernel = np.asarray(kernel)
      logits = {"kernel": jnp.asarray(self.layout.matrix(kernel))}
      if self.layout.is_quantized:
        logits["kernel_scale"] = jnp.asarray(self.layout.scales(kernel))
    decoder = decoder | {"logits_dense": decoder["logits_dense"] | logits}
    return params | {"token_embedder": embedder, "decoder": decoder}

  def require_target(self, target: TransformerConfig) -> None:
    super().require_target(target)
    if self.table_tokens is not None and self.emb_dim != target.emb_dim:
      raise InputError(
        f"emb_dim is {self.emb_dim}, and a head with the target's table is as wide as it, "
        f"{target.emb_dim}."
      )

  def draft(
    self, target: Config, sampling: Sampling, tree: AnyTree, options: DraftOptions
  ) -> Draft:
    model = SharedEncoderModel(self.t5, self)
    if self.reads_features and isinstance(tree, DynamicTree):
      return DynamicSharedEncoderDraft(model, tree, min(8, self.vocab_size), options)
    return SharedEncoderDraft(model, sampling, self.require_static(tree), options)

  def training_logits(
    self, params: Any, target: Config, target_params: Any, outputs: TargetOutputs, stride: int
  ) -> TrainingLogits:
    """Return the logits at each token, conditioned on its anchor.

    The anchor of a token is the last anchor at or before it, or the first token. In validation,
    every `stride`-th token is an anchor. In training, each token is an anchor with probability 1 /
    `stride`, because rounds have many lengths.
    """
    shape = outputs.inputs.shape
    positions = jnp.arange(shape[1])
    is_anchor = jnp.broadcast_to(positions % stride == 0, shape)
    if outputs.rng is not None:
      is_anchor = jax.random.bernoulli(outputs.rng, 1 / stride, shape)
    anchors = lax.cummax(jnp.where(is_anchor, positions, 0), axis=1)
    logits = self.after_each(self.draft_params(target, params, target_params), outputs, anchors)
    return TrainingLogits(logits[:, :, None], every_position(outputs.inputs))

  def after_each(self, params: Any, outputs: TargetOutputs, anchors: Int[Array, "B T"]) -> Any:
    """Return what the module's `after_each` returns for the outputs of the target."""
    cross, bias = outputs.cache.cross[-self.num_decoder_layers :], outputs.cache.cross_bias
    inputs = outputs.inputs, outputs.hidden, anchors, cross, bias
    return self.module.apply({"params": params}, *inputs, method="after_each")


class SharedEncoderT5(T5):
  """T5 whose decoder is a draft head; its encoder is never used."""

  head: Any = None  # a SharedEncoderHead; fields of a subclass need defaults

  def setup(self):
    super().setup()
    cfg, head = self.config, self.head
    self.state_norm, self.state = norm(cfg), Dense(cfg, cfg.emb_dim)
    # "age" is the name of the embedding of offsets in checkpoints.
    shape = head.offsets, cfg.emb_dim
    self.age = self.param("age", jax.nn.initializers.normal(1.0), shape, jnp.float32)

  def condition(
    self, hidden: Float[Array, "*batch E"], offsets: Int[Array, "*offsets"] | int
  ) -> Float[Array, "*tokens d"]:
    """Return the conditioning by target states, and by offsets from the start of the round."""
    embedded = self.age[jnp.minimum(offsets, len(self.age) - 1)].astype(
      self.config.layout.activations
    )
    state = self.state(self.state_norm(hidden))
    return state + expanded(embedded, state)

  def after_each(
    self,
    inputs: Int[Array, "B T"],
    hidden: Float[Array, "B T E"],
    anchors: Int[Array, "B T"],
    cross: tuple[KeysValues, ...],
    cross_bias: Float[Array, "B 1 1 S"],
  ) -> Any:
    """Return the teacher-forced logits [B, T, V] after each input.

    The target predicted each input from the state in `hidden`. `anchors` are the positions of the
    last committed token in the round that processes each input.
    """
    x, embedding = self.token_embedder(inputs), self.token_embedder.embedding
    offsets = jnp.arange(inputs.shape[1])[None] - anchors
    in_round = x + self.condition(gather(hidden, anchors), offsets)
    if not self.head.reads_features:
      return self.decoder(in_round, embedding, cross, cross_bias)[0]
    both = jnp.concatenate([x + self.condition(hidden, 0), in_round], axis=1)
    _, own, _ = self.decoder(both, embedding, cross, cross_bias, tree=place_rounds(anchors))
    return self.decoder.logits(own[:, inputs.shape[1] :], embedding)

  def extend(
    self, cache: Any, tokens: Tokens, tree: NodeLayout | None = None, first: First = 0
  ) -> Extended:
    x = self.token_embedder(tokens)

    def read_row(row: Float[Array, "T d"], slot: Int[Array, ""]) -> Float[Array, "K d"]:
      return lax.dynamic_slice_in_dim(row, slot, tokens.shape[1])

    x = x + jax.vmap(read_row)(cache.conditioning, cache.length + first)
    return self.extend_embedded(cache, x, tree, first)


def place_rounds(anchors: Int[Array, "B T"]) -> NodePlacement:
  """Return the placement of a block that holds each token twice: committed, and in its round.

  A committed token attends to the committed tokens up to itself. A token in its round attends to
  the committed tokens before the round, and to the tokens of the round up to itself. The first
  token of a round, at its anchor, is the last committed one.
  """
  batch, text = anchors.shape
  position = jnp.arange(text)
  not_after = (position[None] <= position[:, None])[None]
  start = anchors[:, :, None]
  before_round = position[None, None] < start
  same_round = not_after & (anchors[:, None] == start)
  committed = jnp.broadcast_to(not_after, same_round.shape)
  positions = jnp.broadcast_to(jnp.tile(position, 2), (batch, 2 * text))
  visible = jnp.block([[committed, jnp.zeros_like(committed)], [before_round, same_round]])
  return NodePlacement(positions, positions, visible)


@struct.dataclass
class SharedEncoderCache(Cache):
  """Cache with the target's `cross`; `conditioning` is that of the token in each slot."""

  conditioning: Any = None  # [B, T, d]; fields of a subclass need defaults

  def repeat_rows(self, count: int) -> "SharedEncoderCache":
    conditioning = jnp.repeat(self.conditioning, count, axis=0)
    return super().repeat_rows(count).replace(conditioning=conditioning)


@dataclasses.dataclass(frozen=True)
class SharedEncoderModel(T5Model):
  """Draft model with the decoder of a draft head."""

  head: SharedEncoderHead

  def empty_cache(self, context: Context, num_slots: int) -> SharedEncoderCache:
    """Return a cache without tokens, which holds the source as encoded by the target."""
    config, cache, batch = self.config, target_cache(context), len(context.tokens)
    return SharedEncoderCache(
      length=jnp.zeros(batch, jnp.int32),
      layers=empty_slots(config, batch, num_slots),
      cross=cache.cross[-config.num_decoder_layers :],
      cross_bias=cache.cross_bias,
      conditioning=jnp.zeros((batch, num_slots, config.emb_dim), config.layout.activations),
    )

  def condition(
    self,
    params: Any,
    cache: SharedEncoderCache,
    hidden: Float[Array, "B M E"],
    offsets: Int[Array, " K"] | int,
    slot: Int[Array, " B"],
  ) -> SharedEncoderCache:
    """Write to the cache the conditioning of the next tokens; see `ModelDraft.condition`."""
    new = self.head.module.apply({"params": params}, hidden, offsets, method="condition")
    return with_conditioning(cache, new, slot)

  def extend(
    self, params: Any, cache: Any, tokens: Tokens, tree: NodeLayout | None = None, first: First = 0
  ) -> Extended:
    return self.head.module.apply({"params": params}, cache, tokens, tree, first, method="extend")

  def condition_on_features(
    self, params: Any, cache: SharedEncoderCache, outcome: Outcome
  ) -> SharedEncoderCache:
    """Write the conditioning of the tokens that a round committed, if the head reads features."""
    if not self.head.reads_features:
      return cache
    hidden, path = outcome.hidden, outcome.verification.path
    if path is not None:
      hidden = gather(hidden, jnp.pad(path, ((0, 0), (1, 0))))
    return self.condition(params, cache, hidden, 0, outcome.length - outcome.num_emitted)

  def commit(
    self, cache: Any, length: Length, tree: AnyTree | None = None, path: Path = None
  ) -> Any:
    committed = super().commit(cache, length, tree, path)
    if path is None:
      return committed
    moved = gather(cache.conditioning, cache.length[:, None] + path)
    return with_conditioning(committed, moved, cache.length + 1)


def with_conditioning(
  cache: SharedEncoderCache, new: Float[Array, "B M d"], slot: Int[Array, " B"]
) -> SharedEncoderCache:
  """Write the conditioning of M tokens from a slot on."""
  written = write_slots(cache.conditioning[:, None], new[:, None], slot)[:, 0]
  return cache.replace(conditioning=written)


@dataclasses.dataclass(frozen=True)
class SharedEncoderDraft(ModelDraft):
  """A draft that samples a chain or a static tree from the decoder of a draft head."""

  model: SharedEncoderModel

  @property
  def reread(self) -> int:
    # The tokens of a round are processed again with the features that it reveals.
    most = self.tree.depth + 1 if self.model.head.reads_features else 0
    return max(self.options.reread, most)

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    cache = self.model.empty_cache(context, context.tokens.shape[1])
    if hidden.shape[1] == 1:
      return cache
    # Before a transcript there are several tokens; each is conditioned as at the start of a round.
    states = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    cache = self.model.condition(params, cache, states, 0, cache.length)
    cache = self.model.extend(params, cache, context.tokens[:, : hidden.shape[1]])[2]
    return self.model.commit(cache, context.length - 1)

  def condition(
    self,
    params: Any,
    cache: Any,
    hidden: Float[Array, "B M E"],
    offsets: Int[Array, " K"] | int,
    slot: Int[Array, " B"],
  ) -> Any:
    return self.model.condition(params, cache, hidden, offsets, slot)

  def start_round(
    self, params: Any, state: Any, context: Context
  ) -> tuple[Float[Array, "B V"], Any]:
    hidden, slot = context.hidden[:, None], context.length - 1
    state = self.model.condition(params, state, hidden, jnp.asarray(self.tree.depths), slot)
    return super().start_round(params, state, context)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    state = super().observe(params, state, outcome)
    return self.model.condition_on_features(params, state, outcome)


@dataclasses.dataclass(frozen=True)
class DynamicSharedEncoderDraft(DynamicDraft):
  """A draft that proposes dynamic trees with the decoder of a draft head of kind 'features'."""

  model: SharedEncoderModel

  @property
  def reread(self) -> int:
    return max(self.options.reread, self.tree.depth + 1)

  def empty_cache(self, params: Any, context: Context, num_slots: int) -> Cache:
    return self.model.empty_cache(context, num_slots)

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    cache, processed = state
    # The processed nodes: the last committed token, then `width` nodes per level.
    offsets = jnp.array([0, *np.repeat(np.arange(1, self.tree.depth), self.width)])
    hidden, slot = context.hidden[:, None], context.length - 1
    cache = self.model.condition(params, cache, hidden, offsets, slot)
    return super().propose(params, (cache, processed), context, rng)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    cache, processed = super().observe(params, state, outcome)
    return self.model.condition_on_features(params, cache, outcome), processed
