"""Drafts in a row: the first guesses are one's, those behind them a cheaper one's.

Guesses far from the newest token are seldom reached, and may cost less (the horizontal cascade of
Chen et al., 2024).
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specdec_jax.core.trees import Tree, chain, require_chain
from specdec_jax.core.types import Context, Draft, Proposal
from specdec_jax.drafts.forest import in_one_form, told
from specdec_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class CascadeDraft(Draft):
  """A chain of guesses, the first of them by the first draft, and so on; each goes on after the
  guesses before its own. Parameters and states are tuples in the same order.

  They hear nothing of the outcome: those that are models read what was committed at the beginning
  of the next round.

  Attributes:
    drafts: one or more, whose trees are chains.
    vocab_size: V.

  Raises:
    InputError: there are none, or a tree is no chain.
  """

  drafts: tuple[Draft, ...]
  vocab_size: int
  tree: Tree = dataclasses.field(init=False)

  def __post_init__(self):
    if not self.drafts:
      raise InputError("There are no drafts to put in a row.")
    for draft in self.drafts:
      require_chain("a draft in a row of them", draft.tree)
    object.__setattr__(self, "tree", chain(sum(draft.tree.depth for draft in self.drafts)))

  def start(self, params: Any, context: Context, hidden: Array) -> Any:
    return tuple(d.start(own, context, hidden) for d, own in zip(self._ready, params))

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    keys = jax.vmap(lambda key: jax.random.split(key, len(self.drafts)), out_axes=1)(rng)
    proposals, states = [], []
    for draft, own, kept, key in zip(self._ready, params, state, keys):
      made, kept = draft.propose(own, kept, context, key)
      proposals.append(made)
      states.append(kept)
      context = _behind(context, made.tokens)
    tokens, q = in_one_form(proposals, self.vocab_size)
    return Proposal(tokens, q), tuple(states)

  @property
  def _ready(self) -> list[Draft]:
    """What a model may not have read: all that a round commits, and the guesses before its own."""
    depths = [draft.tree.depth for draft in self.drafts]
    before = [0, *itertools.accumulate(depths)]
    return [told(d, self.tree.depth + 1 + guesses) for d, guesses in zip(self.drafts, before)]


def _behind(context: Context, guesses: Array) -> Context:
  """The context as if guesses [B, g] were committed."""
  num_guesses = guesses.shape[1]
  place = jnp.arange(context.tokens.shape[1]) - context.length[:, None]
  inside = (place >= 0) & (place < num_guesses)
  moved = jnp.take_along_axis(guesses, jnp.clip(place, 0, num_guesses - 1), axis=1)
  tokens = jnp.where(inside, moved, context.tokens)
  return context._replace(tokens=tokens, length=context.length + num_guesses)
