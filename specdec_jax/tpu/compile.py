"""What the compiler for TPUs makes of decoding, asked without a TPU: memory, bytes, copies.

Programs are lowered for a described slice on shapes alone, so no weights are needed either.
"""

import dataclasses
import functools
import importlib.util
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered

from specdec_jax.decoding import (
  FreeDraft,
  autoregressive_decode,
  one_round,
  speculative_decode,
  start,
)
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.families import Config, init_params, model_of
from specdec_jax.partitioning import (
  REPLICATED,
  RULES,
  PartitionedDraft,
  PartitionedModel,
  Rules,
  make_mesh,
  param_shardings,
  state_shardings,
)
from specdec_jax.protocols import Draft
from specdec_jax.reporting.tables import MISSING, Table
from specdec_jax.rules.tokens import TokenRule
from specdec_jax.sampling import Sampling, draw
from specdec_jax.tpu.weight_copies import weight_copies
from specdec_jax.trees import Tree, chain

LOOPS = "speculative loop", "plain loop"

LEGEND = (
  "All numbers are of one chip. accessed: bytes read and written as the compiler counts them, in "
  "memory on the chip too, and the body of a loop once, so that of the two loops it is the start "
  "and one round. HBM: the same compiled to use HBM alone; in a round all steps of the draft. of a "
  "step: HBM bytes over a decode step's; a round's over a plain step's, which samples and commits "
  "too. HBM ms: the time that those bytes take at the published {rate:g} GB/s; nothing was run."
)

Programs = dict[str, Callable[[], Lowered]]  # by name, lowered when called

# As it is, the compiler fetches weights into memory on the chip (CMEM on v4, VMEM on the others)
# ahead of their use, and counts what is written and read there too. Without that, it counts traffic
# with HBM alone.
HBM_ONLY: dict[str, str | bool] = {"xla_msa_enable": False}


@dataclasses.dataclass(frozen=True)
class Chip:
  """What is published of a TPU: cloud.google.com/tpu/docs/v4 and likewise, read in 2026.

  Attributes:
    hbm_gb: its memory, 1e9 bytes (v4's page says GiB).
    hbm_gb_per_s: at which that is read, at most; 1e9 bytes a second.
    example: a slice of one host: chips in each direction.
    config: for a chip of two cores, what makes them one device with all of its memory, as a TPU VM
      has them.
  """

  hbm_gb: float
  hbm_gb_per_s: float
  example: str
  config: str = "default"


CHIPS = {
  "v4": Chip(32, 1200, "2x2x1", "megacore"),
  "v5e": Chip(16, 819, "2x2"),
  "v5p": Chip(95, 2765, "2x2x1", "megacore"),
  "v6e": Chip(32, 1638, "2x2"),
}

_SIDES = [f"{side}" for side in range(1, 33)]  # of slices: none is longer


class Program(NamedTuple):
  """What the compiler says of one program: bytes and operations on each chip.

  Attributes:
    arguments: weights, and what else is passed in.
    temporaries: what it needs besides.
    peak: most memory in use at any time.
    accessed: bytes read and written; the body of a loop counts once.
    operations: arithmetic, likewise.
    optimal_seconds: the compiler's own estimate, likewise. Compiled for HBM alone it is the bytes
      at a share of the chip's bandwidth; else it is negative, without meaning, where an
      instruction has none (-1).
    weight_copies: see the function.
    host_transfers: instructions that talk to the host.
    collectives: instructions that talk to other chips.
  """

  arguments: int
  temporaries: int
  peak: int
  accessed: int
  operations: int
  optimal_seconds: float
  weight_copies: list[str]
  host_transfers: int
  collectives: int


def described(topology: str) -> tuple[Chip, Sequence[jax.Device]]:
  """The chips of a slice, such as v4:2x2x1 or v5e:2x4, to compile for; none is there to run.

  A part of a host will do: v4:1x1x1 is one chip. To be called before jax does anything else: this
  process will use its CPU only.

  Raises:
    InputError: there is no such topology, or libtpu, the compiler, is not installed.
  """
  name, _, shape = topology.partition(":")
  chip, sides = CHIPS.get(name), shape.split("x")
  if (
    chip is None
    or len(sides) != len(chip.example.split("x"))
    or any(side not in _SIDES for side in sides)
  ):
    known = ", ".join(f"{name}:{chip.example}" for name, chip in CHIPS.items())
    raise InputError(
      f"There is no topology {topology!r}; it is a TPU and its chips in each direction, as in "
      f"{known}."
    )
  if importlib.util.find_spec("libtpu") is None:
    raise InputError("libtpu, the compiler for TPU, is missing; pip install -e '.[tpu]'.")
  jax.config.update("jax_platforms", "cpu")
  os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v4-8",  # any will do, for its silence
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # no TPU is held
  )
  across, down, *_ = map(int, sides)
  host = min(across, 2), min(down, 2), 1
  try:
    slice_ = topologies.get_topology_desc(
      topology, "tpu", chip_config_name=chip.config, chips_per_host_bounds=host
    )
  except jax.errors.JaxRuntimeError as error:
    raise InputError(f"libtpu cannot describe {topology}: {error}.") from None
  return chip, slice_.devices


