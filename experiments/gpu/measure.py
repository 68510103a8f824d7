"""Measure speculative decoding on a GPU, in parts that resume: the most important ones come first.

  python -m experiments.gpu.measure runs/gpu --dry_run       # settings and minutes
  python -m experiments.gpu.measure runs/gpu --minutes 10    # as many as fit; again to go on
  python -m experiments.gpu.measure runs/gpu --parts speed batches
  python -m experiments.gpu.measure runs/trial --target tiny --draft tiny --max_new_tokens 8

Each setting is one line of `results.jsonl` in the folder, and is not measured again. Models have
the sizes of T5 1.1 or Whisper, with random weights and simulated acceptance; `identity` decodes
real texts with the bundled pair. Each part is a process of its own, so that its memory is free for
the next one, and that it may have its own flags of XLA. A part that fails does not stop the others.
The last command tries all of it on a CPU, where the times mean nothing.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import heapq
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from experiments.lib import script
from experiments.paper.paper import load_table
from specdec_jax.measure.tables import Table

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALPHA, TOP_K, RANKS = 0.75, 40, (0.75, 0.11, 0.04, 0.02, 0.01)
SOURCE_TOKENS = 40  # after padding
REPEATS = 3
HEAD = dict(gamma=8, emb_dim=1024, mlp_dim=4096, num_decoder_layers=2)  # as in `predict`

Line = dict[str, Any]


def _decode(gamma: int = 0, batch_size: int = 1, nodes: int = 0, **options: Any) -> Line:
  """Return a setting of `measure_speed`.

  gamma 0 is autoregressive decoding, and `null` is a draft that takes no time. Other options:

    target, draft: names of models; by default those of the command.
    head: kind of a draft head. It drafts a dynamic tree, whose acceptance is not simulated.
    alpha: simulated alpha, by default ALPHA.
    source_tokens, top_k: by default SOURCE_TOKENS, and TOP_K at temperature 1.
    num_texts: number of texts, which are decoded in batches; by default one batch.
    continuous: whether the next text takes the row of a text that has ended.
    flags: flags of XLA, those of all settings of a part.
  """
  defaults = dict(null=False, temperature=0.0, weights="float", dtype="bfloat16", kernels="auto")
  return dict(gamma=gamma, nodes=nodes, batch_size=batch_size) | defaults | options


def captions() -> list[str]:
  """Return 300 different texts."""
  from specdec_jax.data.text import read_lines

  return read_lines(str(ROOT / "gin/tasks/captions.en.txt"))


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
    return captions()[: self.num_texts]

  def missing(self, part: str) -> list[Line]:
    """Return the settings of a part that the file of results lacks.

    If the target is 'tiny', so are all other models, for trials on a CPU.
    """
    lines = self.results.read_text().splitlines() if self.results.exists() else []
    done = [json.loads(line) for line in lines]
    models = dict(target=self.target, draft=self.draft)
    wanted = [dict(part=part) | models | setting for setting in PARTS[part].settings]
    if self.target == "tiny":
      wanted = [x | {k: re.sub("^(whisper-)?.*", r"\1tiny", x[k]) for k in models} for x in wanted]
    return [x for x in wanted if not any(x.items() <= y.items() for y in done)]


def measure_speed(run: Run, settings: list[Line]) -> Iterator[Line]:
  """Time decoding texts to one token and to all; the difference is the time of the rounds.

  The settings have the same target, and are compiled at once. The rows of a batch are different
  texts: simulated acceptance depends on the text, so copies of a text would accept the same tokens,
  and none would wait for another.
  """
  import jax
  import numpy as np

  from specdec_jax.core.counts import num_tokens, require_finite
  from specdec_jax.measure.costs import interleaved_seconds

  pairs, tokens = _pairs(settings), run.max_new_tokens
  since = time.perf_counter()
  with concurrent.futures.ThreadPoolExecutor() as pool:
    programs = [pool.submit(_compiled, *each, tokens) for each in zip(pairs, settings)]
  compile_s = time.perf_counter() - since
  print(f"compiled in {compile_s:.0f} s", flush=True)
  for program, setting in zip(programs, settings):
    calls = [functools.partial(program.result(), limit) for limit in (1, tokens)]
    seconds, results = interleaved_seconds(calls, REPEATS)
    for result in results[1]:
      require_finite(result)
    start_s, full_s = map(float, map(np.median, seconds))
    first, last = (_num_rounds(setting, each) for each in results)
    batch = setting["batch_size"]
    yield {
      "alpha": None if setting.get("head") else ALPHA,
      "source_tokens": SOURCE_TOKENS,
      "distinct_texts": len(set(captions()[: setting.get("num_texts", batch)])),
      "max_new_tokens": tokens,
      "compile_s": compile_s,
      "start_ms": 1e3 * start_s,
      "total_ms": 1e3 * full_s,
      "spread_ms": [1e3 * float(seconds[1].min()), 1e3 * float(seconds[1].max())],
      "rounds": last,
      "tokens_per_row": num_tokens(results[1]) / batch,
      "round_ms": 1e3 * (full_s - start_s) / max(1, last - first),
      "tokens_per_s": num_tokens(results[1]) / full_s,
      "peak_gb": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9,
      "profile": _profile(calls, last - first),
      **{name: setting[name] for name in ("alpha", "source_tokens") if name in setting},
    }


def _family(name: str) -> tuple[str, str]:
  """Return the version and the size of a model, such as 'xxl' (of T5 1.1) or 'whisper-large-v3'."""
  from specdec_jax.models.sizes import PUBLISHED

  return PUBLISHED.get(f"openai/{name}", ("1.1", name))


def _pairs(settings: list[Line]) -> list[Any]:
  """Return the pair of each setting; they share the target and equal drafts."""
  from specdec_jax.drafts.heads import new_head
  from specdec_jax.drafts.uniform import uniform
  from specdec_jax.models.simulated import unwrapped
  from specdec_jax.random_models import random_draft, random_pair, random_speculator

  options = {name: settings[0][name] for name in ("dtype", "kernels", "weights")}
  version, size = _family(settings[0]["target"])
  pair = random_pair(size, uniform, ALPHA, version, **options)

  @functools.cache
  def draft(name: str, head: str | None) -> Any:
    if head:
      return random_speculator(pair.target, functools.partial(new_head, kind=head, **HEAD))
    version, size = _family(name)
    return random_draft(pair.target, size, version, **options)

  def pair_of(setting: Line) -> Any:
    model = dataclasses.replace(pair.target.model, alpha=setting.get("alpha", ALPHA))
    model = unwrapped(model) if setting.get("head") else model
    return pair.with_draft(draft(setting["draft"], setting.get("head"))).with_target(model=model)

  return [pair_of(setting) for setting in settings]


def _compiled(pair: Any, setting: Line, tokens: int) -> Callable[[int], list[Any]]:
  """Return a function from the maximum number of tokens to the results of all batches."""
  import jax

  from specdec_jax.batching import decode_all
  from specdec_jax.core.decode import Decoder, NullDraft
  from specdec_jax.core.sampling import Sampling, row_keys
  from specdec_jax.core.trees import AnyTree, DynamicTree, chain
  from specdec_jax.theory import best_tree

  top_k = setting.get("top_k", TOP_K) if setting["temperature"] else 0
  sampling = Sampling(setting["temperature"], top_k)
  gamma, nodes, batch = setting["gamma"], setting["nodes"], setting["batch_size"]
  tree: AnyTree = best_tree(RANKS, nodes, gamma) if nodes else chain(gamma)
  if setting.get("head"):
    tree = DynamicTree(nodes - 1, gamma)
  if setting["null"] or not gamma:
    decoder = Decoder(pair.target.model, NullDraft(tree), pair.verifier_for(sampling))
  else:
    decoder = pair.decoder(sampling, tree, eos_id=-1 if setting.get("head") else None)
  num_texts = setting.get("num_texts", batch)
  prompt, rng = _prompt(pair, setting, num_texts), row_keys(0, 0, num_texts)
  limits = dict(max_new_tokens=tokens, limit=tokens)
  arguments = decoder, pair.params
  if setting.get("continuous"):
    program: Any = jax.jit(decode_all, static_argnames=("batch_size", "max_new_tokens"))
    batches = [(prompt, rng)]
    program = program.lower(*arguments, prompt, rng, batch_size=batch, **limits).compile()
  else:
    batches = [(prompt[i : i + batch], rng[i : i + batch]) for i in range(0, num_texts, batch)]
    program = Decoder.run.lower(*arguments, *batches[0], **limits).compile()
  return lambda limit: [program(*arguments, *each, limit=limit) for each in batches]


def _prompt(pair: Any, setting: Line, num_texts: int) -> Any:
  """Return different texts as prompts; those of a Whisper begin random recordings."""
  import jax
  import jax.numpy as jnp

  from specdec_jax.core.context import Encoded
  from specdec_jax.models.sizes import named_config

  prompt = pair.prompt(captions()[:num_texts], setting.get("source_tokens", SOURCE_TOKENS))
  if pair.config.num_mels is None:
    return prompt
  dtype = pair.layout.activations
  source, draft_source = (
    jax.random.normal(
      jax.random.key(0), (num_texts, config.source_positions, config.emb_dim), dtype
    )
    for config in (named_config(*_family(setting[name])) for name in ("target", "draft"))
  )
  return Encoded(source, prompt, jnp.full(num_texts, prompt.shape[1]), draft_source)


def _num_rounds(setting: Line, results: Sequence[Any]) -> int:
  """Return the rounds of all batches. In continuous batching, a text takes the first free row."""
  if not setting.get("continuous"):
    return sum(int(result.num_rounds) for result in results)
  ends = [0] * setting["batch_size"]
  for num_rounds in (results[0].rounds.num_emitted > 0).sum(axis=0).tolist():
    heapq.heapreplace(ends, ends[0] + num_rounds)
  return max(ends)


def _profile(calls: Sequence[Callable[[], Any]], rounds: int) -> list[tuple[str, float, float]]:
  """Return [kernel, calls, microseconds] per round: those of the second call less the first's."""
  import jax

  totals: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
  for call, sign in zip(calls, (-1, 1)):
    with tempfile.TemporaryDirectory() as folder:
      with jax.profiler.trace(folder):
        jax.block_until_ready(call())
      (path,) = pathlib.Path(folder).glob("**/*.xplane.pb")
      for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
          for event in line.events if line.name.startswith("Stream") else ():
            total = totals[re.sub(r"[_.\d]+$", "", event.name)]
            total[0] += sign
            total[1] += sign * event.duration_ns / 1e3
  found = [(name, n / max(1, rounds), us / max(1, rounds)) for name, (n, us) in totals.items()]
  return sorted(
    ((name, round(n, 2), round(us, 2)) for name, n, us in found if n), key=lambda x: -x[2]
  )


