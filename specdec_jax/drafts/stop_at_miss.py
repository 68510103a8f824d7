"""A draft that proposes only the tokens that another draft has, to the end of a match."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, Tree, require_chain
from specdec_jax.core.types import (
  FILLER,
  DraftOptions,
  DraftSpec,
  Keys,
  Loaded,
  LoadsDraft,
  Proposal,
  WrappedDraft,
)
from specdec_jax.errors import InputError


def stop_at_miss_draft(target: Loaded, draft: LoadsDraft) -> DraftSpec:
  """Return a draft that ends its proposal where `draft` has no token (`StopAtMissDraft`).

  gamma is the maximum number of draft tokens. `draft` selects its tokens deterministically.
  """
  spec = draft(target)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> StopAtMissDraft:
    return StopAtMissDraft(spec.build(sampling, tree, options))

  return dataclasses.replace(spec, name=f"{spec.name}, as far as known", build=build, path=None)


@dataclasses.dataclass(frozen=True)
class StopAtMissDraft(WrappedDraft):
  """A draft that proposes a chain, which ends before the first FILLER of the wrapped draft.

  The wrapped draft, such as prompt lookup, proposes FILLER where it has no token, and must not
  sample. So gamma can be large enough to copy a match to its end, while a round in which no row has
  a match costs only one autoregressive step. The target forward pass is compiled for chains of 0,
  1, 2, 4, ... and gamma draft tokens.
  """

  def __post_init__(self):
    require_chain("a draft that stops at a miss", self.draft.tree)

  @property
  def tree(self) -> Tree:  # type: ignore[override]
    tree = require_chain("a draft that stops at a miss", self.draft.tree)
    powers = (2**i for i in range(tree.depth.bit_length()))
    lengths = (0, *(n for n in powers if n < tree.depth), tree.depth)
    return dataclasses.replace(tree, verify_lengths=lengths)

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    proposal, state = self.draft.propose(params, state, context, rng)
    if proposal.q is not None:
      raise InputError("A draft that stops at a miss must select its tokens, and this one samples.")
    before_miss = jnp.cumprod(proposal.tokens != FILLER, axis=1) > 0
    return Proposal(jnp.where(before_miss, proposal.tokens, -1)), state
