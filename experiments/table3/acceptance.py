"""Measurement of alpha as in the paper (Table 3), and of the acceptance rate in real rounds."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax import Array

from specdec_jax.core.counts import (
  acceptance_by_position,
  acceptance_rate,
  identical,
  num_rounds,
  num_tokens,
  require_finite,
)
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult, DraftSpec, Loaded
from specdec_jax.measure.alpha import Acceptance, mean_with_interval, measure_alpha
from specdec_jax.measure.autoregressive import generate
from specdec_jax.measure.measure import settings_to_measure
from specdec_jax.measure.records import Record
from specdec_jax.measure.reporting.columns import records_table
from specdec_jax.measure.reporting.tables import (
  Table,
  sampling_text,
)
from specdec_jax.measure.sweep import Report, Step, sweep
from specdec_jax.pair import Pair

ACCEPTANCE = ("draft", "sampling", "tokens", "alpha_of_text", "lag1", "rounds", "by_position")


def acceptance(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  samplings: Sequence[Sampling],
  drafts: Sequence[Callable[[Loaded], DraftSpec]] = (),
  gamma: int = 7,
  batch_size: int = 8,
  max_new_tokens: int = 64,
  min_tokens: int = 10_000,
  seed: int = 0,
  leniences: Sequence[float] = (1.0,),
) -> None:
  """Measure alpha on text that a target generates; print a table and append to `results.jsonl`.

  Args:
    pair: target and draft; see `load.load_pair`.
    texts: sources. The target decodes them until it has generated `min_tokens` tokens.
    output_dir: folder for `results.jsonl`; settings recorded there already are not measured again.
    samplings: sampling methods; each is measured.
    drafts: functions that load other drafts, which are measured after the draft of the pair.
    gamma: number of draft tokens per round, in the rounds whose acceptance rate is measured.
    batch_size: number of texts decoded together.
    max_new_tokens: maximum number of tokens of each output.
    min_tokens: minimum number of generated tokens to measure on; the paper uses 10,000.
    seed: random seed of all sampling.
    leniences: values of the lenience l (Appendix A.5); each is measured, and 1 is exact.
  """
  pair.require_batch_size(batch_size)
  factories = [draft(pair.target) for draft in drafts]
  pairs = [pair, *(pair.with_draft(factory) for factory in factories)]
  settings_of = functools.partial(DecodeSettings, batch_size=batch_size, seed=seed)

  @functools.cache
  def generated(sampling: Sampling) -> list[tuple[Array, Array, DecodeResult]]:
    settings = settings_of(sampling, max_new_tokens=max_new_tokens)
    return generate(pair, texts, settings, min_tokens)

  def steps() -> Iterator[Step]:
    for sampling in samplings:
      settings = [
        settings_of(sampling, max_new_tokens=max_new_tokens, lenience=lenience)
        for lenience in leniences
      ]
      for pair_with_draft in pairs:
        wanted = settings_to_measure(pair_with_draft, texts, settings, [gamma])
        yield Step(
          f"{pair_with_draft.draft.name}, temperature {sampling_text(wanted[0])}",
          wanted,
          functools.partial(_measure_all, pair_with_draft, functools.partial(generated, sampling)),
        )

  sweep(output_dir, steps, lambda measured: [acceptance_table(measured)])


def _measure_all(
  pair: Pair,
  generated: Callable[[], Sequence[tuple[Array, Array, DecodeResult]]],
  settings: Sequence[Record],
  report: Report,
) -> Iterator[Record]:
  """Yield one record per lenience, for one draft and one sampling method."""
  for i, setting in enumerate(settings):
    yield _measure(pair, generated(), setting)
    report((i + 1) / len(settings))


def _measure(
  pair: Pair,
  generated: Sequence[tuple[Array, Array, DecodeResult]],
  setting: Record,
) -> Record:
  """Return the record of a draft: alpha on the generated text, and acceptance in real rounds.

  If acceptance is simulated, alpha is accepted / (accepted + rejected) draft tokens in the rounds.
  """
  since = time.perf_counter()
  sampling = Sampling(setting.temperature, setting.top_k, setting.top_p)
  lenience, max_new_tokens = setting.lenience, setting.max_new_tokens
  decode = pair.decode_fn(sampling, chain(setting.gamma), lenience)
  outputs = []
  for prompt, keys, _ in generated:
    decoded = decode(prompt, keys, max_new_tokens=max_new_tokens)
    outputs.append(require_finite(jax.device_get(decoded)))
  prompts, _, autoregressive = zip(*generated)
  is_comparable = sampling.temperature == 0 and pair.simulated_alpha is None
  if pair.simulated_alpha is None:
    measured = measure_alpha(pair, prompts, autoregressive, sampling, lenience)
  else:  # acceptance is simulated, so there is no beta
    accepted = [
      np.arange(int(a + r)) < a for o in outputs for a, r in zip(*o.rounds.acceptance_counts())
    ]
    alpha = mean_with_interval(accepted)
    measured = Acceptance(alpha, math.nan, 0.0, math.nan, num_tokens([*autoregressive]))
  return dataclasses.replace(
    setting,
    num_tokens=measured.num_tokens,
    rounds=num_rounds(outputs),
    alpha=measured.alpha.mean,
    alpha_low=measured.alpha.low,
    alpha_high=measured.alpha.high,
    beta_lag1=measured.lag1,
    rejection_sampling_rate=measured.rejection,
    total_variation=measured.change,
    acceptance_rate=acceptance_rate(outputs),
    acceptance_by_position=acceptance_by_position(outputs),
    tokens_per_round=num_tokens(outputs) / num_rounds(outputs),
    identical=identical([*autoregressive], outputs) if is_comparable else None,
    seconds=time.perf_counter() - since,
  )


def acceptance_table(records: Sequence[Record]) -> Table:
  """Return a table of alpha and acceptance rates, with one row per record."""
  first = records[0]
  target = f"{first.task}, target {first.target}" if first.task else first.target_label
  names = [*ACCEPTANCE]
  if any(r.rejection_sampling_rate is not None for r in records):
    names.insert(names.index("lag1"), "rejection")
  return records_table(f"{target}, {first.dtype}", records, names)