def measure_identity(run: Run, settings: list[Line]) -> Iterator[Line]:
  """Count texts whose outputs by the bundled pair differ between two ways to decode them.

  `fixed` is autoregressive decoding in passes over as many nodes (`fixed_width`).
  """
  from specdec_jax.core.sampling import Sampling, row_keys
  from specdec_jax.core.trees import chain
  from specdec_jax.load import load_pair
  from specdec_jax.measure.speed import own_baseline
  from specdec_jax.theory import best_tree

  texts, argmax, tree = run.texts, Sampling(0.0), best_tree(RANKS, 16, 5)
  decodings = {
    "autoregressive": (None, 1, True),
    "gamma 5": (chain(5), 1, False),
    "gamma 5, fixed": (chain(5), 1, True),
    "tree of 16": (tree, 1, False),
    "tree of 16, fixed": (tree, 1, True),
    "batch 8": (None, 8, True),
    "batch 8, gamma 5": (chain(5), 8, False),
    "batch 8, gamma 5, fixed": (chain(5), 8, True),
  }
  for setting in settings:
    pair = load_pair(dtype=setting["identity"])

    def outputs(name: str, pair: Any = pair) -> list[list[int]]:
      nodes, batch, fixed = decodings[name]
      decode: Callable[..., Any] = functools.partial(own_baseline(pair).decode, sampling=argmax)
      if nodes is not None:
        decode = pair.decode_fn(argmax, nodes, fixed_width=fixed)
      found = []
      for i in range(0, len(texts), batch):
        rows = (texts[i : i + batch] + texts[:1] * batch)[:batch]
        prompt = pair.prompt(rows, SOURCE_TOKENS)
        result = decode(prompt=prompt, rng=row_keys(0, i, batch), max_new_tokens=run.max_new_tokens)
        found += [x[:n].tolist() for x, n in zip(result.tokens, result.lengths.tolist())]
      return found[: len(texts)]

    with concurrent.futures.ThreadPoolExecutor() as pool:
      found = dict(zip(decodings, pool.map(outputs, decodings)))
    pairs = [("autoregressive", name) for name in decodings if name != "autoregressive"]
    pairs += [(name, f"{name}, fixed") for name in decodings if f"{name}, fixed" in decodings]
    pairs += [("gamma 5, fixed", "batch 8, gamma 5, fixed")]
    different = [
      [a, b, sum(x != y for x, y in zip(found[a], found[b], strict=True))] for a, b in pairs
    ]
    yield {
      "texts": len(texts),
      "tokens": sum(map(len, found["autoregressive"])),
      "different": different,
    }


