"""N-grams with back-off: the most frequent successors of the last tokens (Section 3.6)."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, Int32, UInt32

from specdec_jax.core.arrays import gather, take
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, require_static
from specdec_jax.core.types import FILLER, Draft, DraftOptions, DraftSpec, Keys, Loaded, Proposal
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import PAD_ID
from specdec_jax.errors import InputError, require_count

MAX_ORDER = 8


def backoff_ngrams(
  target: Loaded, target_text: str, order: int = 4, num_successors: int = 8
) -> DraftSpec:
  """Return a draft from the n-grams of a text file, which has one output of the task per line.

  Args:
    order: number of tokens of the longest n-gram, from 1 to 8.
    num_successors: number of successors to store per context.
  """
  vocabulary = target.vocabulary
  rows = map(vocabulary.encode_output, read_lines(target_text))
  params = fit_backoff(rows, order, num_successors, vocabulary.start_id)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> BackoffDraft:
    return BackoffDraft(tree, order)

  return DraftSpec(f"{order}-gram", build, params)


def fit_backoff(
  rows: Iterable[Sequence[int]], order: int, num_successors: int = 8, start_id: int = PAD_ID
) -> tuple[tuple[UInt32[Array, " _"], Int32[Array, "_ successors"]], ...]:
  """Count the tokens after each context of `order` - 1 tokens, `order` - 2 tokens, ..., 0 tokens.

  `rows` have EOS and no start token. Return for each length of context, longest first, the hashes
  of the contexts in ascending order, and the successors of each: the most frequent ones, most
  frequent first and then by token id. Missing successors are FILLER.
  """
  require_count("num_successors", num_successors)
  if not (isinstance(order, int) and 1 <= order <= MAX_ORDER):
    raise InputError(f"order is {order!r}; it must be a whole number from 1 to {MAX_ORDER}.")
  if not (rows := [np.array([start_id, *row], np.uint32) for row in rows]):
    raise InputError("There are no texts to count n-grams of; give a file that is not empty.")
  text = np.concatenate([[], *rows]).astype(np.uint32)
  # Position of each token in its text; 0 is the start token.
  position = np.concatenate([[], *(np.arange(len(row)) for row in rows)])
  levels = []
  for length in reversed(range(order)):
    places = np.flatnonzero(position >= max(1, length))  # the context is within the text
    context = [text[places - back] for back in range(length, 0, -1)]
    hashes = _hash(np, context, places.shape)
    levels.append(_successor_table(hashes, text[places], num_successors))
  return tuple(levels)


def _successor_table(
  contexts: np.ndarray, tokens: np.ndarray, num_successors: int
) -> tuple[UInt32[Array, " contexts"], Int32[Array, "contexts successors"]]:
  pairs, counts = np.unique(np.stack([contexts, tokens], axis=1), axis=0, return_counts=True)
  pairs = pairs[np.lexsort((pairs[:, 1], -counts, pairs[:, 0]))]
  known, first = np.unique(pairs[:, 0], return_index=True)
  rank = np.arange(len(pairs)) - np.repeat(first, np.diff([*first, len(pairs)]))
  successors = np.full((len(known), num_successors), FILLER)
  is_stored = rank < num_successors
  rows = np.searchsorted(known, pairs[is_stored, 0])
  successors[rows, rank[is_stored]] = pairs[is_stored, 1]
  return jnp.asarray(known, jnp.uint32), jnp.asarray(successors, jnp.int32)


def _hash(array_module: Any, tokens: Sequence[Any], shape: tuple[int, ...]) -> Any:
  """Return 32-bit hashes; contexts with equal hashes share successors, and decoding stays exact."""
  hashed = array_module.zeros(shape, array_module.uint32)
  for token in tokens:
    hashed = (hashed ^ (token + array_module.uint32(1))) * array_module.uint32(0x9E3779B1)
    hashed = hashed ^ (hashed >> array_module.uint32(15))
  return hashed


@dataclasses.dataclass(frozen=True)
class BackoffDraft(Draft):
  """A draft that proposes the most frequent successors of the longest known context.

  Its parameters are the result of `fit_backoff`. The longest n-gram has `order` tokens. Siblings
  are in descending order of frequency. All tokens are selected deterministically. A draft token is
  FILLER if the context has too few successors.
  """

  tree: AnyTree
  order: int

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    tree, num_context = require_static("an n-gram draft", self.tree), self.order - 1
    slots = context.length[:, None] - num_context + jnp.arange(num_context)[None]
    last_tokens = gather(context.tokens, jnp.maximum(slots, 0))
    # Context of the children of each node of a level, [B, W, order - 1]; -1 before the text.
    recent = jnp.where(slots < 0, -1, last_tokens)[:, None]
    draft_tokens, parent_level = [], 0
    for first, end in tree.levels:
      parents = [parent - parent_level for parent in tree.parents[first - 1 : end - 1]]
      ranks = tree.ranks[first - 1 : end - 1]
      successors = _successors(params, recent)  # [B, W, num_successors]
      successors = jnp.pad(successors, ((0, 0), (0, 0), (0, tree.width)), constant_values=FILLER)
      tokens = take(successors, parents)[:, np.arange(len(parents)), ranks]
      recent = jnp.concatenate([take(recent, parents), tokens[..., None]], axis=-1)[..., 1:]
      draft_tokens.append(tokens)
      parent_level = first
    return Proposal(jnp.concatenate(draft_tokens, axis=1)), state


def _successors(
  levels: Sequence[tuple[UInt32[Array, " _"], Int32[Array, "_ successors"]]],
  recent: Int[Array, "B W context"],
) -> Int32[Array, "B W successors"]:
  """Return, for each context in `recent`, the successors of its longest suffix that was counted."""
  # These are the successors of the empty context.
  successors = levels[-1][1][jnp.zeros(recent.shape[:2], jnp.int32)]
  for length, (known, known_successors) in enumerate(reversed(levels[:-1]), 1):
    last = [recent[..., recent.shape[-1] - back] for back in range(length, 0, -1)]
    hashed = _hash(jnp, [token.astype(jnp.uint32) for token in last], recent.shape[:2])
    place = jnp.minimum(jnp.searchsorted(known, hashed), len(known) - 1)
    is_known = (known[place] == hashed) & (last[0] >= 0)
    successors = jnp.where(is_known[..., None], known_successors[place], successors)
  return successors
