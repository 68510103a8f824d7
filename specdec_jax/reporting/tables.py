"""Our records beside the paper's Tables 1 to 5: ours, the paper's value, and the difference."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specdec_jax import theory
from specdec_jax.errors import InputError
from specdec_jax.records import Record, key

MISSING = "-"

PaperRow = Mapping[str, Any]  # as `paper.load_table` gives them
_Cell = Callable[[Record, PaperRow | None], str]

# Drafts without weights. Where the paper has no row of theirs, none of its models stands in.
_NO_MODEL = ("unigram", "bigram", "copy")
_LAMDA_TOP_K = 40  # all of LaMDA's samples in Table 3 passed this filter

# What stands beside records of targets whose names begin so, in Table 3: m_p, and m_q for a draft
# that the paper lacks. Named in the paper's way, a size of ours stands beside its own row.
_STAND_INS = {
  "gpt_like_": ("GPT-like (97M)", "GPT-like (6M)"),
  "lamda_": ("LaMDA (137B)", "LaMDA (100M)"),
}


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


def paper_table(
  number: int,
  records: Iterable[Record],
  paper_rows: Sequence[PaperRow],
  paper_task: str = "EnDe",
  paper_draft: str | None = None,
  paper_target: str | None = None,
) -> Table:
  """The paper's Table `number`, 1 to 5, with our records beside its rows.

  A record stands beside the paper's row of the same task, draft, sampling and lenience. Where the
  paper has no such task or draft, the one named here stands in.

  Args:
    number: of the table.
    records: ours; Table 1 is computed and needs none. Of several of one setting the last counts.
    paper_rows: `paper.load_table(number)`.
    paper_task: of Tables 2 and 4.
    paper_draft: m_q; T5-small unless told.
    paper_target: m_p of Table 3, "T5-XXL (EnDe)" unless told (with `paper_task` in the brackets).
      Where all records are of GPT-like or of LaMDA targets, these are theirs unless told.

  Raises:
    InputError: the paper's table has no such task, draft or target.
  """
  if number == 1:
    return _table_1(paper_rows)
  title, columns = _LAYOUTS[number]
  shown, num_left_out = _select(number, records)
  chosen, paper_draft = _choice(number, shown, paper_task, paper_draft, paper_target)
  _check_choice(number, paper_rows, chosen, paper_draft)
  beside = [_paper_row(number, r, paper_rows, chosen, paper_draft) for r in shown]
  of_choice = [row for row in paper_rows if _block(number, row) in (chosen, None)]
  unmatched = sum(row not in beside for row in of_choice)
  notes = [
    f"A '{MISSING}' is what was not measured, or what the paper does not have.",
    "Of several records of one setting the last counts.",
    f"Where the paper lacks our task or draft, its {chosen if number != 5 else 'EnDe'} with "
    f"{paper_draft} stands beside ours: other models, another text and, for times, a TPU v4.",
    f"Of the paper's {len(of_choice)} rows{'' if number == 5 else f' of {chosen}'}, {unmatched} "
    "have no record of ours beside them.",
  ]
  if number == 5:
    notes.append("By Theorem 8 with c = 0.015 and gamma 8, as in Appendix A.5 for argmax.")
  if num_left_out:
    only = "texts decoded without lenience" if number == 3 else "batch 1 without lenience"
    notes.append(f"{num_left_out} of our records are left out: the paper's table is of {only}.")
  if any(r.acceptance == "simulated" for r in shown):
    notes.append("Where a draft is simulated, alpha was chosen and the times are measured.")
  rows = [tuple(cell(r, row) for cell in columns.values()) for r, row in zip(shown, beside)]
  return Table(title, tuple(columns), tuple(rows), tuple(notes))


def _table_1(paper_rows: Sequence[PaperRow]) -> Table:
  rows = []
  for row in paper_rows:
    alpha, gamma = row["alpha"], int(row["gamma"])
    cells = [f"{alpha:g}", f"{gamma}"]
    for name, value in (
      ("operations", theory.operations_factor(alpha, gamma, 0)),
      ("speed", theory.walltime_improvement(alpha, gamma, 0)),
    ):
      ours = round(float(value), 2)
      cells += [f"{ours:.2f}", f"{row[name]:.2f}", f"{ours - row[name]:+z.2f}"]
    rows.append(tuple(cells))
  return Table(
    "Table 1: arithmetic operations and speed against plain decoding, for c = 0",
    ("alpha", "gamma")
    + ("operations", "paper operations", "difference in operations")
    + ("speed", "paper speed", "difference in speed"),
    tuple(rows),
    ("Ours are Theorems 10 and 8, rounded to the digits that the paper prints.",),
  )


# Which records, and which of the paper's rows beside them.


def _select(number: int, records: Iterable[Record]) -> tuple[list[Record], int]:
  """The records that the table is of, the last of each setting, and how many others there are."""
  latest, num_left_out = {}, 0
  for r in records:
    if number != 5 and r.lenience != 1 or number in (2, 4) and r.batch_size != 1:
      num_left_out += 1
    else:
      # Alpha does not depend on gamma.
      latest[key(dataclasses.replace(r, gamma=0) if number == 3 else r)] = r
  return list(latest.values()), num_left_out


def _block(number: int, row: PaperRow):
  """What a row is of, beside its draft; Table 5 is all of one task."""
  return row.get("m_p" if number == 3 else "task")


def _choice(number, records, task, draft: str | None, target: str | None) -> tuple[str, str]:
  """What the paper's rows are of that stand beside ours: m_p in Table 3, a task; and m_q."""
  if number != 3:
    return task, draft or "T5-small"
  stand_ins = f"T5-XXL ({task})", "T5-small"
  for family, names in _STAND_INS.items():
    if records and not target and all(r.target.startswith(family) for r in records):
      stand_ins = names
  return target or stand_ins[0], draft or stand_ins[1]


