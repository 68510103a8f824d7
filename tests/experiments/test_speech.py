"""Test published Whisper models, read by transformers, and windows of synthetic speech."""

import importlib.metadata
import itertools
import json
import shutil
import wave

import numpy as np
import pytest
import tiny_whisper
from tiny import SHARED

from experiments.speech import corpus, published, speech
from specdec_jax.errors import InputError
from specdec_jax.load import load_pair
from specdec_jax.speech.audio import read_audio
from specdec_jax.speech.transcribe import transcripts

RECORDING, NUMBERS = "sense_and_sensibility_01_austen_64kb-{}.wav", ("0880", "0930")
TEXTS = [
  "A man in a blue shirt is standing on a ladder cleaning a window.",
  "Everybody is aware of the consequences.",
  "The old bridge was closed in May after a flood, and it cost two million euros.",
  "Do you like the taste of the soup?",
  "Several men in hard hats are operating a giant pulley system.",
]
needs_espeak = pytest.mark.skipif(not shutil.which("espeak-ng"), reason="needs espeak-ng")


@pytest.mark.parametrize("name", published.WEIGHTS)
def test_transformers_transcribes_with_a_published_model(name, tmp_path, monkeypatch):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  if not (SHARED / "data" / "speech").exists():
    pytest.skip("the recordings are missing; set SPECDEC_SHARED to the folder that contains data/")
  monkeypatch.setenv("SPECDEC_SPEECH", str(tmp_path))
  try:
    folder = published.folder(name)
  except InputError:
    pytest.skip("the extra speech is not installed")
  assert [*tmp_path.iterdir()] == [folder]
  model, report = transformers.WhisperForConditionalGeneration.from_pretrained(
    folder, dtype=torch.float32, output_loading_info=True
  )
  assert not any(report.values())
  processor = transformers.WhisperProcessor.from_pretrained(folder)
  sounds = []
  for number in NUMBERS:
    with wave.open(str(SHARED / "data" / "speech" / RECORDING.format(number))) as file:
      samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
      sounds.append(samples.astype(np.float32) / 2**15)
  inputs = processor(sounds, sampling_rate=corpus.RATE, return_tensors="pt")
  outputs = model.generate(inputs.input_features, return_timestamps=True)
  texts = processor.batch_decode(outputs, decode_with_timestamps=True)
  for text, words in zip(texts, ("He was not an", "He might even have been made amiable himself.")):
    assert text.startswith(f"<|0.00|> {words}")
  monkeypatch.setattr(importlib.metadata, "distribution", None)
  assert published.folder(name) == folder  # which is not written again


@pytest.mark.slow
@pytest.mark.parametrize("timestamps", [False, True])
def test_transcripts_with_a_draft_equal_those_of_transformers(timestamps):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  files = [SHARED / "data" / "speech" / RECORDING.format(number) for number in (*NUMBERS, "0890")]
  if not all(file.exists() for file in files):
    pytest.skip("the recordings are missing; set SPECDEC_SHARED to the folder that contains data/")
  try:
    folder = published.folder("tiny.en")
  except InputError:
    pytest.skip("the extra speech is not installed")
  model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
  read, pair = transformers.WhisperFeatureExtractor(), load_pair(str(folder), "prompt_lookup")
  ours = [*transcripts(pair, files, timestamps=timestamps, batch_size=2)]
  for file, transcript in zip(files, ours, strict=True):
    inputs = read(read_audio(file), sampling_rate=corpus.RATE, return_tensors="pt")
    want = model.generate(**inputs, return_timestamps=timestamps, return_segments=True)
    (segments,) = want["segments"]
    assert [part.tokens.tolist() for part in transcript.segments] == [
      part["tokens"].tolist() for part in segments
    ]
  assert str(ours[0]).startswith("He was not an")
  assert sum(len(each.outputs[0].rounds.num_emitted) for each in ours) < sum(
    len(each.outputs[0].tokens) for each in ours
  )


def test_missing_package_is_reported(tmp_path, monkeypatch):
  monkeypatch.setenv("SPECDEC_SPEECH", str(tmp_path))
  monkeypatch.setitem(published.WEIGHTS, "base", ("missing_whisper/model.bin",))
  with pytest.raises(InputError, match="missing_whisper; install the extra speech"):
    published.folder("base")


def read(folder):
  windows = np.load(folder / "windows.npy")
  return windows, [json.loads(line) for line in (folder / "windows.jsonl").open()]