def programs(
  target: Config,
  draft: Config,
  devices: Sequence[jax.Device],
  *,
  gamma: int | Tree = 7,
  batch_size: int = 1,
  source_tokens: int = 128,
  max_new_tokens: int = 128,
  sampling: Sampling = Sampling(),
  draft_rules: Rules = REPLICATED,
) -> Programs:
  """Both loops, and apart what a round is made of.

  The target is sharded across all devices; the draft is replicated unless its rules shard it.
  Parameters have the models' dtypes and the layouts that `jax.device_put` gives; caches of the
  parts have the compiler's own choice, as they have inside a loop. Where a tree is given for gamma
  there is a program more, 'commit': the path that stands moved to its place.

  Raises:
    InputError: the devices cannot share the target, or a size is no whole number from 1.
  """
  tree = gamma if isinstance(gamma, Tree) else chain(gamma)
  sizes = dict(
    gamma=tree.depth,
    batch_size=batch_size,
    source_tokens=source_tokens,
    max_new_tokens=max_new_tokens,
  )
  for name, size in sizes.items():
    require_count(name, size)
  mesh = make_mesh(len(devices), devices)
  p = PartitionedModel(model_of(target), mesh)
  q = PartitionedModel(model_of(draft), mesh, draft_rules)
  own = ModelDraft(model_of(draft), sampling, tree)
  guesses, rule = PartitionedDraft(own, mesh, draft_rules), TokenRule(sampling)
  everywhere = NamedSharding(mesh, PartitionSpec())

  def array(shape, dtype, sharding=everywhere) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  def params(config: Config, rules: Rules):
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    places = param_shardings(shapes, mesh, rules)
    return jax.tree.map(lambda x, place: array(x.shape, config.dtype, place), shapes, places)

  p_params, q_params = params(target, RULES), params(draft, draft_rules)
  prompt = array((batch_size, source_tokens), jnp.int32)
  rng = array((batch_size,), jax.eval_shape(jax.random.key, 0).dtype)
  first, _ = jax.eval_shape(p.prompt_tokens, prompt)
  num_slots = first.shape[1] + max_new_tokens + tree.num_nodes

  def part(function: Callable, params, state, places, *args) -> Lowered:
    """function(*params, state, *args) -> (state, results), with the state updated in place."""
    place_of = lambda x: x.sharding
    chosen = jax.tree.map(lambda place: Format(Layout.AUTO, place), places)
    jitted = jax.jit(
      function,
      in_shardings=(*jax.tree.map(place_of, params), chosen, *map(place_of, args)),
      out_shardings=(chosen, None),
      donate_argnums=len(params),
    )
    return jitted.lower(*params, state, *args)

  def of_target(tree: Tree) -> Lowered:
    def extend(target_params, cache, tokens):
      logits, _, cache = p.extend(target_params, cache, tokens, tree)
      return p.commit(cache, cache.length + 1), logits

    tokens = array((batch_size, tree.num_nodes), jnp.int32)
    return part(extend, (p_params,), *cache_of_target(), tokens)

  def cache_of_target() -> tuple[Any, Any]:
    _, cache = jax.eval_shape(functools.partial(p.prefill, num_slots=num_slots), p_params, prompt)
    return cache, state_shardings(cache, mesh, RULES)

  def of_commit() -> Lowered:
    def commit(cache, path):
      return p.commit(cache, cache.length + tree.depth, tree, path), ()

    return part(commit, (), *cache_of_target(), array((batch_size, tree.depth), jnp.int32))

  def of_draft() -> Lowered:
    def step(draft_params, cache, tokens, rng):
      logits, _, cache = q.extend(draft_params, cache, tokens)
      return q.commit(cache, cache.length + 1), draw(rng, logits[:, 0], sampling)

    _, cache = jax.eval_shape(functools.partial(q.prefill, num_slots=num_slots), q_params, prompt)
    places = state_shardings(cache, mesh, draft_rules)
    tokens = array((batch_size, 1), jnp.int32)
    return part(step, (q_params,), cache, places, tokens, rng)

  def of_round(draft: Draft, draft_params) -> Lowered:
    def run(target_params, draft_params, state, rng):
      models = p, draft, target_params, draft_params
      return one_round(*models, rule, rng, 1, state), ()

    params = p_params, draft_params
    at_start = functools.partial(start, p, draft, limit=max_new_tokens)
    state = jax.eval_shape(at_start, *params, prompt)
    places = state_shardings(state, mesh, REPLICATED)._replace(
      target=state_shardings(state.target, mesh, RULES),
      draft=state_shardings(state.draft, mesh, draft_rules),
    )
    return part(run, params, state, places, rng)

  limit = max_new_tokens
  commits = {} if tree.is_chain else {"commit": of_commit}
  return {
    "speculative loop": lambda: speculative_decode.lower(
      p, guesses, p_params, q_params, prompt, rng, max_new_tokens=limit, rule=rule
    ),
    "plain loop": lambda: autoregressive_decode.lower(
      p, p_params, prompt, rng, max_new_tokens=limit, sampling=sampling
    ),
    "plain step": lambda: of_round(FreeDraft(), ()),
    "round": lambda: of_round(guesses, q_params),
    "decode step": lambda: of_target(chain(0)),
    "verify": lambda: of_target(tree),
    "draft step": of_draft,
    **commits,
  }


