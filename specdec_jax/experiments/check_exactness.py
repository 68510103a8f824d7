"""Is the output the target's own? Checked for any pair, sampling, gamma and batch size."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.progress import Progress

from specdec_jax.decoding import require_finite
from specdec_jax.drafts.model import model_draft
from specdec_jax.errors import InputError, require_count
from specdec_jax.experiments.alpha import teacher_forced_logits
from specdec_jax.experiments.joint import Comparison, compare, cut_into_cells
from specdec_jax.experiments.speed import row_keys
from specdec_jax.experiments.ties import Divergence, first_divergences
from specdec_jax.pairs import Pair
from specdec_jax.protocols import Decoded
from specdec_jax.sampling import Sampling, distribution

Decode = Callable[..., Decoded]  # (prompt [B, P], keys [B], max_new_tokens=)


def check_exactness(
  pair: Pair,
  texts: Sequence[str],
  samplings: Sequence[Sampling],
  gammas: Sequence[int] = (3,),
  batch_sizes: Sequence[int] = (1, 8),
  max_new_tokens: int = 64,
  num_texts: int = 8,
  samples_per_text: int = 300,
  num_tokens: int = 4,
  level: float = 1e-3,
  seed: int = 0,
) -> None:
  """Check a pair in each setting, print the findings, and exit with status 1 if one fails.

  At temperature 0 all texts are decoded both ways and compared token for token; where a row parts,
  the two logits must lie within the measured rounding; and with the target as its own draft no
  guess may be refused but for rounding. At other temperatures many outputs of some
  texts are drawn, and their first tokens compared with the target's exact joint distribution.

  Args:
    pair: what decodes; see `pairs.load_pair`.
    texts: sources.
    samplings: settings.
    gammas: guesses a round.
    batch_sizes: rows decoded together, each of another text.
    max_new_tokens: limit for each output at temperature 0.
    num_texts: how many of the texts are sampled from.
    samples_per_text: outputs drawn of each.
    num_tokens: first tokens that are compared jointly.
    level: chance that all sampled settings together raise a false alarm.
    seed: of all sampling.
  """
  if not (texts and samplings and gammas and batch_sizes):
    raise InputError("There is nothing to check: no texts, samplings, gammas or batch sizes.")
  if not 0 < level < 1:
    raise InputError(f"level is {level}; a chance of a false alarm lies between 0 and 1.")
  counts = dict(num_texts=num_texts, samples_per_text=samples_per_text, num_tokens=num_tokens)
  for name, value in [*counts.items(), *(("batch_sizes", size) for size in batch_sizes)]:
    require_count(name, value)
  settings = [
    (sampling, gamma, batch_size)
    for sampling in samplings
    for batch_size in batch_sizes
    for gamma in ((0, *gammas) if sampling.temperature > 0 else gammas)
  ]
  level /= max(1, sum(sampling.temperature > 0 for sampling, _, _ in settings))
  console = Console(markup=False, soft_wrap=True)
  failed = 0
  with Progress(console=Console(stderr=True), transient=True) as bar:
    for sampling, gamma, batch_size in bar.track(settings, description="checking"):
      decode = pair.decoder(sampling, gamma)
      if sampling.temperature == 0:
        plain = pair.decoder(sampling, 0)
        divergences = compare_argmax(pair, texts, plain, decode, gamma, batch_size, max_new_tokens)
        rounds, fewest = rounds_of_self_draft(pair, texts, gamma, batch_size, max_new_tokens)
        holds = all(d.is_tie for _, d in divergences) and rounds <= 1.01 * fewest
        evidence = (
          f"{len(texts) - len(divergences)} of {len(texts)} texts identical; the target as its own "
          f"draft takes {rounds} rounds of {fewest} at best"
        )
      else:
        joint = compare_samples(
          pair, texts[:num_texts], sampling, decode, batch_size, samples_per_text, num_tokens, seed
        )
        if not joint.degrees:
          raise InputError(
            f"No beginning of an output is likely enough to be counted among {samples_per_text} of "
            "each text; give more as samples_per_text, or a sampling with top_k."
          )
        divergences, holds = [], joint.p_value >= level
        evidence = _of_samples(joint, num_tokens, level)
      failed += not holds
      console.print(
        f"{'ok  ' if holds else 'FAIL'} {_named(sampling, gamma, batch_size)}: {evidence}"
      )
      for text, divergence in divergences:
        console.print(f"       {_of_divergence(pair, text, divergence)}")
  where = f"{pair.dtype} on {jax.devices()[0].platform}"
  console.print(f"{len(settings) - failed} of {len(settings)} settings hold, in {where}.")
  if failed:
    raise SystemExit(1)


def compare_argmax(
  pair: Pair,
  texts: Sequence[str],
  plain: Decode,
  speculative: Decode,
  gamma: int,
  batch_size: int,
  max_new_tokens: int,
) -> list[tuple[int, Divergence]]:
  """Numbers of the texts whose two argmax outputs differ, from 1, and where they part."""
  found = []
  for at in range(0, len(texts), batch_size):
    prompt, count = _batch(pair, texts, at, batch_size)
    keys = row_keys(0, at, batch_size)
    ours, own = (
      np.asarray(require_finite(decode(prompt, keys, max_new_tokens=max_new_tokens)).tokens)
      for decode in (speculative, plain)
    )
    parted = first_divergences(pair.target, pair.target_params, prompt, own, ours, gamma + 1)
    found += [(at + d.row + 1, d) for d in parted if d.row < count]
  return found


def rounds_of_self_draft(
  pair: Pair, texts: Sequence[str], gamma: int, batch_size: int, max_new_tokens: int
) -> tuple[int, int]:
  """Rounds that argmax takes with the target as its own draft, and the fewest possible.

  Every guess must stand and every round emit gamma + 1 tokens; what breaks this (a lost bonus
  token, a draft that falls a token behind) costs speed, and need not show in the output.
  """
  itself = functools.partial(model_draft, pair.target)
  own = pair._replace(draft=itself, draft_params=pair.target_params)
  decode = own.decoder(Sampling(temperature=0.0), gamma)
  rounds = fewest = 0
  for at in range(0, len(texts), batch_size):
    prompt, count = _batch(pair, texts, at, batch_size)
    decoded = decode(prompt, row_keys(0, at, batch_size), max_new_tokens=max_new_tokens)
    rounds += int((decoded.rounds.num_emitted[:, :count] > 0).sum())
    fewest += int((-(-decoded.lengths[:count] // (gamma + 1))).sum())
  return rounds, fewest


def compare_samples(
  pair: Pair,
  texts: Sequence[str],
  sampling: Sampling,
  decode: Decode,
  batch_size: int,
  samples_per_text: int,
  num_tokens: int,
  seed: int,
) -> Comparison:
  """First tokens of many outputs beside the target's exact joint distribution, over all texts."""
  total, eos_id = Comparison(), pair.vocabulary.eos_id
  for at in range(0, len(texts), batch_size):
    prompt, count = _batch(pair, texts, at, batch_size)
    keys = row_keys(seed, at * samples_per_text, batch_size * samples_per_text)
    draws = [
      jax.device_get(require_finite(decode(prompt, keys_of_draw, max_new_tokens=num_tokens)))
      for keys_of_draw in keys.reshape(samples_per_text, batch_size)
    ]
    for row in range(count):
      exact = functools.partial(_exact_probs, pair, prompt[row : row + 1], sampling)
      after = lambda prefixes, exact=exact: exact([(*prefix, eos_id) for prefix in prefixes])[:, -1]
      cells = cut_into_cells(after, samples_per_text, num_tokens, eos_id)
      drawn = [tuple(d.tokens[row, : d.lengths[row]].tolist()) for d in draws]
      unique = sorted(set(drawn))
      is_possible = functools.partial(_is_possible, eos_id)
      filled = [(*text, *(eos_id,) * (num_tokens - len(text))) for text in unique]
      possible = dict(zip(unique, map(is_possible, unique, exact(filled))))
      total += compare(cells, drawn, sum(not possible[text] for text in drawn))
  return total


