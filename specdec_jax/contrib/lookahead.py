"""Lookahead decoding: draft tokens from the target's own earlier passes (Fu et al., ICML 2024).

In addition to the draft tokens, each target forward pass processes a window of tokens that may come
later. Each column of the window is a trajectory of Jacobi iteration: gamma tokens, one from each of
the last gamma passes. The current pass adds one more token to each column. The gamma + 1 tokens of
a column are stored in a pool as an n-gram, and the oldest row of the window is dropped. The draft
proposes the n-grams in the pool that start with the last committed token.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather, take
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling, argmax
from specdec_jax.core.trees import AnyTree, Tree, chain, require_chain
from specdec_jax.core.types import (
  FILLER,
  Draft,
  DraftOptions,
  DraftSpec,
  Keys,
  Loaded,
  Outcome,
  Proposal,
)
from specdec_jax.data.vocabulary import PAD_ID
from specdec_jax.drafts.several import joined_at_root
from specdec_jax.errors import require_count


def lookahead(target: Loaded, window: int = 5, num_ngrams: int = 5) -> DraftSpec:
  """Return lookahead decoding as a draft with n-grams of gamma draft tokens (`LookaheadDraft`)."""

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> LookaheadDraft:
    require_chain("lookahead decoding", tree)
    return LookaheadDraft(len(target.vocabulary), tree.depth, window, num_ngrams)

  return DraftSpec(f"lookahead-{window}-{num_ngrams}", build)


class Lookahead(NamedTuple):
  """State of `LookaheadDraft`.

  Attributes:
    window: trajectories, oldest pass first. Row l of column k predicts the token that is l + k + 1
      positions after the last committed one.
    pool: continuations of each token, latest first; missing continuations are FILLER.
  """

  window: Int[Array, "B gamma width"]
  pool: Int[Array, "B V num_ngrams gamma"]


@dataclasses.dataclass(frozen=True)
class LookaheadDraft(Draft):
  """A draft that proposes n-grams from a pool as chains, and its window as the last branch.

  The window is processed in the same forward pass as the n-grams, so verifying its tokens too costs
  nothing more. In the branch of the window, row 0 is a chain, and the other rows of each column
  follow the token of that column in row 0. Each token thus attends to its own column and to row 0
  up to that column.

  The pool stores only the latest of the n-grams that share their first two tokens, because the
  verifier follows only one of several equal siblings. Trajectories are the argmax of the target at
  any temperature, and all draft tokens are selected deterministically. Trajectories are initialized
  with tokens of the prompt. There are no parameters. The pool takes 4 * `vocab_size` *
  `num_ngrams` * `gamma` bytes per row: 2.6 MB for 32,128 tokens, 5 n-grams and gamma 4.

  Attributes:
    gamma: number of draft tokens per n-gram; they follow its first token.
    window: number of columns of the window.
    num_ngrams: number of n-grams that are stored per first token. Those that start with the last
      committed token are all proposed.
  """

  vocab_size: int
  gamma: int
  window: int = 5
  num_ngrams: int = 5
  tree: Tree = dataclasses.field(init=False)
  depends_on_outcomes = True

  def __post_init__(self):
    for name in ("gamma", "window", "num_ngrams"):
      require_count(name, getattr(self, name))
    object.__setattr__(self, "tree", self._layout[0])

  @functools.cached_property
  def _layout(self) -> tuple[Tree, list[int], list[int]]:
    """Tree of the draft tokens, the order of the tokens, and the last node of each column.

    The order gives the index of each draft token in all chains and then the window, row by row.
    """
    width, first = self.window, self.num_ngrams * self.gamma
    cells = [(row, column) for row in range(self.gamma) for column in range(width)]
    cells.sort(key=lambda cell: (sum(cell), cell[1]))  # level order
    node = {cell: i for i, cell in enumerate(cells, 1)}
    parents = [(row - 1, column) if row else (0, column - 1) for row, column in cells]
    branch = Tree([node.get(cell, 0) for cell in parents])
    tree, places = joined_at_root([*[chain(self.gamma)] * self.num_ngrams, branch])
    flat = [*range(first), *(first + row * width + column for row, column in cells)]
    order = [flat[place] for place in places]
    ends = [order.index(first + (self.gamma - 1) * width + i) + 1 for i in range(width)]
    return tree, order, ends

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Lookahead:
    prompt, width = context.prompt, self.window
    size = jnp.maximum((prompt != PAD_ID).sum(axis=1), 1)[:, None]
    offsets = jnp.arange(self.gamma)[:, None] + jnp.arange(width)[None]  # [gamma, width]
    tokens = gather(prompt, offsets.reshape(1, -1) % size)
    tokens = jnp.where(tokens < self.vocab_size, tokens, FILLER).astype(jnp.int32)
    shape = len(prompt), self.vocab_size, self.num_ngrams, self.gamma
    return Lookahead(tokens.reshape(-1, self.gamma, width), jnp.zeros(shape, jnp.int32))

  def propose(
    self, params: Any, state: Lookahead, context: Context, rng: Keys
  ) -> tuple[Proposal, Lookahead]:
    known = jax.vmap(lambda pool, token: pool[token])(state.pool, context.last_token)
    batch, order = len(known), self._layout[1]
    both = jnp.concatenate([known.reshape(batch, -1), state.window.reshape(batch, -1)], axis=1)
    return Proposal(take(both, order)), state

  def observe(self, params: Any, state: Lookahead, outcome: Outcome) -> Lookahead:
    ends = take(outcome.logits, self._layout[2])  # [B, W, V]
    new_row = argmax(ends.reshape(-1, ends.shape[-1]))
    rows = jnp.concatenate([state.window, new_row.reshape(-1, 1, self.window)], axis=1)
    return Lookahead(rows[:, 1:], jax.vmap(_with_ngrams)(state.pool, rows.swapaxes(1, 2)))


def _with_ngrams(
  pool: Int[Array, "V num_ngrams gamma"], ngrams: Int[Array, "width gamma_plus_1"]
) -> Int[Array, "V num_ngrams gamma"]:
  """Return the pool of one row with n-grams added, each in front of those with its first token."""

  def add(pool, ngram):
    token, continuation = ngram[0], ngram[1:]
    known = pool[token]  # [num_ngrams, gamma]
    has_same_start = known[:, 0] == continuation[0]
    dropped = jnp.where(has_same_start.any(), has_same_start.argmax(), len(known) - 1)
    shifted = jnp.concatenate([continuation[None], known[:-1]])
    known = jnp.where((jnp.arange(len(known)) <= dropped)[:, None], shifted, known)
    return pool.at[token].set(known), None

  return lax.scan(add, pool, ngrams)[0]
