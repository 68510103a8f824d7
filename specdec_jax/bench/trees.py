"""Acceptance lengths of chains and trees with each verifier: tokens per target forward pass.

Records also have the speedup that they predict with measured costs (Section 3.5).
"""

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from rich.console import Console

from specdec_jax import records
from specdec_jax.atomic_files import atomic_write
from specdec_jax.bench.reporting.lengths import lengths_table
from specdec_jax.bench.reporting.reports import lengths_report
from specdec_jax.commands.quickstart import show_examples
from specdec_jax.commands.speedup import decode_examples
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree, chain
from specdec_jax.core.types import DecodeResult, Verifier
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.counts import identical, num_tokens, require_finite
from specdec_jax.errors import InputError, require_count, require_seed, require_types
from specdec_jax.extended_theory import best_tree
from specdec_jax.loading import DecodeSettings
from specdec_jax.measurement.alpha import positional_acceptance, ratio_with_interval
from specdec_jax.measurement.autoregressive import generate
from specdec_jax.measurement.costs import Costs, measure_costs
from specdec_jax.measurement.measure import settings_to_measure
from specdec_jax.pairs import LoadedPair
from specdec_jax.progress import Progress
from specdec_jax.records import Record
from specdec_jax.reporting.formats import render
from specdec_jax.reporting.stepper import Example

WIDTH = 8  # number of ranks whose acceptance is measured