def measure_auto(run: Run, settings: list[Line]) -> Iterator[Line]:
  """Calibrate gamma and the tree, as 'auto' does."""
  from specdec_jax.core.decode import DecodeSettings
  from specdec_jax.core.sampling import Sampling
  from specdec_jax.measure.calibrate import calibrate
  from specdec_jax.random_models import random_pair

  pair = random_pair(run.target, run.draft, ALPHA, dtype="bfloat16")
  for setting in settings:
    since = time.perf_counter()
    decoding = DecodeSettings(Sampling(0.0), max_new_tokens=run.max_new_tokens)
    found = calibrate(pair, run.texts, decoding, branching=setting["auto"] == "tree")
    yield {
      "chosen": found.gamma if found.tree.is_chain else [*found.tree.parents],
      "says": str(found),
      "seconds": round(time.perf_counter() - since, 1),
    }


def measure_transformers(run: Run, settings: list[Line]) -> Iterator[Line]:
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

  def seconds(tokens: int, options: Line) -> float:
    times = []
    for _ in range(4):  # the first compiles
      since = time.perf_counter()
      model.generate(
        ids, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, **options
      ).cpu()
      times.append(time.perf_counter() - since)
    return sorted(times[1:])[1]

  tokens = run.max_new_tokens
  for setting in settings:
    options = {"cache_implementation": "static"} if setting["cache"] == "static" else {}
    ms = 1e3 * (seconds(tokens, options) - seconds(1, options)) / (tokens - 1)
    yield {
      "round_ms": ms,
      "tokens_per_s": 1e3 / ms,
      "torch": torch.__version__,
      "transformers": transformers.__version__,
    }


