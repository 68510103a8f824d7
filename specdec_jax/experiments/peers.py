"""What users would pick instead of ours, timed beside it: same weights, inputs, lengths, threads.

A pair's weights are written once, as transformers has them, and everyone reads that folder. Other
libraries run in processes of their own: each has the cores as if it were alone, and is idle while
another decodes.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import importlib.util
import multiprocessing
import operator
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from specdec_jax import records
from specdec_jax.checkpoints.huggingface import save_huggingface
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.checkpoints.stored import param_shapes
from specdec_jax.data.vocabulary import Vocabulary, padded
from specdec_jax.decoding import require_finite, speculative_decode
from specdec_jax.errors import InputError, require_count
from specdec_jax.experiments.measure import settings_to_measure
from specdec_jax.experiments.speed import (
  acceptance_by_position,
  acceptance_rate,
  identical,
  num_rounds,
  num_tokens,
  own_baseline,
  row_keys,
)
from specdec_jax.models.config import T5Config, t5_config
from specdec_jax.models.simulated import simulated_acceptance
from specdec_jax.models.t5 import PAD_ID
from specdec_jax.pairs import EMBEDDED, Pair, load_pair
from specdec_jax.protocols import Decoded, Rounds
from specdec_jax.records import Record
from specdec_jax.reporting.table import MISSING
from specdec_jax.sampling import Sampling

LEGEND = (
  "tokens/s: total tokens / total seconds, medians of interleaved repeats, reading the prompt "
  "counted; ms/pass: all seconds shared out over passes of the target; gamma: how many times "
  "faster our speculative decoding with it is; spread: that of the fastest gamma in the worst and "
  "in the best of the repeats; same: outputs identical to ours, token for token (argmax and real "
  "weights only)."
)

Decode = Callable[..., Decoded]  # (prompt [1, P], rng [1], *, max_new_tokens, sampling), as ours
# (source, seed, max_new_tokens, temperature) -> tokens, EOS among them, and passes of the target.
Generate = Callable[[list[int], int, int, float], tuple[list[int], int]]

_GENERATE: dict[str, Generate] = {}  # in a process of its own: what it has loaded, by name


class Contest(NamedTuple):
  """What all competitors decode, and with which weights.

  Attributes:
    pairs: ours, read from the two folders: with float32 weights, and, where they are stored as
      bfloat16 and can be used so, as they are stored.
    target: folder of M_p as transformers has it. All but the second of ours widen it to float32.
    draft: folder of M_q.
    alpha: the acceptance rate to simulate, or None for the real one.
    texts: sources, decoded one at a time.
    gammas: guesses a round of ours, each measured.
    temperatures: 0 is argmax; each measured.
    max_new_tokens: limit for each.
  """

  pairs: tuple[Pair, ...]
  target: str
  draft: str
  alpha: float | None
  texts: Sequence[str]
  gammas: Sequence[int]
  temperatures: Sequence[float]
  max_new_tokens: int

  @property
  def pair(self) -> Pair:
    """Ours with float32 weights."""
    return self.pairs[0]

  @property
  def ends(self) -> bool:
    """Whether EOS ends a text; where acceptance is simulated, all run to the limit."""
    return self.alpha is None


class Competitor(NamedTuple):
  """Whose decoding of the target ours is compared with.

  Attributes:
    name: for records.
    packages: that must be installed.
    load: reads a contest's weights. In a process of its own, which gets the contest without pairs,
      it gives `Generate`.
    process: name of that process; those of one library share it, with its threads. None for this
      one.
    greedy_only: takes no part at temperatures above 0.
    trained_only: takes no part where acceptance is simulated.
  """

  name: str
  packages: tuple[str, ...]
  load: Callable[[Contest], Decode] | Callable[[Contest], Generate]
  process: str | None = None
  greedy_only: bool = False
  trained_only: bool = False

  def absent(self) -> list[str]:
    """Those of its packages that are not installed."""
    return [name for name in self.packages if importlib.util.find_spec(name) is None]

  def takes_part(self, contest: Contest, sampling: Sampling) -> bool:
    return not (
      (self.greedy_only and sampling.temperature) or (self.trained_only and not contest.ends)
    )


OWN = Competitor("own", (), lambda contest: own_baseline(contest.pair).decode)


def trained(
  folder: str,
  texts: Sequence[str],
  target: str = str(EMBEDDED / "target"),
  draft: str = str(EMBEDDED / "draft"),
  vocabulary: str = str(EMBEDDED / "vocabulary.model"),
  task: str = "multi30k_ende",
  extra_ids: int = 0,
  gammas: Sequence[int] = (5, 10),
  temperatures: Sequence[float] = (0.0, 1.0),
  max_new_tokens: int = 64,
) -> Contest:
  """A pair with trained weights, by default the one that comes with the package.

  Args:
    folder: gets the weights.
    texts: sources.
    target: checkpoint of M_p; as for `pairs.load_pair`, like the three after it.
    draft: checkpoint of M_q.
    vocabulary: of both.
    task: name for records.
    extra_ids: sentinels of the vocabulary.
    gammas: as in `Contest`, like what follows.
    temperatures: likewise.
    max_new_tokens: likewise.
  """

  def write(name: str, path: str) -> str:
    stored = open_checkpoint(path)
    halved = all(array.dtype == jnp.bfloat16 for array in stored.arrays.values())
    params = stored.load(stored.config, jnp.bfloat16 if halved else jnp.float32)
    return _write(folder, name, stored.config, params)

  target, draft = write("target", target), write("draft", draft)
  pairs = _pairs(target, draft, vocabulary, task, extra_ids)
  return Contest(pairs, target, draft, None, texts, gammas, temperatures, max_new_tokens)


def random(
  folder: str,
  texts: Sequence[str],
  target: str,
  draft: str,
  alpha: float,
  version: str = "1.1",
  gammas: Sequence[int] = (5, 7),
  max_new_tokens: int = 64,
) -> Contest:
  """Published sizes of T5 with random weights and a set acceptance rate, at temperature 0.

  All models do all of their work, and all texts run to the limit; see `simulated_acceptance`.

  Args:
    folder: gets the weights.
    texts: sources; the embedded vocabulary makes tokens of them.
    target: size of M_p; see `t5_config`.
    draft: size of M_q.
    alpha: acceptance rate.
    version: of T5, '1.0' or '1.1'.
    gammas: as in `Contest`.
    max_new_tokens: likewise.
  """

  def write(size: str) -> str:
    config = t5_config(size, version)
    return _write(folder, f"t5_{version}_{size}", config, _random_params(config))

  vocabulary, task = str(EMBEDDED / "vocabulary.model"), f"simulated, alpha {alpha:g}"
  extra_ids = t5_config(target, version).vocab_size - len(Vocabulary(vocabulary))
  target, draft = write(target), write(draft)
  pairs = tuple(
    pair._replace(target=simulated_acceptance(pair.target, alpha), simulated_alpha=alpha)
    for pair in _pairs(target, draft, vocabulary, task, extra_ids)
  )
  return Contest(pairs, target, draft, alpha, texts, gammas, (0.0,), max_new_tokens)


def _pairs(target: str, draft: str, vocabulary: str, task: str, extra_ids: int) -> tuple[Pair, ...]:
  """As `load_pair`, with float32 weights and with those that are stored, if that is another."""
  load = functools.partial(load_pair, target, draft, vocabulary, task, extra_ids=extra_ids)
  widened, stored = load(), load(stored_weights=True)
  return (widened,) if widened.kernels == stored.kernels else (widened, stored)


def _write(folder: str, name: str, config: T5Config, params) -> str:
  path = os.path.join(folder, name)
  save_huggingface(path, config, params)
  return path


def _random_params(config: T5Config):
  """Parameters on the host that keep activations near 1, bfloat16 as published ones often are."""
  rng = np.random.default_rng(0)

  def draw(leaf):
    if len(leaf.shape) == 1:
      return np.ones(leaf.shape, jnp.bfloat16)
    drawn = rng.standard_normal(leaf.shape, np.float32) * np.float32(leaf.shape[0] ** -0.5)
    return drawn.astype(jnp.bfloat16)

  return jax.tree.map(draw, param_shapes(config))


def decoded(tokens: Sequence[int], num_passes: int, max_new_tokens: int) -> Decoded:
  """A text by its tokens, EOS among them, and passes of the target; rounds are not told apart."""
  array: Callable[..., Any] = np.asarray  # on the host is as good
  none = array(np.zeros((0, 1), np.int32))
  return Decoded(
    tokens=array(padded([tokens], max_new_tokens)),
    lengths=array([len(tokens)]),
    rounds=Rounds(array(np.zeros((0, 1, 0), np.int32)), none, none, none),
    num_rounds=array(num_passes),
    not_finite=array([-1]),
  )


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
            console.print(peers_table([r for r in measured if r.kernels == kernels]))
        del contest
      _free()
  console.print(Text(LEGEND, style="dim"))
  console.print(f"Records: {results} (measured once; delete the file to measure again)")


def _contend(contest, sampling, competitors, results, repeats, seed) -> list[Record]:
  """The records of a contest by one sampling; those not in file `results` are measured now."""
  if not (contest.texts and contest.gammas):
    raise InputError("There is nothing to measure: no texts, or no gammas.")
  there = {c.name: c for c in competitors if c.takes_part(contest, sampling)}
  how = contest.gammas, 1, contest.max_new_tokens, seed, 1.0
  ask = lambda pair, name: settings_to_measure(pair, contest.texts, [sampling], *how, name)
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
    processes = functools.cache(lambda name: stack.enter_context(_process()))
    decodes: dict[tuple[str | None, str | int], Callable] = {}
    for s in settings:
      pair = pairs[s.kernels]
      decodes[s.kernels, s.gamma] = functools.partial(timed, _speculative(pair, sampling, s.gamma))
      if baseline(s) not in decodes:
        competitor = competitors[s.baseline]
        if competitor.process:
          decode = _elsewhere(processes(competitor.process), competitor, contest)
        else:
          decode = functools.partial(timed, competitor.load(contest._replace(pairs=(pair,))))
        decodes[baseline(s)] = decode
    bar = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
    about = f"{contest.pair.task}, temperature {sampling.temperature:g}"
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
    ours, theirs, spread = texts[us], texts[them], rates[us] / rates[them]
    passes = sum(int(d.num_rounds) for d in theirs)
    measured.append(
      dataclasses.replace(
        setting,
        num_tokens=num_tokens(ours),
        rounds=num_rounds(ours),
        alpha=contest.alpha,
        acceptance_rate=acceptance_rate(ours),
        acceptance_by_position=acceptance_by_position(ours),
        tokens_per_round=num_tokens(ours) / num_rounds(ours),
        baseline_pass_ms=1e3 * num_tokens(theirs) / rate[them] / passes,
        baseline_tokens_per_s=rate[them],
        speculative_tokens_per_s=rate[us],
        speedup=rate[us] / rate[them],
        speedup_low=spread.min(),
        speedup_high=spread.max(),
        identical=identical(theirs, ours) if compared else None,
        seconds=time.perf_counter() - since,
      )
    )
  return measured


def _speculative(pair: Pair, sampling: Sampling, gamma: int) -> Decode:
  """Our speculative decoding of a pair."""
  draft, params = pair.draft(sampling, gamma), (pair.target_params, pair.draft_params)
  return functools.partial(speculative_decode, pair.target, draft, *params)


def _process() -> concurrent.futures.Executor:
  """A process of its own, new: it has none of this one's threads."""
  spawn = multiprocessing.get_context("spawn")
  return concurrent.futures.ProcessPoolExecutor(1, spawn, initializer=_end_with_parent)


