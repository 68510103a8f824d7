"""Records of outputs in JSON Lines, as in the files of `translate` and `decode`."""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from specdec_jax.generate import Output


def output_record(index: int, source: Mapping[str, Any], output: Output) -> dict[str, Any]:
  """Return the record of an output.

  A record has the fields `index`, `source`, `output`, `tokens` (ids, EOS included), `rounds`,
  `draft_tokens` (verified draft tokens), `accepted` (accepted draft tokens), and the other fields
  of `source` (`data.text.read_sources`).
  """
  accepted, rejected = output.acceptance_counts
  own = dict(
    index=index,
    source=source["source"],
    output=output.text,
    tokens=output.tokens.tolist(),
    rounds=0 if output.rounds is None else len(output.rounds.num_emitted),
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