def gpu_speed_table(results: Sequence[Line]) -> Table:
  """Return a table of measured speeds, with the speedup over the row without a draft."""
  from specdec_jax import theory

  rows, shape = [], ("batch_size", "temperature", "weights", "dtype", "kernels", "flags")
  shape += "target", "source_tokens", "top_k", "max_new_tokens"
  results = [line for line in results if "round_ms" in line]
  first = results[0]
  for line in results:
    gamma, is_ours = line.get("gamma"), "gamma" in line
    plain = [
      each
      for each in results
      if is_ours
      and each.get("gamma") == 0
      and all(each.get(name) == line.get(name) for name in shape)
    ]
    tokens = expected = None  # per round; and tokens/s
    is_simulated = not line.get("head")
    if not is_ours:
      decoding = {"dynamic": "transformers, eager", "static": "transformers, compiled"}[
        line["cache"]
      ]
    elif gamma:
      nodes = f", tree of {line['nodes']}" * (line["nodes"] > 0)
      decoding = f"gamma {gamma}{nodes}{', a draft that takes no time' * line['null']}"
      decoding += "" if is_simulated else f", head {line['head']}"
      is_continuous = line.get("continuous", False)
      decoding += ", continuous batching" * is_continuous
      if not (line["nodes"] or line["null"]):
        lengths = [line["max_new_tokens"]] * line["batch_size"]
        rounds = theory.expected_rounds(line["alpha"], gamma, lengths)
        tokens = lengths[0] / rounds
        if len(lengths) == 1 or is_continuous:
          tokens = float(theory.expected_tokens(line["alpha"], gamma))
        num_batches = line.get("num_texts", len(lengths)) // len(lengths)
        # The first run has one round per batch.
        ms = line["start_ms"] + num_batches * (rounds - 1) * line["round_ms"]
        expected = None if is_continuous else 1e3 * num_batches * sum(lengths) / ms
    else:
      decoding = "autoregressive"
    options = [line.get(name) for name in ("weights", "kernels", "flags")]
    options += [
      f"{name} {line[name]}"
      for name in ("target", "draft", "alpha", "source_tokens", "top_k")
      if is_ours and (name == "top_k" and name in line or line.get(name) != first.get(name))
      if line[name] is not None
    ]
    kernels = sum(calls for _, calls, _ in line.get("profile", ()))
    per_round = line["tokens_per_row"] / line["rounds"] if is_ours else 1
    is_faster = plain and gamma and is_simulated
    rows.append(
      (
        decoding,
        f"{line.get('batch_size', 1)}",
        f"{line.get('temperature', 0):g}",
        ", ".join(x for x in options if x not in (None, "float", "auto")) or "-",
        f"{kernels:.0f}" if kernels else "-",
        f"{line['round_ms']:.2f}",
        f"{per_round:.2f}" if is_simulated else "-",
        f"{line['tokens_per_s']:,.0f}" if is_simulated else "-",
        f"{line['tokens_per_s'] / plain[0]['tokens_per_s']:.2f}" if is_faster else "-",
        f"{tokens * plain[0]['round_ms'] / line['round_ms']:.2f} ({tokens:.2f})"
        if is_faster and tokens
        else "-",
        f"{expected:,.0f}" if expected else "-",
        f"{expected / plain[0]['tokens_per_s']:.2f}" if is_faster and expected else "-",
      )
    )
  columns = (
    "decoding|batch|temperature|options|kernels|ms per round|tokens per round|tokens/s|speedup"
    "|at alpha (tokens)|expected tokens/s|expected speedup"
  )
  commits = ", ".join(dict.fromkeys(line["commit"] for line in results if "gamma" in line))
  notes = (
    f"T5 1.1 {first['target']} with {first['draft']}, {first['dtype']}, random weights, simulated "
    f"alpha {first['alpha']}; {first['device']}, jax {first['jax']}, commit {commits}, "
    f"{first['date'][:10]}.",
    "A step is a round of one token. kernels: per round, as profiled. tokens/s: of all rows, with "
    "the prefill. The texts of two settings differ, and so do their tokens per round.",
    "Derived from the measured times: at alpha, the speedup without the prefill, with the tokens "
    "per round of equation 1 or, in a batch, of `theory.expected_rounds` over its rows; expected, "
    "tokens/s and speedup with the prefill and these rounds, for as many tokens.",
    *(
      f"Batch {line['batch_size']}, gamma {line['gamma']}: measured with copies of one text, which "
      "accept alike, so that no row waits for another. For different texts, see expected."
      for line in results
      if line.get("gamma") and line.get("distinct_texts", line["batch_size"]) < line["batch_size"]
    ),
  )
  return Table("Measured speed", tuple(columns.split("|")), tuple(rows), notes)


