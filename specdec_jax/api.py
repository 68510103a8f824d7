"""Public interface for texts: a pair of a target and a draft that generates texts from texts.

The methods of a pair handle batches, lengths and random keys. Compiled programs are cached between
runs.
"""

import functools
import inspect
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from specdec_jax import pairs
from specdec_jax.compile_cache import default_cache_dir, enable_compile_cache
from specdec_jax.core.decode import Decoder
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import AnyTree, DynamicTree
from specdec_jax.core.types import DecodeResult, Rounds
from specdec_jax.counts import require_finite
from specdec_jax.errors import require_count, require_seed, require_text, require_types
from specdec_jax.loading import DecodeSettings
from specdec_jax.measurement.calibrate import resolve_tree
from specdec_jax.reporting.rounds import Round, read_rounds, round_text

P = ParamSpec("P")
R = TypeVar("R")
_LOG = logging.getLogger("specdec_jax")


class Output(str):
  """Output text of a pair, with its tokens and its rounds.

  Attributes:
    tokens: token ids [T]; the last one is EOS unless the limit was reached first.
    rounds: `core.types.Rounds` of this text, whose arrays have shape [R, ...].
    words: rounds as pieces of text; each round is a `reporting.rounds.Round`.
  """

  tokens: np.ndarray
  rounds: Rounds
  _read: Callable[[], tuple[Round, ...]]

  def __new__(
    cls, text: str, tokens: np.ndarray, rounds: Rounds, read: Callable[[], tuple[Round, ...]]
  ) -> "Output":
    self = super().__new__(cls, text)
    self.tokens, self.rounds, self._read = tokens, rounds, read
    return self

  @functools.cached_property
  def words(self) -> tuple[Round, ...]:
    return self._read()

  @property
  def acceptance_length(self) -> float:
    """Mean number of tokens per round. Each round has one target forward pass."""
    return len(self.tokens) / len(self.rounds.num_emitted)

  def show(self, console: Console | None = None) -> None:
    """Print one line per round: accepted tokens, [-rejected], and [+the target's token]."""
    console = console or Console()
    lines = [round_text(words) for words in self.words]
    console.print(Text("\n").join(lines), soft_wrap=True)

  def _repr_html_(self) -> str:
    """Return HTML, which notebooks display."""
    # With force_jupyter, the console would also display each line in the notebook.
    console = Console(record=True, file=io.StringIO(), force_jupyter=False)
    console.print(Text(self), soft_wrap=True)
    self.show(console)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


class Candidate(str):
  """Output text of a beam search, with its tokens and its score.

  Attributes:
    tokens: token ids [T]; the last one is EOS unless the limit was reached first.
    score: the target's log-probability of the text, divided by the length penalty. It is not
      divided if no text of the search ended.
  """

  tokens: np.ndarray
  score: float

  def __new__(cls, text: str, tokens: np.ndarray, score: float) -> "Candidate":
    self = super().__new__(cls, text)
    self.tokens, self.score = tokens, score
    return self


# Arguments of transformers' generate, and what to use instead; "" if it is not supported.
_THEIRS = {
  **dict.fromkeys(("num_beams", "num_beam_groups"), "beam_search(texts, beams=...)"),
  **dict.fromkeys(("max_length", "max_tokens"), "max_new_tokens"),
  "do_sample": "temperature: 0 takes the argmax, and above it samples",
  **dict.fromkeys(("num_assistant_tokens", "num_speculative_tokens"), "gamma"),
  **dict.fromkeys(("assistant_model", "prompt_lookup_num_tokens"), "load_pair(draft=...)"),
  **dict.fromkeys(("input_ids", "inputs"), "texts"),
  "num_return_sequences": "beam_search, or the same text several times",
  **dict.fromkeys(("repetition_penalty", "no_repeat_ngram_size", "encoder_repetition_penalty"), ""),
  **dict.fromkeys(("encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), ""),
  **dict.fromkeys(("bad_words_ids", "force_words_ids", "suppress_tokens", "stop_strings"), ""),
  **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "early_stopping"), ""),
  **dict.fromkeys(("output_scores", "return_dict_in_generate", "logits_processor"), ""),
  **dict.fromkeys(("generation_config", "eos_token_id", "pad_token_id", "decoder_input_ids"), ""),
  **dict.fromkeys(("typical_p", "min_p", "penalty_alpha", "stopping_criteria", "streamer"), ""),
}
_OF_BEAMS = {"beams", "draft_beams", "nodes", "length_penalty"}


