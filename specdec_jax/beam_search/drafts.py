"""Drafts of a beam search. What they guess decides how many steps a pass of the target makes,
never which.

Axes: B batch, w beams, u nodes of a level, G guesses, D depth.
"""

import abc
import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.beam_search.entries import child, of
from specdec_jax.beam_search.forest import BeamContext, Forest
from specdec_jax.beam_search.layout import PlacedNodes, move, own_slots, put
from specdec_jax.core.trees import Tree
from specdec_jax.core.types import Context, Draft, Model
from specdec_jax.errors import InputError, require_count


@runtime_checkable
class ModelBasedDraft(Protocol):
  """Draft whose tokens come from one model; what `ModelBeamDraft` needs of `drafts.ModelDraft`."""

  @property
  def model(self) -> Model: ...
  @property
  def tree(self) -> Tree: ...

  def init(self, params: Any, context: Context, hidden: Array) -> Any:
    """See `Draft.init`."""

  def condition(
    self, params: Any, cache: Any, hidden: Array, offsets: Array | int, slot: Array
  ) -> Any:
    """See `ModelDraft.condition`."""


class BeamDraft(abc.ABC):
  """Proposes a forest a round. Frozen and hashable: parameters and state are arguments.

  Attributes:
    depth: D, the most guesses on a path.
  """

  depth: int

  @abc.abstractmethod
  def num_guesses(self, width: int) -> int:
    """G, for so many beams."""

  def num_nodes(self, width: int) -> int:
    """N, that a pass of the target reads of the newest tokens and the guesses: by default all."""
    return width + self.num_guesses(width)

  def init(self, params: Any, context: Context, hidden: Array) -> Any:
    """The state before the first round, as `Draft.start` has it; by default there is none."""
    return ()

  @abc.abstractmethod
  def propose(self, params: Any, state: Any, context: BeamContext) -> tuple[Forest, Any]:
    """Guesses after the live beams, and the state."""

  def observe(self, state: Any, context: BeamContext, path: Array, slot: Array) -> Any:
    """The state after a round that began with `context`: nodes `path` [B, D w], w a step, have come
    to stand, and the next newest tokens go to `slot` [B]. By default as it was."""
    return state


@dataclasses.dataclass(frozen=True)
class NullBeamDraft(BeamDraft):
  """Guesses nothing: plain beam search."""

  depth: int = 0

  def num_guesses(self, width: int) -> int:
    return 0

  def propose(self, params: Any, state: Any, context: BeamContext) -> tuple[Forest, Any]:
    none = jnp.zeros((len(context.newest), 0), jnp.int32)
    return Forest(none, none, none), state


@dataclasses.dataclass(frozen=True)
class ModelBeamDraft(BeamDraft):
  """A model searches ahead by beams of its own, from the live ones and their log-probabilities.

  Behind what the target has read already it goes by what that said there, so that of beams all but
  one of which were among the guesses only that one's future is uncertain. It does not read its last
  level: what of that comes to stand it reads in the next round, before the newest tokens.

  Attributes:
    draft: M_q, as it guesses a chain of gamma, its steps.
    width: u, its beams.
    nodes: N, that a pass of the target reads at most; None for as many as there can be.
  """

  draft: ModelBasedDraft
  width: int
  nodes: int | None = None
  depth: int = dataclasses.field(init=False)

  def __post_init__(self):
    require_count("draft_beams", self.width)
    object.__setattr__(self, "depth", self.draft.tree.depth)

  def num_guesses(self, width: int) -> int:
    if self.width < width:
      raise InputError(
        f"The draft has {self.width} beams and the search {width}, all of which must be among them "
        "for a step to be saved; give the draft as many at least."
      )
    vocab_size = self.draft.model.vocab_size
    if self.width > vocab_size:
      raise InputError(
        f"The draft has {self.width} beams, more than the {vocab_size} tokens of its vocabulary; "
        "give it fewer."
      )
    return self.width * self.depth

  def num_nodes(self, width: int) -> int:
    most = super().num_nodes(width)
    if self.nodes is None:
      return most
    require_count("nodes", self.nodes)
    if self.nodes < width:
      raise InputError(
        f"A pass reads {self.nodes} nodes, fewer than the search has beams ({width}), whose newest "
        "tokens it must read; let it read as many at least."
      )
    return min(self.nodes, most)

  def init(self, params: Any, context: Context, hidden: Array) -> Any:
    return self.draft.init(params, context, hidden)

  def propose(self, params: Any, state: Any, context: BeamContext) -> tuple[Forest, Any]:
    width, num_slots = context.newest.shape[1], context.seen.shape[2]
    at = context.length[:, None] - 1  # where the newest stand
    model, hidden = self.draft.model, context.hidden
    cache = self.draft.condition(params, state, hidden, 0, context.slot)
    cache = model.commit(cache, context.slot - width)
    tokens, sums, above, known = context.newest, context.log_probs, 0, context.known
    seen = context.seen | own_slots(context.slot, width, num_slots)
    block = jnp.concatenate([context.before, tokens], axis=1)
    sees = jnp.concatenate([context.seen_before, seen], axis=1)
    stands = jnp.repeat(jnp.concatenate([at - 1, at], axis=1), width, axis=1)
    places, levels, read = put(context.places, stands, context.slot - width), [], 0
    for level in range(self.depth):
      placed = PlacedNodes(stands, places, sees)
      logits, _, cache = model.extend(params, cache, block, placed, read)
      read += block.shape[1]
      log_probs = jax.nn.log_softmax(logits[:, -tokens.shape[1] :].astype(jnp.float32))
      log_probs = log_probs.at[..., context.eos_id].set(-jnp.inf)
      more = lax.top_k(sums[..., None] + log_probs, min(self.width, log_probs.shape[2]))
      more = as_target_has_it(context, known, *more)
      parents, tokens, sums = likeliest(*more, self.width)
      known = child(context.kept, of(known, parents), tokens)
      levels.append((tokens, above + parents, known))
      above = read - width  # number of the node that the next level begins with
      slot = context.slot + above
      hidden = of(hidden, parents)
      cache = self.draft.condition(params, cache, hidden, level + 1, slot)
      seen = jnp.take_along_axis(seen, parents[..., None], axis=1)
      seen |= own_slots(slot, self.width, num_slots)
      block, sees, stands = tokens, seen, jnp.repeat(at + level + 1, self.width, axis=1)
      places = put(places, stands, slot)
    return Forest(*(jnp.concatenate(each, axis=1) for each in zip(*levels))), cache

  def observe(self, state: Any, context: BeamContext, path: Array, slot: Array) -> Any:
    model, width = self.draft.model, context.newest.shape[1]
    behind_newest = model.commit(state, context.slot + width)
    return model.commit(move(model, behind_newest, path - width), slot)


