"""Acceptance lengths of chains and trees with each verifier: tokens per target forward pass.

Records of chains and static trees also have the speedup that is predicted from measured costs
(Section 3.5).
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from experiments.lib.autoregressive import generate
from experiments.lib.records import measured_with, models_text, sampling_text
from specdec_jax import registry
from specdec_jax.commands.quickstart import show_examples
from specdec_jax.commands.speedup import decode_examples
from specdec_jax.core.counts import identical, num_tokens, require_finite
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.rounds import Example
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree, chain
from specdec_jax.core.types import DecodeResult, Verifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.measure.alpha import positional_acceptance, ratio_with_interval
from specdec_jax.measure.costs import Costs, measure_costs
from specdec_jax.measure.records import Record, settings_to_measure
from specdec_jax.measure.report import Bar, Chart, Section, page
from specdec_jax.measure.sweep import Report, Step, sweep
from specdec_jax.measure.tables import IDENTICAL, C, Column, Table, V, records_table, with_interval
from specdec_jax.pair import Pair
from specdec_jax.theory import best_tree

# Columns of `lengths_table` before and after "over chain".
LENGTHS = (
  Column("temperature", sampling_text),
  Column(
    "proposal",
    "kind",
    "",
    "chain, tree or dynamic tree; a tree is the best one with at most this many nodes and this "
    "depth for the acceptance rate of each rank of children, which was measured on other texts; a "
    "dynamic tree is selected in each round from the draft's most probable tokens",
  ),
  Column(
    "nodes",
    "num_nodes",
    "",
    "nodes per target forward pass, including the last committed token",
  ),
  Column(
    "depth",
    "settings.gamma",
    "",
    "maximal number of draft tokens that one round can accept",
  ),
  Column("verifier", lambda r: r.settings.verifier.removesuffix("Verifier")),
  Column("tokens", "outputs.num_tokens", "", "tokens of all outputs"),
  Column(
    "acceptance length",
    with_interval("outputs.tokens_per_round", ".2f"),
    "",
    "tokens per round, including the bonus token or the correction, with its 95% interval "
    "(bootstrap over texts)",
  ),
)
LENGTHS_COSTS = (
  C,
  V,
  Column(
    "predicted",
    "times.predicted_measured_cost",
    ".2f",
    "predicted speedup for a long text: acceptance length / (depth c + v)",
  ),
  IDENTICAL,
  Column("seed", "settings.seed"),
)

WIDTH = 8  # number of ranks whose acceptance is measured


def trees(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  samplings: Sequence[Sampling],
  gammas: Sequence[int] = (3, 5, 7, 10),
  shapes: Sequence[tuple[int, int]] = ((8, 5), (16, 5), (32, 5), (64, 10)),
  dynamic: Sequence[tuple[int, int]] = ((16, 5), (32, 5), (64, 10)),
  verifiers: Sequence[str | Callable[[Sampling], Verifier]] = ("tokens", "blocks"),
  calibration_texts: int = 100,
  calibration_tokens: int = 1000,
  batch_size: int = 1,
  max_new_tokens: int = 64,
  min_tokens: int = 10_000,
  seed: int = 0,
  report_examples: int = 2,
) -> None:
  """Measure acceptance lengths in real rounds; print a table, and write records and a page.

  Args:
    pair: target and draft; see `load.load_pair`.
    texts: sources. Trees are built from the first `calibration_texts` texts, and measured on the
      remaining texts.
    output_dir: folder for `results.jsonl` and `report.html`; settings recorded there already are
      not measured again.
    samplings: sampling methods; each is measured.
    gammas: gamma of each chain.
    shapes: (nodes, depth) of static trees; both are maximums. The rounds that are shown use the
      first static tree, or the first dynamic tree if there is no static tree.
    dynamic: (nodes, depth) of dynamic trees, which are verified with `TokenVerifier`.
    verifiers: names in `registry.VERIFIERS`, or functions from a sampling method to a verifier. At
      temperature 0 only the first is used, because all exact verifiers accept the same tokens.
    calibration_texts: number of texts from which trees are built.
    calibration_tokens: number of generated tokens from which trees are built. The calibration texts
      may give fewer tokens.
    batch_size: number of texts decoded together, also when costs are measured.
    max_new_tokens: maximum number of tokens of each output.
    min_tokens: minimum number of generated tokens to measure on.
    seed: random seed of all sampling.
    report_examples: number of texts per sampling method whose rounds are in the report. They are
      decoded with the first verifier. The rounds of the first of these texts are printed, too.
  """
  pair.require_batch_size(batch_size)
  to_calibrate, rest = texts[:calibration_texts], texts[calibration_texts:]
  verifiers = [*map(registry.verifier, verifiers)]
  with_first_verifier = dataclasses.replace(pair, verifier=verifiers[0])
  # Filled by `steps`: settings and first tree of each sampling method, for the report.
  to_show: list[tuple[DecodeSettings, AnyTree]] = []

  def steps() -> Iterator[Step]:
    for sampling in samplings:
      settings = DecodeSettings(sampling, batch_size, max_new_tokens, seed)
      prompts, _, outputs = zip(*generate(pair, to_calibrate, settings, calibration_tokens))
      ranks = positional_acceptance(pair, prompts, outputs, sampling, WIDTH)
      print(
        f"temperature {sampling.temperature:g}: acceptance of a node's child of each rank: "
        f"{np.round(ranks, 3).tolist()}",
        flush=True,
      )
      trees_: list[AnyTree] = [best_tree(ranks.tolist(), nodes, depth) for nodes, depth in shapes]
      trees_ += [DynamicTree(nodes - 1, depth) for nodes, depth in dynamic]
      to_show.extend((settings, tree) for tree in trees_[:1])
      generated = functools.cache(functools.partial(generate, pair, rest, settings, min_tokens))
      proposals = [*map(chain, gammas), *trees_]
      costs = functools.cache(
        functools.partial(
          _costs, with_first_verifier, proposals, prompts[0], sampling, max_new_tokens
        )
      )
      for tree in proposals:
        for verified in _with_verifiers(pair, sampling, tree, verifiers):
          (setting,) = settings_to_measure(verified, rest, [settings], [tree.depth])
          setting = setting.replace(**_shape(tree))
          yield Step(
            f"temperature {sampling_text(setting)}, {setting.kind} of {tree.num_nodes} nodes",
            [setting],
            functools.partial(_measure, verified, generated, sampling, tree, costs),
          )

  def page(measured: list[Record]) -> str:
    shown = rest[: max(0, report_examples)]
    examples = [
      [*decode_examples(with_first_verifier, shown, [settings], tree)] for settings, tree in to_show
    ]
    for sampling_examples in examples:
      show_examples(sampling_examples, 1)
    title = f"Acceptance lengths: {measured[0].subject}"
    return lengths_report(measured, [*itertools.chain(*examples)], title)

  sweep(output_dir, steps, lambda measured: [lengths_table(measured)], page)


def _shape(tree: AnyTree) -> dict[str, Any]:
  """Return the fields of a record that describe a tree, except its depth."""
  if isinstance(tree, DynamicTree):
    return {"dynamic_nodes": tree.num_nodes}
  return {} if tree.is_chain else {"tree": tuple(tree.parents)}


def _with_verifiers(
  pair: Pair,
  sampling: Sampling,
  tree: AnyTree,
  verifiers: Sequence[Callable[[Sampling], Verifier]],
) -> list[Pair]:
  """Return one pair for each verifier that is measured with this tree and sampling method."""
  if isinstance(tree, DynamicTree):
    verifiers = [TokenVerifier]
  if sampling.temperature == 0:
    verifiers = verifiers[:1]
  return [dataclasses.replace(pair, verifier=verifier) for verifier in verifiers]


def _costs(
  pair: Pair,
  trees: Sequence[AnyTree],
  prompt: Array,
  sampling: Sampling,
  max_new_tokens: int,
) -> dict[AnyTree, Costs]:
  """Measure the costs of a round with each chain and static tree, interleaved."""
  timed = [tree for tree in trees if isinstance(tree, Tree)]
  (costs,) = measure_costs([pair], timed, prompt, sampling, max_new_tokens)
  return dict(zip(timed, costs))


def _measure(
  pair: Pair,
  generate_texts: Callable[[], Sequence[tuple[Array, Array, DecodeResult]]],
  sampling: Sampling,
  tree: AnyTree,
  measured_costs: Callable[[], Mapping[AnyTree, Costs]],
  settings: Sequence[Record],
  report: Report,
) -> Iterator[Record]:
  """Decode with a tree, and yield its record: the acceptance length and the predicted speedup.

  Args:
    pair: target and draft.
    generate_texts: function that decodes autoregressively and returns (prompts, keys, outputs) of
      each batch.
    sampling: sampling method.
    tree: tree of draft tokens.
    measured_costs: function that returns the costs of a round by tree. A dynamic tree has no costs
      and therefore no predicted speedup.
    settings: one record without measurements.
    report: function that is called with the finished fraction of the step.
  """
  (setting,) = settings
  since = time.perf_counter()
  generated, costs = generate_texts(), measured_costs().get(tree)
  decode, outputs = pair.decode_fn(sampling, tree), []
  for i, (prompt, keys, _) in enumerate(generated):
    decoded = decode(prompt, keys, max_new_tokens=setting.settings.max_new_tokens)
    outputs.append(require_finite(jax.device_get(decoded)))
    report((i + 1) / len(generated))
  lengths = np.concatenate([o.lengths for o in outputs])
  rounds = np.concatenate([(o.rounds.num_emitted > 0).sum(axis=0) for o in outputs])
  length = ratio_with_interval(lengths, rounds)
  *_, autoregressive = zip(*generated)
  yield setting.replace(
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


def lengths_table(records: Sequence[Record]) -> Table:
  """Return a table of the acceptance lengths of chains and trees, with one row per record.

  All records have the same pair and texts.
  """
  first = records[0]

  def setting(r: Record) -> tuple[str, int, int]:
    return sampling_text(r), r.settings.gamma, r.settings.seed

  chain_lengths = {
    setting(r): r.outputs.tokens_per_round
    for r in records
    if r.kind == "chain" and r.settings.verifier == "TokenVerifier"
  }
  over_chain = Column(
    "over chain",
    lambda r: (r.outputs.tokens_per_round or 0.0) / chain_lengths.get(setting(r)),
    ".3f",
    "acceptance length / that of the chain of the same depth with token verification",
  )
  size = first.settings.batch_size
  texts_per_batch = "1 text" if size == 1 else f"{size} texts"
  notes = f"Costs are measured with {texts_per_batch} per batch.", measured_with(records)
  title = f"{models_text(first)}: acceptance lengths"
  return records_table(title, records, (*LENGTHS, over_chain, *LENGTHS_COSTS), notes)


def lengths_report(records: Sequence[Record], examples: Sequence[Example], title: str) -> str:
  """Return an HTML page with a chart and a table of acceptance lengths, and with decoded rounds."""
  note = (
    "One target forward pass verifies all nodes of a round. The line is autoregressive decoding."
  )
  return page(
    title,
    records,
    [
      Section("Acceptance length against nodes", charts=length_charts(records), note=note),
      Section("Measured settings", lengths_table(records)),
      Section("Round by round", examples=examples),
    ],
  )


def length_charts(records: Sequence[Record]) -> list[Chart]:
  """Return one chart per sampling method, with a bar for each proposal and verifier."""
  colours = {"chain": "bound", "tree": "measured", "dynamic tree": "predicted"}
  charts: dict[str, list[Bar]] = {}
  for r in sorted(records, key=lambda r: (r.kind, r.num_nodes)):
    if (length := r.outputs.tokens_per_round) is not None:
      verifier = r.settings.verifier.removesuffix("Verifier")
      label = f"{r.kind}, {r.num_nodes} nodes, {verifier}"
      bar = Bar(label, length, f"{length:.2f}", colours[r.kind])
      charts.setdefault(f"Temperature {sampling_text(r)}", []).append(bar)
  return [Chart(heading, bars) for heading, bars in charts.items()]
