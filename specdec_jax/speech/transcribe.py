"""Transcription of recordings by speculative decoding, with the windows and settings of Whisper.

A recording is decoded in windows of 30 seconds. With timestamps, a window begins where the last
whole segment of the one before ends, so that each recording has one row of a batch, and several
recordings are decoded together (`batching.Slots`).
"""

import dataclasses
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from specdec_jax.batching import Slots, Text
from specdec_jax.core.context import Encoded, Prompt
from specdec_jax.core.counts import require_finite
from specdec_jax.core.decode import Decoder
from specdec_jax.core.generation_config import SETTINGS
from specdec_jax.core.sampling import sample_keys
from specdec_jax.core.trees import given_tree
from specdec_jax.core.types import AnyPair, DecodeResult
from specdec_jax.data.vocabulary import padded
from specdec_jax.drafts.given import Place
from specdec_jax.errors import InputError, require_count, require_number, require_seed, require_text
from specdec_jax.generate import (
  GenerateCall,
  Output,
  draft_tokens,
  generation_config,
  size_of_outputs,
  text_of,
  with_drafts,
)
from specdec_jax.models.families import with_feature_layers
from specdec_jax.models.whisper import WhisperModel
from specdec_jax.speech import timestamps as times
from specdec_jax.speech.audio import HOP, SAMPLE_RATE, log_mel, read_audio

