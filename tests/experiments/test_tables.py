"""Test that tables have our records next to the paper's rows, and that pages quote the records."""

import csv
import importlib
import pathlib
import re
import subprocess
import sys

import pytest
from test_records import RECORD as SETTING

from experiments.lib import pages
from experiments.lib.tables import LINES, PATHS, RECORDS, measured_table
from experiments.model_free_drafts.given_outputs import GIVEN_OUTPUTS_LEGEND
from experiments.paper.paper import load_table
from experiments.paper.paper_tables import paper_table
from experiments.peers.compare import PEERS_LEGEND
from experiments.throughput.throughput import gammas_table
from specdec_jax.measure.records import append
from specdec_jax.measure.tables import BUDGET, ROOFLINE, SPEED, Column
from specdec_jax.measure.tables import legend as legend_of

ROOT = pathlib.Path(__file__).resolve().parents[2]

RECORD = SETTING.replace(
  task="captions",
  target="big",
  draft="small",
  device_kind="x86",
  num_examples=24,
  alpha=0.8149,
  alpha_low=0.7851,
  alpha_high=0.8402,
  c=0.0614,
  predicted_theorem8=2.9871,
  predicted_measured_cost=2.1549,
  predicted_finite_length=1.9512,
  speedup=2.0634,
  total_variation=0.0,
)
SAMPLED = RECORD.replace(temperature=1.0, alpha=0.6651, speedup=1.6849)


def table_of(number, *records):
  return paper_table(number, records, load_table(number))


def cells(table):
  """Return each row as a dict by column."""
  return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def ours(table):
  return [row for row in cells(table) if row["source"] != "paper"]


def above(table):
  """Return the paper's row above each of our rows, or None for a stand-in."""
  rows, papers = cells(table), []
  for i, row in enumerate(rows):
    if row["source"] == "ours":
      papers.append([r for r in rows[:i] if r["source"] == "paper"][-1])
    elif row["source"] == "stand-in":
      papers.append(None)
  return papers


OWN = dict(target="the paper's T5-XXL", draft="the paper's T5-small")
XXL = RECORD.replace(task="wmt14_ende", **OWN)
XXL_SAMPLED = XXL.replace(temperature=1.0, alpha=0.6651, speedup=1.6849)


def test_table_1_has_all_printed_digits():
  with (ROOT / "configs" / "table1.csv").open(newline="") as file:
    printed = list(csv.DictReader(file))
  for row, printed_row in zip(cells(table_of(1)), printed, strict=True):
    for name, theorem in (("operations", 10), ("speed", 8)):
      ours_and_papers = row[f"{name} (Theorem {theorem})"], row[f"paper {name}"]
      assert ours_and_papers == (printed_row[name], printed_row[name])


def test_record_of_the_papers_models_follows_its_row():
  first, second, *others = cells(table_of(2, XXL))
  assert first == {
    "source": "paper",
    "task": "EnDe",
    "target": "T5-XXL",
    "draft": "T5-small",
    "temperature": "0",
    "gamma": "7",
    "measured alpha": "0.75",
    "measured speed": "3.4",
    "measured on": "TPU v4, over T5X",
  }
  assert second == {
    "source": "ours",
    "task": "wmt14_ende",
    "target": "the paper's T5-XXL",
    "draft": "the paper's T5-small",
    "temperature": "0",
    "gamma": "5",
    "measured alpha": "0.81",
    "measured speed": "2.06",
    "measured on": "x86, float32, 24 texts",
  }
  assert {row["source"] for row in others} == {"paper"} and len(others) == 11


def test_stand_ins_follow_all_of_the_papers_rows():
  """A measurement of another pair is not a reproduction, even if its values are close."""
  for change in (
    {"task": "multi30k_ende"},
    {"task": None},
    {"target": "t5_11B"},  # T5 1.0
    {"target": "flan-t5-xxl"},
    {"target": "T5-XXL", "draft": "T5-small"},
    {"target": "t5_1.1_xxl"},
    {"draft": "the paper's T5-small, int8"},
    {"target": "target"},
    {"draft": "bigram"},
    {"temperature": 0.7},
    {"top_k": 3, "temperature": 1.0},
    {"simulated": True},
  ):
    table = table_of(2, XXL.replace(**change))
    assert [row["source"] for row in cells(table)] == ["paper"] * 12 + ["stand-in"]
    assert any("Of the paper's 12 rows, 0 have records" in note for note in table.notes)


@pytest.mark.parametrize(
  "number, change, paper_row",
  [
    (2, {"task": "CNN_DM", "draft": "the paper's T5-base"}, ("CNNDM", "T5-base", "3.0")),
    (2, {"draft": "the paper's T5-large"}, ("EnDe", "T5-large", "1.7")),
    (4, {}, ("EnDe", "T5-small", "3.4")),
  ],
)
def test_records_of_the_papers_own_models_match_its_rows(number, change, paper_row):
  table = table_of(number, XXL.replace(**change))
  (row,) = above(table)
  assert (row["task"], row["draft"], row["measured speed"]) == paper_row