def _same(name, ours: str) -> bool:
  """Whether the paper's name, with or without its size in brackets, is ours.

  A decoder-only model's is in ours with its size: 'LaMDA (8B)' is lamda_8b.
  """
  in_our_way = re.sub(r"\W+", "_", name.casefold()).strip("_")
  return f"{name} (".casefold().startswith(f"{ours} (".casefold()) or in_our_way == ours


def _check_choice(number: int, rows: Sequence[PaperRow], chosen: str, draft: str) -> None:
  blocks = list(dict.fromkeys(_block(number, row) for row in rows))
  if number != 5 and chosen not in blocks:
    raise InputError(f"Table {number} of the paper has no {chosen!r}; it has {', '.join(blocks)}.")
  drafts = [row["m_q"] for row in rows if _block(number, row) in (chosen, None)]
  if not any(_same(name, draft) for name in drafts):
    raise InputError(
      f"Table {number} of the paper has no draft {draft!r}"
      f"{'' if number == 5 else f' for {chosen}'}; it has {', '.join(dict.fromkeys(drafts))}."
    )


def _paper_row(
  number: int, r: Record, rows: Sequence[PaperRow], chosen: str, paper_draft: str
) -> PaperRow | None:
  ours = f"{r.target} ({r.task})" if number == 3 else r.task
  own = [row for row in rows if _block(number, row) and _same(_block(number, row), ours)]
  rows = own or [row for row in rows if _block(number, row) in (chosen, None)]
  rows = [row for row in rows if row.get("lenience", 1) == r.lenience and _same_sampling(row, r)]
  own = [row for row in rows if _same(row["m_q"], r.draft)]
  if not own and not r.draft.casefold().startswith(_NO_MODEL):
    own = [row for row in rows if _same(row["m_q"], paper_draft)]
  return own[0] if own else None


def _same_sampling(row: PaperRow, r: Record) -> bool:
  top_k = _LAMDA_TOP_K if str(row.get("m_p")).startswith("LaMDA") else 0
  # A filter keeps the likeliest token, which is all that argmax looks at.
  filtered_alike = r.temperature == 0 or (r.top_k, r.top_p) == (top_k, 1)
  return r.temperature == row["temperature"] and filtered_alike


# Cells.


def _number(value, spec: str) -> str:
  return MISSING if value is None else format(value, spec)


def _ours(name: str, spec: str = ".2f") -> _Cell:
  return lambda r, row: _number(getattr(r, name), spec)


def _paper(name: str, spec: str) -> _Cell:
  return lambda r, row: _number(row and row[name], spec)


