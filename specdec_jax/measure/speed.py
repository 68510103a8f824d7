"""Measured speedup, alpha and costs of a pair on texts.

The same texts are decoded with and without speculation, interleaved.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from specdec_jax import theory
from specdec_jax.core.counts import (
  acceptance_by_position,
  acceptance_rate,
  identical,
  num_rounds,
  num_tokens,
  require_finite,
)
from specdec_jax.core.decode import Decoder, DecodeSettings, NullDraft
from specdec_jax.core.memory import num_bytes
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import AnyPair, DecodeResult, Draft, Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.quality import quality
from specdec_jax.errors import InputError, require_count, require_seed
from specdec_jax.measure.alpha import measure_alpha
from specdec_jax.measure.costs import (
  Costs,
  interleaved_seconds,
  ratio_range,
  round_calls,
  round_costs,
  start_calls,
)
from specdec_jax.measure.records import Outputs, Record, Times, settings_to_measure
from specdec_jax.measure.roofline import memory_bandwidth, operations_ratio, step_bytes
from specdec_jax.measure.sweep import Report, Step

NUM_COSTED = 24  # number of batches at which costs are timed


class Baseline(NamedTuple):
  """Autoregressive decoding of a pair's target; speedups are relative to its speed."""

  name: str  # of the implementation, for records
  decode: Callable[..., DecodeResult]  # of (prompt, rng, *, max_new_tokens, sampling)


def own_baseline(pair: AnyPair) -> Baseline:
  """Return a baseline that decodes autoregressively with this package."""

  def decode(prompt: Array, rng: Array, *, max_new_tokens: int, sampling: Sampling) -> DecodeResult:
    decoder = Decoder(
      pair.target.model, NullDraft(), TokenVerifier(sampling), pair.vocabulary.eos_id
    )
    params = Params(pair.target.params)
    return decoder.run(params, prompt, rng, max_new_tokens=max_new_tokens)

  return Baseline("own", decode)


def speed_steps(
  pair: AnyPair,
  texts: Sequence[str],
  settings: Sequence[DecodeSettings],
  gammas: Sequence[int],
  repeats: int = 5,
  baseline: Baseline | None = None,
  references: Sequence[str] | None = None,
  metric: str = "BLEU",
) -> list[Step]:
  """Return the steps of a sweep that measure a pair on texts, one step per sampling method.

  Args:
    texts: sources, decoded `batch_size` at a time.
    settings: settings that differ only in their sampling method.
    gammas: numbers of draft tokens per round; each is measured with each of the settings.
    repeats: number of timed decodes of each text, interleaved.
    baseline: None for this package's autoregressive decoding.
    references: reference text of each source, to score outputs against with `metric`.
    metric: one of `quality.METRICS`.

  Raises:
    InputError: there is nothing to measure, an argument is out of range, or the number of
      references differs from the number of texts.
  """
  require_count("repeats", repeats)
  for each in settings:
    require_seed(each.seed)
    require_count("max_new_tokens", each.max_new_tokens)
    pair.require_batch_size(each.batch_size)
  if not (texts and gammas and settings):
    raise InputError("There is nothing to measure: no texts, no gammas, or no samplings.")
  score: Callable[[Sequence[DecodeResult]], float] | None = None
  if references is not None:
    if len(references) != len(texts):
      raise InputError(f"There are {len(texts)} texts but {len(references)} references.")
    # An unknown metric or a missing package fails now, not after hours.
    quality(metric, references[:1], references[:1], texts[:1])

    def score(outputs: Sequence[DecodeResult]) -> float:
      decoded = [pair.vocabulary.decode(row) for batch in outputs for row in batch.tokens]
      return quality(metric, decoded, references, texts)

  baseline = baseline or own_baseline(pair)
  batch_size = settings[0].batch_size
  prompts = [pair.prompt(texts[i : i + batch_size]) for i in range(0, len(texts), batch_size)]

  def measure(each: DecodeSettings, wanted: Sequence[Record], report: Report) -> Iterator[Record]:
    since, gammas = time.perf_counter(), [setting.settings.gamma for setting in wanted]
    speed = measure_speed(pair, prompts, gammas, each, repeats, baseline, report)
    scores = {} if score is None else dict(metric=metric, baseline_quality=score(speed.baseline))
    for record in _records(pair, prompts, each, wanted, speed):
      if score is not None:
        scores["quality"] = score(speed.speculative[record.settings.gamma])
      yield record.replace(seconds=time.perf_counter() - since, **scores)

  return [
    Step(
      f"{pair.draft.name}, temperature {each.sampling.temperature:g}",
      settings_to_measure(pair, texts, [each], gammas, baseline.name, repeats),
      functools.partial(measure, each),
    )
    for each in settings
  ]


