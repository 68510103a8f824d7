"""Arithmetic operations and bytes of the parts of a round, counted in their programs.

A decoding step uses each weight for only a few tokens, so reading the weights dominates its time
(Section 3.4). The bandwidth-bound estimate of the time of a step is the bytes that it reads /
memory bandwidth.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params

from specdec_jax.core.decode import Decoder, DecodeState, NullDraft
from specdec_jax.core.memory import num_bytes
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import AnyPair, Draft
from specdec_jax.measure.costs import interleaved_medians
from specdec_jax.models.kernels import skinny

# Number of rows of the square matrix that is read: 0.27 and 1.07 GB, far larger than any cache.
# Each call reads the matrix READS times, which makes dispatch overhead negligible.
CPU_SIDE, ACCELERATOR_SIDE, READS = 8192, 16384, 4

_GATHERS = {"gather", "dynamic_slice", "slice"}
_LOOPS = {"scan", "while"}


class StepBytes(NamedTuple):
  """Bytes that each device has to read; of a sharded model, it reads only its own shard."""

  target_step: float  # in one step of autoregressive decoding
  draft_step: float  # to propose gamma tokens, divided by gamma
  verify: float  # in a target forward pass over gamma + 1 tokens, or over the nodes of a tree


def memory_bandwidth(repeats: int = 5) -> float:
  """Measure the bytes per second at which the first device reads its memory.

  A float32 matrix is multiplied by a vector from the left and from the right; the faster counts.
  """
  device = jax.devices()[0]
  side = CPU_SIDE if device.platform == "cpu" else ACCELERATOR_SIDE
  matrix = jnp.full((side, side), 1 / side, jnp.float32, device=device)
  vector = jnp.ones(side, jnp.float32, device=device)  # equal to its product

  @functools.partial(jax.jit, static_argnums=0)
  def read(product, matrix, vector):
    return lax.fori_loop(0, READS, lambda _, vector: product(matrix, vector), vector)

  products = (lambda matrix, vector: matrix @ vector), (lambda matrix, vector: vector @ matrix)
  calls = [functools.partial(read, product, matrix, vector) for product in products]
  seconds, _ = interleaved_medians(calls, repeats)
  return READS * matrix.nbytes / min(seconds)


def step_bytes(
  pair: AnyPair, gamma: int, prompt: Array, sampling: Sampling, max_new_tokens: int
) -> StepBytes:
  """Count the bytes that one decoding step, one draft step and one verification have to read.

  The count includes the parameters that are used and all slots of the caches, but not logits and
  activations; see `read_bytes`.
  """
  params = pair.params
  rng = jax.random.split(jax.random.key(0), len(prompt))

  def extend(state: DecodeState, num_tokens: int) -> float:
    block = jax.ShapeDtypeStruct((len(prompt), num_tokens), jnp.int32)
    num_bytes = read_bytes(pair.target.model.extend, params.target, state.target_cache, block)
    return num_bytes * _shard_share(params.target)

  draft = pair.draft.build(sampling, chain(gamma))
  state = _before(pair, draft, prompt, sampling, max_new_tokens)
  plain = _before(pair, NullDraft(), prompt, sampling, max_new_tokens)
  proposed = read_bytes(draft.propose, params.draft, state.draft_state, state.context, rng)
  return StepBytes(
    target_step=extend(plain, 1),
    draft_step=proposed * _shard_share(params.draft) / gamma,
    verify=extend(state, draft.tree.num_nodes),
  )


def _before(
  pair: AnyPair, draft: Draft, prompt: Array, sampling: Sampling, max_new_tokens: int
) -> DecodeState:
  decoder = Decoder(pair.target.model, draft, pair.verifier_for(sampling))
  rng = jax.random.split(jax.random.key(0), len(prompt))
  init = functools.partial(decoder.init, prompt=prompt, rng=rng, max_new_tokens=max_new_tokens)
  return jax.eval_shape(init, pair.params)


def _shard_share(params: Any) -> float:
  leaves = jax.tree.leaves(params)
  if not leaves:
    return 1.0
  shard_bytes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves]
  return sum(shard_bytes) / sum(x.nbytes for x in leaves)


def read_bytes(f, *args) -> int:
  """Estimate the bytes that f(*args) reads from its arguments.

  The arguments may be arrays or `jax.ShapeDtypeStruct`s.

  If an argument is only gathered or sliced, only the elements that are read count. Any other used
  argument counts once. A scan reads its inputs in every iteration; a while loop is assumed to run
  once. No data is assumed to stay in a processor cache between iterations.
  """
  return jaxpr_bytes(jax.make_jaxpr(f)(*args).jaxpr)


def jaxpr_bytes(jaxpr: Jaxpr) -> int:
  """Estimate the bytes that a program reads from its inputs; see `read_bytes`."""
  reads, in_loops = _reads(jaxpr)
  return sum(reads.values()) + in_loops


def _reads(jaxpr: Jaxpr) -> tuple[dict, int]:
  """Return the bytes read from each input of a jaxpr, and the bytes read by the loops in it."""
  reads, in_loops = dict.fromkeys(jaxpr.invars, 0), 0
  for eqn in jaxpr.eqns:
    taken = [_nbytes(var) for var in eqn.invars]  # bytes read from each operand
    inner = [_reads(each) for each in jaxprs_in_params(eqn.params)]
    if eqn.primitive.name in _LOOPS:
      iteration = sum(sum(inputs.values()) + loops for inputs, loops in inner)
      in_loops += eqn.params.get("length", 1) * iteration
      continue
    if eqn.primitive.name in _GATHERS:
      taken[0] = _nbytes(eqn.outvars[0])
    elif inner and len(inner[0][0]) <= len(taken):  # a call; or a cond, whose first operand selects
      branches = zip(*(inputs.values() for inputs, _ in inner))
      taken[-len(inner[0][0]) :] = [max(branch) for branch in branches]
      in_loops += max(loops for _, loops in inner)
    for var, count in zip(eqn.invars, taken):
      if not isinstance(var, Literal) and var in reads:
        reads[var] = min(reads[var] + count, _nbytes(var))
  return reads, in_loops


def _nbytes(var) -> int:
  return num_bytes(var.aval)


def operations_ratio(pair: AnyPair, prompt: Array, sampling: Sampling) -> float:
  """Compute c-hat: operations of a draft step / operations of a target step (Section 3.4).

  Only matmuls count. The operations of a draft step are the difference between proposing two tokens
  and proposing one.
  """
  rng = jax.random.split(jax.random.key(0), len(prompt))
  params = pair.params

  def operations(f, *args) -> int:
    return matmul_operations(jax.make_jaxpr(f)(*args).jaxpr)

  def before(draft: Draft) -> DecodeState:
    return _before(pair, draft, prompt, sampling, max(0, 2 - draft.tree.depth))

  def propose(gamma: int) -> int:
    draft = pair.draft.build(sampling, chain(gamma))
    state = before(draft)
    return operations(draft.propose, params.draft, state.draft_state, state.context, rng)

  block = jax.ShapeDtypeStruct((len(prompt), 1), jnp.int32)
  step = operations(
    pair.target.model.extend, params.target, before(NullDraft()).target_cache, block
  )
  return (propose(2) - propose(1)) / step


def matmul_operations(jaxpr: Jaxpr) -> int:
  """Count multiplications and additions in the matmuls of a program.

  The body of a scan counts once per iteration, and the body of a while loop counts once. Of the
  branches of a conditional, only the most expensive one counts.
  """
  total = 0
  for eqn in jaxpr.eqns:
    inner = [matmul_operations(each) for each in jaxprs_in_params(eqn.params)]
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      terms = math.prod(_shape(eqn.invars[0])[axis] for axis in contracted)
      total += 2 * terms * math.prod(_shape(eqn.outvars[0]))
    elif eqn.params.get("target_name") == skinny.MATMUL:
      total += 2 * _shape(eqn.invars[0])[1] * math.prod(_shape(eqn.outvars[0]))
    elif eqn.params.get("target_name") == skinny.ATTENTION:
      total += 4 * _shape(eqn.invars[1])[2] * math.prod(_shape(eqn.outvars[0]))
    total += eqn.params.get("length", 1) * max(inner, default=0)
  return total


def _shape(var: Any) -> tuple[int, ...]:
  return var.aval.shape
