"""Measurement of alpha, costs and speedup of a pair on texts."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array

from specdec_jax import theory
from specdec_jax.core.counts import (
  acceptance_by_position,
  acceptance_rate,
  identical,
  num_rounds,
  num_tokens,
)
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.data.quality import quality
from specdec_jax.errors import InputError, require_count, require_seed
from specdec_jax.measure.alpha import measure_alpha
from specdec_jax.measure.costs import Costs, operations_ratio
from specdec_jax.measure.machine import provenance
from specdec_jax.measure.records import Record
from specdec_jax.measure.roofline import memory_bandwidth, step_bytes
from specdec_jax.measure.speed import Timing, measure_speed, own_baseline
from specdec_jax.measure.sweep import Report, Step, measure_missing
from specdec_jax.pair import Pair


class References(NamedTuple):
  """Reference texts, and the metric that scores outputs against them.

  Attributes:
    texts: reference text of each input.
    metric: one of `quality.METRICS`.
    sources: the inputs, which some metrics need; `measure` sets them.
  """

  texts: Sequence[str]
  metric: str = "BLEU"
  sources: Sequence[str] | None = None


def measure(
  pair: Pair,
  texts: Sequence[str],
  results: str,
  settings: Sequence[DecodeSettings],
  gammas: Sequence[int],
  timing: Timing = Timing(),
  references: References | None = None,
) -> list[Record]:
  """Measure the combinations of sampling method and gamma that `results` lacks; append records.

  Args:
    pair: target and draft.
    texts: sources, decoded `batch_size` at a time.
    results: path from `records.open_results`.
    settings: settings that differ only in their sampling method.
    gammas: numbers of draft tokens per round; each is measured with each of the settings.
    timing: number of repeats, and the baseline of the speedups.
    references: texts against which the quality of the outputs is scored; None for no score.

  Returns:
    The records of all settings and gammas, whether they were measured now or before.

  Raises:
    InputError: there is nothing to measure, an argument is out of range, or the number of
      references differs from the number of texts.
  """
  return measure_missing(results, speed_steps(pair, texts, settings, gammas, timing, references))


def speed_steps(
  pair: Pair,
  texts: Sequence[str],
  settings: Sequence[DecodeSettings],
  gammas: Sequence[int],
  timing: Timing = Timing(),
  references: References | None = None,
) -> list[Step]:
  """Return the steps of a sweep that measure a pair on texts, one step per sampling method.

  Args:
    pair: target and draft.
    texts: sources, decoded `batch_size` at a time.
    settings: settings that differ only in their sampling method.
    gammas: numbers of draft tokens per round; each is measured with each of the settings.
    timing: number of repeats, and the baseline of the speedups.
    references: texts against which the quality of the outputs is scored; None for no score.

  Raises:
    InputError: there is nothing to measure, an argument is out of range, or the number of
      references differs from the number of texts.
  """
  require_count("repeats", timing.repeats)
  for each in settings:
    require_seed(each.seed)
    require_count("max_new_tokens", each.max_new_tokens)
    pair.require_batch_size(each.batch_size)
  if not (texts and gammas and settings):
    raise InputError("There is nothing to measure: no texts, no gammas, or no samplings.")
  if references is not None:
    if len(references.texts) != len(texts):
      raise InputError(f"There are {len(texts)} texts but {len(references.texts)} references.")
    # An unknown metric or a missing package fails now, not after hours.
    references = references._replace(sources=texts)
    quality(references.metric, references.texts[:1], references.texts[:1], texts[:1])
  baseline = timing.baseline or own_baseline(pair)
  timing = timing._replace(baseline=baseline)
  batch_size = settings[0].batch_size
  prompts = [pair.prompt(texts[i : i + batch_size]) for i in range(0, len(texts), batch_size)]
  return [
    Step(
      f"{pair.draft.name}, temperature {each.sampling.temperature:g}",
      settings_to_measure(pair, texts, [each], gammas, baseline.name),
      functools.partial(_measure, pair, prompts, each, timing, references),
    )
    for each in settings
  ]


def settings_to_measure(
  pair: Pair,
  texts: Sequence[str],
  settings: Iterable[DecodeSettings],
  gammas: Sequence[int],
  baseline: str = "own",
) -> list[Record]:
  """Return a record without measurements for each combination of settings and gamma.

  Args:
    pair: target and draft.
    texts: sources.
    settings: settings of decoding.
    gammas: numbers of draft tokens per round.
    baseline: name of the baseline.
  """
  device = jax.devices()[0]
  num_devices = [len(x.sharding.device_set) for x in jax.tree.leaves(pair.target.params)]
  return [
    Record(
      task=pair.task,
      target=pair.target.name,
      draft=pair.draft.name,
      target_path=pair.target.path,
      draft_path=pair.draft.path,
      temperature=each.sampling.temperature,
      top_k=each.sampling.top_k,
      top_p=each.sampling.top_p,
      gamma=gamma,
      lenience=each.lenience,
      verifier=pair.verifier_name,
      batch_size=each.batch_size,
      acceptance="measured" if pair.simulated_alpha is None else "simulated",
      num_examples=len(texts),
      inputs_sha256=hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12],
      max_new_tokens=each.max_new_tokens,
      baseline=baseline,
      platform=device.platform,
      device_kind=device.device_kind,
      num_devices=max(num_devices, default=1),
      dtype=pair.dtype,
      kernels=pair.kernels,
      seed=each.seed,
      jax_version=jax.__version__,
      **provenance(),
    )
    for each in settings
    for gamma in gammas
  ]


def _measure(
  pair: Pair,
  prompts: Sequence[Array],
  settings: DecodeSettings,
  timing: Timing,
  references: References | None,
  wanted: Sequence[Record],
  report: Report,
) -> Iterator[Record]:
  """Measure one sampling method at several gammas, and yield a record for each gamma."""
  since = time.perf_counter()
  sampling, lenience = settings.sampling, settings.lenience
  gammas = [record.gamma for record in wanted]
  speed = measure_speed(
    pair, prompts, gammas, settings, timing, lambda done: report(done / len(prompts))
  )
  alpha = pair.simulated_alpha
  acceptance: dict[str, Any] = {}
  if (
    pair.simulated_alpha is None
    and not pair.draft.build(sampling, chain(gammas[0])).depends_on_outcomes
  ):
    measured_alpha = measure_alpha(pair, prompts, speed.baseline, sampling, lenience)
    alpha = measured_alpha.alpha.mean
    acceptance = dict(
      alpha_low=measured_alpha.alpha.low,
      alpha_high=measured_alpha.alpha.high,
      beta_lag1=measured_alpha.lag1,
      total_variation=measured_alpha.change,
      rejection_sampling_rate=measured_alpha.rejection,
    )
  is_own_baseline = timing.baseline is None or timing.baseline.name == "own"
  is_comparable = sampling.temperature == 0 and pair.simulated_alpha is None
  c_hat = operations_ratio(pair, prompts[0], sampling)
  bandwidth = memory_bandwidth()
  target_ids = {id(x) for x in jax.tree.leaves(pair.target.params)}
  draft_arrays = [x for x in jax.tree.leaves(pair.draft.params) if id(x) not in target_ids]

  def quality_of(outputs: list[DecodeResult]) -> float | None:
    if references is None:
      return None
    texts = [pair.vocabulary.decode(row) for batch in outputs for row in batch.tokens]
    return quality(references.metric, texts, references.texts, references.sources)

  baseline_quality = quality_of(speed.baseline)
  baseline_passes = sum(int(o.num_rounds) for o in speed.baseline)
  for setting in wanted:
    gamma = setting.gamma
    low, high = speed.spread(gamma)
    outputs, costs = speed.speculative[gamma], speed.costs[gamma]
    round_s = speed.round_s(gamma)
    explained_s = gamma * costs.draft_step + costs.verify + costs.accept
    read = step_bytes(pair, gamma, prompts[0], sampling, settings.max_new_tokens)
    length = num_tokens(outputs) / num_rounds(outputs)
    measured = dataclasses.replace(
      setting,
      num_tokens=num_tokens(outputs),
      rounds=num_rounds(outputs),
      alpha=alpha,
      acceptance_rate=acceptance_rate(outputs),
      acceptance_by_position=acceptance_by_position(outputs),
      tokens_per_round=length,
      target_prefill_ms=1e3 * costs.target_start,
      draft_prefill_ms=1e3 * costs.draft_start,
      target_step_ms=1e3 * costs.target_step,
      draft_step_ms=1e3 * costs.draft_step,
      c=costs.c,
      verify_ms=1e3 * costs.verify,
      accept_ms=1e3 * costs.accept,
      unaccounted_ms=1e3 * (round_s - explained_s),
      round_ms=1e3 * round_s,
      verify_cost=costs.v,
      draft_mb=1e-6 * sum(x.nbytes for x in draft_arrays),
      memory_gb_per_s=1e-9 * bandwidth,
      target_step_mb=1e-6 * read.target_step,
      draft_step_mb=1e-6 * read.draft_step,
      verify_mb=1e-6 * read.verify,
      operations_ratio=c_hat,
      operations_factor=(
        None if alpha is None else float(theory.operations_factor(alpha, gamma, c_hat))
      ),
      baseline_pass_ms=1e3 * speed.baseline_s / baseline_passes,
      baseline_tokens_per_s=num_tokens(speed.baseline) / speed.baseline_s,
      speculative_tokens_per_s=num_tokens(outputs) / speed.speculative_s[gamma],
      speedup=speed.speedup(gamma),
      speedup_low=low,
      speedup_high=high,
      identical=identical(speed.baseline, outputs) if is_comparable else None,
      metric=None if references is None else references.metric,
      quality=quality_of(outputs),
      baseline_quality=baseline_quality,
      seconds=time.perf_counter() - since,
      **acceptance,
    )
    draft = pair.draft.build(sampling, chain(gamma))
    if draft.verify_lengths:  # the costs apply only to rounds that propose all tokens
      yield dataclasses.replace(measured, c=None, draft_step_ms=None)
    elif not is_own_baseline:
      yield measured
    elif alpha is None or draft.tree != chain(gamma):
      yield dataclasses.replace(
        measured, predicted_measured_cost=length / (gamma * costs.c + costs.v)
      )
    else:
      predicted = functools.partial(theory.walltime_improvement, alpha, gamma, costs.c)
      yield dataclasses.replace(
        measured,
        predicted_theorem8=float(predicted(1.0)),
        predicted_measured_cost=float(predicted(costs.v)),
        predicted_finite_length=_predicted_finite_length(speed.baseline, alpha, gamma, costs),
      )


def _predicted_finite_length(
  baseline: list[DecodeResult], alpha: float, gamma: int, costs: Costs
) -> float:
  """Predict the speedup for texts of finite length, with the lengths of the baseline's outputs."""
  lengths = [output.lengths.tolist() for output in baseline]
  return theory.text_improvement(
    alpha,
    gamma,
    costs.c,
    costs.v,
    lengths,
    target_start=costs.target_start / costs.target_step,
    draft_start=costs.draft_start / costs.target_step,
  )
