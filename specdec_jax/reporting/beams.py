"""Speculative beam search beside plain beam search, as a table."""

from collections.abc import Sequence

from specdec_jax.records import Record
from specdec_jax.reporting.tables import MISSING, Table, measured_with, models_text

LEGEND = (
  "nodes: that a pass of the target reads; steps: of the search, a pass (plain search makes one); "
  "round: time of a round of the texts, drafting included, over one of plain search; predicted: "
  "steps / round, as of a long text; speedup: of whole searches, reading the sources included, "
  "over our own plain beam search, in turn; same: texts, their order, and scores to 1e-5 are plain "
  "search's in all rows, but in so many whose scores are equal and texts in another order; BLEU: "
  "of the best text, plain search's in brackets."
)


def beams_table(records: Sequence[Record]) -> Table:
  """One row a record; these are of one pair and one set of texts."""
  rows = []
  for r in records:
    width, of_draft = r.beams or 1, r.draft_beams or 0
    a_round = r.round_ms / r.target_step_ms if r.round_ms and r.target_step_ms else None
    told = "yes" if r.identical else "no"
    rows.append(
      (
        f"{width}",
        f"{of_draft}",
        f"{r.gamma}",
        f"{r.beam_nodes or width + r.gamma * of_draft}",
        MISSING if r.tokens_per_round is None else f"{r.tokens_per_round:.2f}",
        *(
          MISSING if x is None else f"{x:.2f}"
          for x in (a_round, r.predicted_measured_cost, r.speedup)
        ),
        f"{told}, {r.ties} tied" if r.ties else told,
        MISSING if r.quality is None else f"{r.quality:.1f} ({r.baseline_quality:.1f})",
      )
    )
  first = records[0]
  columns = "beams|draft's|gamma|nodes|steps|round|predicted|speedup|same|BLEU"
  title = f"{models_text(first)}: beam search, {first.num_examples} texts, "
  title += f"batch {first.batch_size}, {first.device}"
  return Table(title, tuple(columns.split("|")), tuple(rows), (LEGEND, measured_with(records)))
