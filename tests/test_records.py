"""Test that records are appended completely or not at all, read unchanged, and resumed by key."""

import dataclasses
import datetime
import json
import math
import os
import re
import warnings

import numpy as np
import pytest

from specdec_jax.errors import InputError
from specdec_jax.measure import machine, records
from specdec_jax.measure.records import FIELDS_OF_SCHEMA_1, POLICIES_OF_SCHEMA_1, Record

# Documented fields of results.jsonl. A reader may rely on their names.
DOCUMENTED = (
  "task target draft temperature top_k top_p gamma lenience batch_size num_examples num_tokens "
  "alpha alpha_low alpha_high acceptance_rate tokens_per_round target_step_ms draft_step_ms c "
  "verify_ms verify_cost predicted_theorem8 predicted_measured_cost baseline "
  "baseline_tokens_per_s speculative_tokens_per_s speedup identical acceptance platform "
  "device_kind dtype jax_version specdec_version seed seconds"
).split()


def setting(**changes) -> Record:
  fields = dict(
    task="multi30k",
    target="t",
    draft="d",
    temperature=0.0,
    gamma=5,
    batch_size=1,
    platform="cpu",
    device_kind="cpu",
    dtype="float32",
    seed=0,
  )
  return Record(**(fields | changes))


@pytest.fixture
def path(tmp_path):
  return tmp_path / "results.jsonl"


def test_records_have_all_documented_fields():
  assert set(DOCUMENTED) <= {field.name for field in dataclasses.fields(Record)}


def test_appended_records_are_read_back(path):
  appended = [
    setting(alpha=0.1 + 0.2, identical=True, num_tokens=10**12),
    setting(temperature=1.0, task="Käse \n in two lines"),
  ]
  for record in appended:
    records.append(path, record)
  assert records.read(path) == appended
  assert path.read_text().count("\n") == 2


def test_fields_are_grouped_in_the_file(path):
  records.append(path, setting(alpha=0.5, speedup=1.5, metric="BLEU", commit="0123"))
  line = json.loads(path.read_text())
  assert [*line] == ["schema", "setting", "outputs", "timings", "quality", "provenance"]
  assert line["setting"]["gamma"] == 5 and line["outputs"]["alpha"] == 0.5
  assert line["timings"]["speedup"] == 1.5 and line["quality"]["metric"] == "BLEU"
  assert line["provenance"]["commit"] == "0123" and line["schema"] == records.SCHEMA
  fields = sum((list(group) for group in line.values() if isinstance(group, dict)), ["schema"])
  assert sorted(fields) == sorted(field.name for field in dataclasses.fields(Record))


def test_records_of_schema_2_are_read(path):
  """Schema 2 has the same fields as the current schema, but the fields are not grouped."""
  record = setting(alpha=0.5, speedup=1.5)
  path.write_text(json.dumps(dataclasses.asdict(record) | {"schema": 2}) + "\n")
  assert records.read(path) == [record] and records.missing(path, [record]) == []


def test_record_without_recent_fields_is_read(path):
  records.append(path, setting(verify_ms=5.3, verify_cost=1.9))
  values = json.loads(path.read_text())
  for name in ("accept_ms", "unaccounted_ms", "round_ms", "operations_ratio", "operations_factor"):
    del values["timings"][name]
  path.write_text(json.dumps(values) + "\n")
  assert records.read(path) == [setting(verify_ms=5.3, verify_cost=1.9)]


def schema_1(record):
  """Return the line of a record in schema 1."""
  old_names = {new: old for old, new in FIELDS_OF_SCHEMA_1.items()}
  values = {old_names.get(name, name): x for name, x in dataclasses.asdict(record).items()}
  beam_nodes = values.pop("beam_nodes")
  values["dynamic_nodes"] = values["dynamic_nodes"] or beam_nodes
  values["rule"] = values["rule"].replace("Verifier", "Rule")
  return json.dumps(values | {"schema": 1}) + "\n"


def test_records_of_schema_1_are_read(path):
  measured = dict(inputs_sha256="0123456789ab", auc=0.75, target_prefill_ms=4.0)
  measured |= dict(draft_prefill_ms=1.0, unaccounted_ms=-0.5, predicted_finite_length=1.5)
  current = [
    setting(verifier="BlockVerifier", **measured),
    setting(dynamic_nodes=31),
    setting(beams=4, draft_beams=8, beam_nodes=36),
  ]
  lines = [*map(schema_1, current)]
  for old_name in FIELDS_OF_SCHEMA_1:
    assert f'"{old_name}"' in lines[0]
  assert "BlockRule" in lines[0] and '"dynamic_nodes": 36' in lines[2]
  path.write_text("".join(lines))
  assert records.read(path) == current
  assert records.missing(path, current) == []


