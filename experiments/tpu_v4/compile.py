"""Compile speculative and autoregressive decoding for a TPU or a GPU, without one.

Programs are lowered for devices that are described to the compiler but not present. Shapes take the
place of arrays, so no weights are needed. `examine` reports the memory, the bytes accessed and the
weight copies of programs for a TPU, and `experiments.gpu.kernels` the kernels of those for a GPU.
"""

import dataclasses
import functools
import importlib.util
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Lowered

from specdec_jax.core.decode import Decoder, DecodeState, NullDraft
from specdec_jax.core.sampling import Sampling, sample_draft_token
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree, chain
from specdec_jax.core.types import Loaded, Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.dynamic import model_draft
from specdec_jax.drafts.heads import AnyConfig, DraftHead
from specdec_jax.errors import InputError
from specdec_jax.load import head_draft
from specdec_jax.measure.plan import DEVICES, Device, param_structs, prompt_of
from specdec_jax.models.families import Config, model_of
from specdec_jax.models.partitioning import (
  REPLICATED,
  RULES,
  PartitionedDraft,
  PartitionedModel,
  Rules,
  make_mesh,
  param_shardings,
  state_shardings,
)

Programs = dict[str, Callable[[], Lowered]]  # name -> function that lowers the program

# By default the compiler prefetches weights to on-chip memory (CMEM on v4, VMEM on other TPUs), and
# also counts the bytes that are read and written there. With this option, the compiler uses and
# counts only HBM.
HBM_ONLY: dict[str, str | bool] = {"xla_msa_enable": False}


@dataclasses.dataclass(frozen=True)
class Chip:
  """A device of `specdec_jax.measure.plan`, for its compiler.

  Attributes:
    example: topology of a slice of one host, as the number of chips in each dimension.
    config: chip configuration of libtpu. With 'megacore', a chip with two cores is one device with
      all of the chip's memory, as on a TPU VM. For a GPU, the file that describes it to XLA.
  """

  device: Device
  example: str
  config: str = "default"


CHIPS = {
  "v4": Chip(DEVICES["v4"], "2x2x1", "megacore"),
  "v5e": Chip(DEVICES["v5e"], "2x2"),
  "v5p": Chip(DEVICES["v5p"], "2x2x1", "megacore"),
  "v6e": Chip(DEVICES["v6e"], "2x2"),
  "h100": Chip(DEVICES["h100"], "1", "gpu/h100.txtpb"),
}
GPUS = ("h100",)

_SIDES = [f"{side}" for side in range(1, 33)]  # no slice has a longer side


def described(topology: str) -> tuple[Chip, Sequence[jax.Device]]:
  """Return the chip and the devices to compile for, such as v4:2x2x1, v5e:2x4 or h100:1.

  A slice may be a part of a host: v4:1x1x1 is one chip. The devices cannot run programs. Call this
  function before any other use of jax, because it restricts this process to the CPU.

  Raises:
    InputError: there is no such topology, or its compiler is not installed: libtpu, or the CUDA
      plugin of jax.
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
      f"There is no topology {topology!r}; give a chip and the number in each direction, as in "
      f"{known}."
    )
  jax.config.update("jax_platforms", "cpu")
  if name in GPUS:
    return chip, _gpus(chip, int(shape))
  if importlib.util.find_spec("libtpu") is None:
    raise InputError("libtpu, the compiler for TPU, is missing; pip install -e '.[tpu]'.")
  os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v4-8",  # any type; without one libtpu logs warnings
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # several processes may compile, since none holds a TPU
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


def gpu_compiler() -> str | None:
  """Return the name of the installed CUDA plugin of jax, which compiles for GPUs, or None."""
  plugins = (f"jax_cuda{version}_plugin" for version in (13, 12))
  return next((name for name in plugins if importlib.util.find_spec(name)), None)


def _gpus(chip: Chip, number: int) -> Sequence[jax.Device]:
  if gpu_compiler() is None:
    raise InputError("The compiler for GPU is missing; pip install -e '.[gpu-compiler]'.")
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver to check
  description = (pathlib.Path(__file__).parents[1] / chip.config).read_text(encoding="utf-8")
  sides = f"1x1x{number}"
  return topologies.get_topology_desc(
    sides, "cuda", topology=sides, target_config=description
  ).devices


class _NamedTarget(PartitionedModel):
  """Target whose instructions have the scope `target` in their names."""

  def extend(self, *args):
    with jax.named_scope("target"):
      return super().extend(*args)


class _NamedDraft(PartitionedDraft):
  """Draft whose instructions have the scope `draft` in their names."""

  def propose(self, *args):
    with jax.named_scope("draft"):
      return super().propose(*args)

  def observe(self, *args):
    with jax.named_scope("draft"):
      return super().observe(*args)


class Site:
  """Mesh of devices that are described but not present, for lowering programs."""

  def __init__(self, devices: Sequence[jax.Device]):
    self.mesh = make_mesh(len(devices), devices)
    self.replicated = NamedSharding(self.mesh, PartitionSpec())

  def array(self, shape, dtype, sharding=None) -> jax.ShapeDtypeStruct:
    """Return a `ShapeDtypeStruct` with a sharding, which is replicated by default."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or self.replicated)

  def params(self, config: AnyConfig, rules: Rules) -> Any:
    """Return the shapes of a model's parameters in their dtypes, sharded by `rules`.

    The parameters have the layout that `jax.device_put` gives them.
    """
    structs = param_structs(config)
    return jax.tree.map(
      lambda x, sharding: self.array(x.shape, x.dtype, sharding),
      structs,
      param_shardings(structs, self.mesh, rules, config),
    )

  def lower(self, function: Callable, params: tuple, state, shardings, *args) -> Lowered:
    """Lower `function(*params, state, *args) -> (state, results)`.

    The state, which has the given shardings, is donated, so it is updated in place. The compiler
    chooses the layout of the state, as it does for the state of a loop.
    """
    formats = jax.tree.map(lambda sharding: Format(Layout.AUTO, sharding), shardings)
    param_places, arg_places = jax.tree.map(lambda x: x.sharding, (params, args))
    jitted = jax.jit(
      function,
      in_shardings=(*param_places, formats, *arg_places),
      out_shardings=(formats, None),
      donate_argnums=len(params),
    )
    return jitted.lower(*params, state, *args)


