"""Test the HTTP server with the client of OpenAI."""

import asyncio
import concurrent.futures
import contextlib
import copy
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import jax
import numpy as np
import openai
import pytest
import tiny_pair

from specdec_jax import batching
from specdec_jax.batching import Slots, Text
from specdec_jax.core import generation_config
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult, Rounds
from specdec_jax.data.pieces import SentencePieces
from specdec_jax.errors import InputError
from specdec_jax.generate import GenerateCall
from specdec_jax.serve import app
from specdec_jax.serve import service as service_module
from specdec_jax.serve.app import Server
from specdec_jax.serve.completion import Choice
from specdec_jax.serve.engine import Engine, EngineStopped, Limits
from specdec_jax.serve.protocol import EXTRA_FIELDS
from specdec_jax.serve.server import serve
from specdec_jax.serve.service import Service

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXTS = [tiny_pair.SENTENCES[i] for i in (0, 14, 60)]
LIMITS = Limits(batch_size=4, max_groups=2, queue_size=64, max_new_tokens=32, max_outputs=8)
SAMPLED = dict(temperature=1.0, top_k=30, seed=3)
WAIT = 60  # seconds until a test gives up


def own_pair():
  return tiny_pair.pair(max_source_tokens=64)


class Running:
  """A server that runs, and a client of it."""

  def __init__(self, limits=LIMITS, pair=None):
    self.listener = socket.create_server(("127.0.0.1", 0))
    self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
    self.service = Service(pair or own_pair(), gamma=2, limits=limits, name="target")
    self.server = Server(self.service, self.listener)
    self.client = client_of(self.url)

  def complete(self, **fields):
    return self.client.completions.create(**arguments(**fields))

  def post(self, content, path="/v1/completions"):
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    return httpx.post(self.url + path, content=content, timeout=WAIT)

  def metrics(self):
    return parse_metrics(httpx.get(f"{self.url}/metrics").text)

  def close(self, seconds=0.0):
    self.server.close(seconds)
    self.listener.close()


def arguments(**fields):
  """Return arguments of the client's method; fields that OpenAI's API lacks are `extra_body`."""
  extra = {name: fields.pop(name) for name in [*fields] if name in EXTRA_FIELDS}
  own = {name: extra.pop(name) for name in [*extra] if name in ("temperature", "top_p")}
  return dict(model="target", prompt=TEXTS[0], max_tokens=16, extra_body=extra) | own | fields


def client_of(url, kind=openai.OpenAI):
  return kind(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT)


def parse_metrics(text):
  """Return the samples by name; the text must have the format of Prometheus."""
  samples, families = {}, set()
  for line in text.splitlines():
    if line.startswith("# TYPE "):
      families.add(re.fullmatch(r"# TYPE (\w+) (?:counter|gauge|histogram)", line)[1])
    elif not line.startswith("# HELP "):
      name, labels, value = re.fullmatch(r'(\w+)(\{\w+="[^"]*"\})? ([-+.e\d]+)', line).groups()
      assert name in families or re.sub("_(bucket|sum|count)$", "", name) in families
      samples[name + (labels or "")] = float(value)
  return samples


def wait_for(condition):
  deadline = time.monotonic() + WAIT
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.005)


@pytest.fixture(scope="module")
def running():
  running = Running()
  yield running
  running.close()


@pytest.fixture
def gated(monkeypatch):
  """A server with two slots and a queue of two texts, whose steps wait for `gated.steps`."""
  steps = threading.Semaphore(0)

  class GatedSlots(Slots):
    def __init__(self, *args, **options):
      super().__init__(*args, **options)
      running.slots.append(self)

    def step(self, max_rounds=1):
      steps.acquire()
      return super().step(1)

  monkeypatch.setattr(service_module, "Slots", GatedSlots)
  running = Running(Limits(batch_size=2, queue_size=2, max_new_tokens=32, max_outputs=2))
  running.steps, running.slots = steps, []
  yield running
  steps.release(1000)
  if running.server.is_running:
    running.close()


