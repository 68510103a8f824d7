"""Test transcriptions and translations of the HTTP server with the client of OpenAI."""

import concurrent.futures
import io
import threading

import httpx
import numpy as np
import openai
import pytest
import tiny_pair
import tiny_whisper
from scipy.io import wavfile
from test_serve import WAIT, Running, wait_for

from specdec_jax import batching, load
from specdec_jax.serve import service as service_module
from specdec_jax.serve.engine import Limits
from specdec_jax.speech import timestamps as times
from specdec_jax.speech import transcribe

pytest.importorskip("python_multipart")
pytestmark = pytest.mark.slow

LIMITS = Limits(batch_size=2, queue_size=2, max_outputs=2, max_audio_bytes=2_000_000)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """Content of recordings of 3 and of 40 seconds."""
  paths = [tmp_path_factory.mktemp("audio") / f"{seconds}.wav" for seconds in (3, 40)]
  for path in paths:
    tiny_whisper.write_noise(path, int(path.stem))
  return [path.read_bytes() for path in paths]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
  """A multilingual pair, and an English-only one."""
  folder = tmp_path_factory.mktemp("models")
  return [load.load_pair(str(tiny_whisper.folder(folder, each))) for each in (True, False)]


@pytest.fixture(scope="module")
def running(pairs):
  running = Running(LIMITS, pairs[0])
  yield running
  running.close()


def ask(running, file, kind="transcriptions", **fields):
  audio = getattr(running.client.audio, kind)
  return audio.create(model="target", file=("a.wav", file), **fields)


@pytest.mark.parametrize(
  "fields, settings",
  [
    (dict(chunking_strategy="auto"), {}),
    (dict(language="de", temperature=0.0), dict(language="de")),
    (dict(prompt="the little dog"), dict(initial_prompt="the little dog")),
    (dict(kind="translations"), dict(task="translate")),
  ],
)
def test_answers_equal_transcripts(running, pairs, files, fields, settings):
  with concurrent.futures.ThreadPoolExecutor() as pool:
    answers = [*pool.map(lambda file: ask(running, file, **fields).text, files)]
  wants = [transcribe.transcribe(pairs[0], file, gamma=2, **settings).text for file in files]
  assert answers == wants and all(wants) and wants[0] != wants[1]


def test_formats_have_the_segments(running, pairs, files):
  for file in files:
    want = transcribe.transcribe(pairs[0], file, gamma=2, timestamps=True)
    for name, write in (("srt", times.to_srt), ("vtt", times.to_vtt)):
      assert ask(running, file, response_format=name) == write(want.segments, want.texts)
    verbose = ask(running, file, response_format="verbose_json")
    assert (verbose.text, verbose.language) == (want.text, want.language)
    assert (verbose.task, verbose.duration) == ("transcribe", want.duration)
    for i, segment in enumerate(verbose.segments):
      assert (segment.id, segment.text, segment.temperature) == (i, want.texts[i], 0)
      assert segment.tokens == want.segments[i].tokens.tolist()
      assert [segment.start, segment.end] == pytest.approx(want.segments[i][:2], abs=0.006)
      assert 0 <= segment.start - segment.seek / 100 <= 30
    assert i + 1 == len(want.segments)
  assert segment.seek > 0
  assert ask(running, file, response_format="text") == ask(running, file).text + "\n"


def test_pieces_of_a_stream_concatenate_to_the_answer(running, files):
  for file in files:
    *deltas, done = ask(running, file, stream=True)
    assert {each.type for each in deltas} == {"transcript.text.delta"}
    assert "".join(each.delta for each in deltas) == done.text == ask(running, file).text
    assert done.type == "transcript.text.done" and len(deltas) > 1


wavfile.write(nan := io.BytesIO(), 16000, np.full(16000, np.nan, np.float32))
INVALID = [
  (dict(file=b""), "file", "The body has no file, or it is empty"),
  (dict(file=b"no audio" * 99), "file", "file: the audio "),
  (dict(file=nan.getvalue()), "file", "file: the audio has samples of magnitude nan"),
  (dict(language="xx"), "language", "language is 'xx', which .* does not know; it knows de, en."),
  (dict(temperature="hot"), "temperature", "temperature is 'hot'; it must"),
  (dict(temperature="nan"), "temperature", "temperature is nan; it must"),
  (dict(prompt="a\0"), "prompt", "prompt has a NUL character"),
  (dict(response_format="diarized_json"), "response_format", "response_format is 'diarized_json'"),
  (dict(response_format="srt", stream=True), "response_format", "response_format is 'srt', and"),
  (
    dict(timestamp_granularities=["word"]),
    "timestamp_granularities[]",
    "only segment is supported",
  ),
  (dict(include=["logprobs"]), "include[]", r"an unknown field 'include\[\]'"),
  (dict(chunking_strategy={"type": "server_vad"}), "chunking_strategy[type]", "an unknown field"),
]


