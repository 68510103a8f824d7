"""Reproduction status of the numbers of the paper's tables, Section 3.6 and Appendix A.5.

A number is computed from a formula, derived from a compiled program, measured with the paper's own
models or with a stand-in (other models or texts), or not available here. Numbers that the paper
prints twice count once: the measured speeds of Table 4 are also in Table 2, and the alphas of
Tables 2 and 4, and of Table 5 without lenience, are also in Table 3.
"""

import collections
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.lib.records import lines
from experiments.paper.paper import PaperRow, load_table
from experiments.paper.paper_tables import reproduces
from experiments.tpu_v4.table2 import predicted
from specdec_jax import theory
from specdec_jax.measure.records import Record, read
from specdec_jax.measure.tables import MISSING, Table

EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1]

COMPUTED = "computed, equal"
ROUNDED = "computed, equal within the rounding of its inputs"
DIFFERS = "computed, DIFFERS"
NO_GAMMA = "computed: Theorem 8 gives less at every gamma"
MEASURED = "measured with the paper's own models"
STAND_IN = "measured on a stand-in"
COMPILED = "compiled for TPU v4"
WEIGHTS = "needs weights"
WEIGHTS_AND_TPU = "needs weights and a TPU"

_SIZES = "sizes/alphas.jsonl"
_ENDE = {"unigram": "unigram", "bigram": "bigram", "t5-small": "draft"}  # stand-ins in Table 5
# (The paper's M_p, M_q) -> file of the stand-in's records in `experiments`, and its name there.
_STAND_INS = {
  **{("T5-XXL (EnDe)", name): ("table3/results.jsonl", name) for name in ("unigram", "bigram")},
  ("T5-XXL (EnDe)", "t5-small"): (_SIZES, "300k"),
  ("T5-XXL (EnDe)", "t5-base"): (_SIZES, "900k"),
  ("T5-XXL (EnDe)", "t5-large"): (_SIZES, "draft"),
  **{
    ("T5-XXL (CNNDM)", name): ("model_free_drafts/results.jsonl", name)
    for name in ("unigram", "bigram")
  },
  ("GPT-like (97M)", "unigram"): ("table3/gpt_like.jsonl", "unigram"),
  ("GPT-like (97M)", "bigram"): ("table3/gpt_like.jsonl", "bigram"),
  ("GPT-like (97M)", "gpt-like (6m)"): ("table3/gpt_like.jsonl", "gpt_like_600k"),
}
_LENIENCE = "table5/results.jsonl"
_REPRODUCTION = {
  "table3/results.jsonl": "the bundled target, captions: `experiments/table3/table3.gin`",
  "table3/gpt_like.jsonl": "the GPT-like pair: `experiments/table3/table3_gpt_like.gin`",
  "model_free_drafts/results.jsonl": "T5-11B's published outputs: "
  "`experiments/model_free_drafts/given_outputs.gin`",
  _SIZES: "the bundled target and drafts of three sizes, captions: "
  "`experiments/sizes/size_alphas.gin`",
  _LENIENCE: "the bundled target, captions: `experiments/table5/table5.gin`",
}
# Records of `specdec reproduce` with the paper's own models; there are none yet.
OWN_RECORDS = "paper/results.jsonl"
RECORDS = (*_REPRODUCTION, OWN_RECORDS)  # files of records for `claims`
COMPILED_TABLE = "tpu_v4/table2.jsonl"  # reports of the TPU compiler

_TABLE_1 = "`scripts/tabulate.py --table 1`"
_STATUS = "`scripts/tabulate.py --table status`"
_COMPILER = "`python -m experiments.tpu_v4.table2`"
_WITH_WEIGHTS = "`specdec reproduce {} --gin_file=experiments/paper/fine_tuned.gin`"
_LAMDA = (
  "weights never published; `experiments/table3/lamda.gin` runs only the shapes, and returns the "
  "alpha that it is given"
)
# Column of the status table -> statuses of the numbers in it.
_COLUMNS = {
  "computed": (COMPUTED, ROUNDED, DIFFERS, NO_GAMMA),
  "compiled (speed: Theorem 8 with the paper's alpha)": (COMPILED,),
  "measured": (MEASURED, STAND_IN),
}


class Claim(NamedTuple):
  """A number that the paper prints, and its reproduction status.

  Attributes:
    table: numbers of the tables that print it, or number of the section.
    quantity: description of the number. Claims that differ only in temperature or lenience have the
      same quantity.
    printed: text of the number in the paper.
    status: one of the constants of this module, such as COMPUTED.
    ours: text of our number; MISSING if we have no number.
    reproduction: instructions to reproduce our number or the number of the paper.
  """

  table: str
  quantity: str
  printed: str
  status: str
  ours: str
  reproduction: str


