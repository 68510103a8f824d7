"""Quickstart: decode some sentences, show the rounds, and measure the speedup."""

import functools
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from specdec_jax.commands.speedup import decode_examples, speedup
from specdec_jax.core.counts import identical
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.rounds import LEGEND, TREE_LEGEND, Example, round_text
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import Tree, chain
from specdec_jax.errors import InputError, require_count
from specdec_jax.measure.costs import interleaved_medians
from specdec_jax.measure.records import results_path
from specdec_jax.measure.speed import own_baseline
from specdec_jax.pair import Pair


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
  """Decode sentences, print the speedup of one setting, then measure all settings with `speedup`.

  Other arguments are those of `commands.speedup.speedup`.

  Args:
    gammas: numbers of draft tokens per round to measure. The outputs that are printed have the
      middle one and temperature 0.
    show_rounds: number of sentences whose rounds are printed.

  Raises:
    InputError: there are no sentences or gammas, or a gamma is less than 1.
  """
  if not (sentences and gammas):
    raise InputError("There is nothing to show: no sentences, or no gammas.")
  for gamma in gammas:
    require_count("gamma", gamma)
  results_path(output_dir)  # an unwritable folder raises before any work is done
  argmax = DecodeSettings(Sampling(temperature=0.0), max_new_tokens=max_new_tokens)
  tree = chain(sorted(gammas)[len(gammas) // 2])
  show_examples(decode_examples(pair, sentences, [argmax], tree), show_rounds)
  print(
    f"These sentences again, one at a time: {_speedup(pair, sentences, argmax, tree)}\n\n"
    f"Accurate measurements with {len(gammas)} gammas and {len(temperatures)} temperatures, "
    f"repeats: {repeats}. They take minutes; --repeats 1 is fastest.\n",
    flush=True,
  )
  speedup(
    pair,
    sentences,
    output_dir,
    gammas,
    temperatures,
    max_new_tokens=max_new_tokens,
    repeats=repeats,
    report_examples=report_examples,
  )


def _speedup(pair: Pair, texts: Sequence[str], settings: DecodeSettings, tree: Tree) -> str:
  """Return how fast the texts are decoded at temperature 0, and if the outputs are identical.

  `speedup` reuses the compiled programs.
  """
  options = dict(rng=row_keys(settings.seed, 0, 1), max_new_tokens=settings.max_new_tokens)
  baseline = functools.partial(own_baseline(pair).decode, sampling=settings.sampling)
  decodes = baseline, pair.decode_fn(settings.sampling, tree)
  prompts = [pair.prompt([text]) for text in texts if pair.can_decode(text)]
  calls = [[functools.partial(f, prompt, **options) for prompt in prompts] for f in decodes]
  (plain, speculative), outputs = interleaved_medians(calls, repeats=1)
  return (
    f"{sum(plain) / sum(speculative):.1f} times as fast as autoregressive decoding (gamma "
    f"{tree.depth}, argmax). The outputs {'are identical' if identical(*outputs) else 'DIFFER'}, "
    "token for token."
  )


def show_examples(examples: Iterable[Example], show_rounds: int) -> None:
  """Print each example as soon as it is decoded, the first `show_rounds` with their rounds."""
  console = Console()
  for i, example in enumerate(examples):
    if not i:
      console.print(_legend(example))
    for text, indent in ((Text(example.source, "dim"), 2), (Text(example.translation, "bold"), 4)):
      console.print(Padding(text, (0, 0, 0, indent), expand=False))
    if i < show_rounds and example.rounds:
      for round_ in example.rounds:
        lines = Text("\n       ").join(round_text(round_).split())
        console.print(Text("      |") + lines, soft_wrap=bool(round_.branches))
      console.print(f"      {example.cost}\n")
  console.print()


def _legend(example: Example) -> Text:
  sampling = f"temperature {example.temperature:g}" if example.temperature else "argmax"
  settings = f" ({example.proposal}, {sampling})\n"
  if example.num_nodes is None:
    return Text.assemble("Each line is a round: ", LEGEND, settings)
  return Text.assemble(
    "Each | begins a round; the lines below it are other branches of its tree: ",
    TREE_LEGEND,
    settings,
  )
