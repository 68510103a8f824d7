"""Answer of a request for completions, complete or as a stream of pieces of text."""

import abc
import asyncio
import contextlib
import difflib
import functools
import json
import logging
import os
import queue
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response

from specdec_jax.batching import Text
from specdec_jax.core.counts import require_finite
from specdec_jax.core.sampling import sample_keys
from specdec_jax.core.types import DecodeResult
from specdec_jax.data.vocabulary import padded
from specdec_jax.errors import InputError
from specdec_jax.generate import (
  GenerateCall,
  Output,
  before_stop,
  draft_tokens,
  generation_config,
  new_tokens,
  text_of,
)
from specdec_jax.serve.engine import EngineStopped
from specdec_jax.serve.protocol import CompletionRequest, RequestError, input_errors
from specdec_jax.serve.service import Service

_LOG = logging.getLogger("specdec_jax")
_LOWEST = -9999.0  # replaces -inf, the logarithm of 0, which JSON cannot represent
_PATHS = ("/v1/completions",), ("/v1/audio/transcriptions", "/v1/audio/translations")
_MAX_WINDOW = 32  # tokens that are decoded together for an offset


class Choice:
  """Output that grows, and how much of it was sent.

  Attributes:
    output: the output so far; None before the first round.
    ended: whether the output is complete.
    text: the text that the client may see, which ends before a stop string.
  """

  def __init__(self, call: GenerateCall, index: int):
    self._call, self._index = call, index
    self._num_chars = self._num_tokens = self._offset = 0  # of what was sent
    self._window = 0, 0, 0  # see `_move`
    self.output: Output | None = None
    self.ended, self.text = False, ""

  def update(self, result: DecodeResult, done: bool) -> None:
    """Replace the output, given the result of its row and whether that is final."""
    self.output = output = self._call.output(require_finite(result), 0, done)
    self.ended = done or output.finish_reason == "stop_string"
    stops = self._call.config.stops
    space = self._call.pair.vocabulary.space_before(output.tokens) if stops else ""
    self.text = before_stop(space + output.text, stops, done)[0][len(space) :]

  def take(self) -> dict[str, Any] | None:
    """Return the part that was not sent yet; None if there is none and the output goes on."""
    assert self.output is not None
    piece = self.text[self._num_chars :]
    if not (piece or self.ended):
      return None
    choice: dict[str, Any] = {"index": self._index, "text": piece, "logprobs": self._logprobs()}
    choice["finish_reason"] = None
    if self.ended:
      choice["finish_reason"] = "length" if self.output.finish_reason == "length" else "stop"
      length = self.output.acceptance_length
      choice["specdec"] = {"rounds": _num_rounds(self.output), "acceptance_length": length}
    self._num_chars = len(self.text)
    return choice

  def _logprobs(self) -> dict[str, Any] | None:
    """Return the tokens that begin in the text so far, or all at the end, and were not sent yet."""
    assert self.output is not None
    if self.output.logprobs is None:
      return None
    words, tokens, start = self._call.pair.vocabulary, self.output.tokens, self._num_tokens
    offsets: list[int] = []
    for i in range(start, len(tokens)):
      self._move(tokens, i)
      if self._offset == len(self.text) and not self.ended:
        break
      offsets.append(self._offset)
    self._num_tokens = end = start + len(offsets)
    return {
      "tokens": words.pieces(tokens[start:end].tolist()),
      "token_logprobs": [max(x, _LOWEST) for x in self.output.logprobs[start:end].tolist()],
      "top_logprobs": None,
      "text_offset": offsets,
    }

  def _move(self, tokens: np.ndarray, end: int) -> None:
    """Set the offset to that of the token `end`; inside a character, that of the character.

    Only the tokens from `first` are decoded again, so all offsets take linear time. Those from
    `last` have the text after `chars`; those before them keep the first one from losing its space.
    """
    first, last, chars = self._window
    decode = functools.partial(text_of, self._call.pair)
    old, new = decode(tokens[first:last]), decode(tokens[first:end])
    more = new[len(old) :] if new.startswith(old) else ""
    found = os.path.commonprefix([more, self.text[chars : chars + len(more)]])
    self._offset = max(self._offset, chars + len(found))
    is_whole = found == more != ""  # no incomplete character is at the end
    most = _MAX_WINDOW if is_whole else 2 * _MAX_WINDOW  # tokens, such as special ones
    if end - last >= most or is_whole and decode(tokens[first:end], False) == new:
      self._window = last, end, self._offset


