"""Benchmark that compares ratios of speeds with recorded ratios.

Times depend on the machine more than on this code. Ratios of times within one run depend on the
machine less.
"""

import functools
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import Array
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.measure.costs import (
  Costs,
  Starts,
  interleaved_medians,
  round_calls,
  round_costs,
)
from specdec_jax.measure.machine import commit
from specdec_jax.measure.records import settings_to_measure
from specdec_jax.pair import Pair

GAMMA = 7
LIMIT = 64  # maximum number of tokens per text

HIGHER_IS_BETTER = {
  "v(7)": False,
  "c": False,
  "speedup, temperature 0": True,
  "speedup, temperature 1": True,
}

LEGEND = (
  "v(7): time of a round of gamma 7 without drafting / of a step of autoregressive decoding; c: "
  "draft step / step of autoregressive decoding; speedup: over autoregressive decoding, gamma 7; "
  "fell: worse than every recorded run by more than the range of the recorded runs; gained: better "
  "by more than that range."
)


def benchmark(
  pair: Pair, sentences: Sequence[str], recorded: str, record: bool = False, runs: int = 5
) -> None:
  """Measure ratios of speeds, and either print them next to recorded ratios or record them.

  Args:
    pair: target and draft.
    sentences: sources; the first 8 are decoded.
    recorded: path of a JSON file with the device, the kernels, the versions, and the ratios of each
      recorded run.
    record: whether to measure `runs` times and write the file instead of comparing with it.
    runs: number of runs to record. `verdict` compares later ratios with the range of these runs.
  """
  console = Console(markup=False)
  setting = _setting(pair, sentences)
  if record:
    measured = [ratios(pair, sentences) for _ in range(runs)]
    rows = {name: [run[name] for run in measured] for name in measured[0]}
    with atomic_write(recorded) as file:
      file.write(json.dumps({**setting, "commit": commit(), "ratios": rows}, indent=2) + "\n")
    console.print(f"Recorded in {recorded}: {setting}")
    return
  content = json.loads(pathlib.Path(recorded).read_text(encoding="utf-8"))
  console.print(_table(ratios(pair, sentences), content["ratios"]))
  console.print(Text(LEGEND, style="dim"))
  changed = [
    f"{name} {content.get(name)}, here {value}"
    for name, value in setting.items()
    if content.get(name) != value
  ]
  if changed:
    console.print(f"Recorded with other settings: {'; '.join(changed)}.")


def _setting(pair: Pair, sentences: Sequence[str]) -> dict[str, str]:
  """Return the device, the kernels and the versions, on which the ratios depend."""
  settings = DecodeSettings(Sampling(0.0), max_new_tokens=LIMIT)
  (setting,) = settings_to_measure(pair, sentences, [settings], [GAMMA])
  return {
    "device": setting.device,
    "kernels": setting.models.kernels,
    "versions": f"specdec_jax {setting.origin.specdec_version}, jax {setting.origin.jax_version}",
  }


def ratios(pair: Pair, sentences: Sequence[str]) -> dict[str, float]:
  """Measure the ratios named in `HIGHER_IS_BETTER`, from medians of interleaved repeats."""
  texts = sentences[:8]
  width = pair.prompt(texts).shape[1]  # one width, so that each program is compiled once
  prompts = [pair.prompt([text], width) for text in texts]
  costs = _costs(pair, prompts[0])
  speedups = [_speedup(pair, prompts, sampling) for sampling in (Sampling(0.0), Sampling(1.0))]
  values = costs.v, costs.c, *speedups
  return dict(zip(HIGHER_IS_BETTER, map(float, values)))


def _costs(pair: Pair, prompt: Array) -> Costs:
  """Measure costs as `measure_costs` does, but without the prefill, which is slow to compile."""
  draft = pair.draft.build(Sampling(0.0), chain(GAMMA))
  parts, _ = interleaved_medians(
    round_calls(pair, [draft], prompt, Sampling(0.0), LIMIT), repeats=9
  )
  return round_costs(Starts(math.nan, math.nan), parts, [GAMMA])[0]


def _speedup(pair: Pair, prompts: Sequence[Array], sampling: Sampling) -> float:
  """Measure the speedup: speculative / autoregressive tokens per second, over all prompts."""
  decodes = pair.decode_fn(sampling, chain(0)), pair.decode_fn(sampling, chain(GAMMA))
  seconds, tokens = [], []
  for i, prompt in enumerate(prompts):
    keys = row_keys(0, i, 1)
    calls = [functools.partial(decode, prompt, keys, max_new_tokens=LIMIT) for decode in decodes]
    medians, outputs = interleaved_medians(calls, repeats=5)
    seconds.append(medians)
    tokens.append([int(output.lengths.sum()) for output in jax.device_get(outputs)])
  autoregressive, speculative = np.sum(tokens, axis=0) / np.sum(seconds, axis=0)
  return speculative / autoregressive


def verdict(value: float, recorded: Sequence[float], higher_is_better: bool) -> str:
  """Return whether a ratio 'fell' (is worse than recorded runs), 'held' or 'gained' (is better).

  A ratio has 'held' unless it is outside the range of the recorded runs by more than the width of
  that range. Otherwise `higher_is_better` decides whether a larger ratio is better or worse.
  """
  low, high = min(recorded), max(recorded)
  width = high - low
  if low - width <= value <= high + width:
    return "held"
  return "gained" if (value > high) == higher_is_better else "fell"


def _table(measured: Mapping[str, float], recorded: Mapping[str, Sequence[float]]) -> Table:
  table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
  for heading in ("ratio", "here", "recorded", "range", ""):
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
