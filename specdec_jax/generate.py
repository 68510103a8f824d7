"""Functions that take and return texts, with batches, lengths and random keys.

`outputs` is the way from texts to outputs, over which `generate`, `translate` and `decode` loop. A
`GenerateCall` decodes sources that are encoded, for these, for measurements and for the server.
`generate` and `stream` are methods of a `Pair`.
"""

import dataclasses
import functools
import io
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.text import Text

from specdec_jax import batching
from specdec_jax.beams import BeamSearcher
from specdec_jax.core.context import Prompt, PromptWithDraft
from specdec_jax.core.counts import require_finite
from specdec_jax.core.decode import Decoder, DecodeSettings, num_positions
from specdec_jax.core.generation_config import DEFAULT_NEW_TOKENS, SETTINGS, GenerationConfig
from specdec_jax.core.processors import ForcedPrefix, Processors
from specdec_jax.core.rounds import Round, read_rounds, round_text
from specdec_jax.core.sampling import sample_keys
from specdec_jax.core.settings import HashableArray
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree, chain, given_tree
from specdec_jax.core.types import AnyArray, AnyPair, DecodeResult, Rounds
from specdec_jax.data.vocabulary import padded
from specdec_jax.drafts.given import FIRST, MOST, given_draft
from specdec_jax.errors import InputError, require_seed, require_text, require_tokens
from specdec_jax.measure.calibrate import auto_tree

_LOG = logging.getLogger("specdec_jax")

