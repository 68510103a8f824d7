"""The paper's Tables 1 to 5 together with our records.

In Tables 2 to 5, each row names its source. A record with the models, task, sampling and lenience
of a row of the paper follows that row. A stand-in is a record that matches no row of the paper,
such as one of different models or of a different task. Stand-ins follow all rows of the paper. No
differences are computed, because a stand-in is not comparable with the paper's models.
"""

from collections.abc import Callable, Iterable, Sequence

from experiments.lib.records import measured_with, sampling_text
from experiments.paper.paper import PAPERS_OWN, PaperRow, target_and_task
from specdec_jax import theory
from specdec_jax.measure.records import Record
from specdec_jax.measure.tables import MISSING, Column, Table, number_text

_LAMDA_TOP_K = 40  # Table 3 samples from LaMDA with top-k 40

# Task in the paper -> names of the same task here.
_TASKS = {"EnDe": ("wmt14_ende", "wmt_ende", "ende"), "CNNDM": ("cnn_dm", "cnndm")}


def paper_table(number: int, records: Iterable[Record], paper_rows: Sequence[PaperRow]) -> Table:
  """Return the paper's Table `number`, 1 to 5, together with our records.

  Args:
    number: number of the table.
    records: our records; Table 1 is computed and needs none. If several records have the same
      setting, the last one is used.
    paper_rows: rows of the paper's table (`paper.load_table`).
  """
  if number == 1:
    return _table_1(paper_rows)
  title, columns = _LAYOUTS[number]
  shown, num_omitted = _select(number, records)
  matching = [[r for r in shown if reproduces(r, row)] for row in paper_rows]
  reproductions = [r for matches in matching for r in matches]
  rows = []
  for row, matches in zip(paper_rows, matching):
    rows.append(("paper", *(paper_cell(row) for _, paper_cell in columns.values())))
    rows += [_our_row("ours", columns, r) for r in matches]
  rows += [_our_row("stand-in", columns, r) for r in shown if r not in reproductions]
  notes = [
    f"A '{MISSING}' is a value that was not measured, or that the paper does not print.",
    f"Of the paper's {len(paper_rows)} rows, {sum(map(bool, matching))} have records below them "
    "with the paper's own models, task and sampling. A stand-in is another model or another text, "
    "and not a reproduction.",
  ]
  if num_omitted:
    scope = "Algorithm 1" + " at batch 1" * (number in (2, 4)) + " without lenience" * (number != 5)
    notes.append(f"{num_omitted} of our records are omitted: the paper's table is about {scope}.")
  if shown:
    notes.append(measured_with(shown))
  if processors := dict.fromkeys(r.device for r in shown if _is_cpu(r)):
    notes.append(f"CPU: {'; '.join(processors)}.")
  if any(r.models.simulated for r in shown):
    notes.append("For a simulated draft, alpha is a setting and the times are measured.")
  return Table(title, ("source", *columns), tuple(rows), tuple(notes))


def _our_row(source: str, columns, r: Record) -> tuple[str, ...]:
  return (source, *(record_cell(r) for record_cell, _ in columns.values()))


def _table_1(paper_rows: Sequence[PaperRow]) -> Table:
  columns = "operations (Theorem 10)", "paper operations", "speed (Theorem 8)", "paper speed"
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
    "Table 1: arithmetic operations and speed relative to autoregressive decoding, for c = 0",
    ("alpha", "gamma", *columns),
    tuple(rows),
    ("Our values are Theorems 10 and 8, rounded to the digits that the paper prints.",),
  )


# Selection of records, and their assignment to the paper's rows.


def _select(number: int, records: Iterable[Record]) -> tuple[list[Record], int]:
  """Return the last record per setting in a table's scope, and the number of records outside it."""
  latest, num_omitted = {}, 0
  for r in records:
    is_algorithm_1 = r.settings.verifier == "TokenVerifier" and r.kind == "chain"
    if number != 5 and r.settings.lenience != 1 or not is_algorithm_1:
      num_omitted += 1
    elif number in (2, 4) and r.settings.batch_size != 1:
      num_omitted += 1
    else:
      # Table 3 prints alpha, which does not depend on gamma.
      latest[(r.replace(gamma=0) if number == 3 else r).key] = r
  return list(latest.values()), num_omitted


def reproduces(r: Record, row: PaperRow) -> bool:
  """Return whether a record has the models, task, sampling and lenience of the paper's row."""
  if r.models.simulated or row.get("lenience", 1) != r.settings.lenience:
    return False
  top_k = _LAMDA_TOP_K if str(row.get("m_p")).startswith("LaMDA") else 0
  # Top-k and top-p keep the most probable token and therefore do not change argmax.
  same_filter = r.settings.temperature == 0 or (r.settings.top_k, r.settings.top_p) == (top_k, 1)
  if r.settings.temperature != row["temperature"] or not same_filter:
    return False
  target, task = target_and_task(row)
  same_models = _same_model(target, r.models.target) and _same_model(row["m_q"], r.models.draft)
  our_task = (r.settings.task or "").casefold()
  return same_models and our_task in _TASKS.get(task, (our_task,))