_WINDOW = 3000  # frames of a window
_FRAME = HOP / SAMPLE_RATE  # seconds
_MAX_ROUNDS = 1 << 20  # of a call: until a window ends
_REFUSED = {  # settings of transformers and of Whisper's packages, and what they need
  **dict.fromkeys(("num_beams", "beam_size", "best_of", "patience", "length_penalty"), "beams"),
  **dict.fromkeys(("word_timestamps", "return_token_timestamps"), "times of words"),
  **dict.fromkeys(("vad_filter", "vad_parameters"), "voice activity detection"),
  **dict.fromkeys(("diarize", "diarization"), "names of speakers"),
  **dict.fromkeys(("encoder_repetition_penalty", "encoder_no_repeat_ngram_size"), "source tokens"),
  "num_return_sequences": "several outputs of a window",
  "stop_strings": "stop strings",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Transcript:
  """Transcript of a recording. `str(transcript)` is its text.

  Attributes:
    segments: parts with their times in seconds; without timestamps, the whole recording.
    texts: text of each segment.
    language: code of the language, such as 'en'; None for an English-only model.
    duration: length of the recording in seconds.
    outputs: output of each window, with its rounds.
  """

  segments: tuple[times.Segment, ...]
  texts: tuple[str, ...]
  language: str | None
  duration: float
  outputs: tuple[Output, ...]

  @property
  def text(self) -> str:
    """Text of all segments, without spaces at its ends."""
    return "".join(self.texts).strip()

  def __str__(self) -> str:
    return self.text

  @property
  def counts(self) -> dict[str, int]:
    """Numbers of windows, tokens, rounds, and accepted and rejected draft tokens."""
    accepted, rejected = map(sum, zip(*(output.acceptance_counts for output in self.outputs)))
    return dict(
      windows=len(self.outputs),
      tokens=sum(len(output.tokens) for output in self.outputs),
      rounds=sum(len(output.rounds.num_emitted) for output in self.outputs if output.rounds),
      accepted=accepted,
      rejected=rejected,
    )

  def formatted(self, format: Literal["txt", "srt", "vtt", "json"]) -> str:
    """Return the content of a file: text, subtitles, or JSON with segments and `counts`."""
    if format == "txt":
      return f"{self}\n"
    if format != "json":
      write = times.to_srt if format == "srt" else times.to_vtt
      return write(self.segments, self.texts)
    segments = [
      dict(start=round(each.start, 2), end=round(each.end, 2), text=text)
      for each, text in zip(self.segments, self.texts, strict=True)
    ]
    record = dict(text=self.text, language=self.language, duration=self.duration)
    return json.dumps(record | dict(segments=segments) | self.counts, ensure_ascii=False) + "\n"


def transcribe(
  pair: AnyPair, audio: Any, draft_text: str | None = None, **settings: Any
) -> Transcript:
  """Return the transcript of one recording; see `Transcriber` for the settings.

  Args:
    draft_text: text that the transcript may have, such as that of a smaller model, as a draft.
  """
  return next(transcripts(pair, [audio], [draft_text], **settings))


def transcripts(
  pair: AnyPair,
  audio: Iterable[Any],
  draft_texts: Iterable[str | None] = (),
  **settings: Any,
) -> Iterator[Transcript]:
  """Yield the transcripts of recordings in order; see `Transcriber` for the settings.

  Args:
    draft_texts: text that each transcript may have, or None; recordings after the last one have
      none.
  """
  if isinstance(audio, str | bytes | os.PathLike) or getattr(audio, "ndim", 2) == 1:
    raise InputError("audio is one recording; give a list, or call transcribe.")
  names = {field.name for field in dataclasses.fields(Transcriber)} - {"pair", "generation"}
  own = {name: value for name, value in settings.items() if name in names}
  rest = {name: value for name, value in settings.items() if name not in names}
  return Transcriber(pair, generation=rest, **own).run(audio, draft_texts=draft_texts)


def clip_prompts(pair: AnyPair, audio: Iterable[Any]) -> Encoded:
  """Return the prompts of recordings of at most 30 seconds, without timestamps."""
  transcriber = Transcriber(pair, timestamps=False)
  opened = [transcriber.opened(i, source) for i, source in enumerate(audio)]
  return stacked([transcriber._prompt(each, each.prompt) for each in opened])[0]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Transcriber:
  """Settings of transcriptions, with the names of transformers.

  Tokens are those of transformers 5.24 with the same settings, with or without a draft.

  Attributes:
    language: code of the language, such as 'en', or a name that transformers knows, such as
      'english'; by default that of the files of the target, or else the most probable one of the
      first window.
    task: 'transcribe', or 'translate' for a translation to English.
    timestamps: whether segments have times. By default only recordings of more than 30 seconds
      have, which need them.
    initial_prompt: text that precedes each window, with names or in a style that the transcript
      should have.
    condition_on_prev_tokens: whether the text of earlier windows precedes a window.
    temperature: sampling temperature, 0 by default; or several, which are tried one after the other
      until no threshold asks for another one.
    compression_ratio_threshold: largest compression ratio of a window's tokens.
    logprob_threshold: smallest mean log-probability of a window's tokens.
    no_speech_threshold: probability of no speech above which a window is skipped if its mean
      log-probability is below `logprob_threshold`.
    fallback: 'openai' for the temperatures and thresholds of OpenAI's package, where they are not
      given, and its compression ratio of texts.
    sample_rate: rate of recordings that are arrays, in Hz.
    gamma: number of draft tokens per round; 0 for autoregressive decoding.
    tree: parents of the draft tokens of a tree, instead of a chain.
    batch_size: number of recordings that are decoded together.
    seed: seed of all sampling; the keys of a window depend on it, on the number of the recording
      and on the place of the window.
    generation: fields of `GenerationConfig`, which take precedence over those of the checkpoint.

  Raises:
    InputError: the target is no Whisper, or a setting is invalid or not supported.
  """

  pair: AnyPair = dataclasses.field(kw_only=False)
  language: str | None = None
  task: Literal["transcribe", "translate"] | None = None
  timestamps: bool | None = None
  initial_prompt: str | None = None
  condition_on_prev_tokens: bool = False
  temperature: float | Sequence[float] | None = None
  compression_ratio_threshold: float | None = None
  logprob_threshold: float | None = None
  no_speech_threshold: float | None = None
  fallback: Literal["openai"] | None = None
  sample_rate: int = SAMPLE_RATE
  gamma: int = 5
  tree: Sequence[int] | None = None
  batch_size: int = 1
  seed: int = 0
  generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    require_count("batch_size", self.batch_size)
    require_seed(self.seed)
    name, tokens = self.pair.target.name, self.tokens
    for setting, value in self.generation.items():
      if setting in _REFUSED and (value is True or value not in (None, False, 1)):
        raise InputError(f"{setting} is not supported: it needs {_REFUSED[setting]}.")
      if setting not in SETTINGS and setting not in _REFUSED:
        raise InputError(f"There is no setting {setting}.")
    used = {name: x for name, x in self.generation.items() if name not in _REFUSED}
    object.__setattr__(self, "generation", used)
    if tokens is None:
      raise InputError(f"{name} does not read speech; give a Whisper as target.")
    if (positions := self._target.config.source_positions) != _WINDOW // 2:
      raise InputError(
        f"{name} encodes {positions} positions, not the {_WINDOW // 2} of 30 seconds."
      )
    for threshold in times.OPENAI.keys() - {"temperature"}:
      if getattr(self, threshold) is not None:
        require_number(threshold, getattr(self, threshold), -math.inf, math.inf)
    if language := self.language or tokens.language:
      object.__setattr__(self, "language", tokens.code(language))
    if self.initial_prompt is not None:
      require_text("initial_prompt", self.initial_prompt)
    for setting, known in (("task", tokens.tasks), ("language", tokens.languages)):
      if (value := getattr(self, setting)) not in (None, *known):
        those = f"it knows {', '.join(known)}" if known else "it is English-only"
        raise InputError(f"{setting} is {value!r}, which {name} does not know; {those}.")
    if self.fallback not in (None, "openai"):
      raise InputError(f"fallback is {self.fallback!r}; give 'openai', or thresholds.")
    if self.timestamps and tokens.no_timestamps_id is None:
      raise InputError(f"The files of {name} do not name its timestamps.")
    if self._prompt_width > 4 and tokens.previous_id is None:
      raise InputError(f"The files of {name} do not name the token that announces previous text.")
    if not self.calls:  # which checks the other settings
      raise InputError("temperature is empty; give one or several temperatures.")

  @property
  def tokens(self) -> Any:
    """Tokens of prompts (`SpeechTokens`)."""
    return self.pair.target.speech

  @functools.cached_property
  def _fallback(self) -> dict[str, Any]:
    """Temperature and thresholds, those of `fallback` included."""
    default = times.OPENAI if self.fallback else {}
    given = {name: getattr(self, name) for name in times.OPENAI}
    return {name: default.get(name) if x is None else x for name, x in given.items()}

  @functools.cached_property
  def calls(self) -> list[GenerateCall]:
    """Calls of `generate`, one for each temperature."""
    given, shape = self._fallback["temperature"], given_tree(self.gamma, self.tree)
    if shape is None:
      raise InputError("gamma or tree is 'auto', which is for texts; give numbers.")
    needs_log_probs = self._fallback["logprob_threshold"] is not None
    calls = []
    for temperature in given if isinstance(given, Sequence) else (given,):
      chosen = {} if temperature is None else {"temperature": temperature}
      config, _ = generation_config(self.pair, None, {**self.generation, **chosen})
      calls.append(GenerateCall(self.pair, config, shape, logprobs=needs_log_probs))
    return calls

  @functools.cached_property
  def _target(self) -> Any:
    """The target without the hidden states of layers that a draft reads."""
    return with_feature_layers(self.pair.target.model, ())

  @functools.cached_property
  def _initial(self) -> list[int]:
    """Tokens of `initial_prompt`."""
    words = f" {self.initial_prompt.strip()}" if self.initial_prompt else ""
    return self.pair.vocabulary.encode_target(words) if words else []

  @property
  def _most_before(self) -> int:
    """Largest number of tokens of previous text."""
    return self._target.config.num_positions // 2 - 1

  @property
  def _prompt_width(self) -> int:
    """Number of tokens of a padded prompt: at most 4, and previous text with its first token."""
    return 4 + (self._most_before + 1 if self.condition_on_prev_tokens or self._initial else 0)

  @property
  def _timestamp_begin(self) -> int:
    """Token of the timestamp 0."""
    last = self.tokens.no_timestamps_id
    return self._target.vocab_size + 1 if last is None else last + 1

  def run(
    self,
    audio: Iterable[Any],
    report: Callable[[int, float, float], object] = lambda *_: None,
    draft_texts: Iterable[str | None] = (),
  ) -> Iterator[Transcript]:
    """Yield the transcripts of recordings in order.

    Args:
      audio: paths or bytes of files, or arrays of samples (`audio.read_audio`). One is read when a
        row of the batch is free. None is left out, but counts in the numbers of others.
      report: function that is called after each window with the number of the recording, its
        seconds so far, and its duration.
      draft_texts: see `transcripts`.

    Raises:
      InputError: a recording cannot be read, or has more than 30 seconds but must have no
        timestamps; or there is not enough memory.
    """
    drafts = itertools.chain(draft_texts, itertools.repeat(None))
    numbered = zip(itertools.count(), audio, drafts)
    waiting = (each for each in numbered if each[1] is not None)
    slots: dict[tuple[bool, int, bool], Slots] = {}  # by timestamps, attempt and given text
    active: dict[Text, _Recording] = {}
    ready: list[_Recording] = []  # for their next window
    ended: dict[int, Transcript] = {}
    order: list[int] = []  # of recordings whose transcripts are not yielded yet
    while True:
      for each in itertools.islice(waiting, self.batch_size - len(ready) - len(active)):
        ready.append(self.opened(*each))
        order.append(each[0])
      if not (ready or active):
        return
      for key in sorted({each.group for each in ready}):
        if key not in slots:
          slots[key] = self._new_slots(*key)
        chosen = [each for each in ready if each.group == key]
        texts = {self.text(each, slots[key].decoder): each for each in chosen}
        slots[key].add([*texts])
        active |= texts
      ready.clear()
      for group in slots.values():
        for text in group.step(_MAX_ROUNDS) if group.num_free < self.batch_size else ():
          recording = active.pop(text)
          goes_on = self.take(recording)
          report(
            recording.index, min(recording.seek * _FRAME, recording.duration), recording.duration
          )
          if goes_on:
            ready.append(recording)
          else:
            ended[recording.index] = self.transcript(recording)
      while order and order[0] in ended:
        yield ended.pop(order.pop(0))

  def read(self, source: Any) -> Float[np.ndarray, " samples"]:
    """Return the samples of a recording at 16 kHz, or raise InputError as `run` does."""
    samples = read_audio(source, self.sample_rate)
    if self._is_timed(samples) and (
      self.timestamps is False or self.tokens.no_timestamps_id is None
    ):
      name = source if isinstance(source, str | os.PathLike) else "the audio"
      reason = "timestamps is False" if self.timestamps is False else "the target has none"
      duration = len(samples) / SAMPLE_RATE
      raise InputError(f"{name} has {duration:.0f} s, which need timestamps, and {reason}.")
    return samples

  def _is_timed(self, samples: np.ndarray) -> bool:
    return bool(self.timestamps) or len(samples) > _WINDOW * HOP

  def opened(self, index: int, source: Any, draft_text: str | None = None) -> "_Recording":
    """Read a recording, and decide on its timestamps and language."""
    samples, config = self.read(source), self._target.config
    duration, timed = len(samples) / SAMPLE_RATE, self._is_timed(samples)
    mel = log_mel(samples, config.num_mels, _WINDOW * HOP)
    prompt = self.tokens.prompt(self.language, self.task, timed)
    recording = _Recording(index, mel, duration, timed, [], self.condition_on_prev_tokens)
    if given := draft_tokens(self.pair, draft_text, f"draft_texts[{index}]"):
      tokens = padded([given], size_of_outputs(len(given)))
      recording.place = Place.start(jnp.asarray(tokens), jnp.array([len(given)]))
    if None in prompt:
      logits = self._logits_after_start(recording)
      detected = max(self.tokens.languages.values(), key=lambda token: logits[token])
    recording.prompt = [detected if token is None else token for token in prompt]
    return recording

  def _logits_after_start(self, recording: "_Recording") -> np.ndarray:
    """Return the logits [V] after the first token of the transcript of a window."""
    prompt = self._prompt(recording, [*self._before(recording), self.tokens.start_id])
    return np.asarray(_last_logits(self._target, self.pair.target.params, prompt))[0]

  def _before(self, recording: "_Recording") -> list[int]:
    """Return the tokens of previous text, after the token that announces it."""
    tokens = [*self._initial]
    for segment in recording.segments if recording.conditions else ():
      own = segment.tokens.tolist()
      both_end = len(own) > 2 and own[-2] >= self._timestamp_begin  # of this segment, and the next
      tokens += own[:-1] if both_end else own
    return [self.tokens.previous_id, *tokens[-self._most_before :]] if tokens else []

  def _prompt(self, recording: "_Recording", tokens: Sequence[int]) -> Encoded:
    """Return the prompt of the current window, which is encoded once."""
    if recording.encoded is None:
      mel = recording.mel[recording.seek :][:_WINDOW]
      mel = jnp.asarray(np.pad(mel, ((0, _WINDOW - len(mel)), (0, 0))))[None]
      pair, own = self.pair, self.pair.draft.encoder
      source = _encode(self._target, pair.target.params, mel)
      recording.encoded = source, None if own is None else _encode(own, pair.draft.params, mel)
    source, of_draft = recording.encoded
    row = jnp.asarray(padded([tokens], self._prompt_width))
    return Encoded(source, row, jnp.array([len(tokens)], jnp.int32), of_draft)

  def text(self, recording: "_Recording", decoder: Decoder) -> Text:
    """Return the current window of a recording as a text to decode."""
    tokens = [*self._before(recording), *recording.prompt]
    config = self.calls[recording.attempt].config
    most = self._target.config.num_positions - len(tokens)
    # As in transformers, max_length does not count the prompt of a window.
    limit = config.max_new_tokens or min(config.max_length or most, most)
    if limit > most:
      raise InputError(
        f"{len(tokens)} tokens before the output and {limit} new tokens are too long for "
        f"{self.pair.target.name}, which has {most + len(tokens)} positions; give max_new_tokens "
        f"of at most {most}."
      )
    (key,) = sample_keys(self.seed, [recording.index], 1)
    for number in (len(recording.outputs), recording.attempt):
      key = jax.random.fold_in(key, number)
    prompt: Prompt = self._prompt(recording, tokens)
    if recording.place is not None:
      width = self._target.config.num_positions
      prompt = with_drafts(prompt, [recording.place.rest(width)], width)
    return Text(decoder, prompt, key, limit, recording.receive)

  def decoder(self, timed: bool, attempt: int = 0, given: bool = False) -> Decoder:
    """Return the decoder of windows.

    Args:
      timed: whether they have timestamps.
      attempt: number of the temperature.
      given: whether a transcript is given as a draft.
    """
    call, tokens = self.calls[attempt], self.tokens
    if given:
      call = call.with_given_drafts(batch_size=self.batch_size)
    if not timed:
      return call.decoder()
    rule = times.TimestampRule(tokens.no_timestamps_id, call.eos_ids[0], tokens.max_initial)
    return call.decoder((rule,))

  def _new_slots(self, timed: bool, attempt: int, given: bool) -> Slots:
    config, decoder = self.calls[attempt].config, self.decoder(timed, attempt, given)
    most: int = config.max_new_tokens or self._target.config.num_positions
    return Slots(decoder, self.pair.params, self.batch_size, most, stacked)

  def take(self, recording: "_Recording") -> bool:
    """Take the result of a window; return whether a window or another attempt follows."""
    call, result = self.calls[recording.attempt], recording.result
    assert result is not None
    output = call.output(require_finite(result), 0)
    tokens = output.tokens
    again, skip = self._judged(recording, result, tokens)
    if again and recording.attempt + 1 < len(self.calls):
      recording.attempt += 1
      return True
    recording.outputs.append(output)
    num_frames = min(_WINDOW, len(recording.mel) - recording.seek)
    if not skip:
      ended = len(tokens) and tokens[-1] in call.eos_ids
      segments, num_frames = times.split(
        tokens[:-1] if ended else tokens, self._timestamp_begin, recording.seek * _FRAME, num_frames
      )
      recording.segments += segments
      if recording.place is not None and segments:
        spoken = np.concatenate([segment.tokens for segment in segments])
        recording.place = recording.place.after_text(spoken[spoken < self.pair.vocabulary.eos_id])
    temperature = call.config.sampling().temperature
    recording.conditions = self.condition_on_prev_tokens and temperature < 0.5
    recording.seek += num_frames
    recording.attempt, recording.encoded = 0, None
    return recording.seek < len(recording.mel)

  def _judged(
    self, recording: "_Recording", result: DecodeResult, tokens: np.ndarray
  ) -> tuple[bool, bool]:
    """Return whether a window needs another temperature, and whether it is skipped."""
    thresholds = {name: x for name, x in self._fallback.items() if name != "temperature"}
    ratio = mean = no_speech = 0.0
    if thresholds["compression_ratio_threshold"] is not None:
      if self.fallback:
        ratio = times.text_compression_ratio(self._words(tokens).strip())
      else:
        ratio = times.compression_ratio(tokens, self._target.vocab_size)
    if result.log_probs is not None:
      mean = float(result.log_probs[0, : len(tokens), 1].mean())
    if thresholds["no_speech_threshold"] is not None:
      logits = self._logits_after_start(recording)
      no_speech = float(jax.nn.softmax(logits)[self._timestamp_begin - 2])
    return times.needs_fallback(ratio, mean, no_speech, **thresholds)

  def _words(self, tokens: np.ndarray) -> str:
    return text_of(self.pair, tokens[tokens < self._timestamp_begin])

  def stable_text(self, recording: "_Recording") -> str:
    """Return the text of the current window so far that no further tokens change."""
    assert recording.result is not None
    tokens = np.asarray(recording.result.tokens[0, : recording.result.lengths[0]])
    (*whole, last), _ = times.split(tokens, self._timestamp_begin, 0, 0)
    end = text_of(self.pair, last.tokens[last.tokens < self._timestamp_begin], False)
    return "".join([*(self._words(segment.tokens) for segment in whole), end])

  def transcript(self, recording: "_Recording") -> Transcript:
    """Return the transcript of a recording after its last window."""
    codes = {token: code for code, token in self.tokens.languages.items()}
    language = next((codes[token] for token in recording.prompt if token in codes), None)
    segments = recording.segments
    if segments and not recording.timed:  # a model may still emit timestamps
      tokens = np.concatenate([segment.tokens for segment in segments])
      segments = [times.Segment(0.0, recording.duration, tokens)]
    texts = tuple(self._words(segment.tokens) for segment in segments)
    return Transcript(
      tuple(segments), texts, language, recording.duration, tuple(recording.outputs)
    )


@dataclasses.dataclass(eq=False)
class _Recording:
  """Recording that is being transcribed.

  Attributes:
    mel: [F, M], log-mel spectrogram of the whole recording.
    timed: whether its windows have timestamps.
    prompt: tokens before the transcript of each window.
    conditions: whether earlier text precedes the current window.
    seek: first frame of the current window.
    attempt: number of temperatures that the current window has been decoded with before.
    encoded: outputs of the encoders of target and draft for the current window.
    place: a given transcript, and the place in it at the start of the current window.
  """

  index: int
  mel: np.ndarray
  duration: float
  timed: bool
  prompt: list[int]
  conditions: bool
  seek: int = 0
  attempt: int = 0
  encoded: Any = None
  place: Place | None = None
  segments: list[times.Segment] = dataclasses.field(default_factory=list)
  outputs: list[Output] = dataclasses.field(default_factory=list)
  result: DecodeResult | None = None

  @property
  def group(self) -> tuple[bool, int, bool]:
    """Arguments of the `decoder` of its windows."""
    return self.timed, self.attempt, self.place is not None

  def receive(self, result: DecodeResult | Exception, is_last: bool) -> None:
    """Keep the result of a window so far, as `batching.Text.report`."""
    assert isinstance(result, DecodeResult)
    self.result = result


def stacked(rows: Sequence[Prompt]) -> tuple[Prompt, None]:
  """Return the prompts of windows as one, and None, as the function `prompts` of `Slots`."""
  return jax.tree.map(lambda *x: jnp.concatenate(x), *rows), None


_encode = jax.jit(WhisperModel.encode, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _last_logits(model: WhisperModel, params: Any, prompt: Encoded) -> Float[Array, "B V"]:
  """Return the logits of the token after each prompt."""
  _, cache = model.prefill(params, prompt, prompt.tokens.shape[1] + 1)
  last = jnp.take_along_axis(prompt.tokens, prompt.length[:, None] - 1, axis=1)
  return model.extend(params, cache, last)[0][:, 0]