@needs_espeak
@pytest.mark.parametrize("voices", [corpus.VOICES, corpus.HELD_OUT])
@pytest.mark.parametrize("seconds", [(26, 30), (2, 8)])
def test_windows_have_speech_and_then_silence(seconds, voices, tmp_path):
  corpus.make(tmp_path, 3, 5, TEXTS, voices, seconds)
  windows, records = read(tmp_path)
  assert windows.shape == (3, corpus.WINDOW) and windows.dtype == np.int16
  assert len(records) == 3
  for window, record in zip(windows, records):
    assert seconds[0] <= record["seconds"] <= seconds[1]
    assert record["voice"] in voices and {*record["texts"]} <= {*TEXTS}
    end = round(record["seconds"] * corpus.RATE)
    assert not window[end:].any()
    assert all(part.any() for part in np.array_split(window[:end], seconds[0]))
  first = [text for record in records for text in record["texts"]][: len(TEXTS)]
  if seconds[0] > 20:  # every sentence is read before any is read again
    assert len({*first}) == len(TEXTS)


@needs_espeak
def test_interrupted_corpus_resumes(tmp_path, monkeypatch):
  corpus.make(tmp_path / "whole", 4, 0, TEXTS)
  speak, calls = corpus.speak, itertools.count()

  def interrupted(*args, **kwargs):
    if next(calls) == 14:
      raise KeyboardInterrupt
    return speak(*args, **kwargs)

  with monkeypatch.context() as patch:
    patch.setattr(corpus, "speak", interrupted)
    with pytest.raises(KeyboardInterrupt):
      corpus.make(tmp_path / "parts", 4, 0, TEXTS)
  listed = tmp_path / "parts" / "windows.jsonl"
  assert 0 < listed.read_text().count("\n") < 4
  with listed.open("a") as file:
    file.write('{"texts": ["A torn')
  corpus.make(tmp_path / "parts", 4, 0, TEXTS)
  for path in (tmp_path / "whole").iterdir():
    assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes()
  with pytest.raises(InputError, match="windows of other settings"):
    corpus.make(tmp_path / "parts", 4, 1, TEXTS)


@needs_espeak
def test_every_voice_is_another_and_training_windows_have_no_held_out_voice():
  assert not {*corpus.VOICES} & {*corpus.HELD_OUT}
  voices = *corpus.VOICES, *corpus.HELD_OUT
  sounds = {corpus.speak(TEXTS[3], voice, 170, 50).tobytes() for voice in voices}
  assert len(sounds) == len(voices)  # espeak-ng ignores what it does not know