def _difference(name: str, paper_name: str) -> _Cell:
  def cell(r, row):
    ours, theirs = getattr(r, name), row and row[paper_name]
    return MISSING if None in (ours, theirs) else f"{ours - theirs:+z.2f}"

  return cell


def _draft(r: Record, row) -> str:
  return f"{r.draft} (simulated)" if r.acceptance == "simulated" else r.draft


def sampling_text(r: Record) -> str:
  """The temperature, and what else shapes the distribution."""
  top_k = f" top-{r.top_k}" if r.top_k else ""
  top_p = f" top-p {r.top_p:g}" if r.top_p < 1 else ""
  return f"{r.temperature:g}{top_k}{top_p}"


def _interval(r: Record, row) -> str:
  known = r.alpha_low is not None and r.alpha_high is not None
  return f"{r.alpha_low:.2f}-{r.alpha_high:.2f}" if known else MISSING


def _predicted(r: Record, row) -> str:
  value = r.predicted_measured_cost if r.predicted_text is None else r.predicted_text
  return _number(value, ".2f")


def _at_the_papers_cost(r: Record, row) -> str:
  """Theorem 8 as Appendix A.5 takes it: gamma 8 and T5-small's c of 0.015."""
  of_alpha = lambda alpha: float(theory.walltime_improvement(alpha, 8, 0.015))
  return _number(None if r.alpha is None else of_alpha(r.alpha), ".1f")


def _measured_on(r: Record, row) -> str:
  batch = "" if r.batch_size == 1 else f", batch {r.batch_size}"
  over = "" if r.baseline == "own" else f", over {r.baseline}"
  devices = f" x {r.num_devices}" if r.num_devices > 1 else ""
  return f"{r.device_kind}{devices} {r.dtype}, {_number(r.num_examples, '')} texts{batch}{over}"


_SETTING = {
  "task": _ours("task", ""),
  "target": _ours("target", ""),
  "draft": _draft,
  "temp": lambda r, row: sampling_text(r),
}

_LAYOUTS: dict[int, tuple[str, dict[str, _Cell]]] = {
  2: (
    "Table 2: measured speed against plain decoding, batch 1",
    {
      **_SETTING,
      "gamma": _ours("gamma", ""),
      "alpha": _ours("alpha"),
      "speed": _ours("speedup"),
      "paper m_q": _paper("m_q", ""),
      "paper gamma": _paper("gamma", ".0f"),
      "paper alpha": _paper("alpha", ".2f"),
      "paper speed": _paper("speed", ".1f"),
      "difference in speed": _difference("speedup", "speed"),
      "measured on": _measured_on,
    },
  ),
  3: (
    "Table 3: alpha over text that the target generated",
    {
      **_SETTING,
      "alpha": _ours("alpha"),
      "95% interval": _interval,
      "paper m_p": _paper("m_p", ""),
      "paper m_q": _paper("m_q", ""),
      "paper alpha": _paper("alpha", ".2f"),
      "difference in alpha": _difference("alpha", "alpha"),
      "measured on": _measured_on,
    },
  ),
  4: (
    "Table 4: expected (Theorem 8) and measured speed, batch 1",
    {
      **_SETTING,
      "gamma": _ours("gamma", ""),
      "alpha": _ours("alpha"),
      "c": _ours("c", ".3f"),
      "exp": _ours("predicted_theorem8"),
      "exp, costs measured": _predicted,
      "emp": _ours("speedup"),
      "paper m_q": _paper("m_q", ""),
      "paper c": _paper("c", "g"),
      "paper exp": _paper("exp", ".1f"),
      "paper emp": _paper("emp", ".1f"),
      "difference in emp": _difference("speedup", "emp"),
      "measured on": _measured_on,
    },
  ),
  5: (
    "Table 5: alpha with lenience",
    {
      **_SETTING,
      "gamma": _ours("gamma", ""),
      "lenience": _ours("lenience", "g"),
      "alpha": _ours("alpha"),
      "total variation": _ours("total_variation", ".3f"),
      "speed": _ours("speedup"),
      "speed by Thm 8": _at_the_papers_cost,
      "paper m_q": _paper("m_q", ""),
      "paper alpha": _paper("alpha", ".2f"),
      "difference in alpha": _difference("alpha", "alpha"),
      "paper speed": _paper("speed", ".1f"),
      "measured on": _measured_on,
    },
  ),
}
