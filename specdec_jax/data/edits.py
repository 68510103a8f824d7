"""Scores of corrected sentences by their edits, as ERRANT computes them (Bryant et al., 2017).

An edit replaces a span of the words of a source. The edits of a text are those of an alignment of
its words with the words of the source. Unlike ERRANT, edits are not classified, and punctuation is
part of its word.
"""

import difflib
from collections.abc import Sequence

Edit = tuple[int, int, tuple[str, ...]]


def edits(source: str, text: str) -> set[Edit]:
  """Return the edits that turn a source into a text, each as (start, end, new words)."""
  old, new = source.split(), text.split()
  matcher = difflib.SequenceMatcher(a=old, b=new, autojunk=False)
  return {
    (start, end, tuple(new[first:last]))
    for kind, start, end, first, last in matcher.get_opcodes()
    if kind != "equal"
  }


def f_score(
  sources: Sequence[str], outputs: Sequence[str], references: Sequence[str], beta: float = 0.5
) -> float:
  """Return the F score of all edits of the outputs, from 0 to 100.

  Precision is the share of the outputs' edits that are edits of the references, and recall the
  share of the references' edits that are edits of the outputs. With beta 0.5, precision weighs
  twice as much as recall. Without any edit, the score is 100.
  """
  correct = proposed = expected = 0
  for source, output, reference in zip(sources, outputs, references, strict=True):
    ours, gold = edits(source, output), edits(source, reference)
    correct += len(ours & gold)
    proposed += len(ours)
    expected += len(gold)
  weighted = beta**2 * expected + proposed
  return 100 * (1 + beta**2) * correct / weighted if weighted else 100.0
