"""Test transcripts of noise by small random Whispers, also against transformers."""

import functools
from unittest import mock

import numpy as np
import pytest
import tiny
import tiny_pair
import tiny_whisper

from specdec_jax import registry
from specdec_jax.errors import InputError
from specdec_jax.load import load_pair
from specdec_jax.speech.audio import read_audio
from specdec_jax.speech.transcribe import Transcriber, transcribe, transcripts

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  return tmp_path_factory.mktemp("whisper")


@pytest.fixture(scope="module")
def pair_of(path):
  """Return a function from the name of a draft to a pair."""
  folder, other = (tiny_whisper.folder(path, seed=seed) for seed in (0, 1))

  @functools.cache
  def of(draft):
    if draft != "layer_skip":
      return load_pair(str(folder), str(other) if draft == "model" else draft)
    pair = load_pair(str(folder), registry.draft("layer_skip", layers=(0,)))  # there are no others
    return tiny_pair.changed(pair, draft_params=tiny.near(pair.draft.params, 0, 0.3))

  return of


@pytest.fixture(scope="module")
def pair(pair_of):
  return pair_of("prompt_lookup")


@pytest.fixture(scope="module")
def sound(path):
  """Return a function from seconds to samples."""
  write = tiny_whisper.write_noise
  return functools.cache(lambda s: read_audio(write(path / f"{s}.wav", s, seed=int(s))))


def parts(transcript):
  return [(part.start, part.end, part.tokens.tolist()) for part in transcript.segments]


def theirs(path, samples, **settings):
  """Return the segments of transformers."""
  model = transformers.WhisperForConditionalGeneration.from_pretrained(path / "whisper-0")
  how = dict(truncation=False, padding="longest", return_attention_mask=True)
  how = how if len(samples) > 480_000 else {}
  read = transformers.WhisperFeatureExtractor()
  inputs = read(samples, sampling_rate=16_000, return_tensors="pt", **how)
  with torch.no_grad():
    out = model.generate(**inputs, return_segments=True, **settings)
  return [(float(x["start"]), float(x["end"]), x["tokens"].tolist()) for x in out["segments"][0]]


@pytest.mark.slow
@pytest.mark.parametrize("condition", [False, True])
@pytest.mark.parametrize("prompt", [None, "a red ball"])
@pytest.mark.parametrize("seconds", [10, 70])
def test_segments_equal_those_of_transformers(pair, path, sound, seconds, prompt, condition):
  ids = pair.target.speech.previous_id, *pair.vocabulary.encode_target(f" {prompt}")
  given, both = {"prompt_ids": torch.tensor(ids)}, {"condition_on_prev_tokens": condition}
  want = theirs(path, sound(seconds), return_timestamps=True, **both, **given if prompt else {})
  ours = transcribe(pair, sound(seconds), timestamps=True, initial_prompt=prompt, **both)
  assert [tokens for *_, tokens in parts(ours)] == [tokens for *_, tokens in want]
  # transformers computes some ends in float32.
  times = ([each[:2] for each in segments] for segments in (parts(ours), want))
  np.testing.assert_allclose(*times, atol=0.021)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, dict(language="german", task="translate")], ids=str)
def test_text_without_timestamps_equals_that_of_transformers(pair, path, sound, settings):
  want = [token for *_, tokens in theirs(path, sound(10), **settings) for token in tokens]
  ours = transcribe(pair, sound(10), **settings)
  assert parts(ours) == [(0, 10, want)]
  assert ours.language == "de" or not settings


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["prompt_lookup", "token_recycling", "layer_skip", "model"])
def test_transcripts_with_a_draft_equal_those_without(pair_of, sound, draft):
  recordings = [*map(sound, (0.5, 10, 70))]
  plain = [*transcripts(pair_of("prompt_lookup"), recordings, gamma=0)]
  ours = [*transcripts(pair_of(draft), recordings, gamma=3)]
  assert [*map(parts, ours)] == [*map(parts, plain)]
  outputs = [output for transcript in ours for output in transcript.outputs]
  accepted, rejected = zip(*(output.acceptance_counts for output in outputs))
  assert sum(accepted) and sum(rejected)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_transcripts_do_not_depend_on_the_batch(pair, sound, temperature):
  seconds = 10, 70, 0.5, 35, 20, 1.25
  settings = dict(temperature=temperature, timestamps=True)
  alone, together = (
    [*transcripts(pair, map(sound, seconds), batch_size=size, **settings)] for size in (1, 3)
  )
  assert [each.duration for each in together] == [*seconds]
  assert [*map(parts, together)] == [*map(parts, alone)]
  other = [*transcripts(pair, map(sound, seconds), batch_size=3, seed=1, **settings)]
  assert ([*map(parts, other)] == [*map(parts, alone)]) == (temperature == 0)


