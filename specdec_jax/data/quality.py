"""Quality of outputs against references: BLEU, ROUGE, and F0.5 of corrections."""

from collections.abc import Sequence

import numpy as np

from specdec_jax.data.edits import f_score
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
  its stemmer; each line of a text counts as a sentence. F0.5 is that of the edits of corrected
  sentences (`edits.f_score`) and needs the sources. An exact match counts 100.

  Raises:
    InputError: the metric is unknown, or it is a ROUGE metric and rouge_score is not installed.
  """
  if metric not in METRICS:
    raise InputError(f"metric is {metric!r}; it must be one of {', '.join(METRICS)}.")
  if metric == "F0.5":
    if sources is None:
      raise InputError("metric is F0.5, which needs the sources of the texts.")
    return f_score(sources, outputs, references)
  if metric == "exact match":
    return 100 * float(np.mean([*map(str.__eq__, outputs, references)]))
  if metric == "BLEU":
    import sacrebleu

    return sacrebleu.corpus_bleu([*outputs], [[*references]]).score
  try:
    from rouge_score import rouge_scorer
  except ModuleNotFoundError as error:
    raise InputError(
      f"metric is {metric}, which needs rouge_score: pip install rouge-score."
    ) from error
  kind = metric.replace("ROUGE-", "rouge")
  scorer = rouge_scorer.RougeScorer([kind], use_stemmer=True)
  scores = [
    scorer.score(reference, output)[kind].fmeasure for reference, output in zip(references, outputs)
  ]
  return 100 * float(np.mean(scores))
