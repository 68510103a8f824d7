"""Our records land in the right cells beside the paper's, and every format says the same."""

import csv
import dataclasses
import io
import json
import pathlib
import subprocess
import sys

import pytest

from specdec_jax.errors import InputError
from specdec_jax.records import Record, append
from specdec_jax.reporting.formats import render
from specdec_jax.reporting.paper import load_table
from specdec_jax.reporting.tables import Table, paper_table

ROOT = pathlib.Path(__file__).resolve().parents[1]

RECORD = Record(
  task="captions",
  target="big",
  draft="small",
  temperature=0.0,
  gamma=5,
  batch_size=1,
  platform="cpu",
  device_kind="x86",
  dtype="float32",
  seed=0,
  num_examples=24,
  alpha=0.8149,
  alpha_low=0.7851,
  alpha_high=0.8402,
  c=0.0614,
  predicted_theorem8=2.9871,
  predicted_measured_cost=2.1549,
  predicted_text=1.9512,
  speedup=2.0634,
  total_variation=0.0,
)
SAMPLED = dataclasses.replace(RECORD, temperature=1.0, alpha=0.6651, speedup=1.6849)
BARE = dataclasses.replace(
  RECORD,
  gamma=9,
  **dict.fromkeys(
    ["alpha", "alpha_low", "alpha_high", "c", "speedup", "total_variation"]
    + ["predicted_theorem8", "predicted_measured_cost", "predicted_text", "num_examples"]
  ),
)


def made(number, *records, **choice):
  return paper_table(number, records, load_table(number, ROOT / "configs"), **choice)


def cells(table):
  """Each row by column."""
  return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_table_1_has_all_printed_digits():
  with (ROOT / "configs" / "table1.csv").open(newline="") as file:
    printed = list(csv.DictReader(file))
  for ours, theirs in zip(cells(made(1)), printed, strict=True):
    for name in ("operations", "speed"):
      assert ours[name] == ours[f"paper {name}"] == theirs[name]
      assert ours[f"difference in {name}"] == "+0.00"


def test_table_2():
  argmax, sampled = cells(made(2, RECORD, SAMPLED))
  assert argmax == {
    "task": "captions",
    "target": "big",
    "draft": "small",
    "temp": "0",
    "gamma": "5",
    "alpha": "0.81",
    "speed": "2.06",
    "paper m_q": "T5-small",
    "paper gamma": "7",
    "paper alpha": "0.75",
    "paper speed": "3.4",
    "difference in speed": "-1.34",
    "measured on": "x86 float32, 24 texts",
  }
  assert sampled["temp"] == "1" and sampled["paper alpha"] == "0.62"
  assert sampled["difference in speed"] == "-0.92"  # 1.6849 - 2.6


def test_the_papers_own_names_win_over_the_stand_ins():
  record = dataclasses.replace(RECORD, task="CNNDM", draft="t5-base")
  (row,) = cells(made(2, record))
  assert (row["paper m_q"], row["paper speed"]) == ("T5-base", "3.0")


def test_stand_ins_are_chosen():
  (row,) = cells(made(2, SAMPLED, paper_task="CNNDM", paper_draft="T5-large"))
  assert (row["paper m_q"], row["paper gamma"], row["paper speed"]) == ("T5-large", "3", "1.7")


def test_table_3():
  bigram = dataclasses.replace(RECORD, draft="bigram", alpha=0.2551)
  model, ngram = cells(made(3, RECORD, bigram))
  assert (model["alpha"], model["95% interval"]) == ("0.81", "0.79-0.84")
  assert (model["paper m_p"], model["paper m_q"]) == ("T5-XXL (EnDe)", "T5-small")
  assert (model["paper alpha"], model["difference in alpha"]) == ("0.75", "+0.06")
  assert (ngram["paper m_q"], ngram["paper alpha"]) == ("Bigram", "0.20")
  assert ngram["difference in alpha"] == "+0.06"  # 0.2551 - 0.20
  (row,) = cells(made(3, bigram, paper_task="CNNDM"))
  assert (row["paper m_p"], row["paper alpha"]) == ("T5-XXL (CNNDM)", "0.23")


def test_filters_stand_beside_the_same_filters():
  """LaMDA's samples passed a top-40 filter, T5's none; argmax does not care."""
  lamda = {"paper_target": "LaMDA (137B)", "paper_draft": "LaMDA (2B)"}
  filtered = dataclasses.replace(SAMPLED, top_k=40)
  for choice, values in (({}, ["0.62", "-"]), (lamda, ["-", "0.71"])):
    rows = cells(made(3, SAMPLED, filtered, **choice))
    assert [row["paper alpha"] for row in rows] == values
  assert [row["temp"] for row in rows] == ["1", "1 top-40"]
  (row,) = cells(made(3, dataclasses.replace(RECORD, top_k=40)))
  assert row["paper alpha"] == "0.75"


