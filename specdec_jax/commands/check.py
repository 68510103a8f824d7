"""Check whether the outputs of a pair have the target's distribution, in any settings."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from rich.console import Console

from specdec_jax.core.counts import require_finite
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.processors import Processors
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree, chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.errors import InputError, require_count, require_seed
from specdec_jax.exactness.compare import cells_of, compare_argmax, compare_samples
from specdec_jax.exactness.dependence import between_rounds, within_rounds
from specdec_jax.exactness.martingale import (
  MAX_SETTING_WEIGHT,
  MAX_WEIGHT,
  TOKEN_DRIFTS,
  Drift,
  RoundScores,
  Scores,
  acceptance_drift,
  detectable_bias,
  detectable_temperature,
  drifts,
  joined,
  total,
)
from specdec_jax.exactness.near_ties import Divergence, Rounding, node_moves, share_of
from specdec_jax.exactness.paths import rounds_of_self_draft
from specdec_jax.exactness.prefix_chi2 import Comparison
from specdec_jax.exactness.round_scores import positions, recorded, score_rounds
from specdec_jax.measure.progress import Progress
from specdec_jax.pair import Pair

ROUND_TOKENS = 24  # limit of outputs whose rounds are tested; a batch waits for its longest output
ENDLESS = -1  # an EOS id that no token has, so that texts do not end


class Setting(NamedTuple):
  """Combination of settings in which outputs or rounds are checked.

  Attributes:
    sampling: sampling method.
    tree: tree of draft tokens; `chain(0)` for autoregressive decoding.
    batch_size: number of rows that are decoded together.
    is_long: whether outputs continue past EOS, up to the limit for long texts.
  """

  sampling: Sampling
  tree: AnyTree
  batch_size: int
  is_long: bool = False

  def __str__(self) -> str:
    sampling = self.sampling
    truncated = f" top-k {sampling.top_k}" if sampling.top_k else ""
    truncated += f" top-p {sampling.top_p:g}" if sampling.top_p < 1 else ""
    shape = _named(self.tree) if self.tree.num_guesses else "autoregressive"
    long = ", long texts" if self.is_long else ""
    return f"temperature {sampling.temperature:g}{truncated}, {shape}{long}"


def check_exactness(
  pair: Pair,
  texts: Sequence[str],
  samplings: Sequence[Sampling],
  gammas: Sequence[int] = (3, 7),
  batch_sizes: Sequence[int] = (8, 1),
  max_new_tokens: int = 64,
  num_texts: int = 8,
  samples_per_text: int = 60,
  num_tokens: int = 4,
  num_guesses: int = 4_000,
  level: float = 1e-3,
  seed: int = 0,
  trees: Sequence[Sequence[int]] = (),
  dynamic: Sequence[tuple[int, int]] = (),
  long_tokens: int = 160,
  generation: GenerationConfig | None = None,
) -> None:
  """Check whether a pair is exact in each setting; exit with status 1 if a check fails.

  There are five checks. Their results are printed. A shape is a chain or a tree of draft tokens.

  - Logits: for each shape, the logits of a verification pass are compared with the logits of target
    forward passes over one token.
  - Rounds: above temperature 0, draft tokens, their acceptance and the tokens that the target
    samples are compared with their exact distributions, one by one and jointly. This check covers
    chains and static trees with `TokenVerifier`. It has its own batch sizes.
  - Outputs: at temperature 0, speculative and autoregressive outputs are compared token for token.
    Where two outputs differ, the logits of the two tokens must agree up to rounding.
  - The target as its own draft: at temperature 0, each round must accept a whole path of draft
    tokens; 1% more rounds than the minimum are tolerated. In a tree, the path to each leaf is
    checked.
  - Samples: above temperature 0, many outputs of some texts are sampled, and their first tokens are
    compared with the target's exact joint distribution.

  The first shape (the first gamma, if there is one) is checked with all sampling methods. Other
  shapes are checked at temperature 0, and with the first sampling method above it. So are batches
  smaller than the largest, but with the first shape only. At temperature 0, a quarter of the texts
  are used for smaller batches and for the target as its own draft.

  Args:
    pair: target and draft; see `load.load_pair`.
    texts: sources.
    samplings: sampling methods to check.
    gammas: gamma of each chain.
    batch_sizes: numbers of texts that are decoded together; each is checked.
    max_new_tokens: limit for each output at temperature 0. In the check of rounds, it is at most
      ROUND_TOKENS.
    num_texts: number of texts for which outputs are sampled.
    samples_per_text: number of outputs that are sampled for each of these texts.
    num_tokens: number of tokens, from the first, whose joint distribution is checked.
    num_guesses: minimum number of draft tokens in the check of rounds, for each sampling method and
      shape. For the first sampling method and the first shape, it is four times as large.
    level: probability of a false alarm, for all statistical checks together.
    seed: random seed of all sampling.
    trees: parents of the draft tokens of each tree, as in `trees.Tree`.
    dynamic: (nodes, depth) of each dynamic tree (`drafts.dynamic`).
    long_tokens: length of long outputs, which continue past EOS; 0 disables them. It is reduced if
      the target has too few positions. The last shape is checked with long outputs: outputs at
      temperature 0, and rounds with the first sampling method above it.
    generation: settings of logits processors, which apply in all checks except the first.

  Raises:
    InputError: there is nothing to check, an argument is out of range, the verifier is lossy, the
      acceptance is simulated, or `generation` has settings other than those of logits processors.
  """
  require_seed(seed)
  if not (texts and samplings and (gammas or trees or dynamic) and batch_sizes):
    raise InputError("There is nothing to check: no texts, samplings, guesses or batch sizes.")
  if not 0 < level < 1:
    raise InputError(f"level is {level}; a chance of a false alarm lies between 0 and 1.")
  if pair.simulated_alpha is not None:
    raise InputError(
      "The target's acceptance is simulated, so its output has no distribution to check; give a "
      "real target."
    )
  if not all(pair.verifier(sampling).exact for sampling in samplings):
    raise InputError(
      f"{pair.verifier_name} is lossy here: its output is not the target's own, so there "
      "is nothing to check; give an exact verifier as load.load_pair.verifier."
    )
  counts = dict(num_texts=num_texts, samples_per_text=samples_per_text, num_tokens=num_tokens)
  counts |= dict(max_new_tokens=max_new_tokens, num_guesses=num_guesses)
  for name, value in [*counts.items(), *(("gamma", gamma) for gamma in gammas)]:
    require_count(name, value)
  require_count("long_tokens", long_tokens, 0)
  fixed = [*map(chain, gammas), *map(Tree, trees)]
  changing = [DynamicTree(nodes - 1, depth) for nodes, depth in dynamic]
  shapes: list[AnyTree] = [*fixed, *changing]
  for shape in shapes:
    require_count("the number of a tree's guesses", shape.num_guesses)
  for size in batch_sizes:
    pair.require_batch_size(size)
  processors = pair.processors(generation or GenerationConfig())
  check = _Check(pair, texts, shapes, max(batch_sizes), max_new_tokens, long_tokens, processors)
  sampled = [sampling for sampling in samplings if sampling.temperature > 0]
  argmax = [sampling for sampling in samplings if sampling.temperature == 0]
  smaller = sorted({*batch_sizes} - {check.batch_size}, reverse=True)
  outputs = [Setting(sampling, tree, check.batch_size) for sampling in argmax for tree in shapes]
  outputs += [Setting(sampling, shapes[0], size) for sampling in argmax for size in smaller]
  if check.long_tokens:
    outputs += [Setting(sampling, shapes[-1], check.batch_size, True) for sampling in argmax]
  samples = [Setting(sampling, shapes[0], check.batch_size) for sampling in sampled]
  for sampling in sampled[:1]:
    samples += [Setting(sampling, tree, check.batch_size) for tree in (chain(0), *shapes[1:])]
    samples += [Setting(sampling, shapes[0], size) for size in smaller]
  # The exact distributions in rounds are known only if draft tokens are verified one by one.
  by_tokens = pair.verifier_name == TokenVerifier.__name__
  rounds: list[Setting] = []
  if by_tokens and fixed:
    rounds = [Setting(sampling, fixed[0], 32) for sampling in sampled]
    rounds += [Setting(sampling, tree, 32) for sampling in sampled[:1] for tree in fixed[1:]]
    if check.long_tokens:
      rounds += [Setting(sampling, fixed[-1], 8, True) for sampling in sampled[:1]]
  pooled = _pooled if rounds else []
  # Half of the level is for tests of all rounds together, and half for tests of single settings.
  setting_level = level / (2 if pooled else 1) / max(1, len(samples) + len(rounds))
  pool_level = level / 2 / max(1, len(pooled))

  console = Console(markup=False, soft_wrap=True)
  passed: list[bool] = []

  def say(holds: bool | None, what: object, evidence: str, *more: str) -> None:
    passed.extend([] if holds is None else [holds])
    console.print(f"{ {True: 'ok  ', False: 'FAIL', None: '--  '}[holds] } {what}: {evidence}")
    for line in more:
      console.print(f"       {line}")

  if processors:
    names = dict.fromkeys(type(processor).__name__ for processor in processors)
    console.print(f"Logits processors: {', '.join(names)}.")
  with Progress() as bar:
    for tree in bar.track(shapes, description="checking logits"):
      say(*check.logits(tree))
    scored: list[RoundScores] = []
    for number, setting in enumerate(bar.track(rounds, description="checking rounds")):
      count = num_guesses * (4 if number == 0 else 1)
      # Each setting has its own seed, so that all can be tested together.
      scored.append(check.rounds(setting, count, seed + 1 + number))
      say(*_of_rounds(scored[-1], setting, setting_level))
    for pool in pooled:
      say(*pool(scored, pool_level))
    for setting in bar.track(outputs, description="checking outputs"):
      say(*check.argmax(setting))
    for setting in bar.track(samples, description="checking samples"):
      say(*check.samples(setting, num_texts, samples_per_text, num_tokens, seed, setting_level))
  if sampled and (changing or not rounds):
    unscored = "dynamic trees" if by_tokens else pair.verifier_name
    console.print(f"For {unscored}, outputs were checked, but not rounds.")
  where = f"{pair.dtype} on {jax.devices()[0].platform}"
  console.print(f"{sum(passed)} of {len(passed)} checks hold, in {where}.")
  if not all(passed):
    raise SystemExit(1)


class _Check:
  """Checks of a pair in one setting at a time; see `check_exactness`.

  `logits`, `argmax` and `samples` return whether the check passes, what it checked, and evidence.
  """

  def __init__(
    self,
    pair: Pair,
    texts: Sequence[str],
    shapes: Sequence[AnyTree],
    batch_size: int,
    max_new_tokens: int,
    long_tokens: int,
    processors: Processors,
  ):
    self.pair, self.texts, self.shapes, self.batch_size = pair, texts, shapes, batch_size
    self.max_new_tokens, self.processors = max_new_tokens, processors
    most = getattr(getattr(pair.target.model, "config", None), "num_positions", None)
    if most:
      slots = pair.prompt(texts).shape[1] + max(shape.num_nodes for shape in shapes)
      long_tokens = min(long_tokens, most - slots)
    self.long_tokens = max(0, long_tokens)
    self.share = share_of(pair)
    self.moved: dict[AnyTree, float] = {}
    self.decode_fn = functools.partial(pair.decode_fn, processors=processors)
    self.autoregressive = functools.cache(
      lambda sampling, eos_id=None: _CachedDecode(self.decode_fn(sampling, chain(0), eos_id=eos_id))
    )
    self.cells = functools.cache(functools.partial(cells_of, pair, processors=processors))

  def logits(self, tree: AnyTree) -> tuple[bool, str, str]:
    """Compare the logits of a verification pass with the logits of passes over one token."""
    rows = np.arange(self.batch_size) % len(self.texts)
    prompt = self.pair.prompt(self.texts)[rows]
    decode = self.autoregressive(Sampling(temperature=0.0))
    keys = row_keys(0, 0, self.batch_size)
    output = decode(prompt, keys, max_new_tokens=self.max_new_tokens)
    tokens, lengths = np.asarray(output.tokens), np.asarray(output.lengths)
    self.moved[tree], share = node_moves(self.pair, prompt, tokens, lengths, tree)
    return (
      share <= self.share,
      f"verification, {_named(tree)}",
      (
        f"logits differ from those of single tokens by at most {self.moved[tree]:.2g}, "
        f"{share:.1g} of their range (fault above {self.share:.1g})"
      ),
    )

  def argmax(self, setting: Setting) -> tuple[bool, Setting | str, str, *tuple[str, ...]]:
    """Compare outputs at temperature 0, and count the rounds of the target as its own draft."""
    pair, (sampling, tree, batch_size, is_long) = self.pair, setting
    processors = self.processors
    texts, some = self.texts, self.texts[: -(-len(self.texts) // 4)]
    if batch_size < self.batch_size:
      texts = some
    size, limit, eos_id = batch_size, self.max_new_tokens, None
    if is_long:
      texts, limit, eos_id = texts[:batch_size], self.long_tokens, ENDLESS
    autoregressive = self.autoregressive(sampling, eos_id)
    speculative = self.decode_fn(sampling, tree, eos_id=eos_id)
    rounding, settings = (
      Rounding(self.share, self.moved[tree]),
      DecodeSettings(sampling, size, limit),
    )
    divergences = compare_argmax(
      pair, texts, autoregressive, speculative, tree.num_nodes, settings, rounding, processors
    )
    holds = all(d.is_tie for _, d in divergences)
    evidence = f"{len(texts) - len(divergences)} of {len(texts)} texts identical"
    if is_long:
      evidence += f", {self.long_tokens} tokens each"
    elif isinstance(tree, Tree):
      rounds, fewest = rounds_of_self_draft(pair, some, tree, size, limit, False, processors)
      holds &= rounds <= 1.01 * fewest
      evidence += f"; the target as its own draft takes {rounds} rounds of {fewest} at best"
    if not is_long and not tree.is_chain:
      rounds, fewest = rounds_of_self_draft(pair, some, tree, size, limit, True, processors)
      holds &= rounds <= 1.01 * fewest
      evidence += "," if isinstance(tree, Tree) else "; the target as its own draft takes"
      evidence += f" {rounds} of {fewest} on each of the tree's paths in turn"
    lines = [_of_divergence(pair, text, divergence) for text, divergence in divergences]
    return holds, _with_batch(setting), evidence, *lines

  def samples(
    self,
    setting: Setting,
    num_texts: int,
    samples_per_text: int,
    num_tokens: int,
    seed: int,
    level: float,
  ) -> tuple[bool | None, str, str]:
    """Compare the first tokens of many outputs with their exact joint distribution.

    The first element of the result says whether they agree. It is None if no prefix is probable
    enough to be counted, as with random weights.
    """
    texts = tuple(self.texts[:num_texts])
    decode = self.decode_fn(setting.sampling, setting.tree)
    cells = self.cells(texts, setting.sampling, samples_per_text, num_tokens)
    settings = DecodeSettings(setting.sampling, setting.batch_size, num_tokens, seed)
    joint = compare_samples(
      self.pair, texts, decode, settings, samples_per_text, cells, self.processors
    )
    if not joint.degrees:
      reason = (
        "not checked, because no prefix of an output is probable enough to be counted among "
        f"{samples_per_text} samples of each text; give more as samples_per_text"
      )
      return None, _with_batch(setting), reason
    return joint.p_value >= level, _with_batch(setting), _of_samples(joint, num_tokens, level)

  def rounds(self, setting: Setting, num_guesses: int, seed: int) -> RoundScores:
    """Decode texts in a setting, and score the draft tokens and next tokens of the rounds."""
    assert isinstance(setting.tree, Tree)
    eos_id = ENDLESS if setting.is_long else None
    decode = recorded(self.pair, setting.sampling, setting.tree, eos_id, self.processors)
    limit = min(ROUND_TOKENS, self.max_new_tokens)
    if setting.is_long:
      limit = self.long_tokens
    settings = DecodeSettings(setting.sampling, setting.batch_size, limit, seed)
    return score_rounds(self.pair, self.texts, decode, settings, num_guesses, self.processors)


class _CachedDecode:
  """Argmax decoding that caches results, so that all trees are compared with the same outputs.

  The random keys do not affect argmax, so they are not part of the key of a cached result.
  """

  def __init__(self, decode: Callable[..., DecodeResult]):
    self.decode = decode
    self.results: dict[tuple, DecodeResult] = {}

  def __call__(self, prompt: Array, keys: Array, *, max_new_tokens: int) -> DecodeResult:
    key = prompt.shape, np.asarray(prompt).tobytes(), max_new_tokens
    if key not in self.results:
      self.results[key] = require_finite(self.decode(prompt, keys, max_new_tokens=max_new_tokens))
    return self.results[key]


def _named(tree: AnyTree) -> str:
  if isinstance(tree, DynamicTree):
    return f"dynamic tree {tree.num_nodes}/{tree.depth}"
  return f"gamma {tree.depth}" if tree.is_chain else f"tree {tree.parents}"


def _with_batch(setting: Setting) -> str:
  return f"{setting}, batch {setting.batch_size}"


def _of_samples(joint: Comparison, num_tokens: int, level: float) -> str:
  impossible = f", {joint.num_impossible} of them impossible" if joint.num_impossible else ""
  return (
    f"{joint.num_samples} outputs{impossible}, first {num_tokens} tokens in {joint.num_cells} "
    f"cells: p = {joint.p_value:.2g} (fault below {level:.1g}; a total variation of "
    f"{joint.detectable(level):.3f} would be detected 9 times in 10)"
  )


def _of_rounds(scored: RoundScores, setting: Setting, level: float) -> tuple[bool, str, str]:
  assert isinstance(setting.tree, Tree)
  count = max(positions(setting.tree)) + 1
  by_name = drifts(scored, count)
  p_values = [drift.p_value for by_position in by_name.values() for drift in by_position]
  level /= len(p_values)
  standings = "; ".join(
    f"{name} {', '.join(f'{drift.z:+.1f}' for drift in by_position)}"
    for name, by_position in by_name.items()
  )
  guesses = scored.at(*range(count))
  return (
    min(p_values) >= level,
    f"{setting}, rounds",
    (
      f"{len(guesses.position)} guesses verified; standard deviations from the exact "
      f"distributions, by position in a round: {standings}; least p = {min(p_values):.2g} (fault "
      f"below {level:.1g}; {_acceptance_power(guesses, level, MAX_SETTING_WEIGHT)})"
    ),
  )


def _of_acceptance(scored: Sequence[RoundScores], level: float) -> tuple[bool, str, str]:
  every = joined(scored)
  guesses = every.where(every.position >= 0)
  drift = acceptance_drift(guesses)
  return (
    drift.p_value >= level,
    "acceptance in all rounds",
    (
      f"{guesses.accepted.sum():.0f} of {len(guesses.position)} guesses accepted, "
      f"{guesses.probability.sum():.1f} expected, {drift.z:+.1f} standard deviations when "
      f"weighted: p = {drift.p_value:.2g} (fault below {level:.1g}; "
      f"{_acceptance_power(guesses, level, MAX_WEIGHT)})"
    ),
  )


def _of_guesses(scored: Sequence[RoundScores], level: float) -> tuple[bool, str, str]:
  every = joined(scored)
  return _of_tokens(every.where(every.position >= 0).guess, "guesses in all rounds", level)


def _of_next(scored: Sequence[RoundScores], level: float) -> tuple[bool, str, str]:
  scores = joined(scored).next
  sampled = jax.tree.map(lambda x: x[scores.spread > 0], scores)
  return _of_tokens(sampled, "next tokens in all rounds", level)


def _of_tokens(scores: Scores, what: str, level: float) -> tuple[bool, str, str]:
  found = {name: drift(scores) for name, drift in TOKEN_DRIFTS.items()}
  level /= len(found)
  least = min(drift.p_value for drift in found.values())
  standings = ", ".join(f"{name} {drift.z:+.1f}" for name, drift in found.items())
  bias = detectable_temperature(scores, level)
  power = (
    f"a temperature wrong by {bias:.2%} would be detected 9 times in 10"
    if math.isfinite(bias)
    else "no token was sampled at random"
  )
  return (
    least >= level,
    what,
    (
      f"{len(scores.rank)} tokens, standard deviations from the exact distributions: {standings}; "
      f"least p = {least:.2g} (fault below {level:.1g}; {power})"
    ),
  )


def _within(scored: Sequence[RoundScores], level: float) -> tuple[bool, str, str]:
  return _of_correlations(map(within_rounds, scored), "independence within rounds", level)


def _between(scored: Sequence[RoundScores], level: float) -> tuple[bool, str, str]:
  return _of_correlations(map(between_rounds, scored), "independence between rounds", level)


def _of_correlations(
  correlations: Iterable[dict[str, Drift]], what: str, level: float
) -> tuple[bool, str, str]:
  by_name: dict[str, list[Drift]] = {}
  for of_setting in correlations:
    for name, drift in of_setting.items():
      by_name.setdefault(name, []).append(drift)
  pooled = {name: total(parts) for name, parts in by_name.items()}
  level /= len(pooled)
  worst = min(pooled, key=lambda name: pooled[name].p_value)
  drift = pooled[worst]
  return (
    drift.p_value >= level,
    what,
    (
      f"{len(pooled)} correlations; least p = {drift.p_value:.2g} (fault below {level:.1g}), of "
      f"{worst}: {drift.z:+.1f} standard deviations"
    ),
  )


_pooled = [_of_acceptance, _of_guesses, _of_next, _within, _between]


def _acceptance_power(guesses: RoundScores, level: float, max_weight: float) -> str:
  bias = detectable_bias(guesses, level, max_weight=max_weight)
  if math.isinf(bias):
    return "too few guesses to detect any bias in acceptance"
  return f"a bias of {bias:.2%} in acceptance would be detected 9 times in 10"


def _of_divergence(pair: Pair, text: int, d: Divergence) -> str:
  expected, got = pair.vocabulary.pieces([d.autoregressive, d.speculative])
  conclusion = "a tie" if d.is_tie else "a FAULT"
  return (
    f"text {text}, token {d.position + 1}: {expected!r} became {got!r}; their logits are "
    f"{d.gap:.2g} apart where rounding moves them by up to {d.rounding:.2g}: {conclusion}"
  )
