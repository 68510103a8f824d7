"""Compile T5-XXL and its drafts for an H100, without one, and predict times from their kernels.

  pip install -e '.[gpu-compiler]'
  python -m experiments.gpu.predict experiments/gpu/compiled_gpu.jsonl --format markdown

`compiled.jsonl` has the programs of commit 8ecd799, which was measured. `experiments.gpu.fit` fits
the model of their times.
"""

import argparse
import collections
import dataclasses
import importlib.metadata
import json
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.kernels import (
  KINDS,
  Kernel,
  Kernels,
  by_kind,
  by_part,
  kernels,
  num_bytes,
  predicted_us,
)
from experiments.lib import script
from experiments.lib.formats import render
from experiments.lib.records import lines
from experiments.paper.paper import load_table
from experiments.tpu_v4 import compile as compiler
from specdec_jax import theory
from specdec_jax.core import memory
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree
from specdec_jax.drafts.heads import AnyConfig, DraftHead, new_head
from specdec_jax.drafts.heads.stateless import WIDTH
from specdec_jax.measure.kernel_times import GPU_TIMES, KernelWork
from specdec_jax.measure.machine import commit
from specdec_jax.measure.plan import DEVICES, param_structs
from specdec_jax.measure.plan import RANKS as SHARES
from specdec_jax.measure.tables import Table, number_text
from specdec_jax.models.kernels import gpu
from specdec_jax.models.layout import Layout
from specdec_jax.models.sizes import t5_config
from specdec_jax.registry import HEADS

TOPOLOGY = "h100:1"
TARGET = "xxl"
MEASURED = pathlib.Path(__file__).with_name("measured.jsonl")
MEASURED_GPU = MEASURED.with_name("measured_gpu.jsonl")  # with kernels 'gpu'
COMPILED = MEASURED.with_name("compiled.jsonl")
COMPILED_GPU = MEASURED.with_name("compiled_gpu.jsonl")
ACCEPTANCE = MEASURED.with_name("acceptance.jsonl")  # of the head 'features'
HEADS_MEASURED = MEASURED.parents[1] / "methods/results.jsonl"
# As measured: a source of about 35 tokens, padded to a multiple of 8.
SOURCE_TOKENS = 40
RANKS = (0.75, 0.11, 0.04, 0.02, 0.01)  # of children; the defaults of `experiments.tpu_v4.report`
ALPHA, MAX_GAMMA, TOP_K = 0.75, 12, 40
REDUCED = 20_000_000  # of the measured rows 'reduced'

Line = dict[str, Any]  # a line of the file of compiled programs


@dataclasses.dataclass(frozen=True)
class Setting:
  """A program, and what it depends on.

  Attributes:
    program: name in `experiments.tpu_v4.compile.programs`.
    draft: a size of T5 1.1, such as 'small'; 'base, 2 layers' for a decoder of fewer layers; or a
      kind of head, such as 'parallel', of width 1024.
    gamma: draft tokens per round, or the depth of a tree.
    nodes: nodes of a tree; 0 for a chain. The tree of a head is dynamic, unless it is `static`.
    temperature: 0, or 1 with top-k 40, as measured.
    reduced: `REDUCED` of `models.kernels.gpu`, if it differs.
  """

  program: str
  draft: str = "small"
  gamma: int = 5
  nodes: int = 0
  batch_size: int = 1
  max_new_tokens: int = 96
  temperature: float = 0.0
  dtype: str = "bfloat16"
  weights: str = "float"
  static: bool = False
  reduced: int | None = None


