"""Beam search, speculative beside plain: the same texts, steps a pass of the target, and speed."""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console

from specdec_jax import records
from specdec_jax.beam_search import Found, best, search
from specdec_jax.core.decode import require_finite
from specdec_jax.core.sampling import Sampling
from specdec_jax.errors import InputError, require_count, require_types
from specdec_jax.measurement.measure import settings_to_measure
from specdec_jax.measurement.quality import quality
from specdec_jax.measurement.timing import interleaved_medians
from specdec_jax.pairs import Pair
from specdec_jax.progress import Progress
from specdec_jax.records import Record
from specdec_jax.reporting.beams import beams_table
from specdec_jax.reporting.formats import render

TIE = 1e-5  # scores that differ by no more are equal: their sums are rounded in another order


def beams(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  widths: Sequence[int] = (1, 2, 4, 8),
  factors: Sequence[int] = (1, 2),
  gammas: Sequence[int] = (1, 2, 3, 4, 5, 6),
  nodes: int | None = None,
  length_penalty: float = 0.6,
  batch_size: int = 1,
  max_new_tokens: int = 64,
  repeats: int = 3,
  references: Sequence[str] | None = None,
) -> None:
  """Search for each text plainly and with each draft, in turn; print a table, write records.

  Args:
    pair: target and draft.
    texts: sources.
    output_dir: gets `results.jsonl`; settings recorded there already are not measured again.
    widths: beams.
    factors: how many times as many beams a draft has.
    gammas: steps that a draft guesses.
    nodes: that a pass of the target reads at most, as of `Pair.beam_searcher`.
    length_penalty: of scores.
    batch_size: texts searched for together.
    max_new_tokens: limit for a text.
    repeats: of each timed search; 0 to compare texts and count steps only.
    references: for each text an output, for BLEU of the best text.

  Raises:
    InputError: there is nothing to measure, or as `Pair.beam_searcher`.
  """
  require_types(beams, locals())
  require_count("repeats", repeats, 0)
  require_count("max_new_tokens", max_new_tokens)
  pair.require_batch_size(batch_size)
  if not (texts and widths and factors and gammas):
    raise InputError("There is nothing to measure: no texts, widths, factors, or gammas.")
  if references is not None and len(references) != len(texts):
    raise InputError(f"There are {len(texts)} texts but {len(references)} references.")
  limits = batch_size, max_new_tokens, 0, 1.0
  (setting,) = settings_to_measure(pair, texts, [Sampling(temperature=0.0)], [1], *limits)
  # Timed, each prompt is as short as it can be; counted, all have one program.
  width = None if repeats else pair.prompt(texts).shape[1]
  batches = [[*texts[at : at + batch_size]] for at in range(0, len(texts), batch_size)]
  prompts = [pair.prompt(batch + batch[:1] * (batch_size - len(batch)), width) for batch in batches]
  asked: list[Record] = []
  with records.open_results(output_dir) as results, Progress() as bar:
    for width in bar.track(widths, description="beams"):
      own = dataclasses.replace(setting, beams=width, length_penalty=length_penalty)
      settings = []
      for of_draft, gamma in itertools.product([factor * width for factor in factors], gammas):
        _, draft, *_ = pair.beam_searcher(width, gamma, of_draft, nodes=nodes).args
        most = draft.num_nodes(width) if gamma else width
        of_one: dict[str, Any] = dict(draft_beams=of_draft, gamma=gamma, beam_nodes=most)
        settings.append(dataclasses.replace(own, **of_one))
      asked += settings
      if todo := records.missing(results, settings):
        for record in _measure(pair, prompts, len(texts), todo, repeats, references):
          records.append(results, record)
        jax.clear_caches()  # a process may map only so many programs
    wanted = {records.key(one) for one in asked}
    measured = [r for r in records.read(results) if records.key(r) in wanted]
  console = Console(markup=False, soft_wrap=True)
  console.print(render(beams_table(measured), "terminal"))
  console.print(
    f"Records: {pathlib.Path(results)} (measured once; delete the file to measure again)"
  )


