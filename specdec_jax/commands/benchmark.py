"""Ratios of speed beside those recorded, and which fell: a benchmark, not a test.

Seconds say more about the machine than about this code; ratios within one run say less about it.
"""

import functools
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec_jax.atomic_files import atomic_write
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.errors import InputError, require_count, require_types
from specdec_jax.measurement.costs import Costs, round_calls, round_costs
from specdec_jax.measurement.measure import settings_to_measure
from specdec_jax.measurement.timing import interleaved_medians
from specdec_jax.pairs import Pair

GAMMA = 7
LIMIT = 64  # tokens of a text

HIGHER_IS_BETTER = {
  "v(7)": False,
  "c": False,
  "speedup, temperature 0": True,
  "speedup, temperature 1": True,
}

LEGEND = (
  "v(7): time of a round of gamma 7 without drafting / of a plain step; c: draft step / plain "
  "step; speedup: over our own plain decoding, gamma 7; fell: worse than each recorded run by more "
  "than these differ among themselves; gained: better by more."
)


def benchmark(
  pair: Pair, sentences: Sequence[str], recorded: str, record: bool = False, runs: int = 5
) -> None:
  """Measure the ratios and print them beside those in file `recorded`, or record them there.

  Args:
    pair: what decodes.
    sentences: sources; the first 8 are decoded.
    recorded: path of a JSON file: device, kernels, versions, and each ratio in each run.
    record: measure `runs` times and write the file, instead of reading it.
    runs: to be recorded; how they differ decides what counts as fallen.

  Raises:
    InputError: `recorded` is no such file.
  """
  require_types(benchmark, locals())
  require_count("runs", runs)
  console = Console(markup=False)
  setting = _setting(pair, sentences)
  if record:
    measured = [ratios(pair, sentences) for _ in range(runs)]
    rows = {name: [run[name] for run in measured] for name in measured[0]}
    write(recorded, {**setting, "ratios": rows})
    console.print(f"Recorded in {recorded}: {setting}")
    return
  then = read(recorded)
  console.print(_table(ratios(pair, sentences), then["ratios"]))
  console.print(Text(LEGEND, style="dim"))
  if changed := [f"{k} {then.get(k)}, here {v}" for k, v in setting.items() if then.get(k) != v]:
    console.print(f"Recorded elsewhere: {'; '.join(changed)}.")


def _setting(pair: Pair, sentences: Sequence[str]) -> dict[str, str]:
  """What ratios depend on beside this code."""
  (setting,) = settings_to_measure(pair, sentences, [Sampling(0.0)], [GAMMA], 1, LIMIT, 0, 1.0)
  return {
    "device": setting.device,
    "kernels": setting.kernels,
    "versions": f"specdec_jax {setting.specdec_version}, jax {setting.jax_version}",
  }


def ratios(pair: Pair, sentences: Sequence[str]) -> dict[str, float]:
  """Each of `HIGHER_IS_BETTER`, measured: medians of interleaved repeats."""
  texts = sentences[:8]
  width = pair.prompt(texts).shape[1]  # of all, so that there is one program of each kind
  prompts = [pair.prompt([text], width) for text in texts]
  costs = _costs(pair, prompts[0])
  speedups = [_speedup(pair, prompts, sampling) for sampling in (Sampling(0.0), Sampling(1.0))]
  values = costs.v, costs.c, *speedups
  return dict(zip(HIGHER_IS_BETTER, map(float, values)))


def _costs(pair: Pair, prompt: Array) -> Costs:
  """`measure_costs` without the reading of prompts, which would be more to compile."""
  draft = pair.draft(Sampling(0.0), chain(GAMMA))
  seconds, _ = interleaved_medians(
    round_calls(pair, [draft], prompt, Sampling(0.0), LIMIT), repeats=9
  )
  return round_costs((math.nan, math.nan), seconds, [GAMMA])[0]


def _speedup(pair: Pair, prompts: Sequence[Array], sampling: Sampling) -> float:
  """Ratio of tokens a second, totals over totals."""
  decodes = pair.decode_fn(sampling, 0), pair.decode_fn(sampling, GAMMA)
  seconds, tokens = [], []
  for i, prompt in enumerate(prompts):
    asked: dict[str, Any] = dict(prompt=prompt, rng=row_keys(0, i, 1), max_new_tokens=LIMIT)
    calls = [functools.partial(decode, **asked) for decode in decodes]
    medians, outputs = interleaved_medians(calls, repeats=5)
    seconds.append(medians)
    tokens.append([int(output.lengths.sum()) for output in jax.device_get(outputs)])
  plain, ours = np.sum(tokens, axis=0) / np.sum(seconds, axis=0)
  return ours / plain


def verdict(value: float, recorded: Sequence[float], higher_is_better: bool) -> str:
  """'fell' or 'gained' where a ratio is further out than the recorded runs' range is wide."""
  low, high = min(recorded), max(recorded)
  width = high - low
  if low - width <= value <= high + width:
    return "held"
  return "gained" if (value > high) == higher_is_better else "fell"


def write(path: str, content: Mapping[str, Any]) -> None:
  """Write the file of recorded ratios, whole or not at all."""
  with atomic_write(path) as file:
    file.write(json.dumps(content, indent=2) + "\n")


def read(path: str) -> dict[str, Any]:
  """What `write` wrote.

  Raises:
    InputError: no such file, or another kind of file.
  """
  try:
    content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    if set(content["ratios"]) != set(HIGHER_IS_BETTER) or not all(content["ratios"].values()):
      raise ValueError("its ratios are others")
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise InputError(
      f"{path} does not hold the recorded ratios ({error}); record them with --gin.RECORD=True."
    ) from error
  return content


def _table(measured: Mapping[str, float], recorded: Mapping[str, Sequence[float]]) -> Table:
  table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
  for heading in ("ratio", "here", "recorded", "its runs", ""):
    table.add_column(heading, justify="left" if heading in ("ratio", "") else "right")
  for name, higher_is_better in HIGHER_IS_BETTER.items():
    runs = recorded[name]
    table.add_row(
      name,
      f"{measured[name]:.3f}",
      f"{statistics.median(runs):.3f}",
      f"{min(runs):.3f} to {max(runs):.3f}",
      verdict(measured[name], runs, higher_is_better),
    )
  return table