def test_table_3_has_alpha_and_its_interval():
  bigram = XXL_SAMPLED.replace(draft="bigram", alpha=0.2551)
  table = table_of(3, XXL, bigram)
  model, ngram = ours(table)
  assert (model["measured alpha"], model["95% interval"]) == ("0.81", "0.79-0.84")
  assert [(row["draft"], row["temperature"], row["measured alpha"]) for row in above(table)] == [
    ("T5-small", "0", "0.75"),
    ("Bigram", "1", "0.19"),
  ]
  assert ngram["measured alpha"] == "0.26"


@pytest.mark.parametrize(
  "target, draft, top_k, paper_row",
  [
    ("GPT-like (97M)", "GPT-like (6M)", 0, ("GPT-like (97M)", "GPT-like (6M)", "0.89")),
    ("GPT-like (97M)", "bigram", 0, ("GPT-like (97M)", "Bigram", "0.05")),
    ("LaMDA (137B)", "LaMDA (8B)", 40, ("LaMDA (137B)", "LaMDA (8B)", "0.74")),
    ("LaMDA (137B)", "LaMDA (8B)", 0, None),  # the paper samples from LaMDA with top-k 40
    ("LaMDA (2B)", "LaMDA (8B)", 40, None),
  ],
)
def test_decoder_only_models_follow_the_row_of_their_size(target, draft, top_k, paper_row):
  draft = draft if draft == "bigram" else f"the paper's {draft}"
  record = XXL_SAMPLED.replace(
    task="lm1b", target=f"the paper's {target}", draft=draft, top_k=top_k
  )
  (row,) = above(table_of(3, record))
  assert paper_row == (row and (row["target"], row["draft"], row["measured alpha"]))


@pytest.mark.parametrize(
  "target, draft, top_k",
  [
    ("gpt_like_97m", "gpt_like_6m", 0),
    ("gpt_like_97m", "bigram", 0),
    ("lamda_137b", "lamda_8b", 40),
  ],
)
def test_models_named_like_the_papers_are_stand_ins(target, draft, top_k):
  record = XXL_SAMPLED.replace(task="lm1b", target=target, draft=draft, top_k=top_k)
  assert [row["source"] for row in ours(table_of(3, record))] == ["stand-in"]


def test_table_4_has_expected_and_measured_speed():
  (row,) = ours(table_of(4, SAMPLED))
  names = "c", "expected (Theorem 8)", "expected with measured costs", "measured speed"
  assert [row[name] for name in names] == ["0.061", "2.99", "1.95", "1.68"]
  printed = next(row for row in cells(table_of(4)) if row["temperature"] == "1")
  assert [printed[name] for name in names] == ["0.02", "2.3", "-", "2.6"]
  (row,) = ours(table_of(4, SAMPLED.replace(predicted_finite_length=None)))
  assert row["expected with measured costs"] == "2.15"


def test_table_5_has_alpha_by_lenience():
  lenient = XXL_SAMPLED.replace(lenience=0.3, alpha=0.8, total_variation=0.0512)
  base = lenient.replace(draft="the paper's T5-base")
  argmax = XXL.replace(lenience=0.1)
  table = table_of(5, XXL_SAMPLED, lenient, base, argmax)
  assert [(row["draft"], row["lenience"], row["measured alpha"]) for row in above(table)] == [
    ("T5-SMALL (77M)", "1", "0.62"),
    ("T5-SMALL (77M)", "0.3", "0.76"),
    ("T5-BASE (250M)", "0.3", "0.83"),
    ("T5-small", "0.1", "0.87"),
  ]
  small = ours(table)[1]
  assert small["total variation"] == "0.051"
  assert small["speed by Theorem 8"] == "3.9"  # Appendix A.5, footnote: alpha 0.8, c 0.015, gamma 8
  assert [row["speed by Theorem 8"] for row in above(table)] == ["2.5", "3.6", "-", "4.9"]


def test_last_record_of_a_setting_is_shown():
  again = RECORD.replace(speedup=1.5)
  assert [row["measured speed"] for row in ours(table_of(2, RECORD, SAMPLED, again))] == [
    "1.50",
    "1.68",
  ]


def test_batches_and_lenience_are_omitted_from_tables_without_them():
  others = RECORD.replace(batch_size=8), RECORD.replace(lenience=0.5)
  for number, num_shown in ((2, 1), (3, 2), (4, 1), (5, 3)):
    table = table_of(number, RECORD, *others)
    assert len(ours(table)) == num_shown
    omitted = f"{3 - num_shown} of our records are omitted"
    assert any(omitted in note for note in table.notes) == (num_shown < 3)


