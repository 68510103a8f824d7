"""Realignment: rejected draft tokens are proposed again after the correction (arXiv 2507.18181).

In SpecASR, a rejection discards the draft tokens after the rejected one. The source of an
encoder-decoder determines most of the text, so these tokens are often right after the correction.
They are proposed once more in the next round, as a second branch of its tree.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather, take
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, Tree, chain, require_chain
from specdec_jax.core.types import (
  FILLER,
  DraftOptions,
  DraftSpec,
  Keys,
  Loaded,
  LoadsDraft,
  Outcome,
  Proposal,
  WrappedDraft,
)
from specdec_jax.drafts.composed import rereading
from specdec_jax.drafts.several import concatenated, joined_at_root, require_joinable
from specdec_jax.errors import require_count


def realigned_draft(
  target: Loaded, draft: LoadsDraft, num_realigned: int | None = None
) -> DraftSpec:
  """Return a draft that also proposes the rest of the rejected proposal before it (SpecASR).

  `num_realigned` is at most, and by default, gamma - 1: the tokens that may follow a rejected one.
  """
  if num_realigned is not None:
    require_count("num_realigned", num_realigned)
  spec = draft(target)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> RealignedDraft:
    rest = tree.depth - 1
    count = rest if num_realigned is None else min(num_realigned, rest)
    draft = spec.build(sampling, tree, rereading(options, tree.depth + 1))
    return RealignedDraft(draft, count, len(target.vocabulary))

  return dataclasses.replace(spec, name=f"{spec.name}, realigned", build=build, path=None)


class RealignedState(NamedTuple):
  """State of the wrapped draft, and the tokens of the last round to propose again, or FILLER."""

  draft: Any
  realigned: Int[Array, "B realigned"]


@dataclasses.dataclass(frozen=True)
class RealignedDraft(WrappedDraft):
  """A draft that proposes the chain of a wrapped draft and the rest of the chain before it.

  Its tree has two branches: the chain of the wrapped draft, and the realigned tokens (`realign`).
  Realigned tokens are selected deterministically. Like the drafts of a `ForestDraft`, the wrapped
  draft does not receive the outcome of verification, so its `DraftOptions.reread` covers the tokens
  that a round may commit.

  Attributes:
    num_realigned: maximum number of realigned tokens; at most gamma - 1 tokens follow a rejected
      one.
  """

  num_realigned: int
  vocab_size: int
  depends_on_outcomes = True
  independent_siblings = False

  def __post_init__(self):
    require_chain("a draft that realigns tokens", self.draft.tree)
    require_joinable(self.draft)
    require_count("num_realigned", self.num_realigned, 0)

  @property
  def tree(self) -> Tree:  # type: ignore[override]
    return self._tree_and_order[0]

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> RealignedState:
    realigned = jnp.full((len(context.tokens), self.num_realigned), FILLER, jnp.int32)
    return RealignedState(self.draft.init(params, context, hidden), realigned)

  def propose(
    self, params: Any, state: RealignedState, context: Context, rng: Keys
  ) -> tuple[Proposal, RealignedState]:
    proposal, draft_state = self.draft.propose(params, state.draft, context, rng)
    tokens, q = concatenated((proposal, Proposal(state.realigned)), self.vocab_size)
    order = self._tree_and_order[1]
    joined = Proposal(take(tokens, order), None if q is None else take(q, order))
    return joined, state._replace(draft=draft_state)

  def observe(self, params: Any, state: RealignedState, outcome: Outcome) -> RealignedState:
    nodes = np.argsort(self._tree_and_order[1])[: self.draft.tree.depth]
    previous, n = take(outcome.proposal.tokens, nodes), outcome.verification.num_accepted
    realigned = realign(previous, n, outcome.verification.next_token, self.num_realigned)
    return state._replace(realigned=realigned)

  @property
  def _tree_and_order(self) -> tuple[Tree, list[int]]:
    return joined_at_root([chain(self.draft.tree.depth), chain(self.num_realigned)])


def realign(
  chain_tokens: Int[Array, "B gamma"],
  num_accepted: Int[Array, " B"],
  correction: Int[Array, " B"],
  count: int,
) -> Int[Array, "B count"]:
  """Return up to `count` tokens of a chain that may follow the text after a round, then FILLER.

  The round emitted n tokens and then the correction, which replaces token n + 1 of the chain. If
  the correction occurs later in the chain, the tokens between them are taken to be superfluous, and
  the result starts after its first occurrence. Otherwise it starts with token n + 2.
  """
  gamma = chain_tokens.shape[1]
  is_correction = chain_tokens == correction[:, None]
  is_correction &= jnp.arange(gamma)[None] >= num_accepted[:, None]
  replaced = jnp.where(is_correction.any(axis=1), is_correction.argmax(axis=1), num_accepted)
  padded = jnp.pad(chain_tokens, ((0, 0), (0, 1)), constant_values=FILLER)
  return gather(padded, jnp.minimum(replaced[:, None] + 1 + jnp.arange(count)[None], gamma))