def _batch(pair: Pair, texts: Sequence[str], at: int, batch_size: int) -> tuple[Array, int]:
  """Prompt of texts at..at+batch_size-1, filled up with the first ones, and how many are new."""
  batch = list(texts[at : at + batch_size])
  filler = [texts[i % len(texts)] for i in range(batch_size - len(batch))]
  return pair.prompt([*batch, *filler]), len(batch)


def _exact_probs(
  pair: Pair, source: Array, sampling: Sampling, texts: Sequence[Sequence[int]]
) -> np.ndarray:
  """The target's probabilities [N, T, V] before each token of N texts of length T."""
  rows = -(-len(texts) // 32) * 32  # few shapes, so few programs
  tokens = np.full((rows, len(texts[0])), pair.vocabulary.eos_id, np.int32)
  tokens[: len(texts)] = texts
  model, params = pair.target, pair.target_params
  sources = jnp.repeat(source, 32, axis=0)
  logits = (teacher_forced_logits(model, params, sources, c) for c in np.split(tokens, rows // 32))
  return np.concatenate([distribution(x, sampling) for x in logits])[: len(texts)]


def _is_possible(eos_id: int, text: tuple[int, ...], probs: np.ndarray) -> bool:
  """Whether the target can write this, given its probabilities [T, V] before each token.

  No token has probability 0, none follows EOS, and none is missing.
  """
  ends = len(text) == len(probs) or text[-1:] == (eos_id,)
  return bool(ends and eos_id not in text[:-1] and (probs[range(len(text)), text] > 0).all())


def _named(sampling: Sampling, gamma: int, batch_size: int) -> str:
  truncated = f" top-k {sampling.top_k}" if sampling.top_k else ""
  truncated += f" top-p {sampling.top_p:g}" if sampling.top_p < 1 else ""
  how = f"gamma {gamma}" if gamma else "plain  "
  return f"temperature {sampling.temperature:g}{truncated}, {how}, batch {batch_size}"


def _of_samples(joint: Comparison, num_tokens: int, level: float) -> str:
  impossible = f", {joint.num_impossible} of them impossible" if joint.num_impossible else ""
  return (
    f"{joint.num_samples} outputs{impossible}, first {num_tokens} tokens in {joint.num_cells} "
    f"cells: p = {joint.p_value:.2g} (fault below {level:.1g}; a total variation of "
    f"{joint.detectable(level):.3f} would be seen 9 times in 10)"
  )


def _of_divergence(pair: Pair, text: int, d: Divergence) -> str:
  plain, speculative = pair.vocabulary.pieces([d.plain, d.speculative])
  verdict = "a tie" if d.is_tie else "a FAULT"
  return (
    f"text {text}, token {d.position + 1}: {plain!r} became {speculative!r}; their logits are "
    f"{d.gap:.2g} apart where rounding moves them by up to {d.rounding:.2g}: {verdict}"
  )
