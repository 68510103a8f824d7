"""Speculative decoding of each line of a text, or of copies of one prompt."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Literal

import jax
import numpy as np
from rich.console import Console

from specdec_jax import batching
from specdec_jax.atomic_files import atomic_write, require_distinct_files
from specdec_jax.beams import BeamSearcher
from specdec_jax.commands.journal import open_journal
from specdec_jax.core.counts import num_rounds, num_tokens, require_finite
from specdec_jax.core.decode import Decoder
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.processors import Processors
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import DecodeResult, Params
from specdec_jax.data.text import read_sources, read_stdin_lines
from specdec_jax.errors import (
  InputError,
  require_count,
  require_seed,
)
from specdec_jax.measure.calibrate import resolve_tree
from specdec_jax.measure.progress import Progress
from specdec_jax.pairs import LoadedPair

# A warning is printed if more than this share of a line's letters are in single-letter pieces. With
# the captions' vocabulary the share is at most 0.22 for captions, 0.13 for news in the median, 0.4
# for one line of news in 1,000, and 1 for a text in a different script.
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
  generation: GenerationConfig | None = None,
) -> None:
  """Translate each line of a file; with a decoder-only model, continue each line.

  A line that is longer than the pair's limit is truncated. An output without EOS stops at
  `max_new_tokens`. The output of an empty line is empty, unless the target is decoder-only. In each
  of these cases a warning is printed on standard error. Several lines with the same warning are
  summarized at the end.

  If a run that writes a file is interrupted, the same command resumes it, unless the input is
  standard input.

  Args:
    pair: target and draft; see `load_pair`.
    input: path of a text file with one source per line, or of a .jsonl file; '-' for standard
      input; None to decode `num_texts` copies of `prefix`, which may be empty for a decoder-only
      model. A .jsonl file has one JSON object per line, whose field 'source' or 'text' is the
      source. A file whose name ends in .gz is decompressed. Lines of standard input are decoded as
      they arrive (with 'auto', after the last one, unless they are typed at a terminal).
    output: path of a file, which must not be the input; '-' for standard output. A file is written
      completely or not at all, and by one run at a time. A .jsonl file has the fields of
      `output_records` for each source.
    sampling: sampling method; argmax by default.
    gamma: draft tokens per round; 0 for autoregressive decoding; 'auto' chooses the fastest and
      prints why.
    batch_size: number of lines that are decoded together; always 1 if input is from a terminal.
    max_new_tokens: limit for each output.
    seed: random seed of all sampling.
    prefix: text prepended to each line that is not blank, such as the prefix of a T5 task. If
      `input` is None, it is the prompt.
    num_texts: number of outputs if `input` is None.
    tree: parents of a tree of draft tokens (`trees.Tree`), instead of a chain of gamma; 'auto'
      chooses the fastest tree or chain.
    beams: number of beams of a beam search by the rules of t5x (`beam_search`); None for no beam
      search. In a beam search, gamma is the number of steps that the draft searches ahead.
    draft_beams: number of beams of the draft; defaults to `beams`.
    nodes: maximum number of nodes per target forward pass of a beam search; see
      `pairs.LoadedPair.beam_searcher`.
    length_penalty: exponent of the length penalty of a beam search.
    generation: settings of logits processors, such as `forced_bos_token_id` for the language of
      outputs.

  Raises:
    InputError: an argument is out of range, `generation` has settings other than those of logits
      processors, or beams are combined with a temperature above 0, a tree, 'auto' or `generation`.
  """
  require_seed(seed)
  require_count("max_new_tokens", max_new_tokens)
  pair.require_batch_size(batch_size)
  if input is not None:
    require_distinct_files(output, input)
  decode: Callable[..., DecodeResult] | None = None
  processors = pair.processors(generation or GenerationConfig())
  if beams is not None:
    if sampling.temperature or tree is not None or gamma == "auto" or processors:
      raise InputError(
        "A beam search samples nothing, and its draft guesses gamma steps; with beams leave the "
        "temperature at 0, the tree and generation unset, and give gamma as a number. Pair.generate"
        " has a beam search with logits processors."
      )
    searcher = pair.beam_searcher(beams, gamma, draft_beams, length_penalty, nodes)
    decode = _best_of_beams(searcher, pair.params)
  notes = Console(stderr=True, markup=False)
  require_count("num_texts", num_texts)
  at_terminal = input == "-" and sys.stdin is not None and sys.stdin.isatty()
  batch_size = 1 if at_terminal else batch_size  # so that each line is decoded at once
  known = [prefix] * num_texts if input is None else None
  if input not in (None, "-"):
    known = read_sources(input, prefix)
  lines: Iterator[str] = iter(read_stdin_lines(prefix) if known is None else known)
  settings = DecodeSettings(sampling, batch_size, max_new_tokens, seed)
  to_file, warnings = output != "-", _LineWarnings(pair, notes, max_new_tokens)
  write = _write_json if output.endswith(".jsonl") else _write_text
  with atomic_write(output) if to_file else contextlib.nullcontext(sys.stdout) as sink:
    if at_terminal:
      notes.print("A line, then Enter; Ctrl-D ends it.")
    first: list[str] = []
    if "auto" in (gamma, tree):  # the calibration needs texts before any is decoded
      first = [*itertools.islice(lines, batch_size if at_terminal else None)]
    calibration_texts = [line for line in first if pair.can_decode(line)]
    shape = resolve_tree(gamma, tree, pair, calibration_texts, settings, say=notes.print)
    description = dict(
      models=[pair.target_path, pair.target_name, pair.draft_path, pair.draft_name],
      arithmetic=[pair.dtype, pair.kernels, pair.max_source_tokens],
      settings=dataclasses.asdict(settings),
      gamma=gamma,
      tree=tree if tree in (None, "auto") else [*tree],
      beams=[beams, draft_beams, nodes, length_penalty],
      generation=repr(generation),
      inputs=hashlib.sha256("\n".join(known or []).encode()).hexdigest(),
    )
    # A device or a pipe is written to directly, so its lines cannot be written again.
    can_resume = to_file and known is not None and os.path.isfile(output) == os.path.exists(output)
    since, counted = time.perf_counter(), np.zeros(3, int)  # lines, tokens, rounds
    with (
      open_journal(output, description) if can_resume else contextlib.nullcontext() as journal,
      Progress(disable=at_terminal or not to_file and sys.stdout.isatty()) as bar,
    ):
      num_done = 0
      if journal and journal.records:
        num_done = len(journal.records)
        notes.print(f"resuming an interrupted run after line {num_done}.")
        write(sink, journal.records)
      total = None if known is None else len(known)
      task = bar.add_task("decoding", total=total, completed=num_done)
      remaining = itertools.islice(itertools.chain(first, lines), num_done, None)
      sources, rows = itertools.tee(remaining)
      checked: Iterable[str | None] = warnings.checked(rows, num_done)
      checked = checked if known is None else [*checked]
      index = num_done
      outputs = decode_lines(pair, checked, shape, settings, decode, num_done, processors)
      for texts, decoded in outputs:
        counted += len(texts), num_tokens(decoded), num_rounds(decoded)
        batch = [*itertools.islice(sources, len(texts))]
        records = [*output_records(pair, index, batch, texts, decoded)]
        index += len(texts)
        write(sink, records)
        if journal:
          journal.append(records)
        bar.advance(task, len(texts))
        warnings.check_finished(decoded)
  warnings.summarize()
  num_lines, tokens, rounds = counted.tolist()
  if rounds:
    seconds = time.perf_counter() - since
    notes.print(
      f"{num_lines} lines, {tokens} tokens in {seconds:.1f} s with compilation, "
      f"{tokens / rounds:.2f} tokens per target pass."
    )


def _write_text(sink: IO[str], records: Sequence[dict]) -> None:
  """Write the output of each record as a line; newlines in the output become spaces."""
  sink.write("".join(record["output"].replace("\n", " ") + "\n" for record in records))
  sink.flush()


def _write_json(sink: IO[str], records: Sequence[dict]) -> None:
  """Write each record as a JSON object on its own line."""
  sink.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
  sink.flush()


def output_records(
  pair: LoadedPair,
  first: int,
  sources: Sequence[str],
  outputs: Sequence[str],
  decoded: Sequence[DecodeResult],
) -> Iterator[dict]:
  """Yield the record of each text of a batch, as in the files of `decode` and `translate`.

  A record has the fields `index`, `source`, `output`, `tokens` (ids, EOS included), `rounds`,
  `guesses` (verified draft tokens) and `accepted` (accepted draft tokens).

  Args:
    pair: target and draft.
    first: index of the first text of the batch.
    sources: texts of the batch.
    outputs: output of each text.
    decoded: results of decoding, without rows for texts that were not decoded.
  """
  rows = (
    (result, row, *counts)
    for result in decoded
    for row, counts in enumerate(zip(*result.rounds.acceptance_counts()))
  )
  for index, (source, output) in enumerate(zip(sources, outputs), first):
    record = dict(index=index, source=source, output=output)
    if not pair.can_decode(source):
      yield dict(record, tokens=[], rounds=0, guesses=0, accepted=0)
      continue
    result, row, accepted, rejected = next(rows)
    yield dict(
      record,
      tokens=result.tokens[row, : result.lengths[row]].tolist(),
      rounds=int((result.rounds.num_emitted[:, row] > 0).sum()),
      guesses=int(accepted + rejected),
      accepted=int(accepted),
    )


def count_records(records: Iterable[dict]) -> dict[str, int]:
  """Return the numbers of texts, tokens, rounds, guesses and accepted draft tokens of records."""
  counts = dict(texts=0, tokens=0, rounds=0, guesses=0, accepted=0)
  for record in records:
    counts["texts"] += 1
    counts["tokens"] += len(record["tokens"])
    for name in ("rounds", "guesses", "accepted"):
      counts[name] += record[name]
  return counts


def _best_of_beams(searcher: BeamSearcher, params: Params) -> Callable[..., DecodeResult]:
  """Return a function that runs a beam search and returns its best text as a `DecodeResult`."""

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
  start: int = 0,
  processors: Processors = (),
) -> Iterator[tuple[list[str], list[DecodeResult]]]:
  """Decode lines, with `batch_size` rows.

  If the lines are a sequence, the next line takes the row of a line that has ended. Otherwise they
  are decoded in batches, each of them as soon as its lines have arrived.

  Args:
    pair: target and draft.
    lines: sources. A line that is None is not decoded, and its output is empty. A batch of such
      lines takes no time.
    tree: tree of draft tokens; `chain(0)` for autoregressive decoding.
    settings: settings of decoding.
    decode: function of (prompt, keys, *, max_new_tokens) that decodes a batch, to use instead of
      `pair.decoder`.
    start: index of the first line. It determines the random keys.
    processors: logits processors.

  Yields:
    For each group of lines, in the order of the lines, the output of each line, and results with
    the decoded rows. There are none if no row was decoded.
  """
  batch_size = settings.batch_size
  if decode is None:
    decoder = pair.decoder(settings.sampling, tree, settings.lenience, processors=processors)
    if isinstance(lines, Sequence) and 1 < batch_size < len(lines) - [*lines].count(None):
      yield from _decode_in_slots(pair, lines, decoder, settings, start)
      return
    decode = functools.partial(decoder.run, pair.params)
  lines = iter(lines)
  for first in itertools.count(start, batch_size):
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


def _decode_in_slots(
  pair: LoadedPair,
  lines: Sequence[str | None],
  decoder: Decoder,
  settings: DecodeSettings,
  start: int,
) -> Iterator[tuple[list[str], list[DecodeResult]]]:
  """Decode lines by continuous batching; see `decode_lines`."""
  index = [i for i, line in enumerate(lines) if line is not None]
  lengths = [len(pair.encode(lines[i] or "")) for i in index]
  width = -(-max(lengths) // 8) * 8
  found = batching.decode_texts(
    decoder,
    pair.params,
    batching.Texts(
      lambda rows: pair.prompt([lines[index[row]] or "" for row in rows], width),
      lengths,
      row_keys(settings.seed, start, len(lines))[np.array(index)],
      np.full(len(index), settings.max_new_tokens),
    ),
    num_slots=settings.batch_size,
    max_new_tokens=settings.max_new_tokens,
    has_encoder=not pair.continues,
  )
  ended: dict[int, DecodeResult] = {}
  first = 0  # of the lines whose outputs were not yielded yet
  for text, result, row in found:
    ended[index[text]] = batching.one_row(result, row)
    last = first
    while last < len(lines) and (last in ended or lines[last] is None):
      last += 1
    if last > first:
      decoded = [ended.pop(i) for i in range(first, last) if i in ended]
      texts = iter(pair.vocabulary.decode(np.asarray(each.tokens[0])) for each in decoded)
      yield ["" if line is None else next(texts) for line in lines[first:last]], decoded
      first = last


def _rows(decoded: DecodeResult, rows: Sequence[int]) -> DecodeResult:
  """Return the rows of a result that have the indices `rows`."""
  return decoded._replace(
    tokens=decoded.tokens[rows],
    lengths=decoded.lengths[rows],
    rounds=jax.tree.map(lambda x: x[:, rows], decoded.rounds),
  )


class _LineWarnings:
  """Warnings about input lines and their outputs.

  The first warning of each kind is printed at once. `summarize` prints the line numbers of the
  other warnings.
  """

  def __init__(self, pair: LoadedPair, notes: Console, max_new_tokens: int):
    self._pair, self._notes, self._max_new_tokens = pair, notes, max_new_tokens
    self._numbers = collections.deque[int]()  # numbers of the lines that are not decoded yet
    self._lines: dict[str, list[int]] = {}  # lines of each kind of warning
    self._warned_of_letters = False

  def checked(self, lines: Iterable[str], start: int = 0) -> Iterator[str | None]:
    """Yield each line, or None if it cannot be decoded, and print warnings about the line."""
    pair = self._pair
    for number, line in enumerate(lines, start + 1):
      if not pair.can_decode(line):
        self._warn(number, "is empty", "; its output is left empty")
        yield None
        continue
      self._numbers.append(number)
      if (cut := pair.cut(line)) is not None:
        kind = f"is longer than {pair.max_source_tokens} tokens"
        self._warn(number, kind, f"; it was cut after '...{cut[-40:]}'")
      share = 0.0 if self._warned_of_letters else pair.vocabulary.single_letter_share(line)
      if share > MAX_SINGLE_LETTER_SHARE:
        self._warned_of_letters = True
        self._notes.print(
          f"warning: line {number} is unlike the training data of this pair: in its vocabulary, "
          f"{share:.0%} of the letters are single-letter pieces or unknown. The output may be poor "
          "and slow. This warning is printed once."
        )
      yield line

  def check_finished(self, decoded: Sequence[DecodeResult]) -> None:
    """Warn about each of the next lines whose output has no EOS; see the class."""
    for tokens in (row for d in decoded for row in d.tokens):
      number = self._numbers.popleft()
      if self._pair.vocabulary.eos_id not in np.asarray(tokens):
        detail = f"; its output stops at the limit of {self._max_new_tokens} tokens"
        self._warn(number, "was not finished", detail)

  def summarize(self) -> None:
    """For each kind of warning, print the numbers of the lines after the first."""
    for kind, (_, *others) in self._lines.items():
      if others:
        shown = ", ".join(map(str, others[:10])) + (", ..." if len(others) > 10 else "")
        if len(others) > 1:
          kind = kind.replace("is ", "are ").replace("was ", "were ")
        lines = "line" if len(others) == 1 else "lines"
        self._notes.print(f"warning: {len(others)} more {lines} {kind}: {shown}")

  def _warn(self, number: int, kind: str, detail: str) -> None:
    lines = self._lines.setdefault(kind, [])
    lines.append(number)
    if len(lines) == 1:
      self._notes.print(f"warning: line {number} {kind}{detail}.")
