"""Measure BiLD's quality and speed on the bundled target with the separate draft model:

python -m experiments.methods.bild > experiments/methods/bild.jsonl

The first test captions are decoded one at a time, at temperature 0, each with all settings in turn.
Decoding stops when the timed part has taken SECONDS.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.lib.pages import ROOT
from specdec_jax.contrib.bild import RollbackVerifier, hand_over_draft
from specdec_jax.core.counts import num_rounds, num_tokens
from specdec_jax.core.decode import Decoder, NullDraft
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Params
from specdec_jax.core.verify.lossy import TypicalVerifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.quality import quality
from specdec_jax.data.text import data_folder, read_lines
from specdec_jax.load import checkpoint_draft, load_pair
from specdec_jax.measure.costs import interleaved_seconds
from specdec_jax.measure.machine import provenance
from specdec_jax.measure.tables import Table, number_text
from specdec_jax.pair import Pair

GREEDY, LIMIT, NUM_TEXTS, SECONDS = Sampling(0.0), 64, 200, 50
GAMMA, LONG = 7, 10  # the best gamma of the model, and the limit of a proposal that hands over
# Probability at which the draft model hands over -> thresholds at which the target rolls back.
THRESHOLDS = {0.4: (2.0,), 0.6: (1.0, 2.0, 5.0, 1000.0), 0.8: (2.0,)}

BILD_LEGEND = {
  "hands over": "below this probability of the draft model's most probable token",
  "rolls back": "above this -log p of a draft token",
  "acceptance length": "tokens per target forward pass",
  "speedup": "tokens/s over autoregressive decoding's, interleaved; batch size 1",
  "unchanged": "share of the outputs that equal those of the target alone",
}


def bild_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Return a table of the measurements made by this program."""
  cells = tuple(
    (
      row["method"],
      number_text(row["fallback"], "g"),
      number_text(row["rollback"], "g"),
      number_text(row["gamma"], "g"),
      f"{row['tokens_per_round']:.2f}",
      f"{row['speedup']:.2f}",
      f"{row['bleu']:.1f}",
      f"{100 * row['equal']:.0f}%",
    )
    for row in rows
  )
  columns = "method", "hands over", "rolls back", "gamma", "acceptance length", "speedup", "BLEU"
  first = rows[0]
  return Table(
    f"multi30k_ende, temperature 0, batch 1, {first['texts']} texts, {first['processor']}, "
    f"{first['cores']} cores",
    (*columns, "unchanged"),
    cells,
    (f"Measured with commit {first['commit']} of {str(first['date'])[:10]}.",),
    BILD_LEGEND,
  )


def methods(pair: Pair) -> dict[tuple[Any, ...], Any]:
  """Return for each (method, fallback, rollback, gamma) a function that decodes."""
  exact = {
    ("target alone", None, None, None): pair.decode_fn(GREEDY, chain(0)),
    ("exact", None, None, GAMMA): pair.decode_fn(GREEDY, chain(GAMMA)),
  }
  typical = dataclasses.replace(pair, verifier=TypicalVerifier)
  decodes = {**exact, ("typical", None, None, GAMMA): typical.decode_fn(GREEDY, chain(GAMMA))}
  for fallback, rollbacks in THRESHOLDS.items():
    draft = functools.partial(hand_over_draft, draft=checkpoint_draft, fallback=fallback)
    handing_over = pair.with_draft(draft(pair.target))
    for rollback in rollbacks:
      verifier = functools.partial(RollbackVerifier, rollback=rollback)
      bild = dataclasses.replace(handing_over, verifier=verifier)
      decodes["BiLD", fallback, rollback, LONG] = bild.decode_fn(GREEDY, chain(LONG))
  small = Decoder(pair.draft.build(GREEDY, chain(1)).model, NullDraft(), TokenVerifier(GREEDY))
  params = Params(pair.draft.params)
  return {**decodes, ("draft model alone", None, None, None): functools.partial(small.run, params)}


def main() -> None:
  pair = load_pair(draft=checkpoint_draft)

  def captions(language: str) -> list[str]:
    path = pathlib.Path(data_folder(), f"multi30k/test_2016_flickr.{language}.gz")
    bundled = ROOT / f"gin/tasks/captions.{language}.txt"
    return read_lines(path if path.exists() else bundled, limit=NUM_TEXTS)

  source, references = captions("en"), captions("de")
  decodes, prompts = methods(pair), pair.prompt(source)
  seconds, outputs = [], []
  while len(outputs) < len(source) and np.sum(seconds) < SECONDS:
    row = slice(len(outputs), len(outputs) + 1)
    args = prompts[row], row_keys(0, row.start, 1)
    calls = [functools.partial(each, *args, max_new_tokens=LIMIT) for each in decodes.values()]
    timed, results = interleaved_seconds(calls, 1)
    seconds.append([float(each[0]) for each in timed])
    outputs.append(jax.device_get(results))
  outputs = dict(zip(decodes, map(list, zip(*outputs))))
  texts = {
    key: [pair.vocabulary.decode(result.tokens[0]) for result in each]
    for key, each in outputs.items()
  }
  speeds = [num_tokens(each) for each in outputs.values()] / np.sum(seconds, axis=0)
  target_texts = next(iter(texts.values()))
  for key, speed in zip(decodes, speeds):
    method, fallback, rollback, gamma = key
    record = dict(
      method=method,
      fallback=fallback,
      rollback=rollback,
      gamma=gamma,
      tokens_per_round=num_tokens(outputs[key]) / num_rounds(outputs[key]),
      speedup=float(speed / speeds[0]),
      bleu=quality("BLEU", texts[key], references[: len(texts[key])]),
      equal=math.fsum(map(str.__eq__, texts[key], target_texts)) / len(target_texts),
      texts=len(target_texts),
      **provenance(),
    )
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
  main()
