"""What decoding is made of: the time of a plain step and of the parts of a round, and operations.

A plain step and a round are timed by running the decoding loop's own body, which finds memory and
caches as they are in decoding; drafting by leaving it out. Accepting is timed by itself.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Jaxpr, jaxprs_in_params

from specdec_jax.core.decode import Decoder, DecodeState, NullDraft
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import Tree, chain, placeholder_shape
from specdec_jax.core.types import Draft, Proposal
from specdec_jax.kernels import skinny
from specdec_jax.measurement.timing import interleaved_medians
from specdec_jax.pairs import Pair

CHAIN = 8  # rounds a call


class Costs(NamedTuple):
  """Seconds on this device.

  Attributes:
    target_step: a round of plain decoding: read one token, sample the next, commit it.
    draft_step: what drafting adds to a round, divided by gamma (Definition 7 counts gamma runs of
      M_q), of a tree by its depth.
    verify: a round without drafting and accepting: the target's pass over gamma + 1 tokens, of a
      tree over its nodes, and the little it takes to commit them.
    accept: make the target's logits distributions, judge the guesses, sample the next token.
    target_start: plain decoding up to its first round, once a text: mostly what the target takes to
      read the prompt.
    draft_start: what the draft, reading it too, adds.
  """

  target_step: float
  draft_step: float
  verify: float
  accept: float
  target_start: float
  draft_start: float

  @property
  def c(self) -> float:
    """Cost coefficient (Definition 7)."""
    return self.draft_step / self.target_step

  @property
  def v(self) -> float:
    """Time of a round without drafting over that of a plain step; the paper takes it as 1."""
    return (self.verify + self.accept) / self.target_step


def start_calls(
  pair: Pair, draft: Draft, prompt: Array, max_new_tokens: int
) -> list[Callable[[], object]]:
  """Return calls to be timed: autoregressive decoding of a prompt up to its first step, and
  speculative decoding up to its first round."""
  verifier = pair.verifier_for(Sampling())
  decoders = [Decoder(pair.target, one, verifier) for one in (NullDraft(), draft)]
  rng = jax.random.key(0)
  return [
    functools.partial(_init, decoder, pair.params, prompt, rng, max_new_tokens)
    for decoder in decoders
  ]


_init = jax.jit(Decoder.init, static_argnames=("self", "max_new_tokens"))


def round_calls(
  pair: Pair,
  drafts: Sequence[Draft],
  prompt: Array,
  sampling: Sampling,
  max_new_tokens: int,
  lenience: float = 1.0,
) -> list[Callable[[], object]]:
  """Calls to be timed; `round_costs` knows which is which.

  First a plain step; then for each of the drafts, which differ in their trees only, a round without
  drafting; for each a round; for each accepting. Of all of them there are two calls, one that runs
  it not at all and one that runs it CHAIN times, so that what a call itself costs cancels. They
  decode prompt [B, P], in the shapes of `max_new_tokens`. What is guessed and accepted does not
  matter: shapes are fixed, and a row that has ended goes on computing.
  """
  target, batch, vocab_size = pair.target, len(prompt), pair.target.vocab_size
  rng = jax.random.split(jax.random.key(0), batch)
  free = [NullDraft(), *(NullDraft(draft.tree) for draft in drafts)]
  verifier = pair.verifier_for(sampling, lenience)

  decoders = [Decoder(target, draft, verifier, eos_id=-1) for draft in (*free, *drafts)]

  @jax.jit
  def states(params):
    return [decoder.init(params, prompt, rng, max_new_tokens) for decoder in decoders]

  @functools.partial(jax.jit, static_argnums=0)
  def rounds(decoder, params, state, count):
    return lax.fori_loop(0, count, lambda _, state: decoder.round(params, state), state)

  @functools.partial(jax.jit, static_argnums=0)
  def verdicts(tree, proposal, logits, count):
    def judge(i, _):
      keys = jax.vmap(jax.random.fold_in, (0, None))(rng, i)
      return verifier.verify(keys, proposal.tree or tree, proposal, logits[i])

    return lax.fori_loop(0, count, judge, judge(0, None))

  def accept(tree):
    logits = jax.random.normal(jax.random.key(1), (CHAIN, batch, tree.num_nodes, vocab_size))
    guesses = jnp.zeros((batch, tree.num_guesses), jnp.int32)
    shape = placeholder_shape(tree, batch)  # whose guesses are all chosen
    q = None if shape else jnp.full((*guesses.shape, vocab_size), 1 / vocab_size)
    return functools.partial(verdicts, tree, Proposal(guesses, q, shape), logits)

  parts = [
    *(functools.partial(rounds, d, pair.params, s) for d, s in zip(decoders, states(pair.params))),
    *(accept(draft.tree) for draft in drafts),
  ]
  return [functools.partial(part, count) for part in parts for count in (0, CHAIN)]


def round_costs(
  starts: Sequence[float], rounds: Sequence[float], depths: Sequence[int]
) -> list[Costs]:
  """Costs of rounds, from the seconds that `start_calls` and `round_calls` took.

  `depths` are those of the drafts' trees: of chains, their gammas.
  """
  plain_start, start = starts
  target_step, *parts = np.diff(np.reshape(rounds, (-1, 2)))[:, 0] / CHAIN
  return [
    Costs(
      target_step=target_step,
      draft_step=(whole - undrafted) / depth,
      verify=undrafted - accept,
      accept=accept,
      target_start=plain_start,
      draft_start=start - plain_start,
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
  """The costs of a round with each of the trees by themselves, for prompt [B, P], interleaved.

  What is done once a text is of the first.
  """
  drafts = [pair.draft(sampling, tree) for tree in trees]
  starts = start_calls(pair, drafts[0], prompt, max_new_tokens)
  rounds = round_calls(pair, drafts, prompt, sampling, max_new_tokens)
  seconds, _ = interleaved_medians([*starts, *rounds], repeats)
  return round_costs(seconds[:2], seconds[2:], [tree.depth for tree in trees])


def operations_ratio(pair: Pair, prompt: Array, sampling: Sampling) -> float:
  """c-hat, arithmetic operations of a draft step / of a target step (Section 3.4).

  Those of matrix products, for prompt [B, P]; all others are few beside them. A draft step is what
  proposing two guesses takes more than proposing one.
  """
  rng = jax.random.split(jax.random.key(0), len(prompt))
  params = pair.params

  def operations(f, *args) -> int:
    return product_operations(jax.make_jaxpr(f)(*args).jaxpr)

  def before(draft: Draft) -> DecodeState:
    """Return the shapes of the state before a round, with as many slots whatever gamma is."""
    decoder = Decoder(pair.target, draft, pair.verifier_for(sampling))
    limit = max(0, 2 - draft.tree.depth)
    init = functools.partial(decoder.init, prompt=prompt, rng=rng, max_new_tokens=limit)
    return jax.eval_shape(init, params)

  def propose(gamma: int) -> int:
    draft = pair.draft(sampling, chain(gamma))
    state = before(draft)
    return operations(draft.propose, params.draft, state.draft_state, state.context, rng)

  block = jax.ShapeDtypeStruct((len(prompt), 1), jnp.int32)
  step = operations(pair.target.extend, params.target, before(NullDraft()).target_cache, block)
  return (propose(2) - propose(1)) / step


def product_operations(jaxpr: Jaxpr) -> int:
  """Multiplications and additions in the matrix products of a program.

  Loops count as often as they go round, those without a set number of times once; of the branches
  of a choice the dearest counts.
  """
  total, shape = 0, lambda var: var.aval.shape
  for eqn in jaxpr.eqns:
    inner = [product_operations(each) for each in jaxprs_in_params(eqn.params)]
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      terms = math.prod(shape(eqn.invars[0])[axis] for axis in contracted)
      total += 2 * terms * math.prod(shape(eqn.outvars[0]))
    elif eqn.params.get("target_name") == skinny.MATMUL:
      total += 2 * shape(eqn.invars[0])[1] * math.prod(shape(eqn.outvars[0]))
    elif eqn.params.get("target_name") == skinny.ATTENTION:
      total += 4 * shape(eqn.invars[1])[2] * math.prod(shape(eqn.outvars[0]))
    total += eqn.params.get("length", 1) * max(inner, default=0)
  return total
