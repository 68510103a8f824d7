"""Table that compares drafts: their acceptance, their cost and the speedup with each of them."""

from collections.abc import Sequence

from specdec_jax.records import Record
from specdec_jax.reporting.speeds import COLUMNS, cell
from specdec_jax.reporting.tables import MISSING, Table, measured_with, models_text, number_text

LEGEND = {
  "alpha": "acceptance rate of the first draft token (in a tree: of the first child) at every "
  "token, with its 95% interval; a draft that learns from outcomes has none",
  "length": "acceptance length: tokens per target forward pass",
  "c": "time of a draft step / time of a step of autoregressive decoding, at the lowest "
  "temperature; a draft that stops early has neither c nor a prediction, because its rounds "
  "differ in length",
  "v": "time of a round without drafting / time of a step of autoregressive decoding, at the "
  "lowest temperature",
  "predicted": "predicted speedup without prefill: length / (gamma c + v)",
  "bandwidth-bound": "predicted speedup at the lowest temperature if a forward pass takes as long "
  "as its memory reads, as on an accelerator; of the rounds of a hierarchical draft one counts",
  "speedup": "measured tokens/s over autoregressive decoding's in the same process, interleaved",
  "MB": "parameters of the draft that it does not share with the target, in 1e6 bytes",
  "identical": "whether the output is identical to that of autoregressive decoding at temperature "
  "0, token for token",
}


def drafts_table(records: Sequence[Record]) -> Table:
  """Return a table with one row per draft and verifier. All records share target and texts."""
  first = records[0]
  temperatures = sorted({r.temperature for r in records})
  rows = []
  for draft, verifier in dict.fromkeys((r.draft, r.verifier) for r in records):
    by_temperature = {
      r.temperature: r for r in records if (r.draft, r.verifier) == (draft, verifier)
    }
    coldest = by_temperature[min(by_temperature)]
    ordered = [by_temperature.get(temperature) for temperature in temperatures]
    rows.append(
      (
        draft,
        verifier.removesuffix("Verifier"),
        *_cells("alpha", ordered),
        *_cells("acceptance length", ordered),
        cell(COLUMNS["c"], coldest),
        cell(COLUMNS["v"], coldest),
        *(MISSING if r is None else cell(_predicted, r) for r in ordered),
        cell(_bandwidth_bound, coldest),
        *_cells("speedup", ordered),
        number_text(coldest.draft_mb, ".1f"),
        cell(COLUMNS["identical"], coldest),
      )
    )
  columns = (
    "draft",
    "verifier",
    *(f"alpha, T = {t:g}" for t in temperatures),
    *(f"length, T = {t:g}" for t in temperatures),
    "c",
    "v",
    *(f"predicted, T = {t:g}" for t in temperatures),
    "bandwidth-bound",
    *(f"speedup, T = {t:g}" for t in temperatures),
    "MB",
    "identical",
  )
  title = f"{models_text(first, draft=False)}, gamma {first.gamma}, batch {first.batch_size}, "
  title += f"{first.num_examples} texts, {first.device}"
  return Table(title, columns, tuple(rows), (measured_with(records),), LEGEND)


def _predicted(r) -> str:
  return f"{r.tokens_per_round / (r.gamma * r.c + r.verify_cost):.2f}"


def _bandwidth_bound(r) -> str:
  if r.c is None:
    return MISSING
  round_mb = r.gamma * r.draft_step_mb + r.verify_mb
  return f"{r.tokens_per_round * r.target_step_mb / round_mb:.2f}"


def _cells(column: str, records: Sequence[Record | None]) -> list[str]:
  return [cell(COLUMNS[column], r) if r else MISSING for r in records]
