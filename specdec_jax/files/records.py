"""Files of sources and of the records of their outputs: lines of text, or JSON Lines.

The suffix, in any case, decides on the format: .jsonl and .ndjson are JSON Lines, others are text,
and .gz may follow. A JSON Lines file has one object per line, whose field 'source' or, if there is
none, 'text' is the source. A line of text is the object {"source": line}. The record of an output
is the object of its source, unchanged, with one more field. The field 'draft_text' of a source, if
there is one, is a text that its output may have (`drafts.given`). The field of a record is:

  decoded: index (of the source in the data set), text, tokens (ids, EOS included), rounds,
    draft_tokens (verified draft tokens) and accepted (accepted draft tokens).
"""

import collections
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from specdec_jax.errors import InputError, require_text
from specdec_jax.generate import Output, outputs
from specdec_jax.pair import Pair

Record = dict[str, Any]


def is_json_lines(path: str) -> bool:
  """Return whether a file has one JSON object per line, instead of one text per line."""
  return path.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson"))


def require_suffix(path: str) -> None:
  """Raise InputError if the name of a file is that of a compression that is not supported."""
  if path.lower().endswith((".bz2", ".xz", ".zip", ".zst")):
    raise InputError(f"{path} has the name of a compressed file; only .gz is compressed.")


def read_records(lines: Iterable[str], path: str, decoded: bool = False) -> Iterator[Record]:
  """Yield the record of each line of a file of sources as soon as it is read.

  Raises:
    InputError: a line has no source that can be encoded, or has the field 'decoded', unless
      `decoded` is True.
  """
  for number, line in enumerate(lines, 1):
    record: Any = {"source": line}
    if is_json_lines(path):
      reason = ""
      try:
        record = json.loads(line)
      except (ValueError, RecursionError) as error:
        record, reason = None, f": {error}"
      if not (isinstance(record, dict) and isinstance(source_of(record), str)):
        raise InputError(
          f"{path}, line {number} is not a JSON object with a text as 'source' or 'text'{reason}."
        )
      if "decoded" in record and not decoded:
        raise InputError(
          f"{path}, line {number} has the field 'decoded', where its output would be; rename it."
        )
    require_text(f"{path}, line {number}", source_of(record))
    require_text(f"{path}, line {number}: draft_text", record.get("draft_text") or "")
    yield record


def with_drafts(records: Iterable[Record], lines: Iterable[str], path: str) -> Iterator[Record]:
  """Yield records with the lines of a text as their field 'draft_text'."""
  for record, line in itertools.zip_longest(records, lines):
    if record is None or line is None:
      raise InputError(f"{path} has {'fewer' if line is None else 'more'} lines than the input.")
    yield record | {"draft_text": line}


def source_of(record: Mapping[str, Any], prefix: str = "") -> str:
  """Return the text to decode: the source of a record, after `prefix` unless it is blank."""
  text = record.get("source", record.get("text"))
  return prefix + text if prefix and text.strip() else text


def json_line(record: Mapping[str, Any]) -> str:
  """Return a record as a line of JSON Lines."""
  line = json.dumps(record, ensure_ascii=False) + "\n"
  return line.encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair as \udxxx


def output_line(record: Mapping[str, Any], path: str) -> str:
  """Return the line of a record in the file `path`, which may be text."""
  if is_json_lines(path):
    return json_line(record)
  return re.sub("\r\n|[\r\n]", " ", record["decoded"]["text"]) + "\n"


def decode_records(
  pair: Pair, records: Iterable[Record], prefix: str = "", first: int = 0, **arguments: Any
) -> Iterator[tuple[Record, Output]]:
  """Decode sources, and yield the record of each output, and the output.

  The output of a text that the pair cannot decode, such as a blank one, is empty. The arguments are
  those of `generate.outputs`, which decodes a list continuously.
  """
  kept, read, drafted = itertools.tee(records, 3)
  drafts = (record.get("draft_text") for record in drafted)
  sources = (source_of(record, prefix) for record in read)
  texts = (source if pair.can_decode(source) else None for source in sources)
  listed = [*texts] if isinstance(records, Sequence) else texts
  decoded = outputs(pair, listed, first=first, draft_texts=drafts, **arguments)
  for index, (record, output) in enumerate(zip(kept, decoded, strict=True), first):
    yield record | {"decoded": _decoded(index, output)}, output


def _decoded(index: int, output: Output) -> dict[str, Any]:
  accepted, rejected = output.acceptance_counts
  return dict(
    index=index,
    text=output.text,
    tokens=output.tokens.tolist(),
    rounds=0 if output.rounds is None else len(output.rounds.num_emitted),
    draft_tokens=accepted + rejected,
    accepted=accepted,
  )


def count_records(records: Iterable[Mapping[str, Any]]) -> collections.Counter[str]:
  """Return the numbers of texts, tokens, rounds, draft tokens and accepted ones of records."""
  counts = collections.Counter(texts=0, tokens=0, rounds=0, draft_tokens=0, accepted=0)
  for record in records:
    decoded = record["decoded"]
    summed = {name: decoded[name] for name in ("rounds", "draft_tokens", "accepted")}
    counts.update(texts=1, tokens=len(decoded["tokens"]), **summed)
  return counts
