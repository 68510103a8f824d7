"""Extractive summaries: the sentences of a text that overlap most with a reference summary.

A greedy search selects them (Nallapati et al., 2017), as targets of training for a model that
summarizes.
"""

import collections
import re
from collections.abc import Sequence

_WORD = re.compile(r"\w+")
_END = re.compile(r"""(?<=[.!?])(?<!\b[A-Z]\.)(["')]?) +(?=["'(]?[A-Z0-9])""")


def sentences(text: str) -> list[str]:
  """Split a text into sentences, after a mark that a space and a capital letter or digit follow."""
  return [sentence for sentence in _END.sub(r"\1\n", text).split("\n") if sentence]


def first_sentences(parts: Sequence[str], max_words: int) -> list[str]:
  """Return the first sentences that together have at most `max_words` words."""
  chosen: list[str] = []
  for sentence in parts:
    max_words -= len(sentence.split())
    if max_words < 0:
      break
    chosen.append(sentence)
  return chosen


def extract(
  parts: Sequence[str], summary: str, max_sentences: int = 3, max_words: int = 64
) -> list[str]:
  """Return the sentences that summarize a text best, in the order of the text.

  Sentences are added one at a time, each time the one that raises the score most, until none does.
  The score is the F1 of words and of pairs of neighboring words with the reference summary, added.

  Args:
    parts: sentences of the text.
    summary: reference summary.
    max_sentences: maximum number of sentences.
    max_words: maximum number of words in total.
  """
  reference = _counts([summary])
  chosen: list[int] = []
  best = 0.0
  while len(chosen) < max_sentences:
    candidates = []
    for i in sorted({*range(len(parts))} - {*chosen}):
      candidate = sorted([*chosen, i])
      text = [parts[j] for j in candidate]
      if sum(len(sentence.split()) for sentence in text) <= max_words:
        candidates.append((_f1(_counts(text), reference), -i, candidate))
    if not candidates or (top := max(candidates))[0] <= best:
      break
    best, _, chosen = top
  return [parts[i] for i in chosen]


def _counts(texts: Sequence[str]) -> tuple[collections.Counter, collections.Counter]:
  """Return how often each word occurs, and each pair of neighboring words within a text."""
  words = [_WORD.findall(text.lower()) for text in texts]
  pairs = [pair for row in words for pair in zip(row, row[1:])]
  return collections.Counter(word for row in words for word in row), collections.Counter(pairs)


def _f1(found: Sequence[collections.Counter], wanted: Sequence[collections.Counter]) -> float:
  """Return the sum of the F1 scores of two lists of counts."""
  return sum(
    2 * (a & b).total() / total for a, b in zip(found, wanted) if (total := a.total() + b.total())
  )
