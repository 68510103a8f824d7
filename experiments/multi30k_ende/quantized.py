"""Decode test_2016_flickr by the bundled target in float32, int8 and int4, and compute BLEU.

python -m experiments.multi30k_ende.quantized data/multi30k/test_2016_flickr bleu.jsonl

An interrupted run resumes.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments.lib.records import lines, measured_on
from specdec_jax.core.memory import num_bytes
from specdec_jax.data.quality import quality
from specdec_jax.data.text import read_lines
from specdec_jax.load import BUNDLED, load_pair
from specdec_jax.measure.machine import provenance
from specdec_jax.measure.tables import Table

GAMMA = 5


def bleu_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Return a table of the size of the models and the BLEU of the target in each format."""
  cells = tuple(
    (
      row["weights"],
      f"{row['target_mb']:.1f}",
      f"{row['draft_mb']:.1f}",
      f"{row['bleu']:.1f}",
      f"{row['as_autoregressive']}",
    )
    for row in rows
  )
  columns = "weights", "target MB", "draft MB", "BLEU", "same outputs"
  first = rows[0]
  notes = (
    f"{first['texts']} sentences, temperature 0, batch {first['batch_size']}. MB: all parameters; "
    "token embeddings are float32.",
    f"same outputs: number of outputs with the draft model, gamma {GAMMA}, that equal those of "
    "autoregressive decoding.",
    measured_on(rows),
  )
  return Table("BLEU of formats of weights", columns, cells, notes)


def main() -> None:
  prefix, path = sys.argv[1:]
  sources, references = (read_lines(f"{prefix}.{language}.gz") for language in ("en", "de"))
  measured = {row["weights"] for row in lines(path)} if os.path.exists(path) else set()
  for weights in ("float", "int8", "int4"):
    if weights in measured:
      continue
    started = time.perf_counter()
    pair = load_pair(draft=str(BUNDLED / "draft"), weights=weights)
    plain, ours = (
      [x.text for x in pair.generate(sources, gamma=gamma, batch_size=32, max_new_tokens=64)]
      for gamma in (0, GAMMA)
    )
    models = dict(target=pair.target.params, draft=pair.draft.params)
    line = {
      "weights": weights,
      "kernels": pair.kernels,
      **{f"{k}_mb": sum(map(num_bytes, jax.tree.leaves(x))) / 1e6 for k, x in models.items()},
      "bleu": quality("BLEU", plain, references),
      "as_autoregressive": sum(map(str.__eq__, ours, plain)),
      "texts": len(sources),
      "distinct_texts": len(set(sources)),
      "batch_size": 32,
      "seconds": time.perf_counter() - started,
      **provenance(),
    }
    with open(path, "a", encoding="utf-8") as file:
      file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
  main()
