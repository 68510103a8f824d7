"""What choosing gamma is worth (Section 3.5): plain, fixed, 'auto' and adaptive, decoded in turn.

Beside what is measured stands what could be reached at most by knowing which guesses will stand.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from specdec_jax import records
from specdec_jax.adaptive import AdaptiveDecoder
from specdec_jax.core.decode import require_finite
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.counts import identical, num_rounds, num_tokens
from specdec_jax.errors import InputError, require_count, require_seed, require_types
from specdec_jax.measurement.calibrate import GAMMAS, calibrate
from specdec_jax.measurement.choice import Calibration
from specdec_jax.measurement.measure import settings_to_measure
from specdec_jax.measurement.oracles import acceptances, oracles
from specdec_jax.measurement.stopping import (
  certainties,
  in_a_row,
  separation,
  stopped_speedup,
)
from specdec_jax.measurement.timing import interleaved_medians
from specdec_jax.pairs import Pair, stopping_draft
from specdec_jax.records import Record
from specdec_jax.reporting.formats import render
from specdec_jax.reporting.runs import gamma_table

PRIOR_GUESSES = 25.0  # for so many guesses the calibration's alpha counts, beside a text's own


class Policy(NamedTuple):
  """A way to choose gamma.

  Attributes:
    name: as the table has it, and records behind the draft's name.
    gamma: the largest it takes; 0 for plain decoding.
    decode: (prompt, rng, *, max_new_tokens) -> DecodeResult.
    predicted: speedup; None where no closed form says.
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
  """Measure the policies at each temperature and batch size, print tables, append records.

  A record's `draft` ends in the policy's name. Those named 'oracle' have a prediction and no speed:
  the best fixed gamma, the best for each text and the best for each round, of the same texts with
  the same costs, knowing which guesses are accepted; they are of batch 1. 'auto' is decoded by
  itself, though it is one of the others: what lies between the two is noise. Those named 'told by'
  say how well a number foretells whether a guess stands, and whether three in a row do; of batch 1.

  Args:
    pair: what decodes; see `pairs.load_pair`.
    texts: sources, padded to one width; the calibration takes its few from among them.
    output_dir: gets `results.jsonl`; settings recorded there already are not measured again.
    gammas: each measured alone; together they are what the adaptive policy chooses from.
    temperatures: 0 is argmax; each measured.
    batch_sizes: each measured.
    thresholds: of a draft model that stops early (`drafts.stopping`), each measured; none for a
      draft that is no model.
    max_new_tokens: limit for each text.
    repeats: of each timed decode, interleaved.
    seed: of all sampling.
  """
  require_types(gamma, locals())
  require_seed(seed)
  require_count("max_new_tokens", max_new_tokens)
  require_count("repeats", repeats)
  for size in batch_sizes:
    pair.require_batch_size(size)
  if not (texts and gammas and temperatures and batch_sizes):
    raise InputError("There is nothing to measure: no texts, gammas, temperatures or batch sizes.")
  for guesses in gammas:
    require_count("gamma", guesses)
    if guesses > GAMMAS[-1]:
      raise InputError(f"gamma is {guesses}; the calibration knows costs up to {GAMMAS[-1]}.")
  console = Console(markup=False)
  with records.open_results(output_dir) as results:
    for sampling in map(Sampling, temperatures):
      for batch_size in batch_sizes:
        (setting,) = settings_to_measure(
          pair, texts, [sampling], [max(gammas)], batch_size, max_new_tokens, seed, 1.0
        )
        wanted = functools.partial(_of_policy, setting)
        if records.missing(results, [wanted("adaptive", max(gammas))]):
          calibration = calibrate(pair, texts, sampling, batch_size, max_new_tokens, seed)
          console.print(f"temperature {sampling.temperature:g}, batch {batch_size}: {calibration}.")
          args = pair, texts, sampling, gammas, thresholds, calibration, setting, repeats
          for record in _measure(*args):
            records.append(results, record)
          jax.clear_caches()  # a process may map only so many programs
    console.print(render(gamma_table(records.read(results)), "terminal"), soft_wrap=True)


def _of_policy(setting: Record, name: str, gamma: int, **measured) -> Record:
  draft = f"{setting.draft}, {name}"
  return dataclasses.replace(setting, draft=draft, gamma=gamma, **measured)