def test_timestamps_are_given_where_they_are_needed_or_asked_for(pair, sound):
  untimed, timed = (transcribe(pair, sound(10), timestamps=x) for x in (None, True))
  assert [(part.start, part.end) for part in untimed.segments] == [(0, 10)]
  assert timed.segments[0].tokens[0] > pair.target.speech.no_timestamps_id
  assert parts(transcribe(pair, sound(10), timestamps=False)) == parts(untimed)
  long = transcribe(pair, sound(70))
  assert parts(transcribe(pair, sound(70), timestamps=True)) == parts(long)
  assert str(long) == long.text == "".join(long.texts).strip() and len(long.outputs) >= 3
  starts = [part.start for part in long.segments]
  assert starts == sorted(starts) and starts[-1] > 60
  with pytest.raises(InputError, match="70 s, which need timestamps, and timestamps is False"):
    transcribe(pair, sound(70), timestamps=False)


def test_last_temperature_is_used_if_no_result_is_good_enough(pair, sound):
  first, last = (parts(transcribe(pair, sound(35), temperature=x)) for x in (0.8, 0))
  for threshold, want, attempts in ((1e9, first, 1), (0, last, 3)):
    settings = dict(temperature=(0.8, 0.3, 0), compression_ratio_threshold=threshold)
    report = mock.Mock()
    (ours,) = Transcriber(pair, **settings).run([sound(35)], report)
    assert parts(ours) == want and first != last
    assert report.call_count == attempts * len(ours.outputs)
    assert report.call_args.args == (0, 35, 35)


@pytest.mark.parametrize("threshold, is_skipped", [(0, True), (1, False)])
def test_windows_without_speech_are_skipped(pair, sound, threshold, is_skipped):
  settings = dict(temperature=0, logprob_threshold=0, no_speech_threshold=threshold)
  ours = transcribe(pair, sound(70), **settings)
  assert (ours.text == "" and len(ours.outputs) == 3) == is_skipped
  assert is_skipped or parts(ours) == parts(transcribe(pair, sound(70)))


NEEDS = {  # what settings need that is not there
  "beams": ("num_beams", "beam_size", "best_of", "patience", "length_penalty"),
  "times of words": ("word_timestamps", "return_token_timestamps"),
  "voice activity detection": ("vad_filter", "vad_parameters"),
  "names of speakers": ("diarize", "diarization"),
  "source tokens": ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
  "stop strings": ("stop_strings",),
}
REFUSED = [
  *(({name: 2}, f"^{name} .* needs {what}") for what, names in NEEDS.items() for name in names),
  (dict(language="xx"), "language is 'xx', which whisper-0 does not know; it knows de, en"),
  (dict(task="x"), "task is 'x'.*it knows transcribe, translate"),
  (dict(fallback="whisperx"), "fallback is 'whisperx'"),
  (dict(temperature=()), "temperature is empty"),
  (dict(num_return_sequences=2), "it needs several outputs of a window"),
  (dict(initial_prompt=5), "initial_prompt is 5; it must be a string"),
  (dict(max_new_tokens=45), "4 tokens before .* 45 new .*give max_new_tokens of at most 44"),
]


@pytest.mark.parametrize("settings, message", REFUSED, ids=str)
def test_setting_that_is_not_supported_is_reported(pair, sound, settings, message):
  with pytest.raises(InputError, match=message):
    transcribe(pair, sound(0.5), **settings)


def test_targets_that_do_not_fit_are_reported(path, sound):
  english = load_pair(str(tiny_whisper.folder(path, multilingual=False)))
  assert transcribe(english, sound(0.5)).language is None
  for settings in (dict(language="en"), dict(task="translate")):
    with pytest.raises(InputError, match="which whisper.en-0 does not know; it is English-only"):
      transcribe(english, sound(0.5), **settings)
  with pytest.raises(InputError, match="does not read speech; give a Whisper as target"):
    transcribe(tiny_pair.pair(), sound(0.5))


def test_short_recordings_of_other_kinds(pair):
  for shape, rate, duration in ((320, 16_000, 0.02), ((8000, 2), 16_000, 0.5), (8000, 8000, 1)):
    noise = np.random.default_rng(0).normal(size=shape) / 10
    ours = transcribe(pair, noise, sample_rate=rate)
    assert ours.duration == ours.segments[0].end == duration and ours.text


@pytest.mark.slow
def test_an_hour_of_silence(pair):
  ours = transcribe(pair, np.zeros(3600 * 16_000, np.float32))
  assert len(ours.outputs) >= 120 and ours.duration == 3600 and ours.segments[-1].end > 3570
