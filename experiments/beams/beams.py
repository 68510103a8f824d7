"""Compare speculative beam search with plain beam search: texts, steps per target call, and speed.

Axis letters are those of `beams`.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from experiments.lib.records import measured_with, models_text
from specdec_jax.beams import BeamResult, BeamSearcher
from specdec_jax.core.counts import require_finite
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.data.quality import quality
from specdec_jax.errors import InputError
from specdec_jax.measure.costs import interleaved_medians
from specdec_jax.measure.records import Record, settings_to_measure
from specdec_jax.measure.sweep import Report, Step, sweep
from specdec_jax.measure.tables import GAMMA, Column, Table, records_table
from specdec_jax.pair import Pair

BEAMS = (
  Column("beams", lambda r: r.settings.beams or 1),
  Column("draft beams", lambda r: r.settings.draft_beams or 0, "", "beam size of the draft"),
  GAMMA,
  Column(
    "nodes",
    lambda r: (
      r.settings.beam_nodes
      or (r.settings.beams or 1) + r.settings.gamma * (r.settings.draft_beams or 0)
    ),
    "",
    "nodes per target forward pass",
  ),
  Column(
    "steps",
    "outputs.tokens_per_round",
    ".2f",
    "search steps per target forward pass; 1 for plain beam search",
  ),
  Column(
    "round",
    lambda r: r.times.round_ms / r.times.target_step_ms,
    ".2f",
    "time of a round, drafting included / time of a round of plain beam search",
  ),
  Column(
    "predicted",
    "times.predicted_measured_cost",
    ".2f",
    "predicted speedup for a long text: steps / round",
  ),
  Column(
    "speedup",
    "times.speedup",
    ".2f",
    "measured speedup of complete searches, prefill included, over this package's plain beam "
    "search; interleaved repeats",
  ),
  Column(
    "identical",
    lambda r: (
      ("yes" if r.outputs.identical else "NO")
      + (f", {r.outputs.ties} tied" if r.outputs.ties else "")
    ),
    "",
    "whether all texts, their order and their scores (to 1e-5) are those of plain beam search; "
    "rows with equal scores in another order are counted as tied",
  ),
  Column(
    "BLEU",
    lambda r: f"{r.outputs.quality:.1f} ({r.outputs.baseline_quality:.1f})",
    "",
    "score of the best text; that of plain beam search in brackets",
  ),
)

TIE = 1e-5  # scores that differ by less are equal, because their sums may be rounded differently


def beams(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  beam_sizes: Sequence[int] = (1, 2, 4, 8),
  draft_beam_factors: Sequence[int] = (1, 2),
  gammas: Sequence[int] = (1, 2, 3, 4, 5, 6),
  nodes: int | None = None,
  length_penalty: float = 0.6,
  batch_size: int = 1,
  max_new_tokens: int = 64,
  repeats: int = 3,
  references: Sequence[str] | None = None,
) -> None:
  """Run plain and speculative beam search on each text; print a table and write records.

  Args:
    pair: target and draft.
    texts: sources.
    output_dir: folder of `results.jsonl`. Settings recorded there are not measured again.
    beam_sizes: numbers of beams of the search.
    draft_beam_factors: ratios of the number of beams of the draft to that of the search.
    gammas: numbers of steps that the draft searches ahead.
    nodes: maximum number of nodes per target forward pass, as in `Pair.beam_searcher`.
    length_penalty: exponent of the length penalty, as in `BeamSearcher`.
    batch_size: number of texts decoded together.
    max_new_tokens: maximum number of tokens of each output, including EOS.
    repeats: number of timed repeats of each search. With 0, outputs are compared and steps are
      counted, but nothing is timed.
    references: reference output of each text, for the BLEU score of the best outputs; None for no
      score.

  Raises:
    InputError: the numbers of texts and references differ, or a beam searcher cannot be built
      (`Pair.beam_searcher`).
  """
  pair.require_batch_size(batch_size)
  if references is not None and len(references) != len(texts):
    raise InputError(f"There are {len(texts)} texts but {len(references)} references.")
  decode_settings = DecodeSettings(Sampling(temperature=0.0), batch_size, max_new_tokens)
  (setting,) = settings_to_measure(pair, texts, [decode_settings], [1], repeats=repeats or None)
  # With timing, each prompt is padded as little as possible. Otherwise all prompts share a program.
  prompt_width = None if repeats else pair.prompt(texts).shape[1]
  prompts = []
  for start in range(0, len(texts), batch_size):
    batch = [*texts[start : start + batch_size]]
    batch += batch[:1] * (batch_size - len(batch))
    prompts.append(pair.prompt(batch, prompt_width))

  def steps() -> Iterator[Step]:
    for num_beams in beam_sizes:
      settings = []
      for factor, gamma in itertools.product(draft_beam_factors, gammas):
        draft_beams = factor * num_beams
        searcher = pair.beam_searcher(num_beams, gamma, draft_beams, nodes=nodes)
        settings.append(
          setting.replace(
            beams=num_beams,
            length_penalty=length_penalty,
            draft_beams=draft_beams,
            gamma=gamma,
            beam_nodes=searcher.draft.num_nodes(num_beams),
          )
        )
      measure = functools.partial(_measure, pair, prompts, len(texts), repeats, references)
      yield Step(f"{num_beams} beams", settings, measure)

  sweep(output_dir, steps, lambda measured: [beams_table(measured)])


def _measure(
  pair: Pair,
  prompts: Sequence[Array],
  num_texts: int,
  repeats: int,
  references: Sequence[str] | None,
  settings: Sequence[Record],
  report: Report,
) -> list[Record]:
  """Measure searches with one beam size, interleaved on each prompt, and return their records."""
  wanted = [setting.settings for setting in settings]
  num_beams, penalty = wanted[0].beams or 1, wanted[0].length_penalty or 0.0
  searchers = [pair.beam_searcher(num_beams, 0, None, penalty)]
  searchers += [
    pair.beam_searcher(num_beams, each.gamma, each.draft_beams, penalty, each.beam_nodes)
    for each in wanted
  ]
  limit = wanted[0].max_new_tokens or 1
  if not repeats:
    prompts, order = _sorted_by_steps(searchers[0], pair, prompts, num_texts, limit)
    references = references and [references[i] for i in order]
  batches: list[list[BeamResult]] = [[] for _ in searchers]  # results of each search
  seconds = []  # seconds of each search, and of its prefill
  for i, prompt in enumerate(prompts):
    arguments = dict(params=pair.params, prompt=prompt, max_new_tokens=limit)
    searches = [functools.partial(searcher.run, **arguments) for searcher in searchers]
    if repeats:
      prefills = [functools.partial(_init, searcher, **arguments) for searcher in searchers]
      medians, (results, _) = interleaved_medians((searches, prefills), repeats)
      seconds.append(medians)
    else:
      results = [search() for search in searches]
    for results_of_search, result in zip(batches, results):
      result = jax.device_get(result)
      require_finite(result.best())
      results_of_search.append(result)
    report((i + 1) / len(prompts))
  plain, *speculative = [_first_rows(_concatenated(each), num_texts) for each in batches]
  search_seconds = round_seconds = None
  if repeats:
    search_seconds, prefill_seconds = np.sum(seconds, axis=0)
    num_rounds = [sum(int(result.num_rounds) for result in each) for each in batches]
    round_seconds = (search_seconds - prefill_seconds) / num_rounds
  plain_bleu = _bleu(pair, plain, references)
  measured = []
  for i, (setting, result) in enumerate(zip(settings, speculative, strict=True), 1):
    same, tied = compare(plain, result)
    num_passes = int((result.steps > 0).sum())
    steps_per_pass = float(result.steps.sum() / num_passes)
    record = setting.replace(
      num_tokens=int(result.lengths[:, 0].sum()),
      rounds=num_passes,
      tokens_per_round=steps_per_pass,
      identical=bool(same.all()),
      ties=int(tied.sum()),
      metric="BLEU" if references else None,
      quality=_bleu(pair, result, references),
      baseline_quality=plain_bleu,
    )
    if search_seconds is not None and round_seconds is not None:
      record = record.replace(
        target_step_ms=1e3 * float(round_seconds[0]),
        round_ms=1e3 * float(round_seconds[i]),
        predicted_measured_cost=steps_per_pass * float(round_seconds[0] / round_seconds[i]),
        speedup=float(search_seconds[0] / search_seconds[i]),
      )
    measured.append(record)
  return measured


def _bleu(pair: Pair, result: BeamResult, references: Sequence[str] | None) -> float | None:
  """Return the BLEU score of the best texts; None if there are no references or the score is 0."""
  if not references:
    return None
  outputs = [pair.vocabulary.decode(tokens) for tokens in result.tokens[:, 0]]
  return quality("BLEU", outputs, references) or None


def _sorted_by_steps(
  searcher: BeamSearcher, pair: Pair, prompts: Sequence[Array], num_texts: int, limit: int
) -> tuple[list[Int[Array, "B P"]], np.ndarray]:
  """Sort the prompts by steps of plain beam search; return new batches and sorted row indices."""
  steps = [
    searcher.run(pair.params, prompt, max_new_tokens=limit).steps.sum(axis=0) for prompt in prompts
  ]
  order = np.argsort(np.concatenate(steps)[:num_texts], kind="stable")
  rows, size = np.concatenate(prompts)[order], len(prompts[0])
  rows = np.concatenate([rows, np.repeat(rows[:1], -len(rows) % size, axis=0)])
  return [jnp.asarray(rows[start : start + size]) for start in range(0, len(rows), size)], order


def compare(plain: BeamResult, other: BeamResult) -> tuple[np.ndarray, np.ndarray]:
  """Compare the texts of two searches.

  At each rank, the texts must be equal, and the scores must be equal up to TIE. Two exceptions are
  allowed. The texts may differ at a rank whose score equals that of another rank (up to 2 TIE),
  because such texts may change places. They may differ at the last rank, because several texts with
  equal scores may compete for it.

  Returns:
    For each row, whether both searches found the same texts, and whether they did so only because
    of the exceptions.
  """
  lowest = -1e9  # of a rank without a text, whose score is -inf
  scores, other_scores = np.maximum(plain.scores, lowest), np.maximum(other.scores, lowest)
  equal_scores = (np.abs(scores - other_scores) <= TIE).all(axis=1)
  differ = (np.asarray(plain.tokens) != np.asarray(other.tokens)).any(axis=2)  # [B, w]
  near = np.abs(scores[:, :, None] - scores[:, None]) <= 2 * TIE
  may_differ = (near.sum(axis=2) > 1) | (np.arange(scores.shape[1]) == scores.shape[1] - 1)
  same = equal_scores & (may_differ | ~differ).all(axis=1)
  return same, same & differ.any(axis=1)


def _concatenated(results: Sequence[BeamResult]) -> BeamResult:
  """Concatenate the rows of several batches.

  The `steps` of a row are those of its own batch, but `num_rounds` is that of the first batch.
  """

  def concatenate(arrays: Iterable[Any], axis: int = 0) -> Any:
    return np.concatenate([*arrays], axis)

  return results[0]._replace(
    tokens=concatenate(result.tokens for result in results),
    lengths=concatenate(result.lengths for result in results),
    scores=concatenate(result.scores for result in results),
    steps=concatenate((result.steps for result in results), axis=1),
    not_finite=concatenate(result.not_finite for result in results),
  )


def _first_rows(result: BeamResult, count: int) -> BeamResult:
  """Return the first `count` rows, without the rows that fill up the last batch."""
  return result._replace(
    tokens=result.tokens[:count],
    lengths=result.lengths[:count],
    scores=result.scores[:count],
    steps=result.steps[:, :count],
  )


_init = jax.jit(BeamSearcher.init, static_argnames=("self", "max_new_tokens"))


def beams_table(records: Sequence[Record]) -> Table:
  """Return a table that compares speculative with plain beam search, with one row per record.

  All records have the same pair and texts.
  """
  first = records[0]
  title = f"{models_text(first)}: beam search, {first.settings.num_examples} texts, "
  title += f"batch {first.settings.batch_size}, {first.device}"
  return records_table(title, records, BEAMS, [measured_with(records)])
