"""Predicted speeds of trees on a TPU, from what its compiler says of a chain and of one tree."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec_jax.core import theory
from specdec_jax.reporting.tables import Table

ALPHAS = (0.75, 0.62)  # the paper's: EnDe, T5-small, argmax and standard sampling
SHAPES = ((8, 5), (16, 5), (32, 5), (64, 8), (64, 10))  # (nodes, depth)
LONGEST = 20  # gamma of the chains looked at

NOTES = (
  "T5-XXL with T5-small, bfloat16, batch 1, one TPU v4 chip, by bytes alone; nothing was run. "
  "tokens: expected of a round, of the best tree (`theory.best_tree`) or of a chain (Equation 1). "
  "round: its bytes over a plain step's; speed: tokens / round.",
  "alpha is the paper's, for T5-small on EnDe. How often younger children stand is assumed: of "
  "what the eldest leaves, 0.44, 0.16, 0.08 and 0.04. A round less its draft steps was compiled "
  "for 8 tokens and for 64 nodes; a line joins them. A chain is taken to cost as much as 8 tokens.",
)


def tree_speeds_table(chain: Mapping[str, Any], tree: Mapping[str, Any]) -> Table:
  """For each alpha the best chain and trees.

  Args:
    chain: a report of `scripts/compile_tpu.py`.
    tree: likewise, of a tree of the same models, with the ranks of the first alpha.
  """
  c = chain["over_a_step"]["draft step"]
  of = lambda report: report["over_a_step"]["round"] - report["settings"]["gamma"] * c
  few, nodes = chain["settings"]["gamma"] + 1, tree["settings"]["nodes"]
  slope = (of(tree) - of(chain)) / (nodes - few)
  eldest, *younger = map(float, tree["settings"]["ranks"].split(","))
  rows = []
  for alpha in ALPHAS:
    ranks = [alpha, *(share / (1 - eldest) * (1 - alpha) for share in younger)]
    speeds = theory.walltime_improvement(alpha, np.arange(1, LONGEST + 1), c, of(chain))
    gamma = 1 + int(np.argmax(speeds))
    tokens = float(theory.expected_tokens(alpha, gamma))
    found = [("best chain", gamma + 1, gamma, tokens, of(chain))]
    for num_nodes, depth in SHAPES:
      tokens = theory.tree_tokens(theory.best_tree(ranks, num_nodes, depth), ranks)
      found.append(("tree", num_nodes, depth, tokens, of(chain) + slope * (num_nodes - few)))
    best = found[0][3] / (found[0][4] + gamma * c)
    for kind, num_nodes, depth, tokens, undrafted in found:
      cost = undrafted + depth * c
      row = alpha, kind, num_nodes, depth, tokens, cost, tokens / cost, tokens / cost / best
      written = "{:g}|{}|{}|{}|{:.2f}|{:.3f}|{:.2f}|{:.2f}".format(*row)
      rows.append(tuple(written.split("|")))
  columns = "alpha|guesses|nodes|depth|tokens|round|speed|over chain"
  title = "Predicted speed of trees over plain decoding on TPU v4"
  return Table(title, tuple(columns.split("|")), tuple(rows), NOTES)
