"""Timestamps of Whisper: the rule for their order, segments, fallback decisions and subtitles.

Definitions are those of transformers 5.24, unless a docstring names openai-whisper. Timestamp i is
the token `timestamp_begin + i`; it stands for i * 0.02 s after the start of its window. Axis
letters are those of `core.types`.
"""

import dataclasses
import html
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn import logsumexp
from jaxtyping import Float, Int

from specdec_jax.core.arrays import highest
from specdec_jax.core.context import Prefixes
from specdec_jax.core.processors import LogitsProcessor

# Defaults of `transcribe` of openai-whisper. The thresholds of transformers are None by default.
OPENAI: dict[str, Any] = dict(
  temperature=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
  compression_ratio_threshold=2.4,
  logprob_threshold=-1.0,
  no_speech_threshold=0.6,
)
_PRECISION_S = 0.02  # time between two timestamps
_STRIDE = 2  # frames of 10 ms between two timestamps


@dataclasses.dataclass(frozen=True)
class TimestampRule(LogitsProcessor):
  """Allow timestamps in order only, and exclude other tokens where a timestamp is more probable.

  The first token is a timestamp. A timestamp after text ends a segment; another one or EOS follows.
  Text or EOS follows the first timestamp and two in a row. Timestamps increase, but a segment may
  start where the one before it ends. If all timestamps together are more probable than the most
  probable other token, one of them is next, so processors that suppress tokens must come before.

  Tokens before `Prefixes.prompt_length`, such as previous text, do not count. The rule alone never
  excludes all tokens. Where processors together do, `process` ignores them; in transformers all
  logits are -inf there, so that argmax gives token 0 and sampling fails.

  Attributes:
    no_timestamps_id: token before timestamp 0, which declares a transcript without timestamps.
    eos_id: EOS; all ids before it are text.
    max_initial: index of the latest first timestamp; None for no limit.
  """

  no_timestamps_id: int
  eos_id: int
  max_initial: int | None = None

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    begin, start = self.no_timestamps_id + 1, prefixes.prompt_length[:, None]
    tokens, end = prefixes.tokens, prefixes.length - 1  # zeros follow the last token
    positions = jnp.arange(tokens.shape[2])[None, None]
    is_timestamp = (tokens >= begin) & (positions >= start[..., None])
    last = jnp.where(is_timestamp, positions, -1).max(axis=2)  # position of the last timestamp
    last_timestamp = jnp.take_along_axis(tokens, jnp.maximum(last, 0)[..., None], axis=2)
    before_end = jnp.maximum(end - 1, 0)[..., None]
    follows = jnp.take_along_axis(is_timestamp, before_end, axis=2)[..., 0] | (end == start)
    starts_segment = ((last == end) & follows)[..., None]
    ends_segment = ((last == end) & ~follows)[..., None]
    earliest = jnp.where(last[..., None] < 0, begin, last_timestamp + ~ends_segment)

    ids = jnp.arange(logits.shape[2])[None, None]
    latest = logits.shape[2] if self.max_initial is None else begin + self.max_initial
    is_first = (prefixes.length == start)[..., None]
    excluded = (ids == self.no_timestamps_id) | (ends_segment & (ids < self.eos_id))
    excluded |= (ids >= begin) & (starts_segment | (ids < earliest))
    excluded |= is_first & ((ids < begin) | (ids > latest))
    logits = jnp.where(excluded, -jnp.inf, logits)
    is_next = logsumexp(logits[..., begin:], axis=2, keepdims=True) > highest(logits[..., :begin])
    return jnp.where(is_next & (ids < begin), -jnp.inf, logits)


class Segment(NamedTuple):
  """Part of a transcript: its start and end, in seconds of the file, and its tokens."""

  start: float
  end: float
  tokens: Int[np.ndarray, " T"]


