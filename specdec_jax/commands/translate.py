"""Speculative decoding of a user's text, one output line per input line, or of empty prompts."""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import jax
import numpy as np
from rich.console import Console

from specdec_jax.atomic_files import atomic_write, require_distinct_files
from specdec_jax.beam_search import BeamSearcher
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import DecodeResult, Params
from specdec_jax.counts import num_rounds, num_tokens, require_finite
from specdec_jax.data.text import read_lines, read_stdin_lines
from specdec_jax.errors import (
  InputError,
  require_count,
  require_seed,
  require_text,
  require_types,
)
from specdec_jax.loading import DecodeSettings
from specdec_jax.measurement.calibrate import resolve_tree
from specdec_jax.pairs import LoadedPair
from specdec_jax.progress import Progress

# Share of a line's letters in single-letter pieces above which a warning is printed. With the
# captions' vocabulary it is at most 0.22 for captions, 0.13 for news in the median, 0.4 for one
# line of news in 1,000, and 1 for another script.
MAX_SINGLE_LETTER_SHARE = 0.4


def translate(
  pair: LoadedPair,
  input: str | None,
  output: str = "-",
  sampling: Sampling = Sampling(temperature=0.0),
  gamma: int | Literal["auto"] = 5,
  batch_size: int = 1,
  max_new_tokens: int = 128,
  seed: int = 0,
  prefix: str = "",
  num_texts: int = 1,
  tree: Sequence[int] | Literal["auto"] | None = None,
  beams: int | None = None,
  draft_beams: int | None = None,
  nodes: int | None = None,
  length_penalty: float = 0.6,
) -> None:
  """Translate each line of a file, or continue it with a decoder-only model.

  A line that is longer than the pair's limit is cut, an output ends at `max_new_tokens`, and the
  output of an empty line is empty unless the target is decoder-only. Each of these prints a warning
  on standard error.

  Args:
    pair: target and draft; see `load_pair`.
    input: path of a text file with one source per line (gzipped if it ends in .gz); '-' for
      standard input, whose lines are decoded as they arrive (with 'auto', after the last one); None
      for `num_texts` empty prompts of a decoder-only model.
    output: path of a file, written completely or not at all, and by one run at a time; '-' for
      standard output, written line by line. It must not be the input.
    sampling: sampling method; argmax by default.
    gamma: draft tokens per round; 0 for autoregressive decoding; 'auto' chooses the fastest and
      prints why.
    batch_size: lines decoded together; 1 at a terminal.
    max_new_tokens: limit for each output.
    seed: random seed of all sampling.
    prefix: put before each line, such as those of T5's tasks.
    num_texts: number of texts if there is no input.
    tree: parents of a tree of draft tokens (`trees.Tree`), instead of a chain of gamma; 'auto'
      chooses the fastest tree or chain.
    beams: beam size, for a beam search by the rules of t5x (`beam_search`); gamma is then the
      number of steps that the draft searches ahead.
    draft_beams: beam size of the draft; defaults to `beams`.
    nodes: maximal number of nodes per target forward pass of a beam search; see
      `pairs.LoadedPair.beam_searcher`.
    length_penalty: exponent of the length penalty of beam search.

  Raises:
    InputError: an argument is out of range, or beams are combined with a temperature above 0, a
      tree or 'auto'.
  """
  require_types(translate, locals())
  for name, path in (("input", input or ""), ("output", output)):
    require_text(name, path, errors="surrogateescape")
  require_text("prefix", prefix)
  require_seed(seed)
  require_count("max_new_tokens", max_new_tokens)
  pair.require_batch_size(batch_size)
  if input is not None:
    require_distinct_files(output, input)
  decode: Callable[..., DecodeResult] | None = None
  if beams is not None:
    if sampling.temperature or tree is not None or gamma == "auto":
      raise InputError(
        "A beam search samples nothing, and its draft guesses gamma steps; with beams leave the "
        "temperature at 0 and the tree unset, and give gamma as a number."
      )
    searcher = pair.beam_searcher(beams, gamma, draft_beams, length_penalty, nodes)
    decode = _best_of_beams(searcher, pair.params)
  notes = Console(stderr=True, markup=False)
  require_count("num_texts", num_texts)
  at_terminal = input == "-" and sys.stdin is not None and sys.stdin.isatty()
  batch_size = 1 if at_terminal else batch_size  # so that each line is decoded at once
  known = [prefix] * num_texts if input is None else None
  if input not in (None, "-"):
    known = read_lines(input, prefix=prefix)
  lines: Iterator[str] = iter(read_stdin_lines(prefix) if known is None else known)
  settings = DecodeSettings(sampling, batch_size, max_new_tokens, seed)
  to_file, warnings = output != "-", _LineWarnings(pair, notes)
  with (
    atomic_write(output, exclusive=True) if to_file else contextlib.nullcontext(sys.stdout) as sink
  ):
    if at_terminal:
      notes.print("A line, then Enter; Ctrl-D ends it.")
    first: list[str] = []
    if "auto" in (gamma, tree):  # the calibration needs texts before any is decoded
      first = [*itertools.islice(lines, batch_size if at_terminal else None)]
    calibration_texts = [line for line in first if pair.can_decode(line)]
    shape = resolve_tree(gamma, tree, pair, calibration_texts, settings, say=notes.print)
    since, counted = time.perf_counter(), np.zeros(3, int)  # lines, tokens, rounds
    with Progress(disable=at_terminal or not to_file and sys.stdout.isatty()) as bar:
      task = bar.add_task("decoding", total=None if known is None else len(known))
      rows = warnings.checked(itertools.chain(first, lines))
      batches = decode_lines(pair, rows, shape, settings, decode)
      for texts, decoded in batches:
        counted += len(texts), num_tokens(decoded), num_rounds(decoded)
        sink.write("".join(text.replace("\n", " ") + "\n" for text in texts))
        sink.flush()
        bar.advance(task, len(texts))
        warnings.warn_unfinished(decoded, max_new_tokens)
  num_lines, tokens, rounds = counted.tolist()
  if rounds:
    seconds = time.perf_counter() - since
    notes.print(
      f"{num_lines} lines, {tokens} tokens in {seconds:.1f} s with compilation, "
      f"{tokens / rounds:.2f} tokens per target pass."
    )