def _explains_unknown_arguments(method: Callable[P, R]) -> Callable[P, R]:
  """Wrap a method so that the error for an unknown argument says which argument to use instead."""
  known = inspect.signature(method).parameters

  @functools.wraps(method)
  def call(*args: P.args, **kwargs: P.kwargs) -> R:
    for name in kwargs:
      if name not in known:
        raise TypeError(_unknown(method.__name__, name, [*known][2:]))
    return method(*args, **kwargs)

  return call


def _unknown(method: str, name: str, known: Sequence[str]) -> str:
  said = f"{method}() has no argument {name!r}"
  use = _THEIRS.get(name)
  if name == "num_beams" and method == "beam_search":
    use = "beams"
  if name in _OF_BEAMS:
    use = "beam_search(texts, beams=...)"
  if use:
    return f"{said}; use {use}."
  if use is not None:
    return f"{said}: that is not supported."
  if method == "beam_search" and name in ("temperature", "top_k", "top_p", "seed"):
    return f"{said}: a beam search does not sample; use generate."
  return f"{said}; it takes {', '.join(known)}."


class Pair(pairs.LoadedPair):
  """Target, draft and vocabulary, with methods that take and return texts."""

  @_explains_unknown_arguments
  def generate(
    self,
    texts: Sequence[str],
    *,
    gamma: int | Literal["auto"] = 5,
    tree: Sequence[int] | Literal["auto"] | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    max_new_tokens: int = 128,
    batch_size: int = 1,
    seed: int = 0,
    lenience: float = 1.0,
  ) -> list[Output]:
    """Decode texts speculatively.

    Args:
      texts: sources, or prompts of a decoder-only model. A text longer than `max_source_tokens` is
        truncated (`cut` returns the part that remains).
      gamma: draft tokens per round; 0 for autoregressive decoding; 'auto' chooses the fastest
        (`measurement.calibrate.resolve_tree`), logs why to 'specdec_jax', and caches the choice.
      tree: parents of a tree of draft tokens (`trees.Tree`), instead of a chain of gamma; 'auto'
        chooses the fastest tree or chain.
      temperature: sampling temperature; 0 is argmax.
      top_k: number of most probable tokens to sample from; 0 means no limit.
      top_p: probability mass of nucleus sampling; 1 means no limit.
      max_new_tokens: limit for each output, EOS included.
      batch_size: number of texts that are decoded together; outputs do not depend on it.
      seed: random seed of all sampling. The sample of a text depends on the seed and on the index
        of the text in `texts`.
      lenience: below 1, more draft tokens are accepted, and outputs no longer have the target's
        distribution (Appendix A.5).

    Returns:
      The output of each text: an `Output`, which is a `str` with tokens and rounds.

    Raises:
      InputError: an argument is invalid, or memory does not suffice.
    """
    (decoder, tree), found = _decoder(self, Pair.generate, texts, locals()), []
    for at in range(0, len(texts), batch_size):
      batch = [*texts[at : at + batch_size]]
      rows = batch + batch[:1] * (batch_size - len(batch))  # the last batch has the others' shape
      keys = row_keys(seed, at, batch_size)
      result = decoder.run(self.params, self.prompt(rows), keys, max_new_tokens=max_new_tokens)
      result = require_finite(jax.device_get(result))
      found += [_output(self, result, row, tree) for row in range(len(batch))]
    return found

  @_explains_unknown_arguments
  def stream(
    self,
    text: str,
    *,
    gamma: int | Literal["auto"] = 5,
    tree: Sequence[int] | Literal["auto"] | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    max_new_tokens: int = 128,
    seed: int = 0,
    lenience: float = 1.0,
  ) -> Iterator[str]:
    """Decode one text and yield its output in pieces, at most one piece per round.

    The pieces together are the output of `generate` for the same arguments. Each round is a
    separate program, and the host waits for it to end.
    """
    decoder, _ = _decoder(self, Pair.stream, [text], locals())
    state = _init(decoder, self.params, self.prompt([text]), row_keys(seed, 0, 1), max_new_tokens)
    said = ""
    while not state.done[0]:
      state = _round(decoder, self.params, state)
      result = require_finite(jax.device_get(decoder.result(state)))
      whole = self.vocabulary.decode(np.asarray(result.tokens[0, : result.lengths[0]]))
      piece = whole.removeprefix(said)
      # An incomplete character is held back until it is complete.
      if piece and (state.done[0] or not whole.endswith("\ufffd")):
        yield piece
        said = whole

  @_explains_unknown_arguments
  def beam_search(
    self,
    texts: Sequence[str],
    *,
    beams: int = 4,
    gamma: int = 2,
    draft_beams: int | None = None,
    nodes: int | None = None,
    length_penalty: float = 0.6,
    max_new_tokens: int = 128,
    batch_size: int = 1,
  ) -> list[list[Candidate]]:
    """Find the most probable texts for each source with speculative beam search.

    The results are those of t5x's `decoding.beam_search` with the same target.

    Args:
      texts: sources, as in `generate`.
      beams: number of live sequences, and of results per source.
      gamma: number of steps that the draft searches ahead in each round; 0 is plain beam search.
      draft_beams: number of beams of the draft; defaults to `beams`.
      nodes: maximum number of nodes per target forward pass; see `pairs.LoadedPair.beam_searcher`.
      length_penalty: exponent of the length penalty, as in `beam_search.BeamSearcher`.
      max_new_tokens: limit for each text, EOS included.
      batch_size: number of sources that are searched together.

    Returns:
      The texts of each source in descending order of their scores. There are `beams` texts, or
      fewer if fewer ended. Each text is a `Candidate`, which is a `str` with tokens and a score.

    Raises:
      InputError: see `generate`.
    """
    require_types(Pair.beam_search, locals())
    _require_texts(texts)
    require_count("gamma", gamma, 0)
    self.require_batch_size(batch_size)
    searcher = self.beam_searcher(beams, gamma, draft_beams, length_penalty, nodes)
    candidates: list[list[Candidate]] = []
    for start in range(0, len(texts), batch_size):
      batch = [*texts[start : start + batch_size]]
      rows = batch + batch[:1] * (batch_size - len(batch))
      prompt = self.prompt(rows)
      result = jax.device_get(searcher.run(self.params, prompt, max_new_tokens=max_new_tokens))
      require_finite(result.best())
      for row in zip(result.tokens, result.lengths, result.scores.tolist(), strict=True):
        outputs = zip(*row, strict=True)
        candidates.append([self._candidate(t[:n], score) for t, n, score in outputs if n])
    return candidates[: len(texts)]

  def _candidate(self, tokens: np.ndarray, score: float) -> Candidate:
    return Candidate(self.vocabulary.decode(tokens), tokens, score)