@dataclasses.dataclass(frozen=True)
class CompileSettings:
  """Settings of the programs to compile.

  Attributes:
    gamma: number of draft tokens per round, or a tree of draft tokens.
    batch_size: number of rows decoded together.
    source_tokens: length of the padded prompt, or of the encoded speech of a Whisper.
    max_new_tokens: maximum number of new tokens of each row.
    sampling: sampling method of target and draft.
    draft_rules: sharding rules of the draft; by default, the draft is replicated.
  """

  gamma: int | AnyTree = 7
  batch_size: int = 1
  source_tokens: int = 128
  max_new_tokens: int = 128
  sampling: Sampling = Sampling()
  draft_rules: Rules = REPLICATED

  @property
  def tree(self) -> AnyTree:
    return chain(self.gamma) if isinstance(self.gamma, int) else self.gamma


def programs(
  target: Config,
  draft: AnyConfig,
  devices: Sequence[jax.Device],
  settings: CompileSettings = CompileSettings(),
) -> Programs:
  """Return functions that lower the programs of speculative and autoregressive decoding, by name.

  The target is sharded across all devices. Names of the programs:
    'speculative loop', 'plain loop': the decoding loops, encoders included;
    'round', 'plain step': a round of speculative decoding, a step of autoregressive decoding;
    'decode step': a target forward pass over one token, and a commit of this token;
    'verify': a target forward pass over all nodes of a round, and a commit of the first node; not
      for dynamic trees, whose shape is known in a round only;
    'draft step': one step of the draft, if it is a model;
    'drafting': the drafting of one round, if the draft is a learned head;
    'commit': moving the accepted path of a tree in the cache; only for static trees.

  Args:
    target: configuration of the target.
    draft: configuration of the draft, or of a learned head.
    devices: devices to compile for; see `described`.
    settings: settings of the programs.

  Raises:
    InputError: the target cannot be sharded across the devices.
  """
  pair = _PairOnSite(target, draft, Site(devices), settings)
  speculative = Decoder(pair.target, pair.draft, pair.verifier, eos_id=1)
  autoregressive = Decoder(pair.target, NullDraft(), pair.verifier, eos_id=1)
  params, target_params = Params(pair.target_params, pair.draft_params), Params(pair.target_params)
  lowered: Programs = {
    "speculative loop": functools.partial(pair.lower_loop, speculative, params),
    "plain loop": functools.partial(pair.lower_loop, autoregressive, target_params),
    "plain step": functools.partial(pair.lower_round, autoregressive, target_params),
    "round": functools.partial(pair.lower_round, speculative, params),
    "decode step": functools.partial(pair.lower_target, chain(0)),
  }
  if not isinstance(settings.tree, DynamicTree):
    lowered["verify"] = functools.partial(pair.lower_target, settings.tree)
  if isinstance(draft, DraftHead):
    lowered["drafting"] = functools.partial(pair.lower_drafting, speculative, params)
  else:
    lowered["draft step"] = functools.partial(pair.lower_draft_step, draft)
  if isinstance(settings.tree, Tree) and not settings.tree.is_chain:
    lowered["commit"] = pair.lower_commit
  return lowered


