"""Measured speedup: the same texts, decoded both ways, in turn, in one process."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from specdec_jax.decoding import autoregressive_decode, require_finite, speculative_decode
from specdec_jax.experiments.costs import interleaved_medians
from specdec_jax.pairs import Pair
from specdec_jax.protocols import Decoded
from specdec_jax.sampling import Sampling


class Speed(NamedTuple):
  """Totals over all texts, seconds by the median of the repeats of each.

  Attributes:
    baseline: outputs of plain decoding, one `Decoded` for each prompt, on the host.
    speculative: for each gamma, outputs of speculative decoding.
    baseline_s: seconds of plain decoding.
    speculative_s: seconds of speculative decoding, for each gamma.
  """

  baseline: list[Decoded]
  speculative: dict[int, list[Decoded]]
  baseline_s: float
  speculative_s: dict[int, float]

  def speedup(self, gamma: int) -> float:
    """Ratio of tokens a second, totals over totals."""
    ours = num_tokens(self.speculative[gamma]) / self.speculative_s[gamma]
    return ours / (num_tokens(self.baseline) / self.baseline_s)


def num_tokens(outputs: list[Decoded]) -> int:
  """Tokens emitted, EOS counted."""
  return int(sum(o.lengths.sum() for o in outputs))


def acceptance_rate(outputs: list[Decoded]) -> float:
  """Accepted / (accepted + rejected) guesses in real rounds; a guess behind EOS was neither."""
  accepted = rejected = 0
  for o in outputs:
    n, emitted = o.rounds.num_accepted, o.rounds.num_emitted
    gamma = o.rounds.guesses.shape[-1]
    accepted += int(np.minimum(n, emitted).sum())
    rejected += int(((n < gamma) & (emitted == n + 1)).sum())
  return accepted / max(1, accepted + rejected)


def acceptance_by_position(outputs: list[Decoded]) -> list[float | None]:
  """Share of guesses 1..G that were accepted, of those judged in real rounds; None if none was."""
  n = np.concatenate([o.rounds.num_accepted.ravel() for o in outputs])
  emitted = np.concatenate([o.rounds.num_emitted.ravel() for o in outputs])
  rates: list[float | None] = []
  for i in range(outputs[0].rounds.guesses.shape[-1]):
    accepted = int(((n > i) & (emitted > i)).sum())
    rejected = int(((n == i) & (emitted == i + 1)).sum())
    rates.append(accepted / (accepted + rejected) if accepted + rejected else None)
  return rates


def num_rounds(outputs: list[Decoded]) -> int:
  """Rounds in which a row emitted something, over all rows."""
  return sum(int((o.rounds.num_emitted > 0).sum()) for o in outputs)


def identical(one: list[Decoded], other: list[Decoded]) -> bool:
  """Whether two runs emitted the same tokens for every row."""
  return all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, other, strict=True))


def row_keys(seed: int, start: int, count: int) -> Array:
  """A key for each of the texts start..start+count-1: the same whatever batch they are in."""
  return jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(
    np.arange(start, start + count)
  )


def measure_speed(
  pair: Pair,
  prompts: Sequence[Array],
  sampling: Sampling,
  gammas: Sequence[int],
  max_new_tokens: int,
  repeats: int,
  seed: int = 0,
  lenience: float = 1.0,
  progress: Callable[[int], None] = lambda done: None,
) -> Speed:
  """Decode each prompt [B, P] plainly and with each gamma, interleaved, and keep the medians.

  `progress` is called after each prompt with how many are done.
  """
  baseline: list[Decoded] = []
  speculative: dict[int, list[Decoded]] = {gamma: [] for gamma in gammas}
  seconds, at = [], 0
  common = dict(max_new_tokens=max_new_tokens, sampling=sampling)
  for prompt in prompts:
    rng = row_keys(seed, at, len(prompt))
    at += len(prompt)

    def plain(prompt=prompt, rng=rng):
      return autoregressive_decode(pair.target, pair.target_params, prompt, rng, **common)

    def speculate(gamma, prompt=prompt, rng=rng):
      draft = pair.draft(sampling, gamma)
      params = pair.target_params, pair.draft_params
      return speculative_decode(
        pair.target, draft, *params, prompt, rng, lenience=lenience, **common
      )

    calls = [plain, *(lambda g=g, f=speculate: f(g) for g in gammas)]
    medians, outputs = interleaved_medians(calls, repeats)
    outputs = [require_finite(decoded) for decoded in jax.device_get(outputs)]
    baseline.append(outputs[0])
    for gamma, output in zip(gammas, outputs[1:]):
      speculative[gamma].append(output)
    seconds.append(medians)
    progress(len(baseline))
  total = np.sum(seconds, axis=0)
  return Speed(baseline, speculative, float(total[0]), dict(zip(gammas, map(float, total[1:]))))