class Speed(NamedTuple):
  """Outputs, total times and costs of decoding the same texts with and without speculation.

  Times are sums over batches of the median over repeats. Costs are medians over the repeats,
  averaged over batches.
  """

  baseline: list[DecodeResult]  # outputs of each batch, on the host
  speculative: dict[int, list[DecodeResult]]  # for each gamma
  baseline_s: float
  speculative_s: dict[int, float]
  costs: dict[int, Costs]
  ratios: dict[int, np.ndarray]  # [repeats], time of the baseline / time of speculative decoding

  def speedup(self, gamma: int) -> float:
    """Return the speedup: the ratio of the tokens per second, computed from totals."""
    return self._tokens_ratio(gamma) * self.baseline_s / self.speculative_s[gamma]

  def spread(self, gamma: int) -> tuple[float, float] | tuple[None, None]:
    """Return the range of the speedup over the repeats (`costs.ratio_range`)."""
    return ratio_range(self.speedup(gamma), self._tokens_ratio(gamma) * self.ratios[gamma])

  def _tokens_ratio(self, gamma: int) -> float:
    return num_tokens(self.speculative[gamma]) / num_tokens(self.baseline)

  def round_s(self, gamma: int) -> float:
    """Return the mean time of a decoding round in seconds, without the prefill of both models."""
    costs, outputs = self.costs[gamma], self.speculative[gamma]
    prefill_s = len(outputs) * (costs.target_start + costs.draft_start)
    return (self.speculative_s[gamma] - prefill_s) / sum(int(o.num_rounds) for o in outputs)