@dataclasses.dataclass(frozen=True)
class TreeBeamDraft(BeamDraft):
  """Any draft that keeps nothing from round to round: a tree of its guesses for each beam.

  Of the target's cache it may read what that holds of a source, and not the text, which is laid out
  for beams (`layout`).

  Attributes:
    draft: of one text; at temperature 0.

  Raises:
    InputError: (when a search begins) the draft keeps a state.
  """

  draft: Draft
  depth: int = dataclasses.field(init=False)

  def __post_init__(self):
    object.__setattr__(self, "depth", self.draft.tree.depth)

  def num_guesses(self, width: int) -> int:
    return width * self.draft.tree.num_guesses

  def propose(self, params: Any, state: Any, context: BeamContext) -> tuple[Forest, Any]:
    batch, width = context.newest.shape
    each = lambda x: jnp.repeat(x, width, axis=0)
    flat = lambda x: x.reshape(batch * width, *x.shape[2:])
    of_beams = Context(
      prompt=each(context.prompt),
      tokens=flat(context.tokens),
      length=each(context.length),
      target_cache=jax.tree.map(each, context.target_cache),
      hidden=flat(context.hidden),
    )
    kept = self.draft.init(params, of_beams, of_beams.hidden[:, None])
    if jax.tree.leaves(kept):
      raise InputError(
        f"{type(self.draft).__name__} keeps a state for each text, and beams change places; give a "
        "beam search a model as draft, or one that keeps none (n-grams, copies)."
      )
    keys = jax.random.split(jax.random.key(0), batch * width)
    proposal, _ = self.draft.propose(params, kept, of_beams, keys)
    shape: Any = proposal.tree or self.draft.tree
    above = jnp.broadcast_to(jnp.asarray(shape.parents, jnp.int32), proposal.tokens.shape)
    above, beam = above.reshape(batch, width, -1), jnp.arange(width)[:, None]
    parents = jnp.where(above == 0, beam, width + beam * above.shape[2] + above - 1)
    tokens, parents = proposal.tokens.reshape(batch, -1), parents.reshape(batch, -1)
    known = jnp.full(tokens.shape, -1)
    for _ in range(self.depth):  # who follows is known only if whom it follows is
      of_nodes = jnp.concatenate([context.known, known], axis=1)
      known = child(context.kept, of(of_nodes, parents), tokens)
    return Forest(tokens, parents, known), state


def as_target_has_it(
  context: BeamContext, known: Array, sums: Array, tokens: Array
) -> tuple[Array, Array]:
  """Log-probabilities and tokens [B, n, k or 2w] of continuations: those of a draft, [B, n, k], and
  of nodes with an entry `known` [B, n] the target's, less EOS."""
  kept = context.kept
  size = max(sums.shape[2], kept.sums.shape[2])
  wide = lambda x, fill: jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2])), constant_values=fill)
  at = jnp.maximum(known, 0)
  token = wide(of(kept.continuations, at), 0)
  exact = jnp.where(token == context.eos_id, -jnp.inf, wide(of(kept.sums, at), -jnp.inf))
  is_known = (known >= 0)[..., None]
  return jnp.where(is_known, exact, wide(sums, -jnp.inf)), jnp.where(
    is_known, token, wide(tokens, 0)
  )


def likeliest(sums: Array, tokens: Array, count: int) -> tuple[Array, Array, Array]:
  """Of continuations [B, n, k] the `count` best of each row: node, token (-1 if there are not as
  many) and sum, [B, count]."""
  flat = lambda x: x.reshape(len(x), -1)
  best, at = lax.top_k(flat(sums), count)
  tokens = jnp.take_along_axis(flat(tokens), at, axis=1)
  return at // sums.shape[2], jnp.where(best > -jnp.inf, tokens, -1), best
