"""Requests and answers of OpenAI's completions API (POST /v1/completions)."""

import contextlib
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from specdec_jax.core.generation_config import SETTINGS
from specdec_jax.errors import InputError, require_count, require_seed, require_text, shown

_MAX_STOPS, _MAX_STOP_CHARS = 4, 256
_MAX_ENTRIES = 1024, 64  # of a list, and of a list in it
# Fields of OpenAI and of `GenerationConfig` that a request cannot set: the only value that is
# accepted, and what to do instead.
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
  "best_of": (1, "sample n outputs and choose one by its logprobs"),
  "echo": (False, "leave it out"),
  "frequency_penalty": (0, "use repetition_penalty"),
  "presence_penalty": (0, "use repetition_penalty"),
  "logit_bias": ({}, "use sequence_bias, a list of [tokens, bias] pairs"),
  "suffix": ("", "leave it out"),
  "num_beams": (1, "run specdec translate --num_beams, which searches with beams"),
  **dict.fromkeys(("length_penalty", "early_stopping", "beam_scorer"), (None, "leave it out")),
  "renormalize_logits": (None, "leave it out"),
  "logits_processor": (None, "use the settings of built-in processors"),
  "max_new_tokens": (None, "use max_tokens"),
  "num_return_sequences": (None, "use n"),
  "stop_strings": (None, "use stop"),
}
EXTRA_FIELDS = tuple(name for name in SETTINGS if name not in _UNSUPPORTED)