class _PairOnSite:
  """Target and draft on described devices, with parameters and prompts as shapes."""

  def __init__(self, target: Config, draft: AnyConfig, site: Site, settings: CompileSettings):
    self.site, self.settings, self.tree = site, settings, settings.tree
    self.verifier = TokenVerifier(settings.sampling)
    self.target = _NamedTarget(model_of(target), site.mesh)
    self.target_params = site.params(target, RULES)
    self.draft_params = site.params(draft, settings.draft_rules)
    if isinstance(draft, DraftHead):
      loaded = Loaded("target", model_of(target), self.target_params, vocabulary=None)
      spec = head_draft(draft.kind, draft, self.draft_params, loaded)
      unsharded, self.draft_params = spec.build(settings.sampling, self.tree), spec.params
    else:
      unsharded = model_draft(model_of(draft), settings.sampling, self.tree)
    self.draft = _NamedDraft(unsharded, site.mesh, settings.draft_rules)
    self.prompt = prompt_of(target, settings.batch_size, settings.source_tokens, site.array)
    key_dtype = jax.eval_shape(jax.random.key, 0).dtype
    self.rng = site.array((settings.batch_size,), key_dtype)
    start_tokens, _ = jax.eval_shape(self.target.prompt_tokens, self.prompt)
    self.num_slots = start_tokens.shape[1] + settings.max_new_tokens + self.tree.num_nodes

  def lower_loop(self, decoder: Decoder, params: Params) -> Lowered:
    """Lower a decoding loop."""
    limit = self.settings.max_new_tokens
    return Decoder.run.lower(decoder, params, self.prompt, self.rng, max_new_tokens=limit)

  def lower_round(self, decoder: Decoder, params: Params) -> Lowered:
    """Lower one round of a decoder."""

    def run(params, state):
      return decoder.round(params, state), ()

    return self.site.lower(run, (params,), *self._before_round(decoder, params))

  def lower_drafting(self, decoder: Decoder, params: Params) -> Lowered:
    """Lower the drafting of one round: one call of `Draft.propose`."""

    def propose(draft_params, state):
      proposal, _ = self.draft.propose(draft_params, state.draft_state, state.context, state.rng)
      return state, proposal

    return self.site.lower(propose, (params.draft,), *self._before_round(decoder, params))

  def lower_target(self, tree: Tree) -> Lowered:
    """Lower a target forward pass over the nodes of a tree, and a commit of its first node."""

    def extend(target_params, cache, tokens):
      logits, _, cache = self.target.extend(target_params, cache, tokens, tree)
      return self.target.commit(cache, cache.length + 1), logits

    tokens = self.site.array((self.settings.batch_size, tree.num_nodes), jnp.int32)
    cache, shardings = self._target_cache()
    return self.site.lower(extend, (self.target_params,), cache, shardings, tokens)

  def lower_commit(self) -> Lowered:
    """Lower the commit of an accepted path of full depth."""

    def commit(cache, path):
      return self.target.commit(cache, cache.length + self.tree.depth, self.tree, path), ()

    path = self.site.array((self.settings.batch_size, self.tree.depth), jnp.int32)
    cache, shardings = self._target_cache()
    return self.site.lower(commit, (), cache, shardings, path)

  def lower_draft_step(self, config: Config) -> Lowered:
    """Lower one step of a draft model: a forward pass over one token, a sample, and a commit."""
    rules = self.settings.draft_rules
    model = PartitionedModel(model_of(config), self.site.mesh, rules)

    def step(draft_params, cache, tokens, rng):
      with jax.named_scope("draft"):
        logits, _, cache = model.extend(draft_params, cache, tokens)
        cache = model.commit(cache, cache.length + 1)
        return cache, sample_draft_token(rng, logits[:, 0], self.settings.sampling)

    prefill = functools.partial(model.prefill, num_slots=self.num_slots)
    _, cache = jax.eval_shape(prefill, self.draft_params, self.prompt)
    shardings = state_shardings(cache, self.site.mesh, rules)
    tokens = self.site.array((self.settings.batch_size, 1), jnp.int32)
    return self.site.lower(step, (self.draft_params,), cache, shardings, tokens, self.rng)

  def _target_cache(self) -> tuple[Any, Any]:
    """Return the target's cache after the prompt, as shapes, and its shardings."""
    prefill = functools.partial(self.target.prefill, num_slots=self.num_slots)
    _, cache = jax.eval_shape(prefill, self.target_params, self.prompt)
    return cache, state_shardings(cache, self.site.mesh, RULES)

  def _before_round(self, decoder: Decoder, params: Params) -> tuple[DecodeState, DecodeState]:
    """Return the state before a round, as shapes, and its shardings."""
    init = functools.partial(decoder.init, max_new_tokens=self.settings.max_new_tokens)
    state = jax.eval_shape(init, params, self.prompt, self.rng)
    mesh = self.site.mesh
    shardings = state_shardings(state, mesh, REPLICATED)._replace(
      target_cache=state_shardings(state.target_cache, mesh, RULES),
      draft_state=state_shardings(state.draft_state, mesh, self.settings.draft_rules),
    )
    return state, shardings
