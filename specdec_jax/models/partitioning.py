"""Sharding of parameters, caches and the state of the decoding loop across devices.

The name of an array determines its logical axes, and rules map logical axes to the axes of a mesh
of devices. `PartitionedModel` and `PartitionedDraft` add sharding constraints to the arrays of a
model and of a draft, so that the decoding loop need not know about sharding.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from specdec_jax.core.context import Context
from specdec_jax.core.trees import AnyTree, NodeLayout
from specdec_jax.core.types import (
  DraftOptions,
  Extended,
  First,
  Keys,
  Length,
  Outcome,
  Path,
  Proposal,
  Tokens,
  WrappedDraft,
  WrappedModel,
)
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.config import T5Config, TransformerConfig
from specdec_jax.models.families import config_of

AnyMesh = Mesh | AbstractMesh
# Pairs of a logical axis and a mesh axis. A logical axis without a mesh axis is not sharded.
Rules = tuple[tuple[str, str | None], ...]

RULES: Rules = (("batch", "data"), ("heads", "model"), ("mlp", "model"), ("vocab", "model"))
REPLICATED: Rules = (("batch", "data"),)

# Logical axes of each parameter, by the name of the parameter or (for a kernel) of its layer. The
# bias and the scales of a layer have the last of these axes. The axis "heads" has size H or H * D;
# for keys and values, G * D.
PARAM_AXES: dict[str, tuple[str | None, ...]] = {
  "embedding": ("vocab", "embed"),
  **dict.fromkeys(("query", "key", "value"), ("embed", "heads")),
  "out": ("heads", "embed"),
  **dict.fromkeys(("wi", "wi_0", "wi_1"), ("embed", "mlp")),
  "wo": ("mlp", "embed"),
  "logits_dense": ("embed", "vocab"),
  "rel_embedding": ("heads", "buckets"),
  "scale": ("embed",),
}

# First logical axes of each field of a cache, of `Proposal` or of `core.decode.DecodeState`. Its
# other axes are not sharded.
STATE_AXES: dict[str, tuple[str | None, ...]] = {
  **dict.fromkeys(("prompt", "tokens", "length", "prompt_length", "num_rounds"), ("batch",)),
  **dict.fromkeys(("limit", "done", "rng", "not_finite", "hidden"), ("batch",)),
  **dict.fromkeys(("log_probs", "rounds"), ("batch",)),
  "q": ("batch", "draft_tokens", "vocab"),
  **dict.fromkeys(("layers", "cross"), ("batch", "heads")),
  **dict.fromkeys(("cross_bias", "salt"), ("batch",)),
}


def make_mesh(model_parallel: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Return a mesh of devices with the axes 'data' and 'model', the latter of size `model_parallel`.

  Args:
    devices: devices of the mesh; by default those of this process, because processes that decode a
      dataset together run separate programs. `jax.devices()` are those of all processes.
  """
  require_count("model_parallel", model_parallel)
  devices = jax.local_devices() if devices is None else devices
  if len(devices) % model_parallel:
    raise InputError(
      f"model_parallel is {model_parallel} and there are {len(devices)} devices; it must divide "
      "their number. By default, the devices are those of this process; give jax.devices() for "
      "those of all processes."
    )
  shape = len(devices) // model_parallel, model_parallel
  types = AxisType.Auto, AxisType.Auto  # the default, Explicit, requires shardings in the models
  return jax.make_mesh(shape, ("data", "model"), types, devices=devices)


def param_shardings(
  shapes: Any, mesh: AnyMesh, rules: Rules = RULES, config: TransformerConfig | None = None
) -> Any:
  """Return the sharding of each parameter, in a pytree with the structure of `shapes`.

  An array is replicated along an axis whose size is not a multiple of the mesh axis, and if its
  name is not in PARAM_AXES. The size of an axis of heads is its number of heads, so no head is
  divided. Without `config`, that number is inferred from the relative position bias. Without such
  a bias, heads may be divided: the result is still correct, but devices communicate more.

  Args:
    shapes: pytree of parameters, named as in t5x, or of their shapes (`jax.ShapeDtypeStruct`).
    config: configuration of the model; `load_pair` passes it to functions given as shardings.

  Raises:
    InputError: a rule names an unknown axis, or shards heads while `families.for_decoding` has
      concatenated the kernels of queries, keys and values into one matrix.
  """
  leaves = [(_names(path), leaf) for path, leaf in jax.tree.leaves_with_path(shapes)]
  inferred = next((leaf.shape[0] for names, leaf in leaves if "rel_embedding" in names), None)
  heads_over = _mesh_axes(rules, mesh).get("heads")
  if heads_over and mesh.shape[heads_over] > 1:
    if any("query_key_value" in names for names, _ in leaves):
      raise InputError(
        "queries, keys and values lie side by side in one matrix, which cannot be cut by heads; "
        "load the parameters without families.for_decoding to have them over several devices."
      )

  def num_heads(names: list[str]) -> int | None:
    if config is None:
      return inferred
    stack = config
    if isinstance(config, T5Config) and names[0] == "encoder":
      stack = config.encoder
    return stack.kv_heads if {"key", "value"} & {*names} else stack.num_heads

  return _shardings(shapes, PARAM_AXES, mesh, rules, num_heads)


