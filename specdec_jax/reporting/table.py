"""Records as a terminal table: what was predicted beside what was measured."""

from collections.abc import Sequence

from rich.table import Table

from specdec_jax.records import Record


def speed_table(records: Sequence[Record]) -> Table:
  """One row a record: gamma, alpha, costs, predictions, measured speedup, exactness."""
  first = records[0]
  table = Table(
    title=f"{first.task}: target {first.target}, draft {first.draft}, batch {first.batch_size}, "
    f"{first.dtype}, {first.platform} ({first.device_kind})",
    caption=f"{first.num_examples} texts. speedup: tokens/s over plain decoding of the same target "
    "in the same process, medians of interleaved repeats. alpha: 95% interval.",
  )
  for column in (
    "temp", "gamma", "alpha", "c", "v(gamma)", "Theorem 8", "with measured costs",
    "speedup", "target passes/token", "identical",
  ):  # fmt: skip
    table.add_column(column, justify="right")
  for r in records:
    table.add_row(
      f"{r.temperature:g}",
      f"{r.gamma}",
      f"{r.alpha:.3f} [{r.alpha_low:.3f}, {r.alpha_high:.3f}]",
      f"{r.c:.3f}",
      f"{r.verify_cost:.2f}",
      f"{r.predicted_theorem8:.2f}",
      f"{r.predicted_measured_cost:.2f}",
      f"[bold]{r.speedup:.2f}[/bold]",
      f"{1 / r.tokens_per_round:.3f}",
      {True: "yes", False: "NO", None: "sampled"}[r.identical],
      end_section=r is records[-1] or records[records.index(r) + 1].temperature != r.temperature,
    )
  return table
