"""Compare `Pair.generate` with `generate` of transformers on the bundled target:

python -m experiments.generate.compare captions.en >> experiments/generate/results.jsonl

Settings and combinations of them are compared at temperature 0: with a chain, with a tree, and in a
beam search. For each comparison, one line of JSON counts the sources whose outputs are equal token
by token. `largest_difference` is the largest difference between equal outputs in the
log-probability of a token, or in the score of a beam. Different outputs are a tie if their total
log-probabilities or scores differ by less than 1e-4. Needs the extra `peers`. If standard output is
a file, the results in it are not computed again.
"""

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import specdec_jax
from experiments.lib import script
from experiments.lib.records import measured_on
from experiments.peers.huggingface import load_model
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.checkpoints.save import save_huggingface
from specdec_jax.load import BUNDLED
from specdec_jax.measure.machine import provenance
from specdec_jax.measure.tables import Table

PARITY_LEGEND = {
  "ties": "other texts whose scores differ by less than 1e-4",
  "difference": "largest difference between log-probabilities of tokens, or scores of beams",
}

MAX_NEW_TOKENS, MAX_SOURCE_TOKENS, NUM_TEXTS, NUM_COMBINATIONS = 40, 24, 200, 20
TIE = 1e-4
CHAIN, TREE = {"gamma": 4}, {"tree": (0, 0, 1, 1, 2, 3)}
GREEDY_RUNS = {**CHAIN, "batch_size": 8}, {**TREE, "batch_size": 8}
BEAM_RUNS = ({"gamma": 2, "batch_size": 8},)


def settings_of(tokens: list[int]) -> dict[str, dict[str, Any]]:
  """Return the settings to compare; `tokens` are ids of tokens that are frequent in the outputs."""
  a, b, c, d, e, f, *_ = tokens
  return {
    "no processor": {},
    "repetition_penalty": dict(repetition_penalty=1.4),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=1.5),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=2),
    "encoder_no_repeat_ngram_size": dict(encoder_no_repeat_ngram_size=2),
    "bad_words_ids": dict(bad_words_ids=[[a], [b, c], [d], [1]]),
    "suppress_tokens": dict(suppress_tokens=[a, e]),
    "sequence_bias": dict(sequence_bias=[[[a], 2.0], [[b, c], -3.0], [[d], -1.5]]),
    "min_length": dict(min_length=16),
    "min_new_tokens": dict(min_new_tokens=18),
    "forced_bos_token_id": dict(forced_bos_token_id=f),
    "forced_eos_token_id": dict(forced_eos_token_id=1, min_length=45),
  }


BEAM_SETTINGS = {
  "length_penalty": dict(length_penalty=2.0),
  "early_stopping": dict(early_stopping=True),
  "never": dict(early_stopping="never", length_penalty=0.5),
  "summarization of T5": dict(
    no_repeat_ngram_size=3, min_length=30, length_penalty=2.0, early_stopping=True
  ),
}


