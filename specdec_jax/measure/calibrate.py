"""Calibration for gamma = 'auto' and tree = 'auto': the best predicted speed (Section 3.5).

A calibration decodes some of the texts of a run and times the parts of rounds. Closed forms
predict the speed of each gamma; if the predicted speedup is small, a trial measures it. If the
speedup is below LEAST_GAIN, gamma is 0: decoding is autoregressive.

With tree = 'auto', the speed of trees is predicted, too (Chen et al., Sequoia, 2024), with sampled
and with greedy siblings (Hu et al., 2025). The best tree is used if a trial finds it at least
LEAST_GAIN times as fast as the chosen gamma. Calibrations are cached on disk, in the folder of
jax's compilation cache.
"""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import logging
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from specdec_jax import __version__, theory
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.core.counts import acceptance_rate, num_tokens, require_finite
from specdec_jax.core.decode import Decoder, DecodeSettings
from specdec_jax.core.identity import params_digest
from specdec_jax.core.sampling import row_keys
from specdec_jax.core.trees import Tree, chain
from specdec_jax.core.types import AnyPair, DecodeResult
from specdec_jax.errors import InputError, require_count
from specdec_jax.measure import machine
from specdec_jax.measure.alpha import positional_acceptance
from specdec_jax.measure.costs import Costs, interleaved_medians, measure_costs

NUM_TEXTS = 32  # number of texts decoded to measure alpha; at least one batch is decoded
GAMMAS = (3, 10)  # gammas whose costs are timed; costs of other gammas are interpolated
TREES = ((4, 2), (16, 6), (64, 4))  # (nodes, depth) of the timed trees; others are interpolated
SURE_GAIN = 1.5  # predicted speedup that needs no trial; see experiments/gpt_like
REPEATS = 5  # number of timings of each part of a round
TRIALS = 8  # minimum number of timed decodes in a trial
LEAST_GAIN = 1.02  # speedup, predicted or tried, below which speculation is not used
NODES, DEPTH = (4, 8, 16, 32, 64), 10  # sizes and maximum depth of the trees to choose from
WIDTH, GREEDY_WIDTH = 8, 4  # maximum number of children, sampled and with greedy siblings


class Branching(NamedTuple):
  """Best tree that is not a chain, and the values on which the choice is based."""

  tree: Tree  # with the highest predicted speed
  acceptance: theory.Acceptance  # positional acceptance
  drafting: float  # predicted time to draft the tree, in target steps
  v: float  # predicted time of a round without drafting, in target steps
  speedup: float  # predicted
  tried: float | None = None  # measured speed relative to the chosen gamma; None without a trial

  def __str__(self) -> str:
    of_three = theory.acceptance_of_siblings(self.acceptance, 3)
    ranks = ", ".join(f"{chance:.2f}" for chance in of_three)
    siblings = "greedy siblings" if self.tree.greedy_siblings else "children"
    tokens = theory.tree_tokens(self.tree, self.acceptance)
    tried = "" if self.tried is None else f"; tried, {self.tried:.2f} times as fast as the chain"
    return (
      f"the best tree, {self.tree.num_nodes} nodes of depth {self.tree.depth}, has a predicted "
      f"speedup of {self.speedup:.2f}: {tokens:.2f} tokens per round, drafting "
      f"{self.drafting:.2f} and v {self.v:.2f} steps, acceptance of {siblings} of rank 0, 1, 2: "
      f"{ranks}{tried}"
    )


