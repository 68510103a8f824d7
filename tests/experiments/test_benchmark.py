"""Test which ratios are reported as lower, the file of recorded ratios, and the printed text."""

import json

import pytest
import tiny_pair

from experiments.benchmark import benchmark as benchmarking
from experiments.benchmark.benchmark import HIGHER_IS_BETTER, benchmark, verdict

SPEEDUPS = [2.0, 2.4, 2.1]  # their range is 0.4 wide


@pytest.mark.parametrize(
  "value, as_speedup, as_cost",
  [
    (1.5, "fell", "gained"),
    (1.7, "held", "held"),
    (2.2, "held", "held"),
    (2.7, "held", "held"),
    (2.9, "gained", "fell"),
  ],
)
def test_what_is_further_out_than_the_recorded_runs_differ_has_fallen_or_gained(
  value, as_speedup, as_cost
):
  assert verdict(value, SPEEDUPS, higher_is_better=True) == as_speedup
  assert verdict(value, SPEEDUPS, higher_is_better=False) == as_cost


@pytest.fixture
def given(monkeypatch):
  """Replace measurements by ratios that a test puts into the returned list, one entry per run."""
  runs = []
  monkeypatch.setattr(benchmarking, "ratios", lambda pair, sentences: runs.pop(0))
  return runs


def all_at(value, **others):
  return {**dict.fromkeys(HIGHER_IS_BETTER, value), **others}


def test_runs_are_recorded_and_compared_with(given, tmp_path, capsys):
  path = str(tmp_path / "recorded.json")
  pair, sentences = tiny_pair.pair(), tiny_pair.SENTENCES[:2]
  given += [all_at(2.0), all_at(2.2), all_at(2.1)]
  benchmark(pair, sentences, path, record=True, runs=3)
  content = json.loads((tmp_path / "recorded.json").read_text())
  assert content["ratios"] == {name: [2.0, 2.2, 2.1] for name in HIGHER_IS_BETTER}
  capsys.readouterr()

  given.append(all_at(2.1, **{"v(7)": 3.0, "speedup, temperature 1": 1.0, "c": 1.0}))
  benchmark(pair, sentences, path)
  lines = capsys.readouterr().out.splitlines()
  (row,) = [line.split() for line in lines if line.strip().startswith("v(7) ")]
  assert row == ["v(7)", "3.000", "2.100", "2.000", "to", "2.200", "fell"]
  for name, word in {
    "c": "gained",
    "speedup, temperature 0": "held",
    "temperature 1": "fell",
  }.items():
    assert any(name in line and line.split()[-1] == word for line in lines), name
  assert not any("Recorded with other settings" in line for line in lines)

  (tmp_path / "recorded.json").write_text(json.dumps({**content, "device": "a faster one"}))
  given.append(all_at(2.1))
  benchmark(pair, sentences, path)
  assert "device a faster one" in capsys.readouterr().out