def _end_with_parent() -> None:
  """End this process when the one that began it does, though it be killed."""
  parent = multiprocessing.parent_process()

  def watch(parent):
    parent.join()
    os._exit(1)

  threading.Thread(target=watch, args=[parent], daemon=True).start()


def _elsewhere(
  process: concurrent.futures.Executor, competitor: Competitor, contest: Contest
) -> Callable[..., tuple[float, Decoded]]:
  """A competitor's decoding in a process of its own, timed there: `timed` of a `Decode`."""
  process.submit(_load_here, competitor, contest._replace(pairs=())).result()

  def decode(prompt, rng, *, max_new_tokens, sampling):
    source = [token for token in np.asarray(prompt)[0].tolist() if token != PAD_ID]
    key = int(jax.random.key_data(rng)[0, -1])
    how = source, key, max_new_tokens, sampling.temperature
    seconds, (tokens, num_passes) = process.submit(_generate_here, competitor.name, *how).result()
    return seconds, decoded(tokens, num_passes, max_new_tokens)

  return decode


def _load_here(competitor: Competitor, contest: Contest) -> None:
  load: Callable[[Contest], Any] = competitor.load
  _GENERATE[competitor.name] = load(contest)


def _generate_here(name: str, *args) -> tuple[float, tuple[list[int], int]]:
  return timed(_GENERATE[name], *args)


