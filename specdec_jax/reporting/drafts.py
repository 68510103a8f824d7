"""Drafts beside each other, as a table: what each is accepted, what it costs, what it gives."""

import functools
from collections.abc import Sequence

from specdec_jax.records import Record
from specdec_jax.reporting.speeds import COLUMNS, cell
from specdec_jax.reporting.tables import MISSING, Table, measured_with, models_text

NOTES = (
  "alpha: acceptance rate of the first guess at a token, with its 95% interval, of a tree that of "
  "the eldest; length: tokens a pass of the target; c and v: a draft step and a round without "
  "drafting, in plain steps, at the lowest temperature; predicted: length / (gamma c + v), which "
  "leaves out what it takes to read the prompts; by bytes: the same at the lowest temperature if a "
  "pass took as long as reading what it must of memory, as on an accelerator (of rounds within a "
  "draft, as many as it takes, one counts); speedup: measured tokens a second over plain "
  "decoding's in the same process, in turn. A draft that stops early has no c and no prediction, "
  "as its rounds are not alike; one that learns from outcomes has no alpha. MB: parameters of the "
  "draft that are not the target's own; same: outputs identical to plain decoding's at "
  "temperature 0.",
)


def drafts_table(records: Sequence[Record]) -> Table:
  """One row a draft and verifier; these are of one target and one set of texts."""
  first = records[0]
  temperatures = sorted({r.temperature for r in records})
  rows = []
  for draft, verifier in dict.fromkeys((r.draft, r.verifier) for r in records):
    by_temperature = {
      r.temperature: r for r in records if (r.draft, r.verifier) == (draft, verifier)
    }
    coldest = by_temperature[min(by_temperature)]
    of_each = [*map(by_temperature.get, temperatures)]
    each = functools.partial(_each, of_each)
    rows.append(
      (
        draft,
        verifier.removesuffix("Verifier"),
        *each("alpha"),
        *each("acceptance length"),
        *(cell(COLUMNS[name], coldest) for name in ("c", "v")),
        *(MISSING if r is None else cell(_predicted, r) for r in of_each),
        cell(_by_bytes, coldest),
        *each("speedup"),
        MISSING if coldest.draft_mb is None else f"{coldest.draft_mb:.1f}",
        cell(COLUMNS["same"], coldest),
      )
    )
  cold_and_warm = lambda name: [f"{name}, T = {t:g}" for t in temperatures]
  columns = ["draft", "verifier", *cold_and_warm("alpha"), *cold_and_warm("length"), "c", "v"]
  columns += [*cold_and_warm("predicted"), "by bytes", *cold_and_warm("speedup"), "MB", "same"]
  title = f"{models_text(first, draft=False)}, gamma {first.gamma}, batch {first.batch_size}, "
  title += f"{first.num_examples} texts, {first.device}"
  return Table(title, tuple(columns), tuple(rows), (*NOTES, measured_with(records)))


def _predicted(r) -> str:
  return f"{r.tokens_per_round / (r.gamma * r.c + r.verify_cost):.2f}"


def _by_bytes(r) -> str:
  if r.c is None:
    return MISSING
  drafting, verifying = r.gamma * r.draft_step_mb, r.verify_mb
  return f"{r.tokens_per_round * r.target_step_mb / (drafting + verifying):.2f}"


def _each(records: Sequence[Record | None], column: str) -> list[str]:
  return [cell(COLUMNS[column], r) if r else MISSING for r in records]
