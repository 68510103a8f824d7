"""Test that the outputs of `decode` depend neither on workers nor on interruptions.

One test runs two worker processes, and one kills a process with SIGKILL while it writes a shard.
Other pipelines run in this process.
"""

import fcntl
import gzip
import importlib
import json
import multiprocessing
import pathlib
import signal
import types

import gin
import jax
import pytest
import tiny_pair

from specdec_jax import run as command_line
from specdec_jax.commands.decode import decode
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.trees import chain
from specdec_jax.errors import InputError
from specdec_jax.files.records import count_records
from specdec_jax.measure import calibrate

pytest.importorskip("apache_beam", reason="Apache Beam is not installed")
beam_pipeline = importlib.import_module("specdec_jax.files.beam_pipeline")

pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).resolve().parent
BATCH, LIMIT, GAMMA = 3, 12, 3
TEXTS = [*tiny_pair.SENTENCES[:10], "", *tiny_pair.SENTENCES[10:21]]  # the last batch has one text
SAMPLED = dict(temperature=1.0, max_new_tokens=LIMIT)
SETTINGS = dict(generation=GenerationConfig(**SAMPLED), gamma=GAMMA, batch_size=BATCH)
WIDTH = 8  # source tokens: the rest is cut


def load_tiny_pair():
  return tiny_pair.pair(max_source_tokens=WIDTH)


def fail_to_load():
  raise InputError("no such pair; give another.")


def run(output_dir, texts=TEXTS, load_pair=load_tiny_pair, **settings):
  decode(load_pair, texts, str(output_dir), **{**SETTINGS, "num_shards": 4, **settings})


def outputs(folder) -> bytes:
  """Return the outputs of all shards. No other files may be left."""
  files = sorted(path.name for path in folder.iterdir())
  shards = [name for name in files if name.startswith("outputs-")]
  assert {*files} - {*shards} == {"run.json"}
  assert shards == [f"outputs-{i:05}-of-{len(shards):05}.jsonl" for i in range(len(shards))]
  return b"".join((folder / name).read_bytes() for name in shards)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
  """Return the folder of a finished run. Tests do not change it."""
  folder = tmp_path_factory.mktemp("finished")
  run(folder)
  return folder


@pytest.fixture
def copied(finished, tmp_path) -> pathlib.Path:
  """Return a copy of the folder of a finished run."""
  for path in finished.iterdir():
    (tmp_path / path.name).write_bytes(path.read_bytes())
  return tmp_path


def test_records_counters_and_summary_are_those_of_generate(finished, tmp_path, capsys):
  records = [json.loads(line) for line in outputs(finished).splitlines()]
  found = [(r["decoded"]["index"], r["source"]) for r in records]
  assert found == [*enumerate(TEXTS)]
  lengths = [path.read_bytes().count(b"\n") for path in sorted(finished.glob("outputs-*"))]
  assert lengths == [6, 6, 6, 4]
  own = load_tiny_pair().generate(TEXTS, gamma=GAMMA, **SAMPLED)
  own = [(output.text, output.tokens.tolist()) for text, output in zip(TEXTS, own) if text]
  decoded = [r["decoded"] for r in records]
  assert [(each["text"], each["tokens"]) for each in decoded if each["index"] != 10] == own
  assert records[10] == dict(source="", decoded=decoded[10])
  assert decoded[10] == dict(index=10, text="", tokens=[], rounds=0, draft_tokens=0, accepted=0)
  counts = count_records(records)
  rate = counts["accepted"] / counts["draft_tokens"]
  assert 0.1 < rate < 0.95
  handler = beam_pipeline.SpeculativeModelHandler(
    load_tiny_pair, tree=chain(GAMMA), batch_size=BATCH, **SAMPLED
  )
  shards = []
  for first in (0, 9, 18):
    shards.append((f"{tmp_path}/inputs-{first}", f"{tmp_path}/outputs-{first}", first))
    beam_pipeline.write_records(shards[-1][0], records[first : first + 9])
  result = beam_pipeline.decode_shards(handler, shards, "DirectRunner")
  found = result.metrics().query()["counters"]
  counters = {c.key.metric.name: c.committed for c in found if c.key.metric.namespace == "specdec"}
  assert counters == counts
  run(finished)
  passes = counts["tokens"] / counts["rounds"]
  summary = f"22 texts, {counts['tokens']} tokens, {passes:.2f} tokens per target pass, "
  assert capsys.readouterr().out == f"{summary}acceptance rate {rate:.3f}: {finished}\n"


