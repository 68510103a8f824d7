"""Timestamps of Whisper, by definition and against transformers."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.core.context import Prefixes
from specdec_jax.speech import timestamps
from specdec_jax.speech.timestamps import OPENAI, Segment, TimestampRule, needs_fallback, split

# Text, EOS, other special tokens, and timestamps 0 to 13.
EOS, NO_TIMESTAMPS, T0, V = 20, 25, 26, 40
TEXT, SPECIAL, TIMESTAMPS = {*range(EOS)}, {*range(EOS, NO_TIMESTAMPS)}, {*range(T0, V)}


@pytest.fixture
def whisper():
  pytest.importorskip("torch", reason="torch is not installed")
  return pytest.importorskip("transformers.models.whisper.generation_whisper")


def prefixes_of(prompts, histories):
  """Return `Prefixes`, and its texts: a prompt per row and generated tokens per row and node."""
  texts = [[[*prompt, *text] for text in row] for prompt, row in zip(prompts, histories)]
  length = np.array([[*map(len, row)] for row in texts], np.int32)
  tokens = np.zeros((*length.shape, 20), np.int32)
  for (b, k), n in np.ndenumerate(length):
    tokens[b, k, :n] = texts[b][k]
  prompt_length = np.array([*map(len, prompts)], np.int32)
  fields = tokens, length, prompt_length, prompt_length + 99, tokens[:, 0]
  return Prefixes(*map(jnp.asarray, fields)), texts


@pytest.mark.parametrize(
  "text, allowed",
  [
    ([], {*range(T0, T0 + 5)}),
    ([T0], TEXT | SPECIAL),
    ([T0, 3], TEXT | SPECIAL | {*range(T0 + 1, V)}),
    ([T0, 3, T0 + 5], SPECIAL | {*range(T0 + 5, V)}),
    ([T0, 3, T0 + 5, T0 + 5], TEXT | SPECIAL),
    ([T0, 3, T0 + 5, T0 + 5, 4], TEXT | SPECIAL | {*range(T0 + 6, V)}),
  ],
)
@pytest.mark.parametrize("are_timestamps_probable", [False, True])
def test_tokens_that_the_rule_allows(text, allowed, are_timestamps_probable):
  prefixes, _ = prefixes_of([[1, T0 + 7, T0 + 7]], [[text]])
  # The most probable token is text, but timestamps together may be more probable.
  logits = np.where(np.arange(V) < T0, 0.0, -1.0 if are_timestamps_probable else -9.0)
  rule = TimestampRule(NO_TIMESTAMPS, EOS, max_initial=4)
  found = np.flatnonzero(np.isfinite(rule(jnp.asarray(logits)[None, None], prefixes)[0, 0]))
  assert {*found.tolist()} == (are_timestamps_probable and allowed & TIMESTAMPS or allowed)


def random_tokens(rng, size):
  is_timestamp = rng.random(size) < rng.choice([0.2, 0.5])
  return np.where(is_timestamp, rng.integers(T0, V, size), rng.integers(0, T0, size)).tolist()


@pytest.mark.parametrize("max_initial", [None, 0, 4])
@pytest.mark.parametrize("prompt_lengths", [(3, 3, 3), (1, 4, 9)])
def test_rule_equals_that_of_transformers(whisper, max_initial, prompt_lengths):
  rng = np.random.default_rng(0)
  apply = jax.jit(TimestampRule(NO_TIMESTAMPS, EOS, max_initial).__call__)
  config = types.SimpleNamespace(no_timestamps_token_id=NO_TIMESTAMPS, eos_token_id=EOS)
  config.max_initial_timestamp_index = max_initial
  for _ in range(10):
    prompts = [random_tokens(rng, size) for size in prompt_lengths]
    histories = [
      [random_tokens(rng, size) for size in (0, *rng.integers(1, 9, 5))] for _ in prompts
    ]
    prefixes, texts = prefixes_of(prompts, histories)
    logits = rng.normal(0, 2, (len(prompts), 6, V)).astype(np.float32)
    logits[..., T0:] += rng.choice([-3, 0, 3], (len(prompts), 6, 1))
    found = apply(logits, prefixes)
    for b, k in np.ndindex(found.shape[:2]):
      theirs = whisper.WhisperTimeStampLogitsProcessor(config, len(prompts[b]))
      want = theirs(whisper.torch.tensor([texts[b][k]]), whisper.torch.tensor(logits[b, k][None]))
      np.testing.assert_array_equal(found[b, k], want[0].numpy(), err_msg=str(texts[b][k]))


@pytest.mark.parametrize(
  "tokens, want, frames",
  [
    ([], [(10.0, 40.0, 0)], 3000),
    ([1, 2], [(10.0, 40.0, 2)], 3000),
    ([T0, 1, T0], [(10.0, 40.0, 3)], 3000),
    ([T0, 1, T0 + 5], [(10.0, 10.1, 3)], 3000),
    ([T0, 1, T0 + 5, 2], [(10.0, 10.1, 4)], 3000),
    ([T0, 1, T0 + 5, T0 + 5], [(10.0, 10.1, 4)], 10),
    ([T0, 1, T0 + 5, T0 + 6, 2, 3], [(10.0, 10.1, 4)], 10),
    ([T0, 1, T0 + 5, T0 + 6, 2, T0 + 9], [(10.0, 10.1, 3), (10.12, 10.18, 3)], 3000),
    ([T0, 1, T0 + 1, T0 + 1, 2, T0 + 3, T0 + 3], [(10.0, 10.02, 3), (10.02, 10.06, 4)], 6),
  ],
)
def test_segments_of_a_window(tokens, want, frames):
  segments, advance = split(tokens, T0, 10.0, 3000)
  found = [(start, end, len(tokens)) for start, end, tokens in segments]
  assert np.allclose(found, want) and len(found) == len(want) and advance == frames


def test_segments_equal_those_of_transformers(whisper):
  rng = np.random.default_rng(0)
  for _ in range(500):
    tokens = random_tokens(rng, rng.integers(0, 12))
    offset_s = float(rng.integers(0, 10**6)) / 100
    num_frames = int(rng.choice([3000, 1501, 84, 1]))
    want, advance = whisper.WhisperGenerationMixin._retrieve_segment(
      seek_sequence=whisper.torch.tensor(tokens, dtype=whisper.torch.long),
      seek_outputs=[None],
      time_offset=whisper.torch.tensor([offset_s], dtype=whisper.torch.float64),
      timestamp_begin=T0,
      seek_num_frames=whisper.torch.tensor([num_frames]),
      time_precision=0.02,
      time_precision_features=0.01,
      input_stride=2,
      prev_idx=0,
      idx=0,
      return_token_timestamps=False,
      decoder_input_ids=whisper.torch.zeros((1, 4)),
    )
    found = split(np.array(tokens), T0, offset_s, num_frames)
    segments = [(float(x["start"]), float(x["end"]), x["tokens"].tolist()) for x in want]
    assert [(x.start, x.end, x.tokens.tolist()) for x in found[0]] == segments, tokens
    assert found[1] == int(advance)


ALL = {name: value for name, value in OPENAI.items() if name != "temperature"}
ONLY = {name: {name: value} for name, value in ALL.items()}


@pytest.mark.parametrize(
  "scores, thresholds, want",
  [
    ((2.4, -1.0, 0.6), ALL, (False, False)),
    ((2.5, -0.5, 0.9), ALL, (True, False)),
    ((1.5, -1.1, 0.5), ALL, (True, False)),
    ((2.5, -1.1, 0.7), ALL, (False, True)),
    ((2.5, -9.0, 1.0), ONLY["compression_ratio_threshold"], (True, False)),
    ((9.0, -1.1, 1.0), ONLY["logprob_threshold"], (True, False)),
    ((9.0, -0.1, 0.7), ONLY["no_speech_threshold"], (False, True)),
    ((9.0, -9.0, 0.6), ONLY["no_speech_threshold"], (False, False)),
  ],
)
def test_windows_that_need_fallback(scores, thresholds, want):
  assert needs_fallback(*scores, **thresholds) == want


def test_fallback_equals_that_of_transformers(whisper):
  detection = whisper.WhisperNoSpeechDetection(0, 0)
  output = type("Output", (dict,), {"sequences_scores": None})
  rng = np.random.default_rng(0)
  texts = rng.integers(0, 51865, 40), np.tile([50257, 9, 8], 40)
  values = itertools.product(texts, (-1.2, -0.8), (0.5, 0.7), (None, 2.4), (None, 0.6))
  for tokens, mean_logprob, no_speech, ratio_threshold, no_speech_threshold in values:
    thresholds = dict(ALL, compression_ratio_threshold=ratio_threshold)
    thresholds["no_speech_threshold"] = no_speech_threshold
    detection._no_speech_prob = [no_speech]
    outputs = [output(sequences_scores=mean_logprob)]
    config = types.SimpleNamespace(**thresholds)
    inputs = whisper.torch.tensor(tokens), outputs, 0, [detection], config, 51865, 0.0
    mixin = whisper.WhisperGenerationMixin
    want = mixin._need_fallback(mixin, *inputs)
    ratio = timestamps.compression_ratio(tokens, 51865)
    assert ratio == mixin._retrieve_compression_ratio(tokens, 51865)
    assert needs_fallback(ratio, mean_logprob, no_speech, **thresholds) == want


def test_compression_ratio_of_a_text():
  assert timestamps.text_compression_ratio("ü" * 100) > 12  # 200 bytes in 13


NONE = np.zeros(0, int)
SEGMENTS = [Segment(0.0, 59.9996, NONE), Segment(60, 61, NONE), Segment(3661.5, 360000.25, NONE)]
TEXTS = [" One\n\ntwo --> <b>&", "  ", "Three "]
SRT = """1
00:00:00,000 --> 00:01:00,000
One  two -> <b>&

2
01:01:01,500 --> 100:00:00,250
Three
"""
VTT = """WEBVTT

00:00:00.000 --> 00:01:00.000
One  two --&gt; &lt;b&gt;&amp;

01:01:01.500 --> 100:00:00.250
Three
"""


def test_subtitles():
  assert (timestamps.to_srt(SEGMENTS, TEXTS), timestamps.to_vtt(SEGMENTS, TEXTS)) == (SRT, VTT)
  assert (timestamps.to_srt([], []), timestamps.to_vtt([], [])) == ("", "WEBVTT\n")