def gpu_batches_table(results: Sequence[Line]) -> Table:
  """Return a table of batches of different rows, predicted from measured times of gamma 3."""
  from specdec_jax import theory

  lines = [x for x in results if x.get("part") == "batches" and not x.get("continuous")]
  ms = {(x["batch_size"], x["gamma"]): x["round_ms"] for x in lines}
  line = next(x for x in lines if x["gamma"])
  alpha, gamma, length = (line[name] for name in ("alpha", "gamma", "max_new_tokens"))
  rows = []
  for batch in (8, 32, 128):
    step, each = ms.get((batch, 0)), ms.get((batch, gamma))
    tokens = [
      length / theory.expected_rounds(alpha, gamma, [length] * batch),
      float(theory.expected_tokens(alpha, gamma)),
    ]
    speedups = [f"{x * step / each:.2f}" if step and each else "-" for x in tokens]
    times = (f"{x:.2f}" if x else "-" for x in (step, each))
    rows.append((f"{batch}", *times, *(f"{x:.2f}" for x in tokens), *speedups))
  columns = ("batch", "ms per step", "ms per round", "tokens per round, one batch")
  columns += ("tokens per round, continuous", "speedup, one batch", "speedup, continuous")
  notes = (
    f"Predicted, except for the measured ms: gamma {gamma}, simulated alpha {alpha:g}, {length} "
    f"tokens of each row, without prefill; {line['device']}, commit {line['commit']}.",
    "one batch: all rows wait for the last one (`theory.expected_rounds`). continuous: the next "
    "text takes the row of a text that has ended, so that rows are independent (equation 1); the "
    "time of the exchange is not counted.",
    *(
      f"Batch {batch} was not measured."
      for batch in (8, 32, 128)
      if not {(batch, 0), (batch, gamma)} <= ms.keys()
    ),
  )
  return Table("Batches of different texts", columns, tuple(rows), notes)


