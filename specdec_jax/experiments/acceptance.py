"""Alpha as the paper measures it (Table 3), for any drafts, beside what real rounds accept."""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import Array
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from specdec_jax import records
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.decoding import require_finite
from specdec_jax.errors import InputError, require_count, require_seed, require_types
from specdec_jax.experiments.alpha import Acceptance, mean_with_interval, measure_alpha
from specdec_jax.experiments.measure import settings_to_measure
from specdec_jax.experiments.speed import (
  acceptance_by_position,
  acceptance_rate,
  identical,
  num_rounds,
  num_tokens,
  row_keys,
)
from specdec_jax.pairs import Drafter, Pair
from specdec_jax.protocols import Decoded
from specdec_jax.records import Record
from specdec_jax.reporting.tables import sampling_text
from specdec_jax.sampling import Sampling

LEGEND = (
  "alpha: E[sum min(p, q)] over text that the target generated, with its 95% interval (bootstrap "
  "over texts; of a simulated draft the share of guesses that stood); lag-1: correlation of a "
  "token's sum with that of the token before, 0 if acceptance were independent; rounds: accepted / "
  "(accepted + refused) guesses of real rounds; by position: the same for the first, second, ... "
  "guess of a round."
)


def acceptance(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  samplings: Sequence[Sampling],
  drafts: Sequence[Callable[[Vocabulary], Drafter]] = (),
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
    Progress(console=Console(stderr=True), transient=True) as bar,
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
  console = Console(markup=False)
  console.print(acceptance_table(measured))
  console.print(Text(LEGEND, style="dim"))
  console.print(f"Records: {results} (measured once; delete the file to measure again)")


def generate(
  pair: Pair,
  texts: Sequence[str],
  sampling: Sampling,
  batch_size: int,
  max_new_tokens: int,
  min_tokens: int,
  seed: int,
) -> list[tuple[Array, Array, Decoded]]:
  """The target's own (prompt, keys, output) of batches of texts, until they have min_tokens."""
  batches, count = [], 0
  for at in range(0, len(texts), batch_size):
    prompt = pair.prompt(texts[at : at + batch_size])
    keys = row_keys(seed, at, len(prompt))
    decoded = pair.decoder(sampling, 0)(prompt, keys, max_new_tokens=max_new_tokens)
    batches.append((prompt, keys, require_finite(jax.device_get(decoded))))
    count += num_tokens([batches[-1][-1]])
    if count >= min_tokens:
      return batches
  warnings.warn(f"The texts gave {count} tokens, fewer than the {min_tokens} asked.", stacklevel=2)
  return batches


def _measure(pair: Pair, generated, sampling: Sampling, setting: Record) -> Record:
  """The setting with its acceptance, over what `generate` gave and in real rounds."""
  since = time.perf_counter()
  decode = pair.decoder(sampling, setting.gamma, setting.lenience)
  outputs = []
  for prompt, keys, _ in generated:
    decoded = decode(prompt, keys, max_new_tokens=setting.max_new_tokens)
    outputs.append(require_finite(jax.device_get(decoded)))
  prompts, _, plain = zip(*generated)
  compared = sampling.temperature == 0 and pair.simulated_alpha is None
  if pair.simulated_alpha is None:
    measured = measure_alpha(pair, prompts, plain, sampling, setting.lenience)
  else:  # there is no beta: a guess is told whether it stands
    stood = [np.arange(a + r) < a for o in outputs for a, r in zip(*o.rounds.judged())]
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


def acceptance_table(measured: Sequence[Record]) -> Table:
  """One row a record."""
  first = measured[0]
  table = Table(
    title=f"{first.task}, target {first.target}, {first.dtype}", box=box.SIMPLE_HEAD, padding=0
  )
  for heading in ("draft", "sampling", "tokens", "alpha", "lag-1", "rounds", "by position"):
    table.add_column(heading, justify="left" if heading == "draft" else "right")
  for r in measured:
    table.add_row(
      r.draft,
      f"T={sampling_text(r)}" + (f" l={r.lenience:g}" if r.lenience < 1 else ""),
      f"{r.num_tokens}",
      f"{r.alpha:.3f} [{r.alpha_low:.3f},{r.alpha_high:.3f}]",
      "-" if r.beta_lag1 is None else f"{r.beta_lag1:.2f}",
      f"{r.acceptance_rate:.3f}",
      " ".join("-" if x is None else f"{x:.2f}" for x in r.acceptance_by_position or ()),
    )
  return table
