"""Another draft's guesses as long as it knows any: the rounds are as long as what it found.

So a copy may be taken on to its end (aggressive decoding), and where nothing is found a round is a
plain step.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from specdec_jax.core.trees import Tree, require_chain
from specdec_jax.core.types import Context, Draft, Outcome, Proposal
from specdec_jax.errors import InputError
from specdec_jax.models.t5 import PAD_ID


@dataclasses.dataclass(frozen=True)
class StopAtMissDraft(Draft):
  """A chain of guesses that ends before the first PAD_ID, which says that a draft knows none.

  The target has a pass for no guess, one, twice as many each time, and all.

  Attributes:
    draft: draws nothing.

  Raises:
    InputError: its tree is no chain; or (in `propose`) it draws.
  """

  draft: Draft
  tree: Tree = dataclasses.field(init=False)
  widths: tuple[int, ...] = dataclasses.field(init=False)

  def __post_init__(self):
    require_chain("a draft that ends where it knows nothing", self.draft.tree)
    gamma = self.draft.tree.depth
    object.__setattr__(self, "tree", self.draft.tree)
    powers = (2**i for i in range(gamma.bit_length()))
    object.__setattr__(self, "widths", (0, *(n for n in powers if n < gamma), gamma))

  def start(self, params: Any, context: Context, hidden: Array) -> Any:
    return self.draft.start(params, context, hidden)

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    proposal, state = self.draft.propose(params, state, context, rng)
    if proposal.q is not None:
      raise InputError("A draft that ends where it knows nothing must choose its guesses.")
    known = jnp.cumprod(proposal.tokens != PAD_ID, axis=1) > 0
    return Proposal(jnp.where(known, proposal.tokens, -1)), state

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    return self.draft.observe(params, state, outcome)
