"""Whisper (Radford et al., 2022): an encoder of speech with the decoder of `models.t5`.

Axis letters are those of `core.types`; F is the number of frames of a window, M that of mels.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.context import Prompt
from specdec_jax.models.config import T5Config
from specdec_jax.models.decoder import KeysValues, empty_slots
from specdec_jax.models.layers import Dense
from specdec_jax.models.t5 import T5, T5Model
from specdec_jax.models.transformer import Cache


@dataclasses.dataclass(frozen=True)
class SpeechTokens:
  """Tokens with which a Whisper is told what to do.

  Attributes:
    start_id: first token of a transcript.
    languages: token of each language, by its code, such as 'en'; empty if the model is
      English-only.
    tasks: tokens of 'transcribe' and 'translate'; empty if the model is English-only.
    forced: tokens after the first one unless a language or a task is given; None for the language
      that is detected.
    no_timestamps_id: token that asks for no timestamps; those of the timestamps 0, 0.02 s, ...
      follow it. None if the files do not name it.
    previous_id: token before text that precedes the transcript; None if the files do not name it.
    max_initial: largest number of the first timestamp; None for no limit.
    language: the language that the files set, if any; see `code`.
    task: the task that they set, if any.
  """

  start_id: int
  languages: Mapping[str, int] = dataclasses.field(default_factory=dict)
  tasks: Mapping[str, int] = dataclasses.field(default_factory=dict)
  forced: tuple[int | None, ...] = ()
  no_timestamps_id: int | None = None
  previous_id: int | None = None
  max_initial: int | None = None
  language: str | None = None
  task: str | None = None

  def code(self, language: str) -> str:
    """Return the code of a language, given its code, token or name; or else `language`.

    Names are those of transformers, if it is installed.
    """
    code = str(language).lower().strip("<|>")
    if code in self.languages:
      return code
    try:
      from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE
    except ImportError:
      return language
    return TO_LANGUAGE_CODE.get(code, language)

  def prompt(self, language: str | None, task: str | None, timestamps: bool) -> list[int | None]:
    """Return the tokens before a transcript, as transformers does; None for a detected language."""
    language, task = language or self.language, task or self.task
    found = [self.start_id, *(() if language or task else self.forced)]
    if language:
      found.append(self.languages[language])
    elif self.languages and found[1:2] in ([], [None]):
      found[1:2] = [None]
    if self.tasks and (language or task):
      found.append(self.tasks[task or "transcribe"])
    found = [token for token in found if token is None or token != self.no_timestamps_id]
    return found if timestamps or self.no_timestamps_id is None else [*found, self.no_timestamps_id]


class Whisper(T5):
  """Encoder-decoder whose sources are windows of speech."""

  config: T5Config

  def setup(self):
    super().setup()
    self.conv1 = Dense(self.config.encoder, self.config.encoder.emb_dim)
    self.conv2 = Dense(self.config.encoder, self.config.encoder.emb_dim)

  def encoded(
    self, mels: Float[Array, "B F M"], deterministic: bool = True
  ) -> Float[Array, "B S E"]:
    """Return the output of the encoder for log-mel spectrograms; S is F / 2."""
    x = mels.astype(self.config.layout.activations)
    x = nn.gelu(self.conv1(_neighbors(x)), approximate=False)
    x = nn.gelu(self.conv2(_neighbors(x)[:, ::2]), approximate=False)
    return self.encoder(x, jnp.ones(x.shape[:2], bool), deterministic)

  def cross(
    self, encoded: Float[Array, "B S E"]
  ) -> tuple[tuple[KeysValues, ...], Float[Array, "B 1 1 S"]]:
    """Return keys, values and bias for cross-attention to encoded sources."""
    bias = jnp.zeros((len(encoded), 1, 1, encoded.shape[1]), jnp.float32)
    return self.decoder.cross_keys_values(encoded), bias

  def encode(
    self, source: Float[Array, "B F M"], deterministic: bool = True
  ) -> tuple[tuple[KeysValues, ...], Float[Array, "B 1 1 S"]]:
    """Return keys, values and bias for cross-attention to log-mel spectrograms."""
    return self.cross(self.encoded(source, deterministic))


def _neighbors(x: Float[Array, "B F M"]) -> Float[Array, "B F 3*M"]:
  """Return each frame with the ones before and after it, so that a convolution is a matmul."""
  padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
  return jnp.concatenate([padded[:, i : i + x.shape[1]] for i in range(3)], axis=-1)


@dataclasses.dataclass(frozen=True)
class WhisperModel(T5Model):
  """Whisper as a `Model`, whose prompts are `Encoded`: `encode` runs the encoder before.

  `prefill` runs the decoder over the tokens of the prompt: language, task and previous text.
  """

  module_type = Whisper

  def encode(self, params: Any, mels: Float[Array, "B F M"]) -> Float[Array, "B S E"]:
    """Return the output of the encoder for windows of log-mel spectrograms (`speech.audio`)."""
    return Whisper(self.config).apply({"params": params}, mels, method="encoded")

  def prompt_tokens(self, prompt: Prompt) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    return prompt.tokens, prompt.length

  def prefill(
    self, params: Any, prompt: Prompt, num_slots: int
  ) -> tuple[Float[Array, "B C E"], Cache]:
    batch, config = len(prompt), self.config
    cross = Whisper(config).apply({"params": params}, prompt.source, method="cross")
    cache = Cache(jnp.zeros(batch, jnp.int32), empty_slots(config, batch, num_slots), *cross)
    _, hidden, cache = self.extend(params, cache, prompt.tokens)
    return hidden, self.commit(cache, prompt.length - 1)


@dataclasses.dataclass(frozen=True)
class DraftWhisper(WhisperModel):
  """Whisper as a draft with an encoder of its own, whose outputs are `Encoded.draft_source`."""

  def prefill(
    self, params: Any, prompt: Prompt, num_slots: int
  ) -> tuple[Float[Array, "B C E"], Cache]:
    own = dataclasses.replace(prompt, source=prompt.draft_source)
    return super().prefill(params, own, num_slots)


_ENCODER = "conv1", "conv2", "encoder"


def without_encoder(params: Any) -> Any:
  """Return the parameters of a Whisper that decode encoded sources."""
  return {name: x for name, x in params.items() if name not in _ENCODER}


def has_encoder_of(params: Any, target_params: Any) -> bool:
  """Return whether the parameters of a Whisper have the encoder of a target."""
  own, other = ({name: tree.get(name) for name in _ENCODER} for tree in (params, target_params))
  same_shapes = jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, other)
  return same_shapes and all(
    jnp.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (own, other)))
  )