def measure_speed(
  pair: AnyPair,
  prompts: Sequence[Array],
  gammas: Sequence[int],
  settings: DecodeSettings,
  repeats: int,
  baseline: Baseline,
  report: Report = lambda share: None,
) -> Speed:
  """Measure the speed of decoding autoregressively and with each gamma, interleaved.

  The speed of a shared machine changes within minutes, so costs are timed between the decodes, at
  NUM_COSTED to twice as many batches, spread evenly, or at all batches if there are fewer.
  """
  sampling, max_new_tokens, lenience = settings.sampling, settings.max_new_tokens, settings.lenience
  drafts = [pair.draft.build(sampling, chain(gamma)) for gamma in gammas]
  shapes = collections.Counter(prompt.shape for prompt in prompts)
  typical = next(p for p in prompts if p.shape == shapes.most_common(1)[0][0])
  parts = round_calls(pair, drafts, typical, sampling, max_new_tokens, lenience)
  decodes = {
    "baseline": functools.partial(baseline.decode, sampling=sampling),
    "speculative": {gamma: pair.decode_fn(sampling, chain(gamma), lenience) for gamma in gammas},
  }
  decoded, decode_s, start_s, part_s, first_row = [], [], [], [], 0
  every = max(1, len(prompts) // NUM_COSTED)
  for i, prompt in enumerate(prompts):
    rng = row_keys(settings.seed, first_row, len(prompt))
    first_row += len(prompt)
    bind = functools.partial(
      functools.partial, prompt=prompt, rng=rng, max_new_tokens=max_new_tokens
    )
    calls = {
      "decode": jax.tree.map(bind, decodes),
      "start": start_calls(pair, drafts[0], prompt, max_new_tokens),
      "parts": None if i % every else parts,
    }
    seconds, results = interleaved_seconds(calls, repeats)
    outputs = jax.device_get(results["decode"])
    jax.tree.map(require_finite, outputs, is_leaf=lambda each: isinstance(each, DecodeResult))
    decoded.append(outputs)
    decode_s.append(seconds["decode"])
    start_s.append(seconds["start"])
    part_s += [] if i % every else [seconds["parts"]]
    report((i + 1) / len(prompts))
  total_s, repeat_s = _over_batches(np.sum, decode_s), jax.tree.map(_sum, *decode_s)
  costs = round_costs(_over_batches(np.mean, start_s), _over_batches(np.mean, part_s), gammas)
  return Speed(
    [each["baseline"] for each in decoded],
    {gamma: [each["speculative"][gamma] for each in decoded] for gamma in gammas},
    total_s["baseline"],
    total_s["speculative"],
    dict(zip(gammas, costs)),
    {gamma: repeat_s["baseline"] / s for gamma, s in repeat_s["speculative"].items()},
  )


def _over_batches(reduce: Callable[..., Any], seconds: Sequence[Any]) -> Any:
  return jax.tree.map(lambda *each: float(reduce(np.median(each, axis=1))), *seconds)


def _sum(*seconds: np.ndarray) -> np.ndarray:
  return np.sum(seconds, axis=0)


def _records(
  pair: AnyPair,
  prompts: Sequence[Array],
  settings: DecodeSettings,
  wanted: Sequence[Record],
  speed: Speed,
) -> Iterator[Record]:
  sampling = settings.sampling
  # Corollary 6 and the closed forms are about Algorithm 1.
  is_algorithm_1 = type(pair.verifier_for(sampling)) is TokenVerifier
  alpha, acceptance = pair.simulated_alpha if is_algorithm_1 else None, Outputs()
  drafts = {gamma: pair.draft.build(sampling, chain(gamma)) for gamma in speed.speculative}
  depends = any(draft.depends_on_outcomes for draft in drafts.values())
  if is_algorithm_1 and alpha is None and not depends:
    acceptance = measure_alpha(pair, prompts, speed.baseline, sampling, settings.lenience)
    alpha = acceptance.alpha
  is_comparable = sampling.temperature == 0 and pair.simulated_alpha is None
  c_hat = operations_ratio(pair, prompts[0], sampling)
  bandwidth = memory_bandwidth()
  target_ids = {id(x) for x in jax.tree.leaves(pair.target.params)}
  draft_arrays = [x for x in jax.tree.leaves(pair.draft.params) if id(x) not in target_ids]
  for setting in wanted:
    gamma = setting.settings.gamma
    low, high = speed.spread(gamma)
    outputs, costs = speed.speculative[gamma], speed.costs[gamma]
    round_s = speed.round_s(gamma)
    unaccounted_s = round_s - (gamma * costs.draft_step + costs.verify + costs.accept)
    read = step_bytes(pair, gamma, prompts[0], sampling, settings.max_new_tokens)
    yield dataclasses.replace(
      setting,
      outputs=dataclasses.replace(
        acceptance,
        alpha=alpha,
        num_tokens=num_tokens(outputs),
        rounds=num_rounds(outputs),
        acceptance_rate=acceptance_rate(outputs),
        acceptance_by_position=acceptance_by_position(outputs),
        tokens_per_round=num_tokens(outputs) / num_rounds(outputs),
        identical=identical(speed.baseline, outputs) if is_comparable else None,
      ),
      times=Times(
        target_prefill_ms=1e3 * costs.target_start,
        draft_prefill_ms=1e3 * costs.draft_start,
        target_step_ms=_ms(costs.target_step),
        draft_step_ms=_ms(costs.draft_step),
        c=costs.c if costs.are_measured else None,
        verify_ms=_ms(costs.verify),
        accept_ms=_ms(costs.accept),
        unaccounted_ms=1e3 * unaccounted_s if costs.are_measured and round_s > 0 else None,
        round_ms=_ms(round_s),
        verify_cost=costs.v if costs.are_measured else None,
        draft_mb=1e-6 * sum(map(num_bytes, draft_arrays)),
        memory_gb_per_s=1e-9 * bandwidth,
        target_step_mb=1e-6 * read.target_step,
        draft_step_mb=1e-6 * read.draft_step,
        verify_mb=1e-6 * read.verify,
        operations_ratio=c_hat,
        operations_factor=(
          None if alpha is None else float(theory.operations_factor(alpha, gamma, c_hat))
        ),
        baseline_pass_ms=1e3 * speed.baseline_s / sum(int(o.num_rounds) for o in speed.baseline),
        baseline_tokens_per_s=num_tokens(speed.baseline) / speed.baseline_s,
        speculative_tokens_per_s=num_tokens(outputs) / speed.speculative_s[gamma],
        speedup=speed.speedup(gamma),
        speedup_low=low,
        speedup_high=high,
      ),
    ).replace(**_predictions(drafts[gamma], setting, speed, alpha))


def _ms(seconds: float) -> float | None:
  """Return milliseconds; None for a part that is so short that noise makes its time negative."""
  return 1e3 * seconds if seconds >= 0 else None


def _predictions(
  draft: Draft, setting: Record, speed: Speed, alpha: float | None
) -> dict[str, float | None]:
  """Return the predicted speedups of a record, and None for times that mean nothing.

  Without alpha, and for trees, the prediction uses the acceptance length of these rounds. If a part
  of a round is too short to be timed, there is no prediction.
  """
  gamma = setting.settings.gamma
  outputs, costs = speed.speculative[gamma], speed.costs[gamma]
  if draft.tree.verify_lengths:  # the costs apply only to rounds that propose all tokens
    return dict(c=None, draft_step_ms=None)
  if setting.settings.baseline != "own" or not costs.are_measured:
    return {}
  if alpha is None or draft.tree != chain(gamma):
    length = num_tokens(outputs) / num_rounds(outputs)
    return dict(predicted_measured_cost=length / (gamma * costs.c + costs.v))
  predict = functools.partial(theory.walltime_improvement, alpha, gamma, costs.c)
  return dict(
    predicted_theorem8=float(predict(1.0)),
    predicted_measured_cost=float(predict(costs.v)),
    predicted_finite_length=theory.text_improvement(
      alpha,
      gamma,
      costs.c,
      costs.v,
      [output.lengths.tolist() for output in speed.baseline],
      *costs.prefill_steps,
    ),
  )
