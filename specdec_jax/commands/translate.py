"""Speculative decoding of each line of a text, or of copies of one prompt."""

import collections
import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, Literal

import jax
from rich.console import Console

from specdec_jax.beams import BeamSearcher
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import DecodeResult, Params
from specdec_jax.data.text import read_sources, read_stdin_lines
from specdec_jax.errors import InputError, require_count, require_seed
from specdec_jax.measure.calibrate import params_digest, resolve_tree
from specdec_jax.measure.progress import Progress
from specdec_jax.pair import Pair
from specdec_jax.serve.lines import count_records, decode_lines, output_record

# A warning is printed if more than this share of a line's letters are in single-letter pieces. With
# the captions' vocabulary the share is at most 0.22 for captions, 0.13 for news in the median, 0.4
# for one line of news in 1,000, and 1 for a text in a different script.
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
  generation: GenerationConfig | None = None,
) -> None:
  """Translate each line of a file; with a decoder-only model, continue each line.

  A line that is longer than the pair's limit is truncated. An output without EOS stops at
  `max_new_tokens`. The output of an empty line is empty, unless the target is decoder-only. In each
  of these cases a warning is printed on standard error. Several lines with the same warning are
  summarized at the end.

  A run that writes a file appends finished lines to OUTPUT.part, which becomes OUTPUT at the end.
  If the run is interrupted, the same command resumes it after the last line. From standard input,
  or to a device or a pipe, lines are written directly, and nothing is resumed.

  Args:
    input: path of a text file with one source per line, or of a .jsonl file; '-' for standard
      input; None to decode `num_texts` copies of `prefix`, which may be empty for a decoder-only
      model. A .jsonl file has one JSON object per line, whose field 'source' or 'text' is the
      source. A file whose name ends in .gz is decompressed. Lines of standard input are decoded as
      they arrive (with 'auto', after the last one, unless they are typed at a terminal).
    output: path of a file, which must not be the input; '-' for standard output. A .jsonl file has
      a record for each source (`serve.lines.output_record`).
    gamma: draft tokens per round; 0 for autoregressive decoding; 'auto' chooses the fastest and
      prints why.
    batch_size: number of lines that are decoded together; always 1 if input is from a terminal.
    max_new_tokens: limit for each output.
    prefix: text prepended to each line that is not blank, such as the prefix of a T5 task. If
      `input` is None, it is the prompt.
    num_texts: number of outputs if `input` is None.
    tree: parents of a tree of draft tokens (`trees.Tree`), instead of a chain of gamma; 'auto'
      chooses the fastest tree or chain.
    beams: number of beams of a beam search by the rules of t5x (`beam_search`); None for no beam
      search. In a beam search, gamma is the number of steps that the draft searches ahead.
    draft_beams: number of beams of the draft; defaults to `beams`.
    nodes: maximum number of nodes per target forward pass of a beam search; see
      `Pair.beam_searcher`.
    generation: settings of logits processors, such as `forced_bos_token_id` for the language of
      outputs.

  Raises:
    InputError: an argument is out of range, `generation` has settings other than those of logits
      processors, beams are combined with a temperature above 0, a tree, 'auto' or `generation`, or
      OUTPUT.part belongs to a run with other settings, another input or other checkpoints.
  """
  require_seed(seed)
  require_count("max_new_tokens", max_new_tokens)
  require_count("num_texts", num_texts)
  pair.require_batch_size(batch_size)
  source = 0 if input == "-" else input or ""
  if os.path.isfile(source) and os.path.exists(output) and os.path.samefile(source, output):
    raise InputError(f"{output} is the input and the output; name another output.")
  decode: Callable[..., DecodeResult] | None = None
  processors = pair.processors(generation or GenerationConfig())
  if beams is not None:
    if sampling.temperature or tree is not None or gamma == "auto" or processors:
      raise InputError(
        "A beam search samples nothing, and its draft searches gamma steps; with beams leave the "
        "temperature at 0, the tree and generation unset, and give gamma as a number. Pair.generate"
        " has a beam search with logits processors."
      )
    searcher = pair.beam_searcher(beams, gamma, draft_beams, length_penalty, nodes)
    decode = _best_of_beams(searcher, pair.params)
  notes = Console(stderr=True, markup=False)
  at_terminal = input == "-" and sys.stdin.isatty()
  batch_size = 1 if at_terminal else batch_size  # so that each line is decoded at once
  settings = DecodeSettings(sampling, batch_size, max_new_tokens, seed)
  sources: Iterable[dict[str, Any]]
  run, total = None, None
  if input == "-":
    if at_terminal:
      notes.print("A line, then Enter; Ctrl-D ends it.")
    sources = ({"source": line} for line in read_stdin_lines(prefix))
    sample = [*itertools.islice(sources, at_terminal or None)] if "auto" in (gamma, tree) else []
    sources = itertools.chain(sample, sources)
  else:
    single = {"source": prefix}
    sources = sample = [single] * num_texts if input is None else read_sources(input, prefix)
    total = len(sample)
    run = _run_hash(
      pair, settings, gamma, tree, beams, draft_beams, nodes, length_penalty, generation, sample
    )
  totals, warned = collections.Counter[str](), collections.defaultdict[str, list[int]](list)
  with (
    _open_output(output, run) as (sink, num_done),
    Progress(disable=at_terminal or output == "-" and sys.stdout.isatty()) as bar,
  ):
    sample_texts = [each["source"] for each in sample if pair.can_decode(each["source"])]
    shape = resolve_tree(gamma, tree, pair, sample_texts, settings, say=notes.print)
    if num_done:
      notes.print(f"resuming an interrupted run after line {num_done}.")
    since = time.perf_counter()
    task = bar.add_task("decoding", total=total, completed=num_done)
    sources, rows = itertools.tee(itertools.islice(sources, num_done, None))
    lines: Iterable[str] = (each["source"] for each in rows)
    lines = lines if total is None else [*lines]
    decoded = decode_lines(pair, lines, shape, settings, decode, num_done, processors)
    for index, (fields, (text, result)) in enumerate(zip(sources, decoded), num_done):
      record = output_record(index, fields, text, result)
      if output.endswith(".jsonl"):
        sink.write(json.dumps(record, ensure_ascii=False) + "\n")
      else:
        sink.write(re.sub("\r\n|[\r\n]", " ", text) + "\n")
      sink.flush()
      bar.advance(task)
      totals.update(count_records([record]))
      for kind, detail in _warnings(pair, record):
        warned[kind].append(index + 1)
        if len(warned[kind]) == 1:
          notes.print(f"warning: line {index + 1} {kind}{detail}.")
  for kind, (_, *others) in warned.items():
    if others:
      shown = ", ".join(map(str, others[:10])) + (", ..." if len(others) > 10 else "")
      if len(others) > 1:
        kind = kind.replace("is ", "are ", 1).replace("was ", "were ", 1)
      noun = "line" if len(others) == 1 else "lines"
      notes.print(f"warning: {len(others)} more {noun} {kind}: {shown}")
  if totals["rounds"]:
    seconds = time.perf_counter() - since
    notes.print(
      f"{totals['texts']} lines, {totals['tokens']} tokens in {seconds:.1f} s with compilation, "
      f"{totals['tokens'] / totals['rounds']:.2f} tokens per target pass."
    )


