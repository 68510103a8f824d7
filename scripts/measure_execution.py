"""Time of stochastic speculative execution beside its law, on a task that is no text:

python scripts/measure_execution.py > experiments/execution/results.jsonl

A player's opponent takes F to choose one of six moves, by a law p that nobody knows before; the
player takes G to work out a reply. The reply is begun on a guess of the move, from q, a law between
p and any move alike. Both wait, as for another machine, so that this one's load says little.
"""

import json
import statistics
import time

import numpy as np

from specdec_jax.core.theory import beta
from specdec_jax.execution import expected_seconds, speculative_execution
from specdec_jax.machine import provenance

MOVES = np.array([0.55, 0.25, 0.1, 0.05, 0.03, 0.02])
TRIALS = 200


def main() -> None:
  rng = np.random.default_rng(0)
  for knowledge in (0.0, 0.5, 1.0):
    q = knowledge * MOVES + (1 - knowledge) / len(MOVES)
    for f_ms, g_ms in ((20, 20), (30, 10), (10, 30)):

      def opponent(f_s=1e-3 * f_ms):
        time.sleep(f_s)
        return MOVES

      def reply(move, g_s=1e-3 * g_ms):
        time.sleep(g_s)
        return -move

      seconds, kept = [], []
      for _ in range(TRIALS):
        since = time.perf_counter()
        kept.append(speculative_execution(opponent, reply, q, rng).kept)
        seconds.append(time.perf_counter() - since)
      chance = float(beta(MOVES, q))
      record = dict(
        beta=chance,
        f_ms=f_ms,
        g_ms=g_ms,
        trials=TRIALS,
        kept=statistics.mean(kept),
        expected_ms=1e3 * expected_seconds(chance, 1e-3 * f_ms, 1e-3 * g_ms),
        measured_ms=1e3 * statistics.mean(seconds),
        in_turn_ms=f_ms + g_ms,
        **provenance(),
      )
      print(json.dumps(record), flush=True)


if __name__ == "__main__":
  main()