def timed(call: Callable, *args, **kwargs) -> tuple[float, Any]:
  """Seconds that a call takes, and its result; ends when no thread of this process runs."""
  since = time.perf_counter()
  result = jax.block_until_ready(call(*args, **kwargs))
  seconds = time.perf_counter() - since
  _rest()
  return seconds, result


def interleaved_seconds(
  calls: Sequence[Callable[[], tuple[float, Any]]], repeats: int
) -> tuple[np.ndarray, list[Any]]:
  """Seconds [R, N] of N `timed` calls over `repeats` rounds of all in turn, and the last results.

  The first, uncounted round compiles and warms up. Every other round runs backwards, so that no
  call always follows the same neighbour.
  """
  results = [call()[1] for call in calls]
  seconds = np.zeros((repeats, len(calls)))
  for r in range(repeats):
    for i in range(len(calls)) if r % 2 else reversed(range(len(calls))):
      seconds[r, i], results[i] = calls[i]()
  return seconds, results


def _rest(longest: float = 1.0) -> None:
  """Wait until no thread of this process runs: those of OpenMP look out for work for a while."""
  until = time.perf_counter() + longest
  busy = True
  while busy and time.perf_counter() < until:
    since = time.process_time()
    time.sleep(0.002)
    busy = time.process_time() - since > 0.0005


