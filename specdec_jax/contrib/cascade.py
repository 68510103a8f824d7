"""A cascade: drafts in sequence, usually from expensive to cheap (Chen et al., 2024)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import Array
from jaxtyping import Float

from specdec_jax.core.arrays import split_rows
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, Tree, chain, require_chain
from specdec_jax.core.types import (
  Draft,
  DraftOptions,
  DraftSpec,
  Keys,
  Loaded,
  LoadsDraft,
  Proposal,
)
from specdec_jax.drafts.composed import joined_spec, rereading
from specdec_jax.drafts.several import concatenated, require_joinable
from specdec_jax.errors import InputError, require_count


def cascade_draft(
  target: Loaded, drafts: Sequence[LoadsDraft], first_gammas: Sequence[int]
) -> DraftSpec:
  """Return a draft that runs several drafts in sequence, usually from expensive to cheap.

  Args:
    drafts: drafts in the order in which they propose.
    first_gammas: number of draft tokens of each draft except the last one, which proposes the rest.
  """
  if len(first_gammas) != len(drafts) - 1:
    raise InputError(
      f"There are {len(drafts)} drafts in a row and {len(first_gammas)} gammas; give one gamma for "
      "each draft except the last, which proposes the rest."
    )
  for gamma in first_gammas:
    require_count("gamma", gamma)
  specs = [draft(target) for draft in drafts]

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> CascadeDraft:
    require_chain("a cascade", tree)
    built, missing = [], tree.depth
    for spec, gamma in zip(specs, (*first_gammas, tree.depth)):
      if missing:
        # A draft has not processed what a round commits, nor the tokens of the drafts before it.
        reread = tree.depth + 1 + tree.depth - missing
        part = chain(min(gamma, missing))
        built.append(spec.build(sampling, part, rereading(options, reread)))
        missing -= part.depth
    return CascadeDraft(tuple(built), len(target.vocabulary))

  name = ", then ".join(spec.name for spec in specs)
  return joined_spec(name, build, specs)


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

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    keys = split_rows(rng, len(self.drafts))
    proposals, states = [], []
    for draft, draft_params, draft_state, key in zip(self.drafts, params, state, keys):
      proposal, draft_state = draft.propose(draft_params, draft_state, context, key)
      proposals.append(proposal)
      states.append(draft_state)
      context = context.with_tokens(proposal.tokens)
    tokens, q = concatenated(proposals, self.vocab_size)
    return Proposal(tokens, q), tuple(states)
