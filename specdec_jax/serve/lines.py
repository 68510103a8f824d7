"""Decoding of many lines of text, and the records of their outputs in JSON Lines."""

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import batching
from specdec_jax.core.counts import require_finite
from specdec_jax.core.decode import Decoder
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.processors import Processors
from specdec_jax.core.sampling import row_keys
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import DecodeResult
from specdec_jax.pair import Pair

Decoded = tuple[str, DecodeResult | None]  # an output, and its result, a batch of one row


def decode_lines(
  pair: Pair,
  lines: Iterable[str],
  tree: AnyTree,
  settings: DecodeSettings,
  decode: Callable[..., DecodeResult] | None = None,
  start: int = 0,
  processors: Processors = (),
) -> Iterator[Decoded]:
  """Decode lines, and yield the output and the result of each of them, in their order.

  If the lines are a sequence, the next line takes the row of a line that has ended. Otherwise they
  are decoded in batches, each of them as soon as its lines have arrived. A blank line that the
  target cannot decode has an empty output and no result.

  Args:
    tree: tree of draft tokens; `chain(0)` for autoregressive decoding.
    decode: function of (prompt, keys, *, max_new_tokens) that decodes a batch, to use instead of
      `pair.decoder`.
    start: index of the first line. It determines the random keys.
  """
  batch_size = settings.batch_size
  if decode is None:
    decoder = pair.decoder(settings.sampling, tree, settings.lenience, processors=processors)
    if isinstance(lines, Sequence) and 1 < batch_size < sum(map(pair.can_decode, lines)):
      yield from _decode_in_slots(pair, lines, decoder, settings, start)
      return
    decode = functools.partial(decoder.run, pair.params)
  lines = iter(lines)
  for first in itertools.count(start, batch_size):
    batch = [*itertools.islice(lines, batch_size)]
    if not batch:
      return
    is_decoded = [pair.can_decode(line) for line in batch]
    if not any(is_decoded):
      yield from [("", None)] * len(batch)
      continue
    sources = [line if given else "" for line, given in zip(batch, is_decoded)]
    sources += sources[:1] * (batch_size - len(batch))  # the last batch has the shape of the others
    prompt, keys = pair.prompt(sources), row_keys(settings.seed, first, batch_size)
    result = decode(prompt, keys, max_new_tokens=settings.max_new_tokens)
    decoded = require_finite(jax.device_get(result))
    for row, given in enumerate(is_decoded):
      yield _decoded(pair, batching.one_row(decoded, row)) if given else ("", None)


def _decode_in_slots(
  pair: Pair,
  lines: Sequence[str],
  decoder: Decoder,
  settings: DecodeSettings,
  start: int,
) -> Iterator[Decoded]:
  index = [i for i, line in enumerate(lines) if pair.can_decode(line)]
  lengths = [len(pair.encode(lines[i])) for i in index]
  width = -(-max(lengths) // 8) * 8
  found = batching.decode_texts(
    decoder,
    pair.params,
    batching.Texts(
      lambda rows: pair.prompt([lines[index[row]] for row in rows], width),
      lengths,
      row_keys(settings.seed, start, len(lines))[np.array(index)],
      np.full(len(index), settings.max_new_tokens),
    ),
    num_slots=settings.batch_size,
    max_new_tokens=settings.max_new_tokens,
    has_encoder=not pair.continues,
  )
  ended: dict[int, Decoded] = {i: ("", None) for i in {*range(len(lines))} - {*index}}
  first = 0  # line whose output is yielded next
  for text, result, row in found:
    ended[index[text]] = _decoded(pair, batching.one_row(result, row))
    while first in ended:
      yield ended.pop(first)
      first += 1


def _decoded(pair: Pair, row: DecodeResult) -> Decoded:
  return pair.vocabulary.decode(np.asarray(row.tokens[0])), row


def output_record(
  index: int, source: Mapping[str, Any], output: str, decoded: DecodeResult | None
) -> dict[str, Any]:
  """Return the record of an output, as in the files of `decode` and `translate`.

  A record has the fields `index`, `source`, `output`, `tokens` (ids, EOS included), `rounds`,
  `draft_tokens` (verified draft tokens), `accepted` (accepted draft tokens), and the other fields
  of `source` (`data.text.read_sources`).
  """
  own = dict(index=index, source=source["source"], output=output)
  if decoded is None:
    own |= dict(tokens=[], rounds=0, draft_tokens=0, accepted=0)
  else:
    accepted, rejected = (int(count[0]) for count in decoded.rounds.acceptance_counts())
    own |= dict(
      tokens=decoded.tokens[0, : decoded.lengths[0]].tolist(),
      rounds=int((decoded.rounds.num_emitted > 0).sum()),
      draft_tokens=accepted + rejected,
      accepted=accepted,
    )
  return own | {name: value for name, value in source.items() if name not in own}


def count_records(records: Iterable[Mapping[str, Any]]) -> collections.Counter[str]:
  """Return the numbers of texts, tokens, rounds, draft tokens and accepted ones of records."""
  counts = collections.Counter(texts=0, tokens=0, rounds=0, draft_tokens=0, accepted=0)
  for record in records:
    summed = {name: record[name] for name in ("rounds", "draft_tokens", "accepted")}
    counts.update(texts=1, tokens=len(record["tokens"]), **summed)
  return counts