@pytest.mark.parametrize(
  "fields, settings",
  [
    (dict(prompt=TEXTS[:2], logprobs=0), dict(logprobs=True)),
    (dict(prompt=TEXTS[:2], n=2, **SAMPLED), dict(num_return_sequences=2, **SAMPLED)),
  ],
  ids=["argmax", "sampled"],
)
def test_answers_equal_the_outputs_of_generate(running, fields, settings):
  want = own_pair().generate(TEXTS[:2], gamma=2, max_new_tokens=16, **settings)
  got = running.complete(**fields)
  assert [choice.text for choice in got.choices] == [output.text for output in want]
  assert [choice.index for choice in got.choices] == [*range(len(want))]
  assert len({choice.text for choice in got.choices}) == len(want) > 1
  for choice, output in zip(got.choices, want, strict=True):
    assert choice.finish_reason == {"length": "length", "eos": "stop"}[output.finish_reason]
    num_rounds, length = len(output.rounds.num_emitted), output.acceptance_length
    assert choice.specdec == {"rounds": num_rounds, "acceptance_length": length}
    if output.logprobs is not None:
      np.testing.assert_allclose(choice.logprobs.token_logprobs, output.logprobs, atol=1e-4)
      offsets = [*choice.logprobs.text_offset, len(output.text)]
      pieces = [output.text[i:j] for i, j in zip(offsets, offsets[1:])]
      known = [t if t != "<unk>" else p for t, p in zip(choice.logprobs.tokens, pieces)]
      assert "".join(pieces) == output.text and known[1:] == pieces[1:]
  num_prompt = sum(len(own_pair().encode(text)) for text in TEXTS[:2])
  num_tokens = sum(len(output.tokens) for output in want)
  assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (num_prompt, num_tokens)
  assert got.usage.total_tokens == num_prompt + num_tokens


def test_pieces_of_a_stream_concatenate_to_the_answer(running):
  fields = dict(prompt=TEXTS[:2], logprobs=0)
  whole = running.complete(**fields)
  *chunks, last = running.complete(**fields, stream=True, stream_options={"include_usage": True})
  assert last.choices == [] and last.usage == whole.usage
  assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
  for choice in whole.choices:
    pieces = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
    assert "".join(piece.text for piece in pieces) == choice.text
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == choice.finish_reason and len(pieces) > 1
    for name in ("tokens", "token_logprobs", "text_offset"):
      parts = [value for piece in pieces for value in getattr(piece.logprobs, name)]
      assert parts == getattr(choice.logprobs, name)


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_a_stop_string(running, stream):
  whole = running.complete(max_tokens=32).choices[0].text
  stop = whole[7:13]  # spans several tokens
  assert whole.index(stop) == 7
  (output,) = own_pair().generate(TEXTS[:1], gamma=2, max_new_tokens=32, stop_strings=stop)
  answer = running.complete(max_tokens=32, stop=["never", stop], stream=stream)
  chunks = [*answer] if stream else [answer]
  assert "".join(chunk.choices[0].text for chunk in chunks) == whole[:7]
  last = chunks[-1].choices[0]
  assert last.finish_reason == "stop"
  assert last.specdec["acceptance_length"] == output.acceptance_length


def test_many_clients_get_their_own_answers(running):
  # The first 8 of 64 requests sample.
  prompts, settings = tiny_pair.SENTENCES[:8] * 8, [SAMPLED] * 8 + [{}] * 56

  async def complete_all():
    async with client_of(running.url, openai.AsyncOpenAI) as client:
      create = client.completions.create
      calls = [
        create(**arguments(prompt=prompt, **more)) for prompt, more in zip(prompts, settings)
      ]
      return await asyncio.gather(*calls)

  answers = asyncio.run(complete_all())
  texts = [answer.choices[0].text for answer in answers]
  settings = dict(gamma=2, max_new_tokens=16)
  (sampled,) = own_pair().generate(prompts[:1], **settings, **SAMPLED)
  alone = own_pair().generate(prompts[:8], **settings)
  assert texts[0] == sampled.text and len({*texts}) == 16
  assert texts[8:] == [output.text for output in alone] * 7


PREDICTED = {"type": "content", "content": [{"type": "text", "text": "a man"}]}


@pytest.mark.parametrize("stream", [False, True])
def test_predicted_outputs_save_rounds_and_are_counted(running, stream):
  prompts = TEXTS[:2]
  plain = running.complete(prompt=prompts, max_tokens=32)
  contents = plain.choices[0].text, f"a {plain.choices[1].text[:9]} and more"
  predictions = [{"type": "content", "content": text} for text in contents]
  extra: dict = {"extra_body": {"prediction": predictions}}
  if stream:
    extra |= {"stream": True, "stream_options": {"include_usage": True}}
  answer = running.complete(prompt=prompts, max_tokens=32, **extra)
  chunks = [*answer] if stream else [answer]
  for choice in plain.choices:
    pieces = [x for chunk in chunks for x in chunk.choices if x.index == choice.index]
    assert "".join(piece.text for piece in pieces) == choice.text
    if choice.index == 0:
      assert pieces[-1].specdec["rounds"] < choice.specdec["rounds"]
  details = chunks[-1].usage.completion_tokens_details
  counts = details.accepted_prediction_tokens, details.rejected_prediction_tokens
  words = own_pair().vocabulary
  first, second = (len(words.encode_target(text)) for text in contents)
  assert sum(counts) == first + second and counts[0] > first and counts[1] > 0


