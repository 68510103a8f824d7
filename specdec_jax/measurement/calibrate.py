"""Calibration for gamma = 'auto' and tree = 'auto': the best predicted speed (Section 3.5).

A short calibration decodes some of the texts of a run and times the parts of rounds. Closed forms
predict the speed of each gamma. If the predicted speedup is small, a trial measures it. If the
predicted or the measured speedup is below LEAST_GAIN, gamma is 0: decoding is autoregressive.

With tree = 'auto', the speed of trees is also predicted, from measured costs (Chen et al., Sequoia,
2024). The best tree is used if a trial finds it at least LEAST_GAIN times as fast as the chosen
gamma.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jax import Array

from specdec_jax import extended_theory
from specdec_jax.core.decode import Decoder
from specdec_jax.core.sampling import row_keys
from specdec_jax.core.trees import Tree, chain, require_tree_memory
from specdec_jax.core.types import DecodeResult
from specdec_jax.counts import acceptance_rate, num_tokens, require_finite
from specdec_jax.errors import InputError, require_count
from specdec_jax.loading import DecodeSettings
from specdec_jax.measurement.alpha import positional_acceptance
from specdec_jax.measurement.calibration_cache import cache_key, get_or_compute
from specdec_jax.measurement.choice import LEAST_GAIN, Calibration, choose, choose_tree
from specdec_jax.measurement.costs import Costs, round_calls, round_costs, start_calls
from specdec_jax.measurement.timing import interleaved_medians
from specdec_jax.pairs import LoadedPair

NUM_TEXTS = 32  # number of texts decoded to measure alpha; at least one batch is decoded
GAMMAS = (3, 10)  # gammas whose costs are timed; costs of other gammas are interpolated
TREES = ((4, 2), (16, 6), (64, 4))  # (nodes, depth) of the timed trees; others are interpolated
SURE_GAIN = 1.5  # predicted speedup that needs no trial; see experiments/gpt_like
REPEATS = 5  # number of timings of each part of a round
TRIALS = 8  # minimum number of timed decodes in a trial


def resolve_tree(
  gamma: int | str,
  tree: Sequence[int] | str | None,
  pair: LoadedPair,
  texts: Sequence[str | None],
  settings: DecodeSettings,
  say: Callable[[str], object] = print,
) -> Tree:
  """Return the tree of draft tokens that a run's `gamma` and `tree` specify.

  If an earlier run with similar texts has calibrated, its choice is taken from the cache
  (`calibration_cache`).

  Args:
    gamma: number of draft tokens of a chain, or 0 for autoregressive decoding; 'auto' chooses it.
    tree: parents of the draft tokens; None for a chain; 'auto' chooses a tree or a chain. A tree or
      'auto' takes precedence over gamma.
    pair: target and draft.
    texts: texts of the run; some of them are decoded to calibrate. An entry is None if the run does
      not decode that text. If all are None, 'auto' means autoregressive decoding.
    settings: settings of the run.
    say: function that is called with a sentence that explains the choice.

  Raises:
    InputError: gamma or tree is invalid, or gamma is 'auto' and a tree is given.
  """
  if (static_tree := given_tree(gamma, tree)) is not None:
    return static_tree
  decoded = [text for text in texts if text is not None]
  if not decoded:
    return chain(0)
  branching = tree == "auto"
  calibration, origin = get_or_compute(
    functools.partial(calibrate, pair, decoded, settings, branching=branching),
    functools.partial(cache_key, pair, decoded, settings, branching=branching),
    num_texts=min(NUM_TEXTS, len({*decoded})),
  )
  say(f"{calibration}{origin}.")
  return calibration.tree


def given_tree(gamma: int | str, tree: Sequence[int] | str | None) -> Tree | None:
  """Return the tree that `gamma` and `tree` specify, or None if one of them is 'auto'.

  Raises:
    InputError: gamma or tree is invalid, or gamma is 'auto' and a tree is given.
  """
  if tree is not None and not isinstance(tree, str):
    if gamma == "auto":
      raise InputError(
        f"gamma is 'auto' and tree is {tree!r:.100}: a tree leaves no gamma to choose; give one."
      )
    require_count("the number of a tree's guesses", len(tree))
    static_tree = Tree(tree)
    require_tree_memory(static_tree.num_nodes)
    return static_tree
  if "auto" not in (gamma, tree):
    require_count("gamma", gamma, least=0)
    return chain(int(gamma))
  return None


def resolve_gammas(
  gammas: Sequence[int | str] | str,
  pair: LoadedPair,
  texts: Sequence[str],
  settings: Iterable[DecodeSettings],
) -> list[int]:
  """Return the gammas to measure, with 'auto' replaced by the choice of `calibrate`.

  'auto' is resolved separately for each of the settings. If the choice is autoregressive decoding,
  the gamma above 0 with the best predicted speed is measured instead.
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
  pair: LoadedPair, texts: Sequence[str], settings: DecodeSettings, branching: bool = False
) -> Calibration:
  """Choose gamma for texts; with `branching`, choose a tree if it is faster than a chain.

  The calibration decodes about NUM_TEXTS texts, spread evenly over `texts`, in whole batches, of
  which there is at least one. It takes seconds, plus the time to compile its programs, which are
  cached like any others.

  Args:
    pair: target and draft.
    texts: one or more texts.
    settings: settings of the run for which gamma is chosen.
    branching: whether to consider trees. If so, alpha is the acceptance rate of first children.

  Raises:
    InputError: there are no texts, or the batch size is invalid.
  """
  pair.require_batch_size(settings.batch_size)
  if not texts:
    raise InputError("There is nothing to find a gamma for: no texts.")
  return _Calibrator(pair, texts, settings).choose(branching)


