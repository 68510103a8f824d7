"""Time calls of `Pair.generate`, and of the compiled programs alone that they run.

python -m experiments.generate.calls >> experiments/generate/calls.jsonl
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import specdec_jax
from experiments.lib import script
from experiments.lib.records import measured_on
from specdec_jax.core.counts import num_tokens
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.data.text import read_lines
from specdec_jax.gin_files import HOME
from specdec_jax.measure.costs import interleaved_seconds
from specdec_jax.measure.machine import provenance
from specdec_jax.measure.tables import Table

NUM_TEXTS, REPEATS, MAX_NEW_TOKENS = 60, 5, 64
DRAFTS: Mapping[str, Mapping[str, Any]] = {
  "none": dict(gamma=0),
  "float": dict(gamma=5),
  "int8": dict(gamma=5, draft_weights="int8"),
}


def measured(temperature: float) -> list[dict[str, Any]]:
  """Return a row for each draft: median ms per text and tokens/s of calls, and of the programs."""
  texts = read_lines(str(HOME / "gin/tasks/captions.en.txt"))[:NUM_TEXTS]
  calls: dict[str, Any] = {}
  for name, setting in DRAFTS.items():
    options = dict(setting)
    gamma = options.pop("gamma")
    pair = specdec_jax.load_pair(**options)
    decode = pair.decode_fn(Sampling(temperature), chain(gamma))
    inputs = [(pair.prompt([text]), row_keys(0, i, 1)) for i, text in enumerate(texts)]

    def programs(decode: Any = decode, inputs: Any = inputs) -> list[Any]:
      run = functools.partial(decode, max_new_tokens=MAX_NEW_TOKENS)
      return [jax.block_until_ready(run(*each)) for each in inputs]

    generation = dict(gamma=gamma, temperature=temperature, max_new_tokens=MAX_NEW_TOKENS)
    generate = functools.partial(pair.generate, texts, **generation)
    calls[name] = {"call": generate, "programs": programs}
  seconds, results = interleaved_seconds(calls, REPEATS)
  rows = []
  for name, of_name in seconds.items():
    median = {key: float(np.median(each)) for key, each in of_name.items()}
    tokens = sum(len(output.tokens) for output in results[name]["call"])
    if tokens != num_tokens(results[name]["programs"]):
      raise AssertionError("The calls and the programs have other tokens.")
    rows.append(
      {
        "temperature": temperature,
        "draft": name,
        "texts": len(texts),
        "tokens": tokens,
        "call_ms": 1e3 * median["call"] / len(texts),
        "programs_ms": 1e3 * median["programs"] / len(texts),
        "tokens_per_s": tokens / median["call"],
      }
    )
  return rows


def calls_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Return a table of the times of calls, and of the speedup over those without a draft."""
  cells = []
  for row in rows:
    (plain,) = (
      each
      for each in rows
      if each["draft"] == "none"
      and (each["temperature"], each["commit"]) == (row["temperature"], row["commit"])
    )
    speedup = row["tokens_per_s"] / plain["tokens_per_s"]
    cells.append(
      (
        row["commit"],
        f"{row['temperature']:g}",
        row["draft"],
        f"{row['call_ms']:.2f}",
        f"{row['programs_ms']:.2f}",
        f"{row['tokens_per_s']:,.0f}",
        f"{speedup:.2f}" if row is not plain else "-",
      )
    )
  columns = "commit", "temperature", "draft", "call ms", "programs ms", "tokens/s", "speedup"
  note = (
    f"Per caption, one at a time, of {rows[0]['texts']}; bundled pair, gamma 5, medians of "
    f"{REPEATS} interleaved repeats. programs: compiled decoding alone, without encoding of texts, "
    f"keys and outputs. {measured_on(rows)}"
  )
  return Table("Time of a call of generate", columns, tuple(cells), (note,))


def main() -> None:
  for temperature in (0.0, 1.0):
    for row in measured(temperature):
      print(json.dumps({**row, **provenance()}), flush=True)


if __name__ == "__main__":
  script.run(main)