def _measure(
  pair: Pair,
  prompts: Sequence[Any],
  num_texts: int,
  todo: Sequence[Record],
  repeats: int,
  references: Sequence[str] | None,
) -> list[Record]:
  """Of one width: plain search and each of `todo`, prompt by prompt."""
  width, penalty = todo[0].beams or 1, todo[0].length_penalty or 0.0
  searchers = [pair.beam_searcher(width, 0, None, penalty)]
  searchers += [
    pair.beam_searcher(width, r.gamma, r.draft_beams, penalty, r.beam_nodes) for r in todo
  ]
  limit = todo[0].max_new_tokens or 1
  if not repeats:
    prompts, order = _as_they_end(searchers[0], prompts, num_texts, limit)
    references = references and [references[i] for i in order]
  found: list[list[Found]] = [[] for _ in searchers]
  seconds = []  # of each search, and of reading the source for it
  for prompt in prompts:
    asked = dict(prompt=prompt, max_new_tokens=limit)
    searches: list[Callable[[], Found]] = [functools.partial(one, **asked) for one in searchers]
    if repeats:
      each: list[Callable[[], Any]] = [*searches, *_starts(searchers, prompt, limit)]
      medians, results = interleaved_medians(each, repeats)
      seconds.append(np.reshape(medians, (2, -1)))
    else:
      results = [call() for call in searches]
    for of_one, result in zip(found, results):
      require_finite(best(result := jax.device_get(result)))
      of_one.append(result)
  whole = [_first(_together(of_one), num_texts) for of_one in found]
  decode = lambda found: [pair.vocabulary.decode(row) for row in found.tokens[:, 0]]
  scores = [references and quality("BLEU", decode(one), references) for one in whole]
  searched = a_round = None
  if repeats:
    searched, started = np.sum(seconds, axis=0)
    a_round = (searched - started) / [sum(int(one.num_rounds) for one in of) for of in found]
  measured = []
  for i, setting in enumerate(todo, 1):
    same, tied = compare(whole[0], whole[i])
    passes = int((whole[i].steps > 0).sum())
    length = float(whole[i].steps.sum() / passes)
    record = dataclasses.replace(
      setting,
      num_tokens=int(whole[i].lengths[:, 0].sum()),
      rounds=passes,
      tokens_per_round=length,
      identical=bool(same.all()),
      ties=int(tied.sum()),
      metric="BLEU" if references else None,
      quality=scores[i] or None,
      baseline_quality=scores[0] or None,
    )
    if searched is not None and a_round is not None:
      record = dataclasses.replace(
        record,
        target_step_ms=1e3 * float(a_round[0]),
        round_ms=1e3 * float(a_round[i]),
        predicted_measured_cost=length * float(a_round[0] / a_round[i]),
        speedup=float(searched[0] / searched[i]),
      )
    measured.append(record)
  return measured


def _as_they_end(
  search: functools.partial[Found], prompts: Sequence[Any], num_texts: int, limit: int
) -> tuple[list[Array], np.ndarray]:
  """Prompts of as many rows, those together that end together, and the order of their rows."""
  steps = [search(prompt=prompt, max_new_tokens=limit).steps.sum(axis=0) for prompt in prompts]
  order = np.argsort(np.concatenate(steps)[:num_texts], kind="stable")
  rows, size = np.concatenate(prompts)[order], len(prompts[0])
  rows = np.concatenate([rows, np.repeat(rows[:1], -len(rows) % size, axis=0)])
  return [jnp.asarray(rows[at : at + size]) for at in range(0, len(rows), size)], order


def compare(plain: Found, other: Found) -> tuple[np.ndarray, np.ndarray]:
  """Of each row [B]: whether both found the same, ties counted in, and whether only with them.

  Scores are to be equal to TIE, place by place, and so are texts; but where two texts of a row have
  equal scores these may change places, and of texts that compete for the last place either may be
  there.
  """
  scores, others = np.asarray(plain.scores), np.asarray(other.scores)
  equal = (np.abs(scores - others) <= TIE).all(axis=1)
  differ = (np.asarray(plain.tokens) != np.asarray(other.tokens)).any(axis=2)  # [B, w]
  near = np.abs(scores[:, :, None] - scores[:, None]) <= 2 * TIE
  may = (near.sum(axis=2) > 1) | (np.arange(scores.shape[1]) == scores.shape[1] - 1)
  same = equal & (may | ~differ).all(axis=1)
  return same, same & differ.any(axis=1)


def _together(found: Sequence[Found]) -> Found:
  """Batches as one; each row's steps in the rounds of its own."""
  each = zip(Found._fields, zip(*found, strict=True), strict=True)
  joined: dict[str, Any] = {
    name: np.concatenate(x, axis=int(name == "steps")) for name, x in each if np.ndim(x[0])
  }
  return found[0]._replace(**joined)


def _first(found: Found, count: int) -> Found:
  """The first rows; those behind filled up the last batch."""
  return found._replace(
    tokens=found.tokens[:count],
    lengths=found.lengths[:count],
    scores=found.scores[:count],
    steps=found.steps[:, :count],
  )


def _starts(searchers: Sequence[functools.partial[Found]], prompt, limit: int) -> list:
  """What each search does before its first round."""
  calls = []
  for searcher in searchers:
    args, width = searcher.args, searcher.keywords["width"]
    if len(args) == 2:
      args = args[0], search.NullBeamDraft(), args[1], ()
    calls.append(functools.partial(_start, *args, prompt, width, limit))
  return calls


_start = jax.jit(search.start, static_argnums=(0, 1, 5, 6))