_STEPS = [
  Setting("plain step", batch_size=b, max_new_tokens=n) for b, n in ((1, 96), (8, 64), (32, 64))
]
_ROUNDS = [
  Setting("round", gamma=gamma, batch_size=b, max_new_tokens=n)
  for b, n, gamma in ((1, 96, 5), (8, 64, 3), (32, 64, 3))
]
_PARTS = [Setting(name) for name in ("decode step", "verify")]
_MODELS = "small", "base", "large", "base, 2 layers", "base, 1 layer"
_HEADS = "heads", "parallel", "eagle", "conditioned", "features"
_DRAFTS = [
  *(Setting("draft step", draft) for draft in _MODELS),
  *(Setting("drafting", draft) for draft in _HEADS),
]
_TREES = [Setting("verify", gamma=8, nodes=nodes) for nodes in (16, 32, 64)]
_SIZES = [*(Setting("draft step", size) for size in ("small", "base", "large", "xl")), _STEPS[0]]
_PROGRAMS = "plain step", "verify", "draft step", "round"
_WEIGHTS = {
  weights: [Setting(program, weights=weights) for program in _PROGRAMS]
  for weights in ("float", "int8", "int4")
}
SETTINGS = [*_STEPS, *_ROUNDS, *_PARTS, *_DRAFTS, *_TREES, _SIZES[-2]]
# Other measured programs, and rounds with trees of heads.
_MEASURED = [
  *(Setting("round", gamma=gamma) for gamma in (3, 7)),
  *(Setting(program, temperature=1.0) for program in ("plain step", "round")),
  Setting("round", gamma=8, nodes=64),
  *(Setting(program, reduced=REDUCED) for program in ("plain step", "round")),
]
_HEAD_TREES = [
  Setting("round", head, 8, nodes, static=static)
  for head in ("parallel", "features")
  for static in (False, True)
  for nodes in (16, 32, 64)
]
GPU_SETTINGS = [*SETTINGS, *_WEIGHTS["int8"], *_WEIGHTS["int4"], *_MEASURED, *_HEAD_TREES]


def compiled_kernels(setting: Setting, config_kernels: str = "gpu") -> Kernels:
  """Return the kernels of a program, compiled for an H100; `Layout.kernels` is given."""
  _, devices = compiler.described(TOPOLOGY)
  target = _t5(TARGET, setting).with_layout(kernels=config_kernels)
  draft = _draft(setting, target)
  if not isinstance(draft, DraftHead):
    draft = draft.with_layout(kernels=config_kernels)
  tree: int | AnyTree = setting.gamma
  if setting.nodes and isinstance(draft, DraftHead) and not setting.static:
    tree = DynamicTree(setting.nodes - 1, setting.gamma)
  elif setting.nodes:
    tree = theory.best_tree(RANKS, setting.nodes, setting.gamma)
  sampling = Sampling(setting.temperature, TOP_K if setting.temperature else 0)
  settings = compiler.CompileSettings(
    tree, setting.batch_size, SOURCE_TOKENS, setting.max_new_tokens, sampling
  )
  with mock.patch.object(gpu, "REDUCED", setting.reduced or gpu.REDUCED):
    param_structs.cache_clear()  # which depend on it
    programs = compiler.programs(target, draft, devices, settings)
    return kernels(programs[setting.program]().compile().as_text() or "")


def compile_missing(
  settings: Iterable[Setting], path: pathlib.Path, config_kernels: str = "gpu"
) -> list[Line]:
  """Compile the programs that the file `path` lacks, append them, and return all of its lines.

  A line is a setting with the kernels as [part, kind, bytes, how often]. An interrupted run
  resumes. The programs of SETTINGS take six minutes on two cores.
  """
  found = lines(path) if path.exists() else []
  for setting in settings:
    if any(is_of(line, setting) for line in found):
      continue
    started = time.perf_counter()
    counted = compiled_kernels(setting, config_kernels)
    line = {
      **dataclasses.asdict(setting),
      "kernels": sorted([*kernel[:3], n] for kernel, n in counted.items()),
      "seconds": round(time.perf_counter() - started, 1),
      "date": time.strftime("%Y-%m-%d", time.gmtime()),
      "commit": commit(),
      "jax": importlib.metadata.version("jax"),
    }
    with path.open("a", encoding="utf-8") as file:
      file.write(json.dumps(line) + "\n")
    found.append(line)
  return found


