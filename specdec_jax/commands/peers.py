"""What users would pick instead of ours, timed beside it: same weights, inputs, limits, threads."""

import contextlib
import dataclasses
import functools
import gc
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from specdec_jax import records
from specdec_jax.beam_search import best
from specdec_jax.core.decode import require_finite, speculative_decode
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.counts import (
  acceptance_by_position,
  acceptance_rate,
  identical,
  num_rounds,
  num_tokens,
)
from specdec_jax.errors import InputError, require_count, require_seed, require_types
from specdec_jax.measurement.measure import settings_to_measure
from specdec_jax.measurement.timing import interleaved_seconds, ratio_range
from specdec_jax.pairs import Pair
from specdec_jax.peers.contest import OWN, Competitor, Contest, Decode
from specdec_jax.peers.worker import elsewhere, process, rested
from specdec_jax.progress import Progress
from specdec_jax.records import Record
from specdec_jax.reporting.formats import render
from specdec_jax.reporting.runs import PEERS_LEGEND, peers_table


def peers(
  contests: Sequence[Callable[[str], Contest]],
  competitors: Sequence[Competitor],
  output_dir: str,
  repeats: int = 5,
  seed: int = 0,
) -> None:
  """Time our decoding beside others', print tables and append to `results.jsonl`.

  Who is not installed is named, and the others are measured.

  Args:
    contests: each makes one, given a folder for weights that is gone when the contest is over.
    competitors: beside our own plain decoding.
    output_dir: gets the records; settings recorded there already are not measured again.
    repeats: of each timed decode, interleaved.
    seed: of all sampling.
  """
  require_types(peers, locals())
  require_seed(seed)
  require_count("repeats", repeats)
  if not contests:
    raise InputError("There is nothing to measure: no contests.")
  console, present = Console(markup=False), [OWN]
  for competitor in competitors:
    if missing := competitor.absent():
      console.print(f"not installed: {competitor.name} (needs {', '.join(missing)})")
    else:
      present.append(competitor)
  with records.open_results(output_dir) as results:
    for make in contests:
      with tempfile.TemporaryDirectory() as folder:
        contest = make(folder)
        for sampling in map(Sampling, contest.temperatures):
          measured = _contend(contest, sampling, present, results, repeats, seed)
          for kernels in dict.fromkeys(r.kernels for r in measured):
            shown = peers_table([r for r in measured if r.kernels == kernels])
            console.print(render(shown, "terminal"), soft_wrap=True)
        del contest
      _free()
  console.print(Text(PEERS_LEGEND, style="dim"))
  console.print(f"Records: {results} (measured once; delete the file to measure again)")


def _contend(contest, sampling, competitors, results, repeats, seed) -> list[Record]:
  """The records of a contest by one sampling; those not in file `results` are measured now."""
  if not (contest.texts and contest.gammas):
    raise InputError("There is nothing to measure: no texts, or no gammas.")
  there = {c.name: c for c in competitors if c.takes_part(contest, sampling)}
  how = contest.gammas, 1, contest.max_new_tokens, seed, 1.0
  of_search = dict(beams=contest.beams, draft_beams=contest.draft_beams)
  ask = lambda pair, name: [
    dataclasses.replace(setting, **of_search)
    for setting in settings_to_measure(pair, contest.texts, [sampling], *how, name)
  ]
  asked = [setting for pair in contest.pairs for name in there for setting in ask(pair, name)]
  todo = records.missing(results, asked)
  if todo:
    for record in _measure(contest, sampling, there, todo, repeats, seed):
      records.append(results, record)
    _free()
  measured = {records.key(r): r for r in records.read(results)}
  return [measured[records.key(setting)] for setting in asked]


