"""A draft that ends its proposal where a wrapped draft, such as prompt lookup, has no token.

Proposals thus differ in length. gamma can be large enough to copy a match to its end, while a round
in which no row has a match costs only one autoregressive step.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Key

from specdec_jax.core.trees import Tree, require_chain
from specdec_jax.core.types import Context, Proposal
from specdec_jax.core.wrappers import WrappedDraft
from specdec_jax.errors import InputError
from specdec_jax.models.t5 import PAD_ID


@dataclasses.dataclass(frozen=True)
class StopAtMissDraft(WrappedDraft):
  """A draft that proposes a chain, which ends before the first PAD_ID of the wrapped draft.

  The wrapped draft proposes PAD_ID where it has no token. The target forward pass is compiled for
  chains of 0, 1, 2, 4, ... and gamma draft tokens.

  Attributes:
    draft: wrapped draft, which selects its tokens deterministically.

  Raises:
    InputError: the tree is not a chain; or (in `propose`) the draft samples.
  """

  def __post_init__(self):
    require_chain("a draft that stops at a miss", self.draft.tree)

  @property
  def tree(self) -> Tree:  # type: ignore[override]
    tree = require_chain("a draft that stops at a miss", self.draft.tree)
    powers = (2**i for i in range(tree.depth.bit_length()))
    lengths = (0, *(n for n in powers if n < tree.depth), tree.depth)
    return dataclasses.replace(tree, verify_lengths=lengths)

  def propose(
    self, params: Any, state: Any, context: Context, rng: Key[Array, " B"]
  ) -> tuple[Proposal, Any]:
    proposal, state = self.draft.propose(params, state, context, rng)
    if proposal.q is not None:
      raise InputError("A draft that stops at a miss must select its tokens, and this one samples.")
    before_miss = jnp.cumprod(proposal.tokens != PAD_ID, axis=1) > 0
    return Proposal(jnp.where(before_miss, proposal.tokens, -1)), state