def _best_of_beams(searcher: BeamSearcher, params: Params) -> Callable[..., DecodeResult]:
  """Return a function that decodes the best text of a beam search, as `decode_fn` does."""

  def decode(prompt, rng, *, max_new_tokens: int) -> DecodeResult:
    result = searcher.run(params, prompt, max_new_tokens=max_new_tokens)
    return jax.device_get(result).best()

  return decode


def decode_lines(
  pair: LoadedPair,
  lines: Iterable[str | None],
  tree: AnyTree,
  settings: DecodeSettings,
  decode: Callable[..., DecodeResult] | None = None,
) -> Iterator[tuple[list[str], list[DecodeResult]]]:
  """Decode lines batch by batch, each batch as soon as its lines have arrived.

  Args:
    pair: target and draft.
    lines: sources. A line that is None is not decoded and its output is empty; a batch of such
      lines costs nothing.
    tree: tree of draft tokens; `chain(0)` for autoregressive decoding.
    settings: settings of decoding.
    decode: function of (prompt, keys, *, max_new_tokens) to use instead of `pair.decode_fn`.

  Yields:
    The output of each line of the batch, and a list with the result of the decoded rows, which is
    empty if there are none.
  """
  decode = decode or pair.decode_fn(settings.sampling, tree, settings.lenience)
  lines, batch_size = iter(lines), settings.batch_size
  for first in itertools.count(0, batch_size):
    batch = [*itertools.islice(lines, batch_size)]
    if not batch:
      return
    rows = [row for row, line in enumerate(batch) if line is not None]
    texts = [""] * len(batch)
    if not rows:
      yield texts, []
      continue
    sources = [line or "" for line in batch]
    sources += sources[:1] * (batch_size - len(batch))  # the last batch has the shape of the others
    prompt, keys = pair.prompt(sources), row_keys(settings.seed, first, batch_size)
    result = decode(prompt, keys, max_new_tokens=settings.max_new_tokens)
    decoded = require_finite(jax.device_get(result))
    for row in rows:
      texts[row] = pair.vocabulary.decode(np.asarray(decoded.tokens[row]))
    yield texts, [_rows(decoded, rows)]


def _rows(decoded: DecodeResult, rows: Sequence[int]) -> DecodeResult:
  """Return some rows of a result."""
  return decoded._replace(
    tokens=decoded.tokens[rows],
    lengths=decoded.lengths[rows],
    rounds=jax.tree.map(lambda x: x[:, rows], decoded.rounds),
  )


class _LineWarnings:
  """Warnings about input lines and their outputs."""

  def __init__(self, pair: LoadedPair, notes: Console):
    self._pair, self._notes = pair, notes
    self._numbers: list[int] = []  # numbers of the lines that are being decoded
    self._warned_of_letters = False

  def checked(self, lines: Iterable[str]) -> Iterator[str | None]:
    """Yield each line, or None for a line that cannot be decoded, after warnings about it."""
    pair, say = self._pair, self._notes.print
    for number, line in enumerate(lines, 1):
      if not pair.can_decode(line):
        say(f"warning: line {number} is empty; its output is left empty.")
        yield None
        continue
      self._numbers.append(number)
      if (cut := pair.cut(line)) is not None:
        say(
          f"warning: line {number} is longer than {pair.max_source_tokens} tokens; it was cut "
          f"after '...{cut[-40:]}'."
        )
      share = 0.0 if self._warned_of_letters else pair.vocabulary.single_letter_share(line)
      if share > MAX_SINGLE_LETTER_SHARE:
        self._warned_of_letters = True
        say(
          f"warning: line {number} is unlike the training data of this pair: in its vocabulary, "
          f"{share:.0%} of the letters are single-letter pieces or unknown. The output may be poor "
          "and slow. This warning is printed once."
        )
      yield line

  def warn_unfinished(self, decoded: Sequence[DecodeResult], max_new_tokens: int) -> None:
    """Warn of the lines of the last batch whose output does not end with EOS."""
    for tokens, number in zip((row for d in decoded for row in d.tokens), self._numbers):
      if self._pair.vocabulary.eos_id not in np.asarray(tokens):
        self._notes.print(
          f"warning: line {number} was not finished; its output stops at the limit of "
          f"{max_new_tokens} tokens."
        )
    self._numbers.clear()
