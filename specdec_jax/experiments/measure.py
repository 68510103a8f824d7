"""One measured setting of a pair, from texts to a record."""

import time
from collections.abc import Sequence

import jax

from specdec_jax import theory
from specdec_jax.drafts.model import model_draft
from specdec_jax.experiments.alpha import measure_alpha
from specdec_jax.experiments.costs import measure_costs
from specdec_jax.experiments.speed import (
  acceptance_rate,
  identical,
  measure_speed,
  num_tokens,
  tokens_per_round,
)
from specdec_jax.pairs import Pair
from specdec_jax.records import Record
from specdec_jax.sampling import Sampling
from specdec_jax.version import __version__


def measure(
  pair: Pair,
  texts: Sequence[str],
  sampling: Sampling,
  gammas: Sequence[int],
  batch_size: int = 1,
  max_new_tokens: int = 64,
  repeats: int = 5,
  seed: int = 0,
  progress=lambda: None,
) -> tuple[list[Record], "Speed"]:
  """Alpha, costs and speedup of a pair on texts: a record for each gamma, and the outputs.

  The texts are decoded `batch_size` at a time; all batches of a run share one padded width, so
  that one program serves them all.
  """
  since = time.perf_counter()
  width = -(-max(len(pair.encode(text)) for text in texts) // 32) * 32
  prompts = [
    pair.prompt(texts[i : i + batch_size], width) for i in range(0, len(texts), batch_size)
  ]
  speed = measure_speed(
    pair, prompts, sampling, gammas, max_new_tokens, repeats, seed, progress=progress
  )
  alpha = measure_alpha(pair, prompts, speed.baseline, sampling)
  records = []
  for gamma in gammas:
    draft = model_draft(pair.draft, sampling, gamma)
    costs = measure_costs(
      pair.target, pair.target_params, draft, pair.draft_params, prompts[0], sampling
    )
    outputs = speed.speculative[gamma]
    device = jax.devices()[0]
    records.append(
      Record(
        task=pair.task,
        target=pair.target_name,
        draft=pair.draft_name,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        gamma=gamma,
        lenience=1.0,
        batch_size=batch_size,
        num_examples=len(texts),
        num_tokens=num_tokens(speed.baseline),
        alpha=alpha.mean,
        alpha_low=alpha.low,
        alpha_high=alpha.high,
        acceptance_rate=acceptance_rate(outputs),
        tokens_per_round=tokens_per_round(outputs),
        target_step_ms=1e3 * costs.target_step,
        draft_step_ms=1e3 * costs.draft_step,
        c=costs.c,
        verify_ms=1e3 * costs.verify,
        verify_cost=costs.v,
        predicted_theorem8=float(theory.walltime_improvement(alpha.mean, gamma, costs.c)),
        predicted_measured_cost=float(
          theory.walltime_improvement(alpha.mean, gamma, costs.c, costs.v)
        ),
        baseline="own",
        baseline_tokens_per_s=num_tokens(speed.baseline) / speed.baseline_s,
        speculative_tokens_per_s=num_tokens(outputs) / speed.speculative_s[gamma],
        speedup=speed.speedup(gamma),
        identical=identical(speed.baseline, outputs) if sampling.temperature == 0 else None,
        acceptance="measured",
        platform=device.platform,
        device_kind=device.device_kind,
        dtype=pair.dtype,
        jax_version=jax.__version__,
        specdec_version=__version__,
        seed=seed,
        seconds=time.perf_counter() - since,
        target_start_ms=1e3 * costs.target_start,
        draft_start_ms=1e3 * costs.draft_start,
      )
    )
  return records, speed
