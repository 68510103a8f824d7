"""Answer of a request for completions, complete or as a stream of pieces of text."""

import asyncio
import contextlib
import functools
import json
import os
import queue
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from specdec_jax.core.counts import require_finite
from specdec_jax.core.types import DecodeResult
from specdec_jax.data.vocabulary import padded
from specdec_jax.errors import InputError
from specdec_jax.generate import (
  GenerateCall,
  Output,
  generation_config,
  new_tokens,
  sample_keys,
  text_of,
)
from specdec_jax.serve.engine import Closed
from specdec_jax.serve.protocol import CompletionRequest, RequestError, input_errors
from specdec_jax.serve.service import Service
from specdec_jax.serve.slots import Text

_LOWEST = -9999.0  # replaces -inf, the logarithm of 0, which JSON cannot represent


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
    self.output: Output | None = None
    self.ended, self.text = False, ""

  def update(self, result: DecodeResult, done: bool) -> None:
    """Replace the output, given the result of its row and whether that is final."""
    self.output = output = self._call.output(require_finite(result), 0, done)
    has_stop = output.finish_reason == "stop_string"
    self.ended = done or has_stop
    stops = self._call.config.stops
    space = self._call.pair.vocabulary.space_before(output.tokens) if stops else ""
    text = space + output.text
    if has_stop:
      text = text[: min(text.find(stop) for stop in stops if stop in text)]
    elif not done:  # the beginning of a stop string is held back
      starts = range(max(0, len(text) - max(map(len, stops), default=0)), len(text))
      found = (i for i in starts if any(stop.startswith(text[i:]) for stop in stops))
      text = text[: next(found, None)]
    self.text = text[len(space) :]

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
      choice["specdec"] = {"rounds": self.num_rounds, "acceptance_length": length}
    self._num_chars = len(self.text)
    return choice

  def _logprobs(self) -> dict[str, Any] | None:
    """Return the tokens that begin in the text so far, or all at the end, and were not sent yet."""
    assert self.output is not None
    if self.output.logprobs is None:
      return None
    pair, tokens, start = self._call.pair, self.output.tokens, self._num_tokens
    offsets: list[int] = []
    for i in range(start, len(tokens)):
      # An incomplete character before the token is not in the text.
      before = os.path.commonprefix([text_of(pair, tokens[:i]), self.text])
      self._offset = max(self._offset, len(before))
      if self._offset == len(self.text) and not self.ended:
        break
      offsets.append(self._offset)
    self._num_tokens = end = start + len(offsets)
    return {
      "tokens": pair.vocabulary.pieces(tokens[start:end].tolist()),
      "token_logprobs": [max(x, _LOWEST) for x in self.output.logprobs[start:end].tolist()],
      "top_logprobs": None,
      "text_offset": offsets,
    }

  @property
  def num_rounds(self) -> int:
    assert self.output is not None and self.output.rounds is not None
    return len(self.output.rounds.num_emitted)


