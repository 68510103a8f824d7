"""The first run: translate some sentences, show the rounds, measure the speedup."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from specdec_jax.errors import InputError
from specdec_jax.experiments.speedup import show_speedup
from specdec_jax.experiments.translate import decode_lines
from specdec_jax.pairs import Pair
from specdec_jax.records import open_results
from specdec_jax.reporting.rounds import LEGEND, rounds_text
from specdec_jax.sampling import Sampling


def quickstart(
  pair: Pair,
  sentences: Sequence[str],
  output_dir: str,
  gammas: Sequence[int] = (3, 5, 7),
  temperatures: Sequence[float] = (0.0, 1.0),
  show_rounds: int = 3,
  max_new_tokens: int = 64,
  repeats: int = 5,
) -> None:
  """Translate sentences by speculative decoding, then measure it on them (see `speedup`).

  Args:
    pair: what decodes; see `load_pair`.
    sentences: sources.
    output_dir: gets `results.jsonl`.
    gammas: guesses a round, each measured; the middle one makes the translations printed.
    temperatures: 0 is argmax; each measured.
    show_rounds: for so many sentences the rounds are printed, accepted and rejected in colour.
    max_new_tokens: limit for a translation.
    repeats: of each timed decode, interleaved.
  """
  if not (sentences and gammas):
    raise InputError("There is nothing to show: no sentences, or no gammas.")
  # A folder that cannot be written is told now, not after the work.
  with open_results(output_dir) as results:
    _show_rounds(pair, sentences, gammas[len(gammas) // 2], show_rounds, max_new_tokens)
    show_speedup(
      pair,
      sentences,
      results,
      [Sampling(temperature=t) for t in temperatures],
      gammas,
      max_new_tokens=max_new_tokens,
      repeats=repeats,
    )


def _show_rounds(pair: Pair, sentences, gamma: int, show_rounds: int, max_new_tokens: int) -> None:
  console = Console()
  console.print(Text.assemble("A line is a round: ", LEGEND, f" (gamma {gamma}, argmax)\n"))
  batches = decode_lines(pair, sentences, Sampling(temperature=0.0), gamma, 1, max_new_tokens)
  for i, (sentence, ((translation,), decoded)) in enumerate(zip(sentences, batches)):
    console.print(Text(f"  {sentence}", style="dim"))
    console.print(Text(f"  {translation}"))
    if i < show_rounds and decoded:
      for line in rounds_text(decoded[0], 0, pair.vocabulary.pieces):
        console.print(Text("    |") + line)
      length, rounds = int(decoded[0].lengths[0]), int(decoded[0].num_rounds)
      console.print(f"    {length} tokens from {rounds} passes of the target\n")
  console.print()
