"""The first run: decode some sentences, show the rounds, measure the speedup."""

import itertools
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from specdec_jax.commands.speedup import decode_examples, show_speedup
from specdec_jax.core.sampling import Sampling
from specdec_jax.errors import InputError, require_count, require_types
from specdec_jax.pairs import Pair
from specdec_jax.records import open_results
from specdec_jax.reporting.rounds import LEGEND, TREE_LEGEND, round_text
from specdec_jax.reporting.stepper import Example


def quickstart(
  pair: Pair,
  sentences: Sequence[str],
  output_dir: str,
  gammas: Sequence[int] = (3, 5, 7),
  temperatures: Sequence[float] = (0.0, 1.0),
  show_rounds: int = 3,
  max_new_tokens: int = 64,
  repeats: int = 5,
  report_examples: int = 4,
) -> None:
  """Decode sentences by speculation, then measure it on them (see `speedup`).

  Args:
    pair: what decodes; see `load_pair`.
    sentences: sources.
    output_dir: gets `results.jsonl` and `report.html`.
    gammas: guesses a round, each measured; the middle one makes the outputs shown.
    temperatures: 0 is argmax; each measured.
    show_rounds: for so many sentences the rounds are printed, accepted and rejected in colour.
    max_new_tokens: limit for an output.
    repeats: of each timed decode, interleaved.
    report_examples: for so many sentences the report has the rounds: argmax and each temperature.
  """
  require_types(quickstart, locals())
  if not (sentences and gammas):
    raise InputError("There is nothing to show: no sentences, or no gammas.")
  for gamma in gammas:
    require_count("gamma", gamma)
  argmax, samplings = Sampling(temperature=0.0), [Sampling(temperature=t) for t in temperatures]
  others, few = [s for s in samplings if s != argmax], sentences[: max(0, report_examples)]
  # A folder that cannot be written is told now, not after the work.
  with open_results(output_dir) as results:
    shown = show_examples(
      decode_examples(pair, sentences, [argmax], gammas, max_new_tokens), show_rounds
    )
    sampled = decode_examples(pair, few, others, gammas, max_new_tokens)
    print(
      f"Now the speed beside plain decoding: {len(gammas)} gammas, {len(samplings)} temperatures, "
      f"repeats: {repeats}. That takes minutes; --gin.REPEATS=1 is the shortest.\n",
      flush=True,
    )
    show_speedup(
      pair,
      sentences,
      results,
      samplings,
      gammas,
      itertools.chain(shown[: len(few)], sampled),
      max_new_tokens=max_new_tokens,
      repeats=repeats,
    )


def show_examples(examples: Iterable[Example], show_rounds: int) -> list[Example]:
  """Print texts as they are decoded, `show_rounds` of them round by round, and give them back."""
  console = Console()
  shown: list[Example] = []
  for e in examples:
    if not shown:
      about = f" ({e.guesses}, {f'temperature {e.temperature:g}' if e.temperature else 'argmax'})\n"
      says = "A line is a round: ", LEGEND
      if e.num_nodes is not None:
        says = "A | begins a round, and below are the other branches of its tree: ", TREE_LEGEND
      console.print(Text.assemble(*says, about))
    console.print(Text(f"  {e.source}", style="dim"))
    console.print(Text(f"  {e.translation}"))
    if len(shown) < show_rounds and e.rounds:
      for r in e.rounds:
        lines = Text("\n     ").join(round_text(r).split())
        console.print(Text("    |") + lines, soft_wrap=bool(r.branches))
      console.print(f"    {e.cost}\n")
    shown.append(e)
  console.print()
  return shown
