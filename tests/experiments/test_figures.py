"""Test that figures show the values of closed forms and of records."""

import pathlib
import re
import sys
from xml.etree import ElementTree

import gin
import numpy as np
import pytest
import tiny_pair
from test_records import RECORD as SETTING

from experiments.figures import figures, pictures
from experiments.paper.paper import load_table
from experiments.paper.reproduce import Task, TrainedStandIns, reproduce
from specdec_jax.core.rounds import Round
from specdec_jax.measure.records import append

ROOT = pathlib.Path(__file__).resolve().parents[2]

RECORD = SETTING.replace(
  task="captions",
  target="big",
  draft="small",
  gamma=3,
  device_kind="x86",
  num_examples=24,
  tokens_per_round=2.5,
  target_prefill_ms=4.0,
  draft_prefill_ms=1.0,
  target_step_ms=2.0,
  draft_step_ms=0.25,
  verify_ms=3.0,
  predicted_theorem8=1.8,
  predicted_measured_cost=1.4,
  predicted_finite_length=1.3,
  speedup=1.25,
)
LONGER = RECORD.replace(gamma=5, verify_ms=3.5, tokens_per_round=4.0, speedup=1.5)
SAMPLED = RECORD.replace(temperature=1.0, speedup=1.1, predicted_finite_length=None)


def value_at(line, x):
  """Return the value of a drawn line at one of its points."""
  xs, ys = line.get_data()
  (i,) = np.flatnonzero(np.isclose(xs, x))
  return ys[i]


def lines(axes):
  return {line.get_label(): line for line in axes.lines if "=" in line.get_label()}


def texts(axes):
  return [text.get_text() for text in axes.texts]


def test_figure_2_shows_expected_tokens():
  (axes,) = figures.tokens_figure().axes
  drawn = lines(axes)
  assert list(drawn) == ["γ = 1", "γ = 3", "γ = 5", "γ = 7", "γ = ∞"] == texts(axes)
  assert value_at(drawn["γ = 3"], 0.5) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
  assert value_at(drawn["γ = 7"], 1.0) == pytest.approx(8)
  assert value_at(drawn["γ = ∞"], 0.8) == pytest.approx(5)


def test_figure_4_shows_speed_and_operations():
  table_1 = load_table(1)
  speed, operations = figures.operations_figure(table_1).axes
  for axes in (speed, operations):
    assert list(lines(axes)) == ["γ = 2", "γ = 3", "γ = 5", "γ = 10"] == texts(axes)
  assert value_at(lines(speed)["γ = 2"], 0.5) == pytest.approx(1.75)
  assert value_at(lines(operations)["γ = 2"], 0.5) == pytest.approx(3 / 1.75)
  for row in table_1:  # printed values are on the curves up to rounding
    name = f"γ = {row['gamma']:g}"
    assert value_at(lines(speed)[name], row["alpha"]) == pytest.approx(row["speed"], abs=0.006)
    assert value_at(lines(operations)[name], row["alpha"]) == pytest.approx(
      row["operations"], abs=0.006
    )
  for axes, name in ((speed, "speed"), (operations, "operations")):
    points = {xy for line in axes.lines if line.get_marker() == "o" for xy in zip(*line.get_data())}
    assert points == {(row["alpha"], row[name]) for row in table_1}


def blocks(axes):
  """Return the (left, width) of the blocks of each row in order, in milliseconds."""
  return [[(bar.get_x(), bar.get_width()) for bar in bars] for bars in axes.containers]


