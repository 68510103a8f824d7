"""Measure speculative decoding on a GPU, in parts that resume: the most important ones come first.

  python -m experiments.gpu.measure runs/gpu --dry_run       # settings and minutes
  python -m experiments.gpu.measure runs/gpu --minutes 10    # as many as fit; again to go on
  python -m experiments.gpu.measure runs/gpu --parts speed batches

Each setting is one line of `results.jsonl` in the folder, and is not measured again. Models have
the sizes of T5 1.1 with random weights and simulated acceptance; `identity` decodes real texts with
the bundled pair. Each part is a process of its own, so that its memory is free for the next one.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from specdec_jax.measure.tables import Table

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALPHA, TOP_K, RANKS = 0.75, 40, (0.75, 0.11, 0.04, 0.02, 0.01)
SOURCE_TOKENS = 40  # after padding

Line = dict[str, Any]


def _decode(gamma: int = 0, batch_size: int = 1, nodes: int = 0, **options: Any) -> Line:
  """Return a setting. gamma 0 is autoregressive decoding; `null` is a draft that takes no time."""
  defaults = dict(null=False, temperature=0.0, weights="float", dtype="bfloat16")
  return dict(gamma=gamma, nodes=nodes, batch_size=batch_size) | defaults | options


@dataclasses.dataclass(frozen=True)
class Run:
  """Folder of the results, sizes of the models, and numbers of texts and of new tokens."""

  folder: pathlib.Path
  target: str
  draft: str
  num_texts: int
  max_new_tokens: int

  @property
  def results(self) -> pathlib.Path:
    return self.folder / "results.jsonl"

  @property
  def texts(self) -> list[str]:
    from specdec_jax.data.text import read_lines

    return list(read_lines(str(ROOT / "gin/tasks/captions.en.txt"))[: self.num_texts])

  def missing(self, part: str) -> list[Line]:
    """Return the settings of a part that the file of results lacks."""
    lines = self.results.read_text().splitlines() if self.results.exists() else []
    done = [json.loads(line) for line in lines]
    wanted = [dict(target=self.target, draft=self.draft) | x for x in PARTS[part].settings]
    return [x for x in wanted if not any(x.items() <= y.items() for y in done)]


@functools.lru_cache(1)  # the next setting has the same weights
def _random_pair(target: str, draft: str, dtype: str, weights: Any) -> Any:
  from specdec_jax.random_models import random_pair

  return random_pair(target, draft, ALPHA, dtype=dtype, weights=weights)


def measure_speed(run: Run, setting: Line) -> Line:
  """Time decoding a batch to one token and to all; the difference is the time of the rounds."""
  import jax
  import numpy as np

  from specdec_jax.core.counts import num_tokens, require_finite
  from specdec_jax.core.decode import Decoder, NullDraft
  from specdec_jax.core.sampling import Sampling, row_keys
  from specdec_jax.core.trees import chain
  from specdec_jax.measure.costs import interleaved_seconds, timed
  from specdec_jax.theory import best_tree

  pair = _random_pair(run.target, run.draft, setting["dtype"], setting["weights"])
  sampling = Sampling(setting["temperature"], TOP_K if setting["temperature"] else 0)
  gamma, nodes, batch = setting["gamma"], setting["nodes"], setting["batch_size"]
  tree = best_tree(RANKS, nodes, gamma) if nodes else chain(gamma)
  decoder = pair.decoder(sampling, tree)
  if setting["null"] or not gamma:
    decoder = Decoder(pair.target.model, NullDraft(tree), pair.verifier_for(sampling))
  texts = (run.texts * batch)[:batch]
  prompt, tokens = pair.prompt(texts, SOURCE_TOKENS), run.max_new_tokens
  decode = functools.partial(
    decoder.run, pair.params, prompt, row_keys(0, 0, batch), max_new_tokens=tokens
  )
  compile_s, _ = timed(decode, limit=1)
  calls = [functools.partial(decode, limit=limit) for limit in (1, tokens)]
  seconds, (start, full) = interleaved_seconds(calls, 5)
  require_finite(full)
  (start_s, full_s), rounds = (
    map(float, map(np.median, seconds)),
    full.num_rounds - start.num_rounds,
  )
  return {
    "alpha": ALPHA,
    "source_tokens": SOURCE_TOKENS,
    "max_new_tokens": tokens,
    "compile_s": round(compile_s, 1),
    "start_ms": 1e3 * start_s,
    "total_ms": 1e3 * full_s,
    "spread_ms": [1e3 * float(seconds[1].min()), 1e3 * float(seconds[1].max())],
    "rounds": int(full.num_rounds),
    "tokens_per_row": num_tokens([full]) / batch,
    "round_ms": 1e3 * (full_s - start_s) / max(1, int(rounds)),
    "tokens_per_s": num_tokens([full]) / full_s,
    "peak_gb": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9,
  }


def measure_identity(run: Run, setting: Line) -> Line:
  """Count outputs of the bundled pair that differ from autoregressive decoding of one text."""
  from specdec_jax.core.sampling import Sampling, row_keys
  from specdec_jax.core.trees import AnyTree, chain
  from specdec_jax.load import load_pair
  from specdec_jax.measure.speed import own_baseline
  from specdec_jax.theory import best_tree

  pair, texts, argmax = load_pair(dtype=setting["identity"]), run.texts, Sampling(0.0)

  def outputs(tree: AnyTree | None, batch: int) -> Iterator[list[int]]:
    decode: Callable[..., Any] = functools.partial(own_baseline(pair).decode, sampling=argmax)
    if tree is not None:
      decode = pair.decode_fn(argmax, tree)
    for i in range(0, len(texts), batch):
      rows = (texts[i : i + batch] + texts[:1] * batch)[:batch]
      prompt = pair.prompt(rows, SOURCE_TOKENS)
      result = decode(prompt=prompt, rng=row_keys(0, i, batch), max_new_tokens=run.max_new_tokens)
      found = [x[:n].tolist() for x, n in zip(result.tokens, result.lengths.tolist())]
      yield from found[: len(texts) - i]

  alone = [*outputs(None, 1)]
  others = {
    "gamma 5": (chain(5), 1),
    "tree of 16": (best_tree(RANKS, 16, 5), 1),
    "batch 8": (None, 8),
    "batch 8, gamma 5": (chain(5), 8),
  }
  different = {
    name: sum(a != b for a, b in zip(alone, outputs(*other), strict=True))
    for name, other in others.items()
  }
  return {"texts": len(texts), "tokens": sum(map(len, alone)), "different": different}


def measure_transformers(run: Run, setting: Line) -> Line:
  """Time transformers with the same shapes, dtype and number of tokens; it needs torch."""
  import torch
  import transformers

  from specdec_jax.models.sizes import t5_config

  size, device = t5_config(run.target), "cuda" if torch.cuda.is_available() else "cpu"
  config = transformers.T5Config(
    vocab_size=size.padded_vocab_size,
    d_model=size.emb_dim,
    d_kv=size.head_dim,
    d_ff=size.mlp_dim,
    num_layers=size.num_encoder_layers,
    num_heads=size.num_heads,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
    decoder_start_token_id=0,
  )
  with torch.device(device):
    model = transformers.T5ForConditionalGeneration(config).to(torch.bfloat16).eval()
  ids = torch.arange(2, 37, device=device)[None]
  options = {"cache_implementation": "static"} if setting["cache"] == "static" else {}

  def seconds(tokens: int) -> float:
    times = []
    for _ in range(4):  # the first compiles
      since = time.perf_counter()
      model.generate(
        ids, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, **options
      ).cpu()
      times.append(time.perf_counter() - since)
    return sorted(times[1:])[1]

  tokens = run.max_new_tokens
  ms = 1e3 * (seconds(tokens) - seconds(1)) / (tokens - 1)
  return {
    "round_ms": ms,
    "tokens_per_s": 1e3 / ms,
    "torch": torch.__version__,
    "transformers": transformers.__version__,
  }


def gpu_speed_table(results: Sequence[Line]) -> Table:
  """Return a table of measured speeds, with the speedup over the row without a draft."""
  rows = []
  for line in results:
    if "tokens_per_s" not in line:
      continue
    is_ours, shape = "gamma" in line, ("batch_size", "temperature", "weights", "dtype", "flags")
    plain = [
      each["tokens_per_s"]
      for each in results
      if is_ours
      and each.get("gamma") == 0
      and all(each.get(name) == line.get(name) for name in (*shape, "max_new_tokens"))
    ]
    if not is_ours:
      decoding = {"dynamic": "transformers, eager", "static": "transformers, compiled"}[
        line["cache"]
      ]
    elif line["gamma"]:
      nodes = f", tree of {line['nodes']}" * (line["nodes"] > 0)
      decoding = f"gamma {line['gamma']}{nodes}{', a draft that takes no time' * line['null']}"
    else:
      decoding = "autoregressive"
    rounds = f"{line['tokens_per_row'] / line['rounds']:.2f}" if is_ours else "1.00"
    rows.append(
      (
        decoding,
        f"{line.get('batch_size', 1)}",
        f"{line.get('temperature', 0):g}",
        *(line.get(name) or "-" for name in ("weights", "flags")),
        f"{line['round_ms']:.2f}",
        rounds,
        f"{line['tokens_per_s']:,.0f}",
        f"{line['tokens_per_s'] / plain[0]:.2f}" if plain and line["gamma"] else "-",
      )
    )
  columns = (
    "decoding|batch|temperature|weights|flags|ms per round|tokens per round|tokens/s|speedup"
  )
  first = results[0]
  commits = ", ".join(dict.fromkeys(line["commit"] for line in results if "commit" in line))
  notes = (
    f"T5 1.1 {first['target']} with {first['draft']}, {first['dtype']}, random weights, simulated "
    f"alpha {first['alpha']}; {first['device']}, jax {first['jax']}, commit {commits}, "
    f"{first['date'][:10]}.",
    "A step is a round of one token. tokens/s: of all rows, with the prefill.",
  )
  return Table("Measured speed", tuple(columns.split("|")), tuple(rows), notes)


def run_tests(run: Run, setting: Line) -> Line:
  """Run the contract and decoding tests on the device, with the tolerances of tests/conftest.py."""
  files = [f"tests/test_{name}.py" for name in setting["tests"].split(" and ")]
  command = [sys.executable, "-m", "pytest", "-q", "-n", "4", *files]
  env = os.environ | {"SPECDEC_TEST_PLATFORM": "cuda"}
  printed = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True).stdout
  failed = re.findall(r"^FAILED (\S+)", printed, re.MULTILINE)
  return {"summary": (printed.strip().splitlines() or [""])[-1].strip("= "), "failed": failed}


def reproduce_table2(run: Run, setting: Line) -> Line:
  """Measure the rows of Table 2 in a process of their own; its records are in the folder."""
  folder = str(run.folder / "reproduce")
  command = ["specdec_jax.run", "--gin_file=experiments/paper/reproduce.gin"]
  done = subprocess.run(
    [sys.executable, "-m", *command, f"--gin.OUTPUT_DIR='{folder}'"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  done.check_returncode()
  return {"folder": folder}


class Part(NamedTuple):
  """Settings that one process measures.

  Attributes:
    minutes: estimate for an H100; a round takes 21 s to compile, and a step 12 s.
  """

  minutes: float
  measure: Callable[[Run, Line], Line]
  settings: list[Line]


PARTS = {
  "speed": Part(
    2, measure_speed, [_decode(), _decode(5), _decode(3), _decode(7), _decode(5, null=True)]
  ),
  "identity": Part(3, measure_identity, [dict(identity=x) for x in ("float32", "bfloat16")]),
  "batches": Part(
    4, measure_speed, [_decode(gamma, batch) for batch in (8, 32, 128) for gamma in (0, 3)]
  ),
  "top_k": Part(1, measure_speed, [_decode(gamma, temperature=1.0) for gamma in (0, 5)]),
  "int8": Part(2, measure_speed, [_decode(gamma, weights="int8") for gamma in (0, 5)]),
  "int4": Part(2, measure_speed, [_decode(gamma, weights="int4") for gamma in (0, 5)]),
  "tree": Part(1, measure_speed, [_decode(8, nodes=64), _decode(8, nodes=64, null=True)]),
  "transformers": Part(3, measure_transformers, [dict(cache=x) for x in ("dynamic", "static")]),
  "tests": Part(5, run_tests, [dict(tests="contract and decoding")]),
  "table2": Part(25, reproduce_table2, [dict(tables="table2")]),
}


def measure_part(run: Run, part: str, until: float) -> None:
  """Measure the settings of a part that are missing, and append each to the file of results."""
  import jax

  from specdec_jax.measure.machine import provenance

  for setting in run.missing(part):
    if time.time() > until:
      return
    origin = {x: provenance()[x] for x in ("commit", "date")}
    line = {"part": part, **setting, **PARTS[part].measure(run, setting)}
    line |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__, **origin}
    print(json.dumps(line), flush=True)
    with run.results.open("a", encoding="utf-8") as file:
      file.write(json.dumps(line) + "\n")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folder", type=pathlib.Path, help="folder of the results")
  parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=PARTS, help="default: all")
  parser.add_argument("--minutes", type=float, default=math.inf, help="begin no setting later")
  parser.add_argument("--dry_run", action="store_true", help="print what would be measured")
  parser.add_argument("--target", default="xxl", help="size of T5 1.1 (xxl)")
  parser.add_argument("--draft", default="small", help="size of T5 1.1 (small)")
  parser.add_argument("--num_texts", type=int, default=60, help="texts of `identity` (60)")
  parser.add_argument("--max_new_tokens", type=int, default=96, help="tokens of each text (96)")
  parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # of the process of a part
  args = parser.parse_args()
  sizes = args.target, args.draft, args.num_texts, args.max_new_tokens
  run = Run(args.folder.resolve(), *sizes)
  run.folder.mkdir(parents=True, exist_ok=True)
  if args.until:
    return measure_part(run, args.parts[0], args.until)
  until = time.time() + 60 * args.minutes
  print("T5 1.1 XXL with small in bfloat16 takes 24 GB, and 32 GB at batch 128.")
  for part in args.parts:
    if missing := run.missing(part):
      print(f"{part}: {len(missing)} settings, about {PARTS[part].minutes:g} minutes", flush=True)
      if not args.dry_run and time.time() < until:
        options = f"--until={min(until, 1e12)}", f"--parts={part}"
        command = [sys.executable, "-m", "experiments.gpu.measure", *sys.argv[1:], *options]
        env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # torch needs memory, too
        code = subprocess.run(command, cwd=ROOT, env=env).returncode
        print(f"{part}: failed with exit status {code}" if code else f"{part}: done", flush=True)


if __name__ == "__main__":
  main()
