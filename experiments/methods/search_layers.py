"""Search for the decoder layers of a target that draft best by layer skipping (Zhang et al., 2024).

Draft & Verify searches by Bayesian optimization of the measured speed, and skips attention and
feed-forward blocks separately. Here the speed is predicted from alpha and from measured costs
(Section 3.5), and complete layers are skipped. If there are few sets of layers, all are measured;
otherwise a local search chooses them.
"""

import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from experiments.lib.records import measured_with, models_text, sampling_text
from experiments.table3.acceptance import ALPHA_OF_TEXT
from specdec_jax.contrib.early_exit import logits_at_each_token
from specdec_jax.core.counts import require_finite
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling, distribution, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Model
from specdec_jax.drafts.layer_skip import cache_of_layers, decoder_of, layer_skip, of_layers
from specdec_jax.errors import InputError
from specdec_jax.measure.alpha import (
  Estimate,
  acceptance_and_change,
  mean_with_interval,
  teacher_forced,
)
from specdec_jax.measure.calibrate import GAMMAS, choose
from specdec_jax.measure.costs import Costs, measure_costs
from specdec_jax.measure.progress import Progress
from specdec_jax.measure.records import Record, append, read, results_path, settings_to_measure
from specdec_jax.measure.sweep import show
from specdec_jax.measure.tables import GAMMA, PREDICTED, C, Column, Table, V, records_table
from specdec_jax.models.families import model_of
from specdec_jax.pair import Pair

LAYERS = (Column("draft", "models.draft"), ALPHA_OF_TEXT, C, V, GAMMA, PREDICTED)

Layers = tuple[int, ...]  # numbers of decoder layers, in ascending order


def search_layers(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  sampling: Sampling = Sampling(),
  max_candidates: int = 64,
  batch_size: int = 1,
  max_new_tokens: int = 64,
  seed: int = 0,
) -> None:
  """Search for the decoder layers with the best predicted speed as a draft by layer skipping.

  It prints a table and the best set of layers, and appends one record per set to `results.jsonl`.
  The gamma of a record is the one with the best predicted speed. The speed of a set is predicted as
  in `measurement.calibrate`, from the set's alpha on texts that the target generates, and from
  measured costs, which depend only on the number of layers. Alpha is that of the first draft token
  of a round.

  Args:
    pair: target; its draft is not used.
    texts: sources, all of which the target decodes.
    output_dir: folder for `results.jsonl`; sets of layers recorded there already are not measured
      again, so that an interrupted search resumes.
    sampling: sampling method.
    max_candidates: maximum number of sets of layers to measure; see `search`.
    batch_size: number of texts decoded together, also when costs are measured.
    max_new_tokens: maximum number of tokens of each output.
    seed: random seed of sampling and of the search.

  Raises:
    InputError: the decoder of the target has only one layer, or acceptance is simulated.
  """
  pair.require_batch_size(batch_size)
  num_layers = decoder_of(pair.target.model).config.num_decoder_layers
  if num_layers == 1:
    raise InputError("The decoder of the target has one layer, which layer skipping cannot skip.")
  if pair.simulated_alpha is not None:
    raise InputError("The acceptance of this target is simulated, so it is equal for all layers.")
  settings = DecodeSettings(sampling, batch_size, max_new_tokens, seed)
  measure = _measurement(pair, texts, settings)
  records: list[Record] = []
  results = results_path(output_dir)
  with Progress() as bar:
    num_candidates = min(max_candidates, 2**num_layers - 2)
    task = bar.add_task("measuring sets of layers", total=num_candidates)

    def speedup(layers: Layers) -> float:
      skipping = pair.with_draft(layer_skip(pair.target, layers))
      (setting,) = settings_to_measure(skipping, texts, [settings], [1])
      record = _recorded(results, setting)
      if record is None:
        record = measure(layers, setting)
        append(results, record)
      records.append(record)
      bar.advance(task)
      return record.times.predicted_finite_length or 0.0

    speedups = search(num_layers, max_candidates, speedup, seed)
  records.sort(key=lambda record: record.times.predicted_finite_length or 0.0, reverse=True)
  show([layers_table(records)], results)
  best = max(speedups, key=speedups.__getitem__)
  print(_advice(best, records[0], len(records), 2**num_layers - 2))


