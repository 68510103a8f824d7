"""Compile decoding programs for a TPU or GPU on a machine without one, and print a report on them.

  python -m experiments.tpu_v4.report --output report.json
  python -m experiments.tpu_v4.report --topology v5e:2x2
  python -m experiments.tpu_v4.report --topology h100:1 --fused

The report on a TPU is that of the compiler; on a GPU, kernels are counted. The notes below the
printed table, experiments/tpu_v4/README.md and experiments/gpu/README.md explain the programs and
the columns.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import time
from typing import Any, get_args

from experiments.gpu import kernels
from experiments.lib import script
from experiments.lib.formats import render
from experiments.tpu_v4 import compile as tpu_compile
from experiments.tpu_v4 import examine
from experiments.tpu_v4.beams import BeamSettings, beam_programs
from specdec_jax import __version__
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree
from specdec_jax.drafts.heads import AnyConfig, DraftHead, new_head
from specdec_jax.errors import InputError
from specdec_jax.measure.machine import commit
from specdec_jax.models.layout import Layout, Weights, named_dtype
from specdec_jax.models.partitioning import REPLICATED, RULES
from specdec_jax.models.sizes import named_config
from specdec_jax.registry import HEADS
from specdec_jax.theory import best_tree

_NOT_SETTINGS = "format", "output", "no_loops"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--target", default="xxl", help="size of the target (xxl)")
  parser.add_argument(
    "--draft",
    default="small",
    help=f"size of the draft (small); or a draft head on the target: {', '.join(HEADS)}",
  )
  parser.add_argument("--width", type=int, default=1024, help="width of a draft head (1024)")
  parser.add_argument("--layers", type=int, default=2, help="layers of a draft head (2)")
  parser.add_argument(
    "--version",
    default="1.1",
    help="version of T5, 1.0 or 1.1 (default); or a family, such as t5gemma, nllb or lamda",
  )
  parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (default) or float32")
  parser.add_argument(
    "--weights", default="float", choices=get_args(Weights), help="weights of both models (float)"
  )
  parser.add_argument(
    "--output_tokens", type=int, help="tokens that the draft may propose (default: all tokens)"
  )
  parser.add_argument(
    "--topology",
    default="v4:1x1x1",
    help="chip and number in each direction: v4:1x1x1 (default), v4:2x2x1, v5e:2x2, ..., h100:1",
  )
  parser.add_argument(
    "--cut_draft",
    action="store_true",
    help="shard the draft across all chips as well; default: replicated",
  )
  parser.add_argument(
    "--gamma", type=int, default=7, help="draft tokens per round (7); depth of a tree"
  )
  parser.add_argument(
    "--nodes",
    type=int,
    default=0,
    help="nodes of a tree (0, the default: a chain); with beams, nodes per target pass (0: all)",
  )
  parser.add_argument(
    "--dynamic", action="store_true", help="make the tree of --nodes a dynamic one (EAGLE-2)"
  )
  parser.add_argument(
    "--ranks",
    default="0.75,0.11,0.04,0.02,0.01",
    help="acceptance rate of a node's first, second, ... child, for which the tree is optimal",
  )
  parser.add_argument(
    "--beams", type=int, default=0, help="beams of a beam search (0, the default: decoding)"
  )
  parser.add_argument(
    "--draft_beams", type=int, default=0, help="beams of its draft (0, the default: as --beams)"
  )
  parser.add_argument("--batch_size", type=int, default=1, help="batch size (1)")
  parser.add_argument("--source_tokens", type=int, default=128, help="tokens of the prompt (128)")
  parser.add_argument("--max_new_tokens", type=int, default=128, help="limit for each output (128)")
  parser.add_argument(
    "--temperature", type=float, default=1.0, help="sampling temperature (1); 0 is argmax"
  )
  parser.add_argument(
    "--top_k", type=int, default=0, help="top-k of sampling; 0 (default) keeps all tokens"
  )
  parser.add_argument(
    "--fused",
    action="store_true",
    help="the layout of parameters for decoding, as `families.for_decoding`; one chip only",
  )
  parser.add_argument(
    "--no_loops",
    action="store_true",
    help="compile only the parts of a round, in a third of the time",
  )
  parser.add_argument("--format", default="terminal", help="terminal (default), markdown or csv")
  parser.add_argument("--output", help="file for the report as JSON")
  args = parser.parse_args()
  layout = Layout(dtype=named_dtype(args.dtype), weights=args.weights)
  is_gpu = args.topology.split(":")[0] in tpu_compile.GPUS
  options: dict[str, Any] = {}
  if args.fused:
    layout = dataclasses.replace(layout, fused=True, kernels="gpu" if is_gpu else "xla")
    options |= dict(tied_logits=False)
  options |= dict(layout=layout)
  target = named_config(args.version, args.target, **options)
  draft: AnyConfig
  if args.draft in HEADS:
    draft = new_head(
      target,
      args.draft,
      gamma=args.gamma,
      emb_dim=args.width,
      mlp_dim=4 * args.width,
      num_decoder_layers=args.layers,
    )
  else:
    draft = named_config(args.version, args.draft, **options)
  draft = draft.with_layout(weights=args.weights)
  draft = dataclasses.replace(draft, num_output_tokens=args.output_tokens)
  chip, devices = tpu_compile.described(args.topology)
  gamma: int | AnyTree = args.gamma
  if args.dynamic:
    gamma = DynamicTree(args.nodes - 1, args.gamma)
  elif args.nodes and not args.beams:
    gamma = best_tree([float(x) for x in args.ranks.split(",")], args.nodes, args.gamma)
  if args.beams:
    if args.cut_draft or isinstance(draft, DraftHead):
      raise InputError("The draft of a beam search must be a model, replicated on each chip.")
    beam_settings = BeamSettings(
      num_beams=args.beams,
      draft_beams=args.draft_beams or args.beams,
      nodes=args.nodes or None,
      gamma=args.gamma,
      batch_size=args.batch_size,
      source_tokens=args.source_tokens,
      max_new_tokens=args.max_new_tokens,
    )
    programs = beam_programs(target, draft, devices, beam_settings)
  else:
    compile_settings = tpu_compile.CompileSettings(
      gamma=gamma,
      batch_size=args.batch_size,
      source_tokens=args.source_tokens,
      max_new_tokens=args.max_new_tokens,
      sampling=Sampling(args.temperature, args.top_k),
      draft_rules=RULES if args.cut_draft else REPLICATED,
    )
    programs = tpu_compile.programs(target, draft, devices, compile_settings)
  if args.no_loops:
    programs = {name: lower for name, lower in programs.items() if name not in examine.LOOPS}
  report = kernels.report(programs) if is_gpu else examine.report(programs, gamma)
  settings = {name: value for name, value in vars(args).items() if name not in _NOT_SETTINGS}
  by = tpu_compile.gpu_compiler() if is_gpu else "libtpu"
  versions = {name: importlib.metadata.version(name) for name in ("jax", by)}
  versions["specdec_jax"] = __version__
  nodes = f", {args.nodes} nodes{' (dynamic)' * args.dynamic}" if args.nodes else ""
  if args.beams:
    nodes = f", {args.beams} beams, {args.draft_beams or args.beams} of the draft{nodes}"
  weights = f", {args.weights} weights" if args.weights != "float" else ""
  family = args.version if args.version.isidentifier() else f"T5 {args.version}"
  title = (
    f"{family} {args.target} with {args.draft}{' (fused)' * args.fused}, "
    f"gamma {args.gamma}{nodes}, {args.dtype}{weights}, batch {args.batch_size}, "
    f"{'TPU ' * (not is_gpu)}{args.topology}{', both sharded' * args.cut_draft}, "
    f"jax {versions['jax']}, {by} {versions[by]}"
  )
  if is_gpu:
    table = kernels.report_table(report, title)
  else:
    table = examine.report_table(report, title, chip)
  print(render(table, args.format), end="")
  if args.output:
    origin = {"commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    content = {"settings": settings, **origin, "versions": versions, **report}
    text = json.dumps(content, indent=2)
    with atomic_write(args.output) as file:
      file.write(text + "\n")


if __name__ == "__main__":
  script.run(main)
