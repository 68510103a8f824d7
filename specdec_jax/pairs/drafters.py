"""Drafts of negligible cost, ready for a pair: `pairs.load_pair(draft=copy_from_context)`."""

import functools

from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.drafts.copy import CopyDraft
from specdec_jax.drafts.ngram import NgramDraft, fit_ngrams
from specdec_jax.pairs import Drafter


def copy_from_context(vocabulary: Vocabulary, max_ngram: int = 3) -> Drafter:
  """What followed the latest tokens in the source, or earlier in the text; see `CopyDraft`."""
  size = len(vocabulary)
  return Drafter(f"copy-{max_ngram}", lambda sampling, tree: CopyDraft(size, tree, max_ngram))


def unigram(vocabulary: Vocabulary, path: str) -> Drafter:
  """The frequencies of tokens in a text, one output of the task a line."""
  return _ngram("unigram", 1, vocabulary, path)


def bigram(vocabulary: Vocabulary, path: str) -> Drafter:
  """The frequencies of what follows each token in a text, one output of the task a line."""
  return _ngram("bigram", 2, vocabulary, path)


def _ngram(name: str, order: int, vocabulary: Vocabulary, path: str) -> Drafter:
  rows, start_id = map(vocabulary.encode, read_lines(path)), vocabulary.start_id
  counts = fit_ngrams(rows, len(vocabulary), start_id=start_id)
  return Drafter(name, functools.partial(NgramDraft, order, len(vocabulary)), counts)
