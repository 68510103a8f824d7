"""Test the comparison of drafts: which drafts are measured, and their table, page and figure."""

import functools

import numpy as np
import tiny_pair

from experiments.drafts import drafts as bench_drafts
from experiments.figures.figures import drafts_figure
from experiments.lib.tables import named_table
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.gumbel import GumbelVerifier
from specdec_jax.drafts.layer_skip import layer_skip
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.measure import records, speed


def test_drafts_are_measured_and_shown(tmp_path, capsys, monkeypatch):
  """The measurement of a pair is tested in test_measure.py."""

  def invent(pair, prompts, settings, wanted, speed):
    for setting in wanted:
      i = 2 + round(setting.settings.temperature)
      found = dict(tokens_per_round=2.5, speedup=0.5 * i, draft_mb=0.0, identical=i == 2 or None)
      yield setting.replace(**found)

  monkeypatch.setattr(speed, "measure_speed", lambda *args: None)
  monkeypatch.setattr(speed, "_records", invent)
  others = [prompt_lookup, functools.partial(layer_skip, layers=[0])]
  both = [(prompt_lookup, GumbelVerifier)]
  how = dict(verifiers=[BlockVerifier], drafts_with_verifiers=both, gamma=2)
  for _ in range(2):
    bench_drafts.compare_drafts(tiny_pair.pair(), ["Ein Hund."], str(tmp_path), others, **how)
  measured = records.read(results := str(tmp_path / "results.jsonl"))

  def of(draft):
    return [(draft, "TokenVerifier", 0.0), (draft, "TokenVerifier", 1.0)]

  names = [(r.models.draft, r.settings.verifier, r.settings.temperature) for r in measured]
  blocks = [("near", "BlockVerifier", 1.0)]
  with_verifier = [("copy-3", "GumbelVerifier", temperature) for temperature in (0.0, 1.0)]
  assert names == [*of("near"), *blocks, *of("copy-3"), *of("layers 0"), *with_verifier]
  rows, said = named_table("drafts", [results]).rows, capsys.readouterr().out
  assert [row[:2] for row in rows[:2]] == [("near", "Token"), ("near", "Block")]
  shown = dict(zip(bench_drafts.drafts_table(measured).columns, rows[0]))
  assert (shown["speedup, T = 0"], shown["speedup, T = 1"], shown["identical"]) == (
    "1.00",
    "1.50",
    "yes",
  )
  assert dict(zip(shown, rows[1]))["length, T = 0"] == "-" and "layers 0" in said
  page = (tmp_path / "report.html").read_text()
  assert "near, BlockVerifier" in page and page.count("<figure>") == 2
  cold, warm = drafts_figure(measured).axes
  np.testing.assert_allclose(cold.collections[0].get_offsets(), [(2.5, 2.5)])
  assert len(warm.collections) == 5 and len(cold.collections) == 4
