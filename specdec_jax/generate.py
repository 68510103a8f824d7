"""Functions that take and return texts, with batches, lengths and random keys.

They are the methods `generate`, `stream` and `beam_search` of a `Pair`.
"""

import dataclasses
import functools
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.text import Text

from specdec_jax import batching
from specdec_jax.beams import BeamSearcher
from specdec_jax.core.counts import require_finite
from specdec_jax.core.decode import Decoder, num_positions
from specdec_jax.core.generation_config import DEFAULT_NEW_TOKENS, GenerationConfig
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.processors import ForcedPrefix, LogitsProcessor, Processors
from specdec_jax.core.sampling import row_keys
from specdec_jax.core.settings import HashableArray
from specdec_jax.core.trees import AnyTree, DynamicTree
from specdec_jax.core.types import AnyArray, DecodeResult, Rounds
from specdec_jax.data.vocabulary import padded
from specdec_jax.errors import InputError, require_count, require_seed, require_text
from specdec_jax.measure.calibrate import given_tree, resolve_tree
from specdec_jax.measure.rounds import Round, read_rounds, round_text
from specdec_jax.pair import Pair

_LOG = logging.getLogger("specdec_jax")

FinishReason = Literal["eos", "length", "stop_string"]


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
  """Output for one text. `str(output)` and `print(output)` give its text.

  Attributes:
    tokens: [T], tokens of the text; EOS is last unless the output ended for another reason.
    finish_reason: "eos", "length" (the limit was reached) or "stop_string".
    rounds: `core.types.Rounds` of this text, with fields [R, ...]; None for a beam search.
    logprobs: [T], log-probability of each token under the target, in nats, after logits processors
      and the sampling method (at temperature 0, after processors only). None by default.
    model_logprobs: the same before logits processors and the sampling method.
    score: for a beam search, log-probability under the target, divided by the length penalty (see
      `BeamResult.scores`); otherwise None.
  """

  text: str
  tokens: np.ndarray
  finish_reason: FinishReason
  rounds: Rounds | None = None
  logprobs: np.ndarray | None = None
  model_logprobs: np.ndarray | None = None
  score: float | None = None
  _read: Callable[[], tuple[Round, ...]] | None = dataclasses.field(default=None, repr=False)

  def __str__(self) -> str:
    return self.text

  @property
  def logprob(self) -> float | None:
    """Sum of `logprobs`; None if the output has none."""
    return None if self.logprobs is None else float(self.logprobs.sum())

  @property
  def round_texts(self) -> tuple[Round, ...]:
    """The rounds with tokens as text (`rounds.Round`); empty for a beam search."""
    return self._read() if self._read else ()

  @property
  def acceptance_length(self) -> float | None:
    """Mean number of tokens per round, which is one target forward pass; None for a beam search."""
    return None if self.rounds is None else len(self.tokens) / len(self.rounds.num_emitted)

  def show(self, console: Console | None = None) -> None:
    """Print each round: accepted tokens, [-rejected], [+the target's token]; see `round_text`."""
    console = console or Console()
    lines = [round_text(texts) for texts in self.round_texts]
    console.print(Text("\n").join(lines), soft_wrap=True)

  def _repr_html_(self) -> str:
    """Return HTML for notebooks."""
    # With force_jupyter, the console would also display each line in the notebook.
    console = Console(record=True, file=io.StringIO(), force_jupyter=False)
    console.print(Text(self.text), soft_wrap=True)
    self.show(console)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def generate(
  pair: Pair,
  texts: Sequence[str],
  *,
  gamma: int | Literal["auto"] | None = None,
  tree: Sequence[int] | Literal["auto"] | None = None,
  batch_size: int = 1,
  seed: int = 0,
  lenience: float = 1.0,
  task: str | None = None,
  decoder_input_ids: Sequence[Sequence[int]] | None = None,
  decoder_texts: Sequence[str] | None = None,
  logprobs: bool = False,
  fixed_width: bool = False,
  **settings: Any,
) -> list[Output]:
  """Generate outputs by speculative decoding; if `num_beams` > 1, by speculative beam search.

  Args:
    texts: sources, or prompts of a decoder-only model. A text longer than `pair.max_source_tokens`
      is truncated, with a warning (`Pair.cut` returns the part that remains).
    gamma: number of draft tokens per round; 5 by default, 0 for autoregressive decoding. 'auto'
      chooses the fastest (`measure.calibrate.resolve_tree`), caches the choice and logs the
      reason to the logger 'specdec_jax'. For a beam search, number of steps that the draft
      searches ahead; 2 by default, 'auto' is not supported.
    tree: parents of the draft tokens of a tree (`Tree.parents`), which replaces the chain of
      gamma draft tokens; 'auto' chooses the fastest tree or chain. Not for a beam search.
    batch_size: maximum number of outputs (in a beam search: of texts) that are decoded together;
      all outputs of one text always are. When a text ends, the next one takes its place
      (`batching`), unless there are decoder prefixes, beams or several outputs per text. For a
      given gamma or tree, outputs do not depend on `batch_size`, except for rounding.
    seed: seed of all sampling. The random keys of a text depend only on the seed and on the index
      of the text in `texts`.
    lenience: in (0, 1]. Below 1, more draft tokens are accepted, and outputs no longer have the
      target's distribution (Appendix A.5). Not for a beam search.
    task: task of the checkpoint's `task_specific_params`, whose settings and prefix apply.
    decoder_input_ids: one sequence of tokens per text, which the output continues. The sequence
      is not part of the output. For T5, the start token at its beginning is optional.
    decoder_texts: the same sequences as target texts, which follow `forced_bos_token_id`; give at
      most one of the two arguments.
    logprobs: whether outputs have log-probabilities. Not for a beam search.
    fixed_width: whether to decode autoregressively in passes of the width that gamma or tree give
      a round. Target passes then have the shapes of speculation, so that ties fall alike
      (docs/exactness.md). Not for a beam search.
    settings: fields of `GenerationConfig`: `max_new_tokens`, `temperature`, `num_beams`,
      `repetition_penalty` and others, with the names of transformers. They take precedence over
      the settings of the task and of the checkpoint (`Loaded.generation`).

  Returns:
    The outputs in the order of the texts, `num_return_sequences` per text. A beam search may find
    fewer.

  Raises:
    InputError: an argument is invalid, there is not enough memory, or logits of the target or
      probabilities of the draft are NaN or infinite.
    TypeError: an argument is unknown.
  """
  config, prefix = generation_config(pair, task, settings)
  texts = [prefix + text for text in _require_texts(texts)]
  forced = _forced_tokens(pair, config, len(texts), decoder_input_ids, decoder_texts)
  pair.require_batch_size(batch_size)
  require_seed(seed)
  sources = _encoded(pair, texts)
  count = config.num_return_sequences or 1
  if (config.num_beams or 1) > 1:
    if tree is not None or logprobs or fixed_width or lenience != 1:
      raise InputError(
        f"num_beams is {config.num_beams}, and a beam search has no tree, logprobs, fixed_width or "
        "lenience; leave them out, or give num_beams=1."
      )
    return _search(pair, sources, config, gamma, batch_size, forced)
  if count > 1 and config.sampling().is_argmax:
    raise InputError(
      f"num_return_sequences is {count}, and at temperature 0 all of them would be equal; "
      "sample, or give num_beams."
    )
  size = max(1, batch_size // count)
  shape = _tree(pair, texts, gamma, tree, config, size * count, seed, lenience)
  call = GenerateCall(pair, config, shape, lenience, logprobs, fixed_width)
  can_batch_continuously = count == 1 < size < len(texts) and not forced
  if can_batch_continuously:
    return _decode_in_slots(call, sources, size, seed)
  found: list[Output] = []
  for start in range(0, len(texts), size):
    batch = _Batch(pair, config, sources, start, size, forced, count)
    decoder = call.decoder((batch.forced_prefix,) if forced else ())
    keys = sample_keys(seed, start, size, count)
    options: dict[str, Any] = {"num_samples": count} if count > 1 else {}
    result = decoder.run(pair.params, batch.prompt, keys, **batch.options, **options)
    result = require_finite(jax.device_get(result))
    num_outputs = min(size, len(texts) - start) * count
    found += [call.output(result, row) for row in range(num_outputs)]
  return found


def stream(
  pair: Pair,
  text: str,
  *,
  gamma: int | Literal["auto"] | None = None,
  tree: Sequence[int] | Literal["auto"] | None = None,
  seed: int = 0,
  lenience: float = 1.0,
  task: str | None = None,
  **settings: Any,
) -> Iterator[str]:
  """Decode one text, and yield the output in pieces of text, at most one piece per round.

  The pieces together are the text that `generate` returns for [text] and the same arguments. Each
  round is a separate call of a compiled program, and the host waits for its result. Beam search
  and `num_return_sequences` above 1 are not supported.
  """
  config, prefix = generation_config(pair, task, settings)
  if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
    raise InputError("A stream has one output; give num_beams=1 and num_return_sequences=1.")
  require_text("text", text)
  require_seed(seed)
  text = prefix + text
  sources = _encoded(pair, [text])
  call = GenerateCall(
    pair, config, _tree(pair, [text], gamma, tree, config, 1, seed, lenience), lenience
  )
  decoder, batch = call.decoder(), _Batch(pair, config, sources, 0, 1, None)
  state = _init(decoder, pair.params, batch.prompt, sample_keys(seed, 0, 1, 1), **batch.options)
  num_sent, done = 0, False
  while not done:
    state = _round(decoder, pair.params, state)
    done = bool(state.done[0])
    output = call.output(require_finite(jax.device_get(decoder.result(state))), 0, done)
    done |= output.finish_reason == "stop_string"
    if piece := output.text[num_sent:]:
      yield piece
    num_sent += len(piece)


def generation_config(
  pair: Pair, task: str | None, settings: Mapping[str, Any]
) -> tuple[GenerationConfig, str]:
  """Return the settings of a call of `generate`, and the prefix of each source."""
  if task is None:
    of_task = {}
  else:
    if task not in pair.target.tasks:
      raise InputError(
        f"task is {task!r:.60}, and {pair.target.name} has "
        f"{'the tasks ' + ', '.join(pair.target.tasks) if pair.target.tasks else 'no tasks'}."
      )
    of_task = {**pair.target.tasks[task]}
  prefix = of_task.pop("prefix", "")
  return GenerationConfig.merged(pair.target.generation, of_task, settings), prefix


def _forced_tokens(
  pair: Pair,
  config: GenerationConfig,
  count: int,
  ids: Sequence[Sequence[int]] | None,
  texts: Sequence[str] | None,
) -> list[list[int]] | None:
  """Return the forced tokens of each text without T5's start token; None if none are given."""
  if ids is None and texts is None:
    return None
  if ids is not None and texts is not None:
    raise InputError("decoder_input_ids and decoder_texts are given; give one of them.")
  if texts is not None:
    first = () if pair.continues else (config.forced_bos_token_id,)  # such as the target language
    first = [token for token in first if token is not None]
    rows = [[*first, *pair.vocabulary.encode_target(text)] for text in _require_texts(texts)]
  else:
    first_tokens, _ = pair.target.model.prompt_tokens(jnp.ones((1, 1), jnp.int32))
    start = None if pair.continues else int(first_tokens[0, 0])
    rows = [[*row[1:]] if len(row) and row[0] == start else [*row] for row in ids or ()]
  if len(rows) != count:
    raise InputError(f"There are {count} texts and {len(rows)} decoder prefixes; give one each.")
  vocab_size = pair.target.model.vocab_size
  for row in rows:
    if not all(0 <= token < vocab_size for token in row):
      raise InputError(
        f"A decoder prefix has tokens {row!r:.60}; they lie in 0 to {vocab_size - 1}."
      )
  return rows


def beam_search(
  pair: Pair,
  texts: Sequence[str],
  *,
  beams: int = 4,
  gamma: int = 2,
  draft_beams: int | None = None,
  nodes: int | None = None,
  length_penalty: float = 0.6,
  max_new_tokens: int = 128,
  batch_size: int = 1,
) -> list[list[Output]]:
  """Return the outputs that a speculative beam search finds for each source.

  They are the texts that t5x's `decoding.beam_search` finds with the same target. `generate` with
  `num_beams` returns those that transformers finds, unless `beam_scorer` is "t5x".

  Args:
    beams: number of live sequences, and maximum number of outputs per source.
    gamma: number of steps that the draft searches ahead in each round; 0 is plain beam search.
    draft_beams: number of beams of the draft; defaults to `beams`.
    nodes: maximum number of nodes in one target forward pass (`Pair.beam_searcher`).
    length_penalty: exponent of the length penalty, as in `beams.BeamSearcher`.
    max_new_tokens: limit for each output, EOS included.
    batch_size: number of sources that are processed together.

  Returns:
    For each source, the outputs in descending order of their scores: the texts that ended, at
    most `beams`; or `beams` incomplete texts if none ended before the limit.
  """
  sources = _encoded(pair, _require_texts(texts))
  require_count("gamma", gamma, 0)
  require_count("max_new_tokens", max_new_tokens)
  pair.require_batch_size(batch_size)
  searcher = pair.beam_searcher(beams, gamma, draft_beams, length_penalty, nodes)
  config = GenerationConfig(max_new_tokens=max_new_tokens)
  return _search_batches(pair, lambda: searcher, sources, config, batch_size, None)


def _search(
  pair: Pair,
  sources: Sequence[Sequence[int]],
  config: GenerationConfig,
  gamma: int | str | None,
  batch_size: int,
  forced: list[list[int]] | None,
) -> list[Output]:
  count, num_beams = config.num_return_sequences or 1, config.num_beams or 1
  if count > num_beams:
    raise InputError(f"num_return_sequences is {count}, more than num_beams, {num_beams}.")
  if not config.sampling().is_argmax:
    raise InputError(
      f"num_beams is {num_beams}, and a beam search does not sample; give num_beams=1, or "
      "do_sample=False."
    )
  if config.stop_strings:
    raise InputError("A beam search does not support stop_strings; give num_beams=1.")
  if isinstance(gamma, str):
    raise InputError("gamma 'auto' is for generation without beams; give a number of steps.")
  eos_ids = config.eos_ids(pair.vocabulary.eos_id)
  scorer = config.beam_scorer or "hf"
  penalty = config.length_penalty
  if penalty is None:
    penalty = 1.0 if scorer == "hf" else 0.6
  of_config = pair.processors_of(config, eos_ids)

  def searcher(*of_batch: LogitsProcessor) -> BeamSearcher:
    steps, processors = 2 if gamma is None else gamma, (*of_config, *of_batch)
    return dataclasses.replace(
      pair.beam_searcher(num_beams, steps, None, penalty, processors=processors),
      eos_id=eos_ids if len(eos_ids) > 1 else eos_ids[0],
      scorer=scorer,
      early_stopping=config.early_stopping or False,
    )

  found = _search_batches(pair, searcher, sources, config, batch_size, forced)
  return [output for outputs in found for output in outputs[:count]]


def _search_batches(
  pair: Pair,
  searcher: Callable[..., BeamSearcher],
  sources: Sequence[Sequence[int]],
  config: GenerationConfig,
  batch_size: int,
  forced: list[list[int]] | None,
) -> list[list[Output]]:
  found: list[list[Output]] = []
  eos_ids = config.eos_ids(pair.vocabulary.eos_id)
  for start in range(0, len(sources), batch_size):
    batch = _Batch(pair, config, sources, start, batch_size, forced)
    of_batch = [batch.forced_prefix] if forced else []
    result = searcher(*of_batch).run(pair.params, batch.prompt, **batch.options)
    result = jax.device_get(result)
    require_finite(result.best())
    for row in zip(result.tokens, result.lengths, result.scores.tolist(), strict=True):
      outputs = zip(*row, strict=True)
      found.append([_candidate(pair, t[:n], score, eos_ids) for t, n, score in outputs if n])
  return found[: len(sources)]


def _candidate(pair: Pair, tokens: np.ndarray, score: float, eos_ids: Sequence[int]) -> Output:
  reason: FinishReason = "eos" if tokens[-1] in eos_ids else "length"
  return Output(text_of(pair, tokens), tokens, reason, score=score)


def text_of(pair: Pair, tokens: np.ndarray, is_complete: bool = True) -> str:
  """Return the text of an output, which the vocabulary's EOS need not end (`eos_token_id`).

  If it is not complete, the result is its beginning that no further tokens can change.
  """
  words = pair.vocabulary
  return (words.decode if is_complete else words.decode_stable)(tokens[tokens != words.eos_id])


class _Batch:
  """Texts that are decoded together; the last batch is padded with copies of its first text.

  Attributes:
    limits: limit of each output, forced tokens included.
    max_new_tokens: number of tokens per output that the compiled program has room for, forced
      tokens included.
  """

  def __init__(
    self,
    pair: Pair,
    config: GenerationConfig,
    sources: Sequence[Sequence[int]],
    start: int,
    size: int,
    forced: Sequence[Sequence[int]] | None,
    count: int = 1,
  ):
    rows = [row if row < len(sources) else start for row in range(start, start + size)]
    batch = [sources[row] for row in rows]
    # Sizes are rounded up, so that few programs are compiled.
    width = batching.size_of_sources(max(map(len, batch)))
    self.prompt = jnp.asarray(padded(batch, width, pair.vocabulary.pad_id))
    self._forced = [forced[row] if forced else () for row in rows for _ in range(count)]
    self.num_forced = np.array([*map(len, self._forced)], np.int32)
    prompts = np.asarray(self.prompt).repeat(count, axis=0)
    limits = new_tokens(pair, config, prompts, self.num_forced)
    self.limits = self.num_forced + limits
    self.max_new_tokens = size_of_outputs(int(self.limits.max()))

  @property
  def options(self) -> dict[str, Any]:
    """Arguments of `Decoder.run` and `BeamSearcher.run`."""
    options: dict[str, Any] = dict(limit=self.limits, max_new_tokens=self.max_new_tokens)
    return options | ({"num_forced": self.num_forced} if self.num_forced.any() else {})

  @property
  def forced_prefix(self) -> ForcedPrefix:
    return ForcedPrefix.of(self._forced)


@dataclasses.dataclass(frozen=True, eq=False)
class GenerateCall:
  """Settings of one call of `generate` without beams."""

  pair: Pair
  config: GenerationConfig
  tree: AnyTree
  lenience: float = 1.0
  logprobs: bool = False
  fixed_width: bool = False

  @functools.cached_property
  def eos_ids(self) -> tuple[int, ...]:
    """Tokens that end a text; several are padded to a power of two with copies."""
    ids = self.config.eos_ids(self.pair.vocabulary.eos_id)
    return (*ids, *ids[:1] * ((1 << (len(ids) - 1).bit_length()) - len(ids)))

  def decoder(self, more_processors: Processors = ()) -> Decoder:
    """Return the decoder, with `more_processors` after the logits processors of the settings."""
    pair, eos_ids = self.pair, self.eos_ids
    processors = pair.processors_of(self.config, eos_ids)
    return pair.decoder(
      self.config.sampling(),
      self.tree,
      self.lenience,
      HashableArray(np.array(eos_ids, np.int32)) if len(eos_ids) > 1 else eos_ids[0],
      (*processors, *more_processors),
      self.logprobs,
      self.fixed_width,
    )

  def output(self, result: DecodeResult, row: int, is_complete: bool = True) -> Output:
    """Return the output of a row of a batch.

    If it is not complete, its text is the beginning that further tokens cannot change, unless that
    has a stop string.
    """
    tokens = np.asarray(result.tokens[row, : result.lengths[row]])
    text = text_of(self.pair, tokens, is_complete)
    reason: FinishReason = "eos" if len(tokens) and tokens[-1] in self.eos_ids else "length"
    ends = [text.find(stop) + len(stop) for stop in self.stops if stop in text]
    if ends:  # the output ends with the token that completes the first stop string
      texts = (text_of(self.pair, tokens[:i]) for i in range(1, len(tokens) + 1))
      length, text = next((i, x) for i, x in enumerate(texts, 1) if x.startswith(text[: min(ends)]))
      tokens, reason = tokens[:length], "stop_string"
    emitted = result.rounds.num_emitted[:, row]
    num_forced = int(emitted.sum() - result.lengths[row])
    before = np.cumsum(emitted) - emitted
    ran = (emitted > 0) & (before < len(tokens) + num_forced)
    rounds = jax.tree.map(lambda of_all: of_all[ran, row], result.rounds)
    pieces, result_of_row = self.pair.vocabulary.pieces, batching.one_row(result, row)
    read = functools.partial(read_rounds, result_of_row, 0, pieces, self._parents)
    output = Output(text, tokens, reason, rounds, _read=read)
    if result.log_probs is None:
      return output
    model, processed = np.asarray(result.log_probs[row, : len(tokens)]).T
    return dataclasses.replace(output, logprobs=processed, model_logprobs=model)

  @functools.cached_property
  def _parents(self) -> Sequence[int]:
    tree = self.pair.proposed_tree(self.config.sampling(), self.tree)
    return () if isinstance(tree, DynamicTree) else tree.parents

  @property
  def stops(self) -> tuple[str, ...]:
    """Strings that end a text."""
    stops = self.config.stop_strings or ()
    return (stops,) if isinstance(stops, str) else tuple(stops)


def _decode_in_slots(
  call: GenerateCall, sources: Sequence[Sequence[int]], num_slots: int, seed: int
) -> list[Output]:
  pair, batch = call.pair, _Batch(call.pair, call.config, sources, 0, len(sources), None)
  found = batching.decode_texts(
    call.decoder(),
    pair.params,
    batching.Texts(
      batch.prompt.__getitem__,
      [*map(len, sources)],
      sample_keys(seed, 0, len(sources), 1),
      batch.limits,
    ),
    num_slots=num_slots,
    max_new_tokens=batch.max_new_tokens,
    has_encoder=not pair.continues,
  )
  outputs = {i: call.output(result, row) for i, result, row in found}
  return [outputs[i] for i in range(len(sources))]


def _tree(
  pair: Pair,
  texts: Sequence[str],
  gamma: int | str | None,
  tree: Sequence[int] | str | None,
  config: GenerationConfig,
  batch_size: int,
  seed: int,
  lenience: float,
) -> AnyTree:
  """Return the tree of draft tokens of a call of `generate`, which may calibrate first."""
  gamma = 5 if gamma is None else gamma
  if (fixed := given_tree(gamma, tree)) is not None:
    return fixed
  longest = config.max_new_tokens or config.max_length or DEFAULT_NEW_TOKENS
  settings = DecodeSettings(config.sampling(), batch_size, longest, seed, lenience)
  return resolve_tree(gamma, tree, pair, texts, settings, _LOG.info)


def sample_keys(seed: int, start: int, size: int, count: int) -> Array:
  """Return `count` keys for each of `size` texts from `start` on; the first is as in `row_keys`."""
  keys = row_keys(seed, start, size)
  if count == 1:
    return keys
  others = jax.vmap(lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count)))
  return others(keys).at[:, 0].set(keys).reshape(-1)


