"""Acceptance lengths of chains and trees as a table."""

from collections.abc import Sequence

from specdec_jax.records import Record
from specdec_jax.reporting.tables import (
  MISSING,
  Table,
  measured_with,
  models_text,
  sampling_text,
)

LEGEND = (
  "acceptance length: tokens a round, the bonus or correction counted, with its 95% interval "
  "(bootstrap over texts). A tree is the best of so many nodes, the newest token counted, and no "
  "greater depth, for the acceptance of each rank of children, measured on texts of their own; a "
  "dynamic one is made in each round of what the draft holds likeliest, none drawn. "
  "over chain: over the chain of that depth, judged by tokens. c, v: time of a step of the draft "
  "and of a pass over the nodes, judged by tokens, in plain steps of {batch}; predicted: speed "
  "over plain decoding, acceptance length / (depth c + v). same: whether the output is plain "
  "decoding's, at temperature 0."
)


def lengths_table(records: Sequence[Record]) -> Table:
  """One row a record; these are of one pair and one set of texts."""
  first = records[0]
  chains = {
    (sampling_text(r), r.gamma, r.seed): r.tokens_per_round
    for r in records
    if r.kind == "chain" and r.verifier == "TokenVerifier"
  }
  rows = []
  for r in records:
    speed = r.c, r.verify_cost, r.predicted_measured_cost
    length, of_chain = r.tokens_per_round or 0.0, chains.get((sampling_text(r), r.gamma, r.seed))
    rows.append(
      (
        sampling_text(r),
        r.kind,
        f"{r.num_nodes}",
        f"{r.gamma}",
        r.verifier,
        f"{r.num_tokens}",
        f"{length:.2f} [{r.tokens_per_round_low:.2f}, {r.tokens_per_round_high:.2f}]",
        f"{length / of_chain:.3f}" if of_chain else MISSING,
        *(MISSING if x is None else f"{x:.2f}" for x in speed),
        MISSING if r.identical is None else "yes" if r.identical else "no",
        f"{r.seed}",
      )
    )
  rows_together = "a text" if first.batch_size == 1 else f"{first.batch_size} texts"
  legend = LEGEND.format(batch=rows_together)
  columns = (
    "temperature|guesses|nodes|depth|verifier|tokens|acceptance length|over chain|c|v|predicted"
  )
  columns += "|same|seed"
  title = f"{models_text(first)}: acceptance lengths"
  return Table(title, tuple(columns.split("|")), tuple(rows), (legend, measured_with(records)))
