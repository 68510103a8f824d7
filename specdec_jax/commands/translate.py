"""A user's own text through speculative decoding, or texts from nothing: one output line a line."""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
from rich.console import Console

from specdec_jax.counts import num_rounds, num_tokens
from specdec_jax.data.text import read_lines
from specdec_jax.decoding import require_finite
from specdec_jax.errors import require_count, require_seed, require_types
from specdec_jax.measurement.calibrate import resolve_tree
from specdec_jax.pairs import Pair
from specdec_jax.progress import Progress
from specdec_jax.protocols import Decoded
from specdec_jax.sampling import Sampling, row_keys
from specdec_jax.trees import AnyTree
from specdec_jax.writing import require_apart, written


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
) -> None:
  """Translate each line of a file, or with a decoder-only model continue it.

  Args:
    pair: what decodes; see `load_pair`.
    input: a text file, one source a line (gzipped if it ends in .gz), or '-' for standard input;
      None for `num_texts` empty lines, of which a decoder-only model makes texts of its own.
    output: a file, written whole or not at all by this run alone, or '-' for standard output, line
      by line, as to a device or a pipe; not the input.
    sampling: argmax unless told.
    gamma: guesses a round; 'auto' finds the best first, which may be plain decoding, and says why.
    batch_size: lines decoded together.
    max_new_tokens: limit for a line.
    seed: of all sampling.
    prefix: put before each line, such as T5's tasks have.
    num_texts: how many, where there is no input.
    tree: parents of a tree of guesses (`trees.Tree`) instead of a chain of gamma; 'auto' finds the
      best of both first.

  A line past the pair's limit is cut, an output ends at `max_new_tokens`, and a T5 leaves an empty
  line empty; each is said on standard error.
  """
  require_types(translate, locals())
  require_seed(seed)
  require_count("max_new_tokens", max_new_tokens)
  pair.require_batch_size(batch_size)
  if input is not None:
    require_apart(output, input)
  notes = Console(stderr=True, markup=False)
  require_count("num_texts", num_texts)
  lines = [prefix] * num_texts if input is None else read_lines(input, prefix=prefix)
  asked = [line if pair.reads(line) else None for line in lines]
  numbers = (number for number, line in enumerate(asked, 1) if line is not None)
  settings = sampling, batch_size, max_new_tokens, seed
  to_file = output != "-"
  with written(output, alone=True) if to_file else contextlib.nullcontext(sys.stdout) as sink:
    _warn(notes, pair, lines)
    guesses = resolve_tree(gamma, tree, pair, asked, *settings, say=notes.print)
    since, outputs = time.perf_counter(), []
    with Progress(disable=not to_file and sys.stdout.isatty()) as bar:
      task = bar.add_task("decoding", total=len(lines))
      batches = decode_lines(pair, asked, sampling, guesses, batch_size, max_new_tokens, seed)
      for texts, decoded in batches:
        outputs += decoded
        sink.write("".join(text.replace("\n", " ") + "\n" for text in texts))
        sink.flush()
        bar.advance(task, len(texts))
        # Rows come first: zip takes from its first argument once more than from its second.
        for tokens, number in zip((row for d in decoded for row in d.tokens), numbers):
          if pair.vocabulary.eos_id not in tokens:
            notes.print(
              f"warning: line {number} was not finished; its output stops at the limit of "
              f"{max_new_tokens} tokens."
            )
  if outputs:
    seconds = time.perf_counter() - since
    notes.print(
      f"{len(lines)} lines, {num_tokens(outputs)} tokens in {seconds:.1f} s with compilation, "
      f"{num_tokens(outputs) / num_rounds(outputs):.2f} tokens per target pass."
    )


def decode_lines(
  pair: Pair,
  lines: Sequence[str | None],
  sampling: Sampling,
  tree: AnyTree | int,
  batch_size: int,
  max_new_tokens: int,
  seed: int = 0,
  lenience: float = 1.0,
) -> Iterator[tuple[list[str], list[Decoded]]]:
  """Outputs for lines, batch by batch, and what was decoded; plainly if there are no guesses.

  `tree` is as in `Pair.decoder`. A line that is None is not decoded, and its output is empty; a
  batch of such lines costs nothing.
  """
  decode = pair.decoder(sampling, tree, lenience)
  for at in range(0, len(lines), batch_size):
    batch = lines[at : at + batch_size]
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
      texts[row] = pair.vocabulary.decode(decoded.tokens[row])
    yield texts, [_rows(decoded, rows)]


def _rows(decoded: Decoded, rows) -> Decoded:
  return decoded._replace(
    tokens=decoded.tokens[rows],
    lengths=decoded.lengths[rows],
    rounds=jax.tree.map(lambda x: x[:, rows], decoded.rounds),
  )


def _warn(notes: Console, pair: Pair, lines: Sequence[str]) -> None:
  for number, line in enumerate(lines, 1):
    if not pair.reads(line):
      notes.print(f"warning: line {number} is empty; its output is left empty.")
    elif (kept := pair.cut(line)) is not None:
      notes.print(
        f"warning: line {number} is longer than {pair.max_source_tokens} tokens; it was cut "
        f"after '...{kept[-40:]}'."
      )