def _free() -> None:
  """Give back what the last competitors held: their weights, and our programs."""
  jax.clear_caches()
  gc.collect()


def peers_table(measured: Sequence[Record]) -> Table:
  """One row a decoder, ours first; how much faster ours is than each of the others."""
  first = measured[0]
  gammas = list(dict.fromkeys(r.gamma for r in measured))
  by_name = {b: [r for r in measured if r.baseline == b] for b in (r.baseline for r in measured)}
  table = Table(
    title=f"{first.task}, {first.target} with {first.draft}, {first.num_examples} texts, batch 1, "
    f"{first.dtype}, kernels {first.kernels}, {first.platform} ({first.device_kind}), "
    f"temperature {first.temperature:g}",
    box=box.SIMPLE_HEAD,
    show_edge=False,
    padding=0,
  )
  table.add_column("", no_wrap=True)
  ratios = [f"gamma {gamma}" for gamma in gammas]
  for heading in ("tokens/s", "ms/pass", "tok/pass", *ratios, "spread", "same"):
    table.add_column(heading, justify="right", no_wrap=True)
  for gamma in gammas:
    table.add_row(f"gamma {gamma}", *_ours(next(r for r in measured if r.gamma == gamma)))
  table.add_section()
  for name, of_name in by_name.items():
    best = max(of_name, key=operator.attrgetter("speedup"))
    table.add_row(name, *_theirs(best), *(f"{r.speedup:.2f}" for r in of_name), *_spread(best))
  return table


def _ours(r):
  rate, passed = r.speculative_tokens_per_s, r.tokens_per_round
  return f"{rate:.0f}", f"{1e3 * passed / rate:.2f}", f"{passed:.2f}"


def _theirs(r):
  rate, pass_ms = r.baseline_tokens_per_s, r.baseline_pass_ms
  return f"{rate:.0f}", f"{pass_ms:.2f}", f"{pass_ms * rate / 1e3:.2f}"


def _spread(r):
  same = {True: "yes", False: "NO", None: MISSING}[r.identical]
  return f"{r.speedup_low:.2f}-{r.speedup_high:.2f}", same