def trees(
  pair: LoadedPair,
  texts: Sequence[str],
  output_dir: str,
  samplings: Sequence[Sampling],
  gammas: Sequence[int] = (3, 5, 7, 10),
  shapes: Sequence[tuple[int, int]] = ((8, 5), (16, 5), (32, 5), (64, 10)),
  dynamic: Sequence[tuple[int, int]] = ((16, 5), (32, 5), (64, 10)),
  verifiers: Sequence[Callable[[Sampling], Verifier]] = (TokenVerifier, BlockVerifier),
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
    texts: sources. Trees are built from the first `calibration_texts`, and measured on the others.
    output_dir: folder for both files; settings recorded there already are not measured again.
    samplings: sampling methods, each measured.
    gammas: gamma of each chain.
    shapes: (nodes, depth) of static trees; the first is used for the rounds that are shown.
    dynamic: (nodes, depth) of dynamic trees, which are verified with `TokenVerifier`.
    verifiers: classes of `core.verify`, or functions from a sampling method to a verifier. At
      temperature 0 only the first is used, because exact verifiers are equal there.
    calibration_texts: number of texts that trees are built from.
    calibration_tokens: number of generated tokens to build trees from; those texts may give fewer.
    batch_size: texts decoded together, also for the costs.
    max_new_tokens: limit for each output.
    min_tokens: number of generated tokens to measure on.
    seed: random seed of all sampling.
    report_examples: number of texts whose rounds are in the report, for each sampling method, with
      the first verifier. The rounds of the first text are printed, too.

  Raises:
    InputError: there is nothing to measure, or an argument is out of range.
  """
  require_types(trees, locals())
  require_seed(seed)
  counts = dict(calibration_texts=calibration_texts, calibration_tokens=calibration_tokens)
  counts |= dict(max_new_tokens=max_new_tokens, min_tokens=min_tokens)
  for name, value in counts.items():
    require_count(name, value)
  pair.require_batch_size(batch_size)
  if not (samplings and verifiers and len(texts) > calibration_texts):
    raise InputError(
      "There is nothing to measure: no samplings, no verifiers, or no texts after the "
      "calibration_texts."
    )
  console, measured = Console(markup=False, soft_wrap=True), []
  examples: list[list[Example]] = []
  to_calibrate, rest = texts[:calibration_texts], texts[calibration_texts:]
  with_first_verifier = pair._replace(verifier=verifiers[0])
  with (
    records.open_results(output_dir) as results,
    Progress() as bar,
  ):
    for sampling in samplings:
      settings = DecodeSettings(sampling, batch_size, max_new_tokens, seed)
      prompts, _, outputs = zip(*generate(pair, to_calibrate, settings, calibration_tokens))
      ranks = positional_acceptance(pair, prompts, outputs, sampling, WIDTH)
      console.print(
        f"{sampling}: acceptance of a node's child of each rank: {np.round(ranks, 3).tolist()}"
      )
      trees_: list[AnyTree] = [best_tree(ranks.tolist(), nodes, depth) for nodes, depth in shapes]
      trees_ += [DynamicTree(nodes - 1, depth) for nodes, depth in dynamic]
      proposals = [*map(chain, gammas), *trees_]
      wanted = [
        (verified, tree, dataclasses.replace(setting, **_shape(tree)))
        for tree in proposals
        for verified in _with_verifiers(pair, sampling, tree, verifiers)
        for setting in settings_to_measure(verified, rest, [settings], [tree.depth])
      ]
      todo = records.missing(results, [setting for *_, setting in wanted])
      generated = generate(pair, rest, settings, min_tokens) if todo else []
      costs: dict[AnyTree, Costs] = {}
      if todo:
        timed = [tree for tree in proposals if isinstance(tree, Tree)]
        tree_costs = measure_costs(with_first_verifier, timed, prompts[0], sampling, max_new_tokens)
        costs = dict(zip(timed, tree_costs))
      for verified, tree, setting in bar.track(wanted, description="decoding"):
        if setting in todo:
          cost = None if isinstance(tree, DynamicTree) else costs[tree]
          records.append(results, _measure(verified, generated, sampling, tree, setting, cost))
          jax.clear_caches()  # a process may map a limited number of programs
      keys = {records.key(setting) for *_, setting in wanted}
      measured += [r for r in records.read(results) if records.key(r) in keys]
      if trees_:
        shown = rest[: max(0, report_examples)]
        decoded = decode_examples(with_first_verifier, shown, [settings], trees_[:1])
        examples.append([*decoded])
    report = pathlib.Path(results).with_name("report.html")
    with atomic_write(report) as file:
      title = f"Acceptance lengths: {measured[0].subject}"
      file.write(lengths_report(measured, [*itertools.chain(*examples)], title))
  for sampling_examples in examples:
    show_examples(sampling_examples, 1)
  console.print(render(lengths_table(measured), "terminal"))
  console.print(
    f"Records: {results} (measured once; delete the file to measure again); as a page: {report}"
  )


def _shape(tree: AnyTree) -> dict[str, Any]:
  """Return the fields of a record that describe the shape of a tree apart from its depth."""
  if isinstance(tree, DynamicTree):
    return {"dynamic_nodes": tree.num_nodes}
  return {} if tree.is_chain else {"tree": list(tree.parents)}


def _with_verifiers(
  pair: LoadedPair,
  sampling: Sampling,
  tree: AnyTree,
  verifiers: Sequence[Callable[[Sampling], Verifier]],
) -> list[LoadedPair]:
  """Return the pair with each verifier that matters for this tree and sampling method."""
  if isinstance(tree, DynamicTree):
    verifiers = [TokenVerifier]
  if sampling.temperature == 0:
    verifiers = verifiers[:1]
  return [pair._replace(verifier=verifier) for verifier in verifiers]


def _measure(
  pair: LoadedPair,
  generated: Sequence[tuple[Array, Array, DecodeResult]],
  sampling: Sampling,
  tree: AnyTree,
  setting: Record,
  costs: Costs | None,
) -> Record:
  """Return the record with the rounds of speculative decoding, and with the predicted speedup.

  Args:
    pair: target and draft.
    generated: prompts, keys and outputs of autoregressive decoding.
    sampling: sampling method.
    tree: tree of draft tokens.
    setting: record without measurements.
    costs: costs of a round; None for no prediction.
  """
  since = time.perf_counter()
  decode, outputs = pair.decode_fn(sampling, tree), []
  for prompt, keys, _ in generated:
    decoded = decode(prompt, keys, max_new_tokens=setting.max_new_tokens)
    outputs.append(require_finite(jax.device_get(decoded)))
  lengths = np.concatenate([o.lengths for o in outputs])
  rounds = np.concatenate([(o.rounds.num_emitted > 0).sum(axis=0) for o in outputs])
  length = ratio_with_interval(lengths, rounds)
  *_, autoregressive = zip(*generated)
  return dataclasses.replace(
    setting,
    num_tokens=num_tokens(outputs),
    rounds=int(rounds.sum()),
    tokens_per_round=length.mean,
    tokens_per_round_low=length.low,
    tokens_per_round_high=length.high,
    identical=identical([*autoregressive], outputs) if sampling.temperature == 0 else None,
    c=costs and costs.c,
    verify_cost=costs and costs.v,
    predicted_measured_cost=costs and length.mean / (tree.depth * costs.c + costs.v),
    seconds=time.perf_counter() - since,
  )
