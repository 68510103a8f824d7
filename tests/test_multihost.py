"""Test that hosts may be killed, restarted, added or removed without a change of the merged output.

One test runs real hosts in subprocesses, over two devices each, and kills one with SIGKILL while it
decodes; the others call `decode` in this process.
"""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import tiny_pair

from specdec_jax.commands import decode as decoding
from specdec_jax.commands.decode import decode
from specdec_jax.commands.translate import decode_lines
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.counts import acceptance_rate, num_rounds, num_tokens
from specdec_jax.errors import InputError
from specdec_jax.loading import DecodeSettings
from specdec_jax.user_errors import format_error

BATCH, LIMIT, GAMMA = 3, 12, 3
SAMPLING = Sampling(temperature=1.0)
TEXTS = [*tiny_pair.SENTENCES[:10], "", *tiny_pair.SENTENCES[10:21]]  # the last batch has one text
SETTINGS = dict(sampling=SAMPLING, gamma=GAMMA, batch_size=BATCH, max_new_tokens=LIMIT)
WIDTH = 8  # source tokens: the rest is cut


def run(folder, host=(0, 1), texts=TEXTS, **settings):
  pair = tiny_pair.pair(max_source_tokens=WIDTH)
  decode(pair, texts, str(folder), host=host, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
  """Return the output of a single uninterrupted host."""
  folder = tmp_path_factory.mktemp("whole")
  run(folder)
  return (folder / "outputs.jsonl").read_bytes()


def test_lines_are_the_decoded_texts_with_their_rounds(whole, tmp_path, capsys):
  records = [json.loads(line) for line in whole.splitlines()]
  assert [(r["index"], r["source"]) for r in records] == [*enumerate(TEXTS)]
  pair = tiny_pair.pair(max_source_tokens=WIDTH)
  asked = [text if pair.can_decode(text) else None for text in TEXTS]
  settings = DecodeSettings(SAMPLING, BATCH, LIMIT)
  outputs, decoded = zip(*decode_lines(pair, asked, chain(GAMMA), settings))
  assert [r["output"] for r in records] == [text for batch in outputs for text in batch]
  decoded = [d for batch in decoded for d in batch]
  assert sum(len(r["tokens"]) for r in records) == num_tokens(decoded)
  assert sum(r["rounds"] for r in records) == num_rounds(decoded)
  rate = sum(r["accepted"] for r in records) / sum(r["guesses"] for r in records)
  assert rate == pytest.approx(acceptance_rate(decoded))
  assert 0.1 < rate < 0.95
  for r, tokens in zip([r for r in records if r["source"]], [t for d in decoded for t in d.tokens]):
    assert r["tokens"] + [0] * (LIMIT - len(r["tokens"])) == tokens.tolist()
    assert r["rounds"] <= len(r["tokens"]) <= r["rounds"] + r["accepted"]
  empty = {"index": 10, "source": "", "output": "", "tokens": []}
  assert records[10] == {**empty, "rounds": 0, "guesses": 0, "accepted": 0}
  run(tmp_path)
  passes = num_tokens(decoded) / num_rounds(decoded)
  summary = f"22 texts, {num_tokens(decoded)} tokens, {passes:.2f} tokens per target pass, "
  assert capsys.readouterr().out.startswith(f"{summary}acceptance rate {rate:.3f}: ")


def test_number_and_order_of_hosts_do_not_change_the_file(whole, tmp_path, capsys):
  for host in (2, 0, 3, 1):
    assert not (tmp_path / "outputs.jsonl").exists()
    capsys.readouterr()
    run(tmp_path, (host, 4))
  assert (tmp_path / "outputs.jsonl").read_bytes() == whole
  assert "22 texts" in capsys.readouterr().out


def test_more_hosts_than_batches(whole, tmp_path):
  for host in range(10):
    run(tmp_path, (host, 10))
  assert (tmp_path / "outputs.jsonl").read_bytes() == whole


def test_killed_host_resumes_where_it_stopped(whole, tmp_path):
  run(tmp_path, (0, 2))
  part, outputs = tmp_path / "part-0-of-2.jsonl", tmp_path / "outputs.jsonl"
  complete = part.read_bytes()
  run(tmp_path, (1, 2))
  for left in (0, 40, 400, 1000, 1500, len(complete) - 1):
    outputs.unlink()
    part.write_bytes(complete[:left])
    run(tmp_path, (0, 2))
    assert part.read_bytes() == complete
    assert outputs.read_bytes() == whole


def test_finished_texts_are_not_decoded_again(whole, tmp_path, monkeypatch):
  run(tmp_path)

  def refuse(*args, **kwargs):
    raise TypeError("decoded again")

  monkeypatch.setattr("specdec_jax.core.decode.Decoder.run", refuse)
  (tmp_path / "outputs.jsonl").unlink()
  run(tmp_path)
  assert (tmp_path / "outputs.jsonl").read_bytes() == whole
  part = tmp_path / "part-0-of-1.jsonl"
  part.write_bytes(part.read_bytes()[:-9])
  with pytest.raises(TypeError):  # the last text is missing, and decoding it would fail
    run(tmp_path)


@pytest.mark.parametrize(
  "name, other",
  [
    ("seed", dict(seed=1)),
    ("gamma", dict(gamma=2)),
    ("temperature", dict(sampling=Sampling(0.0))),
    ("num_hosts", dict(host=(1, 3))),
    ("inputs", dict(texts=[*TEXTS[:-1], "Zwei"])),
  ],
)
def test_other_settings_in_the_same_folder_raise(tmp_path, name, other):
  run(tmp_path)
  before = {path: path.read_bytes() for path in tmp_path.iterdir()}
  with pytest.raises(InputError, match=f"is of a run with {name} .* choose another OUTPUT_DIR"):
    run(tmp_path, **other)
  assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_host_that_is_started_twice_raises(tmp_path):
  with open(tmp_path / "part-0-of-1.jsonl", "ab") as part:
    fcntl.flock(part, fcntl.LOCK_EX)
    with pytest.raises(InputError, match="another run is writing to"):
      run(tmp_path)


def test_damaged_part_is_named(tmp_path):
  run(tmp_path)
  part = tmp_path / "part-0-of-1.jsonl"
  lines = part.read_bytes().splitlines(keepends=True)
  for damaged in (lines[:4] + lines[5:] + lines[4:5], [*lines[:4], b"\0\n", *lines[5:]]):
    part.write_bytes(b"".join(damaged))
    with pytest.raises(InputError, match="part-0-of-1.jsonl .* delete it and start"):
      run(tmp_path)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["outputs.jsonl", "part-0-of-1.jsonl"]


@pytest.mark.parametrize(
  "line",
  [
    "{}",
    "[]",
    "[" * 100_000,
    json.dumps(dict(index=3, source="", output="", rounds=0, guesses=0, accepted=0)),
    json.dumps(dict(index=3, source="", output="", rounds=0, guesses=0, accepted=0, tokens=5)),
    json.dumps(dict(index=3, source="", output="", rounds="0", guesses=0, accepted=0, tokens=[])),
    json.dumps(dict(index=3, source="", output=[], rounds=0, guesses=0, accepted=0, tokens=[])),
    json.dumps(dict(index=3, source="", output="", rounds=0, guesses=0, accepted=0, tokens=["1"])),
  ],
  ids=lambda line: line[:90],
)
def test_invalid_record_in_a_part_is_named(whole, tmp_path, line):
  run(tmp_path)
  part = tmp_path / "part-0-of-1.jsonl"
  lines = part.read_bytes().split(b"\n")
  part.write_bytes(b"\n".join([*lines[:4], line.encode(), *lines[5:]]))
  (tmp_path / "outputs.jsonl").write_bytes(whole)
  with pytest.raises(InputError, match="part-0-of-1.jsonl is damaged; delete it and start"):
    run(tmp_path)
  assert (tmp_path / "outputs.jsonl").read_bytes() == whole
  part.write_bytes(b"\n".join([line.encode(), *lines[1:]]))
  with pytest.raises(InputError, match="part-0-of-1.jsonl is (damaged|of a run with)"):
    run(tmp_path)


@pytest.mark.parametrize("name", ["part-0-of-1.jsonl", "part-1-of-2.jsonl"])
@pytest.mark.parametrize("kind", ["device", "folder", "pipe"])
def test_part_that_is_not_a_regular_file_is_not_read(tmp_path, name, kind):
  """A read from a device may never end, and a pipe may have no writer."""
  part = tmp_path / name
  {"device": lambda: part.symlink_to("/dev/full"), "folder": part.mkdir}.get(
    kind, lambda: os.mkfifo(part)
  )()
  with pytest.raises(InputError, match=f"{name} is not a regular file; delete it, or choose"):
    run(tmp_path)


@pytest.mark.parametrize(
  "content",
  ["", "[0, 1", "5", "{}", "[0.0, 1]", '["0"]', "[3]", "[-1]", "[true]", "[" * 100_000, "\x00"],
  ids=lambda content: content[:9],
)
def test_damaged_tree_file_is_named(tmp_path, content):
  path = tmp_path / "tree-of-this-run"
  path.write_text(content)
  with pytest.raises(InputError, match="tree-of-this-run is damaged; delete it and start all"):
    decoding._agreed_tree(path, 0, lambda: pytest.fail("another host has chosen"))


def test_full_disk_is_reported_with_the_file(tmp_path, monkeypatch):
  def full(fd):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError) as told:
    run(tmp_path)
  assert format_error(told.value) == (
    f"cannot use '{tmp_path}/part-0-of-1.jsonl': No space left on device; free some space there, "
    "or write to another place."
  )


