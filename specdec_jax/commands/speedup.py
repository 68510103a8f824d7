"""Measurement of the speedup of a pair, and comparison with the predicted speedup."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree, chain
from specdec_jax.data.text import read_lines
from specdec_jax.measure.calibrate import resolve_gammas
from specdec_jax.measure.measure import References, measure
from specdec_jax.measure.records import open_results, read
from specdec_jax.measure.reporting import speeds
from specdec_jax.measure.reporting.html import write_report
from specdec_jax.measure.reporting.rounds import read_rounds
from specdec_jax.measure.reporting.stepper import Example
from specdec_jax.measure.speed import Baseline, Timing, own_baseline
from specdec_jax.measure.sweep import show
from specdec_jax.pair import Pair
from specdec_jax.serve.lines import decode_lines


def speedup(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  gammas: Sequence[int | Literal["auto"]] | Literal["auto"] = (3, 5, 7),
  temperatures: Sequence[float] = (0.0, 1.0),
  top_k: int = 0,
  batch_size: int = 1,
  max_new_tokens: int = 64,
  repeats: int = 5,
  seed: int = 0,
  lenience: float = 1.0,
  report_examples: int = 4,
  baseline: Callable[[Pair], Baseline] = own_baseline,
  references: str | Sequence[str] | None = None,
  metric: str = "BLEU",
) -> None:
  """Measure the speedup on texts, print a table, and write `results.jsonl` and `report.html`.

  Args:
    pair: target and draft; see `load.load_pair`.
    texts: sources.
    output_dir: folder for both files. Settings that are already recorded in the folder are not
      measured again.
    gammas: numbers of draft tokens per round to measure; 'auto' stands for the best number at each
      temperature (`calibrate.resolve_gammas`). The middle one is used for the rounds in the report.
    temperatures: sampling temperatures to measure; 0 is argmax.
    top_k: number of most probable tokens to sample from above temperature 0; 0 means no limit.
    batch_size: number of texts that are decoded together.
    max_new_tokens: limit for each output.
    repeats: number of timed decodes of each text by each method. The methods (the baseline and
      each gamma) take turns.
    seed: random seed of all sampling.
    lenience: lenience l of Appendix A.5; below 1, the output no longer has the target's
      distribution.
    report_examples: number of texts whose rounds are in the report, at each temperature.
    baseline: function from a pair to the baseline that the speedup is relative to; by default this
      package's autoregressive decoding.
    references: one reference text for each source, or the path of a file with at least as many
      lines. With references, records and table include the quality of the outputs and of the
      baseline's outputs.
    metric: one of `data.quality.METRICS`.
  """
  samplings = [Sampling(temperature=t, top_k=top_k if t else 0) for t in temperatures]
  settings = [DecodeSettings(s, batch_size, max_new_tokens, seed, lenience) for s in samplings]
  if isinstance(references, str):
    references = read_lines(references, limit=len(texts))
  resolved = resolve_gammas(gammas, pair, texts, settings)
  with open_results(output_dir) as results:
    show_speedup(
      pair,
      texts,
      results,
      settings,
      resolved,
      decode_examples(pair, texts[: max(0, report_examples)], settings, [*map(chain, resolved)]),
      Timing(repeats, baseline(pair)),
      None if references is None else References(references, metric),
    )


def show_speedup(
  pair: Pair,
  texts: Sequence[str],
  results: str,
  settings: Sequence[DecodeSettings],
  gammas: Sequence[int],
  examples: Iterable[Example],
  timing: Timing = Timing(),
  references: References | None = None,
) -> None:
  """Measure the speedup on texts, print tables, and write a report.

  Args:
    pair: target and draft.
    texts: sources.
    results: path of the file of records; the report is written to the same folder.
    settings: settings to measure, which differ in their sampling method only.
    gammas: numbers of draft tokens per round to measure.
    examples: decoded texts for the report. They are iterated over after the measurement.
    timing: number of repeats, and the baseline that the speedup is relative to.
    references: texts to score the quality of the outputs against; None for no score.
  """
  records = measure(pair, texts, results, settings, gammas, timing, references)
  report = pathlib.Path(results).with_name("report.html")
  title = f"Speculative decoding: {records[0].subject}"
  write_report(report, read(results), [*examples], title)
  tables = speeds.speed_table, speeds.budget_table, speeds.roofline_table
  show([table(records) for table in tables], results, report)


def decode_examples(
  pair: Pair,
  texts: Sequence[str],
  settings: Iterable[DecodeSettings],
  trees: Sequence[AnyTree],
) -> Iterator[Example]:
  """Decode texts one at a time with each of the settings, as examples for a report.

  The outputs equal those that `measure` gets with the same settings at batch size 1.

  Args:
    pair: target and draft.
    texts: sources.
    settings: settings of decoding; the batch size is ignored.
    trees: trees of draft tokens. Only the middle one is used.
  """
  tree = trees[len(trees) // 2]
  for each in settings:
    shape = pair.guesses(each.sampling, tree)
    num_nodes = None if shape.is_chain else shape.num_nodes
    parents = () if isinstance(shape, DynamicTree) else shape.parents
    outputs = decode_lines(pair, texts, tree, dataclasses.replace(each, batch_size=1))
    for text, (output, decoded) in zip(texts, outputs):
      if decoded is None:
        continue
      rounds = read_rounds(decoded, 0, pair.vocabulary.pieces, parents)
      yield Example(text, output, each.sampling.temperature, shape.depth, rounds, num_nodes)
