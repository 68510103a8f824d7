"""What choosing gamma is worth (Section 3.5): plain, fixed, 'auto' and adaptive, decoded in turn.

Beside what is measured stands what could be reached at most by knowing which guesses will stand.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specdec_jax import records
from specdec_jax.adaptive import adaptive_decode
from specdec_jax.decoding import require_finite
from specdec_jax.errors import InputError, require_count, require_seed, require_types
from specdec_jax.experiments.alpha import draft_probs, teacher_forced_logits
from specdec_jax.experiments.calibrate import GAMMAS, Calibration, calibrate
from specdec_jax.experiments.costs import interleaved_medians
from specdec_jax.experiments.measure import settings_to_measure
from specdec_jax.experiments.speed import identical, num_rounds, num_tokens, row_keys
from specdec_jax.pairs import Pair
from specdec_jax.protocols import Decoded
from specdec_jax.records import Record
from specdec_jax.sampling import Sampling, distribution
from specdec_jax.trees import chain

PRIOR_GUESSES = 25.0  # for so many guesses the calibration's alpha counts, beside a text's own


class Policy(NamedTuple):
  """A way to choose gamma.

  Attributes:
    name: as the table has it, and records behind the draft's name.
    gamma: the largest it takes; 0 for plain decoding.
    decode: (prompt, rng, *, max_new_tokens) -> Decoded.
    predicted: speedup; None where no closed form says.
  """

  name: str
  gamma: int
  decode: Callable[..., Decoded]
  predicted: float | None


def gamma(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  gammas: Sequence[int] = (1, 2, 3, 5, 7, 10),
  temperatures: Sequence[float] = (0.0, 1.0),
  batch_sizes: Sequence[int] = (1, 8),
  max_new_tokens: int = 64,
  repeats: int = 3,
  seed: int = 0,
) -> None:
  """Measure the policies at each temperature and batch size, print tables, append records.

  A record's `draft` ends in the policy's name. Those named 'oracle' have a prediction and no speed:
  the best fixed gamma, the best for each text and the best for each round, of the same texts with
  the same costs, knowing which guesses stand; they are of batch 1. 'auto' is decoded by itself,
  though it is one of the others: what lies between the two is noise.

  Args:
    pair: what decodes; see `pairs.load_pair`.
    texts: sources, padded to one width; the calibration takes its few from among them.
    output_dir: gets `results.jsonl`; settings recorded there already are not measured again.
    gammas: each measured alone; together they are what the adaptive policy chooses from.
    temperatures: 0 is argmax; each measured.
    batch_sizes: each measured.
    max_new_tokens: limit for each text.
    repeats: of each timed decode, interleaved.
    seed: of all sampling.
  """
  require_types(gamma, locals())
  require_seed(seed)
  require_count("max_new_tokens", max_new_tokens)
  require_count("repeats", repeats)
  for size in batch_sizes:
    pair.require_batch_size(size)
  if not (texts and gammas and temperatures and batch_sizes):
    raise InputError("There is nothing to measure: no texts, gammas, temperatures or batch sizes.")
  for guesses in gammas:
    require_count("gamma", guesses)
    if guesses > GAMMAS[-1]:
      raise InputError(f"gamma is {guesses}; the calibration knows costs up to {GAMMAS[-1]}.")
  console = Console(markup=False)
  with records.open_results(output_dir) as results:
    for sampling in map(Sampling, temperatures):
      for batch_size in batch_sizes:
        (setting,) = settings_to_measure(
          pair, texts, [sampling], [max(gammas)], batch_size, max_new_tokens, seed, 1.0
        )
        wanted = functools.partial(_of_policy, setting)
        if records.missing(results, [wanted("adaptive", max(gammas))]):
          calibration = calibrate(pair, texts, sampling, batch_size, max_new_tokens, seed)
          console.print(f"temperature {sampling.temperature:g}, batch {batch_size}: {calibration}.")
          args = pair, texts, sampling, gammas, calibration, setting, repeats
          for record in _measure(*args):
            records.append(results, record)
          jax.clear_caches()  # a process may map only so many programs
    console.print(gamma_table(records.read(results)))


def _of_policy(setting: Record, name: str, gamma: int, **measured) -> Record:
  draft = f"{setting.draft}, {name}"
  return dataclasses.replace(setting, draft=draft, gamma=gamma, **measured)


def _policies(
  pair: Pair, sampling: Sampling, gammas: Sequence[int], calibration: Calibration
) -> list[Policy]:
  """Plain decoding first, the adaptive one last."""
  drafts = tuple(pair.draft(sampling, chain(gamma)) for gamma in gammas)

  def fixed(name: str, gamma: int) -> Policy:
    return Policy(name, gamma, pair.decoder(sampling, gamma), calibration.speedups[gamma])

  adaptive = functools.partial(
    adaptive_decode,
    pair.target,
    drafts,
    *(pair.target_params, pair.draft_params),
    rule=pair.judge(sampling),
    eos_id=pair.vocabulary.eos_id,
    round_costs=jnp.array([calibration.round_cost(gamma) for gamma in gammas]),
    prior=PRIOR_GUESSES * jnp.array([calibration.alpha, 1 - calibration.alpha]),
  )
  return [
    fixed("plain", 0),
    *(fixed("fixed", gamma) for gamma in gammas),
    fixed("auto", calibration.gamma),
    Policy("adaptive", max(gammas), adaptive, None),
  ]


def _measure(pair, texts, sampling, gammas, calibration: Calibration, setting: Record, repeats):
  """Records of one setting: of the oracles, and of each policy, decoded in turn."""
  size, limit = setting.batch_size, setting.max_new_tokens
  policies = _policies(pair, sampling, gammas, calibration)
  width = pair.prompt(texts).shape[1]
  prompts = [pair.prompt(texts[i : i + size], width) for i in range(0, len(texts), size)]
  seconds, outputs = np.zeros(len(policies)), []
  for i, prompt in enumerate(track(prompts, transient=True, console=Console(stderr=True))):
    keys = row_keys(setting.seed, i * size, len(prompt))
    calls = [functools.partial(p.decode, prompt, rng=keys, max_new_tokens=limit) for p in policies]
    medians, decoded = interleaved_medians(calls, repeats)
    seconds += medians
    outputs.append([require_finite(one) for one in jax.device_get(decoded)])
  plain, *_ = by_policy = [list(each) for each in zip(*outputs)]
  chances = [acceptances(pair, *each, sampling) for each in zip(prompts, plain)]
  stands = [row for rows in chances for row in rows]
  plain_tokens_per_s = num_tokens(plain) / float(seconds[0])
  setting = dataclasses.replace(
    setting,
    alpha=float(np.concatenate(stands).mean()),
    num_tokens=num_tokens(plain),
    baseline_tokens_per_s=plain_tokens_per_s,
  )
  if size == 1:
    for name, predicted in oracles(stands, calibration).items():
      yield _of_policy(setting, name, len(calibration.c) - 1, predicted_text=predicted)
  for policy, own, its_seconds in zip(policies, by_policy, seconds):
    tokens_per_s = num_tokens(own) / float(its_seconds)
    yield _of_policy(
      setting,
      policy.name,
      policy.gamma,
      num_tokens=num_tokens(own),
      rounds=num_rounds(own),
      tokens_per_round=num_tokens(own) / num_rounds(own),
      predicted_text=policy.predicted,
      speculative_tokens_per_s=tokens_per_s,
      speedup=tokens_per_s / plain_tokens_per_s,
      identical=identical(plain, own) if sampling.temperature == 0 else None,
    )


def acceptances(
  pair: Pair, prompt: Array, decoded: Decoded, sampling: Sampling
) -> list[np.ndarray]:
  """For each text the chance [T] that its token x came from a guess, if one was judged there.

  It is min(1, q(x) / p(x)): a guess that stands is x with probability min(p(x), q(x)), and x is
  emitted with probability p(x), whatever the gamma. Tokens are independent, given the text.
  """
  logits = teacher_forced_logits(pair.target, pair.target_params, prompt, decoded.tokens)
  guessed = draft_probs(
    pair.target, pair.draft(sampling, chain(1)), pair.draft_params, prompt, decoded.tokens
  )
  tokens = np.asarray(decoded.tokens)[..., None]
  of_text = lambda x: np.take_along_axis(np.asarray(x), tokens, axis=-1)[..., 0]
  p, q = of_text(distribution(logits, sampling)), of_text(guessed)
  chances = np.minimum(1.0, np.divide(q, p, out=np.zeros_like(p), where=p > 0))
  return [row[:length] for row, length in zip(chances, decoded.lengths)]


def oracles(
  acceptances: Sequence[np.ndarray], calibration: Calibration, samples: int = 20
) -> dict[str, float]:
  """Speedups of texts decoded one by one, with gammas chosen by who knows which guesses stand.

  Args:
    acceptances: of each text, as the function of this name gives them.
    calibration: has the costs; of the gammas in it the oracles choose, 0 among them.
    samples: that are drawn of each text's guesses.
  """
  rng = np.random.default_rng(0)
  drawn = [rng.random(len(row)) < row for row in acceptances for _ in range(samples)]
  costs = [calibration.round_cost(gamma) for gamma in range(len(calibration.c))]
  of_texts, of_rounds = map(np.array, zip(*(times(stands, costs) for stands in drawn)))
  starts = len(drawn) * sum(calibration.starts)
  plain = sum(map(len, drawn)) + len(drawn) * calibration.starts[0]
  return {
    "oracle of a gamma": float(plain / (starts + of_texts[:, 1:].sum(axis=0).min())),
    "oracle of each text": float(plain / (starts + of_texts.min(axis=1).sum())),
    "oracle of each round": float(plain / (starts + of_rounds.sum())),
  }


def times(stands: np.ndarray, costs: Sequence[float]) -> tuple[np.ndarray, float]:
  """Time of a text's rounds with each gamma, [G + 1], and with the best gamma for each round.

  Args:
    stands: [T], whether a guess at each token is accepted.
    costs: [G + 1], time of a round with gamma 0, 1, ...
  """
  end, each_gamma = len(stands), np.arange(len(costs))
  fixed, best = np.zeros((end + 1, len(costs))), np.zeros(end + 1)  # from each token to the end
  run = 0
  for i in reversed(range(end)):
    run = run + 1 if stands[i] else 0
    after = np.minimum(i + np.minimum(run, each_gamma) + 1, end)
    fixed[i] = costs + fixed[after, each_gamma]
    best[i] = (costs + best[after]).min()
  return fixed[0], float(best[0])


def gamma_table(measured: Sequence[Record]) -> Table:
  """One row a record."""
  table = Table(title="gamma, chosen in several ways", box=box.SIMPLE_HEAD, padding=0)
  headings = "temp", "batch", "policy", "gamma", "alpha", "tokens/pass", "predicted", "speedup"
  for heading in headings:
    table.add_column(heading, justify="left" if heading == "policy" else "right")
  shown = lambda x, form: "-" if x is None else format(x, form)
  for r in measured:
    table.add_row(
      f"{r.temperature:g}",
      str(r.batch_size),
      r.draft.rpartition(", ")[2],
      str(r.gamma),
      shown(r.alpha, ".2f"),
      shown(r.tokens_per_round, ".2f"),
      shown(r.predicted_text, ".2f"),
      shown(r.speedup, ".3f"),
    )
  return table
