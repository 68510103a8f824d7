"""Counts of tokens, rounds and accepted draft tokens in decoded batches."""

import numpy as np

from specdec_jax.core.types import DecodeResult
from specdec_jax.errors import InputError


def num_tokens(outputs: list[DecodeResult]) -> int:
  """Return the number of new tokens in decoded batches, EOS included."""
  return int(sum(o.lengths.sum() for o in outputs))


def num_rounds(outputs: list[DecodeResult]) -> int:
  """Return the number of rounds in which a row emitted a token, summed over all rows."""
  return sum(int((o.rounds.num_emitted > 0).sum()) for o in outputs)


def acceptance_rate(outputs: list[DecodeResult]) -> float:
  """Return accepted / (accepted + rejected) draft tokens over all rows.

  See `Rounds.acceptance_counts`. The rate is 0 if no draft token was verified.
  """
  accepted, rejected = np.sum(
    [[x.sum() for x in o.rounds.acceptance_counts()] for o in outputs], axis=0
  )
  return float(accepted / max(1, accepted + rejected))


def acceptance_by_position(outputs: list[DecodeResult]) -> list[float | None]:
  """Return accepted / (accepted + rejected) at each position of the draft tokens in a chain.

  Tokens after a rejected one, past EOS or past the limit count as neither. The rate is None for a
  position at which no draft token was verified.
  """
  num_accepted = np.concatenate([o.rounds.num_accepted.ravel() for o in outputs])
  num_emitted = np.concatenate([o.rounds.num_emitted.ravel() for o in outputs])
  proposed = np.concatenate(
    [o.rounds.draft_tokens.reshape(-1, o.rounds.draft_tokens.shape[-1]) >= 0 for o in outputs]
  )
  rates: list[float | None] = []
  for i in range(outputs[0].rounds.draft_tokens.shape[-1]):
    accepted = int(((num_accepted > i) & (num_emitted > i)).sum())
    rejected = int(((num_accepted == i) & (num_emitted == i + 1) & proposed[:, i]).sum())
    rates.append(accepted / (accepted + rejected) if accepted + rejected else None)
  return rates


def identical(one: list[DecodeResult], other: list[DecodeResult]) -> bool:
  """Return True if two runs emitted the same tokens for every row."""
  return all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, other, strict=True))


def require_finite(result: DecodeResult) -> DecodeResult:
  """Return `result`, or raise InputError if `DecodeResult.not_finite` reports a failed row."""
  for row, token in enumerate(result.not_finite.tolist()):
    if token >= 0:
      raise InputError(
        f"row {row} of a batch cannot be decoded past token {token}: the target's logits or the "
        "draft's probabilities there are NaN or infinite; look for damaged weights or a "
        "logits_processor that returns them, or use float32."
      )
  return result
