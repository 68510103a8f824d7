"""What the compiler for TPUs makes of decoding, asked without a TPU: memory, bytes, copies.

Programs are lowered for a described slice on shapes alone, so no weights are needed either.
"""

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Lowered

from specdec_jax.core.decode import Decoder, DecodeState, NullDraft
from specdec_jax.core.sampling import Sampling, sample_logits
from specdec_jax.core.trees import Tree, chain
from specdec_jax.core.types import LoadedTarget, Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.families import AnyConfig, Config, init_params, model_of
from specdec_jax.models.speculator import SpeculatorConfig
from specdec_jax.pairs.speculators import drafter
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


class Site:
  """Described chips as one mesh, and the shapes of what would lie on them."""

  def __init__(self, devices: Sequence[jax.Device]):
    self.mesh = make_mesh(len(devices), devices)
    self.everywhere = NamedSharding(self.mesh, PartitionSpec())

  def array(self, shape, dtype, sharding=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or self.everywhere)

  def params(self, config: AnyConfig, rules: Rules) -> Any:
    """In the model's dtype, and in the layouts that `jax.device_put` gives."""
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    places = param_shardings(shapes, self.mesh, rules)
    return jax.tree.map(lambda x, place: self.array(x.shape, config.dtype, place), shapes, places)

  def lower(self, function: Callable, params, state, places, *args) -> Lowered:
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


def programs(
  target: Config,
  draft: AnyConfig,
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
  Caches of the parts have the compiler's own choice, as they have inside a loop. Where a tree is
  given for gamma there is a program more, 'commit': the path that stands moved to its place. A
  draft on the target's states (`models.speculator`) has 'drafting', all of its guesses, for 'draft
  step'.

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
  site = Site(devices)
  mesh, array, params, part = site.mesh, site.array, site.params, site.lower
  p, verifier = PartitionedModel(model_of(target), mesh), TokenVerifier(sampling)

  p_params, q_params = params(target, RULES), params(draft, draft_rules)
  if isinstance(draft, SpeculatorConfig):
    loaded = LoadedTarget(model_of(target), p_params, vocabulary=None)
    made = drafter(draft.kind, draft, q_params, loaded)
    own, q_params = made.build(sampling, tree), made.params
  else:
    own = ModelDraft(model_of(draft), sampling, tree)
  guesses = PartitionedDraft(own, mesh, draft_rules)
  prompt = array((batch_size, source_tokens), jnp.int32)
  rng = array((batch_size,), jax.eval_shape(jax.random.key, 0).dtype)
  first, _ = jax.eval_shape(p.prompt_tokens, prompt)
  num_slots = first.shape[1] + max_new_tokens + tree.num_nodes

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

  def of_draft(draft: Config) -> Lowered:
    q = PartitionedModel(model_of(draft), mesh, draft_rules)

    def step(draft_params, cache, tokens, rng):
      logits, _, cache = q.extend(draft_params, cache, tokens)
      return q.commit(cache, cache.length + 1), sample_logits(rng, logits[:, 0], sampling)

    _, cache = jax.eval_shape(functools.partial(q.prefill, num_slots=num_slots), q_params, prompt)
    places = state_shardings(cache, mesh, draft_rules)
    tokens = array((batch_size, 1), jnp.int32)
    return part(step, (q_params,), cache, places, tokens, rng)

  def before_round(decoder: Decoder, params: Params) -> tuple[DecodeState, DecodeState]:
    """Return the state before a round, in shapes, and its shardings."""
    init = functools.partial(decoder.init, max_new_tokens=max_new_tokens)
    state = jax.eval_shape(init, params, prompt, rng)
    places = state_shardings(state, mesh, REPLICATED)._replace(
      target_cache=state_shardings(state.target_cache, mesh, RULES),
      draft_state=state_shardings(state.draft_state, mesh, draft_rules),
    )
    return state, places

  def of_drafting() -> Lowered:
    def propose(draft_params, state):
      return state, guesses.propose(draft_params, state.draft_state, state.context, state.rng)[0]

    return part(propose, (q_params,), *before_round(speculative, params_of_pair))

  def of_round(decoder: Decoder, params: Params) -> Lowered:
    def run(params, state):
      return decoder.round(params, state), ()

    return part(run, (params,), *before_round(decoder, params))

  speculative = Decoder(p, guesses, verifier, eos_id=1)
  autoregressive = Decoder(p, NullDraft(), verifier, eos_id=1)
  params_of_pair = Params(p_params, q_params)
  drafting: Programs = {"drafting": of_drafting}
  if not isinstance(draft, SpeculatorConfig):
    drafting = {"draft step": functools.partial(of_draft, draft)}
  commits = {} if tree.is_chain else {"commit": of_commit}
  return {
    "speculative loop": lambda: Decoder.run.lower(
      speculative, params_of_pair, prompt, rng, max_new_tokens=max_new_tokens
    ),
    "plain loop": lambda: Decoder.run.lower(
      autoregressive, Params(p_params), prompt, rng, max_new_tokens=max_new_tokens
    ),
    "plain step": lambda: of_round(autoregressive, Params(p_params)),
    "round": lambda: of_round(speculative, params_of_pair),
    "decode step": lambda: of_target(chain(0)),
    "verify": lambda: of_target(tree),
    **drafting,
    **commits,
  }
