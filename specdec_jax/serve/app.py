"""HTTP server: routes, and the thread of its event loop."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from specdec_jax.serve.completion import Completion, error_response, request_error
from specdec_jax.serve.protocol import RequestError, parse_request
from specdec_jax.serve.service import Service
from specdec_jax.serve.transcription import Transcription, parse_form

_SECONDS_TO_SEND = 5  # that answers may take after the last text has ended, when the server stops


class Server:
  """HTTP server of a service. Its event loop runs in a thread of its own."""

  def __init__(self, service: Service, listener: socket.socket, keep_alive_seconds: float = 5.0):
    """Start to accept connections at a socket that listens; see `server.serve`."""
    self._service = service
    app = Starlette(
      routes=[
        Route("/v1/completions", self._answer, methods=["POST"]),
        Route("/v1/audio/transcriptions", self._answer, methods=["POST"]),
        Route("/v1/audio/translations", self._answer, methods=["POST"]),
        Route("/v1/models", self._models),
        Route("/health", self._health),
        Route("/metrics", self._metrics),
      ],
      exception_handlers={HTTPException: _http_error},
    )
    config = uvicorn.Config(
      app,
      loop="asyncio",
      http="h11",
      ws="none",
      lifespan="off",
      log_config=None,
      access_log=False,
      timeout_keep_alive=keep_alive_seconds,  # type: ignore[arg-type]  # of a timer of the loop
      timeout_graceful_shutdown=_SECONDS_TO_SEND,
    )
    self._uvicorn = uvicorn.Server(config)
    # In the main thread, uvicorn would handle signals, and exit with the status of the signal.
    self._thread = threading.Thread(
      target=self._uvicorn.run, args=([listener],), name="specdec http", daemon=True
    )
    self._thread.start()
    while self._thread.is_alive() and not self._uvicorn.started:
      time.sleep(0.01)

  @property
  def is_running(self) -> bool:
    """True if the server answers requests."""
    return self._thread.is_alive() and self._service.engine.is_healthy

  def close(self, seconds: float) -> None:
    """Stop the server after at most `seconds` for begun requests; new ones get status 503."""
    self._service.engine.drain(seconds)
    self._service.engine.stop()
    self._uvicorn.should_exit = True
    self._thread.join()

  async def _answer(self, request: Request) -> Any:
    start, loop, path = time.monotonic(), asyncio.get_running_loop(), request.url.path
    service, limits = self._service, self._service.limits
    try:
      # The event loop goes on while a long prompt or a recording is encoded.
      if path == "/v1/completions":
        chunks = [chunk async for chunk in _body(request, limits.max_body_bytes)]
        fields = await asyncio.to_thread(parse_request, b"".join(chunks))
        return await asyncio.to_thread(Completion, service, fields, start, loop)
      form = await parse_form(request.headers, _body(request, limits.max_audio_bytes))
      return await asyncio.to_thread(Transcription, service, path, form, start, loop)
    except ClientDisconnect:
      service.metrics.count(path, 499, "the client left while it sent the body")
      return Response(status_code=499)  # which nobody receives
    except Exception as found:
      error = request_error(found)
      service.metrics.count(path, error.status, error.message)
      return error_response(error)

  async def _models(self, request: Request) -> Response:
    model = dict(id=self._service.name, object="model", created=0, owned_by="specdec_jax")
    return JSONResponse({"object": "list", "data": [model]})

  async def _health(self, request: Request) -> Response:
    if self._service.engine.is_healthy:
      return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "shutting down"}, 503)

  async def _metrics(self, request: Request) -> Response:
    text = self._service.metrics.text(self._service.engine)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def _body(request: Request, most: int) -> AsyncGenerator[bytes]:
  size = 0
  async for chunk in request.stream():
    size += len(chunk)
    if size > most:
      raise RequestError(413, f"The body has more than {most} bytes; send less per request.")
    yield chunk


def _http_error(request: Request, error: Exception) -> Response:
  """Return the answer for an unknown path or a wrong method."""
  assert isinstance(error, HTTPException)
  message = f"{request.method} {request.url.path!r:.100} is not supported: {error.detail}."
  return error_response(RequestError(error.status_code, message), error.headers)
