"""Records as a terminal table: what was predicted beside what was measured."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from specdec_jax.records import Record

MISSING = "-"


def _alpha(r: Record) -> str:
  interval = (
    "" if None in (r.alpha_low, r.alpha_high) else f" [{r.alpha_low:.2f},{r.alpha_high:.2f}]"
  )
  return f"{r.alpha:.2f}{interval}"


# Heading, and how a record fills the column; see `cell`.
COLUMNS = {
  "temp": lambda r: f"{r.temperature:g}",
  "gamma": lambda r: f"{r.gamma}",
  "alpha": _alpha,
  "c": lambda r: f"{r.c:.3f}",
  "v": lambda r: f"{r.verify_cost:.2f}",
  "Thm 8": lambda r: f"{r.predicted_theorem8:.2f}",
  "predicted": lambda r: f"{r.predicted_text or r.predicted_measured_cost:.2f}",
  "speedup": lambda r: f"{r.speedup:.2f}",
  "passes": lambda r: f"{1 / r.tokens_per_round:.2f}",
  "same": lambda r: {True: "yes", False: "NO", None: "-"}[r.identical],
}

LEGEND = (
  "alpha: acceptance rate, with its 95% interval; c: draft step / target step; v: time of a pass "
  "over gamma + 1 tokens / over one; Thm 8: speedup predicted for a long text and v = 1; "
  "predicted: with all costs as measured and texts as short as these; speedup: measured tokens/s "
  "over plain decoding of the same target in the same process, medians of interleaved repeats; "
  "passes: of the target per token; same: output identical to plain decoding, token for token "
  "(argmax only; a sample has no twin)."
)


def cell(heading: str, record: Record) -> str:
  """What stands under a heading of `COLUMNS`; MISSING where it was not measured."""
  try:
    return COLUMNS[heading](record)
  except TypeError:  # a None among what it is made of
    return MISSING


def speed_table(records: Sequence[Record]) -> Table:
  """One row a record: gamma, alpha, costs, predictions, measured speedup, exactness."""
  first = records[0]
  table = Table(
    title=f"{first.task}, {first.num_examples} texts, batch {first.batch_size}, {first.dtype}, "
    f"{first.platform} ({first.device_kind})",
    box=box.SIMPLE_HEAD,
    show_edge=False,
    padding=0,
  )
  for heading in COLUMNS:
    table.add_column(heading, justify="right", no_wrap=True)
  for r, following in zip(records, [*records[1:], None]):
    last_of_temperature = following is None or following.temperature != r.temperature
    table.add_row(*(cell(heading, r) for heading in COLUMNS), end_section=last_of_temperature)
  return table
