"""Several drafts at once: the tree of each hangs from the newest token (SpecInfer).

So do K chains of one draft, drawn with keys of their own (iterative speculative sampling). What two
drafts guess alike stays two guesses, each with the q of its own draft, tried in the order of the
drafts: merging them, or trying them in random order, would not be exact (`tests/test_rules.py`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.core.trees import Tree, require_static
from specdec_jax.core.types import Context, Draft, Proposal
from specdec_jax.drafts.hierarchical import HierarchicalDraft
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class ForestDraft(Draft):
  """Drafts with static trees, whose parameters and states are tuples in the same order.

  They hear nothing of the outcome, which may have been another's guesses: those that are models
  read what was committed at the beginning of the next round.

  Attributes:
    drafts: two or more; the first one's guesses are tried first.
    vocab_size: V.

  Raises:
    InputError: there are none.
  """

  drafts: tuple[Draft, ...]
  vocab_size: int
  tree: Tree = dataclasses.field(init=False)

  def __post_init__(self):
    if not self.drafts:
      raise InputError("There are no drafts to merge.")
    object.__setattr__(self, "tree", side_by_side(self._trees)[0])

  def start(self, params: Any, context: Context, hidden: Array) -> Any:
    return tuple(d.start(own, context, hidden) for d, own in zip(self._ready, params, strict=True))

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    keys = jax.vmap(lambda key: jax.random.split(key, len(self.drafts)), out_axes=1)(rng)
    each = zip(self._ready, params, state, keys, strict=True)
    proposals, states = zip(*(d.propose(own, kept, context, key) for d, own, kept, key in each))
    tokens, q = in_one_form(proposals, self.vocab_size)
    order = jnp.array(side_by_side(self._trees)[1])
    return Proposal(tokens[:, order], None if q is None else q[:, order]), states

  @property
  def _trees(self) -> list[Tree]:
    return [require_static("merging drafts", draft.tree) for draft in self.drafts]

  @property
  def _ready(self) -> list[Draft]:
    return [told(draft, self.tree.depth + 1) for draft in self.drafts]


def told(draft: Draft, most: int) -> Draft:
  """The same; a model told that it may not have read as many of the committed tokens."""
  if draft.widths:
    raise InputError("A draft that stops early cannot be one of several.")
  if isinstance(draft, ModelDraft | HierarchicalDraft):
    return dataclasses.replace(draft, reread=most)
  return draft


def in_one_form(proposals: Sequence[Proposal], vocab_size: int) -> tuple[Array, Array | None]:
  """The guesses of all [B, N], one after the other, and their q [B, N, V]; None if all were chosen,
  else one-hots of those that were."""
  tokens = jnp.concatenate([made.tokens for made in proposals], axis=1)
  if all(made.q is None for made in proposals):
    return tokens, None
  q = [jax.nn.one_hot(made.tokens, vocab_size) if made.q is None else made.q for made in proposals]
  return tokens, jnp.concatenate(q, axis=1)


def side_by_side(trees: Sequence[Tree]) -> tuple[Tree, list[int]]:
  """One tree of several that share the newest token, and where in a row of their guesses, tree
  after tree, each of its guesses [N] is."""
  paths, first = [], 0
  for tree in trees:
    on_paths = [np.flatnonzero(row)[1:] for row in tree.ancestors[1:]]
    paths += [tuple((first + on_path - 1).tolist()) for on_path in on_paths]
    first += tree.num_guesses
  paths.sort(key=lambda path: (len(path), path))  # level order, siblings beside each other
  node = {(): 0} | {path: i for i, path in enumerate(paths, 1)}
  return Tree([node[path[:-1]] for path in paths]), [path[-1] for path in paths]