def gpu_identity_table(results: Sequence[Line]) -> Table:
  """Return a table of texts whose outputs differ between two ways to decode."""
  found = {line["identity"]: line for line in results if "identity" in line}
  counts = {dtype: [n for *_, n in line["different"]] for dtype, line in found.items()}
  pairs = [f"{a} and {b}" for a, b, _ in next(iter(found.values()))["different"]]
  rows = [(pair, *(f"{counts[x][i]}" for x in counts)) for i, pair in enumerate(pairs)]
  first = next(iter(found.values()))
  note = (
    f"Of {first['texts']} texts, {first['tokens']} tokens, bundled pair; {first['device']}, jax "
    f"{first['jax']}, commit {first['commit']}. fixed: `fixed_width`, autoregressive decoding in "
    "passes over as many nodes."
  )
  return Table("Outputs that differ", ("compared", *counts), tuple(rows), (note,))


def run_tests(run: Run, settings: list[Line]) -> Iterator[Line]:
  """Run the contract and decoding tests on the device, with the tolerances of tests/conftest.py."""
  import jax

  for setting in settings:
    file = f"tests/test_{setting['tests']}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", file]
    platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
    env = os.environ | {"SPECDEC_TEST_PLATFORM": platform}
    printed = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True).stdout
    failed = re.findall(r"^FAILED (\S+)", printed, re.MULTILINE)
    yield {"summary": (printed.strip().splitlines() or [""])[-1].strip("= "), "failed": failed}


def reproduce_table2(run: Run, settings: list[Line]) -> Iterator[Line]:
  """Measure Table 2 as `specdec reproduce` does, in a process with its own records."""
  for _ in settings:
    folder = str(run.folder / "reproduce")
    command = ["specdec_jax.run", "--gin_file=experiments/paper/reproduce.gin"]
    command = [sys.executable, "-m", *command, f"--gin.OUTPUT_DIR='{folder}'"]
    command += [f"--gin.NUM_TEXTS={min(8, run.num_texts)}"]
    subprocess.run(command, cwd=ROOT, check=True)
    yield {"folder": folder}


class Part(NamedTuple):
  """Settings that one process measures.

  Attributes:
    minutes: estimate for an H100 and 16 cores, which compile all programs of a part at once.
  """

  minutes: float
  measure: Callable[[Run, list[Line]], Iterator[Line]]
  settings: list[Line]


# Flags of XLA, and the temperature at which they matter: temperature 0 has no top-k. jaxlib 0.11.2
# and 0.12.0.1 know them; 0.10.2 knows the first.
FLAGS = {
  "no_pdl": ("--xla_gpu_enable_pdl=false", 0.0),
  "skip_temp": ("--xla_gpu_command_buffer_update_mode=SKIP_TEMP", 0.0),
  "raft": ("--xla_gpu_experimental_enable_raft_for_stable_topk=true", 1.0),
}
_SPEEDS = [_decode(), _decode(5), _decode(3), _decode(7), _decode(5, null=True)]
_SPEEDS += [_decode(gamma, temperature=1.0) for gamma in (0, 5)]
_TREES = [_decode(8, nodes=n, head="parallel") for n in (16, 32, 64)]
_TREES += [_decode(8, nodes=64), _decode(8, nodes=64, null=True)]
_BATCHES = [
  _decode(gamma, batch, num_texts=2 * batch if gamma else batch)
  for batch in (8, 32, 128)
  for gamma in (0, 3)
]
_CONTINUOUS = [x | dict(continuous=True) for x in _BATCHES if x["gamma"]]


