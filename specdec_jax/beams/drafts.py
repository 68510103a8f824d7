"""Drafts for beam search.

A draft determines how many search steps are possible per target forward pass. It does not influence
the result of a step.

Axis letters are those of `beams`.
"""

import abc
import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

from specdec_jax.beams.forest import BeamContext, Forest
from specdec_jax.beams.layout import move_nodes, slot_mask, write_block
from specdec_jax.beams.verified import NO_ENTRY, find_child
from specdec_jax.core.arrays import gather
from specdec_jax.core.context import Context, Prefixes
from specdec_jax.core.processors import process
from specdec_jax.core.settings import Settings
from specdec_jax.core.trees import NodePlacement, Tree
from specdec_jax.core.types import Draft, DraftOptions, Model
from specdec_jax.errors import InputError, require_count


@runtime_checkable
class ModelBasedDraft(Protocol):
  """Protocol of drafts whose model can search, as `ModelDraft`: what `ModelBeamDraft` uses."""

  @property
  def model(self) -> Model: ...
  @property
  def tree(self) -> Tree: ...
  @property
  def options(self) -> DraftOptions: ...

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    """See `Draft.init`."""

  def condition(
    self,
    params: Any,
    cache: Any,
    hidden: Float[Array, "B K E"],
    offsets: Int[Array, " K"] | int,
    slot: Int[Array, " B"],
  ) -> Any:
    """See `ModelDraft.condition`."""


class BeamDraft(Settings, abc.ABC):
  """Draft that proposes a forest per round. It is hashable; parameters and state are arguments.

  Attributes:
    depth: D, the maximum number of draft tokens on a path.
  """

  depth: int

  @abc.abstractmethod
  def num_draft_tokens(self, num_beams: int) -> int:
    """Return N, the number of draft tokens after `num_beams` live beams."""

  def num_nodes(self, num_beams: int) -> int:
    """Return M, the maximum number of nodes per target forward pass; by default, all nodes."""
    return num_beams + self.num_draft_tokens(num_beams)

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    """Return the state of the draft before the first round; by default it is empty."""
    return ()

  @abc.abstractmethod
  def propose(self, params: Any, state: Any, context: BeamContext) -> tuple[Forest, Any]:
    """Propose tokens that follow the live beams, and return them with the new state."""

  def observe(
    self, state: Any, context: BeamContext, path: Int[Array, "B K"], slot: Int[Array, " B"]
  ) -> Any:
    """Return the state of the draft after a round; by default it does not change.

    Args:
      path: draft tokens that the steps of the round extended, as nodes of the forest: w for each of
        steps 2 to D + 1. Step 1, which extends the last tokens from before the round, is left out.
        Entries past the last step of a row are arbitrary.
      slot: slot of the first live beam's last token after the round.
    """
    return state


@dataclasses.dataclass(frozen=True)
class NullBeamDraft(BeamDraft):
  """Draft that proposes no tokens: plain beam search."""

  depth: int = 0

  def num_draft_tokens(self, num_beams: int) -> int:
    return 0

  def propose(self, params: Any, state: Any, context: BeamContext) -> tuple[Forest, Any]:
    no_tokens = jnp.zeros((len(context.last_tokens), 0), jnp.int32)
    return Forest(no_tokens, no_tokens, no_tokens), state


