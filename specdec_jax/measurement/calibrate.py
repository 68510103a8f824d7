"""gamma = 'auto': the gamma with the best predicted speed on a run's own texts (Section 3.5).

A short calibration decodes a few of the texts and times what rounds are made of; the closed forms
do the rest. Where they promise little of speculation it is tried, and where they promise nothing,
or the trial fails, gamma is 0: plain decoding.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from specdec_jax import theory
from specdec_jax.counts import acceptance_rate, num_tokens
from specdec_jax.decoding import require_finite
from specdec_jax.errors import InputError, require_count
from specdec_jax.measurement.costs import Costs, round_calls, round_costs, start_calls
from specdec_jax.measurement.timing import interleaved_medians
from specdec_jax.pairs import Pair
from specdec_jax.protocols import Decoded
from specdec_jax.sampling import Sampling, row_keys
from specdec_jax.trees import chain

NUM_TEXTS = 32  # decoded for alpha; a batch may hold more
GAMMAS = (3, 10)  # at which costs are timed; lines join them, up to the last
LEAST_GAIN = 1.02  # predicted or tried, for speculation to be chosen
SURE_GAIN = 1.5  # predicted, for it to be chosen without a trial; see experiments/gpt_like
REPEATS = 5  # of timing what rounds are made of
TRIALS = 8  # decodes timed, if there are not as many batches


class Calibration(NamedTuple):
  """A choice of gamma, and why.

  Attributes:
    gamma: the choice; 0 for plain decoding.
    alpha: accepted / judged guesses of the texts decoded.
    c: time of a draft step in target steps, at gamma 0, 1, 2, ... (Definition 7); 0 at gamma 0.
    v: time of a pass over gamma + 1 tokens, likewise; 1 at gamma 0.
    speedups: predicted, likewise; 1 at gamma 0.
    starts: time of the target and of the draft to read a batch's prompts, in target steps.
    tried: speedup of the best draft over plain decoding of the same few texts, if it was tried.
  """

  gamma: int
  alpha: float
  c: tuple[float, ...]
  v: tuple[float, ...]
  speedups: tuple[float, ...]
  starts: tuple[float, float]
  tried: float | None = None

  @property
  def best_draft(self) -> int:
    """The best gamma of those that speculate."""
    return 1 + int(np.argmax(self.speedups[1:]))

  def round_cost(self, gamma: int) -> float:
    """Time of a round, in target steps."""
    return gamma * self.c[gamma] + self.v[gamma]

  def __str__(self) -> str:
    best = self.best_draft
    speedups = ", ".join(
      f"{self.speedups[gamma]:.2f} at gamma {gamma}"
      for gamma in (best - 1, best, best + 1)
      if 0 < gamma < len(self.speedups)
    )
    chosen = f"gamma {self.gamma}" if self.gamma else "plain decoding, gamma 0,"
    tried = "" if self.tried is None else f"; tried, {self.tried:.2f} at gamma {best}"
    return (
      f"{chosen} was chosen: alpha {self.alpha:.2f}, c {self.c[best]:.3f}, v({best}) "
      f"{self.v[best]:.2f}; predicted speedup {speedups}{tried}"
    )


def resolve_gamma(
  gamma: int | str,
  pair: Pair,
  texts: Sequence[str | None],
  sampling: Sampling,
  batch_size: int,
  max_new_tokens: int,
  seed: int = 0,
  lenience: float = 1.0,
  say: Callable[[str], object] = print,
) -> int:
  """`gamma`, or for 'auto' what `calibrate` chooses, 0 for plain decoding; `say` is told why.

  Texts that are None will not be decoded, as in `translate.decode_lines`.
  """
  if gamma != "auto":
    require_count("gamma", gamma)
    return int(gamma)
  asked = [text for text in texts if text is not None]
  if not asked:
    return 0
  calibration = calibrate(pair, asked, sampling, batch_size, max_new_tokens, seed, lenience)
  say(f"{calibration}.")
  return calibration.gamma


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
) -> Calibration:
  """Choose a gamma for texts, at least one; arguments as `measure.measure`.

  It decodes NUM_TEXTS of them, spread evenly, or a batch if that is more, and takes seconds; its
  programs, as any, are compiled once and kept between runs.
  """

  def decoder(gamma: int) -> Callable[..., Decoded]:
    decode = pair.decoder(sampling, gamma, lenience)
    return functools.partial(decode, max_new_tokens=max_new_tokens)

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
  drafts, prompt = [pair.draft(sampling, chain(gamma)) for gamma in GAMMAS], batches[0][0]
  starts = start_calls(pair, drafts[-1], prompt, max_new_tokens)
  rounds = round_calls(pair, drafts, prompt, sampling, max_new_tokens, lenience)
  seconds, _ = interleaved_medians([*starts, *rounds], REPEATS)
  costs = round_costs(seconds[:2], seconds[2:], GAMMAS)
  chosen = choose(acceptance_rate(outputs), costs, [out.lengths.tolist() for out in outputs])
  if not chosen.gamma or chosen.speedups[chosen.gamma] >= SURE_GAIN:
    return chosen
  ways = decoder(0), decoder(chosen.gamma)
  repeats = -(-TRIALS // len(batches))
  timed = [interleaved_medians([functools.partial(w, *b) for w in ways], repeats) for b in batches]
  plain_s, ours_s = np.sum([medians for medians, _ in timed], axis=0)
  plain_tokens, our_tokens = (
    num_tokens([jax.device_get(both[i]) for _, both in timed]) for i in (0, 1)
  )
  tried = float((our_tokens / ours_s) / (plain_tokens / plain_s))
  return chosen._replace(gamma=chosen.gamma if tried >= LEAST_GAIN else 0, tried=tried)


def choose(
  alpha: float, costs: Mapping[int, Costs], lengths: Sequence[Sequence[int]]
) -> Calibration:
  """The gamma from 0 to the largest measured with the best speed (`theory.text_improvement`).

  v goes in lines from 1 at gamma 0 through the gammas measured. So does what drafting takes once a
  round and once a guess, on one line through the first and the last of them.

  Args:
    alpha: acceptance rate.
    costs: measured at two gammas or more.
    lengths: tokens of typical texts, for each batch those of its rows.
  """
  measured = sorted(costs)
  gammas = np.arange(1, measured[-1] + 1)
  drafting = [gamma * costs[gamma].c for gamma in (measured[0], measured[-1])]
  slope, fixed = np.polyfit((measured[0], measured[-1]), drafting, 1)
  c = np.maximum(0.0, fixed + slope * gammas) / gammas  # noise can make a difference negative
  v = np.interp(gammas, [0, *measured], [1.0, *(costs[gamma].v for gamma in measured)])
  one = costs[measured[0]]
  starts = one.target_start / one.target_step, one.draft_start / one.target_step
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
