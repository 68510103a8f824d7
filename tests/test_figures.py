"""Test that figures show the values of closed forms and of records."""

import argparse
import dataclasses
import importlib.util
import pathlib
import subprocess
import sys

import gin
import numpy as np
import pytest
import tiny_pair

from experiments.figures import figures
from experiments.figures.drawing import save
from experiments.paper.paper import load_table
from specdec_jax.errors import InputError
from specdec_jax.measure.records import Record, append
from specdec_jax.measure.reporting.rounds import Round

ROOT = pathlib.Path(__file__).resolve().parents[1]

RECORD = Record(
  task="captions",
  target="big",
  draft="small",
  temperature=0.0,
  gamma=3,
  batch_size=1,
  platform="cpu",
  device_kind="x86",
  dtype="float32",
  seed=0,
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
LONGER = dataclasses.replace(RECORD, gamma=5, verify_ms=3.5, tokens_per_round=4.0, speedup=1.5)
SAMPLED = dataclasses.replace(RECORD, temperature=1.0, speedup=1.1, predicted_finite_length=None)


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


def test_figure_3_shows_the_best_gamma():
  (axes,) = figures.gamma_figure().axes
  drawn = lines(axes)
  assert list(drawn) == ["c = 0.02", "c = 0.04", "c = 0.11"] == texts(axes)
  for alpha, c in ((0.5, 0.02), (0.8, 0.11), (0.95, 0.02)):
    gains = [sum(alpha**i for i in range(g + 1)) / (g * c + 1) for g in range(60)]
    assert value_at(drawn[f"c = {c}"], alpha) == gains.index(max(gains))


def test_figure_4_shows_speed_and_operations():
  table_1 = load_table(1, ROOT / "configs")
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


def test_negative_draft_step_has_no_width():
  noisy = dataclasses.replace(RECORD, draft_step_ms=-0.1)
  (axes,) = figures.timeline_figure([noisy], num_tokens=2).axes
  assert [width for _, width in blocks(axes)[1]] == [4.0, 1.0, 0, 0, 0, 3.0]


def test_sweep_shows_measured_and_predicted_speed():
  again = dataclasses.replace(RECORD, speedup=1.2)
  argmax, sampled = figures.sweep_figure([LONGER, RECORD, SAMPLED, again]).axes
  drawn = {line.get_label(): line.get_data() for line in argmax.lines}
  assert [list(values) for values in drawn["measured"]] == [[3, 5], [1.2, 1.5]]
  assert list(drawn["predicted with measured costs"][1]) == [1.3, 1.3]
  assert list(drawn["Theorem 8: v = 1, long texts"][1]) == [1.8, 1.8]
  drawn = {line.get_label(): line.get_data() for line in sampled.lines}
  assert list(drawn["predicted with measured costs"][1]) == [1.4]
  titles = [axes.get_title() for axes in (argmax, sampled)]
  assert titles == ["small, temperature 0", "small, temperature 1"]


def test_sweep_has_a_panel_for_each_setting():
  records = [dataclasses.replace(RECORD, draft=f"d{i}") for i in range(4)]
  assert len(figures.sweep_figure(records).axes) == 4


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


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_saved_figures_are_reproducible(tmp_path, ending):
  path = tmp_path / f"figure.{ending}"
  save(figures.tokens_figure(), path)
  assert path.stat().st_size > 1000
  save(figures.tokens_figure(), tmp_path / f"again.{ending}")
  assert (tmp_path / f"again.{ending}").read_bytes() == path.read_bytes()


def test_unknown_format_and_records_without_times_are_rejected(tmp_path):
  with pytest.raises(InputError, match="must end in one of .png, .svg, .pdf"):
    save(figures.tokens_figure(), tmp_path / "figure.bmp")
  with pytest.raises(InputError, match="No record has all of"):
    figures.timeline_figure([dataclasses.replace(RECORD, verify_ms=None)])
  with pytest.raises(InputError, match="num_tokens"):
    figures.timeline_figure([RECORD], num_tokens=0)


# The script.


def draw(*args, cwd):
  script = ROOT / "scripts" / "figures.py"
  return subprocess.run(
    [sys.executable, script, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=120
  )


def test_script_runs_in_any_folder(tmp_path):
  append(tmp_path / "results.jsonl", RECORD)
  done = draw("--figure", 5, "--records", "results.jsonl", "--output", "five.svg", cwd=tmp_path)
  assert (done.returncode, done.stdout) == (0, "")
  assert (tmp_path / "five.svg").stat().st_size > 1000


@pytest.fixture
def trace(tmp_path):
  """Return a function that draws Figure 1 for a text and a seed with a tiny decoder-only pair.

  The function returns the title, the number of rounds, and the pieces with their colours.
  """
  paths = {"target": "target", "draft": "near", "vocabulary": "vocabulary.txt"}
  folder = tiny_pair.gpt_folder()
  lines = [f"pairs.load_pair.{name} = {str(folder / file)!r}" for name, file in paths.items()]
  lines = ["from __gin__ import dynamic_registration", "from specdec_jax import pairs", *lines]
  (tmp_path / "tiny.gin").write_text("\n".join(lines))
  spec = importlib.util.spec_from_file_location("script", ROOT / "scripts" / "figures.py")
  script = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(script)

  def draw(text, seed):
    gin.clear_config()  # as in a new process
    settings = dict(gin_file=str(tmp_path / "tiny.gin"), gamma=3, temperature=1.0)
    (axes,) = script.trace(argparse.Namespace(text=text, seed=seed, **settings)).axes
    title, *drawn = [(text.get_text(), text.get_color()) for text in axes.texts]
    numbers = [word for word, colour in drawn if colour not in figures.KINDS.values()]
    pieces = [(word, colour) for word, colour in drawn if colour in figures.KINDS.values()]
    return title[0], len(numbers), pieces[:-3]  # without the legend

  yield draw
  gin.clear_config()


def test_figure_1_of_a_decoder_only_pair_with_and_without_a_prompt(trace):
  titles, texts = [], []
  for text, seed in ((None, 0), (None, 1), ("two dogs", 0)):
    title, num_rounds, pieces = trace(text, seed)
    emitted = [word for word, colour in pieces if colour != figures.KINDS["rejected"]]
    prefix = f"{len(emitted)} tokens from {num_rounds} target forward passes, "
    prefix += "γ = 3, temperature 1"
    assert title.startswith(prefix)
    titles.append(title.removeprefix(prefix))
    texts.append(emitted)
  assert titles == ["", "", ", after 'two dogs'"]
  assert texts[0] != texts[1] and texts[0] != texts[2]


@pytest.mark.parametrize(
  "args, message",
  [
    (["--figure", 1, "--output", "a.png", "--gin_file", "absent.gin"], "no gin file 'absent.gin'"),
    (["--figure", 7, "--output", "a.png"], "no figure '7'"),
    (["--figure", 2, "--output", "a.txt"], "must end in"),
    (["--figure", 5, "--output", "a.png"], "give files with --records"),
    (["--figure", 5, "--output", "a.png", "--records", "absent"], "cannot use 'absent'"),
    (["--figure", 1, "--output", "a.png", "--gamma", 0], "gamma is 0"),
  ],
)
def test_script_reports_errors_in_one_line(tmp_path, args, message):
  done = draw(*args, cwd=tmp_path)
  assert done.returncode == 2 and done.stdout == ""
  assert message in done.stderr and len(done.stderr.splitlines()) == 1
  assert not list(tmp_path.iterdir())