FinishReason = Literal["eos", "length", "stop_string"]


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
  """Output for one text. `str(output)` and `print(output)` give its text.

  Attributes:
    tokens: [T], tokens of the text; EOS is last unless the output ended for another reason.
    finish_reason: "eos", "length" (the limit was reached) or "stop_string".
    rounds: `core.types.Rounds` of this text, with fields [R, ...]. For a beam search, those of the
      search, whose steps count as emitted tokens.
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
    """Mean number of tokens per round, which is one target forward pass."""
    return None if self.rounds is None else len(self.tokens) / len(self.rounds.num_emitted)

  @property
  def acceptance_counts(self) -> tuple[int, int]:
    """Numbers of accepted and of rejected draft tokens (`Rounds.acceptance_counts`)."""
    if self.rounds is None:
      return 0, 0
    of_batch = jax.tree.map(lambda x: np.asarray(x)[:, None], self.rounds)
    accepted, rejected = of_batch.acceptance_counts()
    return int(accepted[0]), int(rejected[0])

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


EMPTY = Output("", np.zeros(0, np.int32), "eos")  # of a blank text, which was not decoded


def generate(pair: AnyPair, texts: Iterable[str], **arguments: Any) -> list[Output]:
  """Generate outputs by speculative decoding; if `num_beams` > 1, by speculative beam search.

  The arguments are those of `outputs`. A text longer than `pair.max_source_tokens` is truncated,
  with a warning (`Pair.cut` returns the part that remains).

  Returns:
    The outputs in the order of the texts, `num_return_sequences` per text. A beam search may find
    fewer.
  """
  texts = _as_list("texts", texts)
  _, prefix = generation_config(pair, arguments.get("task"), {})
  for place, text in enumerate(texts):
    require_text(f"texts[{place}]", text)
  warn_of_truncation(pair, [prefix + text for text in texts])
  return [*outputs(pair, texts, **arguments)]


def outputs(
  pair: AnyPair,
  texts: Iterable[str | None],
  *,
  gamma: int | Literal["auto"] | None = None,
  tree: AnyTree | Iterable[int] | Literal["auto"] | None = None,
  batch_size: int = 1,
  seed: int = 0,
  first: int = 0,
  lenience: float = 1.0,
  task: str | None = None,
  decoder_input_ids: Iterable[Sequence[int]] | None = None,
  decoder_texts: Iterable[str] | None = None,
  draft_texts: Iterable[str | None] | None = None,
  logprobs: bool = False,
  fixed_width: bool = False,
  draft_beams: int | None = None,
  nodes: int | None = None,
  **settings: Any,
) -> Iterator[Output]:
  """Decode texts, and yield their outputs in order.

  A list is decoded continuously: when a text of a batch ends, the next one takes its place
  (`batching`), unless there are decoder prefixes, beams or several outputs per text. Other
  iterables are decoded batch by batch, each as soon as its texts have arrived.

  Args:
    texts: sources, or prompts of a decoder-only model; None for an `EMPTY` output. A text longer
      than `pair.max_source_tokens` is truncated.
    gamma: number of draft tokens per round; 5 by default, 0 for autoregressive decoding. 'auto'
      chooses the fastest (`measure.calibrate.auto_tree`), caches the choice and logs the
      reason to the logger 'specdec_jax'. For a beam search, number of steps that the draft
      searches ahead; 2 by default, 'auto' is not supported.
    tree: parents of the draft tokens of a tree (`Tree.parents`), or the tree, which replaces the
      chain of gamma draft tokens; 'auto' chooses the fastest tree or chain. Not for a beam search.
    batch_size: maximum number of outputs (in a beam search: of texts) that are decoded together;
      all outputs of one text always are. For a given gamma or tree, outputs do not depend on
      `batch_size`, except for rounding.
    seed: seed of all sampling. The random keys of a text depend only on the seed and on the index
      of the text.
    first: index of the first text.
    lenience: in (0, 1]. Below 1, more draft tokens are accepted, and outputs no longer have the
      target's distribution (Appendix A.5). Not for a beam search.
    task: task of the checkpoint's `task_specific_params`, whose settings and prefix apply.
    decoder_input_ids: one sequence of tokens per text, which the output continues. The sequence
      is not part of the output. For T5, the start token at its beginning is optional.
    decoder_texts: the same sequences as target texts, which follow `forced_bos_token_id`; give at
      most one of the two arguments.
    draft_texts: one text per source that its output may have, or None, as a draft (`drafts.given`).
      Outputs do not depend on it, except that those above temperature 0 are other samples. The
      draft of the pair proposes where a text has no more tokens, or none that fit. Not for a beam
      search or a tree.
    logprobs: whether outputs have log-probabilities. Not for a beam search.
    fixed_width: whether to decode autoregressively in passes of the width that gamma or tree give
      a round. Target passes then have the shapes of speculation, so that ties fall alike
      (docs/exactness.md). Not for a beam search.
    draft_beams: for a beam search, number of beams of the draft; defaults to `num_beams`.
    nodes: for a beam search, maximum number of nodes in one target pass (`Pair.beam_searcher`).
    settings: fields of `GenerationConfig`: `max_new_tokens`, `temperature`, `num_beams`,
      `repetition_penalty` and others, with the names of transformers. They take precedence over
      the settings of the task and of the checkpoint (`Loaded.generation`); None switches one off.

  Raises:
    InputError: an argument is invalid, there is not enough memory, or logits of the target or
      probabilities of the draft are NaN or infinite.
    TypeError: an argument is unknown.
  """
  config, prefix = generation_config(pair, task, settings)
  pair.require_batch_size(batch_size)
  require_seed(seed)
  forced = None
  if not (decoder_input_ids is None and decoder_texts is None):
    texts = _as_list("texts", texts)
    forced = _forced_tokens(pair, config, len(texts), decoder_input_ids, decoder_texts)
  count, size = config.num_return_sequences or 1, batch_size
  call: BeamCall | GenerateCall
  if (config.num_beams or 1) > 1:
    if tree is not None or logprobs or fixed_width or lenience != 1:
      raise InputError(
        f"num_beams is {config.num_beams}, and a beam search has no tree, logprobs, fixed_width or "
        "lenience; leave them out, or give num_beams=1."
      )
    call = BeamCall(pair, config, 2 if gamma is None else gamma, draft_beams, nodes)
  else:
    if (draft_beams, nodes) != (None, None):
      raise InputError("draft_beams and nodes are for a beam search; give num_beams above 1.")
    size = max(1, batch_size // count)
    if "auto" in (gamma, *([tree] if isinstance(tree, str) else [])):
      texts = _as_list("texts", texts)
    sample = texts if isinstance(texts, Sequence) else ()
    prefixed = [prefix + text for text in sample if text is not None]
    shape = chosen_tree(pair, prefixed, gamma, tree, config, size * count, seed, lenience)
    call = GenerateCall(pair, config, shape, lenience, logprobs, fixed_width)
  if isinstance(draft_texts, Sequence) and isinstance(texts, Sequence):
    _require_as_many(len(texts), len(_as_list("draft_texts", draft_texts)), "draft_texts")
  drafts = None if draft_texts is None else iter(draft_texts)
  for start, block in _blocks(texts, size):
    index = [i for i, text in enumerate(block) if text is not None]
    sources = [pair.encode(f"{prefix}{block[i]}") for i in index]
    prefixes = None if forced is None else [forced[start + i] for i in index]
    numbers = [first + start + i for i in index]
    options: dict[str, Any] = dict(size=size, seed=seed)
    if drafts is not None:
      given = [*itertools.islice(drafts, len(block))]
      _require_as_many(len(block), len(given), "draft_texts")
      if any(given) and isinstance(call, BeamCall):
        raise InputError("draft_texts are not for a beam search; give num_beams=1.")
      if any(given):
        named = ((given[i], f"draft_texts[{start + i}]") for i in index)
        options["drafts"] = [draft_tokens(pair, *each) for each in named]
    found = call.decode(sources, numbers, prefixes, **options)
    for text in block:
      yield from [EMPTY] if text is None else next(found)


def _require_as_many(num_texts: int, count: int, name: str) -> None:
  if count != num_texts:
    raise InputError(f"There are {num_texts} texts and {count} {name}; give one each.")


def draft_tokens(pair: AnyPair, text: str | None, name: str = "draft_text") -> list[int]:
  """Return the tokens of a text that an output may have, EOS included; none for None or ''."""
  if not text:
    return []
  require_text(name, text)
  if pair.target.speech is not None:
    text = f" {text.strip()}"  # as transcripts begin
  return pair.vocabulary.encode_output(text)


def _blocks(texts: Iterable[str | None], size: int) -> Iterator[tuple[int, Sequence[str | None]]]:
  """Yield the texts of a list at once, and others in batches, each with its first index."""
  if isinstance(texts, Sequence):
    yield 0, _require_texts(_as_list("texts", texts))
    return
  rest = iter(texts)
  for start in itertools.count(0, size):
    if not (block := [*itertools.islice(rest, size)]):
      return
    yield start, _require_texts(block, start)


def stream(
  pair: AnyPair,
  text: str,
  *,
  gamma: int | Literal["auto"] | None = None,
  tree: AnyTree | Iterable[int] | Literal["auto"] | None = None,
  seed: int = 0,
  lenience: float = 1.0,
  task: str | None = None,
  draft_text: str | None = None,
  **settings: Any,
) -> Iterator[str]:
  """Decode one text, and yield the output in pieces of text, at most one piece per round.

  The pieces together are the text that `generate` returns for [text] and the same arguments. Each
  round is a separate call of a compiled program, and the host waits for its result. Beam search
  and `num_return_sequences` above 1 are not supported.

  Args:
    draft_text: text that the output may have (`draft_texts` of `outputs`).
  """
  config, prefix = generation_config(pair, task, settings)
  if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
    raise InputError("A stream has one output; give num_beams=1 and num_return_sequences=1.")
  require_text("text", text)
  require_seed(seed)
  text = prefix + text
  warn_of_truncation(pair, [text])
  shape = chosen_tree(pair, [text], gamma, tree, config, 1, seed, lenience)
  call = GenerateCall(pair, config, shape, lenience)
  drafts = [given] if (given := draft_tokens(pair, draft_text)) else []
  if drafts:
    call = call.with_given_drafts(len(given))
  decoder, batch = call.decoder(), _Batch(pair, config, [pair.encode(text)], None, drafts)
  state = _init(decoder, pair.params, batch.prompt, sample_keys(seed, [0], 1), **batch.options)
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
  pair: AnyPair, task: str | None, settings: Mapping[str, Any]
) -> tuple[GenerationConfig, str]:
  """Return the settings of a call of `generate`, and the prefix of each source.

  A setting that is None in `settings` has its default value, whatever the checkpoint sets.
  """
  if unknown := settings.keys() - {*SETTINGS}:
    raise TypeError(f"There is no argument {', '.join(sorted(unknown))}.")
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
  given = {k: tuple(x) if isinstance(x, Iterator) else x for k, x in settings.items()}
  off = {name for name, value in given.items() if value is None}
  of_files = (
    {name: value for name, value in each.items() if name not in off}
    for each in (pair.target.generation, of_task)
  )
  config = GenerationConfig.merged(*of_files, given)
  count = config.num_return_sequences or 1
  if count > 1 and (config.num_beams or 1) == 1 and config.sampling().is_argmax:
    raise InputError(
      f"num_return_sequences is {count}, and at temperature 0 all outputs would be equal; sample, "
      "or search with beams."
    )
  return config, prefix


def _forced_tokens(
  pair: AnyPair,
  config: GenerationConfig,
  count: int,
  ids: Iterable[Sequence[int]] | None,
  texts: Iterable[str] | None,
) -> list[list[int]]:
  """Return the forced tokens of each text without T5's start token."""
  if ids is not None and texts is not None:
    raise InputError("decoder_input_ids and decoder_texts are given; give one of them.")
  if texts is not None:
    first = () if pair.continues else (config.forced_bos_token_id,)  # such as the target language
    first = [token for token in first if token is not None]
    rows = [
      [*first, *pair.vocabulary.encode_target(text)]
      for text in _require_texts(_as_list("decoder_texts", texts), name="decoder_texts")
    ]
  else:
    start = None
    if not pair.continues:
      source = jnp.asarray([pair.encode("")])
      start = int(pair.target.model.prompt_tokens(source)[0][0, 0])
    rows = [np.asarray(row, object).tolist() for row in (() if ids is None else ids)]
    rows = [row[1:] if row[:1] == [start] else row for row in rows]
  _require_as_many(count, len(rows), "decoder prefixes")
  require_tokens("decoder_input_ids", filter(None, rows), pair.target.model.vocab_size)
  return rows