@dataclasses.dataclass(frozen=True)
class _Calibrator:
  """Calibration of one run.

  Attributes:
    pair: target and draft.
    texts: texts of the run.
    settings: settings of the run.
  """

  pair: LoadedPair
  texts: Sequence[str]
  settings: DecodeSettings

  def choose(self, branching: bool) -> Calibration:
    """Decode the calibration texts, time rounds, and choose gamma or a tree; see `calibrate`."""
    batches = self.batches
    decode = self.decode_fn(chain(GAMMAS[-1]))
    outputs = [require_finite(jax.device_get(decode(*batch))) for batch in batches]
    alpha = acceptance_rate(outputs)
    lengths = [output.lengths.tolist() for output in outputs]
    trees = [*map(chain, GAMMAS)]
    if branching:
      ranks = self.acceptance_of_ranks(outputs)
      smallest, *others = (extended_theory.best_tree(ranks, nodes, depth) for nodes, depth in TREES)
      alpha = ranks[0]
      trees += [smallest, *filter(self.fits, others)]
    costs = self.costs(trees)
    chosen = choose(alpha, dict(zip(GAMMAS, costs)), lengths)
    if chosen.gamma and chosen.speedups[chosen.gamma] < SURE_GAIN:
      tried = self.trial(chain(chosen.gamma), chain(0))
      chosen = chosen._replace(gamma=chosen.gamma if tried >= LEAST_GAIN else 0, tried=tried)
    if branching:
      tree_costs = dict(zip(trees[len(GAMMAS) :], costs[len(GAMMAS) :]))
      best = choose_tree(ranks, tree_costs, lengths)
      if best.speedup >= LEAST_GAIN * chosen.speedups[chosen.gamma]:
        best = best._replace(tried=self.trial(best.tree, chain(chosen.gamma)))
      chosen = chosen._replace(branching=best)
    return chosen

  @functools.cached_property
  def batches(self) -> list[tuple[Array, Array]]:
    """Prompts and random keys of each batch of calibration texts."""
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
    """Return a function of (prompt, keys) that decodes with the given tree."""
    settings = self.settings
    decode = self.pair.decode_fn(settings.sampling, tree, settings.lenience)
    return functools.partial(decode, max_new_tokens=settings.max_new_tokens)

  def fits(self, tree: Tree) -> bool:
    """Return whether memory and the models' positions suffice for the longest text with a tree."""
    pair, settings = self.pair, self.settings
    longest = max(len(pair.encode(text)) for text in self.texts)
    prompt = jax.ShapeDtypeStruct((settings.batch_size, longest), np.int32)
    draft = pair.draft(settings.sampling, tree)
    decoder = Decoder(pair.target, draft, pair.verifier_for(settings.sampling))
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

  def acceptance_of_ranks(self, outputs: Sequence[DecodeResult]) -> list[float]:
    """Measure `positional_acceptance` on the outputs of the calibration texts."""
    longest = -(-max(int(output.lengths.max()) for output in outputs) // 16) * 16
    # Row by row, because q has several distributions per token and would take much memory.
    rows = [slice(i, i + 1) for i in range(self.settings.batch_size)]
    prompts = [prompt[row] for prompt, _ in self.batches for row in rows]
    cut = [
      output._replace(tokens=output.tokens[row, :longest], lengths=output.lengths[row])
      for output in outputs
      for row in rows
    ]
    return positional_acceptance(
      self.pair, prompts, cut, self.settings.sampling, lenience=self.settings.lenience
    ).tolist()

  def costs(self, trees: Sequence[Tree]) -> list[Costs]:
    """Measure the cost of a round with each tree. The first trees are the chains of GAMMAS."""
    pair, settings, prompt = self.pair, self.settings, self.batches[0][0]
    drafts = [pair.draft(settings.sampling, tree) for tree in trees]
    starts = start_calls(pair, drafts[len(GAMMAS) - 1], prompt, settings.max_new_tokens)
    rounds = round_calls(
      pair, drafts, prompt, settings.sampling, settings.max_new_tokens, settings.lenience
    )
    seconds, _ = interleaved_medians([*starts, *rounds], REPEATS)
    return round_costs(seconds[:2], seconds[2:], [tree.depth for tree in trees])

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
