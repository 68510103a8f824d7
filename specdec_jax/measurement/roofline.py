"""The least time of a step: the bytes that it must read, over the bandwidth of the memory.

A decoding step meets each weight with a few tokens only, so reading the weights is what takes time
(Section 3.4). How near a step comes to that says how much faster it could still be.
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
from specdec_jax.measurement.timing import interleaved_medians
from specdec_jax.pairs import Pair

# A square matrix of so many rows is read: 0.27 and 1.07 GB, far beyond any cache. So often in a
# call that what the call itself takes does not count.
CPU_SIDE, ACCELERATOR_SIDE, READS = 8192, 16384, 4

_GATHERS = {"gather", "dynamic_slice", "slice"}
_LOOPS = {"scan", "while"}


class StepBytes(NamedTuple):
  """Bytes that each of the devices that share a model has to read.

  Attributes:
    target_step: for a step of plain decoding.
    draft_step: for proposing gamma guesses, divided by gamma.
    verify: for the target's pass over gamma + 1 tokens, of a tree over its nodes.
  """

  target_step: float
  draft_step: float
  verify: float


def memory_bandwidth(repeats: int = 5) -> float:
  """Bytes a second at which the first device reads its memory, measured.

  By what decoding does: products of a matrix and a vector, in float32, with the vector on the side
  where they are faster; median of the repeats.
  """
  device = jax.devices()[0]
  side = CPU_SIDE if device.platform == "cpu" else ACCELERATOR_SIDE
  matrix = jnp.full((side, side), 1 / side, jnp.float32, device=device)
  vector = jnp.ones(side, jnp.float32, device=device)  # which its product is too

  @functools.partial(jax.jit, static_argnums=0)
  def read(product, matrix, vector):
    return lax.fori_loop(0, READS, lambda _, vector: product(matrix, vector), vector)

  products = (lambda m, x: m @ x), (lambda m, x: x @ m)
  calls = [functools.partial(read, product, matrix, vector) for product in products]
  seconds, _ = interleaved_medians(calls, repeats)
  return READS * matrix.nbytes / min(seconds)


def step_bytes(
  pair: Pair, gamma: int, prompt: Array, sampling: Sampling, max_new_tokens: int
) -> StepBytes:
  """Of decoding prompt [B, P] with `gamma` guesses a round, as `read_bytes` counts.

  That is the parameters that decoding uses, and the caches with all of their slots. Logits and
  activations are not counted: they are made where they are used.
  """
  params = pair.params
  rng = jax.random.split(jax.random.key(0), len(prompt))

  def before(draft: Draft) -> DecodeState:
    """Return the shapes of the state before a round."""
    decoder = Decoder(pair.target, draft, pair.verifier_for(sampling))
    init = functools.partial(decoder.init, prompt=prompt, rng=rng, max_new_tokens=max_new_tokens)
    return jax.eval_shape(init, params)

  def extend(state, num_tokens: int) -> float:
    block = jax.ShapeDtypeStruct((len(prompt), num_tokens), jnp.int32)
    return read_bytes(pair.target.extend, params.target, state.target_cache, block) * _held(
      params.target
    )

  draft = pair.draft(sampling, chain(gamma))
  state = before(draft)
  proposed = read_bytes(draft.propose, params.draft, state.draft_state, state.context, rng)
  return StepBytes(
    target_step=extend(before(NullDraft()), 1),
    draft_step=proposed * _held(params.draft) / gamma,
    verify=extend(state, draft.tree.num_nodes),
  )


def _held(params: Any) -> float:
  """Share of the parameters that a device holds: 1 unless they are sharded across several."""
  leaves = jax.tree.leaves(params)
  if not leaves:
    return 1.0
  shard = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
  return sum(map(shard, leaves)) / sum(x.nbytes for x in leaves)


def read_bytes(f, *args) -> int:
  """Bytes that f(*args) has to read of its arguments, arrays or their shapes, at least.

  An argument that is only gathered or sliced from counts by what is taken from it, one that nothing
  is made of counts nothing, and any other whole, once. A loop reads what it is given each time
  around (one without a set number of times, once): its turns are apart, and a cache that holds the
  weights of a small model from turn to turn is what makes less than this possible.
  """
  reads, in_loops = _reads(jax.make_jaxpr(f)(*args).jaxpr)
  return sum(reads.values()) + in_loops


def _reads(jaxpr: Jaxpr) -> tuple[dict, int]:
  """Bytes read of each input of a jaxpr, and by the loops in it."""
  reads, in_loops = dict.fromkeys(jaxpr.invars, 0), 0
  for eqn in jaxpr.eqns:
    taken = [_nbytes(var) for var in eqn.invars]  # all of each
    inner = [_reads(each) for each in jaxprs_in_params(eqn.params)]
    if eqn.primitive.name in _LOOPS:
      turns = sum(sum(own.values()) + loops for own, loops in inner)
      in_loops += eqn.params.get("length", 1) * turns
      continue
    if eqn.primitive.name in _GATHERS:
      taken[0] = _nbytes(eqn.outvars[0])
    elif inner and len(inner[0][0]) <= len(taken):  # a call; or a choice, whose index comes first
      branches = zip(*(own.values() for own, _ in inner))
      taken[-len(inner[0][0]) :] = [max(branch) for branch in branches]
      in_loops += max(loops for _, loops in inner)
    for var, count in zip(eqn.invars, taken):
      if not isinstance(var, Literal) and var in reads:
        reads[var] = min(reads[var] + count, _nbytes(var))
  return reads, in_loops


def _nbytes(var) -> int:
  return math.prod(var.aval.shape) * var.aval.dtype.itemsize
