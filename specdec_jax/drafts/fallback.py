"""Several drafts, of which the first that knows something guesses: copying, then n-grams."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import Context, Draft, DraftFactory, Proposal
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.drafts.backoff import backoff_ngrams
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.errors import InputError
from specdec_jax.models.t5 import PAD_ID


def prompt_lookup_or_ngrams(
  vocabulary: Vocabulary, path: str, max_ngram: int = 3, order: int = 4
) -> DraftFactory:
  """Copying from the context where a match is found, else n-grams of a text with back-off."""
  drafters = prompt_lookup(vocabulary, max_ngram), backoff_ngrams(vocabulary, path, order)

  def make(sampling, tree):
    return FallbackDraft(tuple(drafter.build(sampling, tree) for drafter in drafters))

  name = "-or-".join(drafter.name for drafter in drafters)
  return DraftFactory(name, make, tuple(drafter.params for drafter in drafters))


@dataclasses.dataclass(frozen=True)
class FallbackDraft(Draft):
  """In each row the guesses of the first draft whose first guess is not PAD_ID, which says that it
  knows none; the last one's if all say so. Parameters and states are tuples in the same order.

  Attributes:
    drafts: two or more, with trees of one shape, that draw nothing.

  Raises:
    InputError: there are none, or their trees differ; or (in `propose`) one draws.
  """

  drafts: tuple[Draft, ...]
  tree: AnyTree = dataclasses.field(init=False)

  def __post_init__(self):
    if len({draft.tree for draft in self.drafts}) != 1:
      raise InputError("The drafts to choose from need a tree of one shape.")
    object.__setattr__(self, "tree", self.drafts[0].tree)

  def start(self, params: Any, context: Context, hidden: Array) -> Any:
    return tuple(d.start(own, context, hidden) for d, own in zip(self.drafts, params, strict=True))

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    each = zip(self.drafts, params, state, strict=True)
    proposals, states = zip(*(d.propose(own, kept, context, rng) for d, own, kept in each))
    if any(made.q is not None for made in proposals):
      raise InputError("Of the drafts to choose from one draws its guesses; they must be chosen.")
    *first, tokens = (made.tokens for made in proposals)
    for made in reversed(first):
      tokens = jnp.where(made[:, :1] == PAD_ID, tokens, made)
    return Proposal(tokens), states