class Completion:
  """Request for completions and its answer, an ASGI application.

  Its texts are put into the queue of the engine, and cancelled when the client disconnects.
  """

  def __init__(
    self,
    service: Service,
    request: CompletionRequest,
    start: float,
    loop: asyncio.AbstractEventLoop,
  ):
    """Validate a request that arrived at time `start`, and queue its texts, or raise an error."""
    self._service, self._request, self._start = service, request, start
    if request.model != service.name:
      message = f"The model {request.model!r:.60} does not exist; give {service.name!r}."
      raise RequestError(404, message, "model", "model_not_found")
    num_outputs, most = len(request.prompts) * request.n, service.limits.max_outputs
    if num_outputs > most:
      message = f"The request has {num_outputs} outputs, n per prompt; give at most {most}."
      raise RequestError(400, message, "n" if request.n > 1 else "prompt")
    with input_errors(("n", "max_tokens", "prompt", "task", *request.settings)):
      call, prompts, limits = self._prepare()
      decoder = call.decoder()
    seed = secrets.randbelow(2**31) if request.seed is None else request.seed
    keys = sample_keys(seed, range(len(prompts)), request.n)
    self._choices = [Choice(call, index) for index in range(num_outputs)]
    self._loop, self._changed = loop, asyncio.Event()
    self._updates: dict[int, tuple[DecodeResult | Exception, bool]] = {}
    self._is_streaming = False  # whether the beginning of a stream was sent
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
    try:
      service.engine.submit(self._texts)
    except queue.Full:
      raise RequestError(429, "The queue is full; send the request again later.") from None
    except Closed as error:
      raise RequestError(503, str(error)) from None

  def _prepare(self) -> tuple[GenerateCall, list[list[int]], list[int]]:
    service, pair, request = self._service, self._service.pair, self._request
    settings = dict(request.settings, num_return_sequences=request.n, num_beams=1)
    if request.max_tokens is not None:
      settings["max_new_tokens"] = request.max_tokens
    if request.stops:
      settings["stop_strings"] = request.stops
    config, prefix = generation_config(pair, request.task, settings)
    prefix = service.prefix if request.task is None else prefix
    if request.n > 1 and config.sampling().is_argmax:
      raise InputError(
        f"n is {request.n}, and at temperature 0 all outputs would be equal; give a temperature."
      )
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
    return call, rows, [min(limit, most) for limit in limits]

  def _report(self, index: int, result: DecodeResult | Exception, done: bool) -> None:
    """Pass a result from the engine's thread to the event loop."""
    with contextlib.suppress(RuntimeError):  # the event loop is closed
      self._loop.call_soon_threadsafe(self._receive, index, result, done)

  def _receive(self, index: int, result: DecodeResult | Exception, done: bool) -> None:
    self._updates[index] = result, done  # of several results that were not read, the last remains
    self._changed.set()

  async def _progress(self) -> AsyncIterator[Choice]:
    """Yield a choice whenever it has changed, until all choices have ended."""
    num_left, is_first = len(self._choices), True
    while num_left:
      await self._changed.wait()
      self._changed.clear()
      if is_first:
        self._service.metrics.first_token.observe(time.monotonic() - self._start)
      is_first, updates, self._updates = False, self._updates, {}
      for index, (result, done) in sorted(updates.items()):
        if isinstance(result, Exception):
          raise result
        choice = self._choices[index]
        if choice.ended or not (done or self._needs_rounds):
          continue
        choice.update(result, done)
        if choice.ended:
          num_left -= 1
          if not done:  # a stop string
            self._service.engine.cancel([self._texts[index]])
        yield choice

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    """Answer the request, or cancel its texts if the client disconnects."""
    answer = asyncio.ensure_future(self._answer(scope, receive, send))
    disconnected = asyncio.ensure_future(_disconnected(receive))
    status, metrics = 499, self._service.metrics
    try:
      await asyncio.wait((answer, disconnected), return_when=asyncio.FIRST_COMPLETED)
      if answer.done():
        status = answer.result()
    finally:
      answer.cancel()
      disconnected.cancel()
      left = [text for text, choice in zip(self._texts, self._choices) if not choice.ended]
      if left:
        self._service.engine.cancel(left)
      seconds = time.monotonic() - self._start
      counts = f"{len(self._choices)} outputs, {self._num_tokens} tokens"
      metrics.count(status, f"{counts}, {seconds:.2f} s")
      metrics.duration.observe(seconds)

  async def _answer(self, scope: Any, receive: Any, send: Any) -> int:
    try:
      await (self._stream(send) if self._request.stream else self._send(scope, receive, send))
    except Exception as error:
      status = 503 if isinstance(error, Closed) else 500
      said = error if isinstance(error, Closed | InputError) else type(error).__name__
      failure = RequestError(status, f"The request could not be completed: {said}")
      if self._is_streaming:
        await _send_event(send, failure.json(), more=False)
      else:
        await error_response(failure)(scope, receive, send)
      return status
    metrics = self._service.metrics
    metrics.prompt_tokens += self._num_prompt_tokens
    metrics.tokens += self._num_tokens
    metrics.rounds += sum(choice.num_rounds for choice in self._choices)
    return 200

  @property
  def _num_tokens(self) -> int:
    return sum(len(choice.output.tokens) for choice in self._choices if choice.output)

  @property
  def _usage(self) -> dict[str, int]:
    prompt, new = self._num_prompt_tokens, self._num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

  async def _send(self, scope: Any, receive: Any, send: Any) -> None:
    async for _ in self._progress():
      pass
    choices = [choice.take() for choice in self._choices]
    body = {**self._header, "choices": choices, "usage": self._usage}
    await JSONResponse(body)(scope, receive, send)

  async def _stream(self, send: Any) -> None:
    header = self._header | ({"usage": None} if self._request.include_usage else {})
    async for choice in self._progress():
      if not self._is_streaming:
        self._is_streaming = True
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
      piece = choice.take()
      if piece is not None:
        await _send_event(send, {**header, "choices": [piece]})
    if self._request.include_usage:
      await _send_event(send, {**header, "choices": [], "usage": self._usage})
    await _send_event(send, "[DONE]", more=False)

  @functools.cached_property
  def _header(self) -> dict[str, Any]:
    return {
      "id": f"cmpl-{uuid.uuid4().hex}",
      "object": "text_completion",
      "created": int(time.time()),
      "model": self._service.name,
    }


async def _send_event(send: Any, data: Any, more: bool = True) -> None:
  text = data if isinstance(data, str) else json.dumps(data)
  body = f"data: {text}\n\n".encode()
  await send({"type": "http.response.body", "body": body, "more_body": more})


async def _disconnected(receive: Any) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
  """Return the answer for an error; for status 429, it says that the client may retry in 1 s."""
  headers = {"Retry-After": "1"} if error.status == 429 else headers
  return Response(json.dumps(error.json()), error.status, headers, "application/json")
