"""Answer of a request for the transcription or the translation of a recording."""

import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import JSONResponse, PlainTextResponse, Response

from specdec_jax.core.types import DecodeResult
from specdec_jax.errors import InputError, require_text, shown
from specdec_jax.generate import Output
from specdec_jax.serve.completion import Answer
from specdec_jax.serve.protocol import RequestError, input_errors
from specdec_jax.serve.service import Service

_FIELDS: dict[str, tuple[str, ...]] = {  # with their supported values, if not all are
  **dict.fromkeys(("file", "model", "language", "prompt", "temperature"), ()),
  "response_format": ("json", "text", "srt", "vtt", "verbose_json"),
  "stream": ("false", "true"),
  "timestamp_granularities[]": ("segment",),
  "chunking_strategy": ("auto",),
}


async def parse_form(headers: Headers, body: AsyncGenerator[bytes]) -> dict[str, Any]:
  """Return the fields of a form: strings that are not empty, and the bytes of `file`.

  Raises:
    RequestError: the body is no form, has no file or model, or an unknown or unsupported field.
  """
  if not headers.get("content-type", "").startswith("multipart/form-data"):
    raise RequestError(400, "The body is no form; send it as multipart/form-data.")
  try:
    form = await MultiPartParser(headers, body, max_files=1).parse()
  except MultiPartException as error:
    raise RequestError(400, f"The body cannot be read as a form: {error.message}") from error
  fields: dict[str, Any] = {name: value for name, value in form.multi_items() if value}
  file = fields.get("file")
  fields["file"] = await file.read() if isinstance(file, UploadFile) else b""
  await form.close()
  for name, value in form.multi_items():
    if name not in _FIELDS:
      raise RequestError(400, f"The body has an unknown field {shown(name)}; remove it.", name)
    if value and _FIELDS[name] and value not in _FIELDS[name]:
      values = " or ".join(_FIELDS[name])
      raise RequestError(400, f"{name} is {shown(value)}; only {values} is supported.", name)
  for name in ("file", "model"):
    if not fields.get(name):
      raise RequestError(400, f"The body has no {name}, or it is empty; give one.", name)
  with contextlib.suppress(KeyError, ValueError):  # `Transcriber` refuses what is no number
    fields["temperature"] = float(fields["temperature"])
  return fields


class Transcription(Answer):
  """Request for a transcription or a translation, whose windows the engine decodes in order."""

  def __init__(self, service: Service, path: str, form: Mapping[str, Any], *arrival: Any):
    """Read the recording of a request, and queue its first window; see `Answer`."""
    super().__init__(service, path, form["model"], *arrival)
    self._is_streamed = form.get("stream") == "true"
    self._format = form.get("response_format", "json")
    if self._is_streamed and self._format != "json":
      message = f"response_format is {self._format!r}, and stream is true; give 'json'."
      raise RequestError(400, message, "response_format")
    self._task = "translate" if path.endswith("translations") else "transcribe"
    has_task = self._task == "translate" or service.pair.target.speech.tasks
    with input_errors(("language", "temperature", "prompt")):
      require_text("prompt", form.get("prompt", ""))
      self._transcriber = service.transcriber(
        language=form.get("language"),
        task=self._task if has_task else None,
        timestamps=None if self._format in ("json", "text") else True,
        initial_prompt=form.get("prompt"),
        temperature=[form["temperature"]] if "temperature" in form else None,
        seed=secrets.randbelow(2**31),
      )
    try:
      self._recording = self._transcriber.opened(0, form["file"])
    except InputError as error:
      raise RequestError(400, f"file: {error}", "file") from error
    self._written = ""  # in windows that have ended
    self._seeks: list[int] = []  # first frame of the window of each segment
    self._queue()

  def _queue(self, continues: bool = False) -> None:
    """Queue the current window."""
    recording = self._recording
    decoder = self._transcriber.decoder(recording.timed, recording.attempt)
    text = self._transcriber.text(recording, decoder)
    text.report, text.needs_rounds = self._take, self._is_streamed
    self._texts = [text]
    self._submit(continues)

  def _take(self, result: DecodeResult | Exception, done: bool) -> None:
    """Take a result of a window in the engine's thread, and queue the next window at its end."""
    transcriber, recording = self._transcriber, self._recording
    found: str | Exception = self._written
    try:
      if isinstance(result, Exception):
        raise result
      recording.result = result
      if done:
        seek, done = recording.seek, not transcriber.take(recording)
        self._seeks += [seek] * (len(recording.segments) - len(self._seeks))
        if not (done or self._has_ended):
          self._queue(continues=True)
        if done or self._is_streamed:
          self._transcript = transcriber.transcript(recording)
          found = self._written = "".join(self._transcript.texts)
      elif self._is_streamed:
        found = self._written + transcriber.stable_text(recording)
    except Exception as error:
      found, done = error, True
    self._report(0, found, done)

  async def _progress(self) -> AsyncIterator[str]:
    """Yield the text so far until it is complete."""
    done = False
    while not done:
      ((found, done),) = (await self._new_updates()).values()
      if isinstance(found, Exception):
        raise found
      yield found.strip()

  async def _stream(self, send: Any) -> None:
    sent = ""
    async for text in self._progress():
      if piece := text[len(sent) :]:
        sent = text
        await self._send_event(send, {"type": "transcript.text.delta", "delta": piece})
    await self._send_event(send, {"type": "transcript.text.done", "text": text}, more=False)

  async def _response(self) -> Response:
    async for _ in self._progress():
      pass
    found = self._transcript
    if self._format in ("text", "srt", "vtt"):
      return PlainTextResponse(found.formatted("txt" if self._format == "text" else self._format))
    body: dict[str, Any] = dict(
      text=found.text, usage=dict(type="duration", seconds=found.duration)
    )
    if self._format == "verbose_json":
      language = "en" if self._task == "translate" else found.language or "en"
      body |= dict(task=self._task, language=language, duration=found.duration)
      temperature = self._transcriber.calls[0].config.sampling().temperature
      body["segments"] = [
        dict(id=i, seek=seek, start=round(segment.start, 2), end=round(segment.end, 2), text=text)
        | dict(tokens=segment.tokens.tolist(), temperature=temperature)
        for i, (seek, segment, text) in enumerate(zip(self._seeks, found.segments, found.texts))
      ]
    return JSONResponse(body)

  @property
  def _outputs(self) -> Sequence[Output]:
    return self._recording.outputs
