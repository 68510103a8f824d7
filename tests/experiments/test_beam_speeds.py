"""Test the comparison of speculative with plain beam search."""

import numpy as np
import pytest
import tiny_pair

from experiments.beams import beams as bench_beams
from specdec_jax.beams import (
  BeamResult,
)
from specdec_jax.measure import records


def result_of(tokens, scores) -> BeamResult:
  """Return a result with texts of one token."""
  tokens = np.asarray(tokens)[..., None]
  ones = np.ones(tokens.shape[:2], int)
  return BeamResult(tokens, ones, np.asarray(scores), ones, ones[0, 0], ones[0])


def test_only_texts_with_equal_scores_may_change_places():
  plain = result_of([[3, 4, 5]] * 6, [[-1.0, -2.0, -2.0]] * 6)
  others = result_of(
    [[3, 4, 5], [3, 5, 4], [4, 3, 5], [3, 4, 6], [6, 4, 5], [3, 4, 5]],
    [[-1.0, -2.0, -2.0]] * 5 + [[-1.0, -2.0, -2.1]],
  )
  same, tied = bench_beams.compare(plain, others)
  assert same.tolist() == [True, True, False, True, False, False]
  assert tied.tolist() == [False, True, False, True, False, False]


def test_speculative_search_is_measured_against_plain_search(tmp_path, capsys):
  texts, pair = tiny_pair.SENTENCES[:5], tiny_pair.pair()
  settings = dict(
    beam_sizes=[2], draft_beam_factors=[2], gammas=[2], batch_size=2, max_new_tokens=10
  )
  bench_beams.beams(pair, texts, str(tmp_path), **settings, repeats=1, references=texts)
  measured = records.read(str(tmp_path / "results.jsonl"))
  assert [(r.settings.beams, r.settings.draft_beams, r.settings.gamma) for r in measured] == [
    (2, 4, 2)
  ]
  for r in measured:
    assert r.outputs.identical and r.outputs.ties == 0 and 1 < r.outputs.tokens_per_round <= 3
    assert r.times.speedup > 0 and r.times.predicted_measured_cost == pytest.approx(
      r.outputs.tokens_per_round * r.times.target_step_ms / r.times.round_ms
    )
    assert r.outputs.quality == r.outputs.baseline_quality and r.settings.num_examples == 5
  plain = tmp_path / "plain"
  plain_settings = settings | dict(draft_beam_factors=[1], gammas=[0])
  bench_beams.beams(pair, texts, str(plain), **plain_settings, repeats=0)
  (r,) = records.read(str(plain / "results.jsonl"))
  assert (
    r.settings.gamma,
    r.settings.beam_nodes,
    r.outputs.tokens_per_round,
    r.outputs.identical,
  ) == (0, 2, 1.0, True)
  bench_beams.beams(pair, texts, str(tmp_path), **settings, repeats=1)
  assert len(records.read(str(tmp_path / "results.jsonl"))) == 1, "no setting is measured twice"
  assert "speedup" in capsys.readouterr().out
  counted = tmp_path / "counted"
  bench_beams.beams(pair, texts, str(counted), **settings, repeats=0, references=texts)
  for untimed, r in zip(records.read(str(counted / "results.jsonl")), measured, strict=True):
    assert untimed.outputs == r.outputs and untimed.settings == r.replace(repeats=None).settings
    assert untimed.times.speedup is None