@pytest.mark.parametrize(
  "target, draft, top_k, beside",
  [
    ("gpt_like_4m", "gpt_like_600k", 0, ("GPT-like (97M)", "GPT-like (6M)", "0.89")),
    ("gpt_like_4m", "bigram", 0, ("GPT-like (97M)", "Bigram", "0.05")),
    ("lamda_137b", "lamda_8b", 40, ("LaMDA (137B)", "LaMDA (8B)", "0.74")),
    ("lamda_2b", "lamda_tiny", 40, ("LaMDA (137B)", "LaMDA (100M)", "0.57")),
    ("lamda_137b", "lamda_8b", 0, ("-", "-", "-")),
  ],
)
def test_decoder_only_models_stand_beside_their_own_kind(target, draft, top_k, beside):
  ours = dataclasses.replace(SAMPLED, task="lm1b", target=target, draft=draft, top_k=top_k)
  (row,) = cells(made(3, ours))
  assert (row["paper m_p"], row["paper m_q"], row["paper alpha"]) == beside
  both = cells(made(3, ours, dataclasses.replace(SAMPLED, top_k=top_k)))
  assert "97M" not in str(both)  # among others T5-XXL stands in


def test_gammas_share_a_row_of_table_3():
  more = dataclasses.replace(RECORD, gamma=7)
  assert len(made(3, RECORD, more).rows) == 1 and len(made(2, RECORD, more).rows) == 2


def test_table_4():
  (row,) = cells(made(4, SAMPLED))
  ours = ("c", "exp", "exp, costs measured", "emp")
  assert [row[name] for name in ours] == ["0.061", "2.99", "1.95", "1.68"]
  theirs = ("paper m_q", "paper c", "paper exp", "paper emp", "difference in emp")
  assert [row[name] for name in theirs] == ["T5-small", "0.02", "2.3", "2.6", "-0.92"]
  (row,) = cells(made(4, dataclasses.replace(SAMPLED, predicted_text=None)))
  assert row["exp, costs measured"] == "2.15"


def test_table_5():
  lenient = dataclasses.replace(SAMPLED, lenience=0.3, alpha=0.8, total_variation=0.0512)
  base = dataclasses.replace(lenient, draft="T5-base")
  argmax = dataclasses.replace(RECORD, lenience=0.1)
  strict, small, base, argmax = cells(made(5, SAMPLED, lenient, base, argmax))
  assert (strict["lenience"], strict["paper alpha"]) == ("1", "0.62")
  assert (small["paper m_q"], small["paper alpha"]) == ("T5-SMALL (77M)", "0.76")
  assert (small["total variation"], small["difference in alpha"]) == ("0.051", "+0.04")
  assert (small["speed"], small["paper speed"]) == ("1.68", "3.6")
  assert small["speed by Thm 8"] == "3.9"  # Appendix A.5, footnote: alpha 0.8, c 0.015, gamma 8
  assert (base["paper alpha"], base["paper speed"]) == ("0.83", "-")
  assert (argmax["paper m_q"], argmax["paper alpha"]) == ("T5-small", "0.87")


@pytest.mark.parametrize(
  "change", [{"temperature": 0.7}, {"draft": "Unigram"}, {"top_k": 3, "temperature": 1.0}]
)
def test_what_the_paper_has_no_row_for_is_missing(change):
  (row,) = cells(made(2, dataclasses.replace(RECORD, **change)))
  assert row["speed"] == "2.06"
  assert {row[name] for name in row if "paper" in name or "difference" in name} == {"-"}


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_what_was_not_measured_is_missing(number):
  (row,) = cells(made(number, BARE))
  given = {"captions", "big", "small", "0", "9", "1", "x86 float32, - texts"}
  ours = {v for name, v in row.items() if "paper" not in name and "difference" not in name}
  assert ours - given == {"-"}
  assert {v for name, v in row.items() if "difference" in name} == {"-"}


def test_the_last_of_a_setting_counts():
  again = dataclasses.replace(RECORD, speedup=1.5)
  table = made(2, RECORD, SAMPLED, again)
  assert [row["speed"] for row in cells(table)] == ["1.50", "1.68"]
  assert any("the last counts" in note for note in table.notes)


def test_batches_and_lenience_are_left_out_where_the_paper_has_none():
  others = dataclasses.replace(RECORD, batch_size=8), dataclasses.replace(RECORD, lenience=0.5)
  for number, kept in ((2, 1), (3, 2), (4, 1), (5, 3)):
    table = made(number, RECORD, *others)
    assert len(table.rows) == kept
    left_out = f"{3 - kept} of our records are left out"
    assert any(left_out in note for note in table.notes) == (kept < 3)


