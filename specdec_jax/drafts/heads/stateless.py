"""Draft heads without a cache: Medusa, EAGLE without attention to the text, the parallel head.

They draft level by level from the target's hidden state at the start of the round, which
verification has already computed (`Context.hidden`), and from the last committed token. If the
target has an encoder, they may also use its cross-attention keys and values of the source.

Axis letters are those of `core.types`; M is the number of nodes of a level, d the width of the head
or of its states, and d_out that of the states that a step returns.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Float, Int, Key

from specdec_jax.core.arrays import gather, take
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree
from specdec_jax.core.types import Draft, DraftOptions, Keys, Proposal
from specdec_jax.drafts.dynamic import grow, require_candidates
from specdec_jax.drafts.heads.base import (
  DraftHead,
  Source,
  TargetOutputs,
  TrainingLogits,
  gather_positions,
  require_depth,
  round_positions,
  target_cache,
)
from specdec_jax.drafts.model import draft_tree
from specdec_jax.models.families import Config, module_of
from specdec_jax.models.layers import Attention, Dense, Mlp, norm

WIDTH = 8  # see `SpeculatorDraft`


class StatelessModule(nn.Module):
  """Flax module of a draft head without a cache."""

  config: "StatelessHead"

  @abc.abstractmethod
  def begin(
    self,
    hidden: Float[Array, "B E"],
    last_token: Int[Array, " B"],
    depth: int,
    source: Source,
    project: Callable[[Array], Array],
  ) -> tuple[Any, Float[Array, "B 1 d"]]:
    """Return the plan (values that are computed once per round) and the initial state.

    `depth` is the number of consecutive draft tokens that will be proposed. `project` maps hidden
    states [..., E] to the target's logits [..., V].
    """

  @abc.abstractmethod
  def step(
    self,
    plan: Any,
    state: Float[Array, "B M d"],
    level: int,
    previous: Int[Array, "B M"],
    source: Source,
  ) -> tuple[Float[Array, "B M V"], Float[Array, "B M d_out"]]:
    """Return the logits of the token after each of M nodes of a level, and the state after each.

    `state` is that after each node's parent; at level 0 it is that from `begin`.
    """

  def __call__(
    self,
    hidden: Float[Array, "B E"],
    previous: Int[Array, "B N"],
    source: Source,
    project: Callable[[Array], Array],
  ) -> Float[Array, "B N V"]:
    """Return teacher-forced logits; `previous` starts with the last committed token."""
    plan, state = self.begin(hidden, previous[:, 0], previous.shape[1], source, project)
    level_logits = []
    for level in range(previous.shape[1]):
      logits, state = self.step(plan, state, level, previous[:, level, None], source)
      level_logits.append(logits)
    return jnp.concatenate(level_logits, axis=1)


class ResidualBlocks(nn.Module):
  """One residual block per future position, applied to a hidden state of the target."""

  config: DraftHead
  num_positions: int = 1

  @nn.compact
  def __call__(self, hidden: Float[Array, "*batch E"]) -> Float[Array, "*batch N E"]:
    width = self.num_positions * self.config.state_dim
    update = nn.silu(Dense(self.config, width)(norm(self.config)(hidden)))
    # The update is scaled to the size of the state, which depends on the target's final norm.
    scale = jnp.sqrt(jnp.mean(jnp.square(hidden), axis=-1))[..., None, None]
    update = update.reshape(*hidden.shape[:-1], self.num_positions, -1)
    return hidden[..., None, :] + scale * update


class SourceLayer(nn.Module):
  """Layer with attention to the source, if there is one, and a feed-forward block."""

  config: DraftHead

  @nn.compact
  def __call__(self, x: Float[Array, "B M d"], source: Source) -> Float[Array, "B M d"]:
    if source[0] is not None:
      attention = Attention(self.config, name="encoder_decoder_attention")
      x = x + attention.to_source(norm(self.config)(x), *source)
    return x + Mlp(self.config, name="mlp")(norm(self.config)(x))


@dataclasses.dataclass(frozen=True)
class SpeculatorDraft(Draft):
  """A draft that proposes level by level with a head without a cache.

  Its parameters are (parameters of the head, the target's parameters that its logits need). For a
  dynamic tree, WIDTH nodes per level are processed, with WIDTH candidate children each.
  """

  head: Any
  sampling: Sampling
  tree: AnyTree
  options: DraftOptions
  target: Config

  def __post_init__(self):
    if not self.head.any_depth:
      require_depth(self.head.gamma, self.tree.depth)
    if isinstance(self.tree, DynamicTree):
      require_candidates(self.tree, self.width)

  @property
  def width(self) -> int:
    """Number of nodes per level of a dynamic tree, and of their children that are candidates."""
    return min(WIDTH, self.head.vocab_size)

  @property
  def independent_siblings(self) -> bool:  # type: ignore[override]
    return self.options.independent_siblings and isinstance(self.tree, Tree)

  def propose_levels(
    self,
    step: Callable[[Array, int, Array], tuple[Array, Array]],
    states: Float[Array, "B 1 d"],
    context: Context,
    rng: Keys,
  ) -> Proposal:
    """Propose the tree, one level at a time.

    `step` is a function of (states [B, M, d] after the parents of M nodes, level, tokens [B, M] of
    the nodes). It returns the logits [B, M, V] of the token after each node, and the state after
    each node. The level is the depth of the nodes: 0 for the last committed token.
    """
    select: Callable[..., Array] = gather if isinstance(self.tree, DynamicTree) else take

    def extend_level(states: Array, tokens: Array, parents: Any, level: int, tree: AnyTree):
      return step(select(states, parents), level, tokens)

    logits, states = step(states, 0, context.last_token[:, None])
    if isinstance(self.tree, DynamicTree):
      processors = self.options.processors
      inputs = logits[:, 0], extend_level, states, context, processors
      return grow(self.tree, self.width, *inputs)[0]
    return draft_tree(self, logits, extend_level, states, context, rng)[0]

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    source = source_of(self.head, context)
    module, variables = self.head.module, {"params": params[0]}
    plan, states = module.apply(
      variables,
      context.hidden,
      context.last_token,
      self.tree.depth,
      source,
      projection(self.target, params[1]),
      method="begin",
    )

    def step(
      states: Array, level: int, previous: Int[Array, "B M"]
    ) -> tuple[Float[Array, "B M V"], Array]:
      return module.apply(variables, plan, states, level, previous, source, method="step")

    return self.propose_levels(step, states, context, rng), state


def projection(target: Config, params: Any) -> Callable[[Array], Array]:
  """Return the function from hidden states [..., E] to the logits [..., V] of a target."""
  return functools.partial(module_of(target).apply, {"params": params}, method="logits")


def source_of(head: DraftHead, context: Context) -> Source:
  """Return keys, values and bias of the target's last cross-attention layer, or (None, None)."""
  cache = target_cache(context)
  return (cache.cross[-1], cache.cross_bias) if head.has_encoder else (None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatelessHead(DraftHead):
  """Draft head without a cache, defined by the Flax module `module_class`.

  Attributes:
    gamma: number of consecutive draft tokens that the head is trained for.
    any_depth: whether the head can propose more than `gamma` consecutive draft tokens.
  """

  any_depth: ClassVar[bool] = False
  module_class: ClassVar[type[StatelessModule]]

  gamma: int = 8

  @property
  def module(self) -> StatelessModule:
    return self.module_class(self)

  def init(self, rng: Key[Array, ""]) -> Any:
    hidden, tokens = jnp.zeros((1, self.state_dim)), jnp.zeros((1, self.gamma), jnp.int32)
    source = self.example_source() if self.has_encoder else (None, None)

    def project(x: Float[Array, "*batch E"]) -> Float[Array, "*batch V"]:
      return jnp.zeros((*x.shape[:-1], self.vocab_size), jnp.float32)

    return self.module.init(rng, hidden, tokens, source, project)["params"]

  def draft(
    self, target: Config, sampling: Sampling, tree: AnyTree, options: DraftOptions
  ) -> SpeculatorDraft:
    return SpeculatorDraft(self, sampling, tree, options, target)

  def draft_params(self, target: Config, params: Any, target_params: Any) -> Any:
    if not self.uses_target_logits:
      return params, ()
    decoder = {k: x for k, x in target_params["decoder"].items() if not k.startswith("layers_")}
    return params, {"token_embedder": target_params["token_embedder"], "decoder": decoder}

  def training_logits(
    self, params: Any, target: Config, target_params: Any, outputs: TargetOutputs, stride: int
  ) -> TrainingLogits:
    """Return the logits of the draft tokens after each anchor, from its hidden state."""
    positions = round_positions(outputs.inputs, outputs.rng, stride, self.gamma)

    def repeat_for_anchors(x: Array) -> Array:
      return jnp.repeat(x, positions.shape[1], axis=0)

    def merge_anchors(x: Array) -> Array:
      return x.reshape(-1, *x.shape[2:])  # [B, A, ...] -> [B A, ...]

    source: tuple[Any, Any] = None, None
    if self.has_encoder:
      cross = outputs.cache.cross[-1], outputs.cache.cross_bias
      source = jax.tree.map(repeat_for_anchors, cross)
    hidden = gather_positions(outputs.hidden, positions[..., :1])[:, :, 0]
    previous = gather_positions(outputs.inputs, positions)
    inputs = merge_anchors(hidden), merge_anchors(previous), source
    project = projection(target, target_params)
    logits = self.module.apply({"params": params}, *inputs, project)
    return TrainingLogits(logits.reshape(*positions.shape, -1), positions)