def _run_hash(pair: Pair, *settings: object) -> str:
  parts = (
    settings,
    (pair.dtype, pair.kernels, pair.max_source_tokens, pair.continues, pair.draft.name),
    (pair.verifier_name, pair.vocabulary.fingerprint(), params_digest(pair.params)),
    pair.vocabulary.encode(""),  # has the token of the source language
  )
  return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextlib.contextmanager
def _open_output(output: str, run: str | None) -> Iterator[tuple[IO[str], int]]:
  """Open an output, and yield it with the number of lines that an interrupted run has written.

  A file is written to OUTPUT.part, whose first line is `run`, a hash of everything that the lines
  depend on. It becomes OUTPUT when the context exits. If `run` is None, or the output is a device
  or a pipe, it is written directly.
  """
  if output == "-":
    yield sys.stdout, 0
    return
  if run is None or not os.path.basename(output) or os.path.exists(output) > os.path.isfile(output):
    with open(output, "w", encoding="utf-8") as file:
      yield file, 0
    return
  part, header = pathlib.Path(f"{os.path.realpath(output)}.part"), f"{run}\n".encode()
  with open(part, "a", encoding="utf-8") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise InputError(f"another run is writing to {output}; wait for it to end.") from None
    lines = part.read_bytes()
    if lines[: len(header)] != header[: len(lines)]:
      raise InputError(
        f"{part} has the lines of an interrupted run with other settings, another input or other "
        "checkpoints; use the same ones to resume it, or delete the file."
      )
    lines = lines[: lines.rfind(b"\n") + 1]  # without a line that was not written completely
    file.truncate(len(lines))
    if not lines:
      file.write(header.decode())
    try:
      yield file, max(0, lines.count(b"\n") - 1)
    except BaseException:
      if file.tell() == len(header):  # there is nothing to resume
        part.unlink()
      raise
    file.flush()
    with atomic_write(output, "wb") as complete:
      complete.write(part.read_bytes()[len(header) :])
    part.unlink()


def _warnings(pair: Pair, record: dict) -> Iterator[tuple[str, str]]:
  line = record["source"]
  if not pair.can_decode(line):
    yield "is empty", "; its output is left empty"
    return
  if (cut := pair.cut(line)) is not None:
    yield f"is longer than {pair.max_source_tokens} tokens", f"; it was cut after '...{cut[-40:]}'"
  if pair.vocabulary.eos_id not in record["tokens"]:
    yield "was not finished", f"; its output stops at the limit of {len(record['tokens'])} tokens"
  share = pair.vocabulary.single_letter_share(line)
  if share > MAX_SINGLE_LETTER_SHARE:
    yield (
      "is unlike the training data of this pair",
      f": in its vocabulary, {share:.0%} of the letters are single-letter pieces or unknown, so "
      "that the output may be poor and slow",
    )


def _best_of_beams(searcher: BeamSearcher, params: Params) -> Callable[..., DecodeResult]:

  def decode(prompt, rng, *, max_new_tokens: int) -> DecodeResult:
    result = searcher.run(params, prompt, max_new_tokens=max_new_tokens)
    return jax.device_get(result).best()

  return decode