@dataclasses.dataclass(frozen=True, eq=False)
class BeamCall:
  """Settings of one call of `generate` with beams.

  Raises:
    InputError: a setting is invalid, or not for a beam search.
  """

  pair: AnyPair
  config: GenerationConfig
  gamma: int | str
  draft_beams: int | None = None
  nodes: int | None = None

  def __post_init__(self):
    count, num_beams = self.config.num_return_sequences or 1, self.config.num_beams or 1
    if count > num_beams:
      raise InputError(f"num_return_sequences is {count}, more than num_beams, {num_beams}.")
    if not self.config.sampling().is_argmax:
      raise InputError(
        f"num_beams is {num_beams}, and a beam search does not sample; give num_beams=1, or "
        "do_sample=False."
      )
    if self.config.stop_strings:
      raise InputError("A beam search does not support stop_strings; give num_beams=1.")
    if isinstance(self.gamma, str):
      raise InputError("gamma 'auto' is for generation without beams; give a number of steps.")
    self.searcher()

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """Tokens that end a text."""
    return self.config.eos_ids(self.pair.vocabulary.eos_id)

  def searcher(self, more_processors: Processors = ()) -> BeamSearcher:
    """Return the searcher, with `more_processors` after the logits processors of the settings."""
    config, scorer = self.config, self.config.beam_scorer or "hf"
    penalty = config.length_penalty
    if penalty is None:
      penalty = 1.0 if scorer == "hf" else 0.6
    processors = (*self.pair.processors_of(config, self.eos_ids), *more_processors)
    return dataclasses.replace(
      self.pair.beam_searcher(
        config.num_beams, self.gamma, self.draft_beams, penalty, self.nodes, processors
      ),
      eos_id=self.eos_ids if len(self.eos_ids) > 1 else self.eos_ids[0],
      scorer=scorer,
      early_stopping=config.early_stopping or False,
    )

  def decode(
    self,
    sources: Sequence[Sequence[int]],
    index: Sequence[int],
    forced: Sequence[Sequence[int]] | None,
    *,
    size: int,
    seed: int,
  ) -> Iterator[list[Output]]:
    """Yield the outputs of each source; see `GenerateCall.decode`."""
    for start in range(0, len(sources), size):
      batch = _Batch(self.pair, self.config, sources, forced, (), start, size)
      searcher = self.searcher((batch.forced_prefix,) if forced else ())
      result = jax.device_get(searcher.run(self.pair.params, batch.prompt, **batch.options))
      best = require_finite(result.best())
      for row in range(min(size, len(sources) - start)):
        rounds = _of_row(best.rounds, row, best.rounds.num_emitted[:, row] > 0)
        found = zip(result.tokens[row], result.lengths[row], result.scores[row].tolist())
        outputs = [self._output(tokens[:n], score, rounds) for tokens, n, score in found if n]
        yield outputs[: self.config.num_return_sequences or 1]

  def _output(self, tokens: np.ndarray, score: float, rounds: Rounds) -> Output:
    reason: FinishReason = "eos" if tokens[-1] in self.eos_ids else "length"
    return Output(text_of(self.pair, tokens), tokens, reason, rounds, score=score)


