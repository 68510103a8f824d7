"""In each round, the draft of the highest expected speed (Section 6)."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, Tree, require_chain
from specdec_jax.core.types import (
  Draft,
  DraftOptions,
  DraftSpec,
  Keys,
  Loaded,
  LoadsDraft,
  Outcome,
  Proposal,
)
from specdec_jax.drafts.composed import joined_spec, rereading
from specdec_jax.drafts.several import concatenated, require_joinable
from specdec_jax.errors import InputError


def fastest_draft(
  target: Loaded,
  drafts: Sequence[LoadsDraft],
  alphas: Sequence[float],
  costs: Sequence[float],
) -> DraftSpec:
  """Return a draft that uses, in each round, the draft with the highest expected speed (Section 6).

  Args:
    drafts: drafts to choose from.
    alphas: estimate of alpha of each draft at the start of a text.
    costs: cost ratio c of each draft, as `specdec speedup` measures it.
  """
  specs = [draft(target) for draft in drafts]

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> FastestDraft:
    def built(num_rounds: int) -> tuple[Draft, ...]:
      count = num_rounds * (tree.depth + 1)
      return tuple(spec.build(sampling, tree, rereading(options, count)) for spec in specs)

    draft = FastestDraft(built(1), built(1), tuple(alphas), tuple(costs), len(target.vocabulary))
    return dataclasses.replace(draft, late_drafts=built(draft.most_idle + 1))

  name = "fastest of " + ", ".join(spec.name for spec in specs)
  return joined_spec(name, build, specs)


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
    ones = jnp.ones((len(context.tokens), 1), jnp.float32)
    accepted = self.prior_tokens * jnp.array([self.alphas], jnp.float32) * ones
    idle = jnp.ones(accepted.shape, jnp.int32)
    return ChoiceState(inner, accepted, self.prior_tokens - accepted, idle)

  def speeds(self, state: ChoiceState) -> Float[Array, "B drafts"]:
    """Return the expected speed of each draft; one that waits to be tried again comes first."""
    alpha = state.accepted / (state.accepted + state.rejected)
    gamma = self.tree.depth
    num_tokens = (alpha[..., None] ** jnp.arange(gamma + 1)[None, None]).sum(axis=-1)
    speed = num_tokens / (gamma * jnp.array([self.costs], jnp.float32) + 1)
    return jnp.where(state.idle >= self.patience, jnp.inf, speed)

  def propose(
    self, params: Any, state: ChoiceState, context: Context, rng: Keys
  ) -> tuple[Proposal, ChoiceState]:
    choice = self.speeds(state).argmax(axis=1)
    is_chosen = choice[:, None] == jnp.arange(len(self.drafts))[None]
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
    slots = choice[:, None] * gamma + jnp.arange(gamma)[None]
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