class Calibration(NamedTuple):
  """Choice of gamma or of a tree, and the values on which the choice is based.

  `c`, `v` and `speedups` have one entry for each gamma, from 0. If trees were considered, alpha is
  the acceptance rate of first children, so that chains and trees are comparable.
  """

  gamma: int  # used unless `branching` is chosen; 0 for autoregressive decoding
  alpha: float  # acceptance rate in the decoded texts
  c: tuple[float, ...]  # times of a draft step, in target steps (Definition 7); 0 at gamma 0
  v: tuple[float, ...]  # times of a round without drafting, in target steps; 1 at gamma 0
  speedups: tuple[float, ...]  # predicted; 1 at gamma 0
  starts: tuple[float, float]  # prefill times of target and draft for one batch, in target steps
  tried: float | None = None  # measured speedup of the best gamma; None without a trial
  branching: Branching | None = None  # the best tree; None if trees were not considered

  @property
  def tree(self) -> Tree:
    """Best tree, if at least LEAST_GAIN times as fast as the chain in a trial; else the chain."""
    best = self.branching
    faster = best is not None and best.tried is not None and best.tried >= LEAST_GAIN
    return best.tree if best is not None and faster else chain(self.gamma)

  @property
  def best_draft(self) -> int:
    """Gamma with the highest predicted speedup among those above 0."""
    return 1 + int(np.argmax(self.speedups[1:]))

  def round_cost(self, gamma: int) -> float:
    """Return the time of a round with a given gamma, in target steps."""
    return gamma * self.c[gamma] + self.v[gamma]

  def __str__(self) -> str:
    best = self.best_draft
    speedups = ", ".join(
      f"{self.speedups[gamma]:.2f} at gamma {gamma}"
      for gamma in (best - 1, best, best + 1)
      if 0 < gamma < len(self.speedups)
    )
    chosen = f"gamma {self.gamma}" if self.gamma else "autoregressive decoding, gamma 0,"
    if not self.tree.is_chain:
      chosen = f"a tree of {self.tree.num_nodes} nodes"
    branching = "" if self.branching is None else f"; {self.branching}"
    tried = "" if self.tried is None else f"; tried, {self.tried:.2f} at gamma {best}"
    noise = "" if self.c[best] else " (below the noise of the timing)"
    return (
      f"{chosen} was chosen: alpha {self.alpha:.2f}, c {self.c[best]:.3f}{noise}, v({best}) "
      f"{self.v[best]:.2f}; predicted speedup {speedups}{tried}{branching}"
    )


def choose(
  alpha: float, costs: Mapping[int, Costs], lengths: Sequence[Sequence[int]]
) -> Calibration:
  """Choose the gamma with the best predicted speed, from 0 to the largest measured gamma.

  gamma is 0 if the best predicted speedup is below LEAST_GAIN. Speed is predicted by
  `theory.text_improvement`. v is interpolated linearly, from 1 at gamma 0 through the measured
  gammas. The time of drafting is linear, through the smallest and the largest measured gamma.

  `costs` are measured for at least two gammas, and `lengths` are those of typical texts in tokens,
  one sequence per batch.
  """
  measured = sorted(costs)
  gammas = np.arange(1, measured[-1] + 1)
  drafting = [gamma * costs[gamma].c for gamma in (measured[0], measured[-1])]
  slope, fixed = np.polyfit((measured[0], measured[-1]), drafting, 1)
  c = np.maximum(0.0, fixed + slope * gammas) / gammas  # noise can make a difference negative
  v = np.interp(gammas, [0, *measured], [1.0, *(costs[gamma].v for gamma in measured)])
  starts = costs[measured[0]].prefill_steps
  speedups = [
    theory.text_improvement(alpha, gamma, c[gamma - 1], v[gamma - 1], lengths, *starts)
    for gamma in gammas.tolist()
  ]
  best = int(np.argmax(speedups))
  return Calibration(
    gamma=best + 1 if speedups[best] >= LEAST_GAIN else 0,
    alpha=alpha,
    c=(0.0, *c.tolist()),
    v=(1.0, *v.tolist()),
    speedups=(1.0, *speedups),
    starts=starts,
  )