def split(
  tokens: Sequence[int] | np.ndarray, timestamp_begin: int, offset_s: float, num_frames: int
) -> tuple[list[Segment], int]:
  """Return the segments of a window, and the number of frames by which the next window advances.

  A segment ends between two timestamps in a row. If the tokens do not end with a timestamp after
  text, those after the last segment are dropped, and the next window starts where it ends. Without
  two timestamps in a row, all tokens are one segment.

  Args:
    tokens: generated tokens without EOS.
    offset_s: start of the window in seconds.
    num_frames: length of the window without padding, in frames of 10 ms. A segment without
      timestamps ends with the window; transformers computes this end in float32, and it is 0.02 s
      earlier for 86 of the lengths up to 3,000.
  """
  tokens = np.asarray(tokens, np.int32)
  index = tokens - timestamp_begin
  is_timestamp = index >= 0
  cuts = (np.flatnonzero(is_timestamp[:-1] & is_timestamp[1:]) + 1).tolist()
  if not cuts:
    last = index[is_timestamp][-1:].sum() or num_frames // _STRIDE
    return [Segment(offset_s, offset_s + int(last) * _PRECISION_S, tokens)], num_frames
  is_whole = is_timestamp[-2:].tolist() == [False, True]
  ends = [*cuts, len(tokens)] if is_whole else cuts
  times = offset_s + index * _PRECISION_S
  segments = []
  for start, end in zip([0, *cuts], ends):
    stop = end + (not is_whole and end == cuts[-1])  # includes the timestamp after the last segment
    segments.append(Segment(float(times[start]), float(times[end - 1]), tokens[start:stop]))
  return segments, num_frames if is_whole else int(index[cuts[-1] - 1]) * _STRIDE


def compression_ratio(tokens: Sequence[int] | np.ndarray, vocab_size: int) -> float:
  """Return the compression ratio of the bytes of tokens; transformers includes EOS."""
  width = int(math.log2(vocab_size) / 8) + 1
  return _compression_ratio(b"".join(int(token).to_bytes(width, "little") for token in tokens))


def text_compression_ratio(text: str) -> float:
  """Return the compression ratio of a text in UTF-8; openai-whisper strips the text before."""
  return _compression_ratio(text.encode())


def _compression_ratio(content: bytes) -> float:
  return len(content) / len(zlib.compress(content))


def needs_fallback(
  ratio: float,
  mean_logprob: float,
  no_speech_prob: float,
  *,
  compression_ratio_threshold: float | None = None,
  logprob_threshold: float | None = None,
  no_speech_threshold: float | None = None,
) -> tuple[bool, bool]:
  """Return whether to decode a window at the next temperature, and whether to skip it as silence.

  A threshold of None switches its condition off. Without `logprob_threshold`, silence depends on
  `no_speech_prob` only, as in openai-whisper; transformers raises an error.

  Args:
    ratio: compression ratio.
    mean_logprob: mean log-probability of the tokens and EOS, after logits processors and at
      temperature 1.
    no_speech_prob: probability of the no-speech token after the start token, before processors.
  """
  is_improbable = logprob_threshold is not None and mean_logprob < logprob_threshold
  if no_speech_threshold is not None and no_speech_prob > no_speech_threshold:
    if is_improbable or logprob_threshold is None:
      return False, True
  is_repetitive = compression_ratio_threshold is not None and ratio > compression_ratio_threshold
  return is_repetitive or is_improbable, False


def to_srt(segments: Iterable[Segment], texts: Iterable[str]) -> str:
  """Return subtitles in SubRip format, without the segments whose text is empty."""
  cues = enumerate(_cues(segments, texts, ","), 1)
  return "\n".join(f"{i}\n{times}\n{text.replace('-->', '->')}\n" for i, (times, text) in cues)


def to_vtt(segments: Iterable[Segment], texts: Iterable[str]) -> str:
  """Return subtitles in WebVTT format, without the segments whose text is empty."""
  cues = _cues(segments, texts, ".")
  escaped = (f"{times}\n{html.escape(text, quote=False)}\n" for times, text in cues)
  return "\n".join(["WEBVTT\n", *escaped])


def _cues(
  segments: Iterable[Segment], texts: Iterable[str], point: str
) -> Iterator[tuple[str, str]]:
  for segment, text in zip(segments, texts, strict=True):
    if text := " ".join(text.strip().splitlines()):  # an empty line would end the cue
      yield f"{_time(segment.start, point)} --> {_time(segment.end, point)}", text


def _time(seconds: float, point: str) -> str:
  minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
  return (
    f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
  )
