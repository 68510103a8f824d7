"""Measured settings of a pair on texts: alpha, costs and speedup, each setting a record."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence

import jax

from specdec_jax import records
from specdec_jax.core import theory
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.counts import (
  acceptance_by_position,
  acceptance_rate,
  identical,
  num_rounds,
  num_tokens,
)
from specdec_jax.errors import InputError, require_count, require_seed
from specdec_jax.machine import provenance
from specdec_jax.measurement.alpha import measure_alpha
from specdec_jax.measurement.costs import Costs, operations_ratio
from specdec_jax.measurement.quality import quality
from specdec_jax.measurement.roofline import memory_bandwidth, step_bytes
from specdec_jax.measurement.speed import Baseline, measure_speed, own_baseline
from specdec_jax.pairs import Pair, verifier_name
from specdec_jax.records import Record


def measure(
  pair: Pair,
  texts: Sequence[str],
  results: str,
  samplings: Iterable[Sampling],
  gammas: Sequence[int],
  batch_size: int = 1,
  max_new_tokens: int = 64,
  repeats: int = 5,
  seed: int = 0,
  lenience: float = 1.0,
  progress: Callable[[Sampling, int, int], None] = lambda sampling, done, total: None,
  baseline: Baseline | None = None,
  references: Sequence[str] | None = None,
  metric: str = "BLEU",
) -> list[Record]:
  """Append a record to file `results` for each sampling and gamma that it lacks.

  Args:
    pair: what decodes; see `pairs.Pair`.
    texts: sources, decoded `batch_size` at a time.
    results: as `records.open_results` gave it.
    samplings: each measured with each of `gammas`.
    gammas: guesses a round.
    batch_size: rows decoded together.
    max_new_tokens: limit for each row.
    repeats: of each timed decode, interleaved.
    seed: of all sampling.
    lenience: l of Appendix A.5; 1 for exactness.
    progress: called with the sampling, and how many of all batches are done.
    baseline: what speed is compared with; None for our own plain decoding.
    references: for each text an output to compare with, if there are any.
    metric: of `quality.METRICS`, where there are references.

  Returns:
    The records of all these settings, measured now or before.
  """
  require_seed(seed)
  require_count("max_new_tokens", max_new_tokens)
  require_count("repeats", repeats)
  pair.require_batch_size(batch_size)
  baseline = baseline or own_baseline(pair)
  samplings = [*samplings]
  if not (texts and gammas and samplings):
    raise InputError("There is nothing to measure: no texts, no gammas, or no samplings.")
  if references is not None and len(references) != len(texts):
    raise InputError(f"There are {len(texts)} texts but {len(references)} references.")
  if references is not None:  # that it can be told is known before hours are spent
    quality(metric, references[:1], references[:1])
  prompts = [pair.prompt(texts[i : i + batch_size]) for i in range(0, len(texts), batch_size)]
  settings = settings_to_measure(
    pair, texts, samplings, gammas, batch_size, max_new_tokens, seed, lenience, baseline.name
  )
  for i, sampling in enumerate(dict.fromkeys(map(_sampling, records.missing(results, settings)))):
    if i:  # its programs are others than the last one's, and a process may map only so many
      jax.clear_caches()
    todo = [s for s in records.missing(results, settings) if _sampling(s) == sampling]
    settings_of_speed = max_new_tokens, repeats, progress, baseline
    for record in _measure(pair, prompts, sampling, todo, *settings_of_speed, references, metric):
      records.append(results, record)
  wanted = {records.key(s) for s in settings}
  return [r for r in records.read(results) if records.key(r) in wanted]


def settings_to_measure(
  pair: Pair,
  texts: Sequence[str],
  samplings: Iterable[Sampling],
  gammas: Sequence[int],
  batch_size: int,
  max_new_tokens: int,
  seed: int,
  lenience: float,
  baseline: str = "own",
) -> list[Record]:
  """A record for each sampling and gamma, with nothing measured yet; arguments as `measure`."""
  device = jax.devices()[0]
  shared_by = [len(x.sharding.device_set) for x in jax.tree.leaves(pair.target_params)]
  return [
    Record(
      task=pair.task,
      target=pair.target_name,
      draft=pair.draft_name,
      target_path=pair.target_path,
      draft_path=pair.draft_path,
      temperature=sampling.temperature,
      top_k=sampling.top_k,
      top_p=sampling.top_p,
      gamma=gamma,
      lenience=lenience,
      verifier=verifier_name(pair.verifier),
      batch_size=batch_size,
      acceptance="measured" if pair.simulated_alpha is None else "simulated",
      num_examples=len(texts),
      inputs_sha256=hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12],
      max_new_tokens=max_new_tokens,
      baseline=baseline,
      platform=device.platform,
      device_kind=device.device_kind,
      num_devices=max(shared_by, default=1),
      dtype=pair.dtype,
      kernels=pair.kernels,
      seed=seed,
      jax_version=jax.__version__,
      **provenance(),
    )
    for sampling in samplings
    for gamma in gammas
  ]


def _sampling(setting: Record) -> Sampling:
  return Sampling(setting.temperature, setting.top_k, setting.top_p)


def _measure(
  pair, prompts, sampling, settings, max_new_tokens, repeats, progress, baseline, references, metric
):
  """The settings, which differ in gamma only, as measured records."""
  since = time.perf_counter()
  gammas = [s.gamma for s in settings]
  speed = measure_speed(
    pair,
    prompts,
    sampling,
    gammas,
    max_new_tokens,
    repeats,
    settings[0].seed,
    settings[0].lenience,
    progress=lambda done: progress(sampling, done, len(prompts)),
    baseline=baseline,
  )
  lenience = settings[0].lenience
  alpha, acceptance = pair.simulated_alpha, {}
  if (
    pair.simulated_alpha is None and not pair.draft(sampling, chain(gammas[0])).depends_on_outcomes
  ):
    of_text = measure_alpha(pair, prompts, speed.baseline, sampling, lenience)
    alpha = of_text.alpha.mean
    acceptance = dict(
      alpha_low=of_text.alpha.low,
      alpha_high=of_text.alpha.high,
      beta_lag1=of_text.lag1,
      total_variation=of_text.change,
    )
  own = baseline.name == "own"
  compared = sampling.temperature == 0 and pair.simulated_alpha is None
  c_hat = operations_ratio(pair, prompts[0], sampling)
  bandwidth = memory_bandwidth()
  of_target = {id(x) for x in jax.tree.leaves(pair.target_params)}
  of_draft = [x for x in jax.tree.leaves(pair.draft_params) if id(x) not in of_target]

  def quality_of(outputs: list[DecodeResult]) -> float | None:
    if references is None:
      return None
    texts = [pair.vocabulary.decode(row) for batch in outputs for row in batch.tokens]
    return quality(metric, texts, references)

  baseline_quality = quality_of(speed.baseline)
  for setting in settings:
    gamma = setting.gamma
    low, high = speed.spread(gamma)
    outputs, costs = speed.speculative[gamma], speed.costs[gamma]
    round_s = speed.round_s(gamma)
    rest = round_s - gamma * costs.draft_step - costs.verify - costs.accept
    read = step_bytes(pair, gamma, prompts[0], sampling, max_new_tokens)
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
      unaccounted_ms=1e3 * rest,
      round_ms=1e3 * round_s,
      verify_cost=costs.v,
      draft_mb=1e-6 * sum(x.nbytes for x in of_draft),
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
      identical=identical(speed.baseline, outputs) if compared else None,
      metric=None if references is None else metric,
      quality=quality_of(outputs),
      baseline_quality=baseline_quality,
      seconds=time.perf_counter() - since,
      **acceptance,
    )
    draft = pair.draft(sampling, chain(gamma))
    if draft.verify_lengths:  # costs are of rounds in which all guesses are made
      yield dataclasses.replace(measured, c=None, draft_step_ms=None)
    elif not own:
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
        predicted_finite_length=_predicted_text(speed.baseline, alpha, gamma, costs),
      )


def _predicted_text(baseline, alpha: float, gamma: int, costs: Costs) -> float:
  """`theory.text_improvement` for the baseline's own lengths."""
  lengths = [o.lengths.tolist() for o in baseline]
  starts = costs.target_start / costs.target_step, costs.draft_start / costs.target_step
  return theory.text_improvement(alpha, gamma, costs.c, costs.v, lengths, *starts)
