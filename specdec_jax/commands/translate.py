"""Speculative decoding of each line of a text, or of copies of one prompt."""

import collections
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from rich.console import Console

from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.data.text import decoded_lines, read_lines
from specdec_jax.errors import InputError, require_count, require_text
from specdec_jax.files.job import Job, open_output, plan, records_digest, tree_of
from specdec_jax.files.records import (
  Record,
  count_records,
  decode_records,
  output_line,
  read_records,
  require_suffix,
  source_of,
  with_drafts,
)
from specdec_jax.generate import Output, generation_config
from specdec_jax.measure.progress import Progress
from specdec_jax.pair import Pair

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
  draft_texts: str | None = None,
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
    input: path of a file of sources (`files.records` describes the formats); '-' for standard
      input, which is text; None to decode `num_texts` copies of `prefix`, which may be empty for a
      decoder-only model. Lines of standard input are decoded as they arrive (with 'auto', after the
      last one, unless they are typed at a terminal).
    output: path of a file of outputs, or of records if it is JSON Lines; it must not be the input.
      '-' for standard output.
    generation: settings of generation; its fields are flags. They take precedence over those of
      the checkpoint.
    batch_size: number of lines that are decoded together; always 1 if input is from a terminal.
    prefix: text prepended to each line that is not blank, such as the prefix of a T5 task. If
      `input` is None, it is the prompt.
    num_texts: number of outputs if `input` is None.
    draft_texts: path of a text with a line for each line of the input, which its output may have;
      an empty line for none. The outputs are the same without it.

  Raises:
    InputError: an argument is out of range, `generation` asks for several outputs, the input is not
      a file of sources, or OUTPUT.part belongs to another job (`files.job`).
  """
  require_count("num_texts", num_texts)
  require_text("prefix", prefix)
  source = 0 if input == "-" else input or ""
  if os.path.isfile(source) and os.path.exists(output) and os.path.samefile(source, output):
    raise InputError(f"{output} is the input and the output; name another output.")
  require_suffix(output)
  given = (generation or GenerationConfig()).given()
  config, _ = generation_config(pair, None, given)
  notes = Console(stderr=True, markup=False)
  at_terminal = input == "-" and sys.stdin.isatty()
  batch_size = 1 if at_terminal else batch_size  # so that each line is decoded at once
  records: Iterable[Record]
  drafts = [] if draft_texts is None else read_lines(draft_texts)
  if input == "-":
    if at_terminal:
      notes.print("A line, then Enter; Ctrl-D ends it.")
    records = read_records(decoded_lines(sys.stdin.buffer, "standard input"), input)
    if draft_texts is not None:
      records = with_drafts(records, drafts, draft_texts)
    sample = [*itertools.islice(records, at_terminal or None)] if "auto" in (gamma, tree) else []
    records = itertools.chain(sample, records)
  elif input is None:
    records = sample = [{"source": prefix}] * num_texts
    prefix = ""
  else:
    records = sample = [*read_records(read_lines(input), input)]
  if input != "-" and draft_texts is not None:
    records = sample = [*with_drafts(sample, drafts, draft_texts)]
  total = None if input == "-" else len(sample)
  arguments: dict[str, Any] = dict(gamma=gamma, tree=tree, batch_size=batch_size, seed=seed)
  arguments |= dict(prefix=prefix, draft_beams=draft_beams, nodes=nodes)
  replaces = os.path.isfile(output)
  totals, warned = collections.Counter[str](), collections.defaultdict[str, list[int]](list)

  def planned(earlier: Job | None) -> Job:
    return plan(pair, config, sample, earlier, **arguments, sources=records_digest(sample))

  with (
    open_output(output, pair, planned, is_resumable=input != "-") as (file, job, num_done),
    Progress(disable=at_terminal or output == "-" and sys.stdout.isatty()) as bar,
  ):
    if (config.num_beams or 1) == 1:
      arguments |= dict(gamma=None, tree=tree_of(job))
    if job["reason"]:
      notes.print(job["reason"])
    if replaces:
      notes.print(f"{output} exists, and this run replaces it.")
    if num_done:
      notes.print(f"resuming an interrupted run after line {num_done}.")
    since = time.perf_counter()
    task = bar.add_task("decoding", total=total, completed=num_done)
    rest = records if total is None else sample[num_done:]
    decoded = decode_records(pair, rest, first=num_done, **arguments, **given)
    for number, (record, found) in enumerate(decoded, num_done + 1):
      file.write(output_line(record, output))
      file.flush()
      bar.advance(task)
      totals.update(count_records([record]))
      for kind, detail in _warnings(pair, source_of(record, prefix), found):
        warned[kind].append(number)
        if len(warned[kind]) == 1:
          notes.print(f"warning: line {number} {kind}{detail}.")
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


def _warnings(pair: Pair, line: str, output: Output) -> Iterator[tuple[str, str]]:
  if not pair.can_decode(line):
    yield "is empty", "; its output is left empty"
    return
  if (cut := pair.cut(line)) is not None:
    kept = f"before '{cut[:40]}...'" if pair.continues else f"after '...{cut[-40:]}'"
    yield f"is longer than {pair.max_source_tokens} tokens", f"; it was cut {kept}"
  if output.finish_reason == "length":
    yield "was not finished", f"; its output stops at the limit of {len(output.tokens)} tokens"
  share = pair.vocabulary.single_letter_share(line)
  if share > MAX_SINGLE_LETTER_SHARE:
    yield (
      "is unlike the training data of this pair",
      f": in its vocabulary, {share:.0%} of the letters are single-letter pieces or unknown, so "
      "that the output may be poor and slow",
    )
