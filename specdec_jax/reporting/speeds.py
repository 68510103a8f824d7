"""Tables of speedups, predicted and measured, and of the time that each part of a round takes."""

from collections.abc import Callable, Mapping, Sequence

from specdec_jax.records import Record
from specdec_jax.reporting.tables import MISSING, Table


def _alpha(r: Record) -> str:
  interval = (
    "" if None in (r.alpha_low, r.alpha_high) else f" [{r.alpha_low:.2f},{r.alpha_high:.2f}]"
  )
  return f"{r.alpha:.2f}{interval}"


# Heading -> text of a record's cell.
COLUMNS = {
  "temp": lambda r: f"{r.temperature:g}",
  "gamma": lambda r: f"{r.gamma}",
  "alpha": _alpha,
  "c": lambda r: f"{r.c:.3f}",
  "v": lambda r: f"{r.verify_cost:.2f}",
  "Thm 8": lambda r: f"{r.predicted_theorem8:.2f}",
  "predicted": lambda r: f"{r.predicted_finite_length or r.predicted_measured_cost:.2f}",
  "speedup": lambda r: f"{r.speedup:.2f}",
  "identical": lambda r: {True: "yes", False: "NO", None: MISSING}[r.identical],
  "acceptance length": lambda r: f"{r.tokens_per_round:.2f}",
}

LEGEND = {
  "alpha": "acceptance rate, with its 95% interval",
  "c": "time of a draft step / time of a target step",
  "v": "time of a round without drafting / time of a step of autoregressive decoding",
  "Thm 8": "predicted speedup for a long text and v = 1 (Theorem 8)",
  "predicted": "predicted speedup with all measured costs, for texts of these lengths",
  "speedup": "measured tokens/s over autoregressive decoding of the same target in the same "
  "process, medians of interleaved repeats",
  "identical": "whether the output is identical to that of autoregressive decoding, token for "
  "token (argmax only; samples cannot be compared)",
  "acceptance length": "tokens per target forward pass",
}


def _quality(r: Record) -> str:
  differs = r.quality != r.baseline_quality
  baseline = f" (autoregressive {r.baseline_quality:.1f})" if differs else ""
  return f"{r.metric} {r.quality:.1f}{baseline}" if r.metric else f"{r.quality:.1f}"


# Added to COLUMNS if a record has a quality.
QUALITY = {"quality": _quality}
QUALITY_LEGEND = {
  "quality": "score of the outputs against references; that of autoregressive decoding in brackets "
  "if it differs"
}

# Parts of a round, in milliseconds and in arithmetic operations.
BUDGET = {
  "temp": COLUMNS["temp"],
  "gamma": COLUMNS["gamma"],
  "prefill": lambda r: f"{r.target_prefill_ms + r.draft_prefill_ms:.2f}",
  "step": lambda r: f"{r.target_step_ms:.2f}",
  "draft": lambda r: f"{r.gamma} x {r.draft_step_ms:.2f}",
  "verify": lambda r: f"{r.verify_ms:.2f}",
  "accept": lambda r: f"{r.accept_ms:.2f}",
  "unaccounted": lambda r: f"{r.unaccounted_ms:.2f}",
  "round": lambda r: f"{r.round_ms:.2f}",
  "c-hat": lambda r: f"{r.operations_ratio:.3f}",
  "Thm 10": lambda r: f"{r.operations_factor:.2f}",
}

BUDGET_LEGEND = {
  "prefill": "time of target and draft to process a prompt, in ms",
  "step": "time of a step of autoregressive decoding, in ms",
  "draft": "gamma x time of a draft step, in ms",
  "verify": "time of a target forward pass over gamma + 1 tokens, in ms",
  "accept": "time to verify the draft tokens and to sample the next token, in ms",
  "unaccounted": "round - its parts, each timed in isolation, in ms; includes noise",
  "round": "time of a round of the decoded texts, in ms",
  "c-hat": "arithmetic operations of a draft step / of a target step",
  "Thm 10": "predicted arithmetic operations / those of autoregressive decoding (Theorem 10)",
}


def _bandwidth_share(megabytes: float, gb_per_s: float, ms: float) -> str:
  """Return the time of the memory reads at full bandwidth as a share of the measured time."""
  return f"{megabytes / gb_per_s / ms:.0%}"  # 1e6 bytes at 1e9 bytes per second take 1 ms


# Memory reads of the parts of a round, and the share of the memory bandwidth that they reach.
ROOFLINE = {
  "temp": COLUMNS["temp"],
  "gamma": COLUMNS["gamma"],
  "GB/s": lambda r: f"{r.memory_gb_per_s:.1f}",
  "step MB": lambda r: f"{r.target_step_mb:.1f}",
  "step": lambda r: _bandwidth_share(r.target_step_mb, r.memory_gb_per_s, r.target_step_ms),
  "draft MB": lambda r: f"{r.draft_step_mb:.1f}",
  "draft": lambda r: _bandwidth_share(r.draft_step_mb, r.memory_gb_per_s, r.draft_step_ms),
  "verify MB": lambda r: f"{r.verify_mb:.1f}",
  "verify": lambda r: _bandwidth_share(r.verify_mb, r.memory_gb_per_s, r.verify_ms),
}

ROOFLINE_LEGEND = {
  "GB/s": "measured memory bandwidth of the device",
  "step MB": "bytes that a target step reads: parameters and caches, in 1e6 bytes",
  "draft MB": "bytes that a draft step reads, in 1e6 bytes",
  "verify MB": "bytes that a target forward pass over gamma + 1 tokens reads, in 1e6 bytes",
  "step, draft, verify in percent": "time of these reads at full bandwidth / measured time; above "
  "100% if weights stay in the processor's cache from step to step",
}


def cell(column: Callable[[Record], str], record: Record) -> str:
  """Return the text of a cell, or MISSING if the record lacks one of the required values."""
  try:
    return column(record)
  except TypeError:  # one of the values is None
    return MISSING


def speed_table(records: Sequence[Record]) -> Table:
  """Return costs, predicted and measured speedups, and exactness, with one row per record."""
  if all(r.quality is None for r in records):
    return _table(COLUMNS, records, LEGEND)
  return _table(COLUMNS | QUALITY, records, LEGEND | QUALITY_LEGEND)


def budget_table(records: Sequence[Record]) -> Table:
  """Return the time of each part of a round, with one row per record."""
  return _table(BUDGET, records, BUDGET_LEGEND)


def roofline_table(records: Sequence[Record]) -> Table:
  """Return the bytes and the bandwidth of each part of a round, with one row per record."""
  return _table(ROOFLINE, records, ROOFLINE_LEGEND)


def _table(
  columns: Mapping[str, Callable], records: Sequence[Record], legend: Mapping[str, str]
) -> Table:
  first = records[0]
  title = (
    f"{first.subject}, {first.num_examples} texts, batch {first.batch_size}, {first.dtype}, "
    + first.device
    + ("" if first.kernels == "xla" else f", {first.kernels} kernels")
    + ("" if first.baseline == "own" else f", over {first.baseline}")
  )
  rows = tuple(tuple(cell(column, r) for column in columns.values()) for r in records)
  return Table(title, tuple(columns), rows, (), legend)
