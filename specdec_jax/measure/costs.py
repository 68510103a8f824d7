"""Interleaved timing of calls, and measured times of the parts of a round.

Steps and rounds are timed by running `Decoder.round` in a loop, so that memory and processor caches
are in the same state as in decoding. The time of drafting is the difference between rounds with and
without drafting. The verifier is timed alone.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specdec_jax.core.decode import Decoder, NullDraft
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import Tree, placeholder_shape
from specdec_jax.core.types import AnyPair, Draft, Proposal
from specdec_jax.core.verify.tokens import TokenVerifier

CHAIN = 8  # number of rounds per timed call


def timed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
  """Return the seconds that a call takes until its result is ready, and the result."""
  since = time.perf_counter()
  result = jax.block_until_ready(call(*args, **kwargs))
  return time.perf_counter() - since, result


def interleaved_seconds(
  calls: Any, repeats: int, run: Callable[[Any], tuple[float, Any]] = timed
) -> tuple[Any, Any]:
  """Time several calls in turn, `repeats` times, so that other load affects all of them equally.

  Each call first runs once untimed, to compile. Every second repeat runs in reverse order, so that
  no call always follows the same one. `calls` are in a list, a dict or any other tree of JAX.

  Returns:
    Seconds [repeats] of each call, and the last result of each call, in trees like `calls`.
  """
  flat, structure = jax.tree.flatten(calls)
  results = [run(call)[1] for call in flat]
  seconds = np.zeros((len(flat), repeats))
  for r in range(repeats):
    for i in range(len(flat)) if r % 2 else reversed(range(len(flat))):
      seconds[i, r], results[i] = run(flat[i])
  return jax.tree.unflatten(structure, [*seconds]), jax.tree.unflatten(structure, results)


def interleaved_medians(calls: Any, repeats: int) -> tuple[Any, Any]:
  """Return the median seconds of each call and its last result; see `interleaved_seconds`."""
  seconds, results = interleaved_seconds(calls, repeats)
  return jax.tree.map(lambda each: float(np.median(each)), seconds), results


def ratio_range(ratio: float, repeat_ratios: np.ndarray) -> tuple[float, float] | tuple[None, None]:
  """Return the range that covers a ratio and its values in single repeats [repeats].

  The ratio of medians may lie outside the range of the single repeats. The range is (None, None)
  if there is only one repeat.
  """
  if len(repeat_ratios) < 2:
    return None, None
  ratios = [ratio, *repeat_ratios.tolist()]
  return min(ratios), max(ratios)


class Costs(NamedTuple):
  """Times of the parts of decoding on this device, in seconds."""

  target_step: float  # step of autoregressive decoding: target forward pass over a token, sampling
  draft_step: float  # time that drafting adds to a round, divided by gamma or the depth of a tree
  verify: float  # rest of a round: target forward pass over gamma + 1 tokens, and cache update
  accept: float  # computing p, verifying the draft tokens and sampling the next token
  target_start: float  # before the first step, once per batch; mostly the target's prefill
  draft_start: float  # time that the draft's prefill adds to `target_start`

  @property
  def c(self) -> float:
    """Cost coefficient: the time of a draft step / the time of a target step (Definition 7)."""
    return self.draft_step / self.target_step

  @property
  def v(self) -> float:
    """Time of a round without drafting / the time of a target step; the paper assumes 1."""
    return (self.verify + self.accept) / self.target_step

  @property
  def are_measured(self) -> bool:
    """Return whether all parts of a round are long enough to be timed, as c and v need."""
    return self.target_step > 0 and self.draft_step >= 0 and self.verify + self.accept > 0

  @property
  def prefill_steps(self) -> tuple[float, float]:
    """Prefill time of the target and that of the draft, in target steps."""
    return self.target_start / self.target_step, self.draft_start / self.target_step


class Starts(NamedTuple):
  """Calls that prefill models without running a round, or their seconds."""

  target: Any  # start of autoregressive decoding
  both: Any  # start of speculative decoding


class Looped(NamedTuple):
  """Calls that run a part of a round 0 and CHAIN times, or their seconds."""

  none: Any
  chain: Any

  @property
  def seconds(self) -> float:
    """Time of the part, without the dispatch of a call."""
    return (self.chain - self.none) / CHAIN


class Parts(NamedTuple):
  """Parts of rounds: calls, or their seconds."""

  step: Looped  # step of autoregressive decoding
  undrafted: list[Looped]  # round without drafting, for each draft
  drafted: list[Looped]  # complete round, for each draft
  accept: list[Looped]  # verifier alone, for each draft


def start_calls(pair: AnyPair, draft: Draft, prompt: Array, max_new_tokens: int) -> Starts:
  """Return calls that prefill the models of a pair for a prompt."""
  verifier, rng = pair.verifier_for(Sampling()), jax.random.key(0)

  def call(draft: Draft) -> Callable[[], object]:
    decoder = Decoder(pair.target.model, draft, verifier)
    return functools.partial(_init, decoder, pair.params, prompt, rng, max_new_tokens)

  return Starts(call(NullDraft()), call(draft))


_init = jax.jit(Decoder.init, static_argnames="max_new_tokens")


def round_calls(
  pair: AnyPair,
  drafts: Sequence[Draft],
  prompt: Array,
  sampling: Sampling,
  max_new_tokens: int,
  lenience: float = 1.0,
) -> Parts:
  """Return calls that run the parts of rounds, with the same draft for several trees.

  The tokens do not matter: shapes are fixed, and a row that has ended is still computed.
  `max_new_tokens` sets the number of cache slots.
  """
  target, batch, vocab_size = pair.target.model, len(prompt), pair.target.model.vocab_size
  rng = jax.random.split(jax.random.key(0), batch)
  verifier = pair.verifier_for(sampling, lenience)
  decoders = {
    "step": Decoder(target, NullDraft(), TokenVerifier(sampling), eos_id=-1),
    "undrafted": [Decoder(target, NullDraft(each.tree), verifier, -1) for each in drafts],
    "drafted": [Decoder(target, each, verifier, -1) for each in drafts],
  }

  def over_decoders(f, *rest):
    return jax.tree.map(f, decoders, *rest, is_leaf=lambda each: isinstance(each, Decoder))

  @jax.jit
  def states(params):
    return over_decoders(lambda decoder: decoder.init(params, prompt, rng, max_new_tokens))

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

  def looped(f: Callable[..., Any], *args: Any) -> Looped:
    return Looped(functools.partial(f, *args, 0), functools.partial(f, *args, CHAIN))

  def accept(tree) -> Looped:
    logits = jax.random.normal(jax.random.key(1), (CHAIN, batch, tree.num_nodes, vocab_size))
    draft_tokens = jnp.zeros((batch, tree.num_draft_tokens), jnp.int32)
    shape = placeholder_shape(tree, batch)  # None if static; dynamic trees have no q
    q = None if shape else jnp.full((*draft_tokens.shape, vocab_size), 1 / vocab_size)
    return looped(verifications, tree, Proposal(draft_tokens, q, shape), logits)

  parts = over_decoders(
    lambda decoder, state: looped(rounds, decoder, pair.params, state), states(pair.params)
  )
  return Parts(**parts, accept=[accept(draft.tree) for draft in drafts])


def round_costs(starts: Starts, parts: Parts, depths: Sequence[int]) -> list[Costs]:
  """Compute the costs of each draft, whose tree has the given depth, from the seconds of calls."""
  return [
    Costs(
      target_step=parts.step.seconds,
      draft_step=(drafted.seconds - undrafted.seconds) / depth,
      verify=undrafted.seconds - accept.seconds,
      accept=accept.seconds,
      target_start=starts.target,
      draft_start=max(0.0, starts.both - starts.target),  # noise may make it negative
    )
    for depth, undrafted, drafted, accept in zip(depths, *parts[1:])
  ]


def measure_costs(
  pairs: Sequence[AnyPair],
  trees: Sequence[Tree],
  prompt: Array,
  sampling: Sampling,
  max_new_tokens: int = 64,
  lenience: float = 1.0,
  repeats: int = 9,
) -> list[list[Costs]]:
  """Return, for each pair, the costs of a round with each tree, from interleaved timings.

  The pairs have the same target. The prefill is timed with the first tree. The time of each part is
  the median over the repeats.
  """
  calls = []
  for pair in pairs:
    drafts = [pair.draft.build(sampling, tree) for tree in trees]
    starts = start_calls(pair, drafts[0], prompt, max_new_tokens)
    calls.append((starts, round_calls(pair, drafts, prompt, sampling, max_new_tokens, lenience)))
  seconds, _ = interleaved_medians(calls, repeats)
  depths = [tree.depth for tree in trees]
  return [round_costs(starts, parts, depths) for starts, parts in seconds]