class Answer(abc.ABC):
  """Request that the engine decodes texts for, and its answer, an ASGI application.

  The texts are cancelled when the client disconnects.
  """

  _is_streamed: bool

  def __init__(
    self, service: Service, path: str, model: str, start: float, loop: asyncio.AbstractEventLoop
  ):
    """Prepare the answer of a request that arrived at time `start`."""
    self._service, self._path, self._start, self._loop = service, path, start, loop
    if model != service.name:
      message = f"The model {model!r:.60} does not exist; give {service.name!r}."
      raise RequestError(404, message, "model", "model_not_found")
    right = _PATHS[service.pair.target.speech is not None]
    if path not in right:
      message = f"{service.name!r} is no model for {path}; use {right[0]}."
      raise RequestError(400, message, "model")
    self._changed = asyncio.Event()
    self._updates: dict[int, tuple[Any, bool]] = {}
    self._texts: Sequence[Text] = ()
    self._has_begun = False  # whether the beginning of a stream was sent
    self._has_tokens = self._has_ended = False
    self._num_prompt_tokens = 0

  def _submit(self, continues: bool = False) -> None:
    try:
      self._service.engine.submit(self._texts, continues)
    except queue.Full:
      raise RequestError(429, "The queue is full; send the request again later.") from None

  def _report(self, index: int, result: Any, done: bool) -> None:
    """Pass a result from the engine's thread to the event loop."""
    with contextlib.suppress(RuntimeError):  # the event loop is closed
      self._loop.call_soon_threadsafe(self._receive, index, result, done)

  def _receive(self, index: int, result: Any, done: bool) -> None:
    self._updates[index] = result, done  # of several results that were not read, the last remains
    self._changed.set()

  async def _new_updates(self) -> dict[int, tuple[Any, bool]]:
    """Wait for results, and return the last one of each text, and whether it is final."""
    await self._changed.wait()
    self._changed.clear()
    if not self._has_tokens:
      self._service.metrics.first_token.observe(time.monotonic() - self._start)
    self._has_tokens, updates, self._updates = True, self._updates, {}
    return updates

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    """Answer the request, or cancel its texts if the client disconnects."""
    answer = asyncio.ensure_future(self._answer(scope, receive, send))
    disconnected = asyncio.ensure_future(_disconnected(receive))
    status, failure, metrics = 499, "", self._service.metrics
    try:
      await asyncio.wait((answer, disconnected), return_when=asyncio.FIRST_COMPLETED)
      if answer.done():
        status, failure = answer.result()
    finally:
      answer.cancel()
      disconnected.cancel()
      self._has_ended = True
      if status != 200:
        self._service.engine.cancel(self._texts)
      seconds = time.monotonic() - self._start
      counts = f"{len(self._texts)} outputs, {self._num_tokens} tokens"
      metrics.count(self._path, status, f"{counts}, {seconds:.2f} s{failure}")
      metrics.duration.observe(seconds)

  async def _answer(self, scope: Any, receive: Any, send: Any) -> tuple[int, str]:
    """Answer the request; return the status, and the message of an error for the log."""
    try:
      if self._is_streamed:
        await self._stream(send)
      else:
        response = await self._response()
        await response(scope, receive, send)
    except Exception as error:
      failure = request_error(error)
      if self._has_begun:
        await self._send_event(send, failure.json(), more=False)
      else:
        await error_response(failure)(scope, receive, send)
      return failure.status, f": {failure.message}"
    metrics = self._service.metrics
    metrics.prompt_tokens += self._num_prompt_tokens
    metrics.tokens += self._num_tokens
    metrics.rounds += sum(map(_num_rounds, self._outputs))
    return 200, ""

  @property
  @abc.abstractmethod
  def _outputs(self) -> Sequence[Output]:
    """Outputs so far."""

  @property
  def _num_tokens(self) -> int:
    return sum(len(output.tokens) for output in self._outputs)

  @abc.abstractmethod
  async def _response(self) -> Response:
    """Return the whole answer after the last output has ended."""

  @abc.abstractmethod
  async def _stream(self, send: Any) -> None:
    """Send the answer in events while texts are decoded."""

  async def _send_event(self, send: Any, data: Any, more: bool = True) -> None:
    if not self._has_begun:
      self._has_begun = True
      headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
      await send({"type": "http.response.start", "status": 200, "headers": headers})
    text = data if isinstance(data, str) else json.dumps(data)
    body = f"data: {text}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": more})