def test_the_papers_rows_without_ours_are_counted():
  for number, count in ((2, "6 rows of EnDe, 4"), (3, "10 rows of T5-XXL (EnDe), 8")):
    table = made(number, RECORD, SAMPLED)
    assert any(f"Of the paper's {count} have no record" in note for note in table.notes)


def test_simulated_acceptance_is_marked():
  table = made(2, dataclasses.replace(RECORD, acceptance="simulated"), RECORD)
  assert [row["draft"] for row in cells(table)] == ["small (simulated)", "small"]
  assert any("alpha was chosen" in note for note in table.notes)


@pytest.mark.parametrize(
  "number, choice, words",
  [
    (2, {"paper_task": "EnFr"}, "has no 'EnFr'; it has EnDe, CNNDM"),
    (3, {"paper_target": "GPT-like (97M)"}, "no draft 'T5-small' for GPT-like"),
    (5, {"paper_draft": "T5-tiny"}, "no draft 'T5-tiny'; it has UNIGRAM"),
  ],
)
def test_what_the_paper_lacks_is_said(number, choice, words):
  with pytest.raises(InputError) as error:
    made(number, RECORD, **choice)
  assert words in str(error.value)


# Formats.

TABLE = Table(
  "A title",
  ("who", "per cent", "c"),
  (("a_b & 100% {x}", "+1.5", "0.1"), ("pipe | back\\slash", "-", "-"), ('"q", r', "2", "3")),
  ("A note.",),
)


def test_csv_reads_back():
  assert list(csv.reader(io.StringIO(render(TABLE, "csv")))) == [
    list(row) for row in (TABLE.columns, *TABLE.rows)
  ]


def test_markdown_has_as_many_columns_in_every_line():
  text = render(TABLE, "markdown")
  lines = [line for line in text.splitlines() if line.startswith("|")]
  assert len(lines) == 2 + len(TABLE.rows)
  assert {line.replace(r"\|", "").count("|") for line in lines} == {len(TABLE.columns) + 1}
  assert "A title" in text and "- A note." in text


def test_latex_has_a_line_a_row_and_escapes():
  text = render(TABLE, "latex")
  lines = [line for line in text.splitlines() if line.endswith(r"\\")]
  assert len(lines) == 1 + len(TABLE.rows)
  assert {line.replace(r"\&", "").count("&") for line in lines} == {len(TABLE.columns) - 1}
  assert r"a\_b \& 100\% \{x\}" in text and r"back\textbackslash{}slash" in text
  assert r"\begin{tabular}{lrr}" in text


def test_terminal_shows_every_cell_whole():
  text = render(TABLE, "terminal")
  for cell in ("A title", "A note.", *(cell for row in TABLE.rows for cell in row)):
    assert cell in text
  assert "…" not in render(made(4, RECORD, SAMPLED), "terminal")


def test_a_table_without_rows():
  for fmt in ("markdown", "csv", "latex"):
    assert "paper speed" in render(made(2), fmt)
  assert "Of the paper's 6 rows of EnDe, 6 have no record" in render(made(2), "terminal")


def test_unknown_format():
  with pytest.raises(InputError, match="'html'; choose one of terminal, markdown, csv, latex"):
    render(TABLE, "html")


# The script.


def tabulate(*args, cwd):
  script = ROOT / "scripts" / "tabulate.py"
  return subprocess.run(
    [sys.executable, script, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=120
  )


def test_script_from_any_folder(tmp_path):
  append(tmp_path / "one.jsonl", RECORD)
  append(tmp_path / "two.jsonl", SAMPLED)
  args = ("--table", 2, "--format", "csv", "--paper_draft", "T5-base", "--output", "out.csv")
  done = tabulate(*args, "one.jsonl", "two.jsonl", cwd=tmp_path)
  assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
  with (tmp_path / "out.csv").open(newline="") as file:
    assert [row["paper speed"] for row in csv.DictReader(file)] == ["2.8", "2.4"]


@pytest.mark.parametrize(
  "args, words",
  [
    (["--table", 2, "absent.jsonl"], "cannot use 'absent.jsonl'"),
    (["--table", 2, "other.jsonl"], "a record of schema 99"),
    (["--table", 6], "Table 6 is not in the paper"),
    (["--table", "two"], "invalid int value: 'two'"),
    (["--table", 2], "name a results.jsonl"),
    (["--table", 1, "--format", "html"], "no format 'html'"),
  ],
)
def test_script_says_what_is_wrong_in_a_sentence(tmp_path, args, words):
  (tmp_path / "other.jsonl").write_text(json.dumps({"schema": 99}) + "\n")
  done = tabulate(*args, cwd=tmp_path)
  assert done.returncode == 2 and done.stdout == ""
  assert words in done.stderr and len(done.stderr.splitlines()) == 1
