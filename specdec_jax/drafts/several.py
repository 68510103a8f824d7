"""Several drafts as one: branches of one tree, or the first of them that has a token.

Parameters, and the states of the drafts, are tuples with one entry per draft, in order. The drafts
do not receive the outcome of verification, because accepted tokens may be of a different draft.
Instead, drafts with a cache process all tokens that the last round may have committed at its start
(`DraftOptions.reread`). Except for a `FallbackDraft`, the drafts must not depend on outcomes or
stop early.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.arrays import split_rows
from specdec_jax.core.context import Context
from specdec_jax.core.trees import AnyTree, Tree, require_static
from specdec_jax.core.types import FILLER, Draft, Keys, Proposal
from specdec_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class ForestDraft(Draft):
  """A draft whose tree joins the static trees of several drafts at a common root (SpecInfer).

  A special case is multi-draft speculative sampling, with several chains of one draft, each sampled
  with its own key. Equal tokens of two drafts remain two nodes, each with the q of its own draft,
  and the nodes are verified in the order of the drafts. `contrib.merging.MergingVerifier`
  continues equal tokens of several drafts as one node. It would not be exact to leave out one of
  the nodes (`tests/test_verifiers.py`).
  """

  drafts: tuple[Draft, ...]
  vocab_size: int
  tree: Tree = dataclasses.field(init=False)

  def __post_init__(self):
    for draft in self.drafts:
      require_joinable(draft)
    object.__setattr__(self, "tree", joined_at_root(self._trees)[0])

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    each = zip(self.drafts, params, strict=True)
    return tuple(d.init(p, context, hidden) for d, p in each)

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    keys = split_rows(rng, len(self.drafts))
    each = zip(self.drafts, params, state, keys, strict=True)
    proposals, states = zip(*(d.propose(p, s, context, key) for d, p, s, key in each))
    tokens, q = concatenated(proposals, self.vocab_size)
    order = jnp.array(joined_at_root(self._trees)[1])
    return Proposal(tokens[:, order], None if q is None else q[:, order]), states

  @property
  def _trees(self) -> list[Tree]:
    return [require_static("merging drafts", draft.tree) for draft in self.drafts]


@dataclasses.dataclass(frozen=True)
class FallbackDraft(Draft):
  """A draft that uses, in each row, the first of its drafts that has a token.

  A draft has none if its first draft token is FILLER. If no draft has one, the last draft is used.
  The drafts have equal static trees and select their tokens deterministically.
  """

  drafts: tuple[Draft, ...]
  tree: AnyTree = dataclasses.field(init=False)

  def __post_init__(self):
    if len({draft.tree for draft in self.drafts}) != 1:
      raise InputError("The drafts to choose from need equal trees.")
    object.__setattr__(self, "tree", self.drafts[0].tree)

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    return tuple(d.init(p, context, hidden) for d, p in zip(self.drafts, params, strict=True))

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    each = zip(self.drafts, params, state, strict=True)
    proposals, states = zip(*(d.propose(p, s, context, rng) for d, p, s in each))
    if any(proposal.q is not None for proposal in proposals):
      raise InputError("One of the drafts to choose from samples; all must select their tokens.")
    *earlier, tokens = (proposal.tokens for proposal in proposals)
    for earlier_tokens in reversed(earlier):
      tokens = jnp.where(earlier_tokens[:, :1] == FILLER, tokens, earlier_tokens)
    return Proposal(tokens), states


def require_joinable(draft: Draft) -> None:
  """Raise InputError if a draft cannot propose together with others."""
  if draft.tree.verify_lengths or draft.depends_on_outcomes:
    raise InputError(
      f"{type(draft).__name__} stops early or depends on outcomes of its rounds, and cannot be one "
      "of several drafts."
    )


def concatenated(
  proposals: Sequence[Proposal], vocab_size: int
) -> tuple[Int[Array, "B N"], Float[Array, "B N V"] | None]:
  """Concatenate the tokens and the q of all proposals.

  q is None if all tokens are selected deterministically; if only some are, theirs are one-hots.
  """
  tokens = jnp.concatenate([proposal.tokens for proposal in proposals], axis=1)
  if all(proposal.q is None for proposal in proposals):
    return tokens, None
  one_hots = (jax.nn.one_hot(p.tokens, vocab_size, dtype=jnp.float32) for p in proposals)
  q = [one_hot if p.q is None else p.q for p, one_hot in zip(proposals, one_hots)]
  return tokens, jnp.concatenate(q, axis=1)


def joined_at_root(trees: Sequence[Tree]) -> tuple[Tree, list[int]]:
  """Join several trees at their roots.

  Also return the index of each draft token in the concatenated draft tokens of the given trees.
  """
  paths, first = [], 0
  for tree in trees:
    tree_paths = [np.flatnonzero(row)[1:] for row in tree.ancestors[1:]]
    paths += [tuple((first + path - 1).tolist()) for path in tree_paths]
    first += tree.num_draft_tokens
  paths.sort(key=lambda path: (len(path), path))  # level order, siblings adjacent
  node = {(): 0} | {path: i for i, path in enumerate(paths, 1)}
  return Tree([node[path[:-1]] for path in paths]), [path[-1] for path in paths]
