"""Measurement of the speedup of a pair, and comparison with the predicted speedup."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.rounds import Example
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, chain
from specdec_jax.data.text import read_lines
from specdec_jax.generate import GenerateCall
from specdec_jax.measure.calibrate import resolve_gammas
from specdec_jax.measure.records import Record, read, results_path
from specdec_jax.measure.report import best_results, report
from specdec_jax.measure.speed import Baseline, own_baseline, speed_steps
from specdec_jax.measure.sweep import sweep
from specdec_jax.measure.tables import no_alpha, speed_table
from specdec_jax.pair import Pair


def speedup(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  gammas: Sequence[int | Literal["auto"]] | Literal["auto"] = (3, 5, 7),
  temperatures: Sequence[float] = (0.0, 1.0),
  top_k: int = 0,
  top_p: float = 1.0,
  batch_size: int = 1,
  max_new_tokens: int = 64,
  repeats: int = 3,
  seed: int = 0,
  lenience: float = 1.0,
  report_examples: int = 4,
  baseline: Callable[[Pair], Baseline] = own_baseline,
  references: str | Sequence[str] | None = None,
  metric: str = "BLEU",
) -> None:
  """Measure the speedup on texts, print it, and write `results.jsonl` and `report.html`.

  Args:
    output_dir: folder for both files. Settings that it already records are not measured again.
    gammas: numbers of draft tokens per round to measure; 'auto' stands for the best number at each
      temperature (`calibrate.resolve_gammas`). The middle one is used for the rounds in the report.
    temperatures: sampling temperatures to measure; 0 is argmax.
    top_k: number of most probable tokens to sample from above temperature 0; 0 means no limit.
    top_p: probability of the most probable tokens to sample from above temperature 0; 1 means no
      limit.
    batch_size: number of texts that are decoded together.
    max_new_tokens: limit for each output.
    repeats: number of timed decodes of each text by the baseline and each gamma, in turn.
    lenience: lenience l of Appendix A.5; below 1, the output no longer has the target's
      distribution.
    report_examples: number of texts whose rounds are in the report, at each temperature.
    baseline: function from a pair to the baseline that the speedup is relative to; by default this
      package's autoregressive decoding.
    references: one reference text for each source, or the path of a file with at least as many
      lines, to measure the quality of the outputs and of the baseline's outputs.
    metric: one of `data.quality.METRICS`.
  """
  samplings = [
    Sampling(temperature=t, top_k=top_k, top_p=top_p) if t else Sampling(temperature=t)
    for t in temperatures
  ]
  settings = [DecodeSettings(s, batch_size, max_new_tokens, seed, lenience) for s in samplings]
  if isinstance(references, str):
    references = read_lines(references, limit=len(texts))
  results = results_path(output_dir)
  resolved = resolve_gammas(gammas, pair, texts, settings)

  def page(measured: list[Record]) -> str:
    shown = texts[: max(0, report_examples)]
    examples = decode_examples(pair, shown, settings, chain(resolved[len(resolved) // 2]))
    title = f"Speculative decoding: {measured[0].subject}"
    return report(read(results), [*examples], title)

  steps = speed_steps(pair, texts, settings, resolved, repeats, baseline(pair), references, metric)
  measured = sweep(output_dir, steps, lambda x: [speed_table(x, no_alpha(x))], page)
  print("", *best_results(measured), sep="\n")


def decode_examples(
  pair: Pair, texts: Sequence[str], settings: Iterable[DecodeSettings], tree: AnyTree
) -> Iterator[Example]:
  """Decode texts one at a time with each of the settings, as examples for a report.

  The outputs equal those that `speedup` measures with the same settings at batch size 1. There are
  none of recordings.
  """
  if pair.target.speech is not None:
    return
  for each in settings:
    shape = pair.proposed_tree(each.sampling, tree)
    num_nodes = None if shape.is_chain else shape.num_nodes
    call = GenerateCall.of(pair, each, tree)
    index = [i for i, text in enumerate(texts) if pair.can_decode(text)]
    shown = [texts[i] for i in index]
    sources = [pair.encode(text) for text in shown]
    for text, (output,) in zip(shown, call.decode(sources, index, None, size=1, seed=each.seed)):
      temperature = each.sampling.temperature
      yield Example(text, output.text, temperature, shape.depth, output.round_texts, num_nodes)
