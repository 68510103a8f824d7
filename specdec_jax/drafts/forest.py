"""Several drafts whose trees share the last committed token as root (SpecInfer).

A special case is multi-draft speculative sampling, with several chains of one draft, each sampled
with its own key. Equal tokens of two drafts remain two nodes, each with the q of its own draft, and
the nodes are verified in the order of the drafts. `core.verify.merging.MergingVerifier` continues
equal tokens of several drafts as one node. It would not be exact to leave out one of the nodes, or
to verify them in random order (`tests/test_verifiers.py`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Key

from specdec_jax.core.arrays import split_rows
from specdec_jax.core.trees import Tree, require_static
from specdec_jax.core.types import Context, Draft, Proposal
from specdec_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class ForestDraft(Draft):
  """A draft whose tree joins the static trees of several drafts at a common root.

  Parameters and states are tuples with one entry per draft, in order. The drafts do not receive the
  outcome of verification, because accepted tokens may come from a different draft.

  Attributes:
    drafts: one or more drafts; among siblings, the tokens of earlier drafts are verified first.
      Their `DraftOptions.reread` covers the tokens that a round may commit.
    vocab_size: size of the vocabulary, V.

  Raises:
    InputError: there are no drafts, a tree is dynamic, or a draft cannot be joined
      (`require_joinable`).
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

  def propose(
    self, params: Any, state: Any, context: Context, rng: Key[Array, " B"]
  ) -> tuple[Proposal, Any]:
    keys = split_rows(rng, len(self.drafts))
    each = zip(self.drafts, params, state, keys, strict=True)
    proposals, states = zip(*(d.propose(p, s, context, key) for d, p, s, key in each))
    tokens, q = concatenated(proposals, self.vocab_size)
    order = jnp.array(joined_at_root(self._trees)[1])
    return Proposal(tokens[:, order], None if q is None else q[:, order]), states

  @property
  def _trees(self) -> list[Tree]:
    return [require_static("merging drafts", draft.tree) for draft in self.drafts]


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

  The q is None if all tokens were selected deterministically. If only some proposals were selected
  deterministically, the q of their tokens are one-hots.
  """
  tokens = jnp.concatenate([proposal.tokens for proposal in proposals], axis=1)
  if all(proposal.q is None for proposal in proposals):
    return tokens, None
  q = [jax.nn.one_hot(p.tokens, vocab_size) if p.q is None else p.q for p in proposals]
  return tokens, jnp.concatenate(q, axis=1)


def joined_at_root(trees: Sequence[Tree]) -> tuple[Tree, list[int]]:
  """Join several trees at their roots.

  Returns:
    The joined tree, and the index of each of its draft tokens in the concatenated draft tokens of
    the given trees.
  """
  paths, first = [], 0
  for tree in trees:
    tree_paths = [np.flatnonzero(row)[1:] for row in tree.ancestors[1:]]
    paths += [tuple((first + path - 1).tolist()) for path in tree_paths]
    first += tree.num_guesses
  paths.sort(key=lambda path: (len(path), path))  # level order, siblings adjacent
  node = {(): 0} | {path: i for i, path in enumerate(paths, 1)}
  return Tree([node[path[:-1]] for path in paths]), [path[-1] for path in paths]