def test_missing_espeak_is_reported(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(InputError, match="espeak-ng is not installed"):
    corpus.make(tmp_path, 1, 0, TEXTS)


def test_sentences_of_texts_and_articles(tmp_path):
  lines = [
    "It 's a page , and they won 't talk about it .",
    "no capital is here.",
    'He said "No, no."',
  ]
  (tmp_path / "news.en").write_text("\n".join([*lines, "Too short.", lines[0]]) + "\n")
  article = {"article": "(CNN) -- The mayor opened a bridge. Many people came to see it!"}
  (tmp_path / "articles.jsonl").write_text(json.dumps(article) + "\n")
  found = corpus.sentences(str(tmp_path), ["*.en", "*.jsonl"])
  assert found == ["It's a page, and they won't talk about it.", "Many people came to see it!"]


def row(**changes):
  values = dict(set="windows", clips=8, speech_s=226.4, batch_size=1, program=speech.OWN)
  values |= dict(draft="none", gamma=0, limit=224, repeats=2, num_tokens=800, differing=0)
  values |= dict(mel_s=0.5, encoder_s=7.5, decoder_s=8.0, total_s=16.0, speedup=1.0)
  values |= dict(speedup_low=1.0, speedup_high=1.0, tokens_per_round=1.0)
  values |= dict(threads=2, processor="a processor", commit="0123456789", date="2026-11-29T10:00Z")
  return values | changes


def test_tables_of_drafts_and_programs():
  head = row(draft="head", gamma=3, decoder_s=4.0, total_s=12.0, speedup=2.0, tokens_per_round=2.5)
  head |= dict(speedup_low=1.9, speedup_high=2.1, c=0.05, v=1.2, predicted=1.9, step_ms=9.0)
  head |= {
    f"{name}{end}": x
    for name, x in (("alpha", 0.7), ("alpha_1", 0.6))
    for end, x in (("", x), ("_low", x - 0.1), ("_high", x + 0.1))
  }
  other = row(program="CTranslate2, int8", encoder_s=4.5, decoder_s=3.0, total_s=8.0, differing=2)
  whole = {k: x for k, x in row(program="faster-whisper", total_s=20.0).items() if k[:2] != "en"}
  for name in ("mel_s", "decoder_s", "differing", "num_tokens"):
    del whole[name]
  rows = [row(total_s=99.0), row(), head, other, whole]  # the first one was measured again

  drafts = speech.speech_drafts_table(rows)
  (cells,) = drafts.rows
  assert dict(zip(drafts.columns, cells)) == {
    "clips": "windows, 8",
    "speech, s": "226",
    "batch": "1",
    "draft": "head",
    "gamma": "3",
    "alpha": "0.70 [0.60,0.80]",
    "alpha, temperature 1": "0.60 [0.50,0.70]",
    "tokens per round": "2.50",
    "c": "0.050",
    "v": "1.20",
    "predicted": "1.90",
    "decoder": "2.00 [1.90,2.10]",
    "end to end": "1.33",
    "at most": "2.00",
    "differ": "0",
  }
  programs = speech.speech_programs_table(rows)
  assert [cells[3:] for cells in programs.rows] == [
    ("specdec_jax", "none", "0.50", "7.50", "8.00", "16.00", "14.2", "0"),
    ("specdec_jax", "head, 3", "0.50", "7.50", "4.00", "12.00", "18.9", "0"),
    ("CTranslate2, int8", "none", "0.50", "4.50", "3.00", "8.00", "28.3", "2"),
    ("faster-whisper", "none", "-", "-", "-", "20.00", "11.3", "-"),
  ]
  for table in (drafts, programs):
    assert "a processor, commit 0123456789 of 2026-11-29" in table.notes[0]


def test_calls_are_interleaved_in_both_orders():
  made = []

  def call(name):
    return lambda i: made.append((name, i)) or (len(made), (name, i))

  seconds, results = speech.interleaved({"a": call("a"), "b": call("b")}, 2, 2)
  assert made[:2] == [("a", 0), ("b", 0)]  # untimed
  assert made[2:] == [
    ("b", 0),
    ("a", 0),
    ("a", 1),
    ("b", 1),
    ("a", 0),
    ("b", 0),
    ("b", 1),
    ("a", 1),
  ]
  assert seconds["a"].tolist() == [[4, 7], [5, 10]]
  assert results == {name: [(name, 0), (name, 1)] for name in "ab"}


def test_clips_of_windows_and_recordings(tmp_path):
  np.save(tmp_path / "windows.npy", np.full((3, corpus.WINDOW), 2**14, np.int16))
  (tmp_path / "windows.jsonl").write_text('{"seconds": 1.5}\n{"seconds": 2.0}\n')
  clips = speech.clips_of(tmp_path, 5)
  assert [len(clip) / corpus.RATE for clip in clips] == [1.5, 2.0]  # the third is not finished
  tiny_whisper.write_noise(tmp_path / "noise.wav", 0.5)
  np.full(800, 2**14, "<i2").tofile(tmp_path / "number.raw")
  wav, raw = speech.recordings(tmp_path)
  assert len(wav) == corpus.RATE / 2 and len(raw) == 800
  assert all((x == 0.5).all() for x in (*clips, raw))


def test_programs_and_drafts_are_measured_on_a_small_whisper(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr("specdec_jax.measure.machine.commit", lambda: None)  # outside of a clone
  target, smaller = (str(tiny_whisper.folder(tmp_path, seed=seed)) for seed in (0, 1))
  clips = [
    speech.read_audio(tiny_whisper.write_noise(tmp_path / f"{i}.wav", 2, i)) for i in range(3)
  ]
  (tmp_path / "texts.txt").write_text("a b a\n")
  pairs = speech.own_pairs(target, [smaller], str(tmp_path / "texts.txt"))
  peers = speech.transformers_peers(target, speech.limit_of(pairs["prompt lookup"]))
  study = speech.Study(pairs, peers, speech.Settings((1, 2), (2,), 1))
  output = tmp_path / "study"
  speech.run(study, {"noise": clips}, str(output))
  rows = [json.loads(line) for line in (output / "results.jsonl").open()]
  own = [each for each in rows if each["program"] == speech.OWN]
  assert [(each["batch_size"], each["clips"]) for each in own] == [(1, 3)] * 5 + [(2, 2)] * 5
  names = ["none", "prompt lookup", "n-grams", "whisper-1", "whisper-1, int8"]
  assert [each["draft"] for each in own] == names * 2
  assert all(each["differing"] == 0 and each["num_tokens"] > 0 for each in own)
  for each in own:
    assert each["total_s"] == pytest.approx(each["mel_s"] + each["encoder_s"] + each["decoder_s"])
    if each["gamma"]:
      assert 0 <= each["alpha_low"] <= each["alpha"] <= each["alpha_high"] <= 1
      assert 1 <= each["tokens_per_round"] <= 3
  of_draft = {each["draft"]: each["encoder_s"] for each in own if each["batch_size"] == 1}
  assert of_draft["whisper-1"] > of_draft["prompt lookup"]  # it has an encoder of its own
  others = [(each["batch_size"], each["draft"]) for each in rows if each["program"] != speech.OWN]
  assert others == [(1, "none"), (1, "prompt lookup"), (2, "none")]
  plain = [each for each in rows if each["program"] != speech.OWN and each["draft"] == "none"]
  assert [each["differing"] for each in plain] == [0, 0]

  without = {key[1] for key in study.keys(speech.HELD_OUT, 3)}
  assert without == {speech.OWN} and len({key[1] for key in study.keys("noise", 3)}) == 2

  before = (output / "results.jsonl").read_text()
  speech.run(study, {"noise": clips}, str(output))
  assert (output / "results.jsonl").read_text() == before
  assert "Speculative decoding of Whisper" in capsys.readouterr().out