def _of_row(rounds: Rounds, row: int, ran: AnyArray) -> Rounds:
  """Return the rounds of a row in which it was decoded."""
  return jax.tree.map(lambda of_all: np.asarray(of_all)[ran, row], rounds)


def text_of(pair: AnyPair, tokens: np.ndarray, is_complete: bool = True) -> str:
  """Return the text of an output, which the vocabulary's EOS need not end (`eos_token_id`).

  If it is not complete, the result is its beginning that no further tokens can change.
  """
  words = pair.vocabulary
  return (words.decode if is_complete else words.decode_stable)(tokens[tokens != words.eos_id])


def before_stop(text: str, stops: Sequence[str], is_complete: bool = True) -> tuple[str, str]:
  """Return the text before the stop string that ends first, and the text to its end, or ''.

  Without one, a text that is not complete ends before what may become one.
  """
  if found := [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]:
    end, start = min(found)
    return text[:start], text[:end]
  starts = range(max(0, len(text) - max(map(len, stops), default=0)), len(text))
  held_back = (i for i in starts if any(stop.startswith(text[i:]) for stop in stops))
  return text[: None if is_complete else next(held_back, None)], ""


class _Batch:
  """Texts that are decoded together; the last batch is padded with copies of its first text.

  Attributes:
    limits: limit of each output, forced tokens included.
    max_new_tokens: number of tokens per output that the compiled program has room for, forced
      tokens included.
  """

  def __init__(
    self,
    pair: AnyPair,
    config: GenerationConfig,
    sources: Sequence[Sequence[int]],
    forced: Sequence[Sequence[int]] | None,
    drafts: Sequence[Sequence[int]] = (),
    start: int = 0,
    size: int | None = None,
    count: int = 1,
  ):
    size = len(sources) if size is None else size
    rows = [row if row < len(sources) else start for row in range(start, start + size)]
    batch = [sources[row] for row in rows]
    # Sizes are rounded up, so that few programs are compiled.
    width = batching.size_of_sources(max(map(len, batch)))
    prompts = padded(batch, width, pair.vocabulary.pad_id)
    self.prompt: Prompt = jnp.asarray(prompts)
    if drafts:
      self.prompt = with_drafts(self.prompt, [drafts[row] for row in rows])
    self._forced = [forced[row] if forced else () for row in rows for _ in range(count)]
    self.num_forced = np.array([*map(len, self._forced)], np.int32)
    limits = new_tokens(pair, config, prompts.repeat(count, axis=0), self.num_forced)
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

  pair: AnyPair
  config: GenerationConfig
  tree: AnyTree
  lenience: float = 1.0
  logprobs: bool = False
  fixed_width: bool = False

  @classmethod
  def of(cls, pair: AnyPair, settings: DecodeSettings, tree: AnyTree) -> "GenerateCall":
    """Return a call with the settings of a measurement, and none of the checkpoint."""
    sampling = dataclasses.asdict(settings.sampling)
    config = GenerationConfig(max_new_tokens=settings.max_new_tokens, **sampling)
    return cls(pair, config, tree, settings.lenience)

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

  def decode(
    self,
    sources: Sequence[Sequence[int]],
    index: Sequence[int],
    forced: Sequence[Sequence[int]] | None,
    *,
    size: int,
    seed: int,
    drafts: Sequence[Sequence[int]] = (),
  ) -> Iterator[list[Output]]:
    """Yield the outputs of each source, `num_return_sequences` of them.

    Args:
      index: index of each source, for its random keys.
      forced: tokens that the output of each source continues; None for none.
      size: number of sources that are decoded together.
      drafts: tokens of a text that the output of each source may have, and which is empty if there
        is none; () for no texts.
    """
    longest = max(map(len, drafts), default=0)
    call = self.with_given_drafts(longest, size) if longest else self
    yield from call._decode(sources, index, forced, size, seed, drafts if longest else ())

  def with_given_drafts(self, longest: int = MOST, batch_size: int = 1) -> "GenerateCall":
    """Return the call for sources that have draft texts, of which the longest has so many tokens.

    gamma for these is a power of two; in a batch on a CPU, where each token of a pass takes time
    for all rows, it is that of the call.
    """
    if not self.tree.is_chain or self.fixed_width:
      raise InputError("draft_texts do not go with a tree or fixed_width; leave these out.")
    gamma = next(n for n in (FIRST, 16, MOST) if n >= min(longest, MOST))
    if batch_size > 1 and jax.default_backend() == "cpu":
      gamma = self.tree.depth or FIRST
    draft = given_draft(self.pair.draft, self.tree, self.pair.target)
    return dataclasses.replace(self, pair=self.pair.with_draft(draft), tree=chain(gamma))

  def _decode(
    self,
    sources: Sequence[Sequence[int]],
    index: Sequence[int],
    forced: Sequence[Sequence[int]] | None,
    size: int,
    seed: int,
    drafts: Sequence[Sequence[int]],
  ) -> Iterator[list[Output]]:
    count = self.config.num_return_sequences or 1
    if count == 1 < size < len(sources) and not forced:
      yield from self._decode_in_slots(sources, index, size, seed, drafts)
      return

    def run(start: int) -> tuple[int, DecodeResult]:
      batch = _Batch(self.pair, self.config, sources, forced, drafts, start, size, count)
      decoder = self.decoder((batch.forced_prefix,) if forced else ())
      given = [*index[start : start + size]]
      keys = sample_keys(seed, given + given[:1] * (size - len(given)), count)
      options = batch.options | ({"num_samples": count} if count > 1 else {})
      return len(given), decoder.run(self.pair.params, batch.prompt, keys, **options)

    # The device decodes the next batch while the host reads a result.
    batches: Any = itertools.chain(map(run, range(0, len(sources), size)), [None])
    for (num_given, result), _ in itertools.pairwise(batches):
      result = require_finite(jax.device_get(result))
      for row in range(num_given):
        yield [self.output(result, row * count + i) for i in range(count)]

  def _decode_in_slots(
    self,
    sources: Sequence[Sequence[int]],
    index: Sequence[int],
    batch_size: int,
    seed: int,
    drafts: Sequence[Sequence[int]],
  ) -> Iterator[list[Output]]:
    batch = _Batch(self.pair, self.config, sources, None, drafts)
    keys = sample_keys(seed, index, 1)
    found = batching.decode_texts(
      self.decoder(),
      self.pair.params,
      batching.Texts(batch.prompt.__getitem__, [*map(len, sources)], keys, batch.limits),
      batch_size=batch_size,
      max_new_tokens=batch.max_new_tokens,
      has_encoder=not self.pair.continues,
    )
    ended: dict[int, Output] = {}
    first = 0  # source whose output is yielded next
    for source, result, row in found:
      ended[source] = self.output(result, row)
      while first in ended:
        yield [ended.pop(first)]
        first += 1

  def output(self, result: DecodeResult, row: int, is_complete: bool = True) -> Output:
    """Return the output of a row of a batch.

    If it is not complete, its text is the beginning that further tokens cannot change, unless that
    has a stop string.
    """
    tokens = np.asarray(result.tokens[row, : result.lengths[row]])
    text = text_of(self.pair, tokens, is_complete)
    reason: FinishReason = "eos" if len(tokens) and tokens[-1] in self.eos_ids else "length"
    stops = self.config.stops
    space = self.pair.vocabulary.space_before(tokens) if stops else ""
    _, end = before_stop(space + text, stops)
    if end:  # the output ends with the token that completes the first stop string
      texts = (text_of(self.pair, tokens[:i]) for i in range(1, len(tokens) + 1))
      length, text = next((i, x) for i, x in enumerate(texts, 1) if (space + x).startswith(end))
      tokens, reason = tokens[:length], "stop_string"
    emitted = result.rounds.num_emitted[:, row]
    num_forced = int(emitted.sum() - result.lengths[row])
    before = np.cumsum(emitted) - emitted
    ran = (emitted > 0) & (before < len(tokens) + num_forced)
    rounds = _of_row(result.rounds, row, ran)
    pieces, result_of_row = self.pair.vocabulary.pieces, batching.one_row(result, row)
    read = functools.partial(read_rounds, result_of_row, 0, pieces, self._parents)
    output = Output(text, tokens, reason, rounds, _read=read)
    if result.log_probs is None:
      return output
    model, _, sampled = np.asarray(result.log_probs[row, : len(tokens)]).T
    return dataclasses.replace(output, logprobs=sampled, model_logprobs=model)

  @functools.cached_property
  def _parents(self) -> Sequence[int]:
    tree = self.pair.proposed_tree(self.config.sampling(), self.tree)
    return () if isinstance(tree, DynamicTree) else tree.parents


