"""Acceptance lengths of chains and trees, by each verifier: tokens that a pass of the target gives.

And the speed that they predict here, with costs as measured (Section 3.5).
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from specdec_jax import records
from specdec_jax.atomic_files import atomic_write
from specdec_jax.commands.quickstart import show_examples
from specdec_jax.commands.speedup import decode_examples
from specdec_jax.core.decode import require_finite
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree, chain
from specdec_jax.core.types import Verifier
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.counts import identical, num_tokens
from specdec_jax.errors import InputError, require_count, require_seed, require_types
from specdec_jax.measurement.alpha import positional_acceptance, ratio_with_interval
from specdec_jax.measurement.costs import Costs, measure_costs
from specdec_jax.measurement.measure import settings_to_measure
from specdec_jax.measurement.plain import generate
from specdec_jax.pairs import Pair
from specdec_jax.progress import Progress
from specdec_jax.records import Record
from specdec_jax.reporting.formats import render
from specdec_jax.reporting.html import lengths_report
from specdec_jax.reporting.lengths import lengths_table
from specdec_jax.reporting.stepper import Example
from specdec_jax.tree_theory import best_tree

WIDTH = 8  # ranks whose acceptance is measured


def trees(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  samplings: Sequence[Sampling],
  gammas: Sequence[int] = (3, 5, 7, 10),
  shapes: Sequence[tuple[int, int]] = ((8, 5), (16, 5), (32, 5), (64, 10)),
  dynamic: Sequence[tuple[int, int]] = ((16, 5), (32, 5), (64, 10)),
  rules: Sequence[Callable[[Sampling], Verifier]] = (TokenVerifier, BlockVerifier),
  calibration_texts: int = 100,
  calibration_tokens: int = 1000,
  batch_size: int = 1,
  max_new_tokens: int = 64,
  min_tokens: int = 10_000,
  seed: int = 0,
  report_examples: int = 2,
) -> None:
  """Measure acceptance lengths in real rounds: a table, `results.jsonl` and `report.html`.

  Args:
    pair: target and draft; see `pairs.load_pair`.
    texts: sources. Of the first `calibration_texts` the trees are made; on the rest is measured.
    output_dir: gets both files; settings recorded there already are not measured again.
    samplings: each measured.
    gammas: of chains.
    shapes: (nodes, depth) of trees; the first makes the rounds that are shown.
    dynamic: (nodes, depth) of trees whose shape changes from round to round; judged by tokens.
    rules: classes of `rules`, or any (sampling) -> verifier; at temperature 0 only the first, since
      exact rules are one verifier there.
    calibration_texts: see texts.
    calibration_tokens: generated tokens to make trees of, at most of all those texts.
    batch_size: texts decoded together; costs are of as many rows.
    max_new_tokens: limit for each.
    min_tokens: generated tokens to measure on.
    seed: of all sampling.
    report_examples: for so many texts the report has the rounds at each sampling, by the first
      verifier; of the first of them they are printed, too.
  """
  require_types(trees, locals())
  require_seed(seed)
  counts = dict(calibration_texts=calibration_texts, calibration_tokens=calibration_tokens)
  counts |= dict(max_new_tokens=max_new_tokens, min_tokens=min_tokens)
  for name, value in counts.items():
    require_count(name, value)
  pair.require_batch_size(batch_size)
  if not (samplings and rules and len(texts) > calibration_texts):
    raise InputError("There is nothing to measure: no samplings, rules, or texts but to calibrate.")
  console, measured = Console(markup=False, soft_wrap=True), []
  examples: list[list[Example]] = []
  own, rest = texts[:calibration_texts], texts[calibration_texts:]
  with (
    records.open_results(output_dir) as results,
    Progress() as bar,
  ):
    for sampling in samplings:
      limits = batch_size, max_new_tokens
      prompts, _, outputs = zip(*generate(pair, own, sampling, *limits, calibration_tokens, seed))
      ranks = positional_acceptance(pair, prompts, outputs, sampling, WIDTH)
      console.print(f"{sampling}: a node's child of each rank stands {np.round(ranks, 3).tolist()}")
      grown: list[AnyTree] = [best_tree(ranks.tolist(), nodes, depth) for nodes, depth in shapes]
      grown += [DynamicTree(nodes - 1, depth) for nodes, depth in dynamic]
      asked = [
        (one, tree, dataclasses.replace(setting, **_shape(tree)))
        for tree in (*map(chain, gammas), *grown)
        for one in _judged(pair, sampling, tree, rules)
        for setting in settings_to_measure(one, rest, [sampling], [tree.depth], *limits, seed, 1.0)
      ]
      todo = records.missing(results, [setting for *_, setting in asked])
      plain = todo and generate(pair, rest, sampling, *limits, min_tokens, seed)
      timed = [tree for tree in (*map(chain, gammas), *grown) if isinstance(tree, Tree)]
      costs = dict[AnyTree, Costs]()
      if todo:
        by_first = pair._replace(verifier=rules[0])
        measured_costs = measure_costs(by_first, timed, prompts[0], sampling, max_new_tokens)
        costs = dict(zip(timed, measured_costs))
      for one, tree, setting in bar.track(asked, description="decoding"):
        if setting in todo:
          cost = None if isinstance(tree, DynamicTree) else costs[tree]
          records.append(results, _measure(one, plain, sampling, tree, setting, cost))
          jax.clear_caches()  # a process may map only so many programs
      wanted = {records.key(setting) for *_, setting in asked}
      measured += [r for r in records.read(results) if records.key(r) in wanted]
      if grown:
        few, one = rest[: max(0, report_examples)], pair._replace(verifier=rules[0])
        of_tree = decode_examples(one, few, [sampling], grown[:1], max_new_tokens, seed)
        examples.append([*of_tree])
    report = pathlib.Path(results).with_name("report.html")
    with atomic_write(report) as file:
      title = f"Acceptance lengths: {measured[0].subject}"
      file.write(lengths_report(measured, [e for of_tree in examples for e in of_tree], title))
  for of_tree in examples:
    show_examples(of_tree, 1)
  console.print(render(lengths_table(measured), "terminal"))
  console.print(
    f"Records: {results} (measured once; delete the file to measure again); as a page: {report}"
  )


def _shape(tree: AnyTree) -> dict[str, Any]:
  """What a record says of a tree beside its depth."""
  if isinstance(tree, DynamicTree):
    return {"dynamic_nodes": tree.num_nodes}
  return {} if tree.is_chain else {"tree": list(tree.parents)}


def _judged(pair: Pair, sampling: Sampling, tree: AnyTree, rules) -> list[Pair]:
  """The pair with each verifier that is another there."""
  if isinstance(tree, DynamicTree):
    rules = [TokenVerifier]
  return [
    pair._replace(verifier=verifier)
    for verifier in (rules if sampling.temperature > 0 else rules[:1])
  ]


def _measure(
  pair: Pair, written, sampling: Sampling, tree: AnyTree, setting: Record, costs: Costs | None
) -> Record:
  """The setting with the rounds that decoding takes for what `generate` decoded plainly.

  And the speed that its costs, if any, predict.
  """
  since = time.perf_counter()
  decode, outputs = pair.decode_fn(sampling, tree), []
  for prompt, keys, _ in written:
    decoded = decode(prompt, keys, max_new_tokens=setting.max_new_tokens)
    outputs.append(require_finite(jax.device_get(decoded)))
  lengths = np.concatenate([o.lengths for o in outputs])
  rounds = np.concatenate([(o.rounds.num_emitted > 0).sum(axis=0) for o in outputs])
  length = ratio_with_interval(lengths, rounds)
  *_, plain = zip(*written)
  return dataclasses.replace(
    setting,
    num_tokens=num_tokens(outputs),
    rounds=int(rounds.sum()),
    tokens_per_round=length.mean,
    tokens_per_round_low=length.low,
    tokens_per_round_high=length.high,
    identical=identical([*plain], outputs) if sampling.temperature == 0 else None,
    c=costs and costs.c,
    verify_cost=costs and costs.v,
    predicted_measured_cost=costs and length.mean / (tree.depth * costs.c + costs.v),
    seconds=time.perf_counter() - since,
  )