# Lists in lists that JSON can read here, but whose value is too deep for messages and checks.
NESTED = b'{"model": "target", "prompt": "a", "logit_bias": %b%b}' % (b"[" * 900, b"]" * 900)
MALFORMED = [
  (b"", "The body cannot be read as JSON"),
  (b"\xff\xfe\x00", "The body cannot be read as JSON"),
  (b"[" * 10**5, "The body cannot be read as JSON: maximum recursion depth exceeded"),
  (NESTED, ""),
  ([], "The body is []; it must be a JSON object."),
  ({"prompt": None}, "The body has no prompt; give one."),
  ({"model": 1}, "model is 1, which has the wrong type."),
  ({"prompt": []}, "prompt is an empty list"),
  ({"prompt": [1, 2]}, "prompt is [1, 2]; give a string or a list of strings."),
  ({"prompt": "cut \ud83d"}, r"prompt 0 has half of a surrogate pair ('\ud83d') at position 4"),
  ({"prompt": ["a", "b\0"]}, "prompt 1 has a NUL character at position 1"),
  ({"prompt": "a man " * 40}, "prompt 0 has"),
  ({"prompt": ["a"] * 9}, "The request has 9 outputs"),
  ({"max_tokens": 33}, "max_tokens is 33; give at most 32."),
  ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number"),
  ({"max_length": 1}, "max_length is 1, and 1 tokens come before the output; give max_tokens,"),
  ({"n": 2}, "n is 2, and at temperature 0"),
  ({"n": "2"}, "n is '2'; it must be a whole number"),
  ({"temperature": -1}, "temperature is -1"),
  ({"n": True}, "n is True; it must be a whole number"),
  ({"max_tokens": True}, "max_tokens is True; it must be a whole number"),
  ({"temperature": True}, "temperature is True"),
  ({"seed": True}, "seed is True"),
  (
    {"seed": 2**40},
    "seed is 1099511627776; it must be a whole number from -2147483648 to 4294967295.",
  ),
  ({"logprobs": 5}, "logprobs is 5; give 0 or 1"),
  ({"logprobs": False}, "logprobs is False; give 0 or 1"),
  ({"logprobs": True}, "logprobs is True; give 0 or 1"),
  ({"stop": [1]}, "stop is [1]; give a string or a list of strings."),
  ({"stop": [*"abcde"]}, "stop is ['a', 'b', 'c', 'd', 'e']; give at most 4 strings of 1"),
  ({"stop": ""}, "stop is ''"),
  ({"stop": "a" * 257}, "stop is 'aaaa"),
  ({"bad_words_ids": [[5]] * 1025}, "bad_words_ids has a list of 1025 entries; give at most 1024."),
  ({"bad_words_ids": [[5], [5] * 65]}, "bad_words_ids has a list of 65 entries; give at most 64."),
  ({"eos_token_id": [5] * 5000}, "eos_token_id has a list of 5000 entries"),
  ({"sequence_bias": [[[5] * 65, 1.0]]}, "sequence_bias has a list of 65 entries"),
  ({"stream": 1}, "stream is 1, which has the wrong type."),
  ({"stream_options": {"x": 1}}, "stream_options is {'x': 1}"),
  ({"best_of": 2}, "best_of is 2, which is not supported"),
  ({"num_beams": 4}, "num_beams is 4, which is not supported"),
  ({"logit_bias": {"1": 2}}, "logit_bias is {'1': 2}, which is not supported; use sequence_bias"),
  ({"max_new_tokens": 3}, "max_new_tokens is 3, which is not supported; use max_tokens."),
  ({"gamma": 3}, "The body has an unknown field 'gamma'; remove it."),
  ({"task": "x"}, "task is 'x', and target has no tasks."),
  ({"sequence_bias": {"1": 2}}, "sequence_bias is {'1': 2}; it must not be an object."),
  ({"do_sample": "false"}, "do_sample is 'false'"),
  ({"bad_words_ids": 5}, ""),
  ({"bad_words_ids": [[999]]}, "bad_words_ids has the sequence [999]"),
  ({"prediction": "a"}, "prediction is 'a'; give {"),
  ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction is {"),
  ({"prediction": [PREDICTED, PREDICTED]}, "prediction has 2 texts for 1 prompts"),
  ({"prediction": {"type": "content", "content": "a\0"}}, "prediction 0 has a NUL"),
]


def test_malformed_requests_are_rejected(running):
  for changes, message in MALFORMED:
    is_valid_json = isinstance(changes, dict)
    body = {"model": "target", "prompt": "A man"} | changes if is_valid_json else changes
    response = running.post(body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["message"].startswith(message), (body, error)
    assert error["type"] == "invalid_request_error" and error["code"] is None
    if is_valid_json:
      (field,) = changes
      is_named = error["message"].startswith(f"{field} ")
      assert error["param"] in ({field} if is_named else {field, None}), (body, error)
  neutral = dict(best_of=1, frequency_penalty=0, logit_bias={}, echo=False, user="me", stop=None)
  assert running.complete(**neutral).choices[0].text


@pytest.mark.slow
def test_outputs_end_at_the_last_position():
  """Without `max_tokens`. The target has 96 positions for the prompt and the output."""
  running = Running(Limits(batch_size=2, max_new_tokens=256), tiny_pair.gpt_pair())
  with contextlib.closing(running):
    usage = running.complete(max_tokens=None, min_new_tokens=256).usage
    most = 97 - usage.prompt_tokens
    assert usage.completion_tokens == most < 128
    with pytest.raises(openai.BadRequestError, match=f"96 positions; give max_tokens .* {most}."):
      running.complete(max_tokens=most + 1)


def test_other_errors_have_their_status(running):
  found = running.complete
  with pytest.raises(openai.NotFoundError, match="The model 'other' does not exist") as caught:
    found(model="other")
  assert caught.value.code == "model_not_found"
  for method, path, status in (
    ("GET", "/v1/other", 404),
    ("GET", "/v1/completions", 405),
    ("POST", "/health", 405),
  ):
    response = httpx.request(method, running.url + path)
    assert response.status_code == status and method in response.json()["error"]["message"]
  response = running.post(b" " * (LIMITS.max_body_bytes + 1))
  assert response.status_code == 413 and "1048576 bytes" in response.json()["error"]["message"]
  assert [model.id for model in running.client.models.list()] == ["target"]
  assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_failure_of_a_request_does_not_affect_others(running, monkeypatch):
  """A bias that is infinite in float32, which is refused otherwise, makes logits infinite."""
  monkeypatch.setattr(generation_config, "require_number", lambda *args: None)
  (token,) = own_pair().vocabulary.encode_target("a")[-1:]
  with pytest.raises(openai.InternalServerError, match="cannot be decoded past token 0"):
    running.complete(sequence_bias=[[[token], 1e39]])
  stream = running.complete(sequence_bias=[[[token] * 9, 1e39], [[token], 50.0]], stream=True)
  assert next(stream).choices[0].text
  with pytest.raises(openai.APIError, match="cannot be decoded past token"):
    list(stream)
  assert running.complete().choices[0].text


def test_prompt_has_the_prefix_of_its_task_or_of_the_server(running, monkeypatch):
  pair = tiny_pair.changed(own_pair(), tasks={"short": {"prefix": "A man ", "max_new_tokens": 9}})
  outputs = pair.generate(["A man runs.", "Two dogs runs."], gamma=2, max_new_tokens=9)
  monkeypatch.setattr(running.service, "pair", pair)
  monkeypatch.setattr(running.service, "prefix", "Two dogs ")
  for changes, output in zip((dict(task="short"), dict(max_tokens=9)), outputs, strict=True):
    response = running.post(dict(model="target", prompt="runs.") | changes)
    assert response.json()["choices"][0]["text"] == output.text and len(output.tokens) == 9
  assert outputs[0].text != outputs[1].text


def test_settings_of_the_command_are_defaults_of_requests(monkeypatch):
  class EndedServer:
    is_running = False

    def __init__(self, service, listener, keep_alive_seconds):
      services.append(service)

  services = []
  monkeypatch.setattr(app, "Server", EndedServer)
  pair = tiny_pair.changed(own_pair(), generation={"do_sample": False, "top_k": 9})
  with pytest.raises(RuntimeError, match="A thread of the server has ended"):
    serve(lambda: pair, port=0, generation=GenerationConfig(temperature=0.5), model_name="tiny")
  assert services[0].pair.target.generation == {"temperature": 0.5, "top_k": 9}
  assert services[0].name == "tiny"
  services[0].engine.stop()


@pytest.mark.parametrize(
  "host, shown, addresses",
  [
    ("localhost", "localhost", ["127.0.0.1"]),
    ("", "", ["127.0.0.1"]),
    ("::1", "[::1]", ["::1"]),
    ("::", "[::]", ["::1", "127.0.0.1"]),
  ],
)
def test_server_listens_at_names_and_addresses(monkeypatch, capsys, host, shown, addresses):
  class EndedServer:
    is_running = False

    def __init__(self, service, listener, keep_alive_seconds):
      service.engine.stop()
      for address in addresses:
        socket.create_connection((address, listener.getsockname()[1]), WAIT).close()

  if "::1" in addresses:
    try:
      socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
      pytest.skip("this machine has no IPv6")
  monkeypatch.setattr(app, "Server", EndedServer)
  monkeypatch.setattr(Service, "warm_up", lambda self: None)
  with pytest.raises(RuntimeError, match="A thread of the server has ended"):
    serve(own_pair, host, port=0)
  assert re.search(rf" at http://{re.escape(shown)}:\d+/v1", capsys.readouterr().err)
  with pytest.raises(InputError, match="port is 70000; it must lie in"):
    serve(lambda: pytest.fail("loaded"), host, port=70000)


def test_largest_lists_are_accepted(running):
  words = [[5] * 64, *([6 + i % 50] * 2 for i in range(1023))]
  fields = dict(bad_words_ids=words, eos_token_id=[1] * 1024, stop="a" * 256)
  assert running.complete(**fields).choices[0].text


def test_metrics_count_requests_and_tokens(running, caplog):
  caplog.set_level("INFO", "specdec_jax")
  before = running.metrics()
  answer = running.complete()
  running.post({})
  after = running.metrics()

  def difference(name):
    return after[f"specdec_{name}"] - before.get(f"specdec_{name}", 0)

  assert difference('requests_total{status="200"}') == 1
  assert difference('requests_total{status="400"}') == 1
  assert difference("generated_tokens_total") == answer.usage.completion_tokens
  assert difference("prompt_tokens_total") == answer.usage.prompt_tokens
  assert difference("rounds_total") == answer.choices[0].specdec["rounds"]
  assert difference('time_to_first_token_seconds_bucket{le="+Inf"}') == 1
  assert difference("request_duration_seconds_count") == 1
  assert difference("request_duration_seconds_sum") > 0
  mean = after["specdec_generated_tokens_total"] / after["specdec_rounds_total"]
  assert after["specdec_acceptance_length"] == pytest.approx(mean)
  num_groups, rest = divmod(after["specdec_slots"], LIMITS.batch_size)
  assert rest == 0 and 1 <= num_groups <= LIMITS.max_groups  # of the settings so far
  assert after["specdec_queue_length"] == after["specdec_slots_in_use"] == 0
  *_, complete, rejected = (each for each in caplog.messages if not each.startswith("Compiling"))
  num_tokens = answer.usage.completion_tokens
  assert re.fullmatch(rf"/v1/completions 200: 1 outputs, {num_tokens} tokens, [.0-9]+ s", complete)
  assert rejected == "/v1/completions 400: The body has no model; give one."


def test_programs_of_default_settings_are_compiled_by_the_warm_up():
  limits = Limits(batch_size=2, max_new_tokens=7, max_outputs=2)
  service = Service(tiny_pair.pair(max_source_tokens=16), gamma=1, limits=limits)
  assert service.name == f"{tiny_pair.folder().name}/target"
  service.warm_up()
  names = "jitted_prefill", "_fill", "_run_rounds", "jitted_result"
  programs = [getattr(batching, name) for name in names]
  num_compiled = [program._cache_size() for program in programs]
  decoder = service.call(GenerationConfig()).decoder()
  done = threading.Semaphore(0)
  for lengths in ([3], [2, 9], [16]):
    service.engine.submit(
      [
        Text(decoder, [5] * n, jax.random.key(n), n, lambda _, end: end and done.release())
        for n in lengths
      ]
    )
    for _ in lengths:
      assert done.acquire(timeout=WAIT)
  assert [program._cache_size() for program in programs] == num_compiled
  service.engine.stop()


class Slow(SentencePieces):
  """A vocabulary whose method `slow`, 'encode' or 'pieces', ends when `goes_on` is set."""

  slow: str

  def _wait(self, name):
    if name == self.slow:
      self.begun.set()
      assert self.goes_on.wait(WAIT)

  def encode(self, text):
    self._wait("encode")
    return super().encode(text)

  def pieces(self, ids):
    self._wait("pieces")
    return super().pieces(ids)


@pytest.mark.parametrize("slow", ["encode", "pieces"])
def test_other_requests_are_answered_while_a_prompt_or_tokens_are_converted(
  running, monkeypatch, slow
):
  vocabulary = copy.copy(own_pair().vocabulary)
  vocabulary.__class__, vocabulary.slow = Slow, slow
  vocabulary.begun, vocabulary.goes_on = threading.Event(), threading.Event()
  pair = tiny_pair.changed(own_pair(), vocabulary=vocabulary)
  stream = running.complete(stream=True, max_tokens=32)
  pieces = [next(stream).choices[0].text]
  monkeypatch.setattr(running.service, "pair", pair)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    answer = pool.submit(running.complete, logprobs=0)
    assert vocabulary.begun.wait(WAIT)
    assert httpx.get(f"{running.url}/health").status_code == 200
    pieces += [chunk.choices[0].text for chunk in stream]
    assert not answer.done() and len(pieces) > 2
    vocabulary.goes_on.set()
    assert answer.result().choices[0].text


def test_client_that_leaves_in_the_middle_of_its_body_is_counted(running, caplog):
  before = running.metrics().get('specdec_requests_total{status="499"}', 0)
  with socket.create_connection(running.listener.getsockname()) as client:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n"
    client.sendall(head + b"{")
    time.sleep(0.1)
  wait_for(lambda: running.metrics().get('specdec_requests_total{status="499"}', 0) == before + 1)
  assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("size", [1, 2, 20, 10**4])
def test_offsets_are_those_of_the_characters_of_tokens(size):
  """A choice is updated after every `size` tokens; each token is one byte, or special.

  The number of tokens that are decoded is linear in that of the tokens of the text, if this is
  decoded once.
  """
  num_decoded = 0

  class Bytes(SentencePieces):
    def decode(self, ids):
      nonlocal num_decoded
      num_decoded += len(ids)
      return bytes(int(i) for i in ids if i != 1).decode(errors="replace")

    def pieces(self, ids):
      return [chr(i) for i in ids]

  vocabulary = copy.copy(own_pair().vocabulary)
  vocabulary.__class__ = Bytes
  pair = tiny_pair.changed(own_pair(), vocabulary=vocabulary)
  choice = Choice(GenerateCall(pair, GenerationConfig(), chain(0), logprobs=True), 0)
  # After a while, there are special tokens, and bytes that are no text.
  text, raw = "a€b🎉" * 100, "a€b🎉".encode() * 100
  tokens = [*raw, *[1] * 150, *b"\xff" * 150, *b"z", 1]
  sent = []
  for end in [*range(size, len(tokens), size), len(tokens)]:
    rows = np.ones((end, 1), np.int32)
    rounds = Rounds(np.zeros((end, 1, 0), np.int32), 0 * rows, rows, rows)
    logprobs = np.stack([-np.arange(end)] * 3, axis=-1)[None]
    result = DecodeResult(
      np.array([tokens[:end]]), np.array([end]), rounds, end, -rows[:1, 0], logprobs
    )
    choice.update(result, done=end == len(tokens))
    sent += [piece] if (piece := choice.take()) else []
  assert size < 10**4 or num_decoded < 100 * len(tokens)
  assert "".join(piece["text"] for piece in sent) == text + "\ufffd" * 150 + "z"
  parts = [piece["logprobs"] for piece in sent]
  first = [4 * i + chars for i in range(100) for chars in (0, 1, 1, 1, 2, 3, 3, 3, 3)]
  rest = [*[400] * 150, *range(400, 551), 551]
  assert sum((part["text_offset"] for part in parts), []) == first + rest
  assert sum((part["token_logprobs"] for part in parts), []) == [-i for i in range(len(tokens))]
  assert "".join(piece for part in parts for piece in part["tokens"]) == "".join(map(chr, tokens))


def test_failure_of_the_server_is_counted_and_logged(running, monkeypatch, caplog):
  caplog.set_level("INFO", "specdec_jax")

  def fail(*args):
    raise ZeroDivisionError

  for place, name in ((running.service, "call"), (Choice, "update")):
    before = running.metrics().get('specdec_requests_total{status="500"}', 0)
    caplog.clear()
    with monkeypatch.context() as patch:
      patch.setattr(place, name, fail)
      response = running.post({"model": "target", "prompt": "A man", "stop": "a"})
    assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
    message = "The request could not be completed: ZeroDivisionError"
    assert response.json()["error"]["message"] == message
    assert running.metrics()['specdec_requests_total{status="500"}'] == before + 1
    records = (x for x in caplog.records if not x.getMessage().startswith("Compiling"))
    internal, request = records
    assert internal.exc_info[0] is ZeroDivisionError and internal.levelname == "ERROR"
    assert re.fullmatch(f"/v1/completions 500: (.* s: )?{message}", request.getMessage())
  assert running.complete().choices[0].text


@pytest.mark.parametrize("seconds", [0.05, 5.0])
def test_idle_connection_is_closed_after_the_time_of_the_setting(running, seconds):
  with socket.create_server(("127.0.0.1", 0)) as listener:
    server = Server(running.service, listener, seconds)
    with socket.create_connection(listener.getsockname()) as client:
      client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
      received = b""
      while not received.endswith(b'{"status":"ok"}'):
        received += client.recv(9999)
      client.settimeout(WAIT if seconds < 1 else 1.0)
      if seconds < 1:
        assert client.recv(9999) == b""
      else:
        with pytest.raises(TimeoutError):
          client.recv(9999)
    server._uvicorn.should_exit = True
    server._thread.join()


async def until(condition):
  deadline = time.monotonic() + WAIT
  while not condition():
    assert time.monotonic() < deadline
    await asyncio.sleep(0.005)


def test_cancelled_requests_leave_the_queue_and_free_their_slots(gated):
  engine = gated.service.engine

  async def scenario():
    async with client_of(gated.url, openai.AsyncOpenAI) as client:

      def begin(**fields):
        fields = arguments(**dict(prompt=TEXTS[:2], max_tokens=32) | fields)
        return asyncio.create_task(client.completions.create(**fields))

      active = begin(stream=True)
      await until(lambda: engine.num_active == 2)
      waiting = begin()
      await until(lambda: engine.num_waiting == 2)
      with pytest.raises(openai.RateLimitError, match="The queue is full") as caught:
        await begin(prompt=TEXTS[0])
      assert caught.value.response.headers["retry-after"] == "1"
      metrics = gated.metrics()
      assert metrics["specdec_queue_length"] == metrics["specdec_slots_in_use"] == 2

      waiting.cancel()
      await until(lambda: engine.num_waiting == 0)
      assert engine.num_active == 2  # no step has ended

      gated.steps.release()
      stream = await active
      assert (await anext(stream)).choices[0].text
      await stream.close()
      await until(lambda: gated.metrics().get('specdec_requests_total{status="499"}') == 2)
      gated.steps.release()
      await until(lambda: engine.num_active == 0)

  asyncio.run(scenario())
  assert gated.metrics()["specdec_generated_tokens_total"] == 0
  gated.steps.release(1000)
  assert gated.complete(prompt=TEXTS[:2]).choices[1].text
  (slots,) = gated.slots
  assert slots.num_free == 2


def test_shutdown_completes_requests_that_have_begun(gated):
  (whole,) = own_pair().generate(TEXTS[:1], gamma=2, max_new_tokens=16)
  gated.steps.release()
  stream = gated.complete(stream=True)
  pieces = [next(stream).choices[0].text]
  closing = threading.Thread(target=gated.close, args=(WAIT,))
  closing.start()
  wait_for(lambda: not gated.service.engine.is_healthy)
  with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
    gated.complete()
  assert caught.value.status_code == 503
  assert httpx.get(f"{gated.url}/health").status_code == 503
  gated.steps.release(1000)
  pieces += [chunk.choices[0].text for chunk in stream]
  assert "".join(pieces) == whole.text and len(pieces) > 2
  closing.join(WAIT)
  with pytest.raises(httpx.ConnectError):
    httpx.get(f"{gated.url}/health")


class FakeSlots:
  """Slots whose texts end after as many steps as their limit; a text with limit 0 fails."""

  added: list

  def __init__(self, decoder):
    self.left = {}

  def add(self, texts):
    self.left |= {text: text.limit for text in texts}
    self.added += [text.prompt for text in texts]

  def step(self, max_rounds):
    if 0 in self.left.values():
      raise ValueError("limit 0")
    self.left = {text: left - 1 for text, left in self.left.items()}
    for text, left in self.left.items():
      text.report(left, not left)
    ended = [text for text, left in self.left.items() if not left]
    self.left = {text: left for text, left in self.left.items() if left}
    return ended


def engine_of(texts, **limits):
  """Return an engine that decodes texts (decoder, name, limit), its reports and its slots."""
  slots = type("Slots", (FakeSlots,), dict(added=[]))
  engine = Engine(slots, Limits(max_outputs=1, **limits))
  reports = {name: [] for _, name, _ in texts}
  engine.submit(
    [
      Text(decoder, name, None, limit, lambda *report, name=name: reports[name].append(report))
      for decoder, name, limit in texts
    ]
  )
  return engine, reports, slots


def test_texts_with_other_settings_wait_for_an_idle_group():
  texts = [("a", "a1", 3), ("b", "b1", 9), ("c", "c1", 2), ("a", "a2", 1), ("b", "b2", 1)]
  engine, reports, slots = engine_of(texts, batch_size=1, max_groups=2)
  engine.drain(WAIT)
  engine.stop()
  assert slots.added == ["a1", "b1", "c1", "a2", "b2"]
  assert reports["a1"] == [(2, False), (1, False), (0, True)]
  assert all(report[-1] == (0, True) for report in reports.values())


def test_failed_step_ends_the_texts_of_its_group_only():
  engine, reports, _ = engine_of([("a", "a1", 5), ("b", "b1", 0), ("b", "b2", 3)])
  engine.drain(WAIT)
  engine.stop()
  assert reports["a1"][-1] == (0, True)
  for name in ("b1", "b2"):
    ((error, done),) = reports[name]
    assert isinstance(error, ValueError) and done


def test_stopped_engine_reports_it_to_the_texts_that_are_left():
  texts = [("a", "a1", 10**9), ("a", "a2", 1)]
  engine, reports, _ = engine_of(texts, batch_size=1)
  engine.drain(0.01)
  engine.stop()
  assert [type(report[-1][0]) for report in reports.values()] == [EngineStopped, EngineStopped]
  with pytest.raises(EngineStopped):
    engine.submit([])


def test_limits_that_contradict_each_other_are_rejected():
  with pytest.raises(InputError, match="give a queue_size of at least max_outputs"):
    Limits(queue_size=2, max_outputs=3)
  with pytest.raises(InputError, match="batch_size is 0"):
    Limits(batch_size=0)


def test_port_in_use_is_reported(running):
  port = running.listener.getsockname()[1]
  with pytest.raises(OSError, match="Address already in use"):
    serve(lambda: pytest.fail("loaded"), port=port)


@contextlib.contextmanager
def command(port):
  """Run `specdec serve` until it is killed; wait until it answers."""
  paths = {name: tiny_pair.folder() / name for name in ("target", "near", "vocabulary.model")}
  flags = dict(zip(("target", "draft", "vocabulary"), paths.values()), port=port, gamma=2)
  flags |= dict(batch_size=2, max_new_tokens=1024, model_name="target")
  run = [sys.executable, "-m", "specdec_jax.run", "serve"]
  run += [f"--{name}={value}" for name, value in flags.items()]
  process = subprocess.Popen(run, cwd=ROOT, stderr=subprocess.PIPE, text=True)
  try:
    for line in process.stderr:
      if line.startswith("Serving 'target' at"):
        break
    else:
      pytest.fail("the server did not start")
    yield process
  finally:
    process.kill()
    process.wait()
    process.stderr.close()


def test_killed_server_gives_the_same_answer_after_a_restart():
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  client = client_of(f"http://127.0.0.1:{port}")
  fields = arguments(max_tokens=400, min_new_tokens=400, **SAMPLED)
  with command(port) as process:
    whole = client.completions.create(**fields)
    stream = client.completions.create(**fields, stream=True)
    pieces = [next(stream).choices[0].text]
    process.send_signal(signal.SIGKILL)
    with pytest.raises((openai.APIError, httpx.HTTPError)):
      pieces += [chunk.choices[0].text for chunk in stream]
  with pytest.raises(openai.APIConnectionError):
    client.completions.create(**fields)
  with command(port) as process:
    again = client.completions.create(**fields).choices[0].text
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT) == 0
  assert again == whole.choices[0].text and whole.usage.completion_tokens == 400
  assert again.startswith("".join(pieces)) and again != "".join(pieces)