def kernels_of(
  compiled: Sequence[Line], setting: Setting, transposed: bool = False, xla: bool = False
) -> Kernels:
  """Return the kernels of a setting in lines of a file; the last line counts.

  Args:
    compiled: lines of the file.
    setting: the program.
    transposed: whether large matrices are stored transposed, as at commit 2f29bccccd. A reduction
      over a matrix of up to REDUCED entries is as fast as over one that is not transposed.
    xla: whether the kernels are those for TPUs, whose attention has no time per query.
  """
  line = [each for each in compiled if is_of(each, setting)][-1]
  target = _t5(TARGET, setting)
  rows = dict(target=1 if "step" in setting.program else setting.nodes or setting.gamma + 1)
  is_dynamic = setting.draft in HEADS and not setting.static
  rows["draft"] = max(1, WIDTH if setting.nodes and is_dynamic else setting.nodes // setting.gamma)
  heads = dict(target=target.num_heads, draft=_draft(setting, target).num_heads)
  found: collections.Counter[Kernel] = collections.Counter()
  for part, kind, size, n in line["kernels"]:
    queries = 0
    if kind == "attention" and not xla and part in rows and rows[part] <= gpu.MAX_REDUCED_ROWS:
      queries = rows[part] * heads[part]
    largest = setting.reduced if setting.reduced and rows.get(part) == 1 else gpu.REDUCED
    is_transposed = transposed and kind == "matmul" and size > 2 * largest  # in bfloat16
    found[Kernel(part, kind, size, queries, is_transposed)] += n
  return found


# Tables.


def gpu_parts_table(compiled: Sequence[Line]) -> Table:
  """Return a table of the kernels and microseconds of each part of the round at batch 1."""
  rows: list[tuple[str, ...]] = []
  found = kernels_of(compiled, _ROUNDS[0])
  for part, of_part in {**by_part(found), "all": found}.items():
    kinds, cells = by_kind(of_part), []
    for of_kind in (of_part, *(kinds[kind] for kind in KINDS)):
      cells.append(f"{predicted_us(of_kind):.0f} ({sum(of_kind.values()):.0f})")
    at_bandwidth = GPU_TIMES.us(KernelWork(num_bytes(of_part)), DEVICES["h100"].gb_per_s)
    rows.append((part, *cells, f"{at_bandwidth:.0f}"))
  columns = "part", "all", *KINDS, "of bytes alone"
  notes = (
    "Predicted microseconds, and the number of kernels. draft: all draft steps. target: a forward "
    "pass over six tokens. rest: verification, caches, and the records of the round.",
    "of bytes alone: the time of all bytes at the model's bandwidth.",
  )
  return Table("Where the time of a round goes, gamma 5, batch 1", columns, tuple(rows), notes)


def gpu_drafts_table(compiled: Sequence[Line]) -> Table:
  """Return a table of drafts: kernels and predicted time of a draft step, c, and the best gamma."""
  rows: list[tuple[str, ...]] = []
  v_5 = _verify_cost(compiled)
  for setting in _DRAFTS:
    found = kernels_of(compiled, setting)
    steps = setting.gamma if setting.program == "drafting" else 1
    us, c = predicted_us(found) / steps, _draft_cost(compiled, setting)
    gamma, speed = _best_gamma(ALPHA, c, v_5)
    rows.append(
      (
        setting.draft,
        f"{sum(found.values()) / steps:.0f}",
        f"{num_bytes(found) / steps / 1e6:.1f}",
        f"{us:.0f}",
        f"{c:.3f}",
        f"{gamma}",
        f"{speed:.2f}",
      )
    )
  columns = "draft", "kernels", "MB", "us", "c", "best gamma", "speedup"
  notes = (
    "For each draft token, T5-XXL, bfloat16, batch 1. Heads are of width 1024, with two layers if "
    "the kind has layers, at gamma 5. 'base, 2 layers' is a T5-base with a decoder of two layers.",
    f"best gamma, speedup: Theorem 8 with c, v = {v_5:.3f} and alpha {ALPHA:g} for every draft. A "
    "smaller draft has a smaller alpha, which must be measured.",
  )
  return Table("Predicted costs of drafts on an H100", columns, tuple(rows), notes)


def gpu_alphas_table(compiled: Sequence[Line]) -> Table:
  """Return a table of the paper's drafts with the paper's alphas, and the best gamma of each."""
  rows: list[tuple[str, ...]] = []
  v_5, costs = _verify_cost(compiled), {s.draft: _draft_cost(compiled, s) for s in _DRAFTS}
  for row in load_table(2):
    c = costs[row["m_q"].removeprefix("T5-")]
    gamma, speed = _best_gamma(row["alpha"], c, v_5)
    cells = f"{row['task']}|{row['temperature']:g}|{row['m_q']}|{row['alpha']:.2f}|{c:.3f}"
    rows.append((*cells.split("|"), f"{gamma}", f"{speed:.2f}"))
  columns = "task", "temperature", "draft", "paper alpha", "c", "best gamma", "speedup"
  notes = (
    f"Only alpha is the paper's. best gamma, speedup: Theorem 8 with c of the table above and "
    f"v = {v_5:.3f}.",
  )
  return Table("Drafts on an H100 with the paper's alphas", columns, tuple(rows), notes)


def _draft_cost(compiled: Sequence[Line], setting: Setting) -> float:
  """Return c: the predicted time of a draft token / that of a step."""
  steps = setting.gamma if setting.program == "drafting" else 1
  us = predicted_us(kernels_of(compiled, setting)) / steps
  return us / predicted_us(kernels_of(compiled, _STEPS[0]))


def _verify_cost(compiled: Sequence[Line]) -> float:
  """Return v(5): the predicted time of a target pass over six tokens / that of a decode step."""
  return predicted_us(kernels_of(compiled, _PARTS[1])) / predicted_us(
    kernels_of(compiled, _PARTS[0])
  )


def _best_gamma(alpha: float, c: float, v: float) -> tuple[int, float]:
  """Return the gamma up to MAX_GAMMA with the highest predicted speedup, and this speedup."""
  gammas = np.arange(1, MAX_GAMMA + 1)
  speeds = theory.walltime_improvement(alpha, gammas, c, v)
  return int(gammas[np.argmax(speeds)]), float(np.max(speeds))


def gpu_trees_table(compiled: Sequence[Line]) -> Table:
  """Return a table of v for trees."""
  decode_us, rows = predicted_us(kernels_of(compiled, _PARTS[0])), []
  for setting in (_PARTS[1], *_TREES):
    found = kernels_of(compiled, setting)
    us = predicted_us(found)
    cells = f"{sum(found.values()):.0f}", f"{us / 1e3:.2f}", f"{us / decode_us:.3f}"
    rows.append((f"{setting.nodes}" if setting.nodes else "6, chain", *cells))
  note = (
    "A target pass over the nodes of a static tree of depth 8; v is its time over that of a decode "
    "step."
  )
  columns = "nodes", "kernels", "ms", "v"
  return Table("Predicted costs of trees on an H100", columns, tuple(rows), (note,))


def gpu_head_trees_table(compiled: Sequence[Line]) -> Table:
  """Return a table of rounds of heads that propose trees, and of their tokens and speedups."""
  step_us, rows = predicted_us(kernels_of(compiled, _STEPS[0])), []
  for setting in _HEAD_TREES:
    if not any(is_of(line, setting) for line in compiled):
      continue
    found, nodes = kernels_of(compiled, setting), setting.nodes
    ratio = predicted_us(found) / step_us
    simulated = ([(a, *((1 - a) * x for x in SHARES))] * setting.gamma for a in (0.5, 0.75, 0.9))
    counts = [tree_tokens(x, nodes) for x in (*simulated, *acceptances(setting.gamma).values())]
    rows.append(
      (
        setting.draft,
        "static" if setting.static else "dynamic",
        f"{nodes}",
        f"{sum(found.values()):.0f}",
        f"{ratio * step_us / 1e3:.2f}",
        f"{ratio:.3f}",
        *(f"{tokens:.2f} ({tokens / ratio:.2f})" for tokens in counts),
      )
    )
  columns = "head", "tree", "nodes", "kernels", "ms", "round / step", "alpha 0.5", "alpha 0.75"
  columns = *columns, "alpha 0.9", *(f"as {name}" for name in acceptances(1))
  notes = (
    "Predicted for T5-XXL, depth 8; nothing was timed. ms: a round. The last columns: tokens per "
    "round (speedup over autoregressive decoding) of the best static tree for an acceptance.",
    "alpha: of the draft tokens at each node, the first is accepted with this probability, and the "
    f"next ones with {', '.join(f'{x:g}' for x in SHARES)} of the rest, at any depth.",
    "as features: acceptance by depth and rank of this head of the bundled pair. as parallel: "
    "acceptance of first draft tokens by depth of this head (five depths; the last one counts for "
    "deeper ones), and simulated ranks.",
  )
  return Table("Predicted rounds with trees of heads on an H100", columns, tuple(rows), notes)


def acceptances(depth: int) -> dict[str, list[tuple[float, ...]]]:
  """Return the measured acceptance of each head at each depth from 1, by rank."""
  (measured,) = lines(ACCEPTANCE)
  (parallel,) = (
    each["outputs"]["acceptance_by_position"]
    for each in lines(HEADS_MEASURED)
    if each["models"]["draft"] == "parallel" and each["settings"]["temperature"] == 0
  )
  by_depth = [*parallel, *parallel[-1:] * depth][:depth]
  return {
    "features": [tuple(ranks) for ranks in measured["acceptance"][:depth]],
    "parallel": [(a, *((1 - a) * share for share in SHARES)) for a in by_depth],
  }


def tree_tokens(acceptance: Sequence[Sequence[float]], nodes: int) -> float:
  """Return the expected tokens per round, given the acceptance by depth and rank.

  The tree is the best one for the mean acceptance of all depths.
  """
  tree = theory.best_tree(np.mean(acceptance, axis=0).tolist(), nodes, len(acceptance))
  reached = [1.0]
  for parent, rank in zip(tree.parents, tree.ranks):
    reached.append(reached[parent] * acceptance[tree.depths[parent]][rank])
  return sum(reached)


def gpu_sizes_table(compiled: Sequence[Line]) -> Table:
  """Return a table of the sizes of T5 1.1: memory, and predicted time of a step."""
  small_us, rows = predicted_us(kernels_of(compiled, _SIZES[0])), []
  for setting in _SIZES:
    size = TARGET if setting is _STEPS[0] else setting.draft
    config = _t5(size, setting)
    us = predicted_us(kernels_of(compiled, setting))
    cache = 4 * config.num_decoder_layers * config.num_heads * config.head_dim * 2 * 256
    memory = (_parameter_bytes(size, dtype, weights) / 1e9 for dtype, weights in _FORMATS)
    cells = [f"{gigabytes:.2f}" for gigabytes in memory]
    rows.append((size, *cells, f"{cache / 1e6:.1f}", f"{us / 1e3:.2f}", f"{small_us / us:.2f}"))
  formats = "float32 GB", "bfloat16 GB", "int8 GB", "int4 GB"
  columns = "size", *formats, "caches MB", "ms per step", "c of small"
  notes = (
    "GB: parameters, encoder included. caches: keys and values in bfloat16 of one row, with 256 "
    "source tokens and 256 slots.",
    "ms per step: predicted for bfloat16, batch 1. c of small: that of T5-small as the draft.",
  )
  return Table("Sizes of T5 1.1 on an H100", columns, tuple(rows), notes)


_FORMATS = ("float32", "float"), ("bfloat16", "float"), ("bfloat16", "int8"), ("bfloat16", "int4")


def _parameter_bytes(size: str, dtype: str, weights: str) -> int:
  config = _t5(size, Setting("", dtype=dtype, weights=weights))

  def num_bytes(num_layers: int) -> int:
    layers = {f"num_{part}_layers": num_layers for part in ("encoder", "decoder")}
    shallow = dataclasses.replace(config, **layers)
    return sum(map(memory.num_bytes, jax.tree.leaves(param_structs(shallow))))

  one, two = num_bytes(1), num_bytes(2)
  return one + (config.num_decoder_layers - 1) * (two - one)  # of each part; all layers are equal


def gpu_weights_table(compiled: Sequence[Line]) -> Table:
  """Return a table of the formats of weights: bytes and predicted times of steps and rounds."""
  rows: list[tuple[str, ...]] = []
  for weights, settings in _WEIGHTS.items():
    step, verify, draft, round_ = (kernels_of(compiled, setting) for setting in settings)
    sizes = num_bytes(step) / 1e9, num_bytes(verify) / 1e9, num_bytes(draft) / 1e9
    times = [predicted_us(found) / 1e3 for found in (step, verify, draft, round_)]
    cells = *(f"{gigabytes:.2f}" for gigabytes in sizes), *(f"{ms:.2f}" for ms in times)
    rows.append((weights, *cells, f"{times[3] / times[0]:.2f}"))
  names = "step", "verify", "draft step"
  columns = *(f"{name} GB" for name in names), *(f"{name} ms" for name in (*names, "round"))
  notes = (
    "T5-XXL with T5-small in the same format, arithmetic in bfloat16, gamma 5, batch 1. verify: a "
    "target pass over six tokens.",
    "ms: predicted from bytes and the number of kernels. The arithmetic that converts integers is "
    "not counted, and nothing was timed on a device.",
  )
  columns = "weights", *columns, "round / step"
  return Table("Formats of weights on an H100", columns, tuple(rows), notes)


def gpu_changes_table(compiled: Sequence[Line]) -> Table:
  """Return a table of kernels and measured times before and after kernels for GPUs."""
  rows, before = [], lines(COMPILED)
  for setting in (*_STEPS, *_ROUNDS, _PARTS[1], _DRAFTS[0]):
    found = kernels_of(compiled, setting)
    rows.append(
      (
        setting.program,
        f"{setting.batch_size}",
        f"{setting.gamma}" * ("step" not in setting.program),
        f"{sum(kernels_of(before, setting).values()):.0f}",
        number_text(_measured_ms(lines(MEASURED), setting), ".2f"),
        f"{sum(found.values()):.0f}",
        number_text(_measured_ms(lines(MEASURED_GPU), setting), ".2f"),
        f"{predicted_us(found) / 1e3:.2f}",
      )
    )
  columns = "kernels before", "measured ms before", "kernels", "measured ms", "predicted ms"
  columns = "program", "batch", "gamma", *columns
  notes = (
    "T5-XXL with T5-small, bfloat16, temperature 0. verify: a target pass over six tokens; "
    "its measured time is that of a round with a draft that takes no time. A measured draft step "
    "is the difference of this round and one with T5-small, divided by gamma.",
    "before: commit 8ecd799. measured ms: commit 2f29bccccd, which has as many kernels as the "
    "present programs but stores all matrices transposed. predicted ms: of the present programs.",
  )
  return Table("Kernels before and after", columns, tuple(rows), notes)


def _measured_ms(measured: Sequence[Line], setting: Setting) -> float | None:
  """Return the measured time of a program, or None if it is not in the lines of a file."""

  def round_ms(gamma: int, null: bool) -> float | None:
    shape = dict(gamma=gamma, batch_size=setting.batch_size, null=null, temperature=0.0)
    found = [
      line["round_ms"]
      for line in measured
      if shape.items() <= line.items()
      and not (line.get("flags") or line.get("nodes"))
      and line.get("kernels", "auto") == "auto"
    ]
    return found[0] if found else None

  if setting.program == "draft step":
    both, verify = round_ms(setting.gamma, False), round_ms(setting.gamma, True)
    return None if both is None or verify is None else (both - verify) / setting.gamma
  gamma = 0 if setting.program == "plain step" else setting.gamma
  return round_ms(gamma, setting.program == "verify")


TABLES = (
  gpu_changes_table,
  gpu_sizes_table,
  gpu_parts_table,
  gpu_drafts_table,
  gpu_alphas_table,
  gpu_trees_table,
  gpu_head_trees_table,
  gpu_weights_table,
)


def is_of(line: Mapping[str, Any], setting: Setting) -> bool:
  shape = dataclasses.asdict(Setting("")) | line  # older lines lack the last fields
  return all(shape[name] == value for name, value in dataclasses.asdict(setting).items())


def _t5(size: str, setting: Setting) -> Any:
  """Return the configuration of a T5 1.1, laid out as it is loaded for decoding."""
  return t5_config(
    size,
    layout=Layout(dtype=jnp.dtype(setting.dtype), weights=setting.weights, fused=True),
    tied_logits=False,
  )


def _draft(setting: Setting, target: Any) -> AnyConfig:
  name, _, layers = setting.draft.partition(", ")
  num_layers = int(layers.split()[0]) if layers else None
  if name in HEADS:
    options = dict(emb_dim=1024, mlp_dim=4096, num_decoder_layers=num_layers or 2)
    return new_head(target, name, gamma=setting.gamma, **options)
  config = _t5(name, setting)
  return dataclasses.replace(config, num_decoder_layers=num_layers or config.num_decoder_layers)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("compiled", type=pathlib.Path, help="file of the compiled programs")
  parser.add_argument("--kernels", default="gpu", help="those of the models: gpu (default) or xla")
  parser.add_argument("--format", default="terminal", help="terminal (default), markdown or csv")
  args = parser.parse_args()
  compiled = compile_missing(GPU_SETTINGS, args.compiled, args.kernels)
  for table in TABLES:
    print(render(table(compiled), args.format))


if __name__ == "__main__":
  script.run(main)