def combinations(settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
  """Return NUM_COMBINATIONS distinct random combinations of two to four settings."""
  rng = random.Random(0)
  found: dict[str, dict[str, Any]] = {}
  names = [name for name in settings if name not in ("no processor", "min_length")]
  while len(found) < NUM_COMBINATIONS:
    chosen = sorted(rng.sample(names, rng.randint(2, 4)))
    merged = dict(itertools.chain.from_iterable(settings[name].items() for name in chosen))
    found[" + ".join(chosen)] = merged
  return found


def theirs(model: Any, sources: list[list[int]], num_beams: int, settings: dict[str, Any]) -> list:
  """Return for each source the `num_beams` texts of transformers, as pairs of tokens and scores.

  A beam search scores each text; otherwise the scores are the log-probabilities of the tokens. All
  sources of a batch have the same length, so that none is padded.
  """
  import torch

  found: list[Any] = [None] * len(sources)
  for length in sorted({*map(len, sources)}):
    rows = [row for row, source in enumerate(sources) if len(source) == length]
    for start in range(0, len(rows), 8):
      batch = rows[start : start + 8]
      result = model.generate(
        torch.tensor([sources[row] for row in batch]),
        max_new_tokens=MAX_NEW_TOKENS,
        decoder_start_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        do_sample=False,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
      )
      if num_beams > 1:
        scores = result.sequences_scores[:, None].tolist()
      else:
        # `compute_transition_scores` has errors of up to 1e-4, because it normalizes in float32.
        steps = torch.stack(result.scores, dim=1).double().log_softmax(dim=-1)
        scores = steps.gather(2, result.sequences[:, 1:, None])[..., 0].tolist()
      for i, row in enumerate(batch):
        of_row = slice(i * num_beams, (i + 1) * num_beams)
        found[row] = [
          (text[:length], score[:length])
          for text, score in zip(result.sequences[of_row, 1:].tolist(), scores[of_row])
          for length in [text.index(1) + 1 if 1 in text else len(text)]
        ]
  return found


def parity_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Return a table of the comparisons made by this program."""

  def draft_tokens(run: Mapping[str, Any]) -> str:
    return f"gamma {run['gamma']}" if "gamma" in run else f"tree of {len(run['tree']) + 1} nodes"

  cells = tuple(
    (
      row["setting"],
      f"{row['beams']}",
      draft_tokens(json.loads(row["run"])),
      f"{row['equal']}",
      f"{row['ties']}",
      f"{row['texts'] - row['equal'] - row['ties']}",
      f"{row['largest_difference']:.1g}",
    )
    for row in rows
  )
  first = rows[0]
  return Table(
    "Outputs compared with transformers' generate",
    ("setting", "beams", "draft tokens", "equal", "ties", "other", "difference"),
    cells,
    (f"{first['texts']} texts per row, batch 8. {measured_on(rows)}",),
    PARITY_LEGEND,
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("texts", help="file with one source per line")
  args = parser.parse_args()
  done = set()
  if os.path.isfile(path := os.path.realpath("/dev/stdout")):
    with open(path, encoding="utf-8") as file:
      done = {(line["setting"], line["beams"], line["run"]) for line in map(json.loads, file)}
  pair = specdec_jax.load_pair()
  with open(args.texts, encoding="utf-8") as file:
    texts = [text.strip() for text in file if len(pair.encode(text.strip())) <= MAX_SOURCE_TOKENS]
  texts = texts[:NUM_TEXTS]
  sources = [pair.encode(text) for text in texts]
  checkpoint: Any = open_checkpoint(str(BUNDLED / "target"))
  with tempfile.TemporaryDirectory() as folder:
    save_huggingface(folder, checkpoint.config, checkpoint.load(checkpoint.config))
    model = load_model(folder)
  model.config.num_layers = model.config.num_decoder_layers  # sizes of caches in transformers 5
  plain = pair.generate(texts[:16], gamma=0, max_new_tokens=MAX_NEW_TOKENS)
  frequent = np.bincount(np.concatenate([output.tokens for output in plain]))
  frequent[:3] = 0
  settings = settings_of(np.argsort(-frequent, kind="stable")[:8].tolist())
  greedy = {**settings, **combinations(settings)}
  beams = {**greedy, **BEAM_SETTINGS}
  plan: Any = ((1, greedy, GREEDY_RUNS), (4, beams, BEAM_RUNS))
  for num_beams, of_beams, runs in plan:
    for name, given in of_beams.items():
      want = None
      for run in runs:
        label = json.dumps(run)
        if (name, num_beams, label) in done:
          continue
        want = want or theirs(model, sources, num_beams, given)
        options: dict[str, Any] = dict(logprobs=True)
        if num_beams > 1:
          options = dict(num_beams=num_beams, num_return_sequences=num_beams)
        outputs = pair.generate(texts, max_new_tokens=MAX_NEW_TOKENS, **options, **run, **given)
        equal = ties = 0
        largest = 0.0
        for row, of_row in enumerate(want):
          ours = outputs[row * num_beams : (row + 1) * num_beams]
          scores: Any = [[output.score] if num_beams > 1 else output.logprobs for output in ours]
          if [output.tokens.tolist() for output in ours] == [text for text, _ in of_row]:
            equal += 1
            differences = (np.subtract(x, y) for x, (_, y) in zip(scores, of_row))
            largest = max(largest, *(float(np.abs(x).max()) for x in differences))
          elif all(abs(sum(x) - sum(y)) < TIE for x, (_, y) in zip(scores, of_row)):
            ties += 1
          else:
            print(f"{name}, {run}: {texts[row]}", file=sys.stderr)
        record = dict(setting=name, beams=num_beams, run=label, texts=len(texts))
        record |= dict(equal=equal, ties=ties, largest_difference=largest)
        print(json.dumps({**record, **provenance()}), flush=True)


if __name__ == "__main__":
  script.run(main)
