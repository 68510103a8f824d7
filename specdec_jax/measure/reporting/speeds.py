"""Tables of predicted and measured speedups, and of the times and bytes of parts of a round."""

from collections.abc import Sequence

from specdec_jax.measure.records import Record
from specdec_jax.measure.reporting.columns import records_table
from specdec_jax.measure.reporting.tables import Table

SPEED = ("temperature", "gamma", "alpha", "c", "v", "theorem8", "predicted", "speedup")
SPEED += ("identical", "length")
BUDGET = ("temperature", "gamma", "prefill", "step", "draft_steps", "verify", "accept")
BUDGET += ("unaccounted", "round", "c_hat", "theorem10")
ROOFLINE = ("temperature", "gamma", "bandwidth", "step_mb", "step_share")
ROOFLINE += ("draft_step_mb", "draft_step_share", "verify_mb", "verify_share")


def speed_columns(records: Sequence[Record]) -> tuple[str, ...]:
  """Return the column names of `speed_table`, with 'quality' if a record has it."""
  return SPEED if all(r.quality is None for r in records) else (*SPEED, "quality")


def speed_table(records: Sequence[Record]) -> Table:
  """Return a table of costs and of predicted and measured speedups, with one row per record."""
  return records_table(_title(records[0]), records, speed_columns(records))


def budget_table(records: Sequence[Record]) -> Table:
  """Return a table of the times of the parts of a round, with one row per record."""
  return records_table(_title(records[0]), records, BUDGET)


def roofline_table(records: Sequence[Record]) -> Table:
  """Return a table of the bytes and bandwidth of the parts of a round, with one row per record."""
  return records_table(_title(records[0]), records, ROOFLINE)


def _title(r: Record) -> str:
  return (
    f"{r.subject}, {r.num_examples} texts, batch {r.batch_size}, {r.dtype}, {r.device}"
    + ("" if r.kernels == "xla" else f", {r.kernels} kernels")
    + ("" if r.baseline == "own" else f", over {r.baseline}")
  )
