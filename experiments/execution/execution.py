"""Time stochastic speculative execution (Section 6) on a task without text:

python -m experiments.execution.execution > experiments/execution/results.jsonl

In a game, the opponent (function f) takes F ms to compute a distribution p over six moves, from
which the move is sampled. The player (function g) takes G ms to compute a reply. The computation of
the reply starts with a guess of the move, sampled from q, a mixture of p and the uniform
distribution. Both f and g sleep, as if they waited for a remote machine, so other load on this
machine hardly affects the times.
"""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.contrib.execution import speculative_execution
from specdec_jax.measure.machine import provenance
from specdec_jax.measure.tables import Table

EXECUTION_LEGEND = {
  "beta": "probability that the guess is accepted",
  "accepted": "share of guesses that were accepted",
  "F, G": "times of the two functions",
  "sequential": "F + G",
  "expected": "beta max(F, G) + (1 - beta) (F + G)",
}

MOVES = np.array([0.55, 0.25, 0.1, 0.05, 0.03, 0.02])  # p
P_SHARES = 0.0, 0.5, 1.0  # weight of p in q
TIMES_MS = (20, 20), (30, 10), (10, 30)  # (F, G)
TRIALS = 200


def execution_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Return a table of the measurements made by this program."""
  cells = tuple(
    (
      f"{row['beta']:.2f}",
      f"{row['kept']:.2f}",
      f"{row['f_ms']:g}",
      f"{row['g_ms']:g}",
      f"{row['in_turn_ms']:g}",
      f"{row['expected_ms']:.1f}",
      f"{row['measured_ms']:.1f}",
    )
    for row in rows
  )
  first = rows[0]
  return Table(
    "Stochastic speculative execution, milliseconds",
    ("beta", "accepted", "F", "G", "sequential", "expected", "measured"),
    cells,
    (
      f"Means of {first['trials']} runs per row, {first['processor']}, commit {first['commit']} of "
      f"{str(first['date'])[:10]}.",
    ),
    EXECUTION_LEGEND,
  )


def main() -> None:
  rng = np.random.default_rng(0)
  for p_share in P_SHARES:
    q = p_share * MOVES + (1 - p_share) / len(MOVES)
    for f_ms, g_ms in TIMES_MS:

      def opponent(f_s=1e-3 * f_ms):
        time.sleep(f_s)
        return MOVES

      def reply(move, g_s=1e-3 * g_ms):
        time.sleep(g_s)
        return -move

      seconds, kept = [], []
      for _ in range(TRIALS):
        started = time.perf_counter()
        kept.append(speculative_execution(opponent, reply, q, rng).accepted)
        seconds.append(time.perf_counter() - started)
      beta = float(np.minimum(MOVES, q).sum())
      record = dict(
        beta=beta,
        f_ms=f_ms,
        g_ms=g_ms,
        trials=TRIALS,
        kept=statistics.mean(kept),
        expected_ms=beta * max(f_ms, g_ms) + (1 - beta) * (f_ms + g_ms),
        measured_ms=1e3 * statistics.mean(seconds),
        in_turn_ms=f_ms + g_ms,
        **provenance(),
      )
      print(json.dumps(record), flush=True)


if __name__ == "__main__":
  main()