def search(
  num_layers: int, max_candidates: int, speedup: Callable[[Layers], float], seed: int
) -> dict[Layers, float]:
  """Evaluate sets of some, but not all layers, and return the speedup of each.

  If there are at most `max_candidates` sets, all of them are evaluated. Otherwise a quarter of
  `max_candidates` are random sets of random sizes. Each later one differs from the best set so far
  in one random layer. If all such sets have been evaluated, the next set is a random one.

  Args:
    num_layers: number of layers, at least 2.
    max_candidates: maximum number of sets to evaluate.
    speedup: function that evaluates a set.
    seed: random seed.
  """
  if 2**num_layers - 2 <= max_candidates:
    sizes = range(1, num_layers)
    sets = itertools.chain(*(itertools.combinations(range(num_layers), size) for size in sizes))
    return {layers: speedup(layers) for layers in sets}
  rng = np.random.default_rng(seed)
  speedups: dict[Layers, float] = {}
  while len(speedups) < max_candidates:
    neighbors: list[Layers] = []
    if speedups and len(speedups) >= max_candidates // 4:
      best = max(speedups, key=speedups.__getitem__)
      flipped = (tuple(sorted({*best} ^ {layer})) for layer in range(num_layers))
      neighbors = [each for each in flipped if 0 < len(each) < num_layers and each not in speedups]
    if neighbors:
      layers = neighbors[rng.integers(len(neighbors))]
    else:
      size = rng.integers(1, num_layers)
      layers = tuple(sorted(rng.choice(num_layers, size, replace=False).tolist()))
    if layers not in speedups:
      speedups[layers] = speedup(layers)
  return speedups


class _Batch(NamedTuple):
  """Outputs that the target generated for a batch of texts, and a forward pass over them.

  Attributes:
    prompt: source tokens.
    lengths: number of tokens of each output.
    logits: logits of the target for each token.
    inputs: token before each token.
    cache: cache of the target, which holds the inputs.
  """

  prompt: Int[Array, "B P"]
  lengths: Int[np.ndarray, " B"]
  logits: Float[Array, "B T V"]
  inputs: Int[Array, "B T"]
  cache: Any


def _measurement(
  pair: Pair, texts: Sequence[str], settings: DecodeSettings
) -> Callable[[Layers, Record], Record]:
  """Return a function that measures a set of layers, given a record without measurements.

  The texts are decoded, and costs are measured, when the function is first called. The costs are
  measured with one layer and with all layers but one, and interpolated linearly between them.
  """
  config, sampling = decoder_of(pair.target.model).config, settings.sampling
  sizes = sorted({1, config.num_decoder_layers - 1})
  batches = functools.cache(functools.partial(_generate, pair, texts, settings))

  @functools.cache
  def costs_of_sizes() -> list[list[Costs]]:
    skipping = [pair.with_draft(layer_skip(pair.target, range(size))) for size in sizes]
    trees, prompt = [*map(chain, GAMMAS)], batches()[0].prompt
    return measure_costs(skipping, trees, prompt, sampling, settings.max_new_tokens)

  def costs(num_layers: int) -> dict[int, Costs]:
    interpolated = {
      gamma: Costs(*(float(np.interp(num_layers, sizes, times)) for times in zip(*measured)))
      for gamma, *measured in zip(GAMMAS, *costs_of_sizes())
    }
    # A draft step takes equally long at any gamma; the largest gamma gives its most precise time.
    draft_step = interpolated[GAMMAS[-1]].draft_step
    return {gamma: each._replace(draft_step=draft_step) for gamma, each in interpolated.items()}

  def alpha(layers: Layers) -> Estimate:
    draft_config, params = of_layers(config, pair.target.params, layers)
    rows: list[np.ndarray] = []
    for batch in batches():
      cache = cache_of_layers(batch.cache, layers)
      # Sets of the same size share the compiled program.
      beta = _beta(model_of(draft_config), params, cache, batch.inputs, batch.logits, sampling)
      rows += [row[:length] for row, length in zip(np.asarray(beta), batch.lengths)]
    return mean_with_interval(rows)

  def measure(layers: Layers, setting: Record) -> Record:
    since = time.perf_counter()
    estimate, lengths = alpha(layers), [batch.lengths.tolist() for batch in batches()]
    choice = choose(min(1.0, estimate.mean), costs(len(layers)), lengths)
    gamma = choice.best_draft
    return setting.replace(
      gamma=gamma,
      num_tokens=sum(map(sum, lengths)),
      alpha=estimate.mean,
      alpha_low=estimate.low,
      alpha_high=estimate.high,
      c=choice.c[gamma],
      verify_cost=choice.v[gamma],
      predicted_finite_length=choice.speedups[gamma],
      seconds=time.perf_counter() - since,
    )

  return measure


