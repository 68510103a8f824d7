"""Test policies that choose gamma, oracles, and predictors of acceptance."""

import functools
from unittest import mock

import numpy as np
import pytest
import tiny_pair
from test_calibrate import LENGTHS, costs

from experiments.gamma import gamma as bench_gamma
from experiments.gamma import oracles
from experiments.gamma.stopping import auc, in_a_row, stopped_speedup
from specdec_jax.measure import calibrate
from specdec_jax.measure.calibrate import Calibration, choose
from specdec_jax.measure.records import read

RNG = np.random.default_rng(0)


def best_by_trying(stands, cost):
  if len(stands) == 0:
    return 0.0
  gains = []
  for g in range(len(cost)):
    n = int(np.cumprod(stands[:g]).sum())
    gains.append(cost[g] + best_by_trying(stands[n + 1 :], cost))
  return min(gains)


@pytest.mark.parametrize("seed", range(5))
def test_decoding_times_of_a_text(seed):
  rng = np.random.default_rng(seed)
  stands, cost = rng.random(9) < 0.7, [1.0, 1.3, 1.5, 2.1]
  fixed, best = oracles.times(stands, cost)
  assert best == pytest.approx(best_by_trying(stands, cost)) and best <= fixed.min()
  for g in range(4):
    left, rounds = stands, 0
    while len(left):
      left, rounds = left[int(np.cumprod(left[:g]).sum()) + 1 :], rounds + 1
    assert fixed[g] == pytest.approx(rounds * cost[g])


def test_policies_are_measured(tmp_path, capsys, monkeypatch):
  """The experiment runs on the tiny pair with a given calibration; an oracle knows all rounds."""
  made = choose(0.8, costs(), LENGTHS)
  made = made._replace(gamma=2, c=made.c[:3], v=made.v[:3], speedups=made.speedups[:3])
  calibrated = mock.create_autospec(calibrate.calibrate, return_value=made)
  monkeypatch.setattr(bench_gamma, "calibrate", calibrated)
  lines, pair = [tiny_pair.SENTENCES[i] for i in (0, 33)], tiny_pair.pair()
  settings = dict(gammas=(1, 2), temperatures=(0.0,), batch_sizes=(1,), max_new_tokens=12)
  settings |= dict(thresholds=(0.0,))  # never stops: decodes as the largest gamma does
  stands, acceptances = [], bench_gamma.acceptances

  def noted(*args):
    return stands.extend(found := acceptances(*args)) or found

  monkeypatch.setattr(bench_gamma, "acceptances", noted)
  bench_gamma.gamma(pair, lines, str(tmp_path), **settings, repeats=1)
  measured = read(str(tmp_path / "results.jsonl"))
  by_name = {(r.models.draft.rpartition(", ")[2], r.settings.gamma): r for r in measured}
  names = [name for name, _ in by_name]
  assert names[:3] == ["oracle of a gamma", "oracle of each text", "oracle of each round"]
  assert names[-1] == "adaptive" and names.count("fixed") == 2 and "autoregressive" in names
  assert all(r.outputs.identical for r in measured if r.outputs.rounds)
  assert by_name["stops below 0", 2].outputs.rounds == by_name["fixed", 2].outputs.rounds
  assert by_name["confidence: entropy bound", 1].outputs.auc > 0.5
  for g in (1, 2):
    rounds = sum(oracles.times(row > 0.5, [1.0, 1.0, 1.0])[0][g] for row in stands)
    assert by_name["fixed", g].outputs.rounds == rounds
  assert set(np.concatenate(stands)) == {0.0, 1.0}
  for row in stands:  # with given costs, because noise may make measured ones negative
    fixed, best = oracles.times(row > 0.5, [1.0, 1.2, 1.4])
    assert best <= fixed.min() + 1e-9
  said = capsys.readouterr().out
  assert f"temperature 0, batch 1: {made}." in " ".join(said.split())
  bench_gamma.gamma(pair, lines, str(tmp_path), **settings, repeats=1)  # measured already
  assert read(str(tmp_path / "results.jsonl")) == measured and calibrated.call_count == 1


def test_auc_of_a_confidence_score():
  chances, scores = RNG.random(40).round(1), RNG.integers(0, 8, 40)
  pairs = [
    (a * (1 - b), 0.5 if x == y else float(x > y))
    for a, x in zip(chances, scores)
    for b, y in zip(chances, scores)
  ]
  weights, higher = zip(*pairs)
  assert auc(chances, scores) == pytest.approx(np.average(higher, weights=weights))
  stood = (RNG.random(40) < 0.5).astype(float)
  assert auc(stood, stood) == 1 and auc(stood, -stood) == 0
  rows = [np.array([0.5, 0.2, 0.1]), np.array([0.3]), np.array([0.4, 1.0])]
  np.testing.assert_allclose(in_a_row(rows, 2), [0.1, 0.02, 0.4])


def test_predicted_speed_of_stopping():
  """Never stopping equals a fixed gamma, always stopping gamma 1; the oracle lies between these."""
  texts = [(RNG.random(12) < 0.7).astype(float) for _ in range(20)]
  costs = (0.0, 0.3, 0.3, 0.3), (1.0, 1.1, 1.2, 1.3)
  known = Calibration(3, 0.7, *costs, speedups=(1.0,) * 4, starts=(2.0, 0.5))
  every = [known.round_cost(gamma) for gamma in range(4)]
  fixed, best = map(np.array, zip(*(oracles.times(row > 0.5, every) for row in texts)))

  def speed(rounds):
    return (12 * 20 + 20 * 2.0) / (20 * 2.5 + rounds)

  stopped = functools.partial(stopped_speedup, texts, texts, known, max_gamma=3)
  assert stopped(threshold=0.0) == pytest.approx(speed(fixed[:, 3].sum()))
  assert stopped(threshold=1.1) == pytest.approx(speed(fixed[:, 1].sum()))
  assert speed(fixed[:, 1:].sum(axis=0).min()) < stopped(threshold=0.5) < speed(best.sum())
