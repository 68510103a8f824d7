"""Tokens per second of continuous batching, compared with batches that run to their last row."""

import itertools
import pathlib
from collections.abc import Sequence

import numpy as np
from rich.console import Console

from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, chain
from specdec_jax.data.text import read_lines
from specdec_jax.generate import GenerateCall, Output
from specdec_jax.measure import records
from specdec_jax.measure.costs import interleaved_seconds, ratio_range
from specdec_jax.measure.progress import Progress
from specdec_jax.measure.records import Record, settings_to_measure
from specdec_jax.measure.tables import (
  GAMMA,
  IDENTICAL,
  MISSING,
  SPEEDUP_RANGE,
  Column,
  Table,
  records_table,
  terminal_text,
)
from specdec_jax.pair import Pair


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
  path = records.results_path(output_dir)
  with Progress() as bar:
    task = bar.add_task("measuring", total=len(combinations))
    for (file, limit), batch_size, gamma in combinations:
      texts = read_lines(file, limit=limit)
      settings = DecodeSettings(Sampling(temperature), batch_size, max_new_tokens, seed)
      (setting,) = settings_to_measure(pair, texts, [settings], [gamma], "batches", repeats)
      setting = setting.replace(task=pathlib.Path(file).name)
      for record in records.missing(path, [setting]):
        records.append(path, _measured(record, pair, texts, chain(gamma), settings, repeats))
      bar.advance(task)
  console = Console(markup=False, soft_wrap=True)
  console.print(terminal_text(throughput_table(records.read(path))))
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

  call, size = GenerateCall.of(pair, settings, tree), settings.batch_size
  sources, index = [*map(pair.encode, texts)], [*range(len(texts))]

  def decode(start: int = 0, stop: int | None = None) -> list[Output]:
    chosen = slice(start, stop)
    found = call.decode(sources[chosen], index[chosen], None, size=size, seed=settings.seed)
    return [output for (output,) in found]

  def in_batches() -> list[Output]:
    starts = range(0, len(texts), size)
    return [output for start in starts for output in decode(start, start + size)]

  (batches_s, slots_s), results = interleaved_seconds([in_batches, decode], repeats)
  by_batches, by_slots = results
  before, after = float(np.median(batches_s)), float(np.median(slots_s))
  low, high = ratio_range(before / after, batches_s / slots_s)
  tokens = sum(len(output.tokens) for output in by_slots)
  rounds = sum(len(output.rounds.num_emitted) for output in by_slots if output.rounds)
  accepted, rejected = np.sum([output.acceptance_counts for output in by_slots], axis=0)
  pairs = zip(by_batches, by_slots, strict=True)
  return setting.replace(
    num_tokens=tokens,
    rounds=rounds,
    tokens_per_round=tokens / rounds,
    acceptance_rate=float(accepted / (accepted + rejected)) if tree.num_draft_tokens else None,
    identical=all(np.array_equal(one.tokens, other.tokens) for one, other in pairs),
    baseline_tokens_per_s=tokens / before,
    speculative_tokens_per_s=tokens / after,
    speedup=before / after,
    speedup_low=low,
    speedup_high=high,
    seconds=float(np.sum([batches_s, slots_s])),
  )


def throughput_table(measured: Sequence[Record]) -> Table:
  """Return a table of the tokens per second of batches and of continuous batching."""
  columns = (
    Column("task", "settings.task"),
    Column("draft", lambda r: r.models.draft if r.settings.gamma else None),
    Column("batch", "settings.batch_size"),
    GAMMA,
    Column("batches", "times.baseline_tokens_per_s", ",.0f"),
    Column("continuous", "times.speculative_tokens_per_s", ",.0f"),
    SPEEDUP_RANGE._replace(heading="ratio", meaning=""),
    IDENTICAL._replace(meaning=""),
  )
  notes = (
    "Tokens per second. Batches run to their last row; in continuous batching, the next text takes "
    "the row of a text that has ended.",
  )
  first = measured[0]
  device = first.machine.processor or first.machine.device_kind
  title = f"{first.models.target}, {first.models.dtype}, {first.models.kernels} kernels, {device}"
  return records_table(title, measured, columns, notes)


def gammas_table(measured: Sequence[Record]) -> Table:
  """Return a table of the tokens per second of continuous batching for each gamma."""

  # Without a draft, the speed depends only on the target's arithmetic and the batch size.
  def target(r: Record) -> tuple[str, str, int]:
    return r.models.dtype, r.models.kernels, r.settings.batch_size

  def speed(r: Record) -> float:
    return r.times.speculative_tokens_per_s or 0.0

  of_target = {target(r): {0: speed(r)} for r in measured if not r.settings.gamma}
  speeds: dict[tuple[str, ...], dict[int, float]] = {}
  for r in measured:
    row = f"{r.models.dtype}, {r.models.kernels}", r.models.draft, str(r.settings.batch_size)
    speeds.setdefault(row, {**of_target.get(target(r), {})})[r.settings.gamma] = speed(r)
  gammas = sorted({r.settings.gamma for r in measured})
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
  device = first.machine.processor or first.machine.device_kind
  title = f"{first.settings.task}, {first.settings.num_examples} texts, {device}"
  notes = ("Tokens per second of continuous batching; gamma 0 is autoregressive decoding.",)
  return Table(title, headings, tuple(rows), notes)
