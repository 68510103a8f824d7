"""The paper's Tables 1 to 5 with our records in them: each row says whose it is.

A record stands under the paper's row of the same models, task, sampling and lenience; one of other
models, a stand-in, comes after all of them. Nothing is subtracted: a difference of two things
unlike says nothing of either.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specdec_jax.core import theory
from specdec_jax.records import Record, key

MISSING = "-"

PaperRow = Mapping[str, Any]  # as `paper.load_table` gives them

_LAMDA_TOP_K = 40  # all of LaMDA's samples in Table 3 passed this filter

# The paper's tasks, by what ours are called; only those that the paper ran.
_TASKS = {"EnDe": ("wmt14_ende", "wmt_ende", "ende"), "CNNDM": ("cnn_dm", "cnndm")}
# Sizes of T5 as they stand in names of checkpoints, such as t5_11B or flan-t5-xxl, and the paper's.
_SIZES = {"small": "small", "base": "base", "large": "large", "xxl": "xxl", "11b": "xxl"}


@dataclasses.dataclass(frozen=True)
class Table:
  """What a person reads; `formats.render` writes it.

  Attributes:
    title: one line.
    columns: headings, no two alike.
    rows: cells as text, one for each column.
    notes: sentences about all of it.
  """

  title: str
  columns: tuple[str, ...]
  rows: tuple[tuple[str, ...], ...]
  notes: tuple[str, ...]


def paper_table(number: int, records: Iterable[Record], paper_rows: Sequence[PaperRow]) -> Table:
  """The paper's Table `number`, 1 to 5, and our records.

  Args:
    number: of the table.
    records: ours; Table 1 is computed and needs none. Of several of one setting the last counts.
    paper_rows: `paper.load_table(number)`.
  """
  if number == 1:
    return _table_1(paper_rows)
  title, columns = _LAYOUTS[number]
  shown, num_left_out = _select(number, records)
  alike = [[r for r in shown if _is_alike(number, r, row)] for row in paper_rows]
  beside = [r for rows in alike for r in rows]
  rows = []
  for row, ours in zip(paper_rows, alike):
    rows.append(("paper", *(of_paper(row) for _, of_paper in columns.values())))
    rows += [_our_row("ours", columns, r) for r in ours]
  rows += [_our_row("stand-in", columns, r) for r in shown if r not in beside]
  notes = [
    f"A '{MISSING}' is what was not measured, or what the paper does not print.",
    f"Of the paper's {len(paper_rows)} rows, {sum(map(bool, alike))} have records of ours under "
    "them: the same sizes of models on the same task, sampled alike. A stand-in is another model "
    "or another text, and no reproduction.",
  ]
  if num_left_out:
    only = "Algorithm 1" + " at batch 1" * (number in (2, 4)) + " without lenience" * (number != 5)
    notes.append(f"{num_left_out} of our records are left out: the paper's table is of {only}.")
  if shown:
    notes.append(measured_with(shown))
  if any(r.acceptance == "simulated" for r in shown):
    notes.append("Where a draft is simulated, alpha was chosen and the times are measured.")
  return Table(title, ("of", *columns), tuple(rows), tuple(notes))


def _our_row(of: str, columns, r: Record) -> tuple[str, ...]:
  return (of, *(of_ours(r) for of_ours, _ in columns.values()))


def _table_1(paper_rows: Sequence[PaperRow]) -> Table:
  rows = []
  for row in paper_rows:
    alpha, gamma = row["alpha"], int(row["gamma"])
    cells = [f"{alpha:g}", f"{gamma}"]
    for name, value in (
      ("operations", theory.operations_factor(alpha, gamma, 0)),
      ("speed", theory.walltime_improvement(alpha, gamma, 0)),
    ):
      cells += [f"{value:.2f}", f"{row[name]:.2f}"]
    rows.append(tuple(cells))
  return Table(
    "Table 1: arithmetic operations and speed against plain decoding, for c = 0",
    ("alpha", "gamma", "operations", "paper operations", "speed", "paper speed"),
    tuple(rows),
    ("Ours are Theorems 10 and 8, rounded to the digits that the paper prints.",),
  )


def models_text(r: Record, draft: bool = True) -> str:
  """Task, target and draft for a title; their checkpoints where no task was given."""
  if r.task is None:
    named = [r.target_label, r.draft_label]
  else:
    named = [r.task, r.target, r.draft]
  return ", ".join(named if draft else named[:-1])


def measured_with(records: Sequence[Record]) -> str:
  """Which state of the code wrote the records, and when, in a sentence."""
  states = {
    f"commit {r.commit} of {r.date[:10]}" if r.commit and r.date else "a commit not recorded": None
    for r in records
  }
  return f"Measured with {'; '.join(states)}."


# Which records, and under which of the paper's rows.


def _select(number: int, records: Iterable[Record]) -> tuple[list[Record], int]:
  """The records that the table is of, the last of each setting, and how many others there are."""
  latest, num_left_out = {}, 0
  for r in records:
    of_algorithm_1 = r.verifier == "TokenVerifier" and r.kind == "chain"
    if number != 5 and r.lenience != 1 or not of_algorithm_1:
      num_left_out += 1
    elif number in (2, 4) and r.batch_size != 1:
      num_left_out += 1
    else:
      # Alpha does not depend on gamma.
      latest[key(dataclasses.replace(r, gamma=0) if number == 3 else r)] = r
  return list(latest.values()), num_left_out


def _is_alike(number: int, r: Record, row: PaperRow) -> bool:
  """Whether a record is of what the paper's row is of."""
  if r.acceptance == "simulated" or row.get("lenience", 1) != r.lenience:
    return False
  top_k = _LAMDA_TOP_K if str(row.get("m_p")).startswith("LaMDA") else 0
  # A filter keeps the likeliest token, which is all that argmax looks at.
  filtered_alike = r.temperature == 0 or (r.top_k, r.top_p) == (top_k, 1)
  if r.temperature != row["temperature"] or not filtered_alike:
    return False
  target, task = _target_and_task(row)
  models = _same_model(target, r.target) and _same_model(row["m_q"], r.draft)
  ours = (r.task or "").casefold()
  return models and ours in _TASKS.get(task, (ours,))