def _measure(contest, sampling, competitors, settings, repeats, seed) -> list[Record]:
  """The settings, each of one pair, one of the competitors (by name) and one gamma, as measured."""
  since = time.perf_counter()
  pairs = {pair.kernels: pair for pair in contest.pairs}
  common = dict(max_new_tokens=contest.max_new_tokens, sampling=sampling)
  # Our own plain decoding is another with other weights; everyone else's is the same.
  baseline = lambda s: (s.kernels if s.baseline == OWN.name else None, s.baseline)
  seconds, outputs = [], []
  with contextlib.ExitStack() as stack:
    processes = functools.cache(lambda name: stack.enter_context(process()))
    decodes: dict[tuple[str | None, str | int], Callable] = {}
    for s in settings:
      pair = pairs[s.kernels]
      decodes[s.kernels, s.gamma] = functools.partial(
        rested, _speculative(contest, pair, sampling, s.gamma)
      )
      if baseline(s) not in decodes:
        competitor = competitors[s.baseline]
        if competitor.process:
          decode = elsewhere(processes(competitor.process), competitor, contest)
        else:
          decode = functools.partial(rested, competitor.load(contest._replace(pairs=(pair,))))
        decodes[baseline(s)] = decode
    bar = stack.enter_context(Progress())
    about = f"{settings[0].subject}, temperature {sampling.temperature:g}"
    for i, text in enumerate(bar.track(contest.texts, description=about)):
      args = contest.pair.prompt([text]), row_keys(seed, i, 1)
      calls = [functools.partial(decode, *args, **common) for decode in decodes.values()]
      taken, results = interleaved_seconds(calls, repeats)
      seconds.append(taken)
      outputs.append([require_finite(d) for d in jax.device_get(results)])
  texts = dict(zip(decodes, map(list, zip(*outputs))))
  tokens = np.array([num_tokens(texts[name]) for name in decodes])
  rate = dict(zip(decodes, tokens / np.median(seconds, axis=1).sum(axis=0)))
  rates = dict(zip(decodes, (tokens / np.sum(seconds, axis=0)).T))  # of each repeat
  compared = contest.ends and sampling.temperature == 0
  measured = []
  for setting in settings:
    us, them = (setting.kernels, setting.gamma), baseline(setting)
    ours, theirs = texts[us], texts[them]
    low, high = ratio_range(float(rate[us] / rate[them]), rates[us] / rates[them])
    passes = sum(int(d.num_rounds) for d in theirs)
    measured.append(
      dataclasses.replace(
        setting,
        num_tokens=num_tokens(ours),
        rounds=num_rounds(ours),
        alpha=contest.alpha,
        acceptance_rate=None if contest.beams else acceptance_rate(ours),
        acceptance_by_position=None if contest.beams else acceptance_by_position(ours),
        tokens_per_round=num_tokens(ours) / num_rounds(ours),
        baseline_pass_ms=1e3 * num_tokens(theirs) / rate[them] / passes,
        baseline_tokens_per_s=rate[them],
        speculative_tokens_per_s=rate[us],
        speedup=rate[us] / rate[them],
        speedup_low=low,
        speedup_high=high,
        identical=identical(theirs, ours) if compared else None,
        seconds=time.perf_counter() - since,
      )
    )
  return measured


def _speculative(contest: Contest, pair: Pair, sampling: Sampling, gamma: int) -> Decode:
  """Our speculative decoding of a pair, or its speculative beam search."""
  if contest.beams:
    search = pair.beam_searcher(contest.beams, gamma, contest.draft_beams)
    return lambda prompt, rng, *, max_new_tokens, sampling: best(
      search(prompt, max_new_tokens=max_new_tokens)
    )
  draft, params = pair.draft(sampling, chain(gamma)), (pair.target_params, pair.draft_params)

  def decode(prompt, rng, *, max_new_tokens: int, sampling: Sampling) -> DecodeResult:
    verifier = TokenVerifier(sampling)
    models = pair.target, draft, *params
    return speculative_decode(
      *models, prompt, rng, max_new_tokens=max_new_tokens, verifier=verifier
    )

  return decode


def _free() -> None:
  """Give back what the last competitors held: their weights, and our programs."""
  jax.clear_caches()
  gc.collect()