def claims(
  paper: Mapping[int, Sequence[PaperRow]],
  records: Mapping[str, Sequence[Record]],
  compiled: Sequence[Mapping[str, Any]],
) -> list[Claim]:
  """Return all claims: those of Tables 1 to 5, in order, and then that of Section 3.6.

  Args:
    paper: rows of Tables 1 to 5 by number (`paper.load_table`).
    records: records of each file in RECORDS.
    compiled: rows of Table 2 compiled for TPU v4. Each has task, m_q, temperature, and the
      bandwidth-bound estimates of c and speed.
  """
  compiled_rows = {(r["task"], r["m_q"], r["temperature"]): r for r in compiled}
  return [
    *_table_1(paper[1]),
    *_speeds(paper[2], records, compiled_rows),
    *_alphas(paper[3], records),
    *_costs_and_expected(paper[4], compiled_rows),
    *_lenient(paper[5], records),
    *_lenient_speeds(paper[5]),
    _bigram_speed(),
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
      quantity = f"operations, speed; alpha {alpha:g}, gamma {gamma}"
      yield Claim("1", quantity, printed, status, ours, _TABLE_1)


def _speeds(rows: Sequence[PaperRow], records, compiled_rows) -> Iterable[Claim]:
  for row in rows:
    compiled = compiled_rows.get((row["task"], row["m_q"], row["temperature"]))
    own = _own(records, row, row["gamma"])
    status, ours = WEIGHTS_AND_TPU, MISSING
    command = _WITH_WEIGHTS.format("table2")
    reproduction = f"{_COMPILER}; measured: {command}"
    if own:
      status, ours = MEASURED, f"{own.times.speedup:.1f}"
      reproduction = f"{command}, on {own.device}, over {own.settings.baseline}"
    elif compiled:
      status, ours = COMPILED, f"{compiled['speed']:.1f}"
    quantity = f"speed; {row['task']}, {row['m_q']}"
    yield Claim("2, 4", quantity, f"{row['speed']:.1f}", status, ours, reproduction)


def _alphas(rows: Sequence[PaperRow], records) -> Iterable[Claim]:
  for row in rows:
    file, draft = _STAND_INS.get((row["m_p"], row["m_q"].casefold()), ("", None))
    record = _last_match(records.get(file, ()), draft, row["temperature"], 1.0)
    quantity = f"alpha; {row['m_p']}, {row['m_q']}"
    claim = _alpha_claim("3", quantity, row, records, record, file)
    yield claim._replace(reproduction=_LAMDA) if row["m_p"].startswith("LaMDA") else claim


def _costs_and_expected(rows: Sequence[PaperRow], compiled_rows) -> Iterable[Claim]:
  first = {row["m_q"]: row for row in reversed(rows)}  # c depends on the draft, not on the task
  for m_q in dict.fromkeys(row["m_q"] for row in rows):
    row = first[m_q]
    compiled = compiled_rows.get((row["task"], m_q, row["temperature"]))
    status = COMPILED if compiled else WEIGHTS_AND_TPU
    ours = f"{compiled['c']:.3f}" if compiled else MISSING
    yield Claim("4", f"c; {m_q}", f"{row['c']:g}", status, ours, _COMPILER)
  for row in rows:
    alpha, c, gamma = row["alpha"], row["c"], row["gamma"]
    ours = float(theory.walltime_improvement(alpha, gamma, c))
    # The printed alpha, c and speed are rounded: bounds for all values that round to them.
    lowest = float(theory.walltime_improvement(alpha - 0.005, gamma, c + 0.005))
    highest = float(theory.walltime_improvement(alpha + 0.005, gamma, c - 0.005))
    within = lowest < row["exp"] + 0.05 and row["exp"] - 0.05 < highest
    equal = f"{ours:.1f}" == f"{row['exp']:.1f}"
    status = COMPUTED if equal else ROUNDED if within else DIFFERS
    quantity = f"expected speed; {row['task']}, {row['m_q']}"
    ours_text = f"{ours:.1f}" if equal else f"{ours:.2f}"
    yield Claim("4", quantity, f"{row['exp']:.1f}", status, ours_text, _STATUS)


def _lenient(rows: Sequence[PaperRow], records) -> Iterable[Claim]:
  for row in rows:
    if row["lenience"] < 1:
      model = row["m_q"].partition(" (")[0]
      draft = _ENDE.get(model.casefold())
      record = _last_match(records.get(_LENIENCE, ()), draft, row["temperature"], row["lenience"])
      quantity = f"alpha, lenience 0.5 / 0.3 / 0.1; {model}, temperature {row['temperature']:g}"
      yield _alpha_claim("5", quantity, row, records, record, _LENIENCE)


def _lenient_speeds(rows: Sequence[PaperRow]) -> Iterable[Claim]:
  """Yield claims about speedups of Appendix A.5, which prints a gamma for temperature 0 only."""
  for row in rows:
    if row["speed"] is None:
      continue
    alpha, gamma, c = row["alpha"], row["gamma"], row["c"]
    gamma = gamma or theory.best_gamma(alpha, c, most=50)
    ours = float(theory.walltime_improvement(alpha, gamma, c))
    printed = f"{row['speed']:g}"  # as printed: 5X has no decimal
    rounded = f"{ours:.{len(printed.partition('.')[2])}f}"
    yield Claim(
      "5",
      f"speed, lenience 1 / 0.5 / 0.3 / 0.1; T5-small, temperature {row['temperature']:g}",
      printed,
      COMPUTED if rounded == printed else NO_GAMMA if row["gamma"] is None else DIFFERS,
      rounded if rounded == printed else f"{ours:.2f}",
      _STATUS,
    )


def _bigram_speed() -> Claim:
  """Return the claim of Section 3.6 about the bigram draft's speedup: alpha 0.2, gamma 3, c = 0."""
  ours = f"{float(theory.walltime_improvement(0.2, 3, 0)):.2f}"
  status = COMPUTED if ours == "1.25" else DIFFERS
  return Claim("3.6", "speed; EnDe, bigram, gamma 3", "1.25", status, ours, _STATUS)


def _alpha_claim(
  table: str, quantity: str, row: PaperRow, records, stand_in: Record | None, file: str
) -> Claim:
  """Return the claim of an alpha; `stand_in` is a record of `file`, or None."""
  status, ours, reproduction = WEIGHTS, MISSING, _WITH_WEIGHTS.format(f"table{table}")
  if own := _own(records, row):
    status, ours = MEASURED, f"{own.outputs.alpha:.2f}"
  elif stand_in:
    status, ours, reproduction = STAND_IN, f"{stand_in.outputs.alpha:.2f}", _REPRODUCTION[file]
  return Claim(table, quantity, f"{row['alpha']:.2f}", status, ours, reproduction)


def _own(records, row: PaperRow, gamma: float | None = None) -> Record | None:
  """Return the last record of the paper's own models for a row, with a given gamma or with any."""
  matches = [r for r in records.get(OWN_RECORDS, ()) if reproduces(r, row)]
  return next((r for r in reversed(matches) if gamma in (None, r.settings.gamma)), None)


def _last_match(records: Iterable[Record], draft: str | None, temperature: float, lenience: float):
  wanted = dict(temperature=temperature, lenience=lenience, top_k=0).items()
  matches = [r for r in records if r.models.draft == draft and wanted <= vars(r.settings).items()]
  return matches[-1] if matches else None


def recorded_claims() -> list[Claim]:
  """Return the claims with the records in `experiments`."""
  paper = {number: load_table(number) for number in range(1, 6)}
  records = {file: read(EXPERIMENTS / file) for file in RECORDS if (EXPERIMENTS / file).exists()}
  compiled = predicted(paper[2], lines(EXPERIMENTS / COMPILED_TABLE), "accessed")
  return claims(paper, records, compiled)


def status_table(all_claims: Sequence[Claim] | None = None) -> Table:
  """Return a table with one row per quantity, such as alpha at both temperatures."""
  all_claims = all_claims or recorded_claims()
  groups: dict[tuple[str, str], list[Claim]] = {}
  for claim in all_claims:
    groups.setdefault((claim.table, claim.quantity), []).append(claim)
  rows = tuple(
    (
      table,
      quantity,
      f"{len(group)}",
      " / ".join(claim.printed for claim in group),
      _joined([claim.status for claim in group]),
      *(_column(group, statuses) for statuses in _COLUMNS.values()),
      _joined([claim.reproduction for claim in group]),
    )
    for (table, quantity), group in groups.items()
  )
  counts = ", ".join(f"{count} {status}" for status, count in status_counts_table(all_claims).rows)
  return Table(
    "Reproduction status of the paper's printed numbers",
    ("table", "quantity", "numbers", "printed", "status", *_COLUMNS, "reproduction"),
    rows,
    (
      f"{len(all_claims)} numbers: {counts}.",
      "The two numbers in a row of Tables 2 to 4 are at temperature 0 and 1. A stand-in is another "
      "model or another text: its number is shown next to the paper's, but is not a reproduction "
      "of it.",
      "Appendix A.5 prints improvement factors with lenience at temperature 1 without a gamma. Our "
      "value is Theorem 8 with the best gamma for the printed alpha and c.",
    ),
  )


def _column(claims: Sequence[Claim], statuses: Sequence[str]) -> str:
  """Return our numbers of claims that have one of the given statuses; MISSING for others."""
  cells = [claim.ours if claim.status in statuses else MISSING for claim in claims]
  return " / ".join(cells) if {*cells} != {MISSING} else MISSING


def _joined(values: Sequence[str]) -> str:
  """Join values if they differ; return a single value if all are equal."""
  return " / ".join(values if len({*values}) > 1 else values[:1])


def status_counts_table(all_claims: Sequence[Claim] | None = None) -> Table:
  """Return a table of the number of claims of each status; MEASURED is always the first row."""
  all_claims = all_claims or recorded_claims()
  counts = collections.Counter({MEASURED: 0})
  counts.update(claim.status for claim in all_claims)
  rows = tuple((status, f"{count}") for status, count in counts.items())
  return Table("Reproduction status", ("status", "printed numbers"), rows, ())