def _target_and_task(row: PaperRow) -> tuple[str, str]:
  """M_p and its task: all targets but those of Table 3 are T5-XXL, and Table 5 is of EnDe."""
  if "m_p" not in row:
    return "T5-XXL", row.get("task", "EnDe")
  found = re.fullmatch(r"(T5-XXL) \((\w+)\)", row["m_p"])
  return (found[1], found[2]) if found else (row["m_p"], MISSING)


def _same_model(printed: str, ours: str) -> bool:
  """Whether a name in the paper, with or without its size in brackets, is of the model `ours`.

  T5's by size: T5-XXL is t5_11B too. Of others the whole name: LaMDA (8B) is lamda_8b.
  """
  if printed.casefold().startswith("t5-"):
    sizes = re.findall("|".join(_SIZES), ours.casefold())
    return bool(sizes) and _SIZES[sizes[-1]] == printed.casefold()[3:].partition(" ")[0]
  return re.sub(r"\W+", "_", printed.casefold()).strip("_") == ours.casefold()


# Cells: of a record, and of the paper's row.


def sampling_text(r: Record) -> str:
  """The temperature, and what else shapes the distribution."""
  top_k = f" top-{r.top_k}" if r.top_k else ""
  top_p = f" top-p {r.top_p:g}" if r.top_p < 1 else ""
  return f"{r.temperature:g}{top_k}{top_p}"


def _number(value, spec: str) -> str:
  return MISSING if value is None else format(value, spec)


_Column = tuple[Callable[[Record], str], Callable[[PaperRow], str]]


def _column(
  field: str, spec: str = ".2f", printed: str | None = None, printed_spec: str | None = None
) -> _Column:
  """A field of records, and the paper's column of that name unless `printed` is another."""
  return (
    lambda r: _number(getattr(r, field), spec),
    lambda row: _number(row[printed or field], printed_spec or spec),
  )


def _ours_only(cell: Callable[[Record], str]) -> _Column:
  return cell, lambda row: MISSING


def _draft(r: Record) -> str:
  return f"{r.draft} (simulated)" if r.acceptance == "simulated" else r.draft


def _interval(r: Record) -> str:
  known = r.alpha_low is not None and r.alpha_high is not None
  return f"{r.alpha_low:.2f}-{r.alpha_high:.2f}" if known else MISSING


def _predicted(r: Record) -> str:
  value = (
    r.predicted_measured_cost if r.predicted_finite_length is None else r.predicted_finite_length
  )
  return _number(value, ".2f")


def _at_the_papers_cost(r: Record) -> str:
  """Theorem 8 as Appendix A.5 takes it: gamma 8 and T5-small's c of 0.015."""
  of_alpha = lambda alpha: float(theory.walltime_improvement(alpha, 8, 0.015))
  return _number(None if r.alpha is None else of_alpha(r.alpha), ".1f")


def _measured_on(r: Record) -> str:
  batch = "" if r.batch_size == 1 else f", batch {r.batch_size}"
  over = "" if r.baseline == "own" else f", over {r.baseline}"
  return f"{r.device}, {r.dtype}, {_number(r.num_examples, '')} texts{batch}{over}"


_SETTING: dict[str, _Column] = {
  "task": (lambda r: r.task or MISSING, lambda row: _target_and_task(row)[1]),
  "target": (lambda r: r.target, lambda row: _target_and_task(row)[0]),
  "draft": (_draft, lambda row: row["m_q"]),
  "temp": (sampling_text, lambda row: f"{row['temperature']:g}"),
}
_ON_A_TPU = {"measured on": (_measured_on, lambda row: "TPU v4, over T5X")}

_LAYOUTS: dict[int, tuple[str, dict[str, _Column]]] = {
  2: (
    "Table 2: measured speed against plain decoding, batch 1",
    {
      **_SETTING,
      "gamma": _column("gamma", ".0f"),
      "alpha": _column("alpha"),
      "speed": _column("speedup", ".2f", "speed", ".1f"),
      **_ON_A_TPU,
    },
  ),
  3: (
    "Table 3: alpha over text that the target generated",
    {
      **_SETTING,
      "alpha": _column("alpha"),
      "95% interval": _ours_only(_interval),
      "measured on": _ours_only(_measured_on),
    },
  ),
  4: (
    "Table 4: expected (Theorem 8) and measured speed, batch 1",
    {
      **_SETTING,
      "gamma": _column("gamma", ".0f"),
      "alpha": _column("alpha"),
      "c": _column("c", ".3f", "c", "g"),
      "exp": _column("predicted_theorem8", ".2f", "exp", ".1f"),
      "exp, costs measured": _ours_only(_predicted),
      "emp": _column("speedup", ".2f", "emp", ".1f"),
      **_ON_A_TPU,
    },
  ),
  5: (
    "Table 5: alpha with lenience",
    {
      **_SETTING,
      "lenience": _column("lenience", "g"),
      "alpha": _column("alpha"),
      "total variation": _ours_only(lambda r: _number(r.total_variation, ".3f")),
      "speed by Thm 8": (_at_the_papers_cost, lambda row: _number(row["speed"], ".1f")),
      "measured on": _ours_only(_measured_on),
    },
  ),
}