def test_policies_of_schema_1_have_their_current_names(path):
  for old, new in POLICIES_OF_SCHEMA_1.items():
    path.write_text(schema_1(setting(draft=f"near{old}")))
    assert [record.draft for record in records.read(path)] == [f"near{new}"]


def test_numpy_scalars_and_non_finite_numbers_become_plain_json(path):
  def fail(name):
    raise AssertionError(f"{name} is not JSON")

  alpha = np.float32(0.7)
  record = setting(alpha=alpha, identical=np.bool_(True), c=math.nan, speedup=np.float64(math.inf))
  records.append(path, record)
  values = json.loads(path.read_text(), parse_constant=fail)
  assert values["outputs"]["alpha"] == float(alpha) and values["outputs"]["identical"] is True
  assert values["timings"]["c"] is None and values["timings"]["speedup"] is None
  assert records.read(path)[0].c is None


def test_failed_append_leaves_the_file_unchanged(path, monkeypatch):
  records.append(path, setting())
  before = path.read_bytes()
  with pytest.raises(TypeError):
    records.append(path, setting(task=object()))
  assert path.read_bytes() == before

  real_write, calls = os.write, []

  def full_disk(fd, data):  # writes half, then fails, like write(2) on a full disk
    calls.append(len(data))
    if len(calls) == 1:
      return real_write(fd, data[: len(data) // 2])
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "write", full_disk)
  with pytest.raises(OSError, match="No space left"):
    records.append(path, setting(seed=1))
  assert len(calls) == 2
  assert path.read_bytes() == before


def test_append_writes_a_record_in_one_call(path, monkeypatch):
  real_write, calls = os.write, []
  monkeypatch.setattr(os, "write", lambda fd, data: calls.append(data) or real_write(fd, data))
  records.append(path, setting())
  assert len(calls) == 1 and calls[0].endswith(b"}\n")


def test_incomplete_last_line_is_dropped_wherever_it_is_cut(path):
  first, second, third = setting(task="ä"), setting(seed=1), setting(seed=2)
  records.append(path, first)
  whole = path.read_bytes()
  records.append(path, second)
  torn = path.read_bytes()[len(whole) : -1]
  for cut in {*range(1, len(torn), 23), len(torn) - 1}:
    path.write_bytes(whole + torn[:cut])
    with pytest.warns(UserWarning, match=f"dropped {cut} characters of an incomplete record"):
      assert records.read(path) == [first]
    with pytest.warns(UserWarning, match="its setting is measured again"):
      records.append(path, third)
    assert records.read(path) == [first, third]


def test_incomplete_last_line_may_end_inside_a_character(path):
  path.write_bytes('{"task": "ä'.encode()[:-1])
  with pytest.warns(UserWarning, match="an incomplete record"):
    assert records.read(path) == []


def test_complete_last_line_without_newline_is_read(path):
  records.append(path, setting())
  path.write_bytes(path.read_bytes()[:-1])
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert records.read(path) == [setting()]
    records.append(path, setting(seed=1))
  assert records.read(path) == [setting(), setting(seed=1)]


def test_unknown_schema_is_reported(path):
  records.append(path, setting())
  values = json.loads(path.read_text()) | {"schema": 99}
  values["provenance"]["specdec_version"] = "7.0.0"
  path.write_text(path.read_text() + json.dumps(values) + "\n")
  with pytest.raises(
    InputError, match=r"line 2: a record of schema 99.*reads schema 1 to 3.*7\.0\.0"
  ):
    records.read(path)


@pytest.mark.parametrize(
  "line, message",
  [
    ("[1, 2]", "line 1: not a JSON object"),
    ("{half", "line 1: not a JSON object"),
    ('{"schema": 1, "task": "x"}', "line 1: not a record of schema 3: missing"),
    ('{"schema": 3, "setting": {}}', "line 1: a record of schema 3 has the objects setting, out"),
    ('{"alhpa": 1}', "line 1: a record of schema None"),
  ],
)
def test_line_that_is_not_a_record_is_reported(path, line, message):
  path.write_text(line + "\n")
  with pytest.raises(InputError, match=message):
    records.read(path)


def test_unknown_field_is_reported(path):
  values = dataclasses.asdict(setting()) | {"alhpa": 0.5, "schema": 2}
  path.write_text(json.dumps(values) + "\n")
  with pytest.raises(InputError, match="alhpa"):
    records.read(path)


@pytest.mark.parametrize(
  "field, value, expected",
  [
    ("seconds", math.inf, "not a JSON object"),
    ("alpha", math.nan, "not a JSON object"),
    ("alpha", 10**400, "not a JSON object"),
    ("schema", [1], "a record of schema [1]"),
  ],
)
def test_invalid_value_is_reported_with_its_line(path, field, value, expected):
  records.append(path, setting())
  values = json.loads(path.read_text())
  groups = [group for group in values.values() if isinstance(group, dict) and field in group]
  (groups or [values])[0][field] = value
  path.write_text(path.read_text() + json.dumps(values) + "\n")
  with pytest.raises(InputError) as error:
    records.read(path)
  assert f"{path}, line 2: " in str(error.value) and expected in str(error.value)
  assert len(str(error.value)) < 400 + len(str(path))


def test_deeply_nested_brackets_are_not_a_record(path):
  deep = b'{"task": ' + b"[" * 100_000 + b"\n"
  path.write_bytes(deep)
  with pytest.raises(InputError, match="line 1: not a JSON object"):
    records.read(path)
  path.write_bytes(deep.rstrip())
  with pytest.warns(UserWarning, match="an incomplete record"):
    assert records.read(path) == []


def test_every_field_type_is_read_back(path):
  record = setting(acceptance_by_position=[0.5, None], identical=False, temperature=1, alpha=0)
  records.append(path, record)
  assert records.read(path) == [record]


@pytest.mark.parametrize(
  "change",
  [
    dict(task="x"),
    dict(target="x"),
    dict(draft="x"),
    dict(target_path="my/target"),
    dict(draft_path="my/draft"),
    dict(inputs_sha256="0123456789ab"),
    dict(dynamic_nodes=31),
    dict(beam_nodes=31),
    dict(temperature=1.0),
    dict(top_k=40),
    dict(top_p=0.9),
    dict(gamma=7),
    dict(lenience=0.5),
    dict(batch_size=8),
    dict(baseline="hf"),
    dict(acceptance="simulated"),
    dict(platform="tpu"),
    dict(device_kind="TPU v4"),
    dict(processor="EPYC"),
    dict(cores=8),
    dict(threads=1),
    dict(dtype="bfloat16"),
    dict(seed=1),
  ],
  ids=str,
)
def test_different_settings_have_different_keys(change):
  assert records.key(setting()) != records.key(setting(**change))


def test_bundled_paths_are_not_part_of_the_key():
  paths = {
    f"{role}_path": f"specdec_jax/assets/multi30k_ende/{role}" for role in ("target", "draft")
  }
  assert records.key(setting(**paths)) == records.key(setting())


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
  tpu = dataclasses.replace(cpu, platform="tpu", device_kind="TPU v4", num_devices=4)
  assert (setting().device, cpu.device, tpu.device) == ("cpu", "EPYC, AVX2, 2 cores", "TPU v4 x 4")
  assert dataclasses.replace(cpu, threads=1).device == "EPYC, AVX2, 2 cores, threads: 1"
  # The host of a TPU is not part of the key.
  assert records.key(tpu) == records.key(dataclasses.replace(tpu, processor="Xeon", cores=96))


def test_missing_skips_recorded_settings(path):
  wanted = [setting(gamma=gamma, temperature=t) for gamma in (3, 5) for t in (0.0, 1.0)]
  assert records.missing(path, wanted) == wanted  # no file yet
  records.append(path, dataclasses.replace(wanted[1], alpha=0.8, seconds=3.0))
  # 1 and 1.0 are the same temperature, as typed in a gin file.
  records.append(path, dataclasses.replace(wanted[3], temperature=1))
  assert records.missing(path, wanted) == [wanted[0], wanted[2]]


def test_open_results_creates_the_folder_and_drops_an_incomplete_line(tmp_path):
  with records.open_results(tmp_path / "a" / "b") as path:
    assert records.read(path) == []
    records.append(path, setting())
  with open(path, "a") as f:
    f.write('{"task": ')
  with pytest.warns(UserWarning, match="dropped 9 characters"):
    with records.open_results(tmp_path / "a" / "b") as again:
      assert again == path
  assert records.read(path) == [setting()]


def test_open_results_fails_at_once_if_it_cannot_write(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(NotADirectoryError):
    with records.open_results(tmp_path / "file" / "results"):
      pass
  with pytest.raises(FileNotFoundError):
    records.read(tmp_path / "nothing.jsonl")
