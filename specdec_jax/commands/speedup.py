"""Measured speedup beside its prediction, as a table, as records and as a page."""

import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from rich.console import Console

from specdec_jax.commands.translate import decode_lines
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree, chain
from specdec_jax.data.text import read_lines
from specdec_jax.errors import require_types
from specdec_jax.measurement.calibrate import resolve_gammas
from specdec_jax.measurement.measure import measure
from specdec_jax.measurement.speed import Baseline, own_baseline
from specdec_jax.pairs import Pair
from specdec_jax.progress import Progress
from specdec_jax.records import open_results, read
from specdec_jax.reporting import speeds
from specdec_jax.reporting.formats import render
from specdec_jax.reporting.html import write_report
from specdec_jax.reporting.rounds import read_rounds
from specdec_jax.reporting.stepper import Example


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
  """Measure a pair on texts, print a table, append to `results.jsonl` and write `report.html`.

  Args:
    pair: what decodes; see `pairs.load_pair`.
    texts: sources.
    output_dir: gets both files; settings recorded there already are not measured again.
    gammas: guesses a round, each measured; the middle one makes the rounds in the report. 'auto'
      among them is the best for each temperature (`calibrate.resolve_gammas`).
    temperatures: 0 is argmax; each measured.
    top_k: tokens that are kept above temperature 0; 0 keeps all.
    batch_size: texts decoded together.
    max_new_tokens: limit for each.
    repeats: of each timed decode, interleaved.
    seed: of all sampling.
    lenience: l of Appendix A.5; below 1 the output is no longer the target's own.
    report_examples: for so many texts the report has the rounds at each temperature.
    baseline: makes of the pair what speed is compared with; our own plain decoding unless given.
    references: an output for each text, or a file of them, one a line, of which there may be more;
      records and table then have the outputs' quality beside plain decoding's.
    metric: of `measurement.quality.METRICS`.
  """
  require_types(speedup, locals())
  samplings = [Sampling(temperature=t, top_k=top_k if t else 0) for t in temperatures]
  settings = batch_size, max_new_tokens, seed, lenience
  if isinstance(references, str):
    references = read_lines(references, limit=len(texts))
  measured = resolve_gammas(gammas, pair, texts, samplings, *settings)
  with open_results(output_dir) as results:
    shown = texts[: max(0, report_examples)]
    show_speedup(
      pair,
      texts,
      results,
      samplings,
      measured,
      decode_examples(pair, shown, samplings, measured, max_new_tokens, seed, lenience),
      batch_size=batch_size,
      max_new_tokens=max_new_tokens,
      repeats=repeats,
      seed=seed,
      lenience=lenience,
      baseline=baseline(pair),
      references=references,
      metric=metric,
    )


def show_speedup(
  pair: Pair,
  texts: Sequence[str],
  results: str,
  samplings: Sequence[Sampling],
  gammas: Sequence[int],
  examples: Iterable[Example],
  **settings,
) -> None:
  """Measure a pair on texts into file `results`, print the table and write the report beside it.

  `examples` are asked for once all is measured; `settings` as `measure`.
  """
  console = Console(markup=False, soft_wrap=True)
  with Progress() as bar:
    task = bar.add_task("measuring")
    records = measure(
      pair,
      texts,
      results,
      samplings,
      gammas,
      **settings,
      progress=lambda sampling, done, total: bar.update(
        task,
        description=f"measuring at temperature {sampling.temperature:g}",
        completed=done,
        total=total,
      ),
    )
    bar.update(task, description="decoding for the report")
    report = str(pathlib.Path(results).with_name("report.html"))
    title = f"Speculative decoding: {records[0].subject}"
    write_report(report, read(results), [*examples], title)
  for table in (speeds.speed_table, speeds.budget_table, speeds.roofline_table):
    console.print(render(table(records), "terminal"))
  console.print(
    f"Records: {results} (measured once; delete the file to measure again); as a page: {report}"
  )


def decode_examples(
  pair: Pair,
  texts: Sequence[str],
  samplings: Sequence[Sampling],
  gammas: Sequence[int | AnyTree],
  max_new_tokens: int,
  seed: int = 0,
  lenience: float = 1.0,
) -> Iterator[Example]:
  """Texts one by one, by each sampling with the middle one of gammas, or of trees.

  `measure` decodes the same from them; the rest of the arguments as there.
  """
  middle = gammas[len(gammas) // 2]
  tree = chain(middle) if isinstance(middle, int) else middle
  for sampling in samplings:
    shape = pair.guesses(sampling, tree)
    num_nodes = None if shape.is_chain else shape.num_nodes
    parents = () if isinstance(shape, DynamicTree) else shape.parents
    batches = decode_lines(pair, texts, sampling, tree, 1, max_new_tokens, seed, lenience)
    for text, ((output,), (decoded,)) in zip(texts, batches):
      rounds = read_rounds(decoded, 0, pair.vocabulary.pieces, parents)
      yield Example(text, output, sampling.temperature, shape.depth, rounds, num_nodes)
