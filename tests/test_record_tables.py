"""Test that tables show all their cells, and the values of their records."""

import pytest
from test_records import RECORD as SETTING

from specdec_jax.measure.tables import (
  BUDGET,
  ROOFLINE,
  SPEED,
  Table,
  legend,
  no_alpha,
  records_table,
  speed_table,
  terminal_text,
)

TABLE = Table(
  "A title",
  ("who", "per cent", "c"),
  (("a_b & 100% {x}", "+1.5", "0.1"), ("pipe | back\\slash", "-", "-"), ('"q", r', "2", "3")),
  ("A note.",),
)
RECORD = SETTING.replace(
  task="some captions",
  device_kind="x86",
  num_examples=24,
  num_tokens=1000,
  rounds=400,
  alpha=0.8149,
  alpha_low=0.7851,
  alpha_high=0.8402,
  acceptance_rate=0.83,
  tokens_per_round=1000 / 400,
  c=0.0614,
  verify_cost=1.3816,
  predicted_theorem8=2.9871,
  predicted_measured_cost=2.1549,
  predicted_finite_length=2.1549,
  baseline_tokens_per_s=100.0,
  speculative_tokens_per_s=206.3,
  speedup=2.0634,
  identical=True,
)
OTHER = RECORD.replace(
  temperature=1.0,
  gamma=3,
  alpha=0.6651,
  alpha_low=0.6299,
  alpha_high=0.7012,
  c=0.0723,
  verify_cost=1.2249,
  predicted_theorem8=1.9149,
  predicted_measured_cost=1.7251,
  predicted_finite_length=1.7251,
  tokens_per_round=1000 / 625,
  speedup=1.6849,
  identical=None,
)


def test_terminal_shows_every_cell_completely():
  text = terminal_text(TABLE)
  for cell in ("A title", "A note.", *(cell for row in TABLE.rows for cell in row)):
    assert cell in text
  wide = terminal_text(speed_table([RECORD, OTHER]))
  assert max(map(len, wide.splitlines())) <= 100 and "…" not in text + wide


def test_row_has_the_values_of_its_record():
  table = speed_table([RECORD, OTHER])
  assert table.rows == (
    ("0", "5", "0.81 [0.79,0.84]", "0.061", "1.38", "2.99", "2.15", "2.06", "yes", "2.50"),
    ("1", "3", "0.67 [0.63,0.70]", "0.072", "1.22", "1.91", "1.73", "1.68", "-", "1.60"),
  )
  for words in ("some captions", "24 texts", "batch 1", "float32", "x86"):
    assert words in table.title


def test_quality_is_a_column_if_it_was_measured():
  same = RECORD.replace(metric="BLEU", quality=37.41, baseline_quality=37.41)
  table = speed_table([same, RECORD])
  assert table.columns[-1] == "quality" and [row[-1] for row in table.rows] == ["BLEU 37.4", "-"]
  assert "quality" not in speed_table([RECORD]).columns


def test_settings_that_vary_are_columns():
  """Also the number of repeats, so that records of different precision are not mixed."""
  table = speed_table([RECORD.replace(repeats=5), RECORD.replace(repeats=1, batch_size=8)])
  assert table.columns[:2] == ("batch", "repeats") and "batch" not in table.title
  assert [row[:2] for row in table.rows] == [("batch 1", "repeats: 5"), ("batch 8", "repeats: 1")]


@pytest.mark.parametrize("identical, cell", [(True, "yes"), (False, "NO"), (None, "-")])
def test_outputs_that_differ_are_marked(identical, cell):
  assert speed_table([RECORD.replace(identical=identical)]).rows[0][-2] == cell


def test_missing_values_are_dashes():
  assert speed_table([SETTING]).rows == (("0", "5", *["-"] * 8),)


def test_every_heading_is_explained():
  assert [column.heading for column in SPEED] == ["temperature", "gamma", *legend(SPEED)]


def test_noisy_costs_are_reported_where_there_is_no_prediction():
  predictions = dict.fromkeys(("predicted_measured_cost", "predicted_finite_length"))
  noisy = RECORD.replace(c=-0.035, predicted_theorem8=None, **predictions)
  (note,) = speed_table([noisy, OTHER]).notes
  assert "too noisy" in note and "(gamma 5)" in note
  assert not speed_table([RECORD]).notes


def test_times_that_are_too_short_to_measure_are_missing_with_a_note():
  times = "target_step_ms", "draft_step_ms", "verify_ms", "c", "verify_cost", "predicted_theorem8"
  times += "predicted_measured_cost", "predicted_finite_length", "unaccounted_ms"
  short = RECORD.replace(target_prefill_ms=1.0, **dict.fromkeys(times))
  (note,) = speed_table([short]).notes
  assert "too noisy" in note and "(gamma 5)" in note
  for columns in (SPEED, BUDGET, ROOFLINE):
    cells = records_table("", [short], columns).rows[0]
    assert "-" in cells and not any(cell.startswith("-") and cell != "-" for cell in cells)


def test_records_without_alpha_have_a_note_with_their_acceptance_rate():
  stateful = RECORD.replace(alpha=None, alpha_low=None, alpha_high=None, acceptance_rate=0.62)
  (note,) = no_alpha([stateful, RECORD])
  assert note.startswith("No alpha or Theorem 8") and note.endswith("62% (gamma 5).")
  assert not no_alpha([RECORD])


@pytest.mark.parametrize("repeats, is_noted", [(1, True), (2, True), (3, False), (None, False)])
def test_speedups_of_few_repeats_are_called_unreliable(repeats, is_noted):
  notes = speed_table([OTHER, RECORD.replace(repeats=repeats)]).notes
  assert ["fewer than 3 repeats" in note for note in notes] == [True] * is_noted
