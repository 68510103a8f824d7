"""gamma = 'auto': the gamma with the best predicted speed on a run's own texts (Section 3.5).

A short calibration decodes a few of the texts and times what rounds are made of; the closed forms
do the rest. Where they promise little of speculation it is tried, and where they promise nothing,
or the trial fails, gamma is 0: plain decoding.

tree = 'auto': the same, and beside the best chain the best tree (Chen et al., Sequoia, 2024), with
costs as measured. It is taken if it was faster than the chain when it was tried.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from specdec_jax import tree_theory
from specdec_jax.core.decode import Decoder, require_finite
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import Tree, chain, require_tree_memory
from specdec_jax.core.types import DecodeResult
from specdec_jax.counts import acceptance_rate, num_tokens
from specdec_jax.errors import InputError, require_count
from specdec_jax.measurement.alpha import positional_acceptance
from specdec_jax.measurement.choice import LEAST_GAIN, Calibration, choose, choose_tree
from specdec_jax.measurement.costs import round_calls, round_costs, start_calls
from specdec_jax.measurement.kept import depends_on, get_or_compute
from specdec_jax.measurement.timing import interleaved_medians
from specdec_jax.pairs import Pair

NUM_TEXTS = 32  # decoded for alpha; a batch may hold more
GAMMAS = (3, 10)  # at which costs are timed; lines join them, up to the last
TREES = ((4, 2), (16, 6), (64, 4))  # (nodes, depth) of trees that are timed; lines join their v
SURE_GAIN = 1.5  # predicted, for it to be chosen without a trial; see experiments/gpt_like
REPEATS = 5  # of timing what rounds are made of
TRIALS = 8  # decodes timed, if there are not as many batches


def resolve_tree(
  gamma: int | str,
  tree: Sequence[int] | str | None,
  pair: Pair,
  texts: Sequence[str | None],
  sampling: Sampling,
  batch_size: int,
  max_new_tokens: int,
  seed: int = 0,
  lenience: float = 1.0,
  say: Callable[[str], object] = print,
) -> Tree:
  """The tree with parents `tree`, without it a chain of `gamma`, 0 for plain decoding; for 'auto'
  what `calibrate` chooses, or chose in an earlier run (`get_or_compute`), and `say` is told why.

  A tree goes before a gamma, and so does tree 'auto', which looks at chains too. Texts that are
  None will not be decoded, as in `translate.decode_lines`.

  Raises:
    InputError: gamma is no count, tree no tree; or there is nothing to choose, as gamma is 'auto'
      and a tree is given.
  """
  if tree is not None and not isinstance(tree, str):
    if gamma == "auto":
      raise InputError(
        f"gamma is 'auto' and tree is {tree!r:.100}: a tree leaves no gamma to choose; give one."
      )
    require_count("the number of a tree's guesses", len(tree))
    given = Tree(tree)
    require_tree_memory(given.num_nodes)
    return given
  if "auto" not in (gamma, tree):
    require_count("gamma", gamma, least=0)
    return chain(int(gamma))
  asked = [text for text in texts if text is not None]
  if not asked:
    return chain(0)
  settings = sampling, batch_size, max_new_tokens, seed, lenience
  find = functools.partial(calibrate, pair, asked, *settings, branching=tree == "auto")
  on = functools.partial(
    depends_on,
    *(pair, asked, sampling),
    batch_size=batch_size,
    max_new_tokens=max_new_tokens,
    lenience=lenience,
    branching=tree == "auto",
  )
  calibration, since = get_or_compute(find, on, num_texts=min(NUM_TEXTS, len({*asked})))
  say(f"{calibration}{since}.")
  return calibration.tree


def resolve_gammas(
  gammas: Sequence[int | str] | str,
  pair: Pair,
  texts: Sequence[str],
  samplings: Sequence[Sampling],
  batch_size: int,
  max_new_tokens: int,
  seed: int = 0,
  lenience: float = 1.0,
) -> list[int]:
  """Gammas to be measured: for 'auto' among them, what `calibrate` chooses for each sampling.

  Where that is plain decoding, which is no gamma to measure, it is the best that speculates.
  """
  asked = (gammas,) if isinstance(gammas, str) else gammas
  found = set()
  for gamma in asked:
    if gamma != "auto":
      require_count("gamma", gamma)
      found.add(int(gamma))
  for sampling in samplings if "auto" in asked else ():
    settings = sampling, batch_size, max_new_tokens, seed, lenience
    calibration = calibrate(pair, texts, *settings)
    instead = "" if calibration.gamma else f"; measured is gamma {calibration.best_draft}"
    print(f"temperature {sampling.temperature:g}: {calibration}{instead}.")
    found.add(calibration.best_draft)
  return sorted(found)


def calibrate(
  pair: Pair,
  texts: Sequence[str],
  sampling: Sampling,
  batch_size: int,
  max_new_tokens: int,
  seed: int = 0,
  lenience: float = 1.0,
  branching: bool = False,
) -> Calibration:
  """Choose a gamma for texts, at least one; arguments as `measure.measure`.

  With `branching`, a tree if one is faster; the chain's alpha is then that of the eldest children.

  It decodes NUM_TEXTS of them, spread evenly, or a batch if that is more, and takes seconds; its
  programs, as any, are compiled once and kept between runs.
  """

  def decoder(tree: Tree | int) -> Callable[..., DecodeResult]:
    decode = pair.decode_fn(sampling, tree, lenience)
    return functools.partial(decode, max_new_tokens=max_new_tokens)

  def fits(tree: Tree) -> bool:
    """Whether memory, and a model's positions, hold its rounds with the longest text."""
    prompt = jax.ShapeDtypeStruct((batch_size, max(len(pair.encode(t)) for t in texts)), np.int32)
    decoder = Decoder(pair.target, pair.draft(sampling, tree), pair.verifier_for(sampling))
    init = functools.partial(
      decoder.init, rng=row_keys(0, 0, batch_size), max_new_tokens=max_new_tokens
    )
    try:
      jax.eval_shape(init, pair.params, prompt)
    except InputError:
      return False
    return True

  def gain(tree: Tree | int, over: int) -> float:
    """Speed with one over that with another, both decoding in turn."""
    ways, repeats = (decoder(over), decoder(tree)), -(-TRIALS // len(batches))
    timed = [
      interleaved_medians([functools.partial(w, *b) for w in ways], repeats) for b in batches
    ]
    before_s, after_s = np.sum([medians for medians, _ in timed], axis=0)
    before, after = (num_tokens([jax.device_get(both[i]) for _, both in timed]) for i in (0, 1))
    return float((after / after_s) / (before / before_s))

  pair.require_batch_size(batch_size)
  if not texts:
    raise InputError("There is nothing to find a gamma for: no texts.")
  count = max(1, NUM_TEXTS // batch_size) * batch_size
  picked = [texts[i * len(texts) // count] for i in range(count)]
  # Of one width, so that there is one program of each kind.
  width = pair.prompt(picked).shape[1]
  batches = [
    (pair.prompt(picked[i : i + batch_size], width), row_keys(seed, i, batch_size))
    for i in range(0, count, batch_size)
  ]
  outputs = [require_finite(jax.device_get(decoder(GAMMAS[-1])(*batch))) for batch in batches]
  alpha, trees, prompt = acceptance_rate(outputs), [*map(chain, GAMMAS)], batches[0][0]
  lengths = [out.lengths.tolist() for out in outputs]
  if branching:
    longest = -(-max(map(max, lengths)) // 16) * 16  # few widths, so few programs
    at = [slice(i, i + 1) for i in range(batch_size)]  # row by row: q has some laws for each token
    prompts = [prompt[i] for prompt, _ in batches for i in at]
    cut = [
      out._replace(tokens=out.tokens[i, :longest], lengths=out.lengths[i])
      for out in outputs
      for i in at
    ]
    ranks = positional_acceptance(pair, prompts, cut, sampling, lenience=lenience).tolist()
    alpha, first, *rest = ranks[0], *(tree_theory.best_tree(ranks, *shape) for shape in TREES)
    trees += [first, *filter(fits, rest)]
  drafts = [pair.draft(sampling, tree) for tree in trees]
  starts = start_calls(pair, drafts[len(GAMMAS) - 1], prompt, max_new_tokens)
  rounds = round_calls(pair, drafts, prompt, sampling, max_new_tokens, lenience)
  seconds, _ = interleaved_medians([*starts, *rounds], REPEATS)
  costs = round_costs(seconds[:2], seconds[2:], [tree.depth for tree in trees])
  chosen = choose(alpha, dict(zip(GAMMAS, costs)), lengths)
  if chosen.gamma and chosen.speedups[chosen.gamma] < SURE_GAIN:
    tried = gain(chosen.gamma, 0)
    chosen = chosen._replace(gamma=chosen.gamma if tried >= LEAST_GAIN else 0, tried=tried)
  if branching:
    best = choose_tree(ranks, dict(zip(trees[len(GAMMAS) :], costs[len(GAMMAS) :])), lengths)
    if best.speedup >= LEAST_GAIN * chosen.speedups[chosen.gamma]:
      best = best._replace(tried=gain(best.tree, chosen.gamma))
    chosen = chosen._replace(branching=best)
  return chosen
