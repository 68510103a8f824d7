"""Measured speedup: the same texts are decoded with and without speculation, interleaved."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from specdec_jax.core.counts import num_tokens, require_finite
from specdec_jax.core.decode import Decoder, NullDraft
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult, Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.measure.costs import Costs, round_calls, round_costs, start_calls
from specdec_jax.measure.timing import interleaved_seconds, ratio_range, timed
from specdec_jax.pair import Pair

NUM_COSTED = 24  # number of batches at which costs are timed


class Baseline(NamedTuple):
  """Autoregressive decoding of a pair's target; speedups are relative to its speed.

  Attributes:
    name: name of the implementation, for records.
    decode: function of (prompt, rng, *, max_new_tokens, sampling) that returns a `DecodeResult`.
  """

  name: str
  decode: Callable[..., DecodeResult]


class Timing(NamedTuple):
  """Settings of timed decoding: number of repeats, and baseline.

  Attributes:
    repeats: number of timed decodes of each text, interleaved.
    baseline: baseline of the speedups; None for this package's autoregressive decoding.
  """

  repeats: int = 5
  baseline: Baseline | None = None


def own_baseline(pair: Pair) -> Baseline:
  """Return a baseline that decodes autoregressively with this package."""

  def decode(prompt: Array, rng: Array, *, max_new_tokens: int, sampling: Sampling) -> DecodeResult:
    decoder = Decoder(
      pair.target.model, NullDraft(), TokenVerifier(sampling), pair.vocabulary.eos_id
    )
    params = Params(pair.target.params)
    return decoder.run(params, prompt, rng, max_new_tokens=max_new_tokens)

  return Baseline("own", decode)


class Speed(NamedTuple):
  """Outputs, total times and costs of decoding the same texts with and without speculation.

  The times are sums over batches; the time of a batch is the median of its repeats.

  Attributes:
    baseline: outputs of autoregressive decoding, one `DecodeResult` per batch, on the host.
    speculative: outputs of speculative decoding for each gamma.
    baseline_s: seconds of autoregressive decoding.
    speculative_s: seconds of speculative decoding for each gamma.
    costs: costs for each gamma, timed between the decodes. They are medians over the repeats,
      averaged over the batches at which they were timed.
    ratios: for each gamma, the time of autoregressive decoding / the time of speculative decoding
      in each repeat.
  """

  baseline: list[DecodeResult]
  speculative: dict[int, list[DecodeResult]]
  baseline_s: float
  speculative_s: dict[int, float]
  costs: dict[int, Costs]
  ratios: dict[int, np.ndarray]

  def speedup(self, gamma: int) -> float:
    """Return the speedup: the ratio of the tokens per second, computed from totals."""
    return self._tokens_ratio(gamma) * self.baseline_s / self.speculative_s[gamma]

  def spread(self, gamma: int) -> tuple[float, float] | tuple[None, None]:
    """Return the range of the speedup over the repeats (`timing.ratio_range`)."""
    return ratio_range(self.speedup(gamma), self._tokens_ratio(gamma) * self.ratios[gamma])

  def _tokens_ratio(self, gamma: int) -> float:
    return num_tokens(self.speculative[gamma]) / num_tokens(self.baseline)

  def round_s(self, gamma: int) -> float:
    """Return the mean time of a decoding round in seconds, without the prefill of both models."""
    costs, outputs = self.costs[gamma], self.speculative[gamma]
    prefill_s = len(outputs) * (costs.target_start + costs.draft_start)
    return (self.speculative_s[gamma] - prefill_s) / sum(int(o.num_rounds) for o in outputs)


def ignore_progress(done: int) -> None:
  """Do nothing."""


def measure_speed(
  pair: Pair,
  prompts: Sequence[Array],
  gammas: Sequence[int],
  settings: DecodeSettings,
  timing: Timing = Timing(),
  progress: Callable[[int], None] = ignore_progress,
) -> Speed:
  """Measure the speed of decoding autoregressively and with each gamma, interleaved.

  The speed of a shared machine changes within minutes. Therefore costs are timed between the
  decodes, at NUM_COSTED batches, or up to twice as many, spread evenly. If there are fewer batches,
  costs are timed at all of them.

  Args:
    pair: target and draft.
    prompts: padded prompts [B, P] of each batch.
    gammas: numbers of draft tokens per round to measure.
    settings: settings of decoding, except for the batch size, which `prompts` determine.
    timing: number of repeats, and baseline.
    progress: function that is called after each batch with the number of finished batches.
  """
  sampling, max_new_tokens, lenience = settings.sampling, settings.max_new_tokens, settings.lenience
  baseline = timing.baseline or own_baseline(pair)
  baseline_outputs: list[DecodeResult] = []
  speculative: dict[int, list[DecodeResult]] = {gamma: [] for gamma in gammas}
  text_s: list[np.ndarray] = []  # seconds of each text [repeats, calls]
  parts_s: list[np.ndarray] = []  # median seconds of the parts of rounds [parts]
  drafts = [pair.draft.build(sampling, chain(gamma)) for gamma in gammas]
  shapes = collections.Counter(prompt.shape for prompt in prompts)
  typical = next(p for p in prompts if p.shape == shapes.most_common(1)[0][0])
  parts = round_calls(pair, drafts, typical, sampling, max_new_tokens, lenience)
  decode_fns: list[Callable[..., DecodeResult]] = [
    functools.partial(baseline.decode, sampling=sampling),
    *(pair.decode_fn(sampling, chain(gamma), lenience) for gamma in gammas),
  ]
  every = max(1, len(prompts) // NUM_COSTED)
  first_row = 0
  for i, prompt in enumerate(prompts):
    rng = row_keys(settings.seed, first_row, len(prompt))
    first_row += len(prompt)
    arguments: dict[str, Any] = dict(prompt=prompt, rng=rng, max_new_tokens=max_new_tokens)
    decodes = [functools.partial(decode, **arguments) for decode in decode_fns]
    starts = start_calls(pair, drafts[0], prompt, max_new_tokens)
    calls: list[Callable[[], object]] = [*decodes, *starts]
    costed = parts if i % every == 0 else []
    seconds, outputs = interleaved_seconds(
      [functools.partial(timed, call) for call in (*calls, *costed)], timing.repeats
    )
    outputs = [require_finite(decoded) for decoded in jax.device_get(outputs[: len(decodes)])]
    baseline_outputs.append(outputs[0])
    for gamma, output in zip(gammas, outputs[1:]):
      speculative[gamma].append(output)
    text_s.append(seconds[:, : len(calls)])
    if costed:
      parts_s.append(np.median(seconds[:, len(calls) :], axis=0))
    progress(len(baseline_outputs))
  medians = np.median(text_s, axis=1)
  baseline_s, *speculative_s = map(float, np.sum(medians, axis=0)[:-2])
  start_s, round_s = np.mean(medians, axis=0)[-2:], np.mean(parts_s, axis=0)
  costs = round_costs(start_s.tolist(), round_s.tolist(), gammas)
  baseline_repeats_s, *speculative_repeats_s = np.sum(text_s, axis=0).T[:-2]  # [repeats] each
  return Speed(
    baseline_outputs,
    speculative,
    baseline_s,
    dict(zip(gammas, speculative_s)),
    dict(zip(gammas, costs)),
    {gamma: baseline_repeats_s / s for gamma, s in zip(gammas, speculative_repeats_s)},
  )
