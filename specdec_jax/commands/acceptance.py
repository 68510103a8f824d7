"""Alpha as the paper measures it (Table 3), for any drafts, beside what real rounds accept."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from rich.console import Console

from specdec_jax import records
from specdec_jax.core.decode import require_finite
from specdec_jax.core.sampling import Sampling
from specdec_jax.counts import (
  acceptance_by_position,
  acceptance_rate,
  identical,
  num_rounds,
  num_tokens,
)
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.errors import InputError, require_count, require_seed, require_types
from specdec_jax.measurement.alpha import Acceptance, mean_with_interval, measure_alpha
from specdec_jax.measurement.measure import settings_to_measure
from specdec_jax.measurement.plain import generate
from specdec_jax.pairs import DraftFactory, Pair
from specdec_jax.progress import Progress
from specdec_jax.records import Record
from specdec_jax.reporting.formats import render
from specdec_jax.reporting.runs import acceptance_table


def acceptance(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  samplings: Sequence[Sampling],
  drafts: Sequence[Callable[[Vocabulary], DraftFactory]] = (),
  gamma: int = 7,
  batch_size: int = 8,
  max_new_tokens: int = 64,
  min_tokens: int = 10_000,
  seed: int = 0,
  leniences: Sequence[float] = (1.0,),
) -> None:
  """Measure alpha over what a target generates; print a table and append to `results.jsonl`.

  Args:
    pair: target and draft; see `pairs.load_pair`.
    texts: sources, of which the target continues or translates as many as `min_tokens` takes.
    output_dir: gets `results.jsonl`; settings recorded there already are not measured again.
    samplings: each measured.
    drafts: others, measured after the pair's own.
    gamma: guesses a round, in the rounds whose acceptance stands beside alpha.
    batch_size: texts decoded together.
    max_new_tokens: limit for each.
    min_tokens: generated tokens to measure on; the paper takes 10,000.
    seed: of all sampling.
    leniences: l of Appendix A.5, each measured; 1 for exactness.
  """
  require_types(acceptance, locals())
  require_seed(seed)
  counts = dict(min_tokens=min_tokens, gamma=gamma, max_new_tokens=max_new_tokens)
  for name, value in counts.items():
    require_count(name, value)
  pair.require_batch_size(batch_size)
  if not (texts and samplings and leniences):
    raise InputError("There is nothing to measure: no texts, no samplings, or no leniences.")
  drafters = [drafter(pair.vocabulary) for drafter in drafts]
  contenders = [pair, *(pair.with_draft(drafter) for drafter in drafters)]
  limits = batch_size, max_new_tokens, seed
  asked = [
    (one, sampling, setting)
    for sampling in samplings
    for one in contenders
    for lenience in leniences
    for setting in settings_to_measure(one, texts, [sampling], [gamma], *limits, lenience)
  ]
  with (
    records.open_results(output_dir) as results,
    Progress() as bar,
  ):
    generated: dict[Sampling, list] = {}
    last = None
    for one, sampling, setting in bar.track(asked, description="measuring"):
      if not records.missing(results, [setting]):
        continue
      if last not in (None, (one.draft_name, sampling)):
        jax.clear_caches()  # the last draft's programs go: a process may map only so many
      last = one.draft_name, sampling
      if sampling not in generated:
        generated[sampling] = generate(
          pair, texts, sampling, batch_size, max_new_tokens, min_tokens, seed
        )
      records.append(results, _measure(one, generated[sampling], sampling, setting))
    wanted = {records.key(setting) for *_, setting in asked}
    measured = [r for r in records.read(results) if records.key(r) in wanted]
  console = Console(markup=False, soft_wrap=True)
  console.print(render(acceptance_table(measured), "terminal"))
  console.print(f"Records: {results} (measured once; delete the file to measure again)")


def _measure(pair: Pair, generated, sampling: Sampling, setting: Record) -> Record:
  """The setting with its acceptance, over what `generate` gave and in real rounds."""
  since = time.perf_counter()
  decode = pair.decode_fn(sampling, setting.gamma, setting.lenience)
  outputs = []
  for prompt, keys, _ in generated:
    decoded = decode(prompt, keys, max_new_tokens=setting.max_new_tokens)
    outputs.append(require_finite(jax.device_get(decoded)))
  prompts, _, plain = zip(*generated)
  compared = sampling.temperature == 0 and pair.simulated_alpha is None
  if pair.simulated_alpha is None:
    measured = measure_alpha(pair, prompts, plain, sampling, setting.lenience)
  else:  # there is no beta: a guess is told whether it stands
    stood = [
      np.arange(int(a + r)) < a for o in outputs for a, r in zip(*o.rounds.acceptance_counts())
    ]
    measured = Acceptance(mean_with_interval(stood), math.nan, 0.0, num_tokens([*plain]))
  return dataclasses.replace(
    setting,
    num_tokens=measured.num_tokens,
    rounds=num_rounds(outputs),
    alpha=measured.alpha.mean,
    alpha_low=measured.alpha.low,
    alpha_high=measured.alpha.high,
    beta_lag1=measured.lag1,
    total_variation=measured.change,
    acceptance_rate=acceptance_rate(outputs),
    acceptance_by_position=acceptance_by_position(outputs),
    tokens_per_round=num_tokens(outputs) / num_rounds(outputs),
    identical=identical([*plain], outputs) if compared else None,
    seconds=time.perf_counter() - since,
  )
