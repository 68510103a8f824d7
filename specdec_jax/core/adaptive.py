"""Speculative decoding whose gamma follows acceptance, round by round (Section 3.5)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.core.decode import State, all_rounds, decoded, one_round, start
from specdec_jax.core.sampling import split_keys
from specdec_jax.core.types import DecodeResult, Draft, Model, Verifier
from specdec_jax.errors import require_count


@functools.partial(
  jax.jit,
  static_argnames=("target", "drafts", "max_new_tokens", "verifier", "eos_id"),
)
def adaptive_decode(
  target: Model,
  drafts: tuple[Draft, ...],
  target_params: Any,
  draft_params: Any,
  prompt: Array,
  rng: Array,
  round_costs: Array,
  prior: Array,
  *,
  max_new_tokens: int,
  verifier: Verifier,
  eos_id: int | None = None,
) -> DecodeResult:
  """Decode a batch by speculation, each round with the gamma that promises most for its cost.

  A row's alpha is taken to be (accepted + prior accepted) / (judged + prior judged), over its own
  guesses so far; the batch takes the gamma whose E[tokens] (Equation 1), summed over the rows that
  are not done, is the most a unit of time. So gamma depends on rounds that are over, never on the
  randomness of its own: given what is committed a round is Algorithm 1 with some gamma, and emits
  the target's tokens whichever that is. Above temperature 0 a row's very tokens, though not their
  distribution, depend on its neighbours, as gamma does.

  Args:
    drafts: one model with a chain of each gamma to choose from, all >= 1: they share their state,
      which a round without a draft would leave behind.
    round_costs: [N], time of a round with each of the drafts, in any unit.
    prior: [2], guesses taken as accepted and rejected before the first; not both 0.

  The rest of the arguments, and the result, as in `decoding.speculative_decode`; of a round's
  record of guesses, as wide as the largest gamma, those that were not made are -1.
  """
  require_count("max_new_tokens", max_new_tokens)
  rng = split_keys(rng, len(prompt))
  eos_id = target.eos_id if eos_id is None else eos_id
  params = target_params, draft_params
  gammas = jnp.array([draft.tree.depth for draft in drafts])
  widest = max(drafts, key=lambda draft: draft.tree.depth)  # buffers and caches hold its block
  rounds = [
    functools.partial(one_round, target, draft, *params, verifier, rng, eos_id) for draft in drafts
  ]

  def step(s: State) -> State:
    accepted, rejected = s.rounds.judged()
    alpha = (accepted + prior[0]) / (accepted + rejected + prior.sum())
    powers = alpha[:, None] ** jnp.arange(widest.tree.depth + 1)
    tokens = jnp.cumsum(powers, axis=1)[:, gammas]  # [B, N]
    gains = jnp.where(s.done[:, None], 0.0, tokens).sum(axis=0) / round_costs
    return lax.switch(gains.argmax(), rounds, s)

  return decoded(all_rounds(step, start(target, widest, *params, prompt, max_new_tokens)))
