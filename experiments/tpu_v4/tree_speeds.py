"""Predict speedups of trees on a TPU from compiler reports of a chain and of one tree."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.tpu_v4.examine import read_report
from specdec_jax import theory
from specdec_jax.measure.records import read
from specdec_jax.measure.tables import Table, with_interval

ALPHAS = (0.75, 0.62)  # the paper's alphas for T5-small on EnDe: argmax, and standard sampling
SHAPES = ((8, 5), (16, 5), (32, 5), (64, 8), (64, 10))  # (nodes, depth) of the trees
MAX_GAMMA = 20  # longest chain that is considered

NOTES = (
  "T5-XXL with T5-small, bfloat16, batch 1, one TPU v4 chip, bandwidth-bound estimate. No program "
  "was run.",
  "tokens: expected tokens per round, of the best tree (`theory.best_tree`) or of a chain "
  "(Equation 1). round: bytes of a round / bytes of an autoregressive step. speed: tokens / round.",
  "alpha is the paper's, for T5-small on EnDe. The acceptance of later children is assumed: of the "
  "probability that the first child is rejected, 0.44, 0.16, 0.08 and 0.04.",
  "The part of a round without draft steps was compiled for 8 tokens and for 64 nodes, and is "
  "interpolated linearly. A chain is assumed to cost as much as 8 tokens.",
)


DYNAMIC_NOTES = (
  "T5-XXL, bfloat16, batch 1, one TPU v4 chip, bandwidth-bound estimate. No program was run.",
  "tokens: measured tokens per round of the bundled target on captions, with the 95% interval.",
  "round: bytes of a round / bytes of an autoregressive step. speed: tokens / round.",
)


def dynamic_speeds_table(records: str, *reports: str) -> Table:
  """Return a table of dynamic trees with measured acceptance lengths and compiled costs.

  Args:
    records: file of records of acceptance lengths (`experiments/trees/trees.gin`).
    *reports: files of reports with `--dynamic`. A report belongs to the records with the same
      number of nodes, depth and temperature; it has a row for each of them.
  """
  rows, measured = [], read(records)
  for report in map(read_report, reports):
    settings, round_ = report["settings"], report["over_a_step"]["round"]
    shape = settings["nodes"], settings["gamma"], settings["temperature"]
    for r in measured:
      s, tokens = r.settings, r.outputs.tokens_per_round
      if (s.dynamic_nodes, s.gamma, s.temperature) == shape and tokens is not None:
        interval = with_interval("outputs.tokens_per_round", ".2f")(r)
        drafts = f"{r.models.draft}|{settings['draft']}"
        cells = f"{drafts}|{s.temperature:g}|{s.dynamic_nodes}|{s.gamma}"
        rows.append((*cells.split("|"), interval, f"{round_:.3f}", f"{tokens / round_:.2f}"))
  columns = "measured draft|compiled draft|temperature|nodes|depth|tokens|round|speed"
  title = "Predicted speedup of dynamic trees over autoregressive decoding on TPU v4"
  return Table(title, tuple(columns.split("|")), tuple(rows), DYNAMIC_NOTES)


def tree_speeds_table(chain_report: str, tree_report: str) -> Table:
  """Return a table of the best chain and of trees, for each alpha.

  Args:
    chain_report: file of a report on a chain.
    tree_report: file of a report on a tree of the same models. Its setting `ranks` has the
      acceptance rates of first, second, ... children, which are rescaled to each alpha.
  """
  chain, tree = read_report(chain_report), read_report(tree_report)
  c = chain["over_a_step"]["draft step"]
  chain_cost, tree_cost = _cost_without_drafting(chain, c), _cost_without_drafting(tree, c)
  chain_tokens, tree_nodes = chain["settings"]["gamma"] + 1, tree["settings"]["nodes"]
  slope = (tree_cost - chain_cost) / (tree_nodes - chain_tokens)
  first_rate, *later_rates = map(float, tree["settings"]["ranks"].split(","))
  rows = []
  for alpha in ALPHAS:
    ranks = [alpha, *(rate / (1 - first_rate) * (1 - alpha) for rate in later_rates)]
    speeds = theory.walltime_improvement(alpha, np.arange(1, MAX_GAMMA + 1), c, chain_cost)
    gamma = 1 + int(np.argmax(speeds))
    tokens = float(theory.expected_tokens(alpha, gamma))
    candidates = [("best chain", gamma + 1, gamma, tokens, chain_cost)]
    for num_nodes, depth in SHAPES:
      tokens = theory.tree_tokens(theory.best_tree(ranks, num_nodes, depth), ranks)
      cost = chain_cost + slope * (num_nodes - chain_tokens)
      candidates.append(("tree", num_nodes, depth, tokens, cost))
    chain_speed = candidates[0][3] / (candidates[0][4] + gamma * c)
    for kind, num_nodes, depth, tokens, undrafted_cost in candidates:
      cost = undrafted_cost + depth * c
      speed = tokens / cost
      cells = f"{alpha:g}|{kind}|{num_nodes}|{depth}|{tokens:.2f}|{cost:.3f}|{speed:.2f}"
      rows.append((*cells.split("|"), f"{speed / chain_speed:.2f}"))
  columns = "alpha|draft tokens|nodes|depth|tokens|round|speed|over chain"
  title = "Predicted speedup of trees over autoregressive decoding on TPU v4"
  return Table(title, tuple(columns.split("|")), tuple(rows), NOTES)


def _cost_without_drafting(report: Mapping[str, Any], c: float) -> float:
  """Return the bytes of a round without its draft steps, relative to an autoregressive step."""
  return report["over_a_step"]["round"] - report["settings"]["gamma"] * c
