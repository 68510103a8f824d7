"""Test the comparison of drafts of several sizes."""

import pytest
from test_records import RECORD

from experiments.sizes import sizes
from specdec_jax.load import BUNDLED

PATHS = {"small": "experiments/sizes/drafts/small", "large": "experiments/sizes/drafts/large"}


def record(name, gamma, temperature=0.0, **values):
  speeds = dict(predicted_theorem8=2.0, predicted_finite_length=1.5, speedup=1.4) | values
  return RECORD.replace(
    draft=name, draft_path=PATHS[name], gamma=gamma, temperature=temperature, alpha=0.7, **speeds
  )


RECORDS = [
  record("large", 3, predicted_theorem8=2.5, speedup=1.3),
  record("small", 3),
  record("small", 5, predicted_theorem8=2.2, predicted_finite_length=1.2, speedup=1.6),
  record("large", 3, 1.0, speedup=1.9),
  record("small", 3, 1.0),
]


@pytest.fixture(autouse=True)
def sizes_of_drafts(monkeypatch):
  known = {"target": 1000, "small": 10, "large": 100}
  monkeypatch.setattr(sizes, "num_params", lambda folder: known[folder.rpartition("/")[2]])


def test_drafts_are_sorted_by_size_and_have_their_fastest_gamma():
  first, second, *_ = found = sizes.sizes_of(RECORDS)
  assert [(size.name, size.temperature, size.share) for size in found] == [
    ("small", 0, 0.01),
    ("large", 0, 0.1),
    ("small", 1, 0.01),
    ("large", 1, 0.1),
  ]
  best = {name: first.best(name).settings.gamma for name in sizes.SPEEDS}
  assert best == {"Theorem 8": 5, "measured costs": 3, "measured": 5}


def test_table_has_the_papers_rows_and_names_the_fastest_draft():
  table = sizes.sizes_table(RECORDS)
  assert [row[0] for row in table.rows] == ["paper"] * 6 + ["ours"] * 4
  assert table.rows[0][1:6] == ("T5-small", "77M", "0.7%", "0", "0.75")
  assert table.rows[0][7:10] == ("0.02", "-", "3.2")
  assert table.rows[6][-2:] == ("1.60", "5")
  said = "Fastest at temperature 0: large (Theorem 8), small (measured costs), small (measured)."
  assert said in table.notes
  assert "Temperature 1 was not measured." in sizes.sizes_table(RECORDS[:3]).notes


def test_figure_shows_alpha_and_each_speed():
  alphas, cold, warm = sizes.sizes_figure(RECORDS).axes
  ours = {line.get_label(): line for line in alphas.lines}["temperature 0"]
  assert [*ours.get_xdata()] == [0.01, 0.1] and [*ours.get_ydata()] == [0.7, 0.7]
  for axes, expected in ((cold, [1.6, 1.3]), (warm, [1.4, 1.9])):
    lines = {line.get_label(): line for line in axes.lines}
    assert [*lines["measured"].get_ydata()] == expected
    assert len(lines["the paper, measured"].get_ydata()) == 3


def test_parameters_are_counted_from_the_configuration(monkeypatch):
  monkeypatch.undo()
  layers = 4 * (4 * 160 * 128 + 3 * 160 * 512) + 8 * 160 * 128 + 3 * 160 * 512
  norms, positions = 160 * (2 * 4 + 1 + 3 + 1), 2 * 2 * 32
  assert sizes.num_params(str(BUNDLED / "draft")) == 4096 * 160 + layers + norms + positions