class RequestError(Exception):
  """Error with which a request is answered; `param` is the field at fault, if there is one."""

  def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
    super().__init__(message)
    self.status, self.message, self.param, self.code = status, message, param, code

  def json(self) -> dict[str, Any]:
    """Return the error in OpenAI's format."""
    kind = {429: "rate_limit_error"}.get(self.status, "invalid_request_error")
    kind = kind if self.status < 500 else "server_error"
    return {
      "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest:
  """Body of a request: fields of OpenAI's API, the task, and fields of `GenerationConfig`.

  The fields have the right types. `include_usage` is that of OpenAI's `stream_options`, and
  `prediction` that of OpenAI's chat completions; if there are several prompts, there is a list.
  """

  model: str
  prompt: str | Sequence[str]
  n: int = 1
  max_tokens: int | None = None
  stop: str | Sequence[str] = ()
  stream: bool = False
  include_usage: bool = False
  seed: int | None = None
  logprobs: int | None = None
  task: str | None = None
  prediction: Any = None
  settings: Mapping[str, Any]

  def __post_init__(self):
    kinds = {"model": str, "task": str | None, "stream": bool, "include_usage": bool}
    for name, kind in {**kinds, "prompt": str | list, "stop": str | list | tuple}.items():
      if not isinstance(value := getattr(self, name), kind):
        raise InputError(f"{name} is {shown(value)}, which has the wrong type.")
    for name, texts in {"prompt": self.prompts, "stop": self.stops}.items():
      if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{name} is {shown(texts)}; give a string or a list of strings.")
    for place, text in enumerate(self.prompts):
      require_text(f"prompt {place}", text)
    require_count("n", self.n)
    if self.max_tokens is not None:
      require_count("max_tokens", self.max_tokens)
    if self.seed is not None:
      require_seed(self.seed)
    if self.logprobs not in (None, 0, 1) or isinstance(self.logprobs, bool):
      raise InputError(
        f"logprobs is {shown(self.logprobs)}; give 0 or 1 for the log-probabilities of the text's "
        "tokens (those of other tokens are not supported), or leave it out."
      )
    if self.prediction is not None:
      for place, text in enumerate(predictions := self.predictions):
        require_text(f"prediction {place}", text)
      if len(predictions) != len(self.prompts) or self.n > 1:
        raise InputError(
          f"prediction has {len(predictions)} texts for {len(self.prompts)} prompts and n "
          f"{self.n}; give one for each prompt, and n 1."
        )
    if not self.prompts:
      raise InputError("prompt is an empty list; give at least one string.")
    if len(self.stops) > _MAX_STOPS or not all(1 <= len(s) <= _MAX_STOP_CHARS for s in self.stops):
      raise InputError(
        f"stop is {shown(self.stop)}; give at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_CHARS} "
        "characters."
      )

  @property
  def prompts(self) -> list[str]:
    return [self.prompt] if isinstance(self.prompt, str) else [*self.prompt]

  @property
  def predictions(self) -> list[str]:
    """The expected output of each prompt; empty if there are none."""
    given = self.prediction
    if given is None:
      return []
    return [*map(_predicted_text, given if isinstance(given, list) else [given])]

  @property
  def stops(self) -> list[str]:
    return [self.stop] if isinstance(self.stop, str) else [*self.stop]


def _predicted_text(prediction: Any) -> str:
  """Return the text of a prediction of OpenAI: a string, or a list of parts of text."""
  is_known = isinstance(prediction, dict) and {*prediction} == {"type", "content"}
  if is_known and prediction["type"] == "content":
    content = prediction["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part["text"] for part in parts if _is_text(part)]
    if len(texts) == len(parts):
      return "".join(texts)
  raise InputError(
    f'prediction is {shown(prediction)}; give {{"type": "content", "content": TEXT}}.'
  )


def _is_text(part: Any) -> bool:
  is_known = isinstance(part, dict) and part.get("type") == "text"
  return is_known and isinstance(part.get("text"), str)


def parse_request(body: bytes) -> CompletionRequest:
  """Return the request in the body of an HTTP request. A field that is null has its default.

  Raises:
    RequestError: the body is not a JSON object, or has an unknown, unsupported or invalid field.
  """
  try:
    return _request(json.loads(body))
  except (ValueError, RecursionError) as error:  # RecursionError: of lists in lists
    raise RequestError(400, f"The body cannot be read as JSON: {error!s:.100}.") from error


def _request(found: Any) -> CompletionRequest:
  if not isinstance(found, dict):
    raise RequestError(400, f"The body is {shown(found)}; it must be a JSON object.")
  fields = {name: value for name, value in found.items() if value is not None}
  for name, (neutral, instead) in _UNSUPPORTED.items():
    value = fields.pop(name, neutral)
    if value != neutral:
      raise RequestError(400, f"{name} is {shown(value)}, which is not supported; {instead}.", name)
  fields.pop("user", None)  # the caller's name for its own user
  settings = {name: fields.pop(name) for name in EXTRA_FIELDS if name in fields}
  for name, value in settings.items():
    if isinstance(value, dict):
      raise RequestError(400, f"{name} is {shown(value)}; it must not be an object.", name)
    _require_bounded(name, value)
  options = fields.pop("stream_options", {})
  if not isinstance(options, dict) or {*options} - {"include_usage"}:
    message = f'stream_options is {shown(options)}; give {{"include_usage": true}}.'
    raise RequestError(400, message, "stream_options")
  known = [field.name for field in dataclasses.fields(CompletionRequest)]
  for name in fields:
    if name not in known or name in ("settings", "include_usage"):
      raise RequestError(400, f"The body has an unknown field {shown(name)}; remove it.", name)
  for name in ("model", "prompt"):
    if name not in fields:
      raise RequestError(400, f"The body has no {name}; give one.", name)
  with input_errors([*found]):
    return CompletionRequest(**fields, **options, settings=settings)


def _require_bounded(name: str, value: Any, most: Sequence[int] = _MAX_ENTRIES) -> None:
  if isinstance(value, list):
    if len(value) > most[0]:
      message = f"{name} has a list of {len(value)} entries; give at most {most[0]}."
      raise RequestError(400, message, name)
    for entry in value:
      _require_bounded(name, entry, most[1:] or most)


@contextlib.contextmanager
def input_errors(names: Collection[str]) -> Iterator[None]:
  """Raise errors as a `RequestError` with status 400.

  A message has the names of a request, and if it begins with one of `names`, is about that field.
  """
  try:
    yield
  except (TypeError, ValueError) as error:  # InputError, or a value with a wrong type
    message = str(error).replace("max_new_tokens", "max_tokens")
    message = message.replace("num_return_sequences", "n")
    first = message.partition(" ")[0]
    raise RequestError(400, message, first if first in names else None) from error
