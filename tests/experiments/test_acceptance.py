"""Test the run of Table 3: alpha of several drafts on one target's text, resumption, and table."""

import pytest
import tiny_pair

from experiments.table3.acceptance import acceptance
from specdec_jax.core.sampling import Sampling
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.measure import records

TEXTS = tiny_pair.SENTENCES[:6]
SAMPLINGS = [Sampling(0.0), Sampling(1.0, top_k=5)]


def run(output, drafts, samplings=SAMPLINGS, **changes):
  settings = dict(gamma=3, batch_size=2, max_new_tokens=10, min_tokens=30, **changes)
  acceptance(tiny_pair.pair("near"), TEXTS, str(output), samplings, drafts, **settings)
  return records.read(output / "results.jsonl")


def test_each_draft_and_sampling_is_one_record_and_is_measured_once(tmp_path, capsys):
  measured = run(tmp_path, [prompt_lookup], SAMPLINGS[:1])
  assert [(r.models.draft, r.settings.temperature, r.settings.top_k) for r in measured] == [
    (draft, 0.0, 0) for draft in ("near", "copy-3")
  ]
  before = (tmp_path / "results.jsonl").read_bytes()
  assert len(run(tmp_path, [])) == 3  # alpha of prompt lookup is not measured
  after = (tmp_path / "results.jsonl").read_bytes()
  assert after.startswith(before)
  out = capsys.readouterr().out
  for r in records.read(tmp_path / "results.jsonl"):
    assert 0 <= r.outputs.alpha_low <= r.outputs.alpha <= r.outputs.alpha_high <= 1 + 1e-6
    assert len(r.outputs.acceptance_by_position) == 3 and r.outputs.num_tokens >= 30
    assert f"{r.outputs.alpha:.3f} [{r.outputs.alpha_low:.3f},{r.outputs.alpha_high:.3f}]" in out
    assert r.outputs.rejection_sampling_rate <= r.outputs.alpha + 1e-6
    assert f" {r.outputs.rejection_sampling_rate:.3f} " in out
    assert r.outputs.identical is (True if r.settings.temperature == 0 else None)
    assert r.times.speedup is None  # nothing was timed
  near = {
    r.settings.temperature: r.outputs.alpha
    for r in records.read(tmp_path / "results.jsonl")
    if r.models.draft == "near"
  }
  assert min(near.values()) > 0.3
  # At temperature 0 each token counts 0 or 1, so alpha is a whole number of tokens.
  greedy = measured[0]
  assert greedy.outputs.alpha == pytest.approx(
    round(greedy.outputs.alpha * greedy.outputs.num_tokens) / greedy.outputs.num_tokens
  )


def test_lenience_raises_acceptance_and_records_the_changed_tokens(tmp_path):
  measured = run(tmp_path, [], SAMPLINGS[1:], leniences=(1.0, 0.3))
  sampled = {r.settings.lenience: r for r in measured}
  assert sampled[1].outputs.total_variation == pytest.approx(0, abs=1e-5)
  assert sampled[0.3].outputs.total_variation > 0.01
  assert sampled[0.3].outputs.alpha > sampled[1].outputs.alpha
