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
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Literal

from rich.console import Console

from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.data.text import read_sources, read_stdin_lines
from specdec_jax.errors import InputError, require_count
from specdec_jax.generate import Output, chosen_tree, generation_config, outputs
from specdec_jax.measure.calibrate import params_digest
from specdec_jax.measure.progress import Progress
from specdec_jax.pair import Pair
from specdec_jax.serve.lines import count_records, output_record

# A warning is printed if more than this share of a line's letters are in single-letter pieces. With
# the captions' vocabulary the share is at most 0.22 for captions, 0.13 for news in the median, 0.4
# for one line of news in 1,000, and 1 for a text in a different script.
MAX_SINGLE_LETTER_SHARE = 0.4


def translate(
  pair: Pair,
  input: str | None,
  output: str = "-",
  generation: GenerationConfig | None = None,
  gamma: int | Literal["auto"] | None = None,
  tree: Sequence[int] | Literal["auto"] | None = None,
  batch_size: int = 1,
  seed: int = 0,
  prefix: str = "",
  num_texts: int = 1,
  draft_beams: int | None = None,
  nodes: int | None = None,
) -> None:
  """Translate each line of a file; with a decoder-only model, continue each line.

  Other arguments are those of `generate.outputs`. A line that is longer than the pair's limit is
  truncated. An output without EOS stops at its limit. The output of an empty line is empty, unless
  the target is decoder-only. In each of these cases a warning is printed on standard error. Several
  lines with the same warning are summarized at the end.

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
    generation: settings of generation; its fields are flags. They take precedence over those of
      the checkpoint.
    batch_size: number of lines that are decoded together; always 1 if input is from a terminal.
    prefix: text prepended to each line that is not blank, such as the prefix of a T5 task. If
      `input` is None, it is the prompt.
    num_texts: number of outputs if `input` is None.

  Raises:
    InputError: an argument is out of range, `generation` asks for several outputs, or OUTPUT.part
      belongs to a run with other settings, another input or other checkpoints.
  """
  require_count("num_texts", num_texts)
  source = 0 if input == "-" else input or ""
  if os.path.isfile(source) and os.path.exists(output) and os.path.samefile(source, output):
    raise InputError(f"{output} is the input and the output; name another output.")
  given = (generation or GenerationConfig()).given()
  config, _ = generation_config(pair, None, given)
  if (config.num_return_sequences or 1) > 1:
    raise InputError("A line has one output; give num_return_sequences=1.")
  notes = Console(stderr=True, markup=False)
  at_terminal = input == "-" and sys.stdin.isatty()
  batch_size = 1 if at_terminal else batch_size  # so that each line is decoded at once
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
    settings = config, gamma, tree, batch_size, seed, draft_beams, nodes
    run = _run_hash(pair, *settings, sample)
  totals, warned = collections.Counter[str](), collections.defaultdict[str, list[int]](list)
  with (
    _open_output(output, run) as (sink, num_done),
    Progress(disable=at_terminal or output == "-" and sys.stdout.isatty()) as bar,
  ):
    if (config.num_beams or 1) == 1:
      texts = [each["source"] for each in sample if pair.can_decode(each["source"])]
      tree = chosen_tree(pair, texts, gamma, tree, config, batch_size, seed, say=notes.print)
      gamma = None
    if num_done:
      notes.print(f"resuming an interrupted run after line {num_done}.")
    since = time.perf_counter()
    task = bar.add_task("decoding", total=total, completed=num_done)
    sources, rows = itertools.tee(itertools.islice(sources, num_done, None))
    lines: Iterable[str | None]
    lines = (row["source"] if pair.can_decode(row["source"]) else None for row in rows)
    decoded = outputs(
      pair,
      lines if total is None else [*lines],
      gamma=gamma,
      tree=tree,
      batch_size=batch_size,
      seed=seed,
      first=num_done,
      draft_beams=draft_beams,
      nodes=nodes,
      **given,
    )
    for index, (fields, found) in enumerate(zip(sources, decoded), num_done):
      record = output_record(index, fields, found)
      if output.endswith(".jsonl"):
        sink.write(json.dumps(record, ensure_ascii=False) + "\n")
      else:
        sink.write(re.sub("\r\n|[\r\n]", " ", found.text) + "\n")
      sink.flush()
      bar.advance(task)
      totals.update(count_records([record]))
      for kind, detail in _warnings(pair, record, found):
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


def _warnings(pair: Pair, record: dict, output: Output) -> Iterator[tuple[str, str]]:
  line = record["source"]
  if not pair.can_decode(line):
    yield "is empty", "; its output is left empty"
    return
  if (cut := pair.cut(line)) is not None:
    kept = f"before '{cut[:40]}...'" if pair.continues else f"after '...{cut[-40:]}'"
    yield f"is longer than {pair.max_source_tokens} tokens", f"; it was cut {kept}"
  if output.finish_reason == "length":
    yield "was not finished", f"; its output stops at the limit of {len(record['tokens'])} tokens"
  share = pair.vocabulary.single_letter_share(line)
  if share > MAX_SINGLE_LETTER_SHARE:
    yield (
      "is unlike the training data of this pair",
      f": in its vocabulary, {share:.0%} of the letters are single-letter pieces or unknown, so "
      "that the output may be poor and slow",
    )
