"""Unigram and bigram counts as draft: a table look-up of next to no cost (Section 3.6, Table 3)."""

import dataclasses
import functools
import itertools
import os
import pathlib
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specdec_jax.atomic_files import atomic_write
from specdec_jax.core.sampling import Sampling, sample_logits
from specdec_jax.core.trees import AnyTree, require_chain
from specdec_jax.core.types import Context, Draft, DraftFactory, LoadedTarget, Proposal
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.t5 import PAD_ID

_DAMAGED = (zipfile.BadZipFile, zlib.error)


def unigram(target: LoadedTarget, path: str) -> DraftFactory:
  """The frequencies of tokens in a text, one output of the task a line."""
  return _ngram("unigram", 1, target.vocabulary, path)


def bigram(target: LoadedTarget, path: str) -> DraftFactory:
  """The frequencies of what follows each token in a text, one output of the task a line."""
  return _ngram("bigram", 2, target.vocabulary, path)


def _ngram(name: str, order: int, vocabulary: Vocabulary, path: str) -> DraftFactory:
  rows, start_id = map(vocabulary.encode, read_lines(path)), vocabulary.start_id
  counts = fit_ngrams(rows, len(vocabulary), start_id=start_id)
  return DraftFactory(name, functools.partial(NgramDraft, order, len(vocabulary)), counts)


class Ngrams(NamedTuple):
  """Counts of a text: V tokens, the K most frequent successors of each.

  Attributes:
    unigrams: [V], times each token occurs.
    successors: [V, K], what most often follows each token, most frequent first, ties by id.
    counts: [V, K], how often it does; 0 where fewer than K tokens ever did.
  """

  unigrams: Array
  successors: Array
  counts: Array


def fit_ngrams(
  rows: Iterable[Sequence[int]],
  vocab_size: int,
  num_successors: int = 128,
  start_id: int = PAD_ID,
) -> Ngrams:
  """Count the target side of a task: rows of token ids, EOS last, no start token, no padding.

  `start_id` is what stands before a text, the context of its first token. A vocabulary that starts
  texts by padding has no other use for token 0; one of GPT-2's kind has.

  Raises:
    InputError: no token at all, an id outside the vocabulary, padding, or num_successors < 1.
  """
  require_count("num_successors", num_successors)
  rows = list(rows)
  text = np.fromiter(itertools.chain.from_iterable((start_id, *row) for row in rows), np.int64)
  is_start = np.zeros(len(text), bool)
  is_start[np.cumsum([0, *(len(row) + 1 for row in rows)])[:-1]] = True
  context, token = text[:-1][~is_start[1:]], text[~is_start]
  if not len(token):
    raise InputError("There are no tokens to count n-grams of; give rows of token ids.")
  least = 1 if start_id == PAD_ID else 0
  if token.min() < least or token.max() >= vocab_size:
    raise InputError(
      f"The rows to count hold ids from {token.min()} to {token.max()}; each must lie in "
      f"{least}..{vocab_size - 1}, as the vocabulary has {vocab_size} tokens"
      + (" and 0 is padding." if least else ".")
    )
  unigrams = np.bincount(token, minlength=vocab_size)
  pairs, counts = np.unique(context * vocab_size + token, return_counts=True)
  context, token = np.divmod(pairs, vocab_size)
  order = np.lexsort((token, -counts, context))
  context, token, counts = context[order], token[order], counts[order]
  rank = np.arange(len(context)) - np.searchsorted(context, context)
  kept = rank < num_successors
  table = np.zeros((2, vocab_size, min(num_successors, vocab_size)), np.int64)
  table[:, context[kept], rank[kept]] = token[kept], counts[kept]
  return Ngrams(*(jnp.asarray(x, jnp.int32) for x in (unigrams, *table)))


def save_ngrams(path: str | os.PathLike, ngrams: Ngrams) -> None:
  """Write the counts to `path` (.npz), whole or not at all."""
  with atomic_write(path, "wb") as file:
    np.savez_compressed(file, **ngrams._asdict())


def load_ngrams(path: str | os.PathLike) -> Ngrams:
  """Read what `save_ngrams` wrote.

  Raises:
    InputError: no such file, or not one of these.
  """
  if not pathlib.Path(path).is_file():
    raise InputError(f"There are no n-gram counts at {path}; expected a .npz file of them.")
  try:
    with np.load(path) as arrays:
      ngrams = Ngrams(*(jnp.asarray(arrays[name], jnp.int32) for name in Ngrams._fields))
    unigrams, successors, counts = (x.shape for x in ngrams)
    if not successors == counts == (*unigrams, *counts[1:2]):
      raise ValueError("its arrays do not fit together")
  except (ValueError, TypeError, KeyError, OSError, EOFError, *_DAMAGED) as error:
    raise InputError(f"{path} holds no n-gram counts or is damaged: {error}.") from error
  return ngrams


@dataclasses.dataclass(frozen=True)
class NgramDraft(Draft):
  """Guesses from unigrams (order 1) or from bigrams (order 2) of its parameters, `Ngrams`.

  After a context never seen a bigram is the unigram; else only the successors kept are guessed.
  Nothing is smoothed: exactness needs no q > 0, since the residual supplies what the draft never
  guesses, and mass for tokens never seen would be taken from guesses that may stand. At
  temperature 0 only the most frequent token matters, which adding to all counts leaves in place.

  Attributes:
    order: 1 or 2.
    vocab_size: V.
    sampling: how counts become q.
    tree: a chain.

  Raises:
    InputError: order is neither 1 nor 2, the tree is no chain, or (in `start`) the counts are of
      another vocabulary.
  """

  order: int
  vocab_size: int
  sampling: Sampling
  tree: AnyTree

  def __post_init__(self):
    if self.order not in (1, 2):
      raise InputError(f"order is {self.order!r}; it must be 1 for unigrams or 2 for bigrams.")
    require_chain("an n-gram draft", self.tree)

  def init(self, params: Ngrams, context: Context, hidden: Array) -> Any:
    if params.unigrams.shape != (self.vocab_size,):
      raise InputError(
        f"The n-gram counts are of {len(params.unigrams)} tokens but the target's vocabulary has "
        f"{self.vocab_size}; count them again with its own vocabulary."
      )
    return ()

  def propose(
    self, params: Ngrams, state: Any, context: Context, rng: Array
  ) -> tuple[Proposal, Any]:
    gamma = self.tree.depth
    keys = jax.vmap(lambda key: jax.random.split(key, gamma), out_axes=1)(rng)  # [G, B]

    def step(newest, key):
      guess, q = sample_logits(key, jnp.log(self._weights(params, newest)), self.sampling)
      return guess, (guess, q)

    _, (guesses, q) = lax.scan(step, context.last_token, keys)
    return Proposal(guesses.swapaxes(0, 1), q.swapaxes(0, 1)), state

  def _weights(self, ngrams: Ngrams, newest: Array) -> Array:
    """How often each token [B, V] follows newest [B]."""
    shape = len(newest), self.vocab_size
    unigrams = jnp.broadcast_to(ngrams.unigrams.astype(jnp.float32), shape)
    if self.order == 1:
      return unigrams
    add = lambda row, token, count: row.at[token].add(count)
    follow, counts = ngrams.successors[newest], ngrams.counts[newest]
    bigrams = jax.vmap(add)(jnp.zeros_like(unigrams), follow, counts)
    return jnp.where(counts[:, :1] > 0, bigrams, unigrams)