def _generate(pair: Pair, texts: Sequence[str], settings: DecodeSettings) -> list[_Batch]:
  """Decode all texts autoregressively, and run the target over the outputs."""
  size, width = settings.batch_size, pair.prompt(texts).shape[1]
  decode = pair.decode_fn(settings.sampling, chain(0))
  prompts = [
    pair.prompt(texts[first : first + size], width) for first in range(0, len(texts), size)
  ]
  outputs = []
  for i, prompt in enumerate(prompts):
    keys = row_keys(settings.seed, i * size, len(prompt))
    decoded = decode(prompt, keys, max_new_tokens=settings.max_new_tokens)
    outputs.append(require_finite(jax.device_get(decoded)))
  longest = max(int(output.lengths.max()) for output in outputs)

  @jax.jit
  def forward(params: Any, prompt: Array, tokens: Array) -> tuple[Array, Array, Any]:
    logits, _, inputs, cache = teacher_forced(pair.target.model, params, prompt, tokens)
    return logits, inputs, cache

  return [
    _Batch(
      prompt,
      np.asarray(output.lengths),
      *forward(pair.target.params, prompt, output.tokens[:, :longest]),
    )
    for prompt, output in zip(prompts, outputs)
  ]


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def _beta(
  model: Model,
  params: Any,
  cache: Any,
  inputs: Int[Array, "B T"],
  target_logits: Float[Array, "B T V"],
  sampling: Sampling,
) -> Float[Array, "B T"]:
  """Return the acceptance probability of the first draft token of a round at each token."""
  q = distribution(logits_at_each_token(model, params, cache, inputs), sampling)
  return acceptance_and_change(target_logits, q, sampling)[0]


def _recorded(results: pathlib.Path, setting: Record) -> Record | None:
  """Return the record of a setting with any gamma, or None if there is none."""
  for record in read(results):
    if record.replace(gamma=setting.settings.gamma).key == setting.key:
      return record
  return None


def _advice(best: Layers, record: Record, num_measured: int, num_sets: int) -> str:
  """Return lines that name the best set of layers, and the settings that use it."""
  speedup = record.times.predicted_finite_length or 0.0
  slower = ", which is slower than autoregressive decoding" if speedup < 1 else ""
  return "\n".join(
    [
      f"Best of {num_measured} of {num_sets} sets of layers: {record.models.draft}, with gamma "
      f"{record.settings.gamma} and a predicted speedup of {speedup:.2f}{slower}.",
      "To draft with these layers, add to a run:",
      f"  --draft layer_skip --layers {','.join(map(str, best))}",
      "To train a head after these layers:",
      "  python -m specdec_jax.run --gin_file=gin/runs/train_speculator.gin \\",
      f"    --gin.KIND='\"early_exit\"' --gin.LAYERS='{best}'",
    ]
  )


def layers_table(records: Sequence[Record]) -> Table:
  """Return a table of drafts by layer skipping, with one row per record.

  All records have the same target, texts and sampling method.
  """
  first = records[0]
  title = f"{models_text(first, draft=False)}: layer skipping, temperature {sampling_text(first)}, "
  title += f"batch {first.settings.batch_size}, {first.settings.num_examples} texts, {first.device}"
  notes = (
    "gamma is the one with the best predicted speed. c and v are measured with one layer and with "
    "all layers but one, and interpolated linearly.",
    measured_with(records),
  )
  return records_table(title, records, LAYERS, notes)