def examine(compiled: Compiled) -> Program:
  """What there is to know of a compiled program."""
  memory: Any = compiled.memory_analysis()
  cost: Any = compiled.cost_analysis()
  hlo = compiled.as_text() or ""
  count = lambda ops: len(re.findall(rf" ({ops})(-start)?\(", hlo))
  return Program(
    arguments=memory.argument_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    peak=memory.peak_memory_in_bytes,
    accessed=round(cost["bytes accessed"]),
    operations=round(cost["flops"]),
    optimal_seconds=cost["optimal_seconds"],
    weight_copies=weight_copies(hlo),
    host_transfers=count("infeed|outfeed|send|recv"),
    collectives=count("all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"),
  )


def hbm_bytes(programs: Programs, gamma: int | Tree) -> dict[str, int]:
  """What each part of a round reads from HBM and writes there, the round with all of its steps."""
  compiled = {
    name: lower().compile(compiler_options=HBM_ONLY)
    for name, lower in programs.items()
    if name not in LOOPS
  }
  accessed = {name: examine(program).accessed for name, program in compiled.items()}
  if not isinstance(gamma, Tree):
    # The draft's gamma guesses are a first call and a loop of gamma - 1 steps; one was counted. A
    # tree is drafted without a loop.
    accessed["round"] += max(0, gamma - 2) * accessed["draft step"]
  return accessed


def over_a_step(accessed: dict[str, int]) -> dict[str, float]:
  """Bytes of a pass over all nodes, of a draft step, and of what commits a tree's path, over those
  of a decode step, and of a round over those of a plain step.

  The first two are v(gamma) and c (Definition 7) of a machine that waits for memory alone.
  """
  return {
    "verify": accessed["verify"] / accessed["decode step"],
    "draft step": accessed["draft step"] / accessed["decode step"],
    "round": accessed["round"] / accessed["plain step"],
    **{name: accessed[name] / accessed["decode step"] for name in {"commit"} & accessed.keys()},
  }


def report(programs: Programs, gamma: int | Tree) -> dict[str, Any]:
  """All that the compiler says of `programs`; takes minutes.

  Returns:
    'programs': for each the fields of `Program` and the 'seconds' it took to compile. 'hbm_bytes'
    and 'over_a_step': of the functions.
  """
  found = {}
  for name, lower in programs.items():
    since = time.perf_counter()
    program = examine(lower().compile())
    found[name] = {**program._asdict(), "seconds": round(time.perf_counter() - since, 1)}
  accessed = hbm_bytes(programs, gamma)
  return {"programs": found, "hbm_bytes": accessed, "over_a_step": over_a_step(accessed)}


def report_table(report: dict[str, Any], title: str, chip: Chip) -> Table:
  """A report for people; `chip` is what it was compiled for."""
  columns = "program|arguments GB|temporaries GB|peak GB|accessed GB|HBM GB|of a step|HBM ms"
  columns += "|GFLOP|weight copies|collectives|compiled s"
  giga = lambda amount: f"{amount / 1e9:.3f}"
  rows = []
  for name, program in report["programs"].items():
    hbm, ratio = report["hbm_bytes"].get(name), report["over_a_step"].get(name)
    rows.append(
      (
        name,
        *(giga(program[field]) for field in ("arguments", "temporaries", "peak", "accessed")),
        giga(hbm) if hbm else MISSING,
        f"{ratio:.3f}" if ratio else MISSING,
        f"{hbm / chip.hbm_gb_per_s / 1e6:.2f}" if hbm else MISSING,
        f"{program['operations'] / 1e9:.1f}",
        f"{len(program['weight_copies'])}",
        f"{program['collectives']}",
        f"{program['seconds']:.0f}",
      )
    )
  peak = max(program["peak"] for program in report["programs"].values()) / 1e9
  fits = f"At most {peak:.1f} GB of the chip's {chip.hbm_gb:g} are in use."
  legend = LEGEND.format(rate=chip.hbm_gb_per_s)
  return Table(title, tuple(columns.split("|")), tuple(rows), (fits, legend))
