"""A user's own text through speculative decoding: one output line a line."""

import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from specdec_jax.data.text import read_lines
from specdec_jax.decoding import require_finite
from specdec_jax.errors import InputError, require_count
from specdec_jax.experiments.calibrate import resolve_gamma
from specdec_jax.experiments.speed import num_rounds, num_tokens, row_keys
from specdec_jax.pairs import Pair
from specdec_jax.protocols import Decoded
from specdec_jax.sampling import Sampling


def translate(
  pair: Pair,
  input: str,
  output: str = "-",
  sampling: Sampling = Sampling(temperature=0.0),
  gamma: int | str = 5,
  batch_size: int = 1,
  max_new_tokens: int = 128,
  seed: int = 0,
  prefix: str = "",
) -> None:
  """Translate each line of a file.

  Args:
    pair: what decodes; see `load_pair`.
    input: a text file, one source a line (gzipped if it ends in .gz), or '-' for standard input.
    output: a file, written whole or not at all, or '-' for standard output, line by line.
    sampling: argmax unless told.
    gamma: guesses a round; 'auto' finds the best first, which may be plain decoding, and says why.
    batch_size: lines decoded together.
    max_new_tokens: limit for a line.
    seed: of all sampling.
    prefix: put before each line, such as T5's tasks have.

  An empty line stays empty, a line past the pair's limit is cut, and a translation ends at
  `max_new_tokens`; each is said on standard error.
  """
  require_count("batch_size", batch_size)
  if pathlib.Path(output).is_dir():
    raise InputError(f"output is '{output}', a folder; give the file to write, or '-'.")
  notes = Console(stderr=True, markup=False)
  lines = read_lines(input, prefix=prefix)
  _warn(notes, pair, lines)
  numbers = (number for number, line in enumerate(lines, 1) if line.strip())
  settings = sampling, batch_size, max_new_tokens, seed
  gamma = resolve_gamma(gamma, pair, lines, *settings, say=notes.print)
  since, outputs = time.perf_counter(), []
  with _sink(output) as sink, Progress(console=notes, transient=True) as bar:
    task = bar.add_task("translating", total=len(lines))
    batches = decode_lines(pair, lines, sampling, gamma, batch_size, max_new_tokens, seed)
    for translations, decoded in batches:
      outputs += decoded
      sink.write("".join(text + "\n" for text in translations))
      sink.flush()
      bar.advance(task, len(translations))
      # Rows come first: zip takes from its first argument once more than from its second.
      for tokens, number in zip((row for d in decoded for row in d.tokens), numbers):
        if pair.vocabulary.eos_id not in tokens:
          notes.print(
            f"warning: line {number} was not finished; its translation stops at the limit of "
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
  lines: Sequence[str],
  sampling: Sampling,
  gamma: int,
  batch_size: int,
  max_new_tokens: int,
  seed: int = 0,
  lenience: float = 1.0,
) -> Iterator[tuple[list[str], list[Decoded]]]:
  """Translations of lines, batch by batch, and what was decoded for those that are not empty.

  With gamma 0 by plain decoding.
  """
  decode = pair.decoder(sampling, gamma, lenience)
  for at in range(0, len(lines), batch_size):
    batch = list(lines[at : at + batch_size])
    if not any(line.strip() for line in batch):
      yield [""] * len(batch), []
      continue
    batch += [batch[0]] * (batch_size - len(batch))  # the last batch has the others' shape
    asked = pair.prompt(batch), row_keys(seed, at, batch_size)
    decoded = require_finite(jax.device_get(decode(*asked, max_new_tokens=max_new_tokens)))
    count = min(batch_size, len(lines) - at)
    rows = np.flatnonzero([bool(line.strip()) for line in batch[:count]])
    texts = [
      pair.vocabulary.decode(tokens) if line.strip() else ""
      for line, tokens in zip(batch[:count], decoded.tokens)
    ]
    yield texts, [_rows(decoded, rows)]


def _rows(decoded: Decoded, rows) -> Decoded:
  return decoded._replace(
    tokens=decoded.tokens[rows],
    lengths=decoded.lengths[rows],
    rounds=jax.tree.map(lambda x: x[:, rows], decoded.rounds),
  )


def _warn(notes: Console, pair: Pair, lines: Sequence[str]) -> None:
  for number, line in enumerate(lines, 1):
    if not line.strip():
      notes.print(f"warning: line {number} is empty; its translation is left empty.")
    elif (kept := pair.cut(line)) is not None:
      notes.print(
        f"warning: line {number} is longer than {pair.max_source_tokens} tokens; it was cut "
        f"after '...{kept[-40:]}'."
      )


@contextlib.contextmanager
def _sink(output: str):
  """Standard output, or a file that appears only when all of it is written."""
  if output == "-":
    yield sys.stdout
    return
  part = pathlib.Path(f"{output}.part")
  try:
    with open(part, "w", encoding="utf-8") as f:
      yield f
    os.replace(part, output)
  finally:
    part.unlink(missing_ok=True)
