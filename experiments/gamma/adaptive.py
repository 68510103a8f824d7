"""Speculative decoding with a gamma that is chosen in every round (Section 3.5).

`AdaptiveDecoder` chooses it by the expected speed, and `ScheduledDecoder` by whether all draft
tokens of the last round were accepted.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Key

from specdec_jax.core.decode import Decoder, DecodeState, unpacked_rounds
from specdec_jax.core.settings import Settings, traced
from specdec_jax.core.types import DecodeResult, Draft, Model, Params, Verifier


@dataclasses.dataclass(frozen=True)
class AdaptiveDecoder(Settings):
  """Speculative decoder that uses, in each round, the gamma with the highest expected speed.

  alpha of a row is estimated as (accepted + prior accepted) / (verified + prior verified) over the
  draft tokens of the row so far. The expected speed of a batch is E[tokens] (Equation 1), summed
  over the rows that are not done, divided by the time of a round. So gamma depends on earlier
  rounds only, and not on the random numbers of its own round. Given the committed tokens, a round
  is Algorithm 1, which is exact for any gamma. All rows share gamma, so above temperature 0 the
  sampled tokens of a row depend on the other rows of the batch; their distribution does not.

  Attributes:
    target: M_p.
    drafts: versions of one draft for chains of different lengths; gamma is one of these lengths.
      All versions use one state. Each length must be at least 1, because a round without draft
      tokens would not update that state.
    verifier: verifier that accepts or rejects draft tokens.
    eos_id: token that ends a text; None to use `target.eos_id`.
  """

  target: Model
  drafts: tuple[Draft, ...]
  verifier: Verifier
  eos_id: int | None = traced(None)

  @functools.partial(jax.jit, static_argnames="max_new_tokens")
  def run(
    self,
    params: Params,
    prompt: Int[Array, "B P"],
    rng: Key[Array, "*batch"] | Array,
    round_costs: Float[Array, " drafts"],
    prior: Float[Array, " 2"],
    *,
    max_new_tokens: int,
  ) -> DecodeResult:
    """Decode a batch in one jitted program.

    Args:
      params: parameters of target and draft.
      prompt: padded prompts.
      rng: see `Decoder.run`.
      round_costs: time of a round with each of the drafts, in any unit.
      prior: numbers of draft tokens that count as accepted and as rejected before the first round.
        They must not both be 0.
      max_new_tokens: limit for each row, EOS included.

    Returns:
      The result. The arrays of its rounds have room for the largest gamma; draft tokens that were
      not proposed are -1.
    """
    gammas = jnp.array([draft.tree.depth for draft in self.drafts])
    decoders = [Decoder(self.target, d, self.verifier, self.eos_id) for d in self.drafts]
    widest = max(decoders, key=lambda decoder: decoder.draft.tree.depth)  # its block must fit
    max_gamma = widest.draft.tree.depth

    def step(state: DecodeState) -> DecodeState:
      past = unpacked_rounds(widest.draft.tree, state.rounds)
      accepted, rejected = past.acceptance_counts()
      alpha = (accepted + prior[0]) / (accepted + rejected + prior.sum())
      powers = alpha[:, None] ** jnp.arange(max_gamma + 1)
      expected_tokens = jnp.cumsum(powers, axis=1)[:, gammas]  # [B, drafts]
      expected_tokens = jnp.where(state.done[:, None], 0.0, expected_tokens).sum(axis=0)
      rounds = [functools.partial(decoder.round, params) for decoder in decoders]
      return lax.switch((expected_tokens / round_costs).argmax(), rounds, state)

    state = widest.init(params, prompt, rng, max_new_tokens)
    return widest.result(lax.while_loop(lambda s: ~s.done.all(), step, state))


@dataclasses.dataclass(frozen=True)
class ScheduledDecoder(Settings):
  """Speculative decoder whose gamma grows after a round without a rejection, and falls otherwise.

  The wanted gamma grows by 2 if all draft tokens of all rows that are not done were accepted, and
  falls by 1 if not. This is the schedule of transformers' assisted generation (`'heuristic'`).
  gamma depends on earlier rounds only, so every round is exact, as in `AdaptiveDecoder`.

  Attributes:
    target: M_p.
    drafts: versions of one draft for chains of different lengths, in increasing order. A round uses
      the longest one that is not longer than the wanted gamma. See `AdaptiveDecoder`.
    verifier: verifier that accepts or rejects draft tokens.
    eos_id: token that ends a text; None to use `target.eos_id`.
  """

  target: Model
  drafts: tuple[Draft, ...]
  verifier: Verifier
  eos_id: int | None = traced(None)

  @functools.partial(jax.jit, static_argnames="max_new_tokens")
  def run(
    self,
    params: Params,
    prompt: Int[Array, "B P"],
    rng: Key[Array, "*batch"] | Array,
    first: int = 5,
    *,
    max_new_tokens: int,
  ) -> DecodeResult:
    """Decode a batch in one jitted program.

    Args:
      params: parameters of target and draft.
      prompt: padded prompts.
      rng: see `Decoder.run`.
      first: wanted gamma of the first round.
      max_new_tokens: limit for each row, EOS included.

    Returns:
      The result, as in `AdaptiveDecoder`.
    """
    gammas = jnp.array([draft.tree.depth for draft in self.drafts])
    decoders = [Decoder(self.target, d, self.verifier, self.eos_id) for d in self.drafts]
    widest = decoders[-1]

    def step(carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
      state, wanted = carry
      index = jnp.maximum((gammas <= wanted).sum() - 1, 0)
      rounds = [functools.partial(decoder.round, params) for decoder in decoders]
      after = lax.switch(index, rounds, state)
      past = unpacked_rounds(widest.draft.tree, after.rounds)
      num_accepted = past.num_accepted[state.num_rounds[0]]
      all_accepted = (after.done | (num_accepted == gammas[index])).all()
      wanted += jnp.where(all_accepted, 2, -1)
      return after, jnp.clip(wanted, gammas[0], gammas[-1])

    state = widest.init(params, prompt, rng, max_new_tokens)
    first_gamma = jnp.clip(first, gammas[0], gammas[-1])
    state, _ = lax.while_loop(lambda carry: ~carry[0].done.all(), step, (state, first_gamma))
    return widest.result(state)
