"""Measured speedup: the same texts, decoded both ways, in turn, in one process."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from specdec_jax.core.decode import Decoder, NullDraft, require_finite
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult, Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.counts import num_tokens
from specdec_jax.measurement.costs import Costs, round_calls, round_costs, start_calls
from specdec_jax.measurement.timing import interleaved_seconds, ratio_range, timed
from specdec_jax.pairs import Pair

NUM_COSTED = 24  # texts at which costs are timed


class Baseline(NamedTuple):
  """Plain decoding of a pair's target, which speed is compared with.

  Attributes:
    name: whose it is, for records.
    decode: (prompt, rng, *, max_new_tokens, sampling) -> DecodeResult.
  """

  name: str
  decode: Callable[..., DecodeResult]


def own_baseline(pair: Pair) -> Baseline:
  """Return our own autoregressive decoding."""

  def decode(prompt: Array, rng: Array, *, max_new_tokens: int, sampling: Sampling) -> DecodeResult:
    decoder = Decoder(pair.target, NullDraft(), TokenVerifier(sampling), pair.vocabulary.eos_id)
    params = Params(pair.target_params)
    return decoder.run(params, prompt, rng, max_new_tokens=max_new_tokens)

  return Baseline("own", decode)


class Speed(NamedTuple):
  """Totals over all texts, seconds by the median of the repeats of each.

  Attributes:
    baseline: outputs of plain decoding, one `DecodeResult` for each prompt, on the host.
    speculative: for each gamma, outputs of speculative decoding.
    baseline_s: seconds of plain decoding.
    speculative_s: seconds of speculative decoding, for each gamma.
    costs: for each gamma, timed between the decodes: means over the texts that they were timed at
      of the medians of the repeats.
    ratios: for each gamma, seconds of plain decoding / of speculative decoding in each repeat.
  """

  baseline: list[DecodeResult]
  speculative: dict[int, list[DecodeResult]]
  baseline_s: float
  speculative_s: dict[int, float]
  costs: dict[int, Costs]
  ratios: dict[int, np.ndarray]

  def speedup(self, gamma: int) -> float:
    """Ratio of tokens a second, totals over totals."""
    return self._tokens(gamma) * self.baseline_s / self.speculative_s[gamma]

  def spread(self, gamma: int) -> tuple[float, float] | tuple[None, None]:
    """Its range over the repeats, `timing.ratio_range`."""
    return ratio_range(self.speedup(gamma), self._tokens(gamma) * self.ratios[gamma])

  def _tokens(self, gamma: int) -> float:
    return num_tokens(self.speculative[gamma]) / num_tokens(self.baseline)

  def round_s(self, gamma: int) -> float:
    """Seconds of a round of the texts decoded, without what both models take to read a prompt."""
    costs, outputs = self.costs[gamma], self.speculative[gamma]
    starts = len(outputs) * (costs.target_start + costs.draft_start)
    return (self.speculative_s[gamma] - starts) / sum(int(o.num_rounds) for o in outputs)


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
  baseline: Baseline | None = None,
) -> Speed:
  """Decode each prompt [B, P] plainly and with each gamma, interleaved, and keep the medians.

  A machine that others use slows down and speeds up within minutes, so what decoding is made of is
  timed in turn with the decodes, at NUM_COSTED texts, or up to twice as many, spread evenly.

  `progress` is called after each prompt with how many are done; `baseline` is our own if not given.
  """
  plain_decode = (baseline or own_baseline(pair)).decode
  plain_outputs: list[DecodeResult] = []
  speculative: dict[int, list[DecodeResult]] = {gamma: [] for gamma in gammas}
  seconds, part_seconds, at = [], [], 0  # of each text [repeats, calls], and medians of the parts
  drafts = [pair.draft(sampling, chain(gamma)) for gamma in gammas]
  widths = collections.Counter(prompt.shape for prompt in prompts)
  typical = next(p for p in prompts if p.shape == widths.most_common(1)[0][0])
  parts = round_calls(pair, drafts, typical, sampling, max_new_tokens, lenience)
  speculate = [pair.decode_fn(sampling, gamma, lenience) for gamma in gammas]
  plain = functools.partial(plain_decode, sampling=sampling)
  ways: list[Callable[..., DecodeResult]] = [plain, *speculate]
  every = max(1, len(prompts) // NUM_COSTED)
  for i, prompt in enumerate(prompts):
    rng = row_keys(seed, at, len(prompt))
    at += len(prompt)
    asked: dict[str, Any] = dict(prompt=prompt, rng=rng, max_new_tokens=max_new_tokens)
    decodes = [functools.partial(decode, **asked) for decode in ways]
    starts = start_calls(pair, drafts[0], prompt, max_new_tokens)
    calls: list[Callable[[], object]] = [*decodes, *starts]
    costed = parts if i % every == 0 else []
    taken, outputs = interleaved_seconds(
      [functools.partial(timed, call) for call in (*calls, *costed)], repeats
    )
    outputs = [require_finite(decoded) for decoded in jax.device_get(outputs[: len(decodes)])]
    plain_outputs.append(outputs[0])
    for gamma, output in zip(gammas, outputs[1:]):
      speculative[gamma].append(output)
    seconds.append(taken[:, : len(calls)])
    if costed:
      part_seconds.append(np.median(taken[:, len(calls) :], axis=0))
    progress(len(plain_outputs))
  medians = np.median(seconds, axis=1)
  baseline_s, *speculative_s = map(float, np.sum(medians, axis=0)[:-2])
  start_s, round_s = np.mean(medians, axis=0)[-2:], np.mean(part_seconds, axis=0)
  costs = round_costs(start_s.tolist(), round_s.tolist(), gammas)
  plain_s, *each_s = np.sum(seconds, axis=0).T[:-2]  # [repeats] of each way
  return Speed(
    plain_outputs,
    speculative,
    baseline_s,
    dict(zip(gammas, speculative_s)),
    dict(zip(gammas, costs)),
    {gamma: plain_s / own for gamma, own in zip(gammas, each_s)},
  )
