"""What followed the last tokens in a text of the task: n-grams with back-off (Section 3.6)."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.core.arrays import take
from specdec_jax.core.trees import AnyTree, require_static
from specdec_jax.core.types import Context, Draft, DraftFactory, LoadedTarget, Proposal
from specdec_jax.data.text import read_lines
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.t5 import PAD_ID

MOST_ORDER = 8


def backoff_ngrams(
  target: LoadedTarget, path: str, order: int = 4, num_successors: int = 8
) -> DraftFactory:
  """N-grams of a text, one output of the task a line; arguments as `fit_backoff`."""
  vocabulary = target.vocabulary
  rows, start_id = map(vocabulary.encode, read_lines(path)), vocabulary.start_id
  params = fit_backoff(rows, order, num_successors, start_id)
  return DraftFactory(f"{order}-gram", lambda sampling, tree: BackoffDraft(tree, order), params)


def fit_backoff(
  rows: Iterable[Sequence[int]], order: int, num_successors: int = 8, start_id: int = PAD_ID
) -> tuple[tuple[Array, Array], ...]:
  """What follows each run of tokens, for contexts of order - 1 tokens down to none.

  Args:
    rows: token ids of texts, EOS last, no start token.
    order: n: tokens of the longest n-gram.
    num_successors: K: kept of each context, the most frequent first, ties by id.
    start_id: stands before a text.

  Returns:
    For each length of context, longest first: hashes [M] of those that occur, ascending, and their
    successors [M, K], PAD_ID where there are fewer.

  Raises:
    InputError: order is not from 1 to 8, num_successors no whole number from 1, or there is no
      token.
  """
  require_count("num_successors", num_successors)
  if not (isinstance(order, int) and 1 <= order <= MOST_ORDER):
    raise InputError(f"order is {order!r}; it must be a whole number from 1 to {MOST_ORDER}.")
  rows = [np.array([start_id, *row], np.uint32) for row in rows]
  text = np.concatenate([[], *rows]).astype(np.uint32)
  place = np.concatenate([[], *(np.arange(len(row)) for row in rows)])  # 0 is the start token's
  if not place.any():
    raise InputError("The rows to count hold no tokens.")
  levels = []
  for length in reversed(range(order)):
    at = np.flatnonzero(place >= max(1, length))  # no context reaches back before its text
    contexts = _hash(np, [text[at - back] for back in range(length, 0, -1)], at.shape)
    levels.append(_table(contexts, text[at], num_successors))
  return tuple(levels)


def _table(contexts: np.ndarray, tokens: np.ndarray, num_successors: int) -> tuple[Array, Array]:
  pairs, counts = np.unique(np.stack([contexts, tokens], axis=1), axis=0, return_counts=True)
  pairs = pairs[np.lexsort((pairs[:, 1], -counts, pairs[:, 0]))]
  known, first = np.unique(pairs[:, 0], return_index=True)
  rank = np.arange(len(pairs)) - np.repeat(first, np.diff([*first, len(pairs)]))
  successors = np.full((len(known), num_successors), PAD_ID)
  kept = rank < num_successors
  successors[np.searchsorted(known, pairs[kept, 0]), rank[kept]] = pairs[kept, 1]
  return jnp.asarray(known, jnp.uint32), jnp.asarray(successors, jnp.int32)


def _hash(of: Any, tokens: Sequence[Any], shape: tuple[int, ...]) -> Any:
  """Of tokens, oldest first, in 32 bits, by numpy or jax. Two contexts with one hash would share
  their successors: that costs a guess, never the output."""
  found = of.zeros(shape, of.uint32)
  for token in tokens:
    found = (found ^ (token + of.uint32(1))) * of.uint32(0x9E3779B1)
    found = found ^ (found >> of.uint32(15))
  return found


@dataclasses.dataclass(frozen=True)
class BackoffDraft(Draft):
  """Guesses what most often followed the longest context that its parameters know.

  Its parameters are what `fit_backoff` gives. Of siblings the elder is the more frequent. Nothing
  is drawn; where no context has so many successors the guess is PAD_ID.

  Attributes:
    tree: of any one shape.
    order: n of the longest n-gram.
  """

  tree: AnyTree
  order: int

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    tree, num_before = require_static("an n-gram draft", self.tree), self.order - 1
    at = context.length[:, None] - num_before + jnp.arange(num_before)
    before = jnp.take_along_axis(context.tokens, jnp.maximum(at, 0), axis=1)
    # For each node of a level, what its children follow [B, W, n - 1]; -1 before the text.
    recent = jnp.where(at < 0, -1, before)[:, None]
    guesses, above = [], 0
    for first, end in tree.levels:
      parents = [parent - above for parent in tree.parents[first - 1 : end - 1]]
      followers = _followers(params, recent)  # [B, W, K]
      followers = jnp.pad(followers, ((0, 0), (0, 0), (0, tree.width)), constant_values=PAD_ID)
      made = take(followers, parents)[:, np.arange(len(parents)), tree.ranks[first - 1 : end - 1]]
      recent = jnp.concatenate([take(recent, parents), made[..., None]], axis=-1)[..., 1:]
      guesses.append(made)
      above = first
    return Proposal(jnp.concatenate(guesses, axis=1)), state


def _followers(levels: Sequence[tuple[Array, Array]], recent: Array) -> Array:
  """Successors [B, W, K] of the longest known context that ends each of recent [B, W, n - 1]."""
  found = levels[-1][1][jnp.zeros(recent.shape[:2], jnp.int32)]  # of no context at all
  for length, (known, successors) in enumerate(reversed(levels[:-1]), 1):
    last = [recent[..., recent.shape[-1] - back] for back in range(length, 0, -1)]
    hashed = _hash(jnp, [token.astype(jnp.uint32) for token in last], recent.shape[:2])
    place = jnp.minimum(jnp.searchsorted(known, hashed), len(known) - 1)
    hit = (known[place] == hashed) & (last[0] >= 0)
    found = jnp.where(hit[..., None], successors[place], found)
  return found