def test_outputs_depend_neither_on_shards_nor_on_input_files(finished, tmp_path, monkeypatch):
  (tmp_path / "part-0.jsonl").write_text("".join(f'{{"source": "{t}"}}\n' for t in TEXTS[:4]))
  monkeypatch.chdir(tmp_path)
  lines = "".join(f"{text}\r\n" for text in TEXTS[4:11])
  (tmp_path / "part-1.txt.gz").write_bytes(gzip.compress(lines.encode()))
  (tmp_path / "part-2.txt").write_text("\n".join([*TEXTS[11:], "A dog"]), "utf-8-sig")
  folder, pattern = tmp_path / "out", "part-*"
  with pytest.raises(InputError, match="^no such pair; give another."):  # Beam adds the step
    run(folder, pattern, load_pair=fail_to_load)
  with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="interrupted"):
    patch.setattr("specdec_jax.files.records.outputs", interrupted)
    run(folder, pattern, seed=1)
  # A run without outputs does not bind the next run.
  assert (folder / "run.json").read_text() and not [*folder.glob("outputs-*.jsonl")]
  run(folder, pattern, num_shards=10, num_texts=len(TEXTS))
  assert outputs(folder) == outputs(finished)


def test_fields_of_json_lines_and_prefix(tmp_path):
  fields = [{"source": "A man \u00e4", "index": "mine"}, {"text": "Two dogs", "tokens": 3}]
  (tmp_path / "in.ndjson").write_text("".join(json.dumps(each) + "\n" for each in fields))
  run(tmp_path / "out", str(tmp_path / "in.ndjson"), num_shards=1, prefix="The ")
  lines = outputs(tmp_path / "out").decode().splitlines()
  found = [json.loads(line) for line in lines]
  texts = [each.pop("decoded")["text"] for each in found]
  assert found == fields and "A man \u00e4" in lines[0]
  own = load_tiny_pair().generate(["The A man \u00e4", "The Two dogs"], gamma=GAMMA, **SAMPLED)
  assert texts == [*map(str, own)]


def test_field_decoded_is_reported_before_a_pair_is_loaded(tmp_path):
  (tmp_path / "in.jsonl").write_text('{"source": "A man", "decoded": 1}\n')
  with pytest.raises(InputError, match="in.jsonl, line 1 has the field 'decoded'"):
    run(tmp_path / "out", str(tmp_path / "in.jsonl"), load_pair=fail_to_load)


def test_worker_processes_of_the_command_write_the_same_outputs(finished, tmp_path, monkeypatch):
  model = tiny_pair.folder()
  (tmp_path / "in.txt").write_text("\n".join(TEXTS) + "\n")
  settings = {
    "INPUT": str(tmp_path / "in.txt"),
    "OUTPUT_DIR": str(tmp_path / "out"),
    "PIPELINE_OPTIONS": ["--direct_running_mode=multi_processing", "--direct_num_workers=2"],
    "NUM_SHARDS": 4,
    "GAMMA": GAMMA,
    "TEMPERATURE": 1.0,
    "BATCH_SIZE": BATCH,
    "MAX_NEW_TOKENS": LIMIT,
    "load.load_pair.target": str(model / "target"),
    "load.load_pair.draft": str(model / "near"),
    "load.load_pair.vocabulary": str(model / "vocabulary.model"),
    "load.load_pair.task": "tiny",
    "load.load_pair.max_source_tokens": WIDTH,
  }
  monkeypatch.setenv("PYTHONPATH", str(HERE.parent))
  try:
    bindings = [f"{name} = {value!r}" for name, value in settings.items()]
    command_line.parse_gin(["gin/runs/decode.gin"], bindings, [])
    gin.get_configurable(command_line.run)()
  finally:
    gin.clear_config()
  assert outputs(tmp_path / "out") == outputs(finished)


def write_and_be_killed(path: str, records: list[dict]) -> None:
  """Write some of the records of a shard, then end this process as a worker that is killed ends."""

  def unfinished():
    yield from records[:2]
    signal.raise_signal(signal.SIGKILL)

  beam_pipeline.write_records(path, unfinished())


