"""Bandwidth-bound estimate of the time of a step: bytes that it reads / memory bandwidth.

A decoding step uses each weight for only a few tokens, so reading the weights dominates its time
(Section 3.4). The measured time divided by this estimate is the largest factor by which a step
could become faster, unless weights stay in a processor cache.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params

from specdec_jax.core.decode import Decoder, DecodeState, NullDraft
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Draft
from specdec_jax.measure.timing import interleaved_medians
from specdec_jax.pair import Pair

# Number of rows of the square matrix that is read: 0.27 and 1.07 GB, far larger than any cache.
# Each call reads the matrix READS times, which makes dispatch overhead negligible.
CPU_SIDE, ACCELERATOR_SIDE, READS = 8192, 16384, 4

_GATHERS = {"gather", "dynamic_slice", "slice"}
_LOOPS = {"scan", "while"}


class StepBytes(NamedTuple):
  """Bytes that each device has to read. If a model is sharded, a device reads only its own shard.

  Attributes:
    target_step: bytes read in one step of autoregressive decoding.
    draft_step: bytes read to propose gamma tokens, divided by gamma.
    verify: bytes read in a target forward pass over gamma + 1 tokens, or over the nodes of a tree.
  """

  target_step: float
  draft_step: float
  verify: float


def memory_bandwidth(repeats: int = 5) -> float:
  """Measure the bytes per second at which the first device reads its memory.

  The device multiplies a float32 matrix by a vector, as in decoding, from the left and from the
  right. The faster of the two counts. Each time is the median of the repeats.
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
  pair: Pair, gamma: int, prompt: Array, sampling: Sampling, max_new_tokens: int
) -> StepBytes:
  """Count the bytes that one decoding step, one draft step and one verification have to read.

  The count includes the parameters that are used and all slots of the caches, but not logits and
  activations; see `read_bytes`. The prompts are [B, P], and the draft is built for gamma tokens.
  """
  params = pair.params
  rng = jax.random.split(jax.random.key(0), len(prompt))

  def before(draft: Draft) -> DecodeState:
    """Return the shapes of the state before a round."""
    decoder = Decoder(pair.target.model, draft, pair.verifier_for(sampling))
    init = functools.partial(decoder.init, prompt=prompt, rng=rng, max_new_tokens=max_new_tokens)
    return jax.eval_shape(init, params)

  def extend(state: DecodeState, num_tokens: int) -> float:
    block = jax.ShapeDtypeStruct((len(prompt), num_tokens), jnp.int32)
    num_bytes = read_bytes(pair.target.model.extend, params.target, state.target_cache, block)
    return num_bytes * _shard_share(params.target)

  draft = pair.draft.build(sampling, chain(gamma))
  state = before(draft)
  proposed = read_bytes(draft.propose, params.draft, state.draft_state, state.context, rng)
  return StepBytes(
    target_step=extend(before(NullDraft()), 1),
    draft_step=proposed * _shard_share(params.draft) / gamma,
    verify=extend(state, draft.tree.num_nodes),
  )


def _shard_share(params: Any) -> float:
  """Return the fraction of the parameters that one device holds; 1 if they are not sharded."""
  leaves = jax.tree.leaves(params)
  if not leaves:
    return 1.0
  shard_bytes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves]
  return sum(shard_bytes) / sum(x.nbytes for x in leaves)


def read_bytes(f, *args) -> int:
  """Estimate the bytes that f(*args) reads from its arguments.

  Arguments are arrays or their shapes. An unused argument counts 0 bytes. If an argument is only
  gathered or sliced, only the elements that are read count. Any other argument counts once, with
  all its elements. A scan reads its inputs in every iteration; a while loop is assumed to run once.
  It is assumed that no data stays in a processor cache between iterations, as the weights of a
  small model may.
  """
  reads, in_loops = _reads(jax.make_jaxpr(f)(*args).jaxpr)
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
  return math.prod(var.aval.shape) * var.aval.dtype.itemsize
