"""Test sweeps: missing settings are measured and recorded, and all settings are shown."""

import pytest
import tiny_pair

from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.measure import records
from specdec_jax.measure.records import settings_to_measure
from specdec_jax.measure.sweep import Step, sweep
from specdec_jax.measure.tables import Table


@pytest.fixture
def settings():
  return settings_to_measure(
    tiny_pair.pair(), ["A man"], [DecodeSettings(Sampling(0.0))], [1, 2, 3]
  )


def test_every_filter_identifies_a_setting():
  names = "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_p"
  samplings = [Sampling(), *(Sampling(**{name: 0.1}) for name in names)]
  found = settings_to_measure(tiny_pair.pair(), ["A man"], map(DecodeSettings, samplings), [3])
  assert len({each.key for each in found}) == len(samplings)


def table_of(measured):
  cells = tuple((str(r.settings.gamma), str(r.outputs.alpha)) for r in measured)
  return [Table("title", ("gamma", "alpha"), cells, ())]


def test_interrupted_sweep_resumes_and_shows_all_records(settings, tmp_path, capsys):
  measured, fail_at = [], [2]

  def measure(wanted, report):
    for i, setting in enumerate(wanted):
      if setting.settings.gamma in fail_at:
        raise RuntimeError("killed")
      measured.append(setting.settings.gamma)
      yield setting.replace(alpha=setting.settings.gamma / 10)
      report((i + 1) / len(wanted))

  steps = [Step("first", settings[:1], measure), Step("second", settings[1:], measure)]
  with pytest.raises(RuntimeError):
    sweep(str(tmp_path), steps, table_of, lambda rows: f"page of {len(rows)}")
  assert "measuring 3 of 3 settings" in capsys.readouterr().err
  assert not (tmp_path / "report.html").exists()
  fail_at.clear()
  sweep(str(tmp_path), lambda: steps, table_of, lambda rows: f"page of {len(rows)}")
  captured = capsys.readouterr()
  assert "measuring 2 of 3 settings" in captured.err and measured == [1, 2, 3]
  assert [line.split() for line in captured.out.splitlines() if "0." in line] == [
    ["1", "0.1"],
    ["2", "0.2"],
    ["3", "0.3"],
  ]
  assert (tmp_path / "report.html").read_text() == "page of 3"
  sweep(str(tmp_path), steps, table_of)
  assert "all settings were measured before" in capsys.readouterr().err and measured == [1, 2, 3]
  assert [r.settings.gamma for r in records.read(tmp_path / "results.jsonl")] == [1, 2, 3]


def test_folder_that_cannot_be_written_raises_before_the_steps(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError):
    sweep(str(tmp_path / "file"), lambda: pytest.fail("steps were made"), table_of)
