"""Uniformly random draft tokens: the simplest possible draft (Section 3.6)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Key

from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, require_static
from specdec_jax.core.types import Draft, DraftOptions, DraftSpec, Keys, Loaded, Proposal


def uniform(target: Loaded) -> DraftSpec:
  """Return a draft that samples uniformly from the vocabulary of a target."""
  vocab_size = len(target.vocabulary)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> UniformDraft:
    return UniformDraft(vocab_size, tree)

  return DraftSpec("uniform", build)


@dataclasses.dataclass(frozen=True)
class UniformDraft(Draft):
  """A draft that samples each token of a static tree uniformly, at any temperature."""

  vocab_size: int
  tree: AnyTree
  independent_siblings = True

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    num_draft_tokens = require_static("drafting at random", self.tree).num_draft_tokens

    def sample_row(key: Key[Array, ""]) -> Int[Array, " N"]:
      return jax.random.randint(key, (num_draft_tokens,), 0, self.vocab_size, jnp.int32)

    tokens = jax.vmap(sample_row)(rng)
    q = jnp.full((*tokens.shape, self.vocab_size), 1 / self.vocab_size, jnp.float32)
    return Proposal(tokens, q), state