def choose_tree(
  acceptance: theory.Acceptance, costs: Mapping[Tree, Costs], lengths: Sequence[Sequence[int]]
) -> Branching:
  """Choose the tree with the best predicted speed; chains are excluded.

  The candidates are the best trees for each maximum depth up to DEPTH and each number of nodes in
  NODES, up to the largest measured number. v is interpolated linearly, from 1 at one node through
  the measured trees. The time of drafting is a cost per level (one call of the draft) plus a cost
  per draft token, both fitted by least squares. Each tree has the weight 1 / v in this fit, because
  its drafting time is the difference of two measured times of rounds, whose error grows with v.
  """
  starts = next(iter(costs.values())).prefill_steps
  shapes = np.array([(t.depth, t.num_draft_tokens, t.depth * cost.c) for t, cost in costs.items()])
  *shapes, drafting = (shapes / [[cost.v] for cost in costs.values()]).T
  level_cost, token_cost = np.maximum(0.0, np.linalg.lstsq(np.transpose(shapes), drafting)[0])
  sizes, vs = zip(*sorted((tree.num_nodes, cost.v) for tree, cost in costs.items()))
  candidates, nodes = [], [n for n in NODES if n <= sizes[-1]]
  for tree in {theory.best_tree(acceptance, n, d) for n in nodes for d in range(1, DEPTH + 1)}:
    if not tree.is_chain:
      drafting = level_cost * tree.depth + token_cost * tree.num_draft_tokens
      v = float(np.interp(tree.num_nodes, [1, *sizes], [1.0, *vs]))
      rates = theory.tree_rates(tree, acceptance)
      speedup = theory.text_improvement(
        rates, tree.depth, drafting / tree.depth, v, lengths, *starts
      )
      candidates.append(Branching(tree, acceptance, float(drafting), v, speedup))
  return max(candidates, key=lambda candidate: candidate.speedup)


def auto_tree(
  pair: AnyPair,
  texts: Sequence[str],
  settings: DecodeSettings,
  branching: bool,
  say: Callable[[str], object] = print,
) -> Tree:
  """Return the tree of draft tokens that is the fastest for a run (`gamma` or `tree` 'auto').

  Args:
    texts: texts that the run decodes; some of them are decoded to calibrate. If there are none,
      decoding is autoregressive.
    branching: whether to choose among trees and chains, instead of among chains only.
    say: function that is called with a sentence that explains the choice.
  """
  if not texts:
    return chain(0)
  calibration, origin = get_or_compute(
    functools.partial(calibrate, pair, texts, settings, branching=branching),
    functools.partial(cache_key, pair, texts, settings, branching=branching),
    num_texts=min(NUM_TEXTS, len({*texts})),
  )
  say(f"{calibration}{origin}.")
  return calibration.tree


def resolve_gammas(
  gammas: Sequence[int | str] | str,
  pair: AnyPair,
  texts: Sequence[str],
  settings: Iterable[DecodeSettings],
) -> list[int]:
  """Return the gammas to measure, with 'auto' replaced by the choice for each of the settings.

  If the choice is autoregressive decoding, the best gamma above 0 is measured instead.
  """
  requested = (gammas,) if isinstance(gammas, str) else gammas
  resolved = set()
  for gamma in requested:
    if gamma != "auto":
      require_count("gamma", gamma)
      resolved.add(int(gamma))
  for each in settings if "auto" in requested else ():
    calibration = calibrate(pair, texts, each)
    best = calibration.best_draft
    instead = "" if calibration.gamma else f"; gamma {best} is measured instead"
    print(f"temperature {each.sampling.temperature:g}: {calibration}{instead}.")
    resolved.add(best)
  return sorted(resolved)


def calibrate(
  pair: AnyPair, texts: Sequence[str], settings: DecodeSettings, branching: bool = False
) -> Calibration:
  """Choose gamma for texts; with `branching`, choose a tree if it is faster than a chain.

  About NUM_TEXTS texts, spread evenly over `texts`, are decoded in at least one whole batch.

  Raises:
    InputError: there are no texts, or the batch size is invalid.
  """
  pair.require_batch_size(settings.batch_size)
  if not texts:
    raise InputError("There is nothing to find a gamma for: no texts.")
  logging.getLogger("specdec_jax").info("Calibrating gamma: programs are compiled and timed.")
  return _Calibrator(pair, texts, settings).choose(branching)