def _policies(
  pair: Pair,
  sampling: Sampling,
  gammas: Sequence[int],
  thresholds: Sequence[float],
  calibration: Calibration,
) -> list[Policy]:
  """Plain decoding first, the adaptive one last."""
  drafts = tuple(pair.draft(sampling, chain(gamma)) for gamma in gammas)

  def fixed(name: str, gamma: int) -> Policy:
    return Policy(name, gamma, pair.decode_fn(sampling, gamma), calibration.speedups[gamma])

  def stopping(threshold: float) -> Callable[..., DecodeResult]:
    draft = stopping_draft(pair.loaded_target, lambda target: pair.draft_factory, threshold)
    return pair.with_draft(draft).decode_fn(sampling, max(gammas))

  decoder = AdaptiveDecoder(
    pair.target, drafts, pair.verifier_for(sampling), pair.vocabulary.eos_id
  )
  adaptive = functools.partial(
    decoder.run,
    pair.params,
    round_costs=jnp.array([calibration.round_cost(gamma) for gamma in gammas]),
    prior=PRIOR_GUESSES * jnp.array([calibration.alpha, 1 - calibration.alpha]),
  )
  return [
    fixed("plain", 0),
    *(fixed("fixed", gamma) for gamma in gammas),
    fixed("auto", calibration.gamma),
    *(Policy(_stopping(t), max(gammas), stopping(t), None) for t in thresholds),
    Policy("adaptive", max(gammas), adaptive, None),
  ]


def _stopping(threshold: float) -> str:
  return f"stops below {threshold:g}"


def _measure(
  pair, texts, sampling, gammas, thresholds, calibration: Calibration, setting: Record, repeats
):
  """Records of one setting: of the oracles, and of each policy, decoded in turn."""
  size, limit = setting.batch_size, setting.max_new_tokens
  policies = _policies(pair, sampling, gammas, thresholds, calibration)
  width = pair.prompt(texts).shape[1]
  prompts = [pair.prompt(texts[i : i + size], width) for i in range(0, len(texts), size)]
  seconds, outputs = np.zeros(len(policies)), []
  for i, prompt in enumerate(track(prompts, transient=True, console=Console(stderr=True))):
    keys = row_keys(setting.seed, i * size, len(prompt))
    calls = [functools.partial(p.decode, prompt, rng=keys, max_new_tokens=limit) for p in policies]
    medians, decoded = interleaved_medians(calls, repeats)
    seconds += medians
    outputs.append([require_finite(one) for one in jax.device_get(decoded)])
  plain, *_ = by_policy = [list(each) for each in zip(*outputs)]
  chances = [acceptances(pair, *each, sampling) for each in zip(prompts, plain)]
  stands = [row for rows in chances for row in rows]
  plain_tokens_per_s = num_tokens(plain) / float(seconds[0])
  setting = dataclasses.replace(
    setting,
    alpha=float(np.concatenate(stands).mean()),
    num_tokens=num_tokens(plain),
    baseline_tokens_per_s=plain_tokens_per_s,
  )
  known = {}
  if size == 1:
    for name, predicted in oracles(stands, calibration).items():
      yield _of_policy(setting, name, len(calibration.c) - 1, predicted_finite_length=predicted)
    certain = [certainties(pair, *each) for each in zip(prompts, plain)]
    scores = {name: [row for rows in certain for row in rows[name]] for name in certain[0]}
    for name, rows in scores.items():
      told = separation(np.concatenate(stands), np.concatenate(rows))
      yield _of_policy(setting, f"told by {name}", 1, auc=told)
      of_third = separation(in_a_row(stands, 3), in_a_row(rows, 3))
      yield _of_policy(setting, f"told by {name}", 3, auc=of_third)
    sure = scores["largest probability"]
    known = {
      _stopping(t): stopped_speedup(stands, sure, calibration, t, max(gammas)) for t in thresholds
    }
  for policy, own, its_seconds in zip(policies, by_policy, seconds):
    tokens_per_s = num_tokens(own) / float(its_seconds)
    yield _of_policy(
      setting,
      policy.name,
      policy.gamma,
      num_tokens=num_tokens(own),
      rounds=num_rounds(own),
      tokens_per_round=num_tokens(own) / num_rounds(own),
      predicted_finite_length=known.get(policy.name, policy.predicted),
      speculative_tokens_per_s=tokens_per_s,
      speedup=tokens_per_s / plain_tokens_per_s,
      identical=identical(plain, own) if sampling.temperature == 0 else None,
    )
