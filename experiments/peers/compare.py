"""Compare the speed of this package with other libraries that run T5 models.

All libraries get the same weights, inputs, limits and number of threads.
"""

import contextlib
import functools
import gc
import operator
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from experiments.lib.records import measured_with
from experiments.peers.comparison import OWN_BASELINE, Backend, Comparison, Decode, best_of_beams
from experiments.peers.worker import Process, after_idle, in_subprocess
from specdec_jax.core.counts import (
  acceptance_by_position,
  acceptance_rate,
  identical,
  num_rounds,
  num_tokens,
  require_finite,
)
from specdec_jax.core.decode import Decoder, DecodeSettings
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.measure import records
from specdec_jax.measure.costs import interleaved_seconds, ratio_range
from specdec_jax.measure.records import Record, settings_to_measure
from specdec_jax.measure.sweep import Report, Step, measure_missing
from specdec_jax.measure.tables import IDENTICAL, MISSING, Table, range_text, terminal_text
from specdec_jax.pair import Pair

PEERS_LEGEND = {
  "tokens/s": "total tokens / total seconds, prefill included, medians of interleaved repeats",
  "ms/pass": "total seconds / target forward passes, in ms",
  "tok/pass": "tokens per target forward pass",
  "gamma N": "speedup of our speculative decoding with this gamma over the decoder of the row",
  "spread": "for the fastest gamma, the lowest and highest of this speedup over all repeats and "
  "in each repeat",
  "identical": "whether the outputs are identical to ours, token for token (only for argmax and "
  "real weights)",
}

_Target = tuple[str, str]  # dtype and kernels of this package
_Precision = tuple[_Target, str]  # with the name of the draft, which contains its format
# (precision, gamma) of speculative decoding, (target, name) of this package's autoregressive
# decoding, or (None, name) of a different library.
_DecoderKey = tuple[_Precision | _Target | None, str | int]


def peers(
  comparisons: Sequence[Callable[[str], Comparison]],
  backends: Sequence[Backend],
  output_dir: str,
  repeats: int = 5,
  seed: int = 0,
) -> None:
  """Time speculative decoding against other backends, print tables and append to `results.jsonl`.

  Backends whose packages are not installed are reported and skipped.

  Args:
    comparisons: functions that take a folder for weights and return a comparison. The folder is
      deleted when the comparison has been measured.
    backends: backends to time, in addition to this package's autoregressive decoding.
    output_dir: folder for the records; settings that are already recorded there are not measured
      again.
    repeats: number of repeats of each timed decode, interleaved.
    seed: seed of all sampling.
  """
  console, installed = Console(markup=False), [OWN_BASELINE]
  for backend in backends:
    if missing := backend.missing_packages():
      console.print(f"not installed: {backend.name} (needs {', '.join(missing)})")
    else:
      installed.append(backend)
  results = records.results_path(output_dir)
  for make_comparison in comparisons:
    with tempfile.TemporaryDirectory() as folder:
      comparison = make_comparison(folder)
      for sampling in map(Sampling, comparison.workload.temperatures):
        measured = _compare(comparison, sampling, installed, results, repeats, seed)
        for precision in dict.fromkeys(map(_precision, measured)):
          table = peers_table([r for r in measured if _precision(r) == precision])
          console.print(terminal_text(table), soft_wrap=True)
      del comparison
    _free_memory()
  legend = "\n".join(Table("", (), (), legend=PEERS_LEGEND).footer)
  console.print(Text(legend, style="dim"))
  console.print(f"Records: {results} (measured once; delete the file to measure again)")


def _compare(
  comparison: Comparison,
  sampling: Sampling,
  backends: Sequence[Backend],
  results: pathlib.Path,
  repeats: int,
  seed: int,
) -> list[Record]:
  """Measure the settings that `results` lacks, and return the records of all settings."""
  workload = comparison.workload
  supported = {b.name: b for b in backends if b.supports(comparison, sampling)}
  settings = [
    setting.replace(beams=workload.beams, draft_beams=workload.draft_beams)
    for pair in comparison.pairs
    for name in supported
    for setting in settings_to_measure(
      pair,
      workload.texts,
      [DecodeSettings(sampling, max_new_tokens=workload.max_new_tokens, seed=seed)],
      workload.gammas,
      name,
      repeats,
    )
  ]
  measure = functools.partial(_measure, comparison, sampling, supported, repeats, seed)
  description = f"{settings[0].subject}, temperature {sampling.temperature:g}"
  measured = measure_missing(results, [Step(description, settings, measure)])
  _free_memory()
  by_key = {record.key: record for record in measured}
  return [by_key[setting.key] for setting in settings]