def state_shardings(state: Any, mesh: AnyMesh, rules: Rules = RULES) -> Any:
  """Return the sharding of each array of a cache, a `Proposal` or a `core.decode.DecodeState`."""
  return _shardings(state, STATE_AXES, mesh, rules)


@dataclasses.dataclass(frozen=True)
class PartitionedModel(WrappedModel):
  """Model whose prompts and caches are sharded across the devices of a mesh."""

  mesh: AnyMesh
  rules: Rules = RULES

  def prefill(
    self, params: Any, prompt: Int[Array, "B P"], num_slots: int
  ) -> tuple[Float[Array, "B C E"], Any]:
    prompt = self._placed({"prompt": prompt})["prompt"]
    hidden, cache = self.model.prefill(params, prompt, num_slots)
    return hidden, self._placed(cache)

  def extend(
    self, params: Any, cache: Any, tokens: Tokens, tree: NodeLayout | None = None, first: First = 0
  ) -> Extended:
    logits, hidden, cache = self.model.extend(params, cache, tokens, tree, first)
    return logits, hidden, self._placed(cache)

  def commit(
    self, cache: Any, length: Length, tree: AnyTree | None = None, path: Path = None
  ) -> Any:
    return self._placed(self.model.commit(cache, length, tree, path))

  def _placed(self, state: Any) -> Any:
    return lax.with_sharding_constraint(state, state_shardings(state, self.mesh, self.rules))


@dataclasses.dataclass(frozen=True)
class PartitionedDraft(WrappedDraft):
  """Draft whose state and proposals are sharded across the devices of a mesh.

  A sharding constraint is applied to q, too. Otherwise the compiler would shard the logits of a
  replicated draft by vocabulary, like the target's, and devices would communicate in every step.
  """

  mesh: AnyMesh
  rules: Rules = REPLICATED

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    return self._placed(self.draft.init(params, context, hidden))

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    proposal, state = self.draft.propose(params, state, context, rng)
    return self._placed(proposal), self._placed(state)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    return self._placed(self.draft.observe(params, state, outcome))

  def _placed(self, state: Any) -> Any:
    return lax.with_sharding_constraint(state, state_shardings(state, self.mesh, self.rules))


def sharded(pair: Any, mesh: AnyMesh, rules: Rules = RULES, draft_rules: Rules = REPLICATED) -> Any:
  """Return a pair that is sharded across the devices of a mesh.

  Parameters that already have the right sharding are not moved. By default, the draft's parameters
  are replicated.
  """

  def put(params, rules, config=None):
    return jax.device_put(params, param_shardings(params, mesh, rules, config))

  def build(sampling, tree, options=DraftOptions()):
    return PartitionedDraft(pair.draft.build(sampling, tree, options), mesh, draft_rules)

  model = PartitionedModel(pair.target.model, mesh, rules)
  params = put(pair.target.params, rules, config_of(pair.target.model))
  draft_params = put(pair.draft.params, draft_rules)
  draft = dataclasses.replace(pair.draft, build=build, params=draft_params)
  return pair.with_target(model=model, params=params).with_draft(draft)


def _shardings(
  tree: Any,
  axes_of: dict[str, tuple[str | None, ...]],
  mesh: AnyMesh,
  rules: Rules,
  num_heads: Callable[[list[str]], int | None] | None = None,
) -> Any:
  """Return the sharding of each array; `num_heads` returns the number of heads, given its name."""
  mesh_axes = _mesh_axes(rules, mesh)

  def sharding(path, leaf) -> NamedSharding:
    names = _names(path)
    axes = next((axes_of[name] for name in reversed(names) if name in axes_of), ())
    if names[-1] in ("bias", "kernel_scale"):
      axes = (None,) * (len(leaf.shape) - 1) + axes[-1:]
    heads = num_heads(names) if num_heads else None
    spec = []
    for axis, size in zip(axes, leaf.shape):
      pieces = heads if axis == "heads" and heads else size
      over = mesh_axes.get(axis)
      spec.append(over if over and pieces % mesh.shape[over] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))

  return jax.tree.map_with_path(sharding, tree)


def _mesh_axes(rules: Rules, mesh: AnyMesh) -> dict[str | None, str | None]:
  known = {axis for axes in (*PARAM_AXES.values(), *STATE_AXES.values()) for axis in axes if axis}
  for axis, over in rules:
    if axis not in known or over not in (None, *mesh.shape):
      raise InputError(
        f"a rule cuts {axis!r} over {over!r}; arrays have the axes {', '.join(sorted(known))}, and "
        f"the mesh has {', '.join(mesh.shape)}."
      )
  return dict(rules)


def _names(path) -> list[str]:
  return jax.tree_util.keystr(path, simple=True, separator="/").split("/")
