"""Several drafts in sequence: one proposes the first tokens, and cheaper ones propose the rest.

Verification seldom reaches tokens far from the last committed one, so a cheaper draft suffices for
them (the horizontal cascade of Chen et al., 2024).
"""

import dataclasses
from typing import Any

from jax import Array
from jaxtyping import Float, Key

from specdec_jax.core.arrays import split_rows
from specdec_jax.core.trees import Tree, chain, require_chain
from specdec_jax.core.types import Context, Draft, Proposal
from specdec_jax.drafts.forest import concatenated, require_joinable


@dataclasses.dataclass(frozen=True)
class CascadeDraft(Draft):
  """A draft that proposes a chain: each of several drafts continues the tokens of the previous one.

  Parameters and states are tuples with one entry per draft, in order. The drafts do not receive the
  outcome of verification.

  Attributes:
    drafts: one or more drafts, whose trees are chains. Their `DraftOptions.reread` covers the
      tokens that a round may commit, and the draft tokens of the drafts before them.
    vocab_size: size of the vocabulary, V.

  Raises:
    InputError: there are no drafts, a tree is not a chain, or a draft cannot be joined
      (`require_joinable`).
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
