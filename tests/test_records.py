"""Test that records are read back unchanged, and that runs resume by the settings of records."""

import dataclasses
import datetime
import json
import math
import re

import numpy as np
import pytest

from specdec_jax.errors import InputError
from specdec_jax.measure import machine, records
from specdec_jax.measure.records import Machine, MeasurementSettings, Models, Record

# Documented fields of results.jsonl. A reader may rely on their names.
DOCUMENTED = {
  "models": "target draft target_path draft_path dtype kernels simulated",
  "settings": "task temperature top_k top_p gamma lenience batch_size num_examples "
  "distinct_texts baseline seed repeats",
  "machine": "platform device_kind",
  "outputs": "num_tokens alpha alpha_low alpha_high acceptance_rate tokens_per_round identical",
  "times": "target_step_ms draft_step_ms c verify_ms verify_cost predicted_theorem8 speedup "
  "predicted_measured_cost baseline_tokens_per_s speculative_tokens_per_s",
  "origin": "jax_version specdec_version commit seconds",
}
RECORD = Record(
  models=Models(target="t", draft="d", dtype="float32"),
  settings=MeasurementSettings(task="multi30k", temperature=0.0, gamma=5, batch_size=1, seed=0),
  machine=Machine(platform="cpu", device_kind="cpu"),
)
setting = RECORD.replace


@pytest.fixture
def path(tmp_path):
  return tmp_path / "results.jsonl"


def test_a_line_has_all_documented_fields(path):
  records.append(path, RECORD)
  line = json.loads(path.read_text())
  assert [*line] == [*DOCUMENTED]
  for group, names in DOCUMENTED.items():
    assert {*names.split()} <= line[group].keys()
  names = [name for group in line.values() for name in group]
  assert len(names) == len({*names})  # as `replace` needs


def test_appended_records_are_read_back(path):
  appended = [
    setting(alpha=0.1 + 0.2, identical=False, num_tokens=10**12, tree=(0, 0, 1)),
    setting(temperature=1, task="Käse \n\u2028 lines", acceptance_by_position=[0.5, None]),
  ]
  for record in appended:
    records.append(path, record)
  assert records.read(path) == appended
  assert path.read_text().count("\n") == 2


def test_replace_changes_fields_of_any_group():
  changed = setting(gamma=7, speedup=1.5, draft="other")
  assert (changed.settings.gamma, changed.times.speedup, changed.models.draft) == (7, 1.5, "other")
  assert changed.settings.temperature == 0 and changed.replace(gamma=5).settings == RECORD.settings
  with pytest.raises(TypeError, match="alhpa"):
    setting(alhpa=1)


def test_numpy_scalars_and_non_finite_numbers_become_plain_json(path):
  alpha = np.float32(0.7)
  values = dict(alpha=alpha, identical=np.bool_(True), c=math.nan, speedup=np.float64(math.inf))
  records.append(path, setting(**values))
  (read,) = records.read(path)
  assert (read.outputs.alpha, read.outputs.identical) == (float(alpha), True)
  assert read.times.c is None and read.times.speedup is None


@pytest.mark.parametrize(
  "line", ['{"models": {', "[1, 2]", '{"schema": 3, "setting": {}}', '{"models": {"alhpa": 1}}']
)
def test_line_that_is_not_a_record_is_reported(path, line):
  records.append(path, RECORD)
  with path.open("a") as file:
    file.write(line)
  with pytest.raises(InputError, match=r"results.jsonl, line 2 is not a record of this version"):
    records.read(path)


@pytest.mark.parametrize(
  "change",
  [
    dict(task="x"),
    dict(target="x"),
    dict(target_path="my/target"),
    dict(inputs_sha256="0123456789ab"),
    dict(tree=(0, 0)),
    dict(gamma=7),
    dict(baseline="hf"),
    dict(simulated=True),
    dict(device_kind="TPU v4"),
    dict(processor="EPYC"),
    dict(seed=1),
    dict(repeats=1),
  ],
  ids=str,
)
def test_different_settings_have_different_keys(change):
  assert setting(**change).key != RECORD.key


def test_old_record_without_the_number_of_distinct_texts_is_not_measured_again():
  assert setting(distinct_texts=3).key == RECORD.key


def test_results_do_not_change_the_key_and_neither_does_the_host_of_a_tpu():
  assert setting(alpha=0.5, speedup=2.0, commit="0123").key == RECORD.key
  tpu = setting(platform="tpu")
  assert tpu.key == tpu.replace(processor="Xeon", cores=96, threads=96).key


def test_provenance_and_device_description(tmp_path):
  provenance = machine.provenance()
  assert provenance["processor"] and 1 <= provenance["threads"] and 1 <= provenance["cores"]
  assert datetime.datetime.fromisoformat(provenance["date"]).tzinfo is not None
  assert provenance["commit"] is None or re.fullmatch(r"[0-9a-f]{10}\+?", provenance["commit"])
  cpuinfo = tmp_path / "cpuinfo"
  cpuinfo.write_text(
    "model name\t: AMD EPYC\ncpu family\t: 25\nmodel\t\t: 17\nflags\t\t: avx avx2 avx512f\n"
  )
  assert machine.processor(str(cpuinfo)) == "AMD EPYC (family 25, model 17), AVX-512"
  assert machine.processor(str(tmp_path / "none"))
  cpu = setting(processor="EPYC, AVX2", cores=2, threads=2)
  tpu = cpu.replace(platform="tpu", device_kind="TPU v4", num_devices=4)
  assert (RECORD.device, cpu.device, tpu.device) == ("cpu", "EPYC, AVX2, 2 cores", "TPU v4 x 4")
  assert cpu.replace(threads=1).device == "EPYC, AVX2, 2 cores, threads: 1"


def test_missing_skips_recorded_settings(path):
  wanted = [setting(gamma=gamma, temperature=t) for gamma in (3, 5) for t in (0.0, 1.0)]
  assert records.missing(path, wanted) == wanted  # no file yet
  records.append(path, wanted[1].replace(alpha=0.8, seconds=3.0))
  # 1 and 1.0 are the same temperature, as typed in a gin file.
  records.append(path, wanted[3].replace(temperature=1))
  assert records.missing(path, wanted) == [wanted[0], wanted[2]]
  other = dataclasses.replace(wanted[1], origin=records.Origin(commit="0123"))
  assert records.missing(path, [other]) == []


def test_results_path_creates_the_folder_and_fails_at_once_if_it_cannot_write(tmp_path):
  path = records.results_path(tmp_path / "a" / "b")
  assert records.read(path) == []
  records.append(path, RECORD)
  assert records.read(records.results_path(str(tmp_path / "a" / "b"))) == [RECORD]
  (tmp_path / "file").write_text("")
  with pytest.raises(NotADirectoryError):
    records.results_path(tmp_path / "file" / "results")
  with pytest.raises(FileNotFoundError):
    records.read(tmp_path / "nothing.jsonl")
