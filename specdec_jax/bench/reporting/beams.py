"""Table of speculative beam search compared with plain beam search."""

from collections.abc import Sequence

from specdec_jax.records import Record
from specdec_jax.reporting.tables import MISSING, Table, measured_with, models_text, number_text

_COLUMNS = ("beams", "draft beams", "gamma", "nodes", "steps", "round", "predicted", "speedup")
_COLUMNS += ("identical", "BLEU")

LEGEND = {
  "draft beams": "beam size of the draft",
  "nodes": "nodes per target forward pass",
  "steps": "search steps per target forward pass; 1 for plain beam search",
  "round": "time of a round, drafting included / time of a round of plain beam search",
  "predicted": "predicted speedup for a long text: steps / round",
  "speedup": "measured speedup of complete searches, prefill included, over this package's plain "
  "beam search; interleaved repeats",
  "identical": "whether all texts, their order and their scores (to 1e-5) are those of plain beam "
  "search; rows with equal scores in another order are counted as tied",
  "BLEU": "of the best text; plain beam search in brackets",
}


def beams_table(records: Sequence[Record]) -> Table:
  """Return a table with one row per record. All records have the same pair and texts."""
  rows = []
  for r in records:
    beam_size, draft_beam_size = r.beams or 1, r.draft_beams or 0
    round_cost = r.round_ms / r.target_step_ms if r.round_ms and r.target_step_ms else None
    identical = "yes" if r.identical else "no"
    rows.append(
      (
        f"{beam_size}",
        f"{draft_beam_size}",
        f"{r.gamma}",
        f"{r.beam_nodes or beam_size + r.gamma * draft_beam_size}",
        number_text(r.tokens_per_round, ".2f"),
        number_text(round_cost, ".2f"),
        number_text(r.predicted_measured_cost, ".2f"),
        number_text(r.speedup, ".2f"),
        f"{identical}, {r.ties} tied" if r.ties else identical,
        MISSING if r.quality is None else f"{r.quality:.1f} ({r.baseline_quality:.1f})",
      )
    )
  first = records[0]
  title = f"{models_text(first)}: beam search, {first.num_examples} texts, "
  title += f"batch {first.batch_size}, {first.device}"
  return Table(title, _COLUMNS, tuple(rows), (measured_with(records),), LEGEND)