@dataclasses.dataclass(frozen=True)
class ModelBeamDraft(BeamDraft):
  """Draft that runs a beam search with a draft model, starting from the target's live beams.

  At nodes that the target has already verified, the search uses the target's log-probabilities.

  The draft model does not process the last level that it proposes. If tokens of that level are
  committed, the first forward pass of the next round covers them, before the last tokens.

  Attributes:
    draft: draft that proposes a chain of gamma tokens with M_q. The draft's search has gamma steps.
    num_beams: u, the number of beams of the draft.
  """

  draft: ModelBasedDraft
  num_beams: int
  max_nodes: int | None = None
  depth: int = dataclasses.field(init=False)

  def __post_init__(self):
    require_count("draft_beams", self.num_beams)
    object.__setattr__(self, "depth", self.draft.tree.depth)

  def num_draft_tokens(self, num_beams: int) -> int:
    """Return N, the number of the draft's beams times the depth."""
    if self.num_beams < num_beams:
      raise InputError(
        f"The draft has {self.num_beams} beams and the search {num_beams}, all of which must be "
        "among them for a step to be saved; give the draft at least that number."
      )
    vocab_size = self.draft.model.vocab_size
    if self.num_beams > vocab_size:
      raise InputError(
        f"The draft has {self.num_beams} beams, more than the {vocab_size} tokens of its "
        "vocabulary; give it fewer."
      )
    return self.num_beams * self.depth

  def num_nodes(self, num_beams: int) -> int:
    """Return M, the maximum number of nodes per target forward pass; it is at most `max_nodes`."""
    num_nodes = super().num_nodes(num_beams)
    if self.max_nodes is None:
      return num_nodes
    require_count("nodes", self.max_nodes)
    if self.max_nodes < num_beams:
      raise InputError(
        f"A target forward pass has {self.max_nodes} nodes, fewer than the search has beams "
        f"({num_beams}), whose last tokens it must cover; allow at least that number."
      )
    return min(self.max_nodes, num_nodes)

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    return self.draft.init(params, context, hidden)

  def propose(self, params: Any, state: Any, context: BeamContext) -> tuple[Forest, Any]:
    num_beams, num_slots = context.last_tokens.shape[1], context.visible.shape[2]
    position = context.length[:, None] - 1  # of the last tokens
    model, hidden, processors = self.draft.model, context.hidden, self.draft.options.processors
    cache = self.draft.condition(params, state, hidden, 0, context.slot)
    cache = model.commit(cache, context.slot - num_beams)
    tokens, log_probs, entries = context.last_tokens, context.log_probs, context.last_entries
    first_parent = 0  # number of the first node of the level above
    visible = context.visible | slot_mask(context.slot, num_beams, num_slots)

    # The first forward pass covers the last tokens and those of the step before.
    block = jnp.concatenate([context.previous_tokens, tokens], axis=1)
    block_visible = jnp.concatenate([context.previous_visible, visible], axis=1)
    positions = jnp.concatenate([position - 1, position], axis=1)
    positions = jnp.repeat(positions, num_beams, axis=1)
    key_positions = write_block(context.key_positions, positions, context.slot - num_beams)
    levels, num_processed, texts = [], 0, context.tokens
    for level in range(self.depth):
      # Extend: the draft's distribution after each node of the level.
      placed = NodePlacement(positions, key_positions, block_visible)
      logits, _, cache = model.extend(params, cache, block, placed, num_processed)
      num_processed += block.shape[1]
      next_log_probs = jax.nn.log_softmax(logits[:, -tokens.shape[1] :].astype(jnp.float32))
      length = context.length[:, None] + level
      if processors:
        prefixes = Prefixes(
          tokens=texts,
          length=jnp.broadcast_to(length, tokens.shape),
          prompt_length=context.start,
          limit=context.limit,
          prompt=context.prompt,
        )
        next_log_probs = process(processors, next_log_probs, prefixes)
      next_log_probs = next_log_probs.at[..., context.eos_ids].set(-jnp.inf)

      # Select: the u most probable continuations are the next level.
      text_log_probs, continuations = lax.top_k(
        log_probs[..., None] + next_log_probs, min(self.num_beams, next_log_probs.shape[2])
      )
      text_log_probs, continuations = _with_target_log_probs(
        context, entries, text_log_probs, continuations
      )
      parents, tokens, log_probs = _top_continuations(text_log_probs, continuations, self.num_beams)
      entries = find_child(context.verified, gather(entries, parents), tokens)
      levels.append(Forest(tokens, first_parent + parents, entries))
      if processors:
        is_new = jnp.arange(texts.shape[2])[None, None] == length[..., None]
        texts = jnp.where(is_new, jnp.maximum(tokens, 0)[..., None], gather(texts, parents))

      # The next forward pass covers the new level.
      first_parent = num_processed - num_beams
      slot = context.slot + first_parent
      hidden = gather(hidden, parents)
      cache = self.draft.condition(params, cache, hidden, level + 1, slot)
      visible = gather(visible, parents)
      visible |= slot_mask(slot, self.num_beams, num_slots)
      block, block_visible = tokens, visible
      positions = jnp.repeat(position + level + 1, self.num_beams, axis=1)
      key_positions = write_block(key_positions, positions, slot)
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *levels), cache

  def observe(
    self, state: Any, context: BeamContext, path: Int[Array, "B K"], slot: Int[Array, " B"]
  ) -> Any:
    model, num_beams = self.draft.model, context.last_tokens.shape[1]
    cache = move_nodes(model, state, context.slot + num_beams, path - num_beams)
    return model.commit(cache, slot)


