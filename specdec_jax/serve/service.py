"""Pair that is served, with its engine, and its metrics in the text format of Prometheus."""

import bisect
import collections
import dataclasses
import functools
import itertools
import logging
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.batching import Slots, Text, size_of_sources, token_prompts
from specdec_jax.core.decode import Decoder, num_positions
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.trees import Tree, chain
from specdec_jax.generate import GenerateCall, generation_config, given_prompts
from specdec_jax.pair import Pair
from specdec_jax.serve.engine import Engine, Limits
from specdec_jax.speech.audio import SAMPLE_RATE
from specdec_jax.speech.transcribe import Transcriber, stacked

_LOG = logging.getLogger("specdec_jax")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # of the buckets


class Histogram:
  """Counts of durations, in seconds, by bucket."""

  def __init__(self):
    self.counts = [0] * (len(_SECONDS) + 1)
    self.sum = 0.0

  def observe(self, seconds: float) -> None:
    """Count a duration."""
    self.counts[bisect.bisect_left(_SECONDS, seconds)] += 1
    self.sum += seconds

  def samples(self) -> Iterable[tuple[str, float]]:
    """Return the suffix and the value of each line."""
    for bound, count in zip((*_SECONDS, "+Inf"), itertools.accumulate(self.counts)):
      yield f'_bucket{{le="{bound}"}}', count
    yield "_sum", self.sum
    yield "_count", sum(self.counts)


@dataclasses.dataclass
class Metrics:
  """Counters of a server. Tokens and rounds are those of outputs that are complete.

  Attributes:
    requests: number of requests by HTTP status; 499 if the client disconnected.
    first_token: times from a request to its first token, in seconds.
    duration: times from a request to the end of its answer, in seconds.
  """

  requests: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  prompt_tokens: int = 0
  tokens: int = 0
  rounds: int = 0
  first_token: Histogram = dataclasses.field(default_factory=Histogram)
  duration: Histogram = dataclasses.field(default_factory=Histogram)

  def count(self, path: str, status: int, message: str) -> None:
    """Count and log a request that was answered."""
    self.requests[status] += 1
    _LOG.info("%s %d: %s", path, status, message)

  def text(self, engine: Engine) -> str:
    """Return all metrics, including those of the engine."""
    statuses = [(f'{{status="{status}"}}', n) for status, n in sorted(self.requests.items())]
    mean = self.tokens / max(1, self.rounds)
    families: list[tuple[str, str, str, Iterable[tuple[str, float]]]] = [
      ("requests_total", "counter", "Requests by HTTP status.", statuses),
      ("prompt_tokens_total", "counter", "Prompt tokens.", [("", self.prompt_tokens)]),
      ("generated_tokens_total", "counter", "Tokens of complete outputs.", [("", self.tokens)]),
      ("rounds_total", "counter", "Rounds of complete outputs.", [("", self.rounds)]),
      ("acceptance_length", "gauge", "Tokens per round of complete outputs.", [("", mean)]),
      ("queue_length", "gauge", "Texts that wait for a slot.", [("", engine.num_waiting)]),
      ("slots_in_use", "gauge", "Slots with a text.", [("", engine.num_active)]),
      ("slots", "gauge", "Slots of all groups.", [("", engine.total_slots)]),
      ("time_to_first_token_seconds", "histogram", "Until the first token of a request.",
       self.first_token.samples()),
      ("request_duration_seconds", "histogram", "Until the end of an answer.",
       self.duration.samples()),
    ]  # fmt: skip
    lines = []
    for name, kind, description, samples in families:
      lines += [f"# HELP specdec_{name} {description}", f"# TYPE specdec_{name} {kind}"]
      lines += [f"specdec_{name}{suffix} {value}" for suffix, value in samples]
    return "\n".join([*lines, ""])


class Service:
  """Pair that is served; `prefix` is the text before each prompt of a request without a task."""

  def __init__(
    self,
    pair: Pair,
    gamma: int = 5,
    tree: Sequence[int] | None = None,
    limits: Limits = Limits(),
    name: str | None = None,
    prefix: str = "",
  ):
    """Start the engine; see `server.serve` for the arguments.

    Raises:
      InputError: gamma, tree or a default of requests is invalid, or there is not enough memory.
    """
    self.pair, self.limits, self.prefix = pair, limits, prefix
    self.name = name or "/".join(pathlib.PurePath(pair.target.path or pair.target.name).parts[-2:])
    self._tree = Tree(tree) if tree is not None else chain(gamma)
    config, _ = generation_config(pair, None, {"num_beams": 1})
    prompt = jnp.zeros((limits.batch_size, pair.max_source_tokens), jnp.int32)
    init = functools.partial(self.call(config).decoder().init, max_new_tokens=limits.max_new_tokens)
    if pair.target.speech is None:
      jax.eval_shape(init, pair.params, prompt, jax.random.key(0))  # checks memory
    self.transcriber: Callable[..., Transcriber] = functools.partial(
      Transcriber, pair, gamma=gamma, tree=tree
    )
    self.metrics = Metrics()
    self.engine = Engine(self._new_slots, limits)

  def call(self, config: GenerationConfig, logprobs: bool = False) -> GenerateCall:
    """Return a call of `generate` with the settings of a request."""
    return GenerateCall(self.pair, config, self._tree, logprobs=logprobs)

  def warm_up(self) -> None:
    """Compile the programs of requests with default settings, for prompts of all lengths."""
    for decoder, texts in itertools.groupby(self._first_texts(), lambda text: text.decoder):
      slots = self._new_slots(decoder)
      for text in texts:
        for group in ([text], [text] * slots.batch_size, [text]):  # one, several, and one alone
          slots.add(group)
          slots.step()

  def _first_texts(self) -> Iterator[Text]:
    """Yield texts of one token, or silent windows of a Whisper without and with timestamps."""
    pair, most = self.pair, self.pair.max_source_tokens
    if pair.target.speech is not None:
      for timed in {False, pair.target.speech.no_timestamps_id is not None}:
        transcriber = self.transcriber(timestamps=timed)
        recording = transcriber.opened(0, np.zeros(SAMPLE_RATE, np.float32))
        text = transcriber.text(recording, transcriber.decoder(timed))
        yield dataclasses.replace(text, limit=1)
      return
    config, _ = generation_config(pair, None, {"num_beams": 1})
    decoder, eos_id = self.call(config).decoder(), pair.vocabulary.eos_id
    widths = {min(size_of_sources(n), most) for n in range(1, most + 1)}
    for width in [1] if pair.continues else sorted(widths):
      yield Text(decoder, [eos_id] * width, jax.random.key(0), 1, lambda *_: None)

  def _new_slots(self, decoder: Decoder) -> Slots:
    pair, limits = self.pair, self.limits
    if pair.target.speech is not None:
      most = num_positions(pair.target.model) or limits.max_new_tokens
      return Slots(decoder, pair.params, limits.batch_size, most, stacked)
    prompts = token_prompts(
      pair.max_source_tokens, pair.vocabulary.pad_id, has_encoder=not pair.continues
    )
    prompts = given_prompts(prompts, limits.max_new_tokens)
    return Slots(decoder, pair.params, limits.batch_size, limits.max_new_tokens, prompts)
