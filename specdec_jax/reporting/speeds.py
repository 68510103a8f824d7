"""Speeds as tables: what was predicted beside what was measured, and what a round is made of."""

from collections.abc import Callable, Mapping, Sequence

from specdec_jax.records import Record
from specdec_jax.reporting.tables import MISSING, Table


def _alpha(r: Record) -> str:
  interval = (
    "" if None in (r.alpha_low, r.alpha_high) else f" [{r.alpha_low:.2f},{r.alpha_high:.2f}]"
  )
  return f"{r.alpha:.2f}{interval}"


# Heading, and how a record fills the column.
COLUMNS = {
  "temp": lambda r: f"{r.temperature:g}",
  "gamma": lambda r: f"{r.gamma}",
  "alpha": _alpha,
  "c": lambda r: f"{r.c:.3f}",
  "v": lambda r: f"{r.verify_cost:.2f}",
  "Thm 8": lambda r: f"{r.predicted_theorem8:.2f}",
  "predicted": lambda r: f"{r.predicted_finite_length or r.predicted_measured_cost:.2f}",
  "speedup": lambda r: f"{r.speedup:.2f}",
  "same": lambda r: {True: "yes", False: "NO", None: "-"}[r.identical],
  "acceptance length": lambda r: f"{r.tokens_per_round:.2f}",
}


def _quality(r: Record) -> str:
  beside = "" if r.quality == r.baseline_quality else f" (plain {r.baseline_quality:.1f})"
  return f"{r.metric} {r.quality:.1f}{beside}" if r.metric else f"{r.quality:.1f}"


# Shown where a record has it.
QUALITY = {"quality": _quality}
QUALITY_LEGEND = (
  " quality: of the outputs, by references; plain: of plain decoding's, if it differs."
)

LEGEND = (
  "alpha: acceptance rate, with its 95% interval; c: draft step / target step; v: time of a round "
  "without drafting / of a plain step; Thm 8: speedup predicted for a long text and v = 1; "
  "predicted: with all costs as measured and texts as short as these; speedup: measured tokens/s "
  "over plain decoding of the same target in the same process, medians of interleaved repeats; "
  "acceptance length: tokens per target pass; same: output identical to plain decoding, token for "
  "token (argmax only; not comparable when sampling)."
)


# What a round takes, in milliseconds, and in operations.
BUDGET = {
  "temp": COLUMNS["temp"],
  "gamma": COLUMNS["gamma"],
  "encoders": lambda r: f"{r.target_prefill_ms + r.draft_prefill_ms:.2f}",
  "step": lambda r: f"{r.target_step_ms:.2f}",
  "draft": lambda r: f"{r.gamma} x {r.draft_step_ms:.2f}",
  "verify": lambda r: f"{r.verify_ms:.2f}",
  "accept": lambda r: f"{r.accept_ms:.2f}",
  "rest": lambda r: f"{r.unaccounted_ms:.2f}",
  "round": lambda r: f"{r.round_ms:.2f}",
  "c-hat": lambda r: f"{r.operations_ratio:.3f}",
  "Thm 10": lambda r: f"{r.operations_factor:.2f}",
}

BUDGET_LEGEND = (
  "In milliseconds. encoders: target and draft read a prompt; step: the target decodes a token by "
  "itself; draft: gamma steps of the draft; verify: the target's pass over gamma + 1 tokens; "
  "accept: the guesses judged and the next token drawn; round: of the texts decoded; rest: what it "
  "took more than its parts timed by themselves, noise included. c-hat: operations of a draft step "
  "/ of a step; Thm 10: operations predicted / plain decoding's."
)


def _share(megabytes, gb_per_s, ms) -> str:
  """The least time of a step over the time it took."""
  return f"{megabytes / gb_per_s / ms:.0%}"  # 1e6 bytes at 1e9 bytes a second take a millisecond


# How near the parts of a round come to what the memory allows.
ROOFLINE = {
  "temp": COLUMNS["temp"],
  "gamma": COLUMNS["gamma"],
  "GB/s": lambda r: f"{r.memory_gb_per_s:.1f}",
  "step MB": lambda r: f"{r.target_step_mb:.1f}",
  "step": lambda r: _share(r.target_step_mb, r.memory_gb_per_s, r.target_step_ms),
  "draft MB": lambda r: f"{r.draft_step_mb:.1f}",
  "draft": lambda r: _share(r.draft_step_mb, r.memory_gb_per_s, r.draft_step_ms),
  "verify MB": lambda r: f"{r.verify_mb:.1f}",
  "verify": lambda r: _share(r.verify_mb, r.memory_gb_per_s, r.verify_ms),
}

ROOFLINE_LEGEND = (
  "GB/s: at which the device reads its memory, measured; MB: parameters and caches that a step of "
  "the target, a step of the draft and a pass over gamma + 1 tokens must read; in percent, the "
  "least time that takes / the time measured. A cache of the processor that keeps weights from "
  "step to step makes more than 100% possible."
)


def cell(column: Callable[[Record], str], record: Record) -> str:
  """What stands in a column; MISSING where it was not measured."""
  try:
    return column(record)
  except TypeError:  # a None among what it is made of
    return MISSING


def speed_table(records: Sequence[Record]) -> Table:
  """One row a record: gamma, alpha, costs, predictions, measured speedup, exactness."""
  if all(r.quality is None for r in records):
    return _table(COLUMNS, records, LEGEND)
  return _table(COLUMNS | QUALITY, records, LEGEND + QUALITY_LEGEND)


def budget_table(records: Sequence[Record]) -> Table:
  """One row a record: what a round takes, part by part."""
  return _table(BUDGET, records, BUDGET_LEGEND)


def roofline_table(records: Sequence[Record]) -> Table:
  """One row a record: the bytes that each part of a round must read, and how near it comes."""
  return _table(ROOFLINE, records, ROOFLINE_LEGEND)


def _table(columns: Mapping[str, Callable], records: Sequence[Record], legend: str) -> Table:
  first = records[0]
  title = (
    f"{first.subject}, {first.num_examples} texts, batch {first.batch_size}, {first.dtype}, "
    + first.device
    + ("" if first.kernels == "xla" else f", {first.kernels} kernels")
    + ("" if first.baseline == "own" else f", over {first.baseline}")
  )
  rows = tuple(tuple(cell(column, r) for column in columns.values()) for r in records)
  return Table(title, tuple(columns), rows, (legend,))