@dataclasses.dataclass(frozen=True)
class TreeBeamDraft(BeamDraft):
  """Draft that proposes a tree after each beam, with an inner draft for temperature 0.

  Each beam is a row of the inner draft, which must have no state; otherwise `propose` raises
  InputError. The inner draft may read the encoded source in the target's cache. It is not given the
  text in that cache, which has the layout of a beam search (`layout`).
  """

  draft: Draft
  depth: int = dataclasses.field(init=False)

  def __post_init__(self):
    object.__setattr__(self, "depth", self.draft.tree.depth)

  def num_draft_tokens(self, num_beams: int) -> int:
    return num_beams * self.draft.tree.num_draft_tokens

  def propose(self, params: Any, state: Any, context: BeamContext) -> tuple[Forest, Any]:
    batch, num_beams = context.last_tokens.shape

    def repeat(x: Array) -> Array:
      return jnp.repeat(x, num_beams, axis=0)

    cache = context.target_cache
    if hasattr(cache, "layers"):
      cache = cache.replace(layers=())

    def flatten(x: Array) -> Array:
      return x.reshape(batch * num_beams, *x.shape[2:])

    # To the draft, each beam is a row.
    beam_rows = Context(
      prompt=repeat(context.prompt),
      tokens=flatten(context.tokens),
      length=repeat(context.length),
      target_cache=jax.tree.map(repeat, cache),
      hidden=flatten(context.hidden),
      prompt_length=repeat(context.start),
      limit=repeat(context.limit),
    )
    row_state = self.draft.init(params, beam_rows, beam_rows.hidden[:, None])
    if jax.tree.leaves(row_state):
      raise InputError(
        f"{type(self.draft).__name__} keeps a state for each text, and beams change places; give a "
        "beam search a model as draft, or a draft without a state (n-grams, prompt lookup)."
      )
    keys = jax.random.split(jax.random.key(0), batch * num_beams)
    proposal, _ = self.draft.propose(params, row_state, beam_rows, keys)

    # Node i of a beam's tree, from 1, is node w + beam * N + i - 1 of the forest, where N is the
    # number of draft tokens of the tree. Node 0 is the last token of the beam.
    tree: Any = proposal.tree or self.draft.tree
    in_tree = jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), proposal.tokens.shape)
    in_tree, beam = in_tree.reshape(batch, num_beams, -1), jnp.arange(num_beams)[None, :, None]
    in_forest = num_beams + beam * in_tree.shape[2] + in_tree - 1
    parents = jnp.where(in_tree == 0, beam, in_forest)
    tokens, parents = proposal.tokens.reshape(batch, -1), parents.reshape(batch, -1)
    entries = jnp.full(tokens.shape, NO_ENTRY, jnp.int32)
    for _ in range(self.depth):  # the entry of a node is found from the entry of its parent
      node_entries = jnp.concatenate([context.last_entries, entries], axis=1)
      entries = find_child(context.verified, gather(node_entries, parents), tokens)
    return Forest(tokens, parents, entries), state


def beam_draft(draft: Draft, num_beams: int, max_nodes: int | None) -> BeamDraft:
  """Return a draft for beam search: a search with its model, or else a tree after each beam.

  `draft` is for temperature 0, with a chain of gamma tokens. The other arguments are those of
  `ModelBeamDraft`.
  """
  if isinstance(draft, ModelBasedDraft):
    return ModelBeamDraft(draft, num_beams, max_nodes)
  return TreeBeamDraft(draft)


def _with_target_log_probs(
  context: BeamContext,
  entries: Int[Array, "B K"],
  log_probs: Float[Array, "B K k"],
  tokens: Int[Array, "B K k"],
) -> tuple[Float[Array, "B K top"], Int[Array, "B K top"]]:
  """Return continuations of each node: the target's if the node is verified, else the draft's.

  `top` is the larger of k and the number that the target has. The log-probability is that of the
  text, and -inf for a missing continuation, and for one of the target that is EOS.
  """
  verified = context.verified
  size = max(log_probs.shape[2], verified.log_probs.shape[2])

  def pad(x: Shaped[Array, "B K n"], value: float | int) -> Shaped[Array, "B K top"]:
    padding = (0, 0), (0, 0), (0, size - x.shape[2])
    return jnp.pad(x, padding, constant_values=value)

  index = jnp.maximum(entries, 0)
  target_tokens = pad(gather(verified.continuations, index), 0)
  is_eos = (target_tokens[..., None] == context.eos_ids[None, None, None]).any(axis=-1)
  target_log_probs = pad(gather(verified.log_probs, index), -jnp.inf)
  target_log_probs = jnp.where(is_eos, -jnp.inf, target_log_probs)
  is_verified = (entries >= 0)[..., None]
  return (
    jnp.where(is_verified, target_log_probs, pad(log_probs, -jnp.inf)),
    jnp.where(is_verified, target_tokens, pad(tokens, 0)),
  )


def _top_continuations(
  log_probs: Float[Array, "B K top"], tokens: Int[Array, "B K top"], count: int
) -> tuple[Int[Array, "B {count}"], Int[Array, "B {count}"], Float[Array, "B {count}"]]:
  """Return the `count` most probable continuations of each row.

  They are given by the index of the node before them (0 to K - 1), their token (-1 if there are
  fewer than `count`), and the log-probability of the text that ends with them.
  """
  batch = len(log_probs)
  best, index = lax.top_k(log_probs.reshape(batch, -1), count)
  best_tokens = gather(tokens.reshape(batch, -1), index)
  return index // log_probs.shape[2], jnp.where(best > -jnp.inf, best_tokens, -1), best