class Completion(Answer):
  """Request for completions."""

  def __init__(
    self,
    service: Service,
    request: CompletionRequest,
    start: float,
    loop: asyncio.AbstractEventLoop,
  ):
    """Validate a request that arrived at time `start`, and queue its texts, or raise an error."""
    super().__init__(service, "/v1/completions", request.model, start, loop)
    self._predicted: Sequence[Sequence[int]] = ()
    self._request, self._is_streamed = request, request.stream
    num_outputs, most = len(request.prompts) * request.n, service.limits.max_outputs
    if num_outputs > most:
      message = f"The request has {num_outputs} outputs, n per prompt; give at most {most}."
      raise RequestError(400, message, "n" if request.n > 1 else "prompt")
    with input_errors(("n", "max_tokens", "prompt", "task", "prediction", *request.settings)):
      call, prompts, limits = self._prepare()
      decoder = call.decoder()
    seed = secrets.randbelow(2**31) if request.seed is None else request.seed
    keys = sample_keys(seed, range(len(prompts)), request.n)
    self._choices = [Choice(call, index) for index in range(num_outputs)]
    self._needs_rounds = request.stream or bool(call.config.stop_strings)
    self._texts = [
      Text(
        decoder,
        prompts[index // request.n],
        keys[index],
        limits[index // request.n],
        functools.partial(self._report, index),
        self._needs_rounds,
      )
      for index in range(num_outputs)
    ]
    self._submit()

  def _prepare(self) -> tuple[GenerateCall, list[Any], list[int]]:
    service, pair, request = self._service, self._service.pair, self._request
    settings = dict(request.settings, num_return_sequences=request.n, num_beams=1)
    if request.max_tokens is not None:
      settings["max_new_tokens"] = request.max_tokens
    if request.stops:
      settings["stop_strings"] = request.stops
    config, prefix = generation_config(pair, request.task, settings)
    prefix = service.prefix if request.task is None else prefix
    rows = []
    for place, text in enumerate(request.prompts):
      rows.append(pair.vocabulary.encode(prefix + text))
      if len(rows[-1]) > pair.max_source_tokens:
        raise InputError(
          f"prompt {place} has {len(rows[-1])} tokens; give at most {pair.max_source_tokens}."
        )
    self._num_prompt_tokens = sum(map(len, rows))
    prompts = padded(rows, pair.max_source_tokens, pair.vocabulary.pad_id)
    limits = new_tokens(pair, config, prompts).tolist()
    most = service.limits.max_new_tokens
    if max(limits) > most and (request.max_tokens or "max_length" in request.settings):
      raise InputError(f"max_tokens is {max(limits)}; give at most {most}.")
    call = service.call(config, request.logprobs is not None)
    limits = [min(limit, most) for limit in limits]
    if not request.predictions:
      return call, rows, limits
    if not call.tree.is_chain:
      raise InputError("prediction does not go with the tree of this server; leave it out.")
    self._predicted = [draft_tokens(pair, text) for text in request.predictions]
    # One decoder serves texts of all lengths.
    return (
      call.with_given_drafts(batch_size=service.limits.batch_size),
      [*zip(rows, self._predicted)],
      limits,
    )

  async def _progress(self) -> AsyncIterator[dict[str, Any]]:
    """Yield what is new of the choices until all have ended; of no stream, whole choices."""
    while not all(choice.ended for choice in self._choices):
      updates = await self._new_updates()
      # The event loop goes on while tokens are decoded.
      for piece in await asyncio.to_thread(self._update, updates):
        yield piece

  def _update(self, updates: Mapping[int, tuple[Any, bool]]) -> list[dict[str, Any]]:
    pieces = []
    for index, (result, done) in sorted(updates.items()):
      if isinstance(result, Exception):
        raise result
      choice = self._choices[index]
      if choice.ended or not (done or self._needs_rounds):
        continue
      choice.update(result, done)
      if choice.ended and not done:  # a stop string
        self._service.engine.cancel([self._texts[index]])
      if (self._request.stream or choice.ended) and (piece := choice.take()):
        pieces.append(piece)
    return pieces

  @property
  def _outputs(self) -> Sequence[Output]:
    return [choice.output for choice in self._choices if choice.output]

  @property
  def _usage(self) -> dict[str, Any]:
    prompt, new = self._num_prompt_tokens, self._num_tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    if not self._predicted:
      return usage
    lengths = [max(0, len(tokens) - 1) for tokens in self._predicted]  # without EOS
    accepted = sum(
      _num_common(predicted[:length], output.tokens.tolist())
      for predicted, length, output in zip(self._predicted, lengths, self._outputs, strict=True)
    )
    details = {
      "accepted_prediction_tokens": accepted,
      "rejected_prediction_tokens": sum(lengths) - accepted,
    }
    return usage | {"completion_tokens_details": details}

  async def _response(self) -> Response:
    choices = sorted([each async for each in self._progress()], key=lambda each: each["index"])
    return JSONResponse({**self._header, "choices": choices, "usage": self._usage})

  async def _stream(self, send: Any) -> None:
    header = self._header | ({"usage": None} if self._request.include_usage else {})
    async for piece in self._progress():
      await self._send_event(send, {**header, "choices": [piece]})
    if self._request.include_usage:
      await self._send_event(send, {**header, "choices": [], "usage": self._usage})
    await self._send_event(send, "[DONE]", more=False)

  @functools.cached_property
  def _header(self) -> dict[str, Any]:
    return {
      "id": f"cmpl-{uuid.uuid4().hex}",
      "object": "text_completion",
      "created": int(time.time()),
      "model": self._service.name,
    }


def _num_common(predicted: Sequence[int], tokens: Sequence[int]) -> int:
  """Return the number of predicted tokens that an output has, in the same order."""
  blocks = difflib.SequenceMatcher(None, predicted, tokens, False).get_matching_blocks()
  return sum(block.size for block in blocks)


def _num_rounds(output: Output) -> int:
  assert output.rounds is not None
  return len(output.rounds.num_emitted)


async def _disconnected(receive: Any) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass


def request_error(error: Exception) -> RequestError:
  """Return the error with which a request is answered; log the traceback of an internal one."""
  if isinstance(error, RequestError):
    return error
  status, said = 503 if isinstance(error, EngineStopped) else 500, str(error)
  if not isinstance(error, EngineStopped | InputError):
    _LOG.error("A request failed.", exc_info=error)
    said = type(error).__name__
  return RequestError(status, f"The request could not be completed: {said}")


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
  """Return the answer for an error; for status 429, it says that the client may retry in 1 s."""
  headers = {"Retry-After": "1"} if error.status == 429 else headers
  return Response(json.dumps(error.json()), error.status, headers, "application/json")
