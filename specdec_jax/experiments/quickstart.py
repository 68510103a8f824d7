"""The first run: translate some sentences, show the rounds, measure the speedup."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from specdec_jax import records as record_files
from specdec_jax.experiments.measure import measure
from specdec_jax.experiments.translate import decode_lines
from specdec_jax.pairs import Pair
from specdec_jax.reporting.rounds import LEGEND, rounds_text
from specdec_jax.reporting.table import speed_table
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
  seed: int = 0,
) -> None:
  """Translate sentences and measure: prints text and a table, appends to `results.jsonl`.

  Args:
    pair: what decodes; see `load_pair`.
    sentences: sources.
    output_dir: gets `results.jsonl`; settings recorded there already are not measured again.
    gammas: guesses a round, each measured.
    temperatures: 0 is argmax; each measured.
    show_rounds: for so many sentences the rounds are printed, accepted and rejected in colour.
    max_new_tokens: limit for a translation.
    repeats: of each timed decode, interleaved.
    seed: of all sampling.
  """
  console = Console()
  results = record_files.open_results(output_dir)
  _translate(console, pair, sentences, show_rounds, gammas[len(gammas) // 2], max_new_tokens, seed)
  with Progress(console=console, transient=True) as bar:
    for temperature in temperatures:
      sampling = Sampling(temperature=temperature)
      task = bar.add_task(f"measuring at temperature {temperature:g}", total=len(sentences))
      for record in measure(
        pair,
        sentences,
        sampling,
        gammas,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        seed=seed,
        progress=lambda task=task: bar.advance(task),
      )[0]:
        record_files.append(results, record)
  console.print(speed_table(record_files.read(results)))
  console.print(f"Records: {results}")


def _translate(console, pair: Pair, sentences, show_rounds, gamma, max_new_tokens, seed) -> None:
  """Print each sentence and its translation, the first ones round by round."""
  greedy = Sampling(temperature=0.0)
  console.print(f"Each line of a round: {LEGEND.markup} (gamma = {gamma}, temperature 0).\n")
  batches = decode_lines(pair, sentences, greedy, gamma, 1, max_new_tokens, seed)
  for i, (sentence, ((translation,), (decoded,))) in enumerate(zip(sentences, batches)):
    console.print(Text(f"  {sentence}", style="dim"))
    console.print(Text(f"  {translation}"))
    if i < show_rounds:
      for line in rounds_text(decoded, 0, pair.vocabulary.pieces):
        console.print(Text("    |") + line)
      length, rounds = int(decoded.lengths[0]), int(decoded.num_rounds)
      console.print(f"    {length} tokens from {rounds} passes of the target\n")
