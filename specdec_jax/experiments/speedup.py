"""Measured speedup beside its prediction, as a table and as records."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from specdec_jax.experiments.measure import measure
from specdec_jax.pairs import Pair
from specdec_jax.records import open_results
from specdec_jax.reporting.table import LEGEND, speed_table
from specdec_jax.sampling import Sampling


def speedup(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  gammas: Sequence[int] = (3, 5, 7),
  temperatures: Sequence[float] = (0.0, 1.0),
  batch_size: int = 1,
  max_new_tokens: int = 64,
  repeats: int = 5,
  seed: int = 0,
  lenience: float = 1.0,
) -> None:
  """Measure a pair on texts, print a table and append to `results.jsonl`.

  Args:
    pair: what decodes; see `pairs.load_pair`.
    texts: sources.
    output_dir: gets `results.jsonl`; settings recorded there already are not measured again.
    gammas: guesses a round, each measured.
    temperatures: 0 is argmax; each measured.
    batch_size: texts decoded together.
    max_new_tokens: limit for each.
    repeats: of each timed decode, interleaved.
    seed: of all sampling.
    lenience: l of Appendix A.5; below 1 the output is no longer the target's own.
  """
  with open_results(output_dir) as results:
    show_speedup(
      pair,
      texts,
      results,
      [Sampling(temperature=t) for t in temperatures],
      gammas,
      batch_size=batch_size,
      max_new_tokens=max_new_tokens,
      repeats=repeats,
      seed=seed,
      lenience=lenience,
    )


def show_speedup(
  pair: Pair,
  texts: Sequence[str],
  results: str,
  samplings: Sequence[Sampling],
  gammas: Sequence[int],
  **settings,
) -> None:
  """Measure a pair on texts into file `results` and print the table; `settings` as `measure`."""
  console = Console(markup=False)
  with Progress(console=Console(stderr=True), transient=True) as bar:
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
  console.print(speed_table(records))
  console.print(Text(LEGEND, style="dim"))
  console.print(f"Records: {results} (measured once; delete the file to measure again)")