def _measure(
  comparison: Comparison,
  sampling: Sampling,
  backends: Mapping[str, Backend],
  repeats: int,
  seed: int,
  settings: Sequence[Record],
  report: Report,
) -> list[Record]:
  """Measure settings; each setting has one pair, one backend as its baseline, and one gamma."""
  started = time.perf_counter()
  workload = comparison.workload
  seconds, results_by_text = [], []
  with contextlib.ExitStack() as stack:
    decoders = _load_decoders(comparison, sampling, backends, settings, stack)
    for i, text in enumerate(workload.texts):
      prompt, rng = comparison.pair.prompt([text]), row_keys(seed, i, 1)
      arguments = dict(max_new_tokens=workload.max_new_tokens, sampling=sampling)
      calls = [functools.partial(decode, prompt, rng, **arguments) for decode in decoders.values()]
      seconds_of_text, results = interleaved_seconds(calls, repeats, run=operator.call)
      seconds.append(seconds_of_text)
      results_by_text.append([require_finite(result) for result in jax.device_get(results)])
      report((i + 1) / len(workload.texts))
  outputs = dict(zip(decoders, map(list, zip(*results_by_text))))
  tokens = np.array([num_tokens(outputs[key]) for key in decoders])
  # `seconds` is [texts, decoders, repeats].
  rate = dict(zip(decoders, tokens / np.median(seconds, axis=2).sum(axis=0)))
  rate_of_repeats = dict(zip(decoders, tokens[:, None] / np.sum(seconds, axis=0)))

  def compare_outputs(setting: Record) -> bool:
    """Return True if both decoders compute the same target, so that outputs must be equal."""
    if not comparison.stops_at_eos or sampling.temperature:
      return False
    baseline, models = setting.settings.baseline, setting.models
    float32 = models.dtype == "float32" and not models.kernels.endswith(("int8", "int4"))
    return baseline == OWN_BASELINE.name or (float32 and backends[baseline].float32)

  measured = []
  for setting in settings:
    key, baseline_key = (_precision(setting), setting.settings.gamma), _baseline_key(setting)
    ours, theirs = outputs[key], outputs[baseline_key]
    speedup = rate[key] / rate[baseline_key]
    low, high = ratio_range(float(speedup), rate_of_repeats[key] / rate_of_repeats[baseline_key])
    target_calls = sum(int(result.num_rounds) for result in theirs)
    measured.append(
      setting.replace(
        num_tokens=num_tokens(ours),
        rounds=num_rounds(ours),
        alpha=comparison.alpha,
        acceptance_rate=None if workload.beams else acceptance_rate(ours),
        acceptance_by_position=None if workload.beams else acceptance_by_position(ours),
        tokens_per_round=num_tokens(ours) / num_rounds(ours),
        baseline_pass_ms=1e3 * num_tokens(theirs) / rate[baseline_key] / target_calls,
        baseline_tokens_per_s=rate[baseline_key],
        speculative_tokens_per_s=rate[key],
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        identical=identical(theirs, ours) if compare_outputs(setting) else None,
        seconds=time.perf_counter() - started,
      )
    )
  return measured


def _load_decoders(
  comparison: Comparison,
  sampling: Sampling,
  backends: Mapping[str, Backend],
  settings: Sequence[Record],
  stack: contextlib.ExitStack,
) -> dict[_DecoderKey, Callable]:
  """Return all decoders that the settings need, as functions that return seconds and a result.

  `stack` closes the subprocesses in which backends run.
  """
  pairs = {_precision(pair): pair for pair in comparison.pairs}

  @functools.cache
  def subprocess_named(name: str, python: str | None) -> Process:
    return stack.enter_context(Process(python))

  decoders: dict[_DecoderKey, Callable] = {}
  for setting in settings:
    pair, gamma = pairs[_precision(setting)], setting.settings.gamma
    speculative = _speculative(comparison, pair, sampling, gamma)
    decoders[_precision(setting), gamma] = functools.partial(after_idle, speculative)
    key = _baseline_key(setting)
    if key in decoders:
      continue
    backend = backends[setting.settings.baseline]
    if backend.process:
      decoders[key] = in_subprocess(
        subprocess_named(backend.process, backend.python), backend, comparison
      )
    else:
      decode = backend.load(comparison._replace(pairs=(pair,)))
      decoders[key] = functools.partial(after_idle, decode)
  return decoders


def _target(one: Record | Pair) -> _Target:
  """Return dtype and kernels, whose name contains the format of the weights."""
  models = one.models if isinstance(one, Record) else one
  return models.dtype, models.kernels


def _precision(one: Record | Pair) -> _Precision:
  return _target(one), one.models.draft if isinstance(one, Record) else one.draft.name


def _baseline_key(setting: Record) -> _DecoderKey:
  """Return the key of a setting's baseline. Other libraries do not depend on our precision."""
  own = setting.settings.baseline == OWN_BASELINE.name
  return _target(setting) if own else None, setting.settings.baseline


