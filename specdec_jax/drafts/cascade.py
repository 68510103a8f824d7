"""Several drafts in sequence: one proposes the first tokens, and cheaper ones propose the rest.

Verification seldom reaches tokens far from the last committed one, so a cheaper draft suffices for
them (the horizontal cascade of Chen et al., 2024).
"""

import dataclasses
import itertools
from typing import Any

from jax import Array
from jaxtyping import Float, Key

from specdec_jax.core.arrays import split_rows
from specdec_jax.core.processors import Processors
from specdec_jax.core.trees import Tree, chain, require_chain
from specdec_jax.core.types import Context, Draft, Proposal
from specdec_jax.drafts.forest import concatenated


@dataclasses.dataclass(frozen=True)
class CascadeDraft(Draft):
  """A draft that proposes a chain: each of several drafts continues the tokens of the previous one.

  Parameters and states are tuples with one entry per draft, in order. The drafts do not receive the
  outcome of verification. Instead, drafts with a cache start each round with a forward pass over
  the tokens that the last round may have committed.

  Attributes:
    drafts: one or more drafts, whose trees are chains.
    vocab_size: size of the vocabulary, V.

  Raises:
    InputError: there are no drafts, a tree is not a chain, or (in `init`) a draft may stop early.
  """

  drafts: tuple[Draft, ...]
  vocab_size: int
  tree: Tree = dataclasses.field(init=False)

  def __post_init__(self):
    for draft in self.drafts:
      require_chain("a draft of a cascade", draft.tree)
    object.__setattr__(self, "tree", chain(sum(draft.tree.depth for draft in self.drafts)))

  def with_processors(self, processors: Processors) -> "CascadeDraft":
    drafts = tuple(draft.with_processors(processors) for draft in self.drafts)
    return dataclasses.replace(self, drafts=drafts)

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    return tuple(d.init(p, context, hidden) for d, p in zip(self._rereading_drafts, params))

  def propose(
    self, params: Any, state: Any, context: Context, rng: Key[Array, " B"]
  ) -> tuple[Proposal, Any]:
    keys = split_rows(rng, len(self.drafts))
    proposals, states = [], []
    for draft, draft_params, draft_state, key in zip(self._rereading_drafts, params, state, keys):
      proposal, draft_state = draft.propose(draft_params, draft_state, context, key)
      proposals.append(proposal)
      states.append(draft_state)
      context = context.with_tokens(proposal.tokens)
    tokens, q = concatenated(proposals, self.vocab_size)
    return Proposal(tokens, q), tuple(states)

  @property
  def _rereading_drafts(self) -> list[Draft]:
    """Return the drafts, each with a first forward pass over all tokens that may be new to it.

    These are the tokens that a round commits, and the draft tokens of the drafts before it.
    """
    depths = [draft.tree.depth for draft in self.drafts]
    num_before = [0, *itertools.accumulate(depths)]
    most = self.tree.depth + 1
    return [d.with_reread(most + n) for d, n in zip(self.drafts, num_before)]
