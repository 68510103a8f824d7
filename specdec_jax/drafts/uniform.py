"""Guesses at random, each token as likely as another: the floor of all drafts (Section 3.6)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specdec_jax.core.trees import AnyTree, require_static
from specdec_jax.core.types import Context, Draft, DraftFactory, LoadedTarget, Proposal


def uniform(target: LoadedTarget) -> DraftFactory:
  """The draft for a vocabulary."""
  size = len(target.vocabulary)
  return DraftFactory("uniform", lambda sampling, tree: UniformDraft(size, tree))


@dataclasses.dataclass(frozen=True)
class UniformDraft(Draft):
  """Draws each guess from all tokens alike, at any temperature; siblings independently.

  Attributes:
    vocab_size: V.
    tree: of any one shape.
  """

  vocab_size: int
  tree: AnyTree

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    num_guesses = require_static("guessing at random", self.tree).num_guesses
    draw = lambda key: jax.random.randint(key, (num_guesses,), 0, self.vocab_size)
    tokens = jax.vmap(draw)(rng)
    return Proposal(tokens, jnp.full((*tokens.shape, self.vocab_size), 1 / self.vocab_size)), state