def test_figure_5_is_to_scale():
  (axes,) = figures.timeline_figure([SAMPLED, RECORD, LONGER], num_tokens=10).axes
  (plain, sampled) = blocks(axes)  # the first record sets the temperature
  assert len(sampled) == 2 + 4 * 4
  (axes,) = figures.timeline_figure([RECORD, SAMPLED, LONGER], num_tokens=10).axes
  plain, short, long = blocks(axes)
  assert [width for _, width in plain] == [4.0] + 10 * [2.0]
  assert [width for _, width in short] == [4.0, 1.0] + 4 * [0.25, 0.25, 0.25, 3.0]
  assert [width for _, width in long] == [4.0, 1.0] + 3 * [*[0.25] * 5, 3.5]
  for row in (plain, short, long):  # without gaps
    ends = [left + width for left, width in row]
    assert [left for left, _ in row] == pytest.approx([0, *ends[:-1]])
  names = [label.get_text() for label in axes.get_yticklabels()]
  assert names == ["autoregressive", "γ = 3", "γ = 5"]
  assert texts(axes) == ["24 ms, 10 passes", "20 ms, 4 passes", "19.2 ms, 3 passes"]


def test_sweep_shows_measured_and_predicted_speed():
  again = RECORD.replace(speedup=1.2)
  argmax, sampled = figures.sweep_figure([LONGER, RECORD, SAMPLED, again]).axes
  drawn = {line.get_label(): line.get_data() for line in argmax.lines}
  assert [list(values) for values in drawn["measured"]] == [[3, 5], [1.2, 1.5]]
  assert list(drawn["predicted with measured costs"][1]) == [1.3, 1.3]
  assert list(drawn["Theorem 8: v = 1, long texts"][1]) == [1.8, 1.8]
  drawn = {line.get_label(): line.get_data() for line in sampled.lines}
  assert list(drawn["predicted with measured costs"][1]) == [1.4]
  titles = [axes.get_title() for axes in (argmax, sampled)]
  assert titles == ["small, temperature 0", "small, temperature 1"]


def test_figure_1_shows_tokens_in_colour():
  rounds = [Round((" ein",), " Hund", (" steht",), " Mann"), Round(("</s>",), None, (), None)]
  (axes,) = figures.trace_figure(rounds, "a title").axes
  drawn = {text.get_text(): text for text in axes.texts}
  assert [drawn[word].get_position() for word in ("ein", "Hund", "Mann", "</s>")] == [
    *[(0, 0), (4, 0), (9, 0)],
    (0, 1),
  ]
  colours = [drawn[word].get_color() for word in ("ein", "Hund", "Mann")]
  assert colours == [figures.KINDS[kind] for kind in ("accepted", "rejected", "corrected")]
  assert len(set(colours)) == 3
  for word in ("a title", "accepted", "rejected", "the target's token"):
    assert word in drawn


# The script.


def test_figures_are_written_reproducibly(tmp_path, monkeypatch):
  append(tmp_path / "results.jsonl", RECORD)
  records = ["--records", str(tmp_path / "results.jsonl")]
  for figure, *options in (["2"], ["3"], ["4"], ["5", *records], ["sweep", *records]):
    written = []
    for name in ("a.svg", "b.svg"):
      output = str(tmp_path / name)
      monkeypatch.setattr(sys, "argv", ["", "--figure", figure, "--output", output, *options])
      figures.main()
      written.append((tmp_path / name).read_bytes())
    assert len(written[0]) > 1000 and written[0] == written[1]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("figure1", ""),
    ("figure1_gpt_like", "--gin_file experiments/gpt_like/gpt_like.gin --temperature 1 --seed 14"),
    ("figure1_gpt_like", None),  # specdec reproduce figure1
  ],
)
def test_figure_1_of_the_page_is_what_its_command_draws(tmp_path, monkeypatch, name, options):
  output = tmp_path / "figure1.svg"
  if options is None:
    reproduce(["figure1"], TrainedStandIns(), {"EnDe": Task("", list, str)}, str(tmp_path))
  else:
    words = f"--figure 1 {options} --output {output}".split()
    monkeypatch.setattr(sys, "argv", ["", *words])
    try:
      figures.main()
    finally:
      gin.clear_config()
  folder = ROOT / "experiments" / "figures"
  drawn, page = (
    re.findall("<!-- (.*) -->", (folder / file).read_text()) for file in (output, f"{name}.svg")
  )
  assert drawn == page
  (numbers,) = re.findall(r"\d+ tokens from \d+ target forward passes", drawn[0])
  assert numbers in (folder / "README.md").read_text()


