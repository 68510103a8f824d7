"""Quality of outputs against references: BLEU, ROUGE, and F0.5 of corrections."""

import difflib
from collections.abc import Sequence

import numpy as np

from specdec_jax.errors import InputError

METRICS = ("BLEU", "ROUGE-1", "ROUGE-2", "ROUGE-Lsum", "F0.5", "exact match")


def quality(
  metric: str,
  outputs: Sequence[str],
  references: Sequence[str],
  sources: Sequence[str] | None = None,
) -> float:
  """Score outputs against references on a scale from 0 to 100.

  BLEU is sacrebleu's corpus score (tokenizer 13a, cased). ROUGE is the mean F1 of rouge_score with
  its stemmer; each line of a text counts as a sentence. Both need the extra `experiments`. F0.5 is
  that of the edits of corrected sentences (`f_score`) and needs the sources. An exact match counts
  100.
  """
  if metric not in METRICS:
    raise InputError(f"metric is {metric!r}; it must be one of {', '.join(METRICS)}.")
  if metric == "F0.5":
    return f_score(sources or (), outputs, references)
  if metric == "exact match":
    return 100 * float(np.mean([*map(str.__eq__, outputs, references)]))
  if metric == "BLEU":
    import sacrebleu

    return sacrebleu.corpus_bleu([*outputs], [[*references]]).score
  from rouge_score import rouge_scorer

  kind = metric.replace("ROUGE-", "rouge")
  scorer = rouge_scorer.RougeScorer([kind], use_stemmer=True)
  scores = [
    scorer.score(reference, output)[kind].fmeasure for reference, output in zip(references, outputs)
  ]
  return 100 * float(np.mean(scores))


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
  """Return the F score of all edits of the outputs, from 0 to 100, after ERRANT (Bryant, 2017).

  An edit replaces a span of the words of a source. The edits of a text are those of an alignment of
  its words with the words of the source. Unlike ERRANT, edits are not classified, and punctuation
  is part of its word. With beta 0.5, precision weighs twice as much as recall. Without any edit,
  the score is 100.
  """
  correct = proposed = expected = 0
  for source, output, reference in zip(sources, outputs, references, strict=True):
    ours, gold = edits(source, output), edits(source, reference)
    correct += len(ours & gold)
    proposed += len(ours)
    expected += len(gold)
  weighted = beta**2 * expected + proposed
  return 100 * (1 + beta**2) * correct / weighted if weighted else 100.0
