"""Time calls of `Pair.generate`, the compiled programs that they run, and the parts of a round.

python -m experiments.generate.calls >> experiments/generate/calls.jsonl
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import specdec_jax
from experiments.gpu.measure import captions
from experiments.lib import script
from experiments.lib.records import measured_on
from specdec_jax.core.counts import num_tokens
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.measure.costs import interleaved_seconds, measure_costs
from specdec_jax.measure.machine import provenance
from specdec_jax.measure.tables import Table

NUM_TEXTS, REPEATS, MAX_NEW_TOKENS = 60, 5, 64
PARTS = "start", "target", "accept", "drafting"
DRAFTS: Mapping[str, Mapping[str, Any]] = {
  "none": dict(gamma=0),
  "float": dict(gamma=5),
  "int8": dict(gamma=5, draft_weights="int8"),
}


def measured(temperature: float) -> list[dict[str, Any]]:
  """Return a row for each draft: median ms per text of calls, programs and parts, and tokens/s."""
  texts = captions()[:NUM_TEXTS]
  sampling, calls, parts = Sampling(temperature), {}, {}
  for name, setting in DRAFTS.items():
    options = dict(setting)
    gamma = options.pop("gamma")
    pair = specdec_jax.load_pair(**options)
    decode = pair.decode_fn(sampling, chain(gamma))
    inputs = [(pair.prompt([text]), row_keys(0, i, 1)) for i, text in enumerate(texts)]

    def programs(decode: Any = decode, inputs: Any = inputs) -> list[Any]:
      run = functools.partial(decode, max_new_tokens=MAX_NEW_TOKENS)
      return [jax.block_until_ready(run(*each)) for each in inputs]

    generation = dict(gamma=gamma, temperature=temperature, max_new_tokens=MAX_NEW_TOKENS)
    generate = functools.partial(pair.generate, texts, **generation)
    calls[name] = {"call": generate, "programs": programs}
    # Without a draft, the costs are those of a round with one.
    ((costs,),) = measure_costs(
      [pair], [chain(gamma or 5)], inputs[0][0], sampling, repeats=REPEATS
    )
    verify, accept = (costs.verify, costs.accept) if gamma else (costs.target_step, 0)
    start = costs.target_start + (costs.draft_start if gamma else 0)
    times = dict(start=start, target=verify, accept=accept, drafting=gamma * costs.draft_step)
    parts[name] = {f"{part}_ms": 1e3 * seconds for part, seconds in times.items()}
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
        "rounds": float(np.mean([x.num_rounds for x in results[name]["programs"]])),
        **parts[name],
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
    parts = [row[f"{part}_ms"] for part in PARTS]
    total = parts[0] + row["rounds"] * sum(parts[1:])
    cells.append(
      (
        row["commit"],
        f"{row['temperature']:g}",
        row["draft"],
        f"{row['rounds']:.1f}",
        *(f"{ms:.2f}" for ms in (*parts, total, row["programs_ms"], row["call_ms"])),
        f"{row['tokens_per_s']:,.0f}",
        f"{speedup:.2f}" if row is not plain else "-",
      )
    )
  columns = "commit", "temperature", "draft", "rounds", *PARTS, "sum", "programs", "call"
  notes = (
    f"Milliseconds per caption, one at a time, of {rows[0]['texts']}; bundled pair, gamma 5, "
    f"medians of {REPEATS} interleaved repeats. {measured_on(rows)}",
    "start: prefill of both models; the others are parts of a round: a target pass, acceptance, "
    "and drafting five tokens. sum: start and all rounds. programs: compiled decoding alone. call: "
    "of generate, with the encoding of texts, keys and outputs.",
  )
  return Table("Time of a call of generate", (*columns, "tokens/s", "speedup"), tuple(cells), notes)


def main() -> None:
  for temperature in (0.0, 1.0):
    for row in measured(temperature):
      print(json.dumps({**row, **provenance()}), flush=True)


if __name__ == "__main__":
  script.run(main)