def _table2(task: str, source_tokens: int) -> list[Line]:
  """Return the rows of a task in the paper's Table 2, and a step at each temperature."""
  options = dict(source_tokens=source_tokens, top_k=0)
  rows = [row for row in load_table(2) if row["task"] == task]
  return [_decode(temperature=t, **options) for t in (0.0, 1.0)] + [
    _decode(
      int(row["gamma"]),
      draft=row["m_q"].removeprefix("T5-"),
      alpha=row["alpha"],
      temperature=row["temperature"],
      **options,
    )
    for row in rows
  ]


PARTS = {
  "speed": Part(1, measure_speed, _SPEEDS),
  "batches": Part(1, measure_speed, _BATCHES),
  "continuous": Part(0.8, measure_speed, _CONTINUOUS),
  "trees": Part(1, measure_speed, _TREES),
  "int8": Part(0.7, measure_speed, [_decode(gamma, weights="int8") for gamma in (0, 5)]),
  "int4": Part(0.7, measure_speed, [_decode(gamma, weights="int4") for gamma in (0, 5)]),
  "ende": Part(1, measure_speed, _table2("EnDe", SOURCE_TOKENS)),
  "transformers": Part(0.7, measure_transformers, [dict(cache="dynamic")]),
  "transformers_compiled": Part(1, measure_transformers, [dict(cache="static")]),
  **{
    name: Part(
      0.6, measure_speed, [_decode(x, temperature=temperature, flags=flag) for x in (0, 5)]
    )
    for name, (flag, temperature) in FLAGS.items()
  },
  "whisper": Part(
    1,
    measure_speed,
    [
      _decode(gamma, batch, target="whisper-large-v3", draft="whisper-tiny")
      for batch in (1, 8, 32)
      for gamma in (0, 5)
    ],
  ),
  "cnndm": Part(1, measure_speed, _table2("CNNDM", 512)),
  "identity": Part(2, measure_identity, [dict(identity=x) for x in ("float32", "bfloat16")]),
  "xla": Part(0.6, measure_speed, [_decode(gamma, kernels="xla") for gamma in (0, 5)]),
  "auto": Part(2, measure_auto, [dict(auto=name) for name in ("gamma", "tree")]),
  "tests": Part(5, run_tests, [dict(tests=name) for name in ("decoding", "contract")]),
  "table2": Part(25, reproduce_table2, [dict(tables="table2")]),
}


def measure_part(run: Run, part: str, until: float) -> None:
  """Measure the settings of a part that are missing, and append each to the file of results."""
  import jax

  from specdec_jax.measure.machine import provenance

  settings = run.missing(part)
  for setting, measured in zip(settings, PARTS[part].measure(run, settings)):
    origin = {x: provenance()[x] for x in ("commit", "date")}
    line = {**setting, **measured}
    line |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__, **origin}
    print(json.dumps(line), flush=True)
    with run.results.open("a", encoding="utf-8") as file:
      file.write(json.dumps(line) + "\n")
    if time.time() > until:
      return


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
  until, total = time.time() + 60 * args.minutes, 0.0
  print("T5 1.1 XXL with small in bfloat16 takes 24 GB, and 40 GB at batch 128.")
  for part in args.parts:
    if missing := run.missing(part):
      total += PARTS[part].minutes
      minutes = f"about {PARTS[part].minutes:g} minutes, {total:.1f} so far"
      print(f"{part}: {len(missing)} settings, {minutes}", flush=True)
      if args.dry_run:
        for setting in missing:
          print(f"  {setting}")
      elif time.time() < until:
        run_part(part, min(until, 1e12))


def run_part(part: str, until: float) -> None:
  """Measure a part in a process of its own, and print how it ended."""
  flags = PARTS[part].settings[0].get("flags", "")
  options = f"--until={until}", f"--parts={part}"
  command = [sys.executable, "-m", "experiments.gpu.measure", *sys.argv[1:], *options]
  env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # torch needs memory, too
  env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flags}".strip()
  code, ended = subprocess.run(command, cwd=ROOT, env=env).returncode, "done"
  if code:
    ended = f"failed with exit status {code}"
    ended += f"; does this version of jaxlib know {flags}?" if flags else ""
  print(f"{part}: {ended}", flush=True)


if __name__ == "__main__":
  script.run(main)