@dataclasses.dataclass(frozen=True)
class _Calibrator:
  """Calibration of one run."""

  pair: AnyPair
  texts: Sequence[str]
  settings: DecodeSettings

  def choose(self, branching: bool) -> Calibration:
    batches = self.batches
    decode = self.decode_fn(chain(GAMMAS[-1]))
    outputs = [require_finite(jax.device_get(decode(*batch))) for batch in batches]
    alpha = acceptance_rate(outputs)
    lengths = [output.lengths.tolist() for output in outputs]
    trees = [*map(chain, GAMMAS)]
    if branching:
      ranks = self.acceptance_of_ranks(outputs, WIDTH)
      smallest, *others = (theory.best_tree(ranks, nodes, depth) for nodes, depth in TREES)
      alpha = ranks[0]
      trees += [smallest, *filter(self.fits, others)]
    settings = self.settings
    (costs,) = measure_costs(
      [self.pair],
      trees,
      batches[0][0],
      settings.sampling,
      settings.max_new_tokens,
      settings.lenience,
      REPEATS,
    )
    chosen = choose(alpha, dict(zip(GAMMAS, costs)), lengths)
    is_sure = chosen.c[chosen.gamma] > 0 and chosen.speedups[chosen.gamma] >= SURE_GAIN
    is_sure &= all(cost.are_measured for cost in costs)
    if chosen.gamma and not is_sure:
      tried = self.trial(chain(chosen.gamma), chain(0))
      chosen = chosen._replace(gamma=chosen.gamma if tried >= LEAST_GAIN else 0, tried=tried)
    if branching:
      tree_costs = dict(zip(trees[len(GAMMAS) :], costs[len(GAMMAS) :]))
      best = choose_tree(ranks, tree_costs, lengths)
      if self.samples_siblings:
        greedy = [
          self.acceptance_of_ranks(outputs, width, greedy_siblings=True)
          for width in range(2, GREEDY_WIDTH + 1)
        ]
        found = choose_tree((ranks[:1], *greedy), tree_costs, lengths)
        best = max(best, found, key=lambda each: each.speedup)
      if best.speedup >= LEAST_GAIN * chosen.speedups[chosen.gamma]:
        best = best._replace(tried=self.trial(best.tree, chain(chosen.gamma)))
      chosen = chosen._replace(branching=best)
    return chosen

  @functools.cached_property
  def batches(self) -> list[tuple[Array, Array]]:
    size = self.settings.batch_size
    count = max(1, NUM_TEXTS // size) * size
    picked = [self.texts[i * len(self.texts) // count] for i in range(count)]
    width = self.pair.prompt(picked).shape[1]  # one width, so that each program is compiled once
    return [
      (
        self.pair.prompt(picked[first : first + size], width),
        row_keys(self.settings.seed, first, size),
      )
      for first in range(0, count, size)
    ]

  def decode_fn(self, tree: Tree) -> Callable[..., DecodeResult]:
    settings = self.settings
    decode = self.pair.decode_fn(settings.sampling, tree, settings.lenience)
    return functools.partial(decode, max_new_tokens=settings.max_new_tokens)

  @property
  def samples_siblings(self) -> bool:
    """True if the verifier is given siblings that are sampled without replacement."""
    verifier = self.pair.verifier_for(self.settings.sampling)
    return not (
      self.settings.sampling.is_argmax
      or verifier.needs_independent_siblings
      or verifier.uses_position_keys
    )

  def fits(self, tree: Tree) -> bool:
    """Return whether memory suffices for the longest text with a tree."""
    pair, settings = self.pair, self.settings
    longest = max(len(pair.encode(text)) for text in self.texts)
    prompt = jax.ShapeDtypeStruct((settings.batch_size, longest), np.int32)
    draft = pair.draft.build(settings.sampling, tree)
    decoder = Decoder(pair.target.model, draft, pair.verifier_for(settings.sampling))
    init = functools.partial(
      decoder.init,
      rng=row_keys(0, 0, settings.batch_size),
      max_new_tokens=settings.max_new_tokens,
    )
    try:
      jax.eval_shape(init, pair.params, prompt)
    except InputError:
      return False
    return True

  def acceptance_of_ranks(
    self, outputs: Sequence[DecodeResult], width: int, greedy_siblings: bool = False
  ) -> tuple[float, ...]:
    longest = -(-max(int(output.lengths.max()) for output in outputs) // 16) * 16
    # Row by row, because q has several distributions per token and would take much memory.
    rows = [slice(i, i + 1) for i in range(self.settings.batch_size)]
    prompts = [prompt[row] for prompt, _ in self.batches for row in rows]
    cut = [
      output._replace(tokens=output.tokens[row, :longest], lengths=output.lengths[row])
      for output in outputs
      for row in rows
    ]
    settings = self.settings
    acceptance = positional_acceptance(
      self.pair, prompts, cut, settings.sampling, width, settings.lenience, greedy_siblings
    )
    return tuple(acceptance.tolist())

  def trial(self, tree: Tree, baseline: Tree) -> float:
    """Return the speed with a tree / the speed with a baseline tree, from interleaved timings."""
    decodes = [self.decode_fn(baseline), self.decode_fn(tree)]
    repeats = -(-TRIALS // len(self.batches))
    timed = [
      interleaved_medians([functools.partial(decode, *batch) for decode in decodes], repeats)
      for batch in self.batches
    ]
    baseline_s, tree_s = np.sum([medians for medians, _ in timed], axis=0)
    baseline_tokens, tree_tokens = (
      num_tokens([jax.device_get(outputs[i]) for _, outputs in timed]) for i in (0, 1)
    )
    return float((tree_tokens / tree_s) / (baseline_tokens / baseline_s))


def get_or_compute(
  compute: Callable[[], Calibration], key: Callable[[], Mapping[str, Any]], num_texts: int
) -> tuple[Calibration, str]:
  """Return a cached calibration, or compute and cache it in the folder of jax's compilation cache.

  A cached calibration from fewer than `num_texts` texts is not used. `key` returns a JSON object.

  Returns:
    The calibration, and words for a message that say when it was made and where it is cached; ''
    if it was computed now.
  """
  if not (cache := getattr(jax.config, "jax_compilation_cache_dir", None)):
    return compute(), ""
  key_json = json.dumps(key(), sort_keys=True)
  name = hashlib.sha256(key_json.encode()).hexdigest()[:16]
  path = pathlib.Path(cache) / "calibrations" / f"{name}.json"
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it is computed again
    cached = json.loads(path.read_text(encoding="utf-8"))
    if cached["num_texts"] >= num_texts:
      origin = f"found on {cached['date']} with {cached['num_texts']} texts (cached in {path})"
      return _parsed(cached["calibration"]), f"; {origin}"
  calibration = compute()
  fields = calibration._asdict()
  if (best := calibration.branching) is not None:
    fields["branching"] = best._asdict() | dict(tree=dataclasses.asdict(best.tree))
  date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
  with contextlib.suppress(OSError):  # if it cannot be written, the next run computes it again
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
      json.dump(dict(date=date, num_texts=num_texts, on=key_json, calibration=fields), file)
  return calibration, ""


def _parsed(fields: dict[str, Any]) -> Calibration:
  fields = _with_tuples(fields)
  if (best := fields["branching"]) is not None:
    fields["branching"] = Branching(**best | dict(tree=Tree(**best["tree"])))
  return Calibration(**fields)


def _with_tuples(value: Any) -> Any:
  """Return a JSON value with tuples in place of lists."""
  if isinstance(value, dict):
    return {name: _with_tuples(each) for name, each in value.items()}
  return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def cache_key(
  pair: AnyPair, texts: Sequence[str], settings: DecodeSettings, branching: bool
) -> dict[str, Any]:
  """Return the key of a calibration in the cache, a JSON object.

  It includes the length of the longest text within a factor of 2, but neither the seed nor the
  content of the texts, which determines alpha: a later run is assumed to have similar texts.
  """
  longest = max(len(pair.encode(text)) for text in texts)
  return dict(
    batch_size=settings.batch_size,
    max_new_tokens=settings.max_new_tokens,
    lenience=settings.lenience,
    branching=branching,
    width=longest.bit_length(),  # equal for lengths within a factor of 2
    sampling=repr(settings.sampling),
    verifier=pair.verifier_name,
    target=f"{pair.target.model!r} {params_digest(pair.target.params)}",
    draft=f"{pair.draft.build(settings.sampling, chain(1))!r} {params_digest(pair.draft.params)}",
    kernels=pair.kernels,
    version=f"{__version__} {machine.commit()}, jax {jax.__version__}",
    devices=[device.device_kind for device in jax.devices()],
    machine=f"{machine.processor()}, {machine.threads()} threads",
  )
