"""What became of each number that the paper prints: computed, compiled, on a stand-in, or missing.

Numbers that the paper prints twice count once: Table 4's measured speeds are Table 2's, and the
alphas of Tables 2 and 4 and of Table 5 without lenience are Table 3's.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax.core import theory
from specdec_jax.records import Record
from specdec_jax.reporting.tables import MISSING, PaperRow, Table

COMPUTED = "computed, equal"
ROUNDED = "computed, equal within the rounding of what it is made of"
DIFFERS = "computed, DIFFERS"
STAND_IN = "measured on a stand-in"
COMPILED = "compiled for TPU v4"
WEIGHTS = "needs weights"
WEIGHTS_AND_TPU = "needs weights and a TPU"

# Where the records of stand-ins lie, under `experiments`, and what their drafts are called there.
_ENDE = {"unigram": "unigram", "bigram": "bigram", "t5-small": "draft"}
_STAND_INS: dict[str, tuple[str, dict[str, str]]] = {
  "T5-XXL (EnDe)": ("table3/results.jsonl", _ENDE),
  "T5-XXL (CNNDM)": (
    "model_free_drafts/results.jsonl",
    {"unigram": "unigram", "bigram": "bigram"},
  ),
  "GPT-like (97M)": (
    "table3/gpt_like.jsonl",
    {"unigram": "unigram", "bigram": "bigram", "gpt-like (6m)": "gpt_like_600k"},
  ),
}
_LENIENCE = "table5/results.jsonl"
_HOW = {
  "table3/results.jsonl": "the embedded pair, captions: `gin/runs/table3.gin`",
  "table3/gpt_like.jsonl": "the embedded GPT-like pair: `gin/runs/table3_gpt_like.gin`",
  "model_free_drafts/results.jsonl": "T5-11B's published outputs: `gin/runs/given_outputs.gin`",
  _LENIENCE: "the embedded pair, captions: `gin/runs/table5.gin`",
}
RECORDS = tuple(_HOW)  # files that `claims` reads, and
COMPILED_TABLE = "tpu_v4/table2.jsonl"  # what the compiler said

_TABLE_1 = "`scripts/tabulate.py --table 1`"
_STATUS = "`scripts/tabulate.py --table status`"
_COMPILER = "`scripts/compile_table2.py`"
_THEIR_WEIGHTS = "`gin/runs/{}.gin` with weights, [as below](#the-papers-own-rows)"
_LAMDA = "never published; `gin/runs/alpha.gin` with `gin/models/lamda.gin` runs the sizes"


class Claim(NamedTuple):
  """A number that the paper prints, and what became of it.

  Attributes:
    table: where it is printed.
    what: it is of; claims that differ in temperature or lenience only have the same.
    printed: as text.
    status: one of the constants above.
    ours: as text; MISSING if there is none.
    how: to get ours, or the paper's.
  """

  table: str
  what: str
  printed: str
  status: str
  ours: str
  how: str


def claims(
  paper: Mapping[int, Sequence[PaperRow]],
  records: Mapping[str, Sequence[Record]],
  compiled: Sequence[Mapping[str, Any]],
) -> list[Claim]:
  """All of them, in the paper's order.

  Args:
    paper: rows of Tables 1 to 5 by number, as `paper.load_table` gives them.
    records: those of each file in RECORDS.
    compiled: rows of Table 2 as compiled for TPU v4, each with task, m_q, temperature, c, speed, by
      bytes.
  """
  of_compiler = {(r["task"], r["m_q"], r["temperature"]): r for r in compiled}
  return [
    *_table_1(paper[1]),
    *_speeds(paper[2], of_compiler),
    *_alphas(paper[3], records),
    *_costs_and_expected(paper[4], of_compiler),
    *_lenient(paper[5], records),
  ]


def _table_1(rows: Sequence[PaperRow]) -> Iterable[Claim]:
  for row in rows:
    alpha, gamma = row["alpha"], int(row["gamma"])
    for name, value in (
      ("operations", theory.operations_factor(alpha, gamma, 0)),
      ("speed", theory.walltime_improvement(alpha, gamma, 0)),
    ):
      printed, ours = f"{row[name]:.2f}", f"{value:.2f}"
      status = COMPUTED if printed == ours else DIFFERS
      what = f"operations, speed; alpha {alpha:g}, gamma {gamma}"
      yield Claim("1", what, printed, status, ours, _TABLE_1)


def _speeds(rows: Sequence[PaperRow], of_compiler) -> Iterable[Claim]:
  for row in rows:
    found = of_compiler.get((row["task"], row["m_q"], row["temperature"]))
    yield Claim(
      "2, 4",
      f"speed; {row['task']}, {row['m_q']}",
      f"{row['speed']:.1f}",
      COMPILED if found else WEIGHTS_AND_TPU,
      f"{found['speed']:.1f}" if found else MISSING,
      f"{_COMPILER}; measured: {_THEIR_WEIGHTS.format('table2')}",
    )


def _alphas(rows: Sequence[PaperRow], records) -> Iterable[Claim]:
  for row in rows:
    file, drafts = _STAND_INS.get(row["m_p"], ("", {}))
    draft = drafts.get(row["m_q"].casefold())
    found = _find(records.get(file, ()), draft, row["temperature"], 1.0)
    how = _LAMDA if row["m_p"].startswith("LaMDA") else _THEIR_WEIGHTS.format("table3")
    what = f"alpha; {row['m_p']}, {row['m_q']}"
    yield _alpha("3", what, row["alpha"], found, _HOW.get(file, how) if draft else how)


def _costs_and_expected(rows: Sequence[PaperRow], of_compiler) -> Iterable[Claim]:
  first = {row["m_q"]: row for row in reversed(rows)}  # c is of a draft, whatever the task
  for m_q in dict.fromkeys(row["m_q"] for row in rows):
    row = first[m_q]
    found = of_compiler.get((row["task"], m_q, row["temperature"]))
    status = COMPILED if found else WEIGHTS_AND_TPU
    ours = f"{found['c']:.3f}" if found else MISSING
    yield Claim("4", f"c; {m_q}", f"{row['c']:g}", status, ours, _COMPILER)
  for row in rows:
    exp = lambda alpha, c, row=row: float(theory.walltime_improvement(alpha, row["gamma"], c))
    ours = exp(row["alpha"], row["c"])
    least = exp(row["alpha"] - 0.005, row["c"] + 0.005)
    most = exp(row["alpha"] + 0.005, row["c"] - 0.005)
    within = least < row["exp"] + 0.05 and row["exp"] - 0.05 < most
    equal = f"{ours:.1f}" == f"{row['exp']:.1f}"
    status = COMPUTED if equal else ROUNDED if within else DIFFERS
    what = f"expected speed; {row['task']}, {row['m_q']}"
    shown = f"{ours:.1f}" if equal else f"{ours:.2f}"
    yield Claim("4", what, f"{row['exp']:.1f}", status, shown, _STATUS)


def _lenient(rows: Sequence[PaperRow], records) -> Iterable[Claim]:
  for row in rows:
    if row["lenience"] < 1:
      model = row["m_q"].partition(" (")[0]
      draft = _ENDE.get(model.casefold())
      found = _find(records.get(_LENIENCE, ()), draft, row["temperature"], row["lenience"])
      what = f"alpha, lenience 0.5 / 0.3 / 0.1; {model}, temperature {row['temperature']:g}"
      how = _HOW[_LENIENCE] if draft else _THEIR_WEIGHTS.format("table5")
      yield _alpha("5", what, row["alpha"], found, how)


def _alpha(table: str, what: str, printed: float, found: Record | None, how: str) -> Claim:
  status, ours = (STAND_IN, f"{found.alpha:.2f}") if found else (WEIGHTS, MISSING)
  return Claim(table, what, f"{printed:.2f}", status, ours, how)


def _find(records: Iterable[Record], draft: str | None, temperature: float, lenience: float):
  wanted = (draft, temperature, lenience, 0)
  match = [r for r in records if (r.draft, r.temperature, r.lenience, r.top_k) == wanted]
  return match[-1] if match else None


def status_table(found: Sequence[Claim]) -> Table:
  """Claims of one thing, such as both temperatures of an alpha, as a row."""
  groups: dict[tuple[str, str], list[Claim]] = {}
  for claim in found:
    groups.setdefault((claim.table, claim.what), []).append(claim)
  joined = lambda values: " / ".join(values if len({*values}) > 1 else values[:1])
  rows = tuple(
    (
      table,
      what,
      f"{len(group)}",
      " / ".join(claim.printed for claim in group),
      joined([claim.status for claim in group]),
      " / ".join(claim.ours for claim in group),
      joined([claim.how for claim in group]),
    )
    for (table, what), group in groups.items()
  )
  counts = ", ".join(f"{count} {status}" for status, count in status_counts(found).rows)
  return Table(
    "Reproduction status of the paper's printed numbers",
    ("table", "what", "numbers", "printed", "status", "ours", "how"),
    rows,
    (
      f"{len(found)} numbers: {counts}.",
      "Two numbers of a row are at temperature 0 and 1, unless it says otherwise. A stand-in is "
      "another model or another text: its number stands beside the paper's, and is no "
      "reproduction of it.",
    ),
  )


def status_counts(found: Sequence[Claim]) -> Table:
  """How many numbers of each status, in the order in which they first occur."""
  counts = collections.Counter(claim.status for claim in found)
  rows = tuple((status, f"{count}") for status, count in counts.items())
  return Table("Reproduction status", ("status", "printed numbers"), rows, ())
