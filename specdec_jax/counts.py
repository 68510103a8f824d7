"""What decoded batches hold: tokens, rounds, accepted guesses."""

import numpy as np

from specdec_jax.core.types import DecodeResult


def num_tokens(outputs: list[DecodeResult]) -> int:
  """Tokens emitted, EOS counted."""
  return int(sum(o.lengths.sum() for o in outputs))


def num_rounds(outputs: list[DecodeResult]) -> int:
  """Rounds in which a row emitted something, over all rows."""
  return sum(int((o.rounds.num_emitted > 0).sum()) for o in outputs)


def acceptance_rate(outputs: list[DecodeResult]) -> float:
  """Accepted / (accepted + rejected) guesses in real rounds, of all rows."""
  accepted, rejected = np.sum([[x.sum() for x in o.rounds.judged()] for o in outputs], axis=0)
  return float(accepted / max(1, accepted + rejected))


def acceptance_by_position(outputs: list[DecodeResult]) -> list[float | None]:
  """Share of guesses 1..G that were accepted, of those judged in real rounds; None if none was."""
  n = np.concatenate([o.rounds.num_accepted.ravel() for o in outputs])
  emitted = np.concatenate([o.rounds.num_emitted.ravel() for o in outputs])
  made = np.concatenate(
    [o.rounds.guesses.reshape(-1, o.rounds.guesses.shape[-1]) >= 0 for o in outputs]
  )
  rates: list[float | None] = []
  for i in range(outputs[0].rounds.guesses.shape[-1]):
    accepted = int(((n > i) & (emitted > i)).sum())
    rejected = int(((n == i) & (emitted == i + 1) & made[:, i]).sum())
    rates.append(accepted / (accepted + rejected) if accepted + rejected else None)
  return rates


def identical(one: list[DecodeResult], other: list[DecodeResult]) -> bool:
  """Whether two runs emitted the same tokens for every row."""
  return all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, other, strict=True))
