"""The target's own earlier passes as draft: lookahead decoding (Fu et al., ICML 2024).

Beside the guesses that are judged the target reads a window of tokens that may come later. Each of
its W columns is a trajectory of Jacobi's iteration: gamma tokens, one of each of the last passes,
from which this pass makes one more. The gamma + 1 tokens go into a pool, and the window moves on by
one. What the pool has behind the newest token is guessed.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.core.arrays import take
from specdec_jax.core.sampling import argmax
from specdec_jax.core.trees import Tree, chain, require_chain
from specdec_jax.core.types import Context, Draft, DraftFactory, LoadedTarget, Outcome, Proposal
from specdec_jax.drafts.forest import joined_at_root
from specdec_jax.errors import require_count
from specdec_jax.models.t5 import PAD_ID


def lookahead(target: LoadedTarget, window: int = 5, num_guesses: int = 5) -> DraftFactory:
  """What the target made of guesses in earlier rounds; see `LookaheadDraft`. Of the chain that is
  asked for the depth counts: that of the pool's n-grams."""

  def make(sampling, tree):
    require_chain("lookahead decoding", tree)
    return LookaheadDraft(len(target.vocabulary), tree.depth, window, num_guesses)

  return DraftFactory(f"lookahead-{window}-{num_guesses}", make)


class Lookahead(NamedTuple):
  """What a round leaves for the next.

  Attributes:
    window: [B, gamma, W], trajectories, oldest row first: that of row l in column k is a guess of
      the token l + k + 1 places behind the newest.
    pool: [B, V, G, gamma], what came behind each token, latest first; PAD_ID where there is less.
  """

  window: Array
  pool: Array


@dataclasses.dataclass(frozen=True)
class LookaheadDraft(Draft):
  """Guesses what the pool has behind the newest token, in G chains; and the window, which is read
  in the same pass and, since it costs nothing more, judged as the youngest branch.

  In that branch row 0 is a chain, and the rest of each column hangs from its token there: so a
  token sees row 0 up to its own column, and that column. Of n-grams that begin with the same two
  tokens the pool keeps the latest only, as a verifier goes on behind one of equal siblings only.
  Trajectories are the target's argmax at any temperature; nothing is drawn. They begin with the
  prompt's tokens. Parameters: none, (). The pool takes 4 V G gamma bytes of each row: 2.6 MB if V
  is 32,128, G 5 and gamma 4.

  Attributes:
    vocab_size: V.
    gamma: tokens of a guess; the n-grams have one more, the first.
    window: W.
    num_guesses: G.

  Raises:
    InputError: one of these is no whole number from 1.
  """

  vocab_size: int
  gamma: int
  window: int = 5
  num_guesses: int = 5
  tree: Tree = dataclasses.field(init=False)
  depends_on_outcomes = True

  def __post_init__(self):
    for name in ("gamma", "window", "num_guesses"):
      require_count(name, getattr(self, name))
    object.__setattr__(self, "tree", self._laid_out[0])

  @functools.cached_property
  def _laid_out(self) -> tuple[Tree, list[int], list[int]]:
    """The tree; where each of its guesses [N] is in a row of the pool's chains and then of the
    window, row by row; and the nodes [W] that end the columns."""
    width, first = self.window, self.num_guesses * self.gamma
    cells = [(row, column) for row in range(self.gamma) for column in range(width)]
    cells.sort(key=lambda cell: (sum(cell), cell[1]))  # level order
    node = {cell: i for i, cell in enumerate(cells, 1)}
    above = [(row - 1, column) if row else (0, column - 1) for row, column in cells]
    branch = Tree([node.get(cell, 0) for cell in above])
    tree, places = joined_at_root([*[chain(self.gamma)] * self.num_guesses, branch])
    flat = [*range(first), *(first + row * width + column for row, column in cells)]
    order = [flat[place] for place in places]
    ends = [order.index(first + (self.gamma - 1) * width + i) + 1 for i in range(width)]
    return tree, order, ends

  def init(self, params: Any, context: Context, hidden: Array) -> Lookahead:
    prompt, width = context.prompt, self.window
    size = jnp.maximum((prompt != PAD_ID).sum(axis=1), 1)[:, None]
    at = jnp.arange(self.gamma)[:, None] + jnp.arange(width)  # [gamma, W]
    begun = jnp.take_along_axis(prompt, at.reshape(-1) % size, axis=1)
    begun = jnp.where(begun < self.vocab_size, begun, PAD_ID).astype(jnp.int32)
    shape = len(prompt), self.vocab_size, self.num_guesses, self.gamma
    return Lookahead(begun.reshape(-1, self.gamma, width), jnp.zeros(shape, jnp.int32))

  def propose(
    self, params: Any, state: Lookahead, context: Context, rng: Array
  ) -> tuple[Proposal, Lookahead]:
    known = jax.vmap(lambda pool, token: pool[token])(state.pool, context.last_token)
    batch, order = len(known), self._laid_out[1]
    both = jnp.concatenate([known.reshape(batch, -1), state.window.reshape(batch, -1)], axis=1)
    return Proposal(take(both, order)), state

  def observe(self, params: Any, state: Lookahead, outcome: Outcome) -> Lookahead:
    ends = take(outcome.logits, self._laid_out[2])  # [B, W, V]
    made = argmax(ends.reshape(-1, ends.shape[-1]))
    rows = jnp.concatenate([state.window, made.reshape(-1, 1, self.window)], axis=1)
    return Lookahead(rows[:, 1:], jax.vmap(_with)(state.pool, rows.swapaxes(1, 2)))


def _with(pool: Array, ngrams: Array) -> Array:
  """A row's pool [V, G, gamma] once n-grams [W, gamma + 1] were put first, one after the other."""

  def put(pool, ngram):
    token, behind = ngram[0], ngram[1:]
    known = pool[token]  # [G, gamma]
    alike = known[:, 0] == behind[0]
    out = jnp.where(alike.any(), alike.argmax(), len(known) - 1)  # it gives way
    moved = jnp.concatenate([behind[None], known[:-1]])
    known = jnp.where((jnp.arange(len(known)) <= out)[:, None], moved, known)
    return pool.at[token].set(known), None

  return lax.scan(put, pool, ngrams)[0]