def _same_model(printed: str, ours: str) -> bool:
  """Return whether `printed`, a name in the paper, and our name `ours` mean the same model.

  A model is the paper's only if it is declared to be (PAPERS_OWN), whatever its size. N-grams have
  no weights and need no declaration.
  """
  printed = printed.casefold()
  if printed.startswith("t5-"):
    printed = printed.partition(" (")[0]  # Table 5 prints the size, the others do not
  declared = "" if printed in ("unigram", "bigram") else PAPERS_OWN
  return ours.casefold() == declared + printed


# Cells of a record and of the paper's row.


_Column = tuple[Callable[[Record], str], Callable[[PaperRow], str]]


def _column(path: str, spec: str, printed: str, printed_spec: str | None = None) -> _Column:
  """Return a column: the field `path` of our records, and the column `printed` of the paper.

  The format is `spec`; `printed_spec` overrides it for the paper.
  """
  return (
    Column("", path, spec).cell,
    lambda row: number_text(row[printed], printed_spec or spec),
  )


def _ours_only(cell: Callable[[Record], str]) -> _Column:
  return cell, lambda row: MISSING


def _draft(r: Record) -> str:
  return f"{r.models.draft} (simulated)" if r.models.simulated else r.models.draft


def _interval(r: Record) -> str:
  has_interval = r.outputs.alpha_low is not None and r.outputs.alpha_high is not None
  return f"{r.outputs.alpha_low:.2f}-{r.outputs.alpha_high:.2f}" if has_interval else MISSING


def _speed_at_the_papers_cost(r: Record) -> str:
  """Return the speedup of Theorem 8 as in Appendix A.5, with gamma 8 and c = 0.015 (T5-small)."""
  if r.outputs.alpha is None:
    return MISSING
  return f"{float(theory.walltime_improvement(r.outputs.alpha, 8, 0.015)):.1f}"


def _measured_on(r: Record) -> str:
  settings = r.settings
  texts = f"{number_text(settings.num_examples, '')} texts"
  batch = "" if settings.batch_size == 1 else f", batch {settings.batch_size}"
  baseline = "" if settings.baseline == "own" else f", over {settings.baseline}"
  return f"{'CPU' if _is_cpu(r) else r.device}, {r.models.dtype}, {texts}{batch}{baseline}"


def _is_cpu(r: Record) -> bool:
  return r.machine.platform == "cpu" and r.machine.processor is not None


_SETTING: dict[str, _Column] = {
  "task": (lambda r: r.settings.task or MISSING, lambda row: target_and_task(row)[1]),
  "target": (lambda r: r.models.target, lambda row: target_and_task(row)[0]),
  "draft": (_draft, lambda row: row["m_q"]),
  "temperature": (sampling_text, lambda row: f"{row['temperature']:g}"),
}
_ON_A_TPU = {"measured on": (_measured_on, lambda row: "TPU v4, over T5X")}

_LAYOUTS: dict[int, tuple[str, dict[str, _Column]]] = {
  2: (
    "Table 2: measured speed relative to autoregressive decoding, batch 1",
    {
      **_SETTING,
      "gamma": _column("settings.gamma", ".0f", "gamma"),
      "measured alpha": _column("outputs.alpha", ".2f", "alpha"),
      "measured speed": _column("times.speedup", ".2f", "speed", ".1f"),
      **_ON_A_TPU,
    },
  ),
  3: (
    "Table 3: alpha over text that the target generated",
    {
      **_SETTING,
      "measured alpha": _column("outputs.alpha", ".2f", "alpha"),
      "95% interval": _ours_only(_interval),
      "measured on": _ours_only(_measured_on),
    },
  ),
  4: (
    "Table 4: expected (Theorem 8) and measured speed, batch 1",
    {
      **_SETTING,
      "gamma": _column("settings.gamma", ".0f", "gamma"),
      "measured alpha": _column("outputs.alpha", ".2f", "alpha"),
      "c": _column("times.c", ".3f", "c", "g"),
      "expected (Theorem 8)": _column("times.predicted_theorem8", ".2f", "exp", ".1f"),
      "expected with measured costs": _ours_only(lambda r: number_text(r.predicted, ".2f")),
      "measured speed": _column("times.speedup", ".2f", "emp", ".1f"),
      **_ON_A_TPU,
    },
  ),
  5: (
    "Table 5: alpha with lenience",
    {
      **_SETTING,
      "lenience": _column("settings.lenience", "g", "lenience"),
      "measured alpha": _column("outputs.alpha", ".2f", "alpha"),
      "total variation": _ours_only(lambda r: number_text(r.outputs.total_variation, ".3f")),
      "speed by Theorem 8": (
        _speed_at_the_papers_cost,
        lambda row: number_text(row["speed"], "g"),
      ),
      "measured on": _ours_only(_measured_on),
    },
  ),
}
