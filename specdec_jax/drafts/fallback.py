"""Fallback between drafts, such as from prompt lookup to n-grams."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Key

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import Context, Draft, DraftSpec, Loaded, Proposal
from specdec_jax.drafts.backoff import backoff_ngrams
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.errors import InputError
from specdec_jax.models.t5 import PAD_ID


def prompt_lookup_or_ngrams(
  target: Loaded, path: str, max_ngram: int = 3, order: int = 4
) -> DraftSpec:
  """Return a draft that uses prompt lookup and falls back to n-grams with back-off.

  The arguments are those of `prompt_lookup` and `backoff_ngrams`.
  """
  factories = prompt_lookup(target, max_ngram), backoff_ngrams(target, path, order)

  def build(sampling: Sampling, tree: AnyTree) -> FallbackDraft:
    return FallbackDraft(tuple(factory.build(sampling, tree) for factory in factories))

  name = "-or-".join(factory.name for factory in factories)
  return DraftSpec(name, build, tuple(factory.params for factory in factories))


@dataclasses.dataclass(frozen=True)
class FallbackDraft(Draft):
  """A draft that uses, in each row, the first of its drafts that proposes a token.

  A draft proposes nothing if its first token is PAD_ID. If all drafts propose nothing, the last one
  is used. Parameters and states are tuples with one entry per draft, in order. The drafts do not
  receive the outcome of verification.

  Attributes:
    drafts: drafts with equal static trees, in order of preference. They select their tokens
      deterministically.

  Raises:
    InputError: there are no drafts, their trees differ, or (in `propose`) one of them samples.
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