def test_figure_1_of_a_decoder_only_pair():
  """The text after the prompt is generated, and every emitted token is drawn."""
  texts = []
  for text, seed in (("", 0), ("", 1), ("two dogs", 0)):
    (axes,) = figures.trace(tiny_pair.gpt_pair(), text, gamma=3, temperature=1.0, seed=seed).axes
    title, *drawn = [(text.get_text(), text.get_color()) for text in axes.texts]
    of_kind = figures.KINDS.values()
    num_rounds = sum(colour not in of_kind for _, colour in drawn)
    pieces = [piece for piece in drawn if piece[1] in of_kind][:-3]  # without the legend
    emitted = [word for word, colour in pieces if colour != figures.KINDS["rejected"]]
    prefix = f"{len(emitted)} tokens from {num_rounds} target forward passes, "
    prefix += "γ = 3, temperature 1"
    assert title[0] == prefix + (f", after '{text}'" if text else "")
    texts.append(emitted)
  assert texts[0] != texts[1] and texts[0] != texts[2]


# The pictures of the README.


def test_picture_of_rounds_shows_what_happened_to_each_token():
  rounds = [
    Round((" Ein",), " Hund", (" steht",), " <Mann>"),
    Round((" eine", "m", "</s>"), None, (), None),
  ]
  drawn = pictures.rounds_picture("A <man>", "Ein Mann", rounds, gamma=3)
  root = ElementTree.fromstring(drawn)  # special characters are escaped
  texts = [each.text for each in root.findall(".//{*}text")]
  assert texts[0] == "5 tokens from 2 target passes instead of 5"
  assert {"Source: A <man>", "1 accepted, 1 rejected, 1 added", "3 accepted"} <= {*texts}
  boxes = [each.get("class") for each in root.findall(".//{*}rect")][1:-3]  # without the legend
  words = [each.text for each in root.findall(".//{*}text") if each.get("class") == "token"][:-3]
  assert [*zip(words, boxes)] == [
    *[("Ein", "accepted"), ("Hund", "rejected"), ("<Mann>", "added")],
    *[("eine", "accepted"), ("m", "accepted"), ("</s>", "accepted")],
  ]


def test_picture_of_speeds_has_a_point_for_each_record_with_both_numbers():
  records = [
    RECORD.replace(processor="a", predicted_finite_length=1.0, speedup=1.0),
    RECORD.replace(processor="a", predicted_finite_length=2.0, speedup=1.0),
    RECORD.replace(processor="b", predicted_finite_length=4.0, speedup=4.0),
    RECORD.replace(processor="b", speedup=None),
  ]
  root = ElementTree.fromstring(pictures.speeds_picture(records))
  points = [each for each in root.findall(".//{*}circle") if each.get("r") == "3"]
  (x1, y1, color), (x2, y2, _), (x4, y4, other) = (
    (float(p.get("cx")), float(p.get("cy")), p.get("fill")) for p in points
  )
  assert (x2 - x1) * 2 == pytest.approx(x4 - x1, abs=0.3) and y1 == y2  # log scale
  assert x4 - x1 == pytest.approx(y1 - y4, abs=0.2) and color != other  # the same on both axes
  texts = [each.text for each in root.findall(".//{*}text")]
  assert "a: 2 records" in texts and "b: 1 records" in texts
  assert "Dashed: both agree. Half of the points are within 0%, 90% within 40%." in texts


def test_committed_picture_of_speeds_has_the_records():
  assert pictures.speeds_picture(pictures.all_records()) == (
    pictures.FOLDER / "predicted.svg"
  ).read_text(encoding="utf-8")


@pytest.mark.slow
def test_committed_pictures_are_what_the_command_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(pictures, "FOLDER", tmp_path)
  pictures.main()
  for name in ("rounds.svg", "predicted.svg"):
    assert (tmp_path / name).read_text() == (ROOT / "docs" / "_static" / name).read_text()
