"""Unigram and bigram drafts, which sample from counts at negligible cost (Section 3.6, Table 3)."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from specdec_jax.core.arrays import split_rows
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling, sample_draft_token
from specdec_jax.core.trees import AnyTree, require_chain
from specdec_jax.core.types import Draft, DraftOptions, DraftSpec, Keys, Loaded, Proposal
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.t5 import PAD_ID


def unigram(target: Loaded, target_text: str) -> DraftSpec:
  """Return a draft from the unigrams of a text file, which has one output of the task per line."""
  return _ngram("unigram", 1, target.vocabulary, target_text)


def bigram(target: Loaded, target_text: str) -> DraftSpec:
  """Return a draft from the bigrams of a text file, which has one output of the task per line."""
  return _ngram("bigram", 2, target.vocabulary, target_text)


def _ngram(name: str, order: int, vocabulary: Vocabulary, target_text: str) -> DraftSpec:
  rows, start_id = map(vocabulary.encode_output, read_lines(target_text)), vocabulary.start_id
  counts = fit_ngrams(rows, len(vocabulary), start_id=start_id)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> NgramDraft:
    return NgramDraft(order, len(vocabulary), sampling, tree)

  return DraftSpec(name, build, counts)


class Ngrams(NamedTuple):
  """Unigram and bigram counts of a text.

  `successors` are in descending order of frequency, then by token id; missing ones have count 0.
  """

  unigrams: Int[Array, " V"]
  successors: Int[Array, "V successors"]
  counts: Int[Array, "V successors"]


def fit_ngrams(
  rows: Iterable[Sequence[int]],
  vocab_size: int,
  num_successors: int = 128,
  start_id: int = PAD_ID,
) -> Ngrams:
  """Count unigrams and bigrams.

  Args:
    rows: token ids of each text, with EOS, without a start token and without padding.
    num_successors: number of successors to store for each token.
    start_id: context of the first token of each text. If it is the padding token 0, no text may
      contain token 0. GPT-2 has a different start token, and its token 0 is an ordinary token.
  """
  require_count("num_successors", num_successors)
  if not (rows := list(rows)):
    raise InputError("There are no texts to count n-grams of; give a file that is not empty.")
  text = np.fromiter(itertools.chain.from_iterable((start_id, *row) for row in rows), np.int64)
  is_start = np.zeros(len(text), bool)
  is_start[np.cumsum([0, *(len(row) + 1 for row in rows)])[:-1]] = True
  context, token = text[:-1][~is_start[1:]], text[~is_start]
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
  is_stored = rank < num_successors
  table = np.zeros((2, vocab_size, min(num_successors, vocab_size)), np.int64)
  table[:, context[is_stored], rank[is_stored]] = token[is_stored], counts[is_stored]
  return Ngrams(*(jnp.asarray(x, jnp.int32) for x in (unigrams, *table)))


@dataclasses.dataclass(frozen=True)
class NgramDraft(Draft):
  """A draft that samples a chain from unigrams (order 1) or bigrams (order 2).

  Its parameters are `Ngrams`. After a context that was not counted, bigrams back off to unigrams.
  After a context that was counted, only the stored successors are proposed. Counts are not
  smoothed. Exactness does not need q > 0, because tokens that the draft never proposes come from
  the residual. Smoothing would take probability from tokens that may be accepted. At temperature 0
  it would change nothing.
  """

  order: int
  vocab_size: int
  sampling: Sampling
  tree: AnyTree

  def __post_init__(self):
    if self.order not in (1, 2):
      raise InputError(f"order is {self.order!r}; it must be 1 for unigrams or 2 for bigrams.")
    require_chain("an n-gram draft", self.tree)

  def init(self, params: Ngrams, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    if params.unigrams.shape != (self.vocab_size,):
      raise InputError(
        f"The n-gram counts are of {len(params.unigrams)} tokens but the target's vocabulary has "
        f"{self.vocab_size}; count them again with its own vocabulary."
      )
    return ()

  def propose(
    self, params: Ngrams, state: Any, context: Context, rng: Keys
  ) -> tuple[Proposal, Any]:
    keys = split_rows(rng, self.tree.depth)

    def step(last_token, key):
      logits = jnp.log(self._weights(params, last_token))
      sample = sample_draft_token(key, logits, self.sampling)
      return sample[0], sample

    _, samples = lax.scan(step, context.last_token, keys)
    return Proposal(*jax.tree.map(lambda x: x.swapaxes(0, 1), samples)), state

  def _weights(self, ngrams: Ngrams, last_token: Int[Array, " B"]) -> Float[Array, "B V"]:
    shape = len(last_token), self.vocab_size
    unigrams = jnp.broadcast_to(ngrams.unigrams.astype(jnp.float32), shape)
    if self.order == 1:
      return unigrams
    successors, counts = ngrams.successors[last_token], ngrams.counts[last_token]

    def scatter_row(
      row: Float[Array, " V"], tokens: Int[Array, " successors"], counts: Int[Array, " successors"]
    ) -> Float[Array, " V"]:
      return row.at[tokens].add(counts)

    bigrams = jax.vmap(scatter_row)(jnp.zeros_like(unigrams), successors, counts)
    return jnp.where(counts[:, :1] > 0, bigrams, unigrams)
