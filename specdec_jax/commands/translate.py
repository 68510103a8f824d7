"""A user's own text through speculative decoding, one output line per input line; or
unconditional generation.
"""

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
from specdec_jax.core.decode import require_finite
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import DecodeResult, Params
from specdec_jax.counts import num_rounds, num_tokens
from specdec_jax.data.text import read_lines, read_stdin_lines
from specdec_jax.errors import (
  InputError,
  require_count,
  require_seed,
  require_text,
  require_types,
)
from specdec_jax.measurement.calibrate import resolve_tree
from specdec_jax.pairs import Pair
from specdec_jax.progress import Progress

# Share of a line's letters in single-letter pieces above which a warning is printed. With the
# captions' vocabulary it is at most 0.22 for captions, 0.13 for news in the median, 0.4 for one
# line of news in 1,000, and 1 for another script.
MAX_SINGLE_LETTER_SHARE = 0.4


def translate(
  pair: Pair,
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
  """Translate each line of a file, or with a decoder-only model continue it.

  Args:
    pair: what decodes; see `load_pair`.
    input: a text file, one source a line (gzipped if it ends in .gz), or '-' for standard input,
      whose lines are answered as they come (with 'auto' when all are there); None for `num_texts`
      empty lines, of which a decoder-only model makes texts of its own.
    output: a file, written whole or not at all by this run alone, or '-' for standard output, line
      by line, as to a device or a pipe; not the input.
    sampling: argmax unless told.
    gamma: guesses a round, 0 for plain decoding; 'auto' finds the best first, and says why.
    batch_size: lines decoded together; one at a terminal.
    max_new_tokens: limit for a line.
    seed: of all sampling.
    prefix: put before each line, such as T5's tasks have.
    num_texts: how many, where there is no input.
    tree: parents of a tree of guesses (`trees.Tree`) instead of a chain of gamma; 'auto' finds the
      best of both first.
    beams: search for the likeliest text with so many beams, by t5x's rules (`beams.beam_search`);
      gamma is then how many steps the draft guesses.
    draft_beams: of the draft; as many unless told.
    nodes: that a pass of that search reads at most, as of `pairs.Pair.beam_searcher`.
    length_penalty: of that search.

  Raises:
    InputError: beams go with a sampling above temperature 0, a tree, or 'auto'.

  A line past the pair's limit is cut, an output ends at `max_new_tokens`, and a T5 leaves an empty
  line empty; each is said on standard error.
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
  decode = None
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
  batch_size = 1 if at_terminal else batch_size  # each line is answered
  known = [prefix] * num_texts if input is None else None
  if input not in (None, "-"):
    known = read_lines(input, prefix=prefix)
  lines: Iterator[str] = iter(read_stdin_lines(prefix) if known is None else known)
  settings = sampling, batch_size, max_new_tokens, seed
  to_file, asked = output != "-", _Asked(pair, notes)
  with (
    atomic_write(output, exclusive=True) if to_file else contextlib.nullcontext(sys.stdout) as sink
  ):
    if at_terminal:
      notes.print("A line, then Enter; Ctrl-D ends it.")
    first: list[str] = []
    if "auto" in (gamma, tree):  # which looks at the texts before it decodes any
      first = [*itertools.islice(lines, batch_size if at_terminal else None)]
    texts_of_auto = [line for line in first if pair.reads(line)]
    guesses = resolve_tree(gamma, tree, pair, texts_of_auto, *settings, say=notes.print)
    since, counted = time.perf_counter(), np.zeros(3, int)  # lines, tokens, rounds
    with Progress(disable=at_terminal or not to_file and sys.stdout.isatty()) as bar:
      task = bar.add_task("decoding", total=None if known is None else len(known))
      rows = asked.rows(itertools.chain(first, lines))
      how = batch_size, max_new_tokens, seed
      batches = decode_lines(pair, rows, sampling, guesses, *how, decode=decode)
      for texts, decoded in batches:
        counted += len(texts), num_tokens(decoded), num_rounds(decoded)
        sink.write("".join(text.replace("\n", " ") + "\n" for text in texts))
        sink.flush()
        bar.advance(task, len(texts))
        asked.warn_unfinished(decoded, max_new_tokens)
  num_lines, tokens, rounds = counted.tolist()
  if rounds:
    seconds = time.perf_counter() - since
    notes.print(
      f"{num_lines} lines, {tokens} tokens in {seconds:.1f} s with compilation, "
      f"{tokens / rounds:.2f} tokens per target pass."
    )


def _best_of_beams(searcher: BeamSearcher, params: Params) -> Callable[..., DecodeResult]:
  """Return a function that decodes the best text of a beam search, as `Pair.decode_fn` does."""

  def decode(prompt, rng, *, max_new_tokens: int) -> DecodeResult:
    result = searcher.run(params, prompt, max_new_tokens=max_new_tokens)
    return jax.device_get(result).best()

  return decode


def decode_lines(
  pair: Pair,
  lines: Iterable[str | None],
  sampling: Sampling,
  tree: AnyTree | int,
  batch_size: int,
  max_new_tokens: int,
  seed: int = 0,
  lenience: float = 1.0,
  decode: Callable[..., DecodeResult] | None = None,
) -> Iterator[tuple[list[str], list[DecodeResult]]]:
  """Outputs for lines, batch by batch, and what was decoded; plainly if there are no guesses.

  A batch is decoded as soon as its lines are there. `tree` is as in `Pair.decoder`, in whose place
  `decode` may stand. A line that is None is not decoded, and its output is empty; a batch of such
  lines costs nothing.
  """
  decode, lines = decode or pair.decode_fn(sampling, tree, lenience), iter(lines)
  for at in itertools.count(0, batch_size):
    batch = [*itertools.islice(lines, batch_size)]
    if not batch:
      return
    rows = [row for row, line in enumerate(batch) if line is not None]
    texts = [""] * len(batch)
    if not rows:
      yield texts, []
      continue
    sources = [line or "" for line in batch]
    sources += sources[:1] * (batch_size - len(batch))  # the last batch has the others' shape
    prompt, keys = pair.prompt(sources), row_keys(seed, at, batch_size)
    decoded = require_finite(jax.device_get(decode(prompt, keys, max_new_tokens=max_new_tokens)))
    for row in rows:
      texts[row] = pair.vocabulary.decode(np.asarray(decoded.tokens[row]))
    yield texts, [_rows(decoded, rows)]


def _rows(decoded: DecodeResult, rows) -> DecodeResult:
  return decoded._replace(
    tokens=decoded.tokens[rows],
    lengths=decoded.lengths[rows],
    rounds=jax.tree.map(lambda x: x[:, rows], decoded.rounds),
  )


class _Asked:
  """Lines on their way to be decoded, and what there is to say of each."""

  def __init__(self, pair: Pair, notes: Console):
    self._pair, self._notes = pair, notes
    self._numbers: list[int] = []  # of those that are being decoded
    self._warned_of_letters = False

  def rows(self, lines: Iterable[str]) -> Iterator[str | None]:
    """Each line, or None if there is nothing in it to decode."""
    pair, say = self._pair, self._notes.print
    for number, line in enumerate(lines, 1):
      if not pair.reads(line):
        say(f"warning: line {number} is empty; its output is left empty.")
        yield None
        continue
      self._numbers.append(number)
      if (kept := pair.cut(line)) is not None:
        say(
          f"warning: line {number} is longer than {pair.max_source_tokens} tokens; it was cut "
          f"after '...{kept[-40:]}'."
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
    """Say which of the lines that were decoded now have no end."""
    for tokens, number in zip((row for d in decoded for row in d.tokens), self._numbers):
      if self._pair.vocabulary.eos_id not in np.asarray(tokens):
        self._notes.print(
          f"warning: line {number} was not finished; its output stops at the limit of "
          f"{max_new_tokens} tokens."
        )
    self._numbers.clear()
