"""Comparison of policies that choose gamma (Section 3.5).

Texts are decoded with each policy in turn: autoregressive decoding, fixed gammas, 'auto' (the gamma
that `calibrate` chooses), drafts that stop early, and the adaptive gamma (`AdaptiveDecoder`). The
policies are compared with oracles that know which draft tokens are accepted.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gamma.adaptive import AdaptiveDecoder, ScheduledDecoder
from experiments.gamma.oracles import acceptances, oracles
from experiments.gamma.stopping import auc, certainties, in_a_row, stopped_speedup
from specdec_jax.contrib.stopping import stopping_draft
from specdec_jax.core.counts import identical, num_rounds, num_tokens, require_finite
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.errors import InputError
from specdec_jax.measure.calibrate import GAMMAS, Calibration, calibrate
from specdec_jax.measure.costs import interleaved_medians
from specdec_jax.measure.records import Record, read, settings_to_measure
from specdec_jax.measure.sweep import Report, Step, sweep
from specdec_jax.measure.tables import (
  GAMMA,
  LENGTH,
  SPEEDUP,
  TEMPERATURE,
  Column,
  Table,
  records_table,
)
from specdec_jax.pair import Pair

COLUMNS = (
  TEMPERATURE,
  Column("batch", "settings.batch_size"),
  Column("policy", lambda r: r.models.draft.rpartition(", ")[2]),
  GAMMA,
  Column("alpha", "outputs.alpha", ".2f", "acceptance rate over the target's text"),
  LENGTH,
  Column(
    "predicted",
    "times.predicted_finite_length",
    ".2f",
    "speedup over autoregressive decoding that the policy predicts",
  ),
  SPEEDUP,
  Column(
    "AUC",
    "outputs.auc",
    ".3f",
    "area under the ROC curve of the policy's score as a predictor of acceptance",
  ),
)

PRIOR_DRAFT_TOKENS = (
  25.0  # weight of the calibration's alpha, in draft tokens, in the adaptive policy
)


GOAL = 0.7  # acceptance rate that the adaptive threshold keeps


class Policy(NamedTuple):
  """Policy that chooses gamma.

  Attributes:
    name: name of the policy in the table. In records, it follows the name of the draft.
    gamma: largest gamma that the policy can choose; 0 for autoregressive decoding.
    decode: function of (prompt, rng, *, max_new_tokens) that returns a `DecodeResult`.
    predicted: predicted speedup; None if there is no closed form.
  """

  name: str
  gamma: int
  decode: Callable[..., DecodeResult]
  predicted: float | None


def gamma(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  gammas: Sequence[int] = (1, 2, 3, 5, 7, 10),
  temperatures: Sequence[float] = (0.0, 1.0),
  batch_sizes: Sequence[int] = (1, 8),
  thresholds: Sequence[float] = (0.2, 0.4, 0.6),
  max_new_tokens: int = 64,
  repeats: int = 3,
  seed: int = 0,
) -> None:
  """Measure policies that choose gamma; print a table and append records.

  The policies are measured at each temperature and batch size. The field `draft` of a record ends
  with the name of the policy. Two kinds of records are computed from the outputs of autoregressive
  decoding, at batch size 1 only:

  - 'oracle ...' has the predicted speedup of an oracle, with the measured costs. The oracle knows
    which draft tokens are accepted and chooses the best gamma for all texts, for each text, or for
    each round.
  - 'confidence: ...' has the AUC of a confidence score of the draft. The score predicts whether one
    draft token (gamma 1) or three draft tokens in a row (gamma 3) are accepted.

  'auto' is decoded separately, even if another policy has the same gamma. The difference between
  the two measurements is then noise.

  Args:
    pair: target and draft; see `load.load_pair`.
    texts: sources, padded to one width. The calibration uses some of them.
    output_dir: folder for `results.jsonl`; settings recorded there already are not measured again.
    gammas: fixed gammas; each is measured. The adaptive policy chooses among them.
    temperatures: sampling temperatures; each is measured, and 0 is argmax.
    batch_sizes: numbers of texts decoded together; each is measured.
    thresholds: thresholds of drafts that stop early (`contrib.stopping`); each is measured. An
      adaptive threshold starts at the first of them. Give none if the draft is not a model.
    max_new_tokens: maximum number of tokens of each output.
    repeats: number of timed decodes of each text, interleaved.
    seed: random seed of all sampling.

  Raises:
    InputError: a batch size is out of range, or a gamma has no measured costs.
  """
  for size in batch_sizes:
    pair.require_batch_size(size)
  for fixed in gammas:
    if fixed > GAMMAS[-1]:
      raise InputError(f"gamma is {fixed}; the calibration knows costs up to {GAMMAS[-1]}.")

  def steps() -> Iterator[Step]:
    for sampling, batch_size in itertools.product(map(Sampling, temperatures), batch_sizes):
      settings = DecodeSettings(sampling, batch_size, max_new_tokens, seed)
      most = [max(gammas)]
      (setting,) = settings_to_measure(pair, texts, [settings], most, repeats=repeats)
      yield Step(
        f"temperature {sampling.temperature:g}, batch {batch_size}",
        # This record is the last, so that a run that was interrupted measures all policies again.
        [_policy_record(setting, "adaptive", max(gammas))],
        functools.partial(measure, settings, setting),
      )

  def measure(
    settings: DecodeSettings, setting: Record, _: Sequence[Record], report: Report
  ) -> Iterator[Record]:
    calibration = calibrate(pair, texts, settings)
    temperature = settings.sampling.temperature
    print(f"temperature {temperature:g}, batch {settings.batch_size}: {calibration}.", flush=True)
    study = _Study(pair, settings.sampling, gammas, thresholds, calibration)
    return _measure(study, texts, setting, repeats, report)

  results = os.path.join(output_dir, "results.jsonl")  # includes policies that calibration chose
  sweep(output_dir, steps, lambda measured: [gamma_table(read(results))])


class _Study(NamedTuple):
  """Definition of the policies to compare, for one sampling method and one batch size.

  Attributes:
    pair: target and draft.
    sampling: sampling method.
    gammas: fixed gammas.
    thresholds: confidence thresholds of drafts that stop early.
    calibration: result of `calibrate`: the gamma of 'auto', alpha, and the measured costs.
  """

  pair: Pair
  sampling: Sampling
  gammas: Sequence[int]
  thresholds: Sequence[float]
  calibration: Calibration


def _policy_record(setting: Record, name: str, gamma: int, **measured: Any) -> Record:
  """Return the record of a policy, with measurements."""
  draft = f"{setting.models.draft}, {name}"
  return setting.replace(draft=draft, gamma=gamma, **measured)


def _policies(study: _Study) -> list[Policy]:
  """Return all policies; autoregressive decoding is the first, and the adaptive policy the last."""
  pair, sampling, gammas, thresholds, calibration = study
  drafts = tuple(pair.draft.build(sampling, chain(gamma)) for gamma in gammas)

  def fixed(name: str, gamma: int) -> Policy:
    return Policy(name, gamma, pair.decode_fn(sampling, chain(gamma)), calibration.speedups[gamma])

  def stopping(name: str, threshold: float, goal: float | None = None) -> Policy:
    draft = stopping_draft(pair.target, lambda target: pair.draft, threshold, goal)
    decode = pair.with_draft(draft).decode_fn(sampling, chain(max(gammas)))
    return Policy(name, max(gammas), decode, None)

  decoder = AdaptiveDecoder(
    pair.target.model, drafts, pair.verifier_for(sampling), pair.vocabulary.eos_id
  )
  adaptive = functools.partial(
    decoder.run,
    pair.params,
    round_costs=jnp.array([calibration.round_cost(gamma) for gamma in gammas]),
    prior=PRIOR_DRAFT_TOKENS * jnp.array([calibration.alpha, 1 - calibration.alpha]),
  )
  ordered = tuple(sorted(drafts, key=lambda draft: draft.tree.depth))
  schedule = ScheduledDecoder(pair.target.model, ordered, decoder.verifier, decoder.eos_id)
  scheduled = functools.partial(schedule.run, pair.params)
  return [
    fixed("autoregressive", 0),
    *(fixed("fixed", gamma) for gamma in gammas),
    fixed("auto", calibration.gamma),
    *(stopping(_stopping_name(threshold), threshold) for threshold in thresholds),
    *(stopping("stops by recent acceptance", first, GOAL) for first in thresholds[:1]),
    Policy("+2 or -1", max(gammas), scheduled, None),
    Policy("adaptive", max(gammas), adaptive, None),
  ]


def _stopping_name(threshold: float) -> str:
  return f"stops below {threshold:g}"


def _measure(
  study: _Study, texts: Sequence[str], setting: Record, repeats: int, report: Report
) -> Iterator[Record]:
  """Measure all policies, interleaved; yield records of oracles, confidence scores and policies."""
  pair, sampling, gammas, thresholds, calibration = study
  size, limit = setting.settings.batch_size, setting.settings.max_new_tokens
  policies = _policies(study)
  width = pair.prompt(texts).shape[1]
  prompts = [pair.prompt(texts[i : i + size], width) for i in range(0, len(texts), size)]
  seconds, outputs = np.zeros(len(policies)), []
  for i, prompt in enumerate(prompts):
    keys = row_keys(setting.settings.seed, i * size, len(prompt))
    calls = [functools.partial(p.decode, prompt, rng=keys, max_new_tokens=limit) for p in policies]
    medians, decoded = interleaved_medians(calls, repeats)
    seconds += medians
    outputs.append([require_finite(one) for one in jax.device_get(decoded)])
    report((i + 1) / len(prompts))
  outputs_of = [list(outputs_of_policy) for outputs_of_policy in zip(*outputs)]
  autoregressive = outputs_of[0]
  accepted = [
    row
    for prompt, decoded in zip(prompts, autoregressive)
    for row in acceptances(pair, prompt, decoded, sampling)
  ]
  baseline_tokens_per_s = num_tokens(autoregressive) / float(seconds[0])
  setting = setting.replace(
    alpha=float(np.concatenate(accepted).mean()),
    num_tokens=num_tokens(autoregressive),
    baseline_tokens_per_s=baseline_tokens_per_s,
  )
  predicted: dict[str, float] = {}  # speedups of policies without a closed form
  if size == 1:
    for name, speedup in oracles(accepted, calibration).items():
      yield _policy_record(setting, name, len(calibration.c) - 1, predicted_finite_length=speedup)
    confidences: dict[str, list[np.ndarray]] = {}
    for prompt, decoded in zip(prompts, autoregressive):
      for name, rows in certainties(pair, prompt, decoded).items():
        confidences.setdefault(name, []).extend(rows)
    for name, rows in confidences.items():
      auc_of_one = auc(np.concatenate(accepted), np.concatenate(rows))
      yield _policy_record(setting, f"confidence: {name}", 1, auc=auc_of_one)
      auc_of_three = auc(in_a_row(accepted, 3), in_a_row(rows, 3))
      yield _policy_record(setting, f"confidence: {name}", 3, auc=auc_of_three)
    largest_probs = confidences["largest probability"]
    for threshold in thresholds:
      predicted[_stopping_name(threshold)] = stopped_speedup(
        accepted, largest_probs, calibration, threshold, max(gammas)
      )
  for policy, decoded, policy_seconds in zip(policies, outputs_of, seconds):
    tokens_per_s = num_tokens(decoded) / float(policy_seconds)
    yield _policy_record(
      setting,
      policy.name,
      policy.gamma,
      num_tokens=num_tokens(decoded),
      rounds=num_rounds(decoded),
      tokens_per_round=num_tokens(decoded) / num_rounds(decoded),
      predicted_finite_length=predicted.get(policy.name, policy.predicted),
      speculative_tokens_per_s=tokens_per_s,
      speedup=tokens_per_s / baseline_tokens_per_s,
      identical=identical(autoregressive, decoded) if sampling.temperature == 0 else None,
    )


def gamma_table(records: Sequence[Record]) -> Table:
  """Return a table of policies that choose gamma, with one row per record."""
  return records_table("Policies that choose gamma", records, COLUMNS)
