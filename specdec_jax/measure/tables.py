"""Tables of text cells, in particular of records.

`docs/metrics.md` explains the headings of the columns.
"""

import dataclasses
import io
import operator
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import rich.table
from rich import box
from rich.console import Console
from rich.text import Text

from specdec_jax.measure.records import Record

MISSING = "-"
_WIDTH = 100  # characters per line of notes


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of text cells; `terminal_text` formats it."""

  title: str  # without line breaks
  columns: tuple[str, ...]  # distinct headings
  rows: tuple[tuple[str, ...], ...]  # one cell per column
  notes: tuple[str, ...] = ()  # sentences about the whole table
  legend: Mapping[str, str] = dataclasses.field(default_factory=dict)  # explanations by heading

  @property
  def footer(self) -> list[str]:
    """Lines below the table: the legend and the notes."""
    return [*(f"{heading}: {meaning}" for heading, meaning in self.legend.items()), *self.notes]

  @property
  def right_aligned(self) -> list[bool]:
    """For each column, whether all its cells are missing or start like numbers."""
    columns = zip(*self.rows) if self.rows else [()] * len(self.columns)
    return [all(cell[:1] in "+-0123456789" for cell in column) for column in columns]


def terminal_text(table: Table) -> str:
  """Format a table for a terminal. The text ends in a newline."""
  grid = rich.table.Table(title=Text(table.title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
  for heading, right in zip(table.columns, table.right_aligned):
    # One word per line, because headings are longer than the cells below them.
    words = Text(heading.replace("temperature", "temp").replace(" ", "\n"))
    grid.add_column(words, justify="right" if right else "left", no_wrap=True)
  for row in table.rows:
    grid.add_row(*map(Text, row))
  # A terminal may wrap long lines, but rich must not truncate a cell.
  out = io.StringIO()
  Console(file=out, width=10_000).print(grid)
  lines = [line.rstrip() for line in out.getvalue().splitlines()]
  notes = [textwrap.fill(note, _WIDTH, subsequent_indent="  ") for note in table.footer]
  return "\n".join([*lines, *notes]) + "\n"


# Texts about records.


def number_text(value: float | None, spec: str) -> str:
  """Format a number, or return MISSING if it is None."""
  return MISSING if value is None else format(value, spec)


def range_text(r: Record) -> str:
  """Return the range of the speedup over the repeats, as ' [low,high]'; '' if there is none."""
  limits = r.speedup_range
  return "" if limits is None else f" [{limits[0]:.2f},{limits[1]:.2f}]"


def _tree_text(r: Record) -> str:
  if not r.settings.tree:
    return r.kind if r.kind == "chain" else f"{r.kind} of {r.num_nodes} nodes"
  depths = [0]
  for parent in r.settings.tree:
    depths.append(depths[parent] + 1)
  return f"tree of {len(depths)} nodes ({'-'.join(map(str, Counter(depths).values()))})"


def _other_filters(r: Record) -> str:
  neutral = dict(min_p=0, typical_p=1, epsilon_cutoff=0, eta_cutoff=0)
  values = {name: getattr(r.settings, name) for name in neutral}
  return ", ".join(f"{name} {x:g}" for name, x in values.items() if x != neutral[name]) or MISSING


def _setting(name: str, value: Any) -> str:
  return MISSING if value is None else f"{name} {value}"


# Settings that are part of a title if all records agree in them, and columns otherwise.
SETTINGS: dict[str, Callable[[Record], str]] = {
  "task": lambda r: r.settings.task or MISSING,
  "target": lambda r: r.models.target if r.settings.task else r.target_label,
  "draft": lambda r: (
    (r.models.draft if r.settings.task else r.draft_label)
    + (" (simulated)" if r.models.simulated else "")
  ),
  "texts": lambda r: f"{r.settings.num_examples} texts",
  "batch": lambda r: f"batch {r.settings.batch_size}",
  "dtype": lambda r: r.models.dtype,
  "kernels": lambda r: f"{r.models.kernels} kernels",
  "baseline": lambda r: (
    "over our own autoregressive decoding"
    if r.settings.baseline == "own"
    else f"over {r.settings.baseline}"
  ),
  "device": lambda r: r.device,
  "repeats": lambda r: MISSING if r.settings.repeats is None else f"repeats: {r.settings.repeats}",
}
# Settings that a title of a table omits, but that a page shows.
DETAILS: dict[str, Callable[[Record], str]] = {
  "target checkpoint": lambda r: _setting("target from", r.models.target_path),
  "draft checkpoint": lambda r: _setting("draft from", r.models.draft_path),
  "verifier": lambda r: r.settings.verifier,
  "proposal": _tree_text,
  "top-k": lambda r: f"top-k {r.settings.top_k}",
  "top-p": lambda r: f"top-p {r.settings.top_p:g}",
  "other filters": _other_filters,
  "lenience": lambda r: f"lenience {r.settings.lenience:g}",
  "limit": lambda r: _setting("limit", r.settings.max_new_tokens),
  "seed": lambda r: f"seed {r.settings.seed}",
  "inputs": lambda r: _setting("SHA-256 of the texts", r.settings.inputs_sha256),
}


def shared_and_varying(
  records: Sequence[Record], settings: Mapping[str, Callable[[Record], str]]
) -> tuple[list[str], dict[str, Callable[[Record], str]]]:
  """Return the texts of settings that all records share, and the settings in which they differ."""
  texts = {name: [*dict.fromkeys(map(text, records))] for name, text in settings.items()}
  shared = [values[0] for values in texts.values() if len(values) == 1 and values[0] != MISSING]
  return shared, {name: settings[name] for name, values in texts.items() if len(values) > 1}


# Tables of records.


class Column(NamedTuple):
  """A column of a table with one row per record.

  The value is the path of a field, such as 'times.c', or a function of the record, which raises
  TypeError if a field that it needs is None.
  """

  heading: str
  value: str | Callable[[Any], Any]  # Any instead of Record: its fields are not None
  spec: str = ""  # format of the value
  meaning: str = ""  # explanation for the legend; '' if the heading needs none

  def cell(self, record: Record) -> str:
    """Return the text of a cell, or MISSING if the record lacks one of the required values."""
    get = operator.attrgetter(self.value) if isinstance(self.value, str) else self.value
    try:
      return number_text(get(record), self.spec)
    except TypeError:
      return MISSING


def with_interval(path: str, spec: str) -> Callable[[Any], str]:
  """Return a function that formats a field of a record, with its interval if there is one."""
  get = operator.attrgetter(path, f"{path}_low", f"{path}_high")

  def text(r: Any) -> str:
    value, low, high = get(r)
    interval = "" if None in (low, high) else f" [{low:{spec}},{high:{spec}}]"
    return f"{value:{spec}}{interval}"

  return text


def legend(columns: Sequence[Column]) -> dict[str, str]:
  """Return the meaning of each heading that needs an explanation."""
  return {column.heading: column.meaning for column in columns if column.meaning}


def records_table(
  title: str, records: Sequence[Record], columns: Sequence[Column], notes: Sequence[str] = ()
) -> Table:
  """Return a table with one row per record."""
  rows = tuple(tuple(column.cell(r) for column in columns) for r in records)
  headings = tuple(column.heading for column in columns)
  return Table(title, headings, rows, tuple(notes), legend(columns))


def settings_table(
  records: Sequence[Record],
  columns: Sequence[Column],
  notes: Sequence[str] = (),
  settings: Mapping[str, Callable[[Record], str]] = SETTINGS,
) -> Table:
  """Return a table whose title has the settings that all records share; the others are columns."""
  shared, varying = shared_and_varying(records, settings)
  columns = [*(Column(*named) for named in varying.items()), *columns]
  return records_table(", ".join(shared), records, columns, notes)


def speed_table(records: Sequence[Record], notes: Sequence[str] = ()) -> Table:
  """Return a table of costs and of predicted and measured speedups, with one row per record."""
  return settings_table(records, with_quality(records, SPEED), [*notes, *noise_notes(records)])


def with_quality(records: Sequence[Record], columns: Sequence[Column]) -> tuple[Column, ...]:
  """Return columns, with that of the quality if a record has it."""
  has_quality = any(r.outputs.quality is not None for r in records)
  return (*columns, QUALITY) if has_quality else (*columns,)


def noise_notes(records: Sequence[Record]) -> list[str]:
  """Return notes about speedups of few repeats, and about costs too noisy for a prediction."""
  noisy = [
    f"{r.settings.gamma}"
    for r in records
    if r.predicted is None
    and min(r.times.c or 0.0, r.times.verify_cost or 1.0) < 0
    or r.times.target_prefill_ms is not None
    and r.times.verify_cost is None  # not timed
  ]
  notes = []
  if any(r.times.speedup is not None and (r.settings.repeats or 3) < 3 for r in records):
    notes.append("Speedups of fewer than 3 repeats are not reliable.")
  if noisy:
    text = "No prediction: the measurement is too noisy, since a cost is negative (gamma {})."
    notes.append(text.format(", ".join(noisy)))
  return notes


def no_alpha(records: Sequence[Record]) -> list[str]:
  """Return a note with the shares of accepted draft tokens of records without alpha."""
  without = [
    r for r in records if r.outputs.alpha is None and r.outputs.acceptance_rate is not None
  ]
  rates = ", ".join(f"{r.outputs.acceptance_rate:.0%} (gamma {r.settings.gamma})" for r in without)
  note = f"No alpha or Theorem 8 for this draft or verifier; draft tokens accepted: {rates}."
  return [note] if without else []


def _bandwidth(name: str, part: str, words: str) -> tuple[Column, Column]:
  get = operator.attrgetter(f"times.{part}_mb", "times.memory_gb_per_s", f"times.{part}_ms")

  def share(r: Any) -> float:
    megabytes, gb_per_s, ms = get(r)
    return megabytes / gb_per_s / ms  # 1e6 bytes at 1e9 bytes/s take 1 ms

  meaning = (
    f"time of the reads of {words} at full bandwidth / measured time; above 100% if weights "
  )
  meaning += "stay in the processor's cache"
  return (
    Column(f"{name}, MB", f"times.{part}_mb", ".1f", f"1e6 bytes that {words} reads"),
    Column(f"{name}, % of bandwidth", share, ".0%", meaning),
  )


def _quality(r: Any) -> str:
  outputs = r.outputs
  differs = outputs.quality != outputs.baseline_quality
  baseline = f" (autoregressive {outputs.baseline_quality:.1f})" if differs else ""
  return f"{outputs.metric or ''} {outputs.quality:.1f}{baseline}".strip()


def _identical(r: Record) -> str:
  return {True: "yes", False: "NO", None: MISSING}[r.outputs.identical]


def _speedup_range(r: Any) -> str:
  return f"{r.times.speedup:.2f}{range_text(r)}"


def _prefill(r: Any) -> float:
  return r.times.target_prefill_ms + r.times.draft_prefill_ms


def _draft_steps(r: Any) -> str:
  return f"{r.settings.gamma} x {r.times.draft_step_ms:.2f}"


_STEP = "time of a step of autoregressive decoding"
_SPEEDUP = "measured tokens/s / those of autoregressive decoding, medians of interleaved repeats"
_RANGE = f"{_SPEEDUP}; in brackets the lowest and highest over all repeats and in each repeat"
_IDENTICAL = "whether the output is that of autoregressive decoding, token for token (argmax only)"
_QUALITY = "score against references; that of autoregressive decoding in brackets if it differs"
_ALPHA = with_interval("outputs.alpha", ".2f")

TEMPERATURE = Column("temperature", "settings.temperature", "g")
GAMMA = Column("gamma", "settings.gamma")
ALPHA = Column("alpha", _ALPHA, "", "acceptance rate of token verification, with its 95% interval")
LENGTH = Column(
  "acceptance length", "outputs.tokens_per_round", ".2f", "tokens per target forward pass"
)
C = Column("cost ratio c", "times.c", ".3f", f"time of a draft step / {_STEP}")
V = Column("verify cost v", "times.verify_cost", ".2f", f"round without drafting / {_STEP}")
THEOREM_8 = Column("Theorem 8", "times.predicted_theorem8", ".2f", "predicted speedup if v = 1")
PREDICTED = Column("predicted", "predicted", ".2f", "predicted speedup with all measured costs")
SPEEDUP = Column("speedup", "times.speedup", ".2f", _SPEEDUP)
SPEEDUP_RANGE = Column("speedup", _speedup_range, "", _RANGE)
IDENTICAL = Column("identical", _identical, "", _IDENTICAL)
QUALITY = Column("quality", _quality, "", _QUALITY)
TOKENS_PER_S = Column("tokens/s", "times.speculative_tokens_per_s", ".0f")
BASELINE_TOKENS_PER_S = Column("baseline tokens/s", "times.baseline_tokens_per_s", ".0f")

SPEED = (TEMPERATURE, GAMMA, ALPHA, C, V, THEOREM_8, PREDICTED, SPEEDUP, IDENTICAL, LENGTH)
BUDGET = (
  TEMPERATURE,
  GAMMA,
  Column("prefill, ms", _prefill, ".2f", "time of target and draft to process a prompt"),
  Column("step, ms", "times.target_step_ms", ".2f", _STEP),
  Column("draft, ms", _draft_steps, "", "gamma x time of a draft step"),
  Column("verify, ms", "times.verify_ms", ".2f", "target forward pass over gamma + 1 tokens"),
  Column("accept, ms", "times.accept_ms", ".2f", "verification, and sampling of the next token"),
  Column("unaccounted, ms", "times.unaccounted_ms", ".2f", "round - its parts; includes noise"),
  Column("round, ms", "times.round_ms", ".2f", "time of a round of the decoded texts"),
  Column("c-hat", "times.operations_ratio", ".3f", "operations of a draft step / a target step"),
  Column("Theorem 10", "times.operations_factor", ".2f", "operations / without speculation"),
)
ROOFLINE = (
  TEMPERATURE,
  GAMMA,
  Column("GB/s", "times.memory_gb_per_s", ".1f", "measured memory bandwidth of the device"),
  *_bandwidth("step", "target_step", "a target step"),
  *_bandwidth("draft", "draft_step", "a draft step"),
  *_bandwidth("verify", "verify", "a target forward pass over gamma + 1 tokens"),
)