@pytest.mark.parametrize("host", [(2, 2), (-1, 2)])
def test_host_index_outside_of_num_hosts_raises(tmp_path, host):
  with pytest.raises(InputError, match="host is"):
    run(tmp_path, host)


HOST = """
import os, sys, time
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
from specdec_jax.commands import decode
from specdec_jax.run import main

decode_lines = decode.decode_lines

def slowly(*args):
  for batch in decode_lines(*args):
    yield batch
    time.sleep(0.1)

decode.decode_lines = slowly
sys.exit(main(sys.argv))
"""


def start(folder, host: int) -> subprocess.Popen:
  """Start a host with two devices as a subprocess."""
  model = tiny_pair.folder()
  settings = {
    "INPUT": str(folder / "texts.txt"),
    "OUTPUT_DIR": str(folder),
    "HOST": (host, 2),
    "GAMMA": GAMMA,
    "TEMPERATURE": SAMPLING.temperature,
    "BATCH_SIZE": BATCH,
    "MAX_NEW_TOKENS": LIMIT,
    "MODEL_PARALLEL": 2,
    "pairs.load_pair.target": str(model / "target"),
    "pairs.load_pair.draft": str(model / "near"),
    "pairs.load_pair.vocabulary": str(model / "vocabulary.model"),
    "pairs.load_pair.task": "tiny",
    "pairs.load_pair.max_source_tokens": WIDTH,
  }
  command = [
    *(sys.executable, "-c", HOST, f"--jax_compilation_cache_dir={folder / 'compiled'}"),
    *("--gin_file=gin/runs/decode.gin", "--gin_file=gin/models/sharded.gin"),
    *(f"--gin.{name}={value!r}" for name, value in settings.items()),
  ]
  return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_and_restarted_host_loses_nothing(whole, tmp_path):
  (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
  part, host = tmp_path / "part-0-of-2.jsonl", start(tmp_path, 0)
  while host.poll() is None and not (part.exists() and part.read_bytes().count(b"\n") > 2 * BATCH):
    time.sleep(0.01)
  host.send_signal(signal.SIGKILL)
  assert host.wait() == -signal.SIGKILL, host.stderr.read()
  left = part.read_bytes()
  assert left.count(b"\n") < 1 + len(TEXTS) // 2, "it was done before it was killed"
  part.write_bytes(left[:-20])  # as a kill in the middle of a write leaves it
  hosts = [start(tmp_path, 0), start(tmp_path, 1)]
  said = [host.communicate(timeout=300) for host in hosts]
  assert [host.returncode for host in hosts] == [0, 0], said
  assert "tokens per target pass" in "".join(out for out, _ in said)
  assert (tmp_path / "outputs.jsonl").read_bytes() == whole
