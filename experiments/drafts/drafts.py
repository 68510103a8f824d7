"""Comparison of drafts of one target: acceptance, costs and speed."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from experiments.lib.records import BANDWIDTH_BOUND, DRAFT_MB, measured_with, models_text
from specdec_jax import registry
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import LoadsDraft, Verifier
from specdec_jax.measure.records import Record
from specdec_jax.measure.report import Bar, Chart, Section, page
from specdec_jax.measure.speed import speed_steps
from specdec_jax.measure.sweep import sweep
from specdec_jax.measure.tables import (
  ALPHA,
  IDENTICAL,
  LENGTH,
  MISSING,
  SPEEDUP,
  C,
  Column,
  Table,
  V,
  noise_notes,
)
from specdec_jax.pair import Pair

DRAFTS_LEGEND = {
  "alpha": "acceptance rate of the first draft token (in a tree: of the first child) at every "
  "token, with its 95% interval; a draft that learns from outcomes has none, and neither has a "
  "verifier other than TokenVerifier",
  "length": "acceptance length: tokens per target forward pass",
  "cost ratio c": "time of a draft step / time of a step of autoregressive decoding, at the lowest "
  "temperature; a draft that stops early has neither c nor a prediction, because its rounds "
  "differ in length",
  "verify cost v": "time of a round without drafting / time of a step of autoregressive decoding, "
  "at the lowest temperature",
  "predicted": "predicted speedup without prefill: length / (gamma c + v)",
  "bandwidth-bound": "predicted speedup at the lowest temperature if a forward pass takes as long "
  "as its memory reads, as on an accelerator; of the rounds of a hierarchical draft one counts",
  "speedup": "measured tokens/s over autoregressive decoding's in the same process, interleaved",
  "MB": "parameters of the draft that it does not share with the target, in 1e6 bytes",
  "identical": "whether the output is identical to that of autoregressive decoding at temperature "
  "0, token for token",
}


def compare_drafts(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  drafts: Sequence[str | LoadsDraft],
  verifiers: Sequence[str | Callable[[Sampling], Verifier]] = (),
  drafts_with_verifiers: Sequence[tuple[str | LoadsDraft, Any]] = (),
  gamma: int = 5,
  temperatures: Sequence[float] = (0.0, 1.0),
  batch_size: int = 1,
  max_new_tokens: int = 64,
  repeats: int = 3,
  seed: int = 0,
) -> None:
  """Measure drafts in turn; print a table, append to `results.jsonl`, and write a page.

  Args:
    pair: target, and the draft that is measured first.
    texts: sources.
    output_dir: folder for the files; settings recorded there already are not measured again.
    drafts: names in `registry.DRAFTS`, or functions that load the other drafts.
    verifiers: other verifiers for the draft of the pair: names in `registry.VERIFIERS`, or
      functions from a sampling method to a verifier. They are measured only at temperatures above
      0, because all exact verifiers accept the same tokens at temperature 0.
    drafts_with_verifiers: pairs of a draft and a verifier for this draft.
    gamma: number of draft tokens per round, or the depth of a tree.
    temperatures: sampling temperatures; each is measured, and 0 is argmax.
    batch_size: number of texts decoded together.
    max_new_tokens: maximum number of tokens of each output.
    repeats: number of timed decodes of each text, interleaved with autoregressive decoding.
    seed: random seed of all sampling.
  """
  settings = [
    DecodeSettings(Sampling(temperature), batch_size, max_new_tokens, seed)
    for temperature in temperatures
  ]
  sampled = [each for each in settings if each.sampling.temperature > 0]

  def changed(draft: str | LoadsDraft | None, verifier: Any) -> Pair:
    with_draft = pair if draft is None else pair.with_draft(registry.draft(draft)(pair.target))
    return dataclasses.replace(with_draft, verifier=registry.verifier(verifier))

  measurements = [(pair, settings)]
  measurements += [(changed(None, verifier), sampled) for verifier in verifiers if sampled]
  measurements += [(changed(draft, pair.verifier), settings) for draft in drafts]
  measurements += [(changed(*both), settings) for both in drafts_with_verifiers]
  sweep(
    output_dir,
    lambda: [
      step
      for pair_with_draft, its_settings in measurements
      for step in speed_steps(pair_with_draft, texts, its_settings, [gamma], repeats)
    ],
    lambda measured: [drafts_table(measured)],
    lambda measured: drafts_report(measured, f"Drafts: {pair.task or measured[0].target_label}"),
  )


def drafts_table(records: Sequence[Record]) -> Table:
  """Return a table with one row per draft and verifier. All records share target and texts."""
  first = records[0]
  temperatures = sorted({r.settings.temperature for r in records})
  rows = []
  for draft, verifier in dict.fromkeys((r.models.draft, r.settings.verifier) for r in records):
    by_temperature = {
      r.settings.temperature: r
      for r in records
      if (r.models.draft, r.settings.verifier) == (draft, verifier)
    }
    coldest = by_temperature[min(by_temperature)]
    ordered = [by_temperature.get(temperature) for temperature in temperatures]
    rows.append(
      (
        draft,
        verifier.removesuffix("Verifier"),
        *_cells(ALPHA, ordered),
        *_cells(LENGTH, ordered),
        C.cell(coldest),
        V.cell(coldest),
        *_cells(PREDICTED, ordered),
        BANDWIDTH_BOUND.cell(coldest),
        *_cells(SPEEDUP, ordered),
        DRAFT_MB.cell(coldest),
        IDENTICAL.cell(coldest),
      )
    )
  columns = (
    "draft",
    "verifier",
    *(f"alpha, T = {t:g}" for t in temperatures),
    *(f"length, T = {t:g}" for t in temperatures),
    C.heading,
    V.heading,
    *(f"predicted, T = {t:g}" for t in temperatures),
    "bandwidth-bound",
    *(f"speedup, T = {t:g}" for t in temperatures),
    "MB",
    "identical",
  )
  settings = first.settings
  title = f"{models_text(first, draft=False)}, gamma {settings.gamma}, "
  title += f"batch {settings.batch_size}, {settings.num_examples} texts, {first.device}"
  notes = measured_with(records), *noise_notes(records)
  return Table(title, columns, tuple(rows), notes, DRAFTS_LEGEND)


PREDICTED = Column(
  "predicted",
  lambda r: r.outputs.tokens_per_round / (r.settings.gamma * r.times.c + r.times.verify_cost),
  ".2f",
)


def _cells(column: Column, records: Sequence[Record | None]) -> list[str]:
  return [column.cell(r) if r else MISSING for r in records]


def drafts_report(records: Sequence[Record], title: str) -> str:
  """Return an HTML page with a chart of the speedups of drafts, and with `drafts_table`."""
  note = "The line is autoregressive decoding of the same target."
  return page(
    title,
    records,
    [
      Section("Speedup over autoregressive decoding", charts=draft_charts(records), note=note),
      Section("Measured drafts", drafts_table(records)),
    ],
  )


def draft_charts(records: Sequence[Record]) -> list[Chart]:
  """Return one chart per temperature, with the speedup of each draft, fastest first."""
  charts = []
  for temperature in sorted({r.settings.temperature for r in records}):
    of_temperature = [r for r in records if r.settings.temperature == temperature]
    default = of_temperature[0].settings.verifier
    bars = [
      Bar(
        r.models.draft + ("" if r.settings.verifier == default else f", {r.settings.verifier}"),
        r.times.speedup,
        f"{r.times.speedup:.2f}",
      )
      for r in of_temperature
      if r.times.speedup is not None
    ]
    charts.append(Chart(f"Temperature {temperature:g}", sorted(bars, key=lambda bar: -bar.value)))
  return charts
