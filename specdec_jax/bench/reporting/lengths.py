"""Table of the acceptance lengths of chains and trees."""

from collections.abc import Sequence

from specdec_jax.records import Record
from specdec_jax.reporting.tables import (
  MISSING,
  Table,
  measured_with,
  models_text,
  number_text,
  sampling_text,
)

_COLUMNS = (
  "temperature",
  "proposal",
  "nodes",
  "depth",
  "verifier",
  "tokens",
  "acceptance length",
  "over chain",
  "c",
  "v",
  "predicted",
  "identical",
  "seed",
)

LEGEND = {
  "proposal": "chain, tree or dynamic tree; a tree is the best one with at most this many nodes "
  "and this depth for the acceptance rate of each rank of children, which was measured on other "
  "texts; a dynamic tree is selected in each round from the draft's most probable tokens",
  "nodes": "nodes per target forward pass, including the last committed token",
  "depth": "maximal number of draft tokens that one round can accept",
  "tokens": "tokens of all outputs",
  "acceptance length": "tokens per round, including the bonus token or the correction, with its "
  "95% interval (bootstrap over texts)",
  "over chain": "acceptance length / that of the chain of the same depth with token verification",
  "c": "time of a draft step / time of a step of autoregressive decoding",
  "v": "time of a round without drafting, with token verification / time of a step of "
  "autoregressive decoding",
  "predicted": "predicted speedup: acceptance length / (depth c + v)",
  "identical": "whether the output is identical to that of autoregressive decoding, at "
  "temperature 0",
}


def lengths_table(records: Sequence[Record]) -> Table:
  """Return a table with one row per record. All records have the same pair and texts."""
  first = records[0]
  chain_lengths = {
    (sampling_text(r), r.gamma, r.seed): r.tokens_per_round
    for r in records
    if r.kind == "chain" and r.verifier == "TokenVerifier"
  }
  rows = []
  for r in records:
    length = r.tokens_per_round or 0.0
    chain_length = chain_lengths.get((sampling_text(r), r.gamma, r.seed))
    rows.append(
      (
        sampling_text(r),
        r.kind,
        f"{r.num_nodes}",
        f"{r.gamma}",
        r.verifier,
        f"{r.num_tokens}",
        f"{length:.2f} [{r.tokens_per_round_low:.2f}, {r.tokens_per_round_high:.2f}]",
        f"{length / chain_length:.3f}" if chain_length else MISSING,
        number_text(r.c, ".2f"),
        number_text(r.verify_cost, ".2f"),
        number_text(r.predicted_measured_cost, ".2f"),
        MISSING if r.identical is None else "yes" if r.identical else "no",
        f"{r.seed}",
      )
    )
  texts_per_batch = "1 text" if first.batch_size == 1 else f"{first.batch_size} texts"
  notes = f"c and v are measured with {texts_per_batch} per batch.", measured_with(records)
  title = f"{models_text(first)}: acceptance lengths"
  return Table(title, _COLUMNS, tuple(rows), notes, LEGEND)