def new_tokens(
  pair: Pair, config: GenerationConfig, prompt: AnyArray, num_forced: AnyArray | int = 0
) -> np.ndarray:
  """Return the limit of new tokens of each row of `prompt`, forced tokens not included.

  The default limit is lowered to what the positions of the target hold. The last token of a text is
  not processed, so it needs no position.
  """
  num_before = np.asarray(pair.target.model.prompt_tokens(jnp.asarray(prompt))[1]) + num_forced
  limits = np.array(config.new_tokens(num_before.tolist()))
  most = num_positions(pair.target.model)
  if most is None:
    return limits
  if config.max_new_tokens is None and config.max_length is None:
    limits = np.minimum(limits, np.maximum(1, most + 1 - num_before))
  if (num_before + limits > most + 1).any():
    row = (num_before + limits).argmax()
    raise InputError(
      f"{num_before[row]} tokens before the output and {limits[row]} new tokens are too long for "
      f"{pair.target.name}, which has {most} positions; give max_new_tokens of at most "
      f"{most + 1 - num_before[row]}."
    )
  return limits


def size_of_outputs(limit: int) -> int:
  """Return `limit`, rounded up to a power of two (at least 16) unless it is above 4,096."""
  return max(16, 1 << (limit - 1).bit_length()) if limit <= 4096 else limit


_init = jax.jit(Decoder.init, static_argnames=("max_new_tokens", "num_samples"))
_round = jax.jit(Decoder.round)


def _encoded(pair: Pair, texts: Sequence[str]) -> list[list[int]]:
  """Return the token ids of each text, and warn of texts that are truncated."""
  rows = [*map(pair.vocabulary.encode, texts)]
  count = sum(len(row) > pair.max_source_tokens for row in rows)
  if count:
    warnings.warn(
      f"{count} of {len(texts)} texts have more than max_source_tokens "
      f"({pair.max_source_tokens}) tokens, and were truncated.",
      stacklevel=4,
    )
  return [*map(pair.truncated, rows)]


def _require_texts(texts: Sequence[str]) -> Sequence[str]:
  if isinstance(texts, str):
    raise InputError("texts is one string; give a list of strings.")
  for place, text in enumerate(texts):
    require_text(f"texts[{place}]", text)
  return texts
