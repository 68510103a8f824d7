"""Several drafts as one: branches of one tree, one after another, or one chosen in each round.

Parameters, and the states of the drafts, are tuples with one entry per draft, in order. The drafts
do not receive the outcome of verification, because accepted tokens may be of a different draft.
Instead, drafts with a cache process all tokens that the last round may have committed at its start
(`DraftOptions.reread`). Except for a `FallbackDraft`, the drafts must not depend on outcomes or
stop early.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, Key

from specdec_jax.core.arrays import gather, split_rows
from specdec_jax.core.context import Context
from specdec_jax.core.trees import AnyTree, Tree, chain, require_chain, require_static
from specdec_jax.core.types import Draft, Outcome, Proposal
from specdec_jax.errors import InputError
from specdec_jax.models.t5 import PAD_ID


@dataclasses.dataclass(frozen=True)
class ForestDraft(Draft):
  """A draft whose tree joins the static trees of several drafts at a common root (SpecInfer).

  A special case is multi-draft speculative sampling, with several chains of one draft, each sampled
  with its own key. Equal tokens of two drafts remain two nodes, each with the q of its own draft,
  and the nodes are verified in the order of the drafts. `core.verify.merging.MergingVerifier`
  continues equal tokens of several drafts as one node. It would not be exact to leave out one of
  the nodes (`tests/test_verifiers.py`).
  """

  drafts: tuple[Draft, ...]
  vocab_size: int
  tree: Tree = dataclasses.field(init=False)

  def __post_init__(self):
    for draft in self.drafts:
      require_joinable(draft)
    object.__setattr__(self, "tree", joined_at_root(self._trees)[0])

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    each = zip(self.drafts, params, strict=True)
    return tuple(d.init(p, context, hidden) for d, p in each)

  def propose(
    self, params: Any, state: Any, context: Context, rng: Key[Array, " B"]
  ) -> tuple[Proposal, Any]:
    keys = split_rows(rng, len(self.drafts))
    each = zip(self.drafts, params, state, keys, strict=True)
    proposals, states = zip(*(d.propose(p, s, context, key) for d, p, s, key in each))
    tokens, q = concatenated(proposals, self.vocab_size)
    order = jnp.array(joined_at_root(self._trees)[1])
    return Proposal(tokens[:, order], None if q is None else q[:, order]), states

  @property
  def _trees(self) -> list[Tree]:
    return [require_static("merging drafts", draft.tree) for draft in self.drafts]


@dataclasses.dataclass(frozen=True)
class CascadeDraft(Draft):
  """A draft that proposes a chain: each of several drafts continues the tokens of the previous one.

  Verification seldom reaches tokens far from the last committed one, so a cheaper draft suffices
  for them (the horizontal cascade of Chen et al., 2024). The tokens that are new to a draft include
  those of the drafts before it.
  """

  drafts: tuple[Draft, ...]
  vocab_size: int
  tree: Tree = dataclasses.field(init=False)

  def __post_init__(self):
    for draft in self.drafts:
      require_chain("a draft of a cascade", draft.tree)
      require_joinable(draft)
    object.__setattr__(self, "tree", chain(sum(draft.tree.depth for draft in self.drafts)))

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    return tuple(d.init(p, context, hidden) for d, p in zip(self.drafts, params))

  def propose(
    self, params: Any, state: Any, context: Context, rng: Key[Array, " B"]
  ) -> tuple[Proposal, Any]:
    keys = split_rows(rng, len(self.drafts))
    proposals, states = [], []
    for draft, draft_params, draft_state, key in zip(self.drafts, params, state, keys):
      proposal, draft_state = draft.propose(draft_params, draft_state, context, key)
      proposals.append(proposal)
      states.append(draft_state)
      context = context.with_tokens(proposal.tokens)
    tokens, q = concatenated(proposals, self.vocab_size)
    return Proposal(tokens, q), tuple(states)


@dataclasses.dataclass(frozen=True)
class FallbackDraft(Draft):
  """A draft that uses, in each row, the first of its drafts that proposes a token.

  A draft proposes nothing if its first token is PAD_ID. If all drafts propose nothing, the last one
  is used. The drafts have equal static trees and select their tokens deterministically.
  """

  drafts: tuple[Draft, ...]
  tree: AnyTree = dataclasses.field(init=False)

  def __post_init__(self):
    if len({draft.tree for draft in self.drafts}) != 1:
      raise InputError("The drafts to choose from need equal trees.")
    object.__setattr__(self, "tree", self.drafts[0].tree)

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    return tuple(d.init(p, context, hidden) for d, p in zip(self.drafts, params, strict=True))

  def propose(
    self, params: Any, state: Any, context: Context, rng: Key[Array, " B"]
  ) -> tuple[Proposal, Any]:
    each = zip(self.drafts, params, state, strict=True)
    proposals, states = zip(*(d.propose(p, s, context, rng) for d, p, s in each))
    if any(proposal.q is not None for proposal in proposals):
      raise InputError("One of the drafts to choose from samples; all must select their tokens.")
    *earlier, tokens = (proposal.tokens for proposal in proposals)
    for earlier_tokens in reversed(earlier):
      tokens = jnp.where(earlier_tokens[:, :1] == PAD_ID, tokens, earlier_tokens)
    return Proposal(tokens), states


class ChoiceState(NamedTuple):
  """State of a `FastestDraft`.

  Attributes:
    inner: states of the drafts.
    accepted: for each draft, number of its draft tokens that were accepted; old rounds count less.
    rejected: number of those that were rejected.
    idle: number of rounds since each draft was last chosen.
  """

  inner: tuple[Any, ...]
  accepted: Float[Array, "B drafts"]
  rejected: Float[Array, "B drafts"]
  idle: Int[Array, "B drafts"]


@dataclasses.dataclass(frozen=True)
class FastestDraft(Draft):
  """A draft that uses, in each row and round, its draft with the highest expected speed.

  The expected speed is (1 + alpha + ... + alpha^gamma) / (gamma c + 1) (Theorem 8), with a running
  estimate of alpha for each draft. The choice depends on earlier rounds only, never on the tokens
  of its own round, so decoding is exact. A draft that no row has chosen does not run.

  Attributes:
    drafts: drafts that propose chains of the same length.
    late_drafts: the same drafts, which process the tokens of `most_idle` + 1 rounds at the start of
      a round. They take over the state of a draft that was not chosen in the last round.
    alphas: estimate of alpha of each draft at the start of a text, which counts like
      `prior_tokens` draft tokens.
    costs: c of each draft.
    memory: weight of the counts of earlier rounds after a round with the draft.
    patience: number of rounds after which a draft that was not chosen is tried again.
  """

  drafts: tuple[Draft, ...]
  late_drafts: tuple[Draft, ...]
  alphas: tuple[float, ...]
  costs: tuple[float, ...]
  vocab_size: int
  prior_tokens: float = 5.0
  memory: float = 0.9
  patience: int = 8
  tree: Tree = dataclasses.field(init=False)
  depends_on_outcomes = True

  def __post_init__(self):
    if len({len(self.drafts), len(self.alphas), len(self.costs)}) != 1:
      raise InputError("Each of the drafts to choose from needs an alpha and a cost.")
    for draft in self.drafts:
      require_joinable(draft)
    if len({draft.tree for draft in self.drafts}) != 1:
      raise InputError("The drafts to choose from need equal trees.")
    tree = require_chain("a choice by expected speed", self.drafts[0].tree)
    object.__setattr__(self, "tree", tree)

  @property
  def most_idle(self) -> int:
    """Maximum number of rounds in which a draft is not chosen."""
    return self.patience + len(self.drafts) - 2  # one draft is tried in each round

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> ChoiceState:
    inner = tuple(d.init(p, context, hidden) for d, p in zip(self.drafts, params, strict=True))
    ones = jnp.ones((len(context.tokens), 1))
    accepted = self.prior_tokens * jnp.array(self.alphas) * ones
    idle = jnp.ones(accepted.shape, jnp.int32)
    return ChoiceState(inner, accepted, self.prior_tokens - accepted, idle)

  def speeds(self, state: ChoiceState) -> Float[Array, "B drafts"]:
    """Return the expected speed of each draft; one that waits to be tried again comes first."""
    alpha = state.accepted / (state.accepted + state.rejected)
    gamma = self.tree.depth
    num_tokens = (alpha[..., None] ** jnp.arange(gamma + 1)).sum(axis=-1)
    speed = num_tokens / (gamma * jnp.array(self.costs) + 1)
    return jnp.where(state.idle >= self.patience, jnp.inf, speed)

  def propose(
    self, params: Any, state: ChoiceState, context: Context, rng: Key[Array, " B"]
  ) -> tuple[Proposal, ChoiceState]:
    choice = self.speeds(state).argmax(axis=1)
    is_chosen = choice[:, None] == jnp.arange(len(self.drafts))
    proposals, inner = [], []
    for i, draft_state in enumerate(state.inner):

      def run(draft: Draft, draft_state: Any, draft_params: Any = params[i]):
        return draft.propose(draft_params, draft_state, context, rng)

      on_time, late = (functools.partial(run, ds[i]) for ds in (self.drafts, self.late_drafts))
      shapes, _ = jax.eval_shape(on_time, draft_state)
      nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
      skip = functools.partial(lambda nothing, draft_state: (nothing, draft_state), nothing)
      is_late = (state.idle[:, i] > 0).all()  # a draft runs for all rows, or for none
      branch = jnp.where(is_chosen[:, i].any(), 1 + is_late, 0)
      proposal, draft_state = lax.switch(branch, [skip, on_time, late], draft_state)
      proposals.append(proposal)
      inner.append(draft_state)
    tokens, q = concatenated(proposals, self.vocab_size)
    gamma = self.tree.depth
    slots = choice[:, None] * gamma + jnp.arange(gamma)
    proposal = jax.tree.map(lambda x: gather(x, slots), Proposal(tokens, q))
    idle = jnp.where(is_chosen, 0, state.idle + 1)
    return proposal, state._replace(inner=tuple(inner), idle=idle)

  def observe(self, params: Any, state: ChoiceState, outcome: Outcome) -> ChoiceState:
    emitted = outcome.num_emitted
    accepted = jnp.minimum(outcome.verification.num_accepted, emitted)
    rejected = (accepted < self.tree.depth) & (emitted == accepted + 1)

    def added(count: Array, of_round: Array) -> Array:
      new = self.memory * count + of_round[:, None]
      return jnp.where(state.idle == 0, new, count)  # idle is 0 for the draft of this round

    return state._replace(
      accepted=added(state.accepted, accepted), rejected=added(state.rejected, rejected)
    )


def require_joinable(draft: Draft) -> None:
  """Raise InputError if a draft cannot propose together with others."""
  if draft.tree.verify_lengths or draft.depends_on_outcomes:
    raise InputError(
      f"{type(draft).__name__} stops early or depends on outcomes of its rounds, and cannot be one "
      "of several drafts."
    )


def concatenated(
  proposals: Sequence[Proposal], vocab_size: int
) -> tuple[Int[Array, "B N"], Float[Array, "B N V"] | None]:
  """Concatenate the tokens and the q of all proposals.

  q is None if all tokens are selected deterministically; if only some are, theirs are one-hots.
  """
  tokens = jnp.concatenate([proposal.tokens for proposal in proposals], axis=1)
  if all(proposal.q is None for proposal in proposals):
    return tokens, None
  q = [jax.nn.one_hot(p.tokens, vocab_size) if p.q is None else p.q for p in proposals]
  return tokens, jnp.concatenate(q, axis=1)


def joined_at_root(trees: Sequence[Tree]) -> tuple[Tree, list[int]]:
  """Join several trees at their roots.

  Also return the index of each draft token in the concatenated draft tokens of the given trees.
  """
  paths, first = [], 0
  for tree in trees:
    tree_paths = [np.flatnonzero(row)[1:] for row in tree.ancestors[1:]]
    paths += [tuple((first + path - 1).tolist()) for path in tree_paths]
    first += tree.num_draft_tokens
  paths.sort(key=lambda path: (len(path), path))  # level order, siblings adjacent
  node = {(): 0} | {path: i for i, path in enumerate(paths, 1)}
  return Tree([node[path[:-1]] for path in paths]), [path[-1] for path in paths]
