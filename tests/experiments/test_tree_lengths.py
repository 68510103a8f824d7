"""Test the acceptance lengths of chains and trees, and predicted speeds of trees."""

import json
import pathlib

import pytest
import tiny_pair

from experiments.tpu_v4.tree_speeds import dynamic_speeds_table, tree_speeds_table
from experiments.trees import trees as bench_trees
from experiments.trees.trees import lengths_table, trees
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.measure import records
from specdec_jax.measure.costs import Costs


def test_acceptance_lengths_are_recorded(tmp_path, capsys, monkeypatch):
  costs = Costs(2.0, 0.2, 2.5, 0.1, 1.0, 1.0)  # test_measure.py tests measured costs
  monkeypatch.setattr(
    bench_trees, "measure_costs", lambda pairs, trees, *rest: [[costs] * len(trees)]
  )
  settings = dict(
    texts=tiny_pair.SENTENCES[:40],
    output_dir=str(tmp_path),
    samplings=[Sampling(temperature=0.0)],
    gammas=(2,),
    shapes=((4, 2),),
    dynamic=((5, 2),),
    verifiers=(TokenVerifier,),
    calibration_texts=8,
    calibration_tokens=50,
    max_new_tokens=12,
    min_tokens=200,
  )
  trees(tiny_pair.pair("near"), **settings)
  measured = records.read(tmp_path / "results.jsonl")
  stdout = capsys.readouterr().out
  page = (tmp_path / "report.html").read_text(encoding="utf-8")
  assert [(r.settings.temperature, r.settings.verifier, r.kind) for r in measured] == [
    (0.0, "TokenVerifier", kind) for kind in ("chain", "tree", "dynamic tree")
  ]
  for r in measured:
    assert r.settings.gamma == 2 and 1 <= r.outputs.tokens_per_round <= 3
    length = r.outputs.tokens_per_round
    assert r.outputs.tokens_per_round_low < length < r.outputs.tokens_per_round_high
    assert r.outputs.identical
    speed = None if r.kind == "dynamic tree" else r.outputs.tokens_per_round / (2 * 0.1 + 1.3)
    assert r.times.predicted_measured_cost == (speed and pytest.approx(speed))
  assert lengths_table(measured).title in stdout
  assert [row[1:3] for row in lengths_table(measured).rows] == [
    (r.kind, {"chain": "3", "tree": "4", "dynamic tree": "5"}[r.kind]) for r in measured
  ]
  assert stdout.count("begins a round") == page.count("</figure>") == 1
  assert page.count("<article>") == 2 and page.count('class="tree"') > 4
  assert settings["texts"][8] in stdout and settings["texts"][8] in page
  trees(tiny_pair.pair("near"), **settings, report_examples=0)  # nothing is measured twice
  assert len(records.read(tmp_path / "results.jsonl")) == len(measured)


FOLDER = pathlib.Path(__file__).resolve().parents[2] / "experiments"


def test_dynamic_speeds_join_records_and_reports_of_one_shape(tmp_path):
  settings = dict(draft="small", nodes=16, gamma=5, temperature=0.0)
  report = {"settings": settings, "over_a_step": {"round": 1.25}}
  paths = [tmp_path / "same.json", tmp_path / "other.json"]
  paths[0].write_text(json.dumps(report))
  paths[1].write_text(json.dumps({**report, "settings": {**settings, "gamma": 4}}))
  (row,) = dynamic_speeds_table(FOLDER / "trees/results.jsonl", *paths).rows
  assert row == ("draft", "small", "0", "16", "5", "4.15 [4.05,4.25]", "1.250", "3.32")


def test_tree_speeds_use_the_compilers_cost_of_a_compiled_tree():
  chain, tree = FOLDER / "tpu_v4/one_chip.json", FOLDER / "tpu_v4/tree_64.json"
  rows = tree_speeds_table(chain, tree).rows
  (compiled,) = (row for row in rows if row[:4] == ("0.75", "tree", "64", "8"))
  round_ = json.loads(tree.read_text())["over_a_step"]["round"]
  assert float(compiled[5]) == pytest.approx(round_, abs=0.002)
  for _, _, _, depth, tokens, cost, speed, _ in rows:
    assert 1 < float(cost) < 1.3 and 1 < float(tokens) < 1 + float(depth)
    assert float(speed) == pytest.approx(float(tokens) / float(cost), abs=0.01)
  assert max(float(row[-1]) for row in rows) > 1.3
