"""Tokens per second of continuous batching, compared with batches that run to their last row."""

import dataclasses
import functools
import itertools
import pathlib
import statistics
from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console

from specdec_jax.core.counts import acceptance_rate, num_rounds, num_tokens
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.data.text import read_lines
from specdec_jax.measure import records
from specdec_jax.measure.measure import settings_to_measure
from specdec_jax.measure.progress import Progress
from specdec_jax.measure.records import Record
from specdec_jax.measure.reporting.columns import range_text
from specdec_jax.measure.reporting.formats import render
from specdec_jax.measure.reporting.tables import (
  MISSING,
  Table,
)
from specdec_jax.measure.timing import interleaved_seconds, ratio_range, timed
from specdec_jax.pair import Pair
from specdec_jax.serve.lines import decode_lines


def measure_throughput(
  pair: Pair,
  inputs: Sequence[str],
  output_dir: str,
  batch_sizes: Sequence[int] = (8, 32),
  gammas: Sequence[int] = (0, 5),
  num_texts: Sequence[int | None] = (1000, 300),
  temperature: float = 0.0,
  max_new_tokens: int = 128,
  repeats: int = 3,
  seed: int = 0,
) -> None:
  """Decode files by continuous batching and batch by batch; print a table and write records.

  Both read, decode and return the same texts in the same order. Of each setting, the calls are
  timed in turn. Texts that are already recorded in `results.jsonl` with the same setting are not
  decoded again.

  In a record, the baseline ('batches') is decoding batch by batch with the same draft and gamma.

  Args:
    pair: target and draft.
    inputs: paths of text files, one text per line.
    output_dir: folder for `results.jsonl`.
    batch_sizes: numbers of texts that are decoded together; continuous batching needs at least 2.
      At batch size 1, both are the same.
    gammas: numbers of draft tokens per round; 0 is autoregressive decoding.
    num_texts: maximum number of texts of each file; None for all.
    temperature: sampling temperature; 0 is argmax.
    max_new_tokens: maximum number of tokens of each output.
    repeats: number of timed repeats.
    seed: random seed of all sampling.
  """
  combinations = [*itertools.product(zip(inputs, num_texts, strict=True), batch_sizes, gammas)]
  with records.open_results(output_dir) as path, Progress() as bar:
    task = bar.add_task("measuring", total=len(combinations))
    for (file, limit), batch_size, gamma in combinations:
      texts = read_lines(file, limit=limit)
      settings = DecodeSettings(Sampling(temperature), batch_size, max_new_tokens, seed)
      (setting,) = settings_to_measure(pair, texts, [settings], [gamma], "batches")
      setting = dataclasses.replace(setting, task=pathlib.Path(file).name)
      for record in records.missing(path, [setting]):
        records.append(path, _measured(record, pair, texts, chain(gamma), settings, repeats))
      bar.advance(task)
  console = Console(markup=False, soft_wrap=True)
  console.print(render(throughput_table(records.read(path)), "terminal"))
  console.print(f"Records: {path}")


def _measured(
  setting: records.Record,
  pair: Pair,
  texts: Sequence[str],
  tree: AnyTree,
  settings: DecodeSettings,
  repeats: int,
) -> records.Record:
  """Return a record with measurements."""

  def decode(lines: Iterable[str]) -> tuple[list[str], list[DecodeResult]]:
    outputs, decoded = zip(*decode_lines(pair, lines, tree, settings))
    return [*outputs], [*filter(None, decoded)]

  # `decode_lines` decodes an iterator batch by batch, and a sequence by continuous batching.
  calls = [lambda: decode(iter(texts)), lambda: decode(texts)]
  timed_calls = [functools.partial(timed, call) for call in calls]
  seconds, ((batch_texts, in_batches), (slot_texts, in_slots)) = interleaved_seconds(
    timed_calls, repeats
  )
  before, after = (statistics.median(of_call) for of_call in seconds.T.tolist())
  low, high = ratio_range(before / after, seconds[:, 0] / seconds[:, 1])
  tokens = num_tokens(in_slots)
  rows = [[row for each in found for row in each.tokens] for found in (in_batches, in_slots)]
  same = all(np.array_equal(one, other) for one, other in zip(*rows, strict=True))
  return dataclasses.replace(
    setting,
    num_tokens=tokens,
    rounds=num_rounds(in_slots),
    tokens_per_round=tokens / num_rounds(in_slots),
    acceptance_rate=acceptance_rate(in_slots) if tree.num_guesses else None,
    identical=same and batch_texts == slot_texts,
    baseline_tokens_per_s=tokens / before,
    speculative_tokens_per_s=tokens / after,
    speedup=before / after,
    speedup_low=low,
    speedup_high=high,
    seconds=float(seconds.sum()),
  )


def throughput_table(measured: Sequence[Record]) -> Table:
  """Return a table of the tokens per second of batches and of continuous batching."""
  headings = "task", "draft", "batch", "gamma", "batches", "continuous", "ratio", "identical"
  rows = [
    (
      r.task or MISSING,
      r.draft if r.gamma else MISSING,
      str(r.batch_size),
      str(r.gamma),
      f"{r.baseline_tokens_per_s:,.0f}",
      f"{r.speculative_tokens_per_s:,.0f}",
      f"{r.speedup:.2f}{range_text(r)}",
      {True: "yes", False: "NO", None: MISSING}[r.identical],
    )
    for r in measured
  ]
  notes = (
    "Tokens per second. Batches run to their last row; in continuous batching, the next text takes "
    "the row of a text that has ended.",
  )
  first = measured[0]
  device = first.processor or first.device_kind
  title = f"{first.target}, {first.dtype}, {first.kernels} kernels, {device}"
  return Table(title, headings, tuple(rows), notes)


def gammas_table(measured: Sequence[Record]) -> Table:
  """Return a table of the tokens per second of continuous batching for each gamma."""
  # Without a draft, the speed depends only on the target's arithmetic and the batch size.
  of_target = {
    (r.dtype, r.kernels, r.batch_size): {0: r.speculative_tokens_per_s or 0}
    for r in measured
    if not r.gamma
  }
  speeds: dict[tuple[str, ...], dict[int, float]] = {}
  for r in measured:
    row = f"{r.dtype}, {r.kernels}", r.draft, str(r.batch_size)
    without_draft = of_target.get((r.dtype, r.kernels, r.batch_size), {})
    speeds.setdefault(row, {**without_draft})[r.gamma] = r.speculative_tokens_per_s or 0
  gammas = sorted({r.gamma for r in measured})
  headings = (
    "arithmetic, kernels",
    "draft",
    "batch",
    *(f"gamma {gamma}" for gamma in gammas),
    "best",
  )
  rows = [
    (
      *row,
      *(f"{by_gamma[gamma]:,.0f}" if gamma in by_gamma else MISSING for gamma in gammas),
      f"gamma {max(by_gamma, key=by_gamma.__getitem__)}",
    )
    for row, by_gamma in speeds.items()
  ]
  first = measured[0]
  title = f"{first.task}, {first.num_examples} texts, {first.processor or first.device_kind}"
  notes = ("Tokens per second of continuous batching; gamma 0 is autoregressive decoding.",)
  return Table(title, headings, tuple(rows), notes)
