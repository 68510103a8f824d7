"""Test the transcribe command with a small random Whisper: results, errors and resumed runs."""

import fcntl
import json
import os
import pathlib
import re

import gin
import numpy as np
import pytest
import tiny_whisper

from specdec_jax.load import load_pair
from specdec_jax.run import main
from specdec_jax.speech import transcribe as speech

LENGTHS = {"a": 3, "b": 8, "c": 2}  # seconds of audio


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return str(tiny_whisper.folder(tmp_path_factory.mktemp("models")))


@pytest.fixture
def run(model, tmp_path, capsys, monkeypatch):
  """Run the command in a folder of recordings, and return its status, output and messages."""
  monkeypatch.chdir(tmp_path)
  for seed, (stem, seconds) in enumerate(LENGTHS.items()):
    tiny_whisper.write_noise(pathlib.Path(f"{stem}.wav"), seconds, seed)

  def call(*arguments, target=("--target", model)):
    try:
      return main(["specdec", "transcribe", *arguments, *target]), *capsys.readouterr()
    finally:
      gin.clear_config()

  return call


@pytest.fixture
def opened(monkeypatch):
  """Return the names of the files that are read."""
  read, names = speech.read_audio, []

  def note(source, rate):
    names.extend([source] if isinstance(source, str) else [])
    return read(source, rate)

  monkeypatch.setattr(speech, "read_audio", note)
  return names


@pytest.mark.slow
def test_texts_are_printed_after_their_names(run, model):
  names = [f"{stem}.wav" for stem in LENGTHS]
  expected = [*speech.transcripts(load_pair(model), names, language="en")]
  status, printed, said = run(*names, "--language", "en", "--batch_size", "2")
  assert printed == "".join(f"{name}:\n{text}\n" for name, text in zip(names, expected))
  assert re.search(r"^13\.0 s of audio in .* s with compilation, \d\.\d\d tokens", said)
  assert status == 0 and run("a.wav", "--language", "en")[1] == f"{expected[0]}\n"


@pytest.mark.slow
def test_formats(run, model):
  expected = speech.transcribe(load_pair(model), "a.wav", timestamps=True)
  for name in ("srt", "vtt"):
    assert run("a.wav", "--format", name)[:2] == (0, expected.formatted(name))
    assert expected.formatted(name).count(" --> ") > 1
  assert run("a.wav", "b.wav", "--format=json", "--timestamps", "--output_dir", "out")[1] == ""
  assert sorted(os.listdir("out")) == [".specdec-transcribe.json", "a.json", "b.json"]
  record = json.load(open("out/a.json"))
  assert (record["text"], record["duration"]) == (str(expected), 3)
  assert [(each["start"], each["end"], each["text"]) for each in record["segments"]] == [
    (pytest.approx(each.start), pytest.approx(each.end), text)
    for each, text in zip(expected.segments, expected.texts)
  ]
  assert record["windows"] == len(expected.outputs) > 1
  assert record["tokens"] == sum(len(output.tokens) for output in expected.outputs)
  assert 0 < record["rounds"] <= record["tokens"] <= record["rounds"] + record["accepted"]


@pytest.mark.parametrize(
  "arguments, words",
  [
    ([], "no audio file is given; name one or more"),
    (["a.wav", "b.wav", "--format", "vtt"], "vtt for 2 audio files needs output_dir"),
    (["a.wav", "x/a.flac", "--output_dir", "out"], "several audio files have the output a.txt"),
    (["a.wav", "--format", "text"], "--format: 'text' is not 'txt' or 'srt' or 'vtt' or 'json'"),
    (["a.wav", "--language", "xx"], "language is 'xx'"),
    (["a.wav", "--num_beams", "2"], "num_beams is not supported"),
  ],
)
def test_invalid_settings_are_reported_before_a_file_is_read(run, opened, arguments, words):
  status, printed, said = run(*arguments)
  assert (status, printed, opened) == (2, "", []) and words in said
  assert not os.path.exists("out")


def test_target_that_is_missing_is_reported(run):
  assert run("a.wav", target=())[2].endswith("a Whisper, as --target openai/whisper-base.\n")


@pytest.mark.slow
def test_files_that_cannot_be_read_do_not_stop_others(run):
  pathlib.Path("empty.wav").write_bytes(b"")
  nan, rates = np.full(800, np.nan, "<f4").tobytes(), np.array([16_000, 64_000], "<i4").tobytes()
  header = b"RIFF    WAVEfmt \x10\0\0\0\3\0\1\0" + rates + b"\4\0\x20\0data"
  pathlib.Path("nan.wav").write_bytes(header + len(nan).to_bytes(4, "little") + nan)
  tiny_whisper.write_noise(pathlib.Path("long.wav"), 31)
  bad = ["empty.wav", "nan.wav", "gone.wav", "long.wav", "."]
  status, printed, said = run("a.wav", *bad, "c.wav", "--timestamps", "false", "--batch_size=2")
  assert status == 2 and re.findall(r"^(.*):$", printed, re.MULTILINE) == ["a.wav", "c.wav"]
  errors = [line for line in said.splitlines() if line.startswith("error: ")]
  bad.append("5 of 7 audio files were not transcribed")
  assert all(words in line for words, line in zip(bad, errors, strict=True))


SAMPLED = ["a.wav", "b.wav", "c.wav", "--temperature", "1", "--format", "srt"]


@pytest.mark.slow
def test_interrupted_run_is_resumed(run, opened, monkeypatch):
  """The run ends at the second result; the file of the first one is not read again."""
  assert run(*SAMPLED, "--output_dir", "whole")[0] == 0
  formatted, calls = speech.Transcript.formatted, []

  def fail(self, format):
    calls.append(format)
    if len(calls) == 2:
      raise KeyboardInterrupt
    return formatted(self, format)

  with monkeypatch.context() as patch:
    patch.setattr(speech.Transcript, "formatted", fail)
    assert run(*SAMPLED, "--output_dir", "out")[0] == 130
  with open("out/.specdec-transcribe.srt", "a") as log:
    log.write('{"output": "b.s')  # a line that was not written completely
  opened.clear()
  said = run(*SAMPLED, "--seed", "1", "--output_dir", "out")[2]
  assert "error: out has files of an earlier run with seed 0" in said and not opened
  assert run(*SAMPLED, "--output_dir", "out")[0] == 0 and opened == ["b.wav", "c.wav"]
  for stem in LENGTHS:
    assert open(f"out/{stem}.srt").read() == open(f"whole/{stem}.srt").read()
  tiny_whisper.write_noise(pathlib.Path("b.wav"), 4, seed=9)
  os.remove("out/c.srt")
  opened.clear()
  assert run(*SAMPLED, "--output_dir", "out")[0] == 0 and opened == ["b.wav", "c.wav"]
  with open("out/.specdec-transcribe.srt", "a") as log:
    fcntl.flock(log, fcntl.LOCK_EX)
    assert "another run is writing to out" in run(*SAMPLED, "--output_dir", "out")[2]