# The forked process does not use JAX.
@pytest.mark.filterwarnings("ignore:os.fork")
def test_command_resumes_after_a_worker_was_killed_while_it_wrote(finished, tmp_path, monkeypatch):
  settings, calibration = dict(gamma="auto", num_shards=8), types.SimpleNamespace(tree=chain(GAMMA))
  monkeypatch.setattr(calibrate, "get_or_compute", lambda *_, num_texts: (calibration, ""))
  run(tmp_path, **settings)
  shard = tmp_path / "outputs-00005-of-00008.jsonl"
  records = [*beam_pipeline.read_records(str(shard))]
  shard.unlink()
  worker = multiprocessing.get_context("fork").Process(
    target=write_and_be_killed, args=(str(shard), records), daemon=True
  )
  worker.start()
  worker.join(60)
  assert worker.exitcode == -signal.SIGKILL
  assert len([*tmp_path.glob("outputs-*.part")]) == 1 and not shard.exists()
  times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("outputs-*.jsonl")}
  # The tree that the first run has chosen is used again.
  calibration.tree = chain(1)
  run(tmp_path, **settings)
  assert outputs(tmp_path) == outputs(finished)
  assert {path: path.stat().st_mtime_ns for path in times} == times


def interrupted(*args, **kwargs):
  raise RuntimeError("interrupted")


def test_finished_shards_are_not_decoded_again(copied, finished, monkeypatch):
  monkeypatch.setattr("specdec_jax.files.records.outputs", interrupted)
  run(copied)
  assert outputs(copied) == outputs(finished)
  (copied / "outputs-00002-of-00004.jsonl").unlink()
  with pytest.raises(RuntimeError, match="interrupted"):
    run(copied)


def load_changed_pair():
  """Return the pair that `load_tiny_pair` returns after its weights were replaced."""
  pair = load_tiny_pair()
  return pair.with_target(params=jax.tree.map(lambda x: x * 2, pair.target.params))


class Replaced:
  """Function that loads one pair the first time, and then another one."""

  calls = 0

  def __call__(self):
    Replaced.calls += 1
    return load_tiny_pair() if Replaced.calls == 1 else load_changed_pair()


def test_worker_that_loads_another_pair_writes_no_outputs(tmp_path):
  with pytest.raises(InputError, match="target_weights .* all workers need the same checkpoints"):
    run(tmp_path, load_pair=Replaced())
  assert Replaced.calls == 2 and not [*tmp_path.glob("outputs-*.jsonl")]


def test_two_runs_cannot_write_to_one_folder(copied, finished):
  with (copied / "run.json").open() as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(InputError, match=f"another run is writing to {copied}; wait"):
      run(copied)
  run(copied)
  assert outputs(copied) == outputs(finished)


def test_outputs_without_a_job_are_kept(copied):
  before = outputs(copied)
  (copied / "run.json").write_text("")
  with pytest.raises(
    InputError, match="run.json does not begin with the job .* choose another output"
  ):
    run(copied)
  assert outputs(copied) == before


@pytest.mark.parametrize(
  "name, other",
  [
    ("seed", dict(seed=1)),
    ("gamma", dict(gamma=2)),
    ("temperature", dict(generation=GenerationConfig(max_new_tokens=LIMIT))),
    ("top_k", dict(generation=GenerationConfig(top_k=3, **SAMPLED))),
    ("num_shards", dict(num_shards=3)),
    ("max_source_tokens", dict(load_pair=tiny_pair.pair)),
    ("target_weights", dict(load_pair=load_changed_pair)),
    ("sources", dict(num_texts=None, texts=[*TEXTS[:-1], "Zwei"])),
  ],
)
def test_other_settings_in_the_same_folder_raise(copied, finished, name, other):
  with pytest.raises(InputError, match=f"run.json is of a run with {name} .* another OUTPUT_DIR"):
    run(copied, **other)
  assert outputs(copied) == outputs(finished)


def test_other_fields_or_another_prefix_in_the_same_folder_raise(tmp_path):
  def decode_record(number=0, prefix=""):
    (tmp_path / "in.jsonl").write_text(f'{{"text": "A man", "id": {number}}}\n')
    run(tmp_path / "out", str(tmp_path / "in.jsonl"), prefix=prefix)

  decode_record()
  before = outputs(tmp_path / "out")
  with pytest.raises(InputError, match="run.json is of a run with sources "):
    decode_record(number=1)
  with pytest.raises(InputError, match="run.json is of a run with prefix ''"):
    decode_record(prefix="The ")
  assert outputs(tmp_path / "out") == before


@pytest.mark.parametrize(
  "settings, message",
  [
    (dict(texts="gone-*.txt"), "There is no text file at gone-"),
    (dict(runner="NoRunner"), "runner is 'NoRunner': Unexpected pipeline runner"),
    (dict(texts=["A man", "a \ud83d"]), "texts, line 2 has half of a surrogate pair"),
  ],
)
def test_unusable_path_or_runner_is_reported(tmp_path, settings, message):
  with pytest.raises(InputError) as raised:
    run(**{"output_dir": tmp_path, **settings})
  assert str(raised.value).startswith(message)