_init = jax.jit(Decoder.init, static_argnames=("self", "max_new_tokens"))
_round = jax.jit(Decoder.round, static_argnames="self")


def _decoder(
  pair: pairs.LoadedPair, of: Callable, texts: Sequence[str], asked: Mapping[str, Any]
) -> tuple[Decoder, AnyTree]:
  """Check the arguments of `generate` or `stream`.

  Returns:
    The decoder for these arguments, and the tree that its draft proposes.
  """
  require_types(of, asked)
  _require_texts(texts, "text" if "text" in asked else None)
  require_seed(asked["seed"])
  require_count("max_new_tokens", asked["max_new_tokens"])
  settings = DecodeSettings(
    Sampling(asked["temperature"], asked["top_k"], asked["top_p"]),
    asked.get("batch_size", 1),
    asked["max_new_tokens"],
    asked["seed"],
    asked["lenience"],
  )
  pair.require_batch_size(settings.batch_size)
  tree = resolve_tree(asked["gamma"], asked["tree"], pair, texts, settings, _LOG.info)
  decoder = pair.decoder(settings.sampling, tree, settings.lenience)
  return decoder, pair.guesses(settings.sampling, tree)


def _require_texts(texts: Sequence[str], name: str | None = None) -> None:
  """Raise InputError unless each text is a string that a vocabulary can encode."""
  for place, text in enumerate(texts):
    require_text(name or f"texts[{place}]", text)


def _output(pair: pairs.LoadedPair, result: DecodeResult, row: int, tree: AnyTree) -> Output:
  parents = () if isinstance(tree, DynamicTree) else tree.parents
  tokens = np.asarray(result.tokens[row, : result.lengths[row]])
  ran = result.rounds.num_emitted[:, row] > 0
  rounds = jax.tree.map(lambda of_all: of_all[ran, row], result.rounds)
  read = functools.partial(read_rounds, result, row, pair.vocabulary.pieces, parents)
  return Output(pair.vocabulary.decode(tokens), tokens, rounds, read)


def _with_compile_cache(load: Callable[P, pairs.LoadedPair]) -> Callable[P, Pair]:
  """Wrap a function that loads a pair, so that it returns a `Pair` and enables the program cache.

  The cache is in the default folder of the command line, unless jax is already configured with a
  folder.
  """

  @functools.wraps(load)
  def loading(*args: P.args, **kwargs: P.kwargs) -> Pair:
    if not getattr(jax.config, "jax_compilation_cache_dir", None):
      enable_compile_cache(default_cache_dir())
    return Pair(*load(*args, **kwargs))

  return loading


load_pair = _with_compile_cache(pairs.load_pair)
random_pair = _with_compile_cache(pairs.random_pair)
