"""Predict at which batch speculation stops paying, for Whisper large-v3 and T5-XXL.

python -m experiments.speech.batches --output experiments/speech/batches.jsonl
python -m experiments.speech.batches --compile --output experiments/speech/batches_compiled.jsonl

Bytes and operations are those of `specdec_jax.measure.roofline`, counted without weights, in
bfloat16. A pass has two parts that take turns: attention, which reads the keys and values of each
row, and all other matmuls, which read weights. A part takes max(bytes / bandwidth, operations /
peak). Simplifications:

- The bandwidth of an H100 is one that was fitted to a step and a round at commit 8ecd799, and all
  other rates are the published peaks. No kernel has a fixed time, so c is too low at small batches.
- Activations, logits, sampling, verification and the writing of caches take no time.
- All slots of the caches are read; each row has NEW_TOKENS of them besides its prompt.
- Rows are independent, as in continuous batching: each advances by its own accepted tokens, and no
  row waits for another. The speedup is then that of Theorem 8, with c and v at this batch. Encoder
  and prefill are left out.
- A batch that needs more memory than one device has is divided evenly over several devices, which
  do not communicate, so that its speedup is that of one device with more memory.

With --compile, a few programs are compiled for TPU v4, without one, and the bytes that the compiler
counts are compared with these. Programs of one and two layers are compiled, and the bytes of all
layers computed from them.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.lib import script
from experiments.speech.train import head_of
from experiments.tpu_v4 import compile as compiler
from specdec_jax import theory
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.core.sampling import Sampling
from specdec_jax.measure.machine import provenance
from specdec_jax.measure.plan import DEVICES, PAYS, Counts, PairShapes, least_alpha
from specdec_jax.measure.tables import Table
from specdec_jax.models.layout import Layout
from specdec_jax.models.sizes import named_config

GAMMAS, ALPHAS = range(1, 9), (0.6, 0.75, 0.9)
LIMIT = 2**20  # a batch so large that weights are read for free
BATCHES = *(2**i for i in range(11)), LIMIT
NEW_TOKENS, HEAD_TOKENS = 128, 8000
# Bytes and operations per second, and bytes of memory.
_H100, _V4 = DEVICES["h100"], DEVICES["v4"]
RATES = {
  "H100": (3030e9, 1e12 * _H100.tflops, 1e9 * _H100.memory_gb),
  "TPU v4": (1e9 * _V4.gb_per_s, 1e12 * _V4.tflops, 1e9 * _V4.memory_gb),
}

Row = dict[str, Any]  # a line of a file of records


class Pair(NamedTuple):
  """Target and draft."""

  name: str
  draft_name: str
  shapes: PairShapes


def pairs() -> list[Pair]:
  """Return the pairs of the study."""
  options: dict[str, Any] = dict(
    layout=Layout(dtype=jnp.dtype("bfloat16"), fused=True), tied_logits=False
  )
  large, distil = (named_config("whisper_v3", size, **options) for size in ("large", "distil"))
  xxl, small = (named_config("1.1", size, **options) for size in ("xxl", "small"))
  head, positions = head_of(large, HEAD_TOKENS), large.source_positions
  found = [
    ("large-v3", "head", (large, head, positions)),
    ("large-v3", "distil-large-v3", (large, distil, positions)),
    *((f"T5-XXL, source {source}", "T5-small", (xxl, small, source)) for source in (40, 2048)),
  ]
  return [Pair(*names, PairShapes(*models, NEW_TOKENS)) for *names, models in found]


def records(pair: Pair) -> Iterator[Row]:
  """Yield a record per device and batch size."""
  counts, gammas = Counts(pair.shapes), np.array(GAMMAS)
  for device, (*rates, memory) in RATES.items():
    for batch in BATCHES:
      step, rounds = counts(batch, 0), [counts(batch, gamma) for gamma in GAMMAS]
      step_s, held = _seconds(step.target, rates), float((step.weights + step.caches).sum())
      v = np.array([_seconds(each.target, rates) for each in rounds]) / step_s
      c = np.array([_seconds(each.draft, rates) for each in rounds]) / gammas / step_s
      speeds = {alpha: theory.walltime_improvement(alpha, gammas, c, v) for alpha in ALPHAS}
      works = {"step": step.target, "pass over 4": rounds[2].target, "draft": rounds[2].draft / 3}
      yield {
        "target": pair.name,
        "draft": pair.draft_name,
        "device": device,
        "batch_size": batch,
        "gb": {name: work[:, 0].sum() / 1e9 for name, work in works.items()},
        "tflop": {name: work[:, 1].sum() / 1e12 for name, work in works.items()},
        "weights_gb": step.weights.sum() / 1e9,
        "row_mb": step.caches.sum() / batch / 1e6,
        "devices": int(np.ceil(held / memory)),
        "step_ms": 1e3 * step_s,
        "c": c.round(4).tolist(),
        "v": v.round(4).tolist(),
        "best_gamma": {f"{alpha}": int(gammas[x.argmax()]) for alpha, x in speeds.items()},
        "speedup": {f"{alpha}": float(x.max()) for alpha, x in speeds.items()},
        **provenance(),
      }


def _seconds(work: np.ndarray, rates: Sequence[float]) -> float:
  return (work / rates).max(axis=-1).sum()


def compiled(chosen: Sequence[tuple[Pair, int]], gamma: int = 3) -> Iterator[Row]:
  """Yield a record per pair, batch size and program, compiled for one TPU v4 chip."""
  _, devices = compiler.described("v4:1x1x1")
  for pair, batch in chosen:
    target, counts = pair.shapes.target, Counts(pair.shapes)
    limit = NEW_TOKENS - gamma
    settings = compiler.CompileSettings(gamma, batch, pair.shapes.source, limit, Sampling(0.0))
    for program, last in (("decode step", 0), ("verify", gamma)):
      sizes = []
      for layers in (1, 2):
        shallow = dataclasses.replace(target, num_encoder_layers=1, num_decoder_layers=layers)
        lowered = compiler.programs(shallow, shallow, devices, settings)[program]()
        cost: Any = lowered.compile(compiler_options=compiler.HBM_ONLY).cost_analysis()
        sizes.append(np.array([cost["bytes accessed"], cost["flops"]]))
      total = sizes[1] + (target.num_decoder_layers - 2) * (sizes[1] - sizes[0])
      own = counts(batch, last).target.sum(axis=0)
      yield {
        "target": pair.name,
        "batch_size": batch,
        "tokens": last + 1,
        "gb": {"counted": own[0] / 1e9, "compiled": total[0] / 1e9},
        "tflop": {"counted": own[1] / 1e12, "compiled": total[1] / 1e12},
        **provenance(),
      }


def largest_batch(rows: Sequence[Row], alpha: float) -> int:
  """Return the largest batch in records of a pair at which speculation pays, or 0."""
  return max((row["batch_size"] for row in rows if row["speedup"][f"{alpha}"] >= PAYS), default=0)


def speech_batches_table(rows: Sequence[Row]) -> Table:
  """Return a table with one row per pair and device."""
  of_pairs: dict[tuple[str, ...], list[Row]] = {}
  for row in rows:
    of_pairs.setdefault((row["target"], row["draft"], row["device"]), []).append(row)
  cells = []
  for names, found in of_pairs.items():
    shown = [row for row in found if row["batch_size"] in (1, 128, LIMIT)]
    largest = (largest_batch(found, alpha) for alpha in ALPHAS)
    cells.append(
      (
        *names,
        f"{max(row['batch_size'] for row in found if row['devices'] == 1)}",
        f"{found[0]['row_mb']:.0f}",
        " / ".join(f"{row['c'][2]:.3f}" for row in shown),
        " / ".join(f"{row['v'][2]:.2f}" for row in shown),
        " / ".join("any" if batch == LIMIT else f"{batch}" for batch in largest),
        *(" / ".join(f"{row['speedup'][f'{alpha}']:.2f}" for row in shown) for alpha in ALPHAS),
        " / ".join(f"{least_alpha(row['c'], row['v']):.2f}" for row in shown),
      )
    )
  columns = (
    *("target", "draft", "device", "fits", "MB per row", "c", "v(3)", "largest batch"),
    *(f"speedup, alpha {alpha:g}" for alpha in ALPHAS),
    "pays from alpha",
  )
  notes = (
    "Predicted from bytes and operations; nothing was measured. bfloat16, "
    f"{NEW_TOKENS} new tokens, commit {rows[0]['commit']} of {rows[0]['date'][:10]}.",
    "Three numbers in a cell: at batch 1, at batch 128, and without a limit of the batch.",
  )
  return Table("Batches at which speculation pays", columns, tuple(cells), notes)


def speech_compiled_table(rows: Sequence[Row]) -> Table:
  """Return a table of counted and compiled bytes and operations, with one row per program."""
  cells, step = [], 1.0
  for row in rows:
    gb, tflop = row["gb"], row["tflop"]
    step = gb["compiled"] if row["tokens"] == 1 else step  # a pass follows its step
    ratios = gb["compiled"] / gb["counted"], tflop["compiled"] / tflop["counted"]
    numbers = *gb.values(), *ratios, gb["compiled"] / step
    names = row["target"], f"{row['batch_size']}", f"{row['tokens']}"
    cells.append((*names, *(f"{number:.2f}" for number in numbers)))
  columns = ("target", "batch", "tokens", "counted GB", "compiled GB", "compiled / counted")
  columns += ("the same of operations", "compiled GB / those of a step")
  note = (
    "A target pass over this number of tokens per row, for one TPU v4 chip, whose memory is not "
    f"checked. Commit {rows[0]['commit']} of {rows[0]['date'][:10]}."
  )
  return Table("Counted, and compiled for TPU v4", columns, tuple(cells), (note,))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
  parser.add_argument("--output", type=pathlib.Path, required=True, help="file of the records")
  parser.add_argument("--compile", action="store_true", help="compare with programs for TPU v4")
  args = parser.parse_args()
  head, _, short, long = all_pairs = pairs()
  chosen = (head, 8), (head, 64), (short, 8), (short, 128), (long, 8)
  rows = compiled(chosen) if args.compile else itertools.chain(*map(records, all_pairs))
  with atomic_write(args.output) as file:
    for row in rows:
      file.write(json.dumps(row) + "\n")
      print(json.dumps(row), flush=True)


if __name__ == "__main__":
  script.run(main)