@pytest.mark.parametrize("number", [2, 3, 4, 5])
@pytest.mark.parametrize("other", [dict(verifier="BlockVerifier"), dict(tree=(0, 0, 1))], ids=str)
def test_other_verifiers_and_trees_are_omitted_from_the_papers_tables(number, other):
  table = table_of(number, RECORD, RECORD.replace(**other))
  assert len(ours(table)) == 1
  assert any(
    "1 of our records are omitted: the paper's table is about Algorithm 1" in note
    for note in table.notes
  )


def test_simulated_acceptance_is_marked():
  table = table_of(2, RECORD.replace(simulated=True), RECORD)
  assert [row["draft"] for row in ours(table)] == ["small (simulated)", "small"]
  assert any("alpha is a setting" in note for note in table.notes)


# The script.


def tabulate(*args, cwd):
  script = ROOT / "scripts" / "tabulate.py"
  return subprocess.run(
    [sys.executable, script, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=120
  )


def test_script_runs_in_any_folder(tmp_path):
  append(tmp_path / "one.jsonl", RECORD)
  append(tmp_path / "two.jsonl", SAMPLED)
  args = ("--table", 2, "--format", "csv", "--output", "out.csv")
  done = tabulate(*args, "one.jsonl", "two.jsonl", cwd=tmp_path)
  assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
  with (tmp_path / "out.csv").open(newline="") as file:
    rows = [row["measured speed"] for row in csv.DictReader(file) if row["source"] != "paper"]
  assert rows == ["2.06", "1.68"]


# Tables in pages.


def test_measured_table_has_columns_for_settings_that_vary():
  provenance = dict(commit="0123456789", date="2026-11-22T05:00Z", jax_version="0.10.2")
  records = [r.replace(**provenance, tokens_per_round=3.25) for r in (RECORD, SAMPLED)]
  table = measured_table([records[0], records[1].replace(batch_size=8)])
  assert table.title.startswith("captions, big, small, 24 texts, float32, ")
  first, second = cells(table)
  assert (first["batch"], second["batch"]) == ("batch 1", "batch 8")
  assert (first["speedup"], first["acceptance length"], second["temperature"]) == (
    "2.06",
    "3.25",
    "1",
  )
  assert table.notes[-1] == "Measured with commit 0123456789 of 2026-11-22."
  assert "an unrecorded commit" in measured_table([RECORD]).notes[-1]


def test_metrics_page_explains_every_heading_of_a_legend():
  page = (ROOT / "docs" / "metrics.md").read_text()
  first_cells = re.findall(r"^\| ([^|]*) \|", page, re.MULTILINE)
  names = {name.split(" (")[0] for cell in first_cells for name in [cell, *cell.split(", ")]}
  also = {heading.replace("step", part, 1) for heading in names for part in ("draft", "verify")}
  explained = names | also
  legends = [legend_of((*SPEED, *BUDGET, *ROOFLINE))]
  for module in dict.fromkeys((*RECORDS.values(), *LINES.values(), *PATHS.values())):
    values = vars(importlib.import_module(f"experiments.{module}")).items()
    legends += [value for name, value in values if name.endswith("_LEGEND")]
    tuples = [value for _, value in values if isinstance(value, tuple)]
    legends += [legend_of(each) for each in tuples if each and type(each[0]) is Column]
  legends += [GIVEN_OUTPUTS_LEGEND, PEERS_LEGEND]
  assert len(legends) >= 15
  for heading in dict.fromkeys(heading for legend in legends for heading in legend):
    assert heading in explained, heading


def test_every_page_quotes_the_records_it_names():
  """If this fails because a record or a table has changed, run: python scripts/quote.py"""
  assert [str(path) for path, _ in pages.outdated()] == []
  assert sum(path.read_text().count("<!-- table: ") for path in pages.pages()) >= 8


def test_speed_without_a_draft_is_in_the_rows_of_all_drafts():
  """It depends on the kernels and the batch size."""
  settings = [  # draft, kernels, gamma, tokens per second
    ("a", "float", 0, 100.0),
    ("a", "float", 3, 90.0),
    ("b", "float", 3, 120.0),
    ("b", "int8", 3, 70.0),
  ]
  measured = [
    RECORD.replace(draft=draft, kernels=kernels, gamma=gamma, speculative_tokens_per_s=speed)
    for draft, kernels, gamma, speed in settings
  ]
  assert gammas_table(measured).rows == (
    ("float32, float", "a", "1", "100", "90", "gamma 0"),
    ("float32, float", "b", "1", "100", "120", "gamma 3"),
    ("float32, int8", "b", "1", "-", "70", "gamma 3"),
  )