def test_invalid_requests_are_rejected(running, files):
  for fields, param, message in INVALID:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
      ask(running, **dict(file=files[0]) | fields)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
  for kind, message in (("text/plain", "is no form"), ("multipart/form-data", "Missing boundary")):
    url, headers = f"{running.url}/v1/audio/transcriptions", {"Content-Type": kind}
    response = httpx.post(url, content=b"", headers=headers)
    assert response.status_code == 400 and message in response.json()["error"]["message"]
  with pytest.raises(openai.APIStatusError, match="more than 2000000 bytes") as caught:
    ask(running, bytes(2_000_001))
  assert caught.value.status_code == 413
  with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
    running.client.audio.transcriptions.create(model="other", file=files[0])
  assert ask(running, bytes(files[0][:44]) + bytes(32000)).text is not None  # silence


def test_models_answer_only_what_they_can(running, pairs, files):
  with pytest.raises(openai.BadRequestError, match="use /v1/audio/transcriptions"):
    running.complete()
  for pair, fields, message in (
    (pairs[1], dict(language="en"), "language is 'en', .* it is English-only"),
    (pairs[1], dict(kind="translations"), "task is 'translate', .* it is English-only"),
    (tiny_pair.pair(), {}, "use /v1/completions"),
  ):
    other = Running(LIMITS, pair)
    with pytest.raises(openai.BadRequestError, match=message):
      ask(other, files[0], **fields)
    assert other.metrics()['specdec_requests_total{status="400"}'] == 1
    if pair is pairs[1]:
      assert ask(other, files[0]).text == transcribe.transcribe(pair, files[0], gamma=2).text
    other.close()


def test_windows_of_begun_requests_are_decoded_in_a_full_queue_and_at_the_end(
  pairs, files, monkeypatch
):
  steps = threading.Semaphore(0)

  class GatedSlots(batching.Slots):
    def step(self, max_rounds=1):
      steps.acquire()
      return super().step()

  monkeypatch.setattr(service_module, "Slots", GatedSlots)
  running = Running(LIMITS, pairs[0])
  engine = running.service.engine
  with concurrent.futures.ThreadPoolExecutor() as pool:
    begun = [pool.submit(ask, running, files[1]) for _ in range(2)]
    wait_for(lambda: engine.num_active + engine.num_waiting == 2)
    steps.release()
    wait_for(lambda: engine.num_active == 2)
    with pytest.raises(openai.APITimeoutError):
      ask(running, files[1], timeout=2.0)
    wait_for(lambda: running.metrics().get('specdec_requests_total{status="499"}') == 1)
    assert (engine.num_active, engine.num_waiting) == (2, 0)
    begun += [pool.submit(ask, running, files[1]) for _ in range(2)]
    wait_for(lambda: engine.num_waiting == 2)
    with pytest.raises(openai.RateLimitError, match="The queue is full"):
      ask(running, files[0])
    closing = pool.submit(running.close, WAIT)
    wait_for(lambda: not engine.is_healthy)
    with pytest.raises(openai.InternalServerError, match="shutting down"):
      ask(running, files[0])
    steps.release(10**6)
    want = transcribe.transcribe(pairs[0], files[1], gamma=2)
    assert len(want.outputs) > 1 and {each.result().text for each in begun} == {want.text}
    closing.result()


def test_warm_up_compiles_the_programs_of_the_first_requests(pairs, files):
  programs = [batching.jitted_prefill, batching._fill, batching._run_rounds, batching.jitted_result]
  programs += [transcribe._encode, transcribe._last_logits]
  for program in programs:
    program.clear_cache()
  running = Running(LIMITS, pairs[0])
  running.service.warm_up()
  sizes = [program._cache_size() for program in programs]
  with concurrent.futures.ThreadPoolExecutor() as pool:
    assert all(pool.map(lambda file: ask(running, file).text, files))
  ask(running, files[0], response_format="srt")
  running.close()
  assert [program._cache_size() for program in programs] == sizes and all(sizes)