def chosen_tree(
  pair: AnyPair,
  texts: Sequence[str],
  gamma: int | str | None,
  tree: AnyTree | Iterable[int] | str | None,
  config: GenerationConfig,
  batch_size: int,
  seed: int,
  lenience: float = 1.0,
  say: Callable[[str], object] = _LOG.info,
) -> AnyTree:
  """Return the tree of draft tokens that `gamma` and `tree` ask for; 'auto' calibrates first.

  Args:
    texts: texts that a calibration may decode.
    say: function that is called with the reason of a choice.
  """
  if isinstance(tree, Tree | DynamicTree):
    return tree
  gamma = 5 if gamma is None else gamma
  parents = tree if tree is None or isinstance(tree, str | Sequence) else [*tree]
  if (fixed := given_tree(gamma, parents)) is not None:
    return fixed
  longest = config.max_new_tokens or config.max_length or DEFAULT_NEW_TOKENS
  settings = DecodeSettings(config.sampling(), batch_size, longest, seed, lenience)
  return auto_tree(pair, texts, settings, tree == "auto", say)


def new_tokens(
  pair: AnyPair, config: GenerationConfig, prompt: AnyArray, num_forced: AnyArray | int = 0
) -> np.ndarray:
  """Return the limit of new tokens of each row of `prompt`, forced tokens not included.

  The default limit is lowered to what the positions of the target hold. The last token of a text is
  not processed, so it needs no position.
  """
  num_before = np.asarray(_prompt_lengths(pair.target.model, prompt)) + num_forced
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