def _speculative(comparison: Comparison, pair: Pair, sampling: Sampling, gamma: int) -> Decode:
  """Return a function for speculative decoding, or speculative beam search if there are beams."""
  beams, draft_beams = comparison.workload.beams, comparison.workload.draft_beams
  if beams:
    return best_of_beams(pair.beam_searcher(beams, gamma, draft_beams), pair.params)
  draft = pair.draft.build(sampling, chain(gamma))

  def decode(prompt, rng, *, max_new_tokens: int, sampling: Sampling) -> DecodeResult:
    decoder = Decoder(pair.target.model, draft, TokenVerifier(sampling))
    return decoder.run(pair.params, prompt, rng, max_new_tokens=max_new_tokens)

  return decode


def _free_memory() -> None:
  """Free weights that are no longer referenced, and all programs that JAX has compiled."""
  jax.clear_caches()
  gc.collect()


def formats_table(measured: Sequence[Record]) -> Table:
  """Return a table of formats of weights that one run decoded in turn, over the first of them."""
  rows: list[tuple[str, ...]] = []
  first = measured[0]
  for r in measured:
    rates = r.times.baseline_tokens_per_s or 0.0, r.times.speculative_tokens_per_s or 0.0
    ratio = rates[0] / (first.times.baseline_tokens_per_s or 0.0)
    cells = f"{rates[0]:.0f}", f"{ratio:.2f}", f"{rates[1]:.0f}"
    per_round = f"{r.outputs.tokens_per_round:.2f}"
    rows.append(
      (
        r.models.kernels,
        *cells,
        f"{r.times.speedup:.2f}{range_text(r)}",
        per_round,
        IDENTICAL.cell(r),
      )
    )
  settings = first.settings
  title = (
    f"{settings.task}, {first.models.target} with {first.models.draft}, {settings.num_examples} "
    f"texts, batch 1, {first.models.dtype}, temperature {settings.temperature:g}, {first.device}"
  )
  gamma = f"gamma {settings.gamma}"
  speeds = "autoregressive tokens/s", "over the first row", f"{gamma} tokens/s", "speedup"
  columns = "kernels and weights", *speeds, "acceptance length", "identical"
  notes = (
    "All rows were decoded in turn. speedup: of speculative decoding with the draft in the same "
    "format.",
    measured_with(measured),
  )
  return Table(title, columns, tuple(rows), notes)


def peers_table(measured: Sequence[Record]) -> Table:
  """Return a table of our decoders and then of the baselines, with our speedup over each baseline.

  The legend, PEERS_LEGEND, is printed once below several tables.
  """
  first = measured[0]
  gammas = list(dict.fromkeys(r.settings.gamma for r in measured))
  speedup_columns = tuple(f"gamma {gamma}" for gamma in gammas)
  rows: list[tuple[str, ...]] = []
  for gamma in gammas:
    r = next(r for r in measured if r.settings.gamma == gamma)
    tokens_per_s = r.times.speculative_tokens_per_s or 0.0
    tokens_per_pass = r.outputs.tokens_per_round or 0.0
    pass_ms = 1e3 * tokens_per_pass / tokens_per_s
    speeds = f"{tokens_per_s:.0f}", f"{pass_ms:.2f}", f"{tokens_per_pass:.2f}"
    rows.append((f"ours, gamma {gamma}", *speeds, *[MISSING] * (len(gammas) + 2)))
  for name in dict.fromkeys(r.settings.baseline for r in measured):
    over_baseline = [r for r in measured if r.settings.baseline == name]
    best = max(over_baseline, key=operator.attrgetter("times.speedup"))
    tokens_per_s = best.times.baseline_tokens_per_s or 0.0
    pass_ms = best.times.baseline_pass_ms or 0.0
    speeds = f"{tokens_per_s:.0f}", f"{pass_ms:.2f}", f"{pass_ms * tokens_per_s / 1e3:.2f}"
    limits = best.speedup_range
    spread = MISSING if limits is None else f"{limits[0]:.2f}-{limits[1]:.2f}"
    speedups = (f"{r.times.speedup:.2f}" for r in over_baseline)
    rows.append((name, *speeds, *speedups, spread, IDENTICAL.cell(best)))
  models, settings = first.models, first.settings
  names = f"{settings.task}, {models.target} with {models.draft}"
  title = (
    f"{names if settings.task else first.subject}, {settings.num_examples} texts, batch 1, "
    f"{models.dtype}, kernels {models.kernels}, {first.device}, "
    + (f"{settings.beams} beams" if settings.beams else f"temperature {settings.temperature:g}")
  )
  columns = "decoder", "tokens/s", "ms/pass", "tok/pass", *speedup_columns, "spread", "identical"
  return Table(title, columns, tuple(rows), ())
