"""Settings of generation, with the names and definitions of transformers.

`GenerationConfig` turns them into a sampling method, logits processors and limits. The defaults of
`Pair.generate` are the settings of the checkpoint: those of generation_config.json and, if a task
is given, its `task_specific_params`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from specdec_jax.core.processors import (
  ForcedTokens,
  FunctionProcessor,
  LogitsProcessor,
  MinLength,
  NoRepeatNgram,
  Processors,
  Renormalize,
  RepetitionPenalty,
  SequenceBias,
  SuppressAtBegin,
)
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.settings import HashableArray
from specdec_jax.errors import InputError, require_count, require_number, require_tokens, shown

Tokens = Sequence[int]
DEFAULT_NEW_TOKENS = 128
PROCESSORS = (
  *("sequence_bias", "encoder_repetition_penalty", "repetition_penalty", "no_repeat_ngram_size"),
  *("encoder_no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens"),
  *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
  "logits_processor",
)  # settings of logits processors
_FOR_BEAMS = "length_penalty", "early_stopping", "diversity_penalty", "renormalize_logits"
_FOR_SAMPLING = (
  *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"),
)
FILTERS = tuple(field.name for field in dataclasses.fields(Sampling) if field.name != "temperature")
# Values without an effect. For other settings it is 0 or False; None and [] are without effect too.
_NEUTRAL: dict[str, Any] = {
  **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"), 1),
  **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "length_penalty"), 1),
  **dict.fromkeys(("temperature", "top_p", "typical_p"), 1),
  **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
  """Settings of `Pair.generate`. None stands for the default.

  Attributes:
    max_new_tokens: maximum number of tokens of each output, EOS included. It takes precedence over
      `max_length`; if neither is given, it is 128.
    max_length: limit that also counts the tokens before the output: the start token of T5 or the
      prompt of a decoder-only model, and forced tokens (`decoder_input_ids`).
    min_length: minimum number of tokens before EOS, counted like those of `max_length`.
    min_new_tokens: minimum number of new tokens before EOS. It takes precedence over `min_length`.
    eos_token_id: token that ends a text, or several; by default the EOS token of the vocabulary.
    stop_strings: strings that end an output, which includes the tokens up to the end of the string.
    do_sample: False for argmax, True for sampling; by default whether `temperature` is above 0.
    temperature: sampling temperature; 0 is argmax. By default 1 if `do_sample` is True, else 0.
    top_k: number of most probable tokens to sample from; 0, the default, for all.
    top_p: probability mass of nucleus sampling; 1, the default, for all. See `Sampling` for this
      and the next four settings.
    min_p: minimum probability, as a fraction of the highest one.
    typical_p: probability mass of locally typical sampling.
    epsilon_cutoff: minimum probability.
    eta_cutoff: parameter of eta sampling.
    repetition_penalty: see `RepetitionPenalty`.
    encoder_repetition_penalty: above 1 to encourage tokens of the source.
    no_repeat_ngram_size: see `NoRepeatNgram`; 0 for none.
    encoder_no_repeat_ngram_size: the same for n-grams of the source.
    bad_words_ids: sequences of tokens that must not occur; a sequence of EOS alone is ignored.
    sequence_bias: bias of the last token of each sequence (see `SequenceBias`): a mapping from
      tuples of tokens to biases, or a list of (tokens, bias) pairs.
    suppress_tokens: tokens that must not occur.
    begin_suppress_tokens: tokens that must not be the first of an output; see `SuppressAtBegin`.
    forced_bos_token_id: first token after the start token.
    forced_eos_token_id: last token of an output that reaches its limit, or several to choose from.
    logits_processor: a `LogitsProcessor`, a function (see `FunctionProcessor`) from logits [V],
      tokens [T] and length to logits [V], or a list of these. They apply after the others.
    num_return_sequences: number of outputs per text; 1 by default.
    num_beams: number of beams; 1, the default, for no beam search.
    length_penalty: exponent of the length penalty in the scores of beams (see `Scorer`); by default
      1 for the scorer "hf" and 0.6 for "t5x".
    early_stopping: when a beam search ends; False (the default), True or "never" (see `Scorer`).
    renormalize_logits: whether a beam search normalizes log-probabilities again after the logits
      processors; False by default. Without beams, it has no effect.
    beam_scorer: "hf", the default, for scores and rules of transformers; "t5x" for those of t5x.
  """

  max_new_tokens: int | None = None
  max_length: int | None = None
  min_length: int | None = None
  min_new_tokens: int | None = None
  eos_token_id: int | Sequence[int] | None = None
  stop_strings: str | Sequence[str] | None = None
  do_sample: bool | None = None
  temperature: float | None = None
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  typical_p: float | None = None
  epsilon_cutoff: float | None = None
  eta_cutoff: float | None = None
  repetition_penalty: float | None = None
  encoder_repetition_penalty: float | None = None
  no_repeat_ngram_size: int | None = None
  encoder_no_repeat_ngram_size: int | None = None
  bad_words_ids: Sequence[Tokens] | None = None
  sequence_bias: Mapping[tuple[int, ...], float] | Sequence[tuple[Tokens, float]] | None = None
  suppress_tokens: Tokens | None = None
  begin_suppress_tokens: Tokens | None = None
  forced_bos_token_id: int | None = None
  forced_eos_token_id: int | Sequence[int] | None = None
  logits_processor: Callable | LogitsProcessor | Sequence[Callable | LogitsProcessor] | None = None
  num_return_sequences: int | None = None
  num_beams: int | None = None
  length_penalty: float | None = None
  early_stopping: bool | Literal["never"] | None = None
  renormalize_logits: bool | None = None
  beam_scorer: Literal["t5x", "hf"] | None = None

  def __post_init__(self):
    for name, choices in (
      ("do_sample", (None, False, True)),
      ("early_stopping", (None, False, True, "never")),
      ("renormalize_logits", (None, False, True)),
      ("beam_scorer", (None, "t5x", "hf")),
    ):
      value = getattr(self, name)
      if not any(value == x and type(value) is type(x) for x in choices):  # 0 == False
        raise InputError(f"{name} is {shown(value)}; give one of {choices}.")
    for name, least in (
      *(
        (name, 1) for name in ("max_new_tokens", "max_length", "num_return_sequences", "num_beams")
      ),
      *((name, 0) for name in ("min_length", "min_new_tokens", "top_k", "forced_bos_token_id")),
      *((name, 0) for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size")),
    ):
      if getattr(self, name) is not None:
        require_count(name, getattr(self, name), least)
    for name in ("repetition_penalty", "encoder_repetition_penalty"):
      if getattr(self, name) is not None:  # neither it nor its inverse is 0 or infinite in float32
        require_number(name, getattr(self, name), 1e-30, 1e30)
    for stop in self.stops:
      if not (isinstance(stop, str) and stop):
        raise InputError(f"stop_strings has {shown(stop)}; each must be a string, not ''.")
    self.sampling()

  @property
  def stops(self) -> tuple[Any, ...]:
    """Stop strings, without those with U+FFFD, which stands for bytes that are no character."""
    stops = (self.stop_strings,) if isinstance(self.stop_strings, str) else self.stop_strings
    return tuple(stop for stop in stops or () if "\ufffd" not in str(stop))

  def given(self) -> dict[str, Any]:
    """Return the settings that are not None."""
    return {name: value for name, value in vars(self).items() if value is not None}

  @classmethod
  def merged(cls, *sources: Mapping[str, Any]) -> "GenerationConfig":
    """Return the settings of several sources, such as a checkpoint, a task and a call.

    Later sources take precedence. None stands for a setting that is not given. Either of
    `max_new_tokens` and `max_length` replaces both of earlier sources, and the same holds for
    `min_new_tokens` and `min_length`. A temperature also replaces `do_sample` of earlier sources.
    """
    found: dict[str, Any] = {}
    for source in sources:
      given = {name: value for name, value in source.items() if value is not None}
      for name, replaced in (
        ("max_new_tokens", "max_length"),
        ("max_length", "max_new_tokens"),
        ("min_new_tokens", "min_length"),
        ("min_length", "min_new_tokens"),
        ("temperature", "do_sample"),
      ):
        if name in given:
          found.pop(replaced, None)
      found |= given
    return cls(**found)

  def sampling(self) -> Sampling:
    """Return the sampling method."""
    temperature = self.temperature
    if self.do_sample is False:
      temperature = 0.0
    elif temperature is None:
      temperature = 1.0 if self.do_sample else 0.0
    elif self.do_sample and temperature == 0:
      raise InputError("do_sample is True and temperature is 0, which is argmax; give one of them.")
    given = {name: getattr(self, name) for name in FILTERS if getattr(self, name) is not None}
    sampling = Sampling(temperature, **given)
    return Sampling(0.0) if sampling.is_argmax else sampling

  def eos_ids(self, default: int) -> tuple[int, ...]:
    """Return the tokens that end a text; `default` is used if `eos_token_id` is None."""
    return _token_ids("eos_token_id", default if self.eos_token_id is None else self.eos_token_id)

  def new_tokens(self, prompt_lengths: Sequence[int]) -> list[int]:
    """Return the limit of new tokens of each row, given the number of tokens before the output."""
    if self.max_length is None:
      return [self.max_new_tokens or DEFAULT_NEW_TOKENS] * len(prompt_lengths)
    limits = [self.max_length - length for length in prompt_lengths]
    if self.max_new_tokens is not None:
      return [self.max_new_tokens] * len(limits)
    if min(limits) < 1:
      raise InputError(
        f"max_length is {self.max_length}, and {max(prompt_lengths)} tokens come before the "
        "output; give max_new_tokens, which does not count them."
      )
    return limits

  def processors(
    self, vocab_size: int, eos_ids: tuple[int, ...], pad_id: int | None = 0
  ) -> Processors:
    """Return the logits processors in the order of transformers, with `logits_processor` last.

    `pad_id` is the token that pads sources; None for a decoder-only model.
    """
    require_tokens("eos_token_id", [eos_ids], vocab_size)
    eos = HashableArray(np.array(eos_ids, np.int32))
    found: list[LogitsProcessor] = []
    if self.sequence_bias:
      pairs = self.sequence_bias
      pairs = pairs.items() if isinstance(pairs, Mapping) else pairs
      biases = {tuple(tokens): float(bias) for tokens, bias in pairs}
      require_tokens("sequence_bias", biases, vocab_size)
      for bias in biases.values():
        if bias != -np.inf:
          require_number("a bias of sequence_bias", bias, -1e30, 1e30)
      found.append(SequenceBias.of(biases))
    if self.encoder_repetition_penalty not in (None, 1):
      inverse = 1 / self.encoder_repetition_penalty
      found.append(RepetitionPenalty(inverse, of_prompt=True, pad_id=pad_id))
    if self.repetition_penalty not in (None, 1):
      found.append(RepetitionPenalty(float(self.repetition_penalty)))
    if self.no_repeat_ngram_size:
      found.append(NoRepeatNgram(int(self.no_repeat_ngram_size)))
    if self.encoder_no_repeat_ngram_size:
      size = int(self.encoder_no_repeat_ngram_size)
      found.append(NoRepeatNgram(size, of_prompt=True, pad_id=pad_id))
    if self.bad_words_ids:
      require_tokens("bad_words_ids", self.bad_words_ids, vocab_size)
      # A text may always end.
      words = [word for word in self.bad_words_ids if [*word] not in [[eos] for eos in eos_ids]]
      if words:
        found.append(SequenceBias.excluding(words))
    min_length = 0 if self.min_new_tokens is not None else self.min_length
    if min_length or self.min_new_tokens:
      found.append(MinLength(int(min_length or 0), int(self.min_new_tokens or 0), eos))
    if self.forced_bos_token_id is not None or self.forced_eos_token_id is not None:
      forced = {"first": self.forced_bos_token_id, "last": self.forced_eos_token_id}
      arrays = {}
      for name, tokens in forced.items():
        if tokens is not None:
          ids = _token_ids("forced token", tokens)
          require_tokens("forced token", [ids], vocab_size)
          arrays[name] = HashableArray(np.array(ids, np.int32))
      found.append(ForcedTokens(**arrays))
    if self.suppress_tokens:
      tokens = [(token,) for token in self.suppress_tokens]
      require_tokens("suppress_tokens", tokens, vocab_size)
      found.append(SequenceBias.excluding(tokens))
    if self.begin_suppress_tokens:
      require_tokens("begin_suppress_tokens", [self.begin_suppress_tokens], vocab_size)
      ids = HashableArray(np.array(self.begin_suppress_tokens, np.int32))
      found.append(SuppressAtBegin(ids, self.forced_bos_token_id is not None))
    own: Any = () if self.logits_processor is None else self.logits_processor
    for processor in own if isinstance(own, list | tuple) else (own,):
      is_built_in = isinstance(processor, LogitsProcessor)
      found.append(processor if is_built_in else FunctionProcessor(processor))
    if self.renormalize_logits and (self.num_beams or 1) > 1:
      found.append(Renormalize())
    return tuple(found)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
  ids = tuple(value) if isinstance(value, list | tuple) else (value,)
  for token in ids:
    require_count(name, token, 0)
  return ids


def with_effect(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Return the settings, by their names in transformers, that change outputs."""
  others = () if settings.get("num_beams") not in (None, 1) else _FOR_BEAMS
  others += () if settings.get("do_sample") else _FOR_SAMPLING
  return {
    name: value
    for name, value in settings.items()
    if name not in others and value not in (None, [], _NEUTRAL.get(name, 0))
  }


SETTINGS = tuple(field.name for field in dataclasses.fields(GenerationConfig))
