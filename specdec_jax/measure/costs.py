"""Measured times of a decoding step and of the parts of a round, and counts of operations.

Steps and rounds are timed by running `Decoder.round` in a loop, so that memory and processor caches
are in the same state as in decoding. The time of drafting is the difference between rounds with and
without drafting. The verifier is timed alone.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Jaxpr, jaxprs_in_params

from specdec_jax.core.decode import Decoder, DecodeState, NullDraft
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import Tree, chain, placeholder_shape
from specdec_jax.core.types import Draft, Proposal
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.measure.timing import interleaved_medians
from specdec_jax.models.kernels import skinny
from specdec_jax.pair import Pair

CHAIN = 8  # number of rounds per timed call


class Costs(NamedTuple):
  """Times of the parts of decoding on this device, in seconds.

  Attributes:
    target_step: time of one step of autoregressive decoding: a target forward pass over one token,
      sampling, and the cache update.
    draft_step: time that drafting adds to a round, divided by gamma or by the depth of a tree.
      (Definition 7 counts gamma runs of the approximation model.)
    verify: time of a round without drafting and without `accept`: the target forward pass over
      gamma + 1 tokens, or over the nodes of a tree, and the cache update.
    accept: time to compute p from the logits, verify the draft tokens and sample the next token.
    target_start: time of autoregressive decoding before its first step, once per batch; mostly the
      target's prefill.
    draft_start: time that the draft's prefill adds to `target_start`.
  """

  target_step: float
  draft_step: float
  verify: float
  accept: float
  target_start: float
  draft_start: float

  @property
  def c(self) -> float:
    """Cost coefficient: the time of a draft step / the time of a target step (Definition 7)."""
    return self.draft_step / self.target_step

  @property
  def v(self) -> float:
    """Time of a round without drafting / the time of a target step; the paper assumes 1."""
    return (self.verify + self.accept) / self.target_step


def start_calls(
  pair: Pair, draft: Draft, prompt: Array, max_new_tokens: int
) -> list[Callable[[], object]]:
  """Return two calls to be timed, each of which prefills models without running a round.

  The first call is for autoregressive decoding, the second for speculative decoding.
  """
  verifier = pair.verifier_for(Sampling())
  decoders = [Decoder(pair.target.model, one, verifier) for one in (NullDraft(), draft)]
  rng = jax.random.key(0)
  return [
    functools.partial(_init, decoder, pair.params, prompt, rng, max_new_tokens)
    for decoder in decoders
  ]


_init = jax.jit(Decoder.init, static_argnames="max_new_tokens")


def round_calls(
  pair: Pair,
  drafts: Sequence[Draft],
  prompt: Array,
  sampling: Sampling,
  max_new_tokens: int,
  lenience: float = 1.0,
) -> list[Callable[[], object]]:
  """Return calls that time the parts of rounds, in the order that `round_costs` expects.

  The parts are: a step of autoregressive decoding; for each draft, a round without drafting; for
  each draft, a complete round; for each draft, the verifier alone (`Costs.accept`). Each part has
  two calls, with 0 and with CHAIN iterations, so that dispatch overhead cancels. The tokens do not
  matter: shapes are fixed, and a row that has ended is still computed.

  Args:
    pair: target and verifier.
    drafts: the same draft with several trees.
    prompt: padded prompts [B, P].
    sampling: sampling method.
    max_new_tokens: maximum number of new tokens; it sets the number of cache slots.
    lenience: lenience of the verifier.
  """
  target, batch, vocab_size = pair.target.model, len(prompt), pair.target.model.vocab_size
  rng = jax.random.split(jax.random.key(0), batch)
  verifier = pair.verifier_for(sampling, lenience)
  autoregressive = Decoder(target, NullDraft(), TokenVerifier(sampling), eos_id=-1)
  with_tokens = [*(NullDraft(draft.tree) for draft in drafts), *drafts]
  decoders = [autoregressive, *(Decoder(target, draft, verifier, -1) for draft in with_tokens)]

  @jax.jit
  def states(params):
    return [decoder.init(params, prompt, rng, max_new_tokens) for decoder in decoders]

  @functools.partial(jax.jit, static_argnums=0)
  def rounds(decoder, params, state, count):
    return lax.fori_loop(0, count, lambda _, state: decoder.round(params, state), state)

  @functools.partial(jax.jit, static_argnums=0)
  def verifications(tree, proposal, logits, count):
    def verify(i, _):
      keys = jax.vmap(jax.random.fold_in, (0, None))(rng, i)
      if verifier.uses_position_keys:
        keys = jax.vmap(jax.random.split, (0, None))(keys, tree.depth + 1)
      return verifier.verify(keys, proposal.tree or tree, proposal, logits[i])

    return lax.fori_loop(0, count, verify, verify(0, None))

  def accept(tree):
    logits = jax.random.normal(jax.random.key(1), (CHAIN, batch, tree.num_nodes, vocab_size))
    guesses = jnp.zeros((batch, tree.num_guesses), jnp.int32)
    shape = placeholder_shape(tree, batch)  # None if static; dynamic trees have no q
    q = None if shape else jnp.full((*guesses.shape, vocab_size), 1 / vocab_size)
    return functools.partial(verifications, tree, Proposal(guesses, q, shape), logits)

  parts = [
    *(functools.partial(rounds, d, pair.params, s) for d, s in zip(decoders, states(pair.params))),
    *(accept(draft.tree) for draft in drafts),
  ]
  return [functools.partial(part, count) for part in parts for count in (0, CHAIN)]


def round_costs(
  starts: Sequence[float], rounds: Sequence[float], depths: Sequence[int]
) -> list[Costs]:
  """Compute the costs of each draft from timings.

  Args:
    starts: seconds of each call that `start_calls` returns.
    rounds: seconds of each call that `round_calls` returns.
    depths: depth of each draft's tree; for a chain, it is gamma.
  """
  target_start, both_start = starts
  target_step, *parts = np.diff(np.reshape(rounds, (-1, 2)))[:, 0] / CHAIN
  return [
    Costs(
      target_step=target_step,
      draft_step=(whole - undrafted) / depth,
      verify=undrafted - accept,
      accept=accept,
      target_start=target_start,
      draft_start=both_start - target_start,
    )
    for depth, undrafted, whole, accept in zip(depths, *np.reshape(parts, (3, -1)))
  ]


def measure_costs(
  pair: Pair,
  trees: Sequence[Tree],
  prompt: Array,
  sampling: Sampling,
  max_new_tokens: int = 64,
  repeats: int = 9,
) -> list[Costs]:
  """Measure the costs of a round with each tree, with interleaved timings.

  Args:
    pair: target and draft.
    trees: trees of draft tokens. The prefill is timed with the first tree.
    prompt: padded prompts [B, P].
    sampling: sampling method.
    max_new_tokens: maximum number of new tokens; it sets the number of cache slots.
    repeats: number of timings of each part; their median is used.
  """
  return compare_costs([pair], trees, prompt, sampling, max_new_tokens, repeats)[0]


def compare_costs(
  pairs: Sequence[Pair],
  trees: Sequence[Tree],
  prompt: Array,
  sampling: Sampling,
  max_new_tokens: int = 64,
  repeats: int = 9,
) -> list[list[Costs]]:
  """Measure the costs of a round with each pair and tree, with interleaved timings.

  Args:
    pairs: pairs of the same target.
    trees: trees of draft tokens. The prefill is timed with the first tree.
    prompt: padded prompts [B, P].
    sampling: sampling method.
    max_new_tokens: maximum number of new tokens; it sets the number of cache slots.
    repeats: number of timings of each part; their median is used.

  Returns:
    For each pair, the costs with each tree.
  """
  calls: list[Callable[[], object]] = []
  for pair in pairs:
    drafts = [pair.draft.build(sampling, tree) for tree in trees]
    calls += start_calls(pair, drafts[0], prompt, max_new_tokens)
    calls += round_calls(pair, drafts, prompt, sampling, max_new_tokens)
  seconds, _ = interleaved_medians(calls, repeats)
  depths = [tree.depth for tree in trees]
  return [
    round_costs(of_pair[:2], of_pair[2:], depths)
    for of_pair in np.reshape(seconds, (len(pairs), -1)).tolist()
  ]


def operations_ratio(pair: Pair, prompt: Array, sampling: Sampling) -> float:
  """Compute c-hat: operations of a draft step / operations of a target step (Section 3.4).

  Only the operations of matmuls count, because others are few. The operations of a draft step are
  the difference between proposing two tokens and proposing one.
  """
  rng = jax.random.split(jax.random.key(0), len(prompt))
  params = pair.params

  def operations(f, *args) -> int:
    return matmul_operations(jax.make_jaxpr(f)(*args).jaxpr)

  def before(draft: Draft) -> DecodeState:
    """Return the shapes of the state before a round, with the same slots for gamma 0, 1 and 2."""
    decoder = Decoder(pair.target.model, draft, pair.verifier_for(sampling))
    limit = max(0, 2 - draft.tree.depth)
    init = functools.partial(decoder.init, prompt=prompt, rng=rng, max_new_tokens=limit)
    return jax.eval_shape(init, params)

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
