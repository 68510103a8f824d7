"""Calibration for gamma = 'auto' and tree = 'auto': the best predicted speed (Section 3.5).

A short calibration decodes some of the texts of a run and times the parts of rounds. Closed forms
predict the speed of each gamma. If the predicted speedup is small, a trial measures it. If the
predicted or the measured speedup is below LEAST_GAIN, gamma is 0: decoding is autoregressive.

With tree = 'auto', the speed of trees is also predicted, from measured costs (Chen et al., Sequoia,
2024). The best tree is used if a trial finds it at least LEAST_GAIN times as fast as the chosen
gamma. Calibrations are cached on disk, in the folder of jax's compilation cache.
"""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import pathlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from specdec_jax import __version__, theory
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.core.counts import acceptance_rate, num_tokens, require_finite
from specdec_jax.core.decode import Decoder
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.sampling import row_keys
from specdec_jax.core.trees import Tree, chain, require_tree_memory
from specdec_jax.core.types import DecodeResult
from specdec_jax.errors import InputError, require_count
from specdec_jax.measure import machine
from specdec_jax.measure.alpha import positional_acceptance
from specdec_jax.measure.choice import LEAST_GAIN, Branching, Calibration, choose, choose_tree
from specdec_jax.measure.costs import Costs, round_calls, round_costs, start_calls
from specdec_jax.measure.timing import interleaved_medians
from specdec_jax.pair import Pair

NUM_TEXTS = 32  # number of texts decoded to measure alpha; at least one batch is decoded
GAMMAS = (3, 10)  # gammas whose costs are timed; costs of other gammas are interpolated
TREES = ((4, 2), (16, 6), (64, 4))  # (nodes, depth) of the timed trees; others are interpolated
SURE_GAIN = 1.5  # predicted speedup that needs no trial; see experiments/gpt_like
REPEATS = 5  # number of timings of each part of a round
TRIALS = 8  # minimum number of timed decodes in a trial


def resolve_tree(
  gamma: int | str,
  tree: Sequence[int] | str | None,
  pair: Pair,
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
  pair: Pair,
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
  pair: Pair, texts: Sequence[str], settings: DecodeSettings, branching: bool = False
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

  pair: Pair
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
      smallest, *others = (theory.best_tree(ranks, nodes, depth) for nodes, depth in TREES)
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
    drafts = [pair.draft.build(settings.sampling, tree) for tree in trees]
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


def get_or_compute(
  compute: Callable[[], Calibration], key: Callable[[], Mapping[str, Any]], num_texts: int
) -> tuple[Calibration, str]:
  """Return a cached calibration, or compute and cache it.

  The cache is a folder in jax's compilation cache. Without a compilation cache, nothing is cached.

  Args:
    compute: function that calibrates.
    key: function that returns the key of the calibration, a JSON object; see `cache_key`.
    num_texts: number of texts that `compute` uses. A cached calibration from fewer texts is not
      used.

  Returns:
    The calibration, and words for a message that say when the calibration was made and where it is
    cached. The words are empty if the calibration was computed now.
  """
  if not (cache := getattr(jax.config, "jax_compilation_cache_dir", None)):
    return compute(), ""
  key_json = json.dumps(key(), sort_keys=True)
  name = hashlib.sha256(key_json.encode()).hexdigest()[:16]
  path = pathlib.Path(cache) / "calibrations" / f"{name}.json"
  if path.is_file():
    try:
      cached = json.loads(path.read_text(encoding="utf-8"))
      calibration, date = _parse(cached["calibration"]), cached["date"]
      cached_texts = cached["num_texts"]
      if cached_texts >= num_texts:
        return calibration, f"; found on {date} with {cached_texts} texts (cached in {path})"
    except (OSError, ValueError, KeyError, TypeError) as error:
      fault = " ".join(f"{type(error).__name__}: {error}".split())[:200]
      warnings.warn(
        f"{path} is not a calibration ({fault}); it is measured again and replaced.", stacklevel=2
      )
  calibration = compute()
  branching = calibration.branching
  fields = calibration._asdict()
  if branching is not None:
    fields["branching"] = branching._asdict() | dict(tree=[*branching.tree.parents])
  date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
  with contextlib.suppress(OSError):  # if it cannot be written, the next run computes it again
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
      json.dump(dict(date=date, num_texts=num_texts, on=key_json, calibration=fields), file)
  return calibration, ""


def cache_key(
  pair: Pair, texts: Sequence[str], settings: DecodeSettings, branching: bool
) -> dict[str, Any]:
  """Return the key of a calibration in the cache, a JSON object.

  It includes the models, the settings, the versions of the program, the machine and, within a
  factor of 2, the length of the longest text. The content of the texts is not included, although it
  determines alpha: a later run is assumed to have similar texts. The seed is not included either.
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


def _parse(fields: dict[str, Any]) -> Calibration:
  """Convert the fields of a cached file to a calibration.

  Raises:
    ValueError, KeyError, TypeError: the fields are not those of a calibration, or a value is out of
      range.
  """
  if (branching := fields["branching"]) is not None:
    tree, acceptance = Tree(branching["tree"]), tuple(branching["acceptance"])
    branching = Branching(**branching | dict(tree=tree, acceptance=acceptance))
  tuples = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
  calibration = Calibration(**fields | tuples | dict(branching=branching))
  gamma, size = calibration.gamma, len(calibration.speedups)
  if not (0 <= gamma < size == len(calibration.c) == len(calibration.v) and size > 1):
    raise ValueError(f"gamma is {gamma}, among {size} speedups")
  numbers = [calibration.alpha, *calibration.c, *calibration.v, *calibration.speedups]
  finite = np.isfinite([*numbers, *calibration.starts, calibration.tried or 0.0]).all()
  if not (finite and min(numbers) >= 0 and calibration.alpha <= 1):
    raise ValueError("a number is out of range")
  return calibration


def params_digest(params: Any) -> str:
  """Return a hash of the names, shapes and values of all parameters."""
  digest = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    digest.update(f"{jax.tree_util.keystr(path)} {np.shape(leaf)}".encode())
    digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
  return digest.hexdigest()[:16]