def with_drafts(
  prompt: Prompt, drafts: Sequence[Sequence[int]], width: int | None = None
) -> PromptWithDraft:
  """Return prompts with the tokens of a text for each, padded to `width` or to a power of two."""
  longest = max(map(len, drafts))
  tokens = padded(drafts, width or size_of_outputs(longest))
  return PromptWithDraft(prompt, jnp.asarray(tokens), jnp.array([*map(len, drafts)], jnp.int32))


def given_prompts(prompts: batching.PromptsFn, width: int) -> batching.PromptsFn:
  """Return the function `prompts` of `Slots` for prompts, and for pairs of one and `draft_tokens`.

  All prompts of a call are of the same kind.

  Args:
    width: largest number of these tokens; of longer texts, the beginning is used.
  """

  def of_rows(rows: Sequence[Any]) -> tuple[Prompt, int | None]:
    if not isinstance(rows[0], tuple):
      return prompts(rows)
    prompt, longest = prompts([row for row, _ in rows])
    return with_drafts(prompt, [draft[:width] for _, draft in rows], width), longest

  return of_rows


_prompt_lengths = jax.jit(lambda model, x: model.prompt_tokens(x)[1], static_argnums=0)
_init = jax.jit(Decoder.init, static_argnames=("max_new_tokens", "num_samples"))
_round = jax.jit(Decoder.round)


def warn_of_truncation(pair: AnyPair, texts: Sequence[str]) -> None:
  """Warn if texts are longer than `max_source_tokens`."""
  most = pair.max_source_tokens
  count = sum(len(pair.vocabulary.encode(text)) > most for text in texts)
  if count:
    warnings.warn(
      f"{count} of {len(texts)} texts have more than max_source_tokens "
      f"({most}) tokens, and were truncated.",
      stacklevel=4,
    )


def _as_list(name: str, texts: Iterable[Any] | None) -> Sequence[Any]:
  """Return texts as a list, which an iterator is not; raise InputError for a single text."""
  if isinstance(texts, str):
    raise InputError(f"{name} is one string; give a list of strings.")
  return texts if isinstance(texts, Sequence) else [*(texts or ())]


def _require_texts(texts: Sequence[Any], first: int = 0, name: str = "texts") -> Sequence[Any]:
  for place, text in enumerate(texts, first):
    if text is not None or name != "texts":
      require_text(f"{name}[{place}]", text)
  return texts
