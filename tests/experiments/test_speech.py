"""Test published Whisper models, read by transformers, and windows of synthetic speech."""

import importlib.metadata
import itertools
import json
import shutil
import wave

import numpy as np
import pytest
from tiny import SHARED

from experiments.speech import corpus, published
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
