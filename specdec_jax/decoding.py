"""The decoding loop: rounds of draft, verify, accept, commit (Algorithm 1), in fixed shapes.

It knows protocols only: no model and no draft. Plain decoding is the same loop with a draft
that guesses nothing, so both share one target pass, one way to sample and one way to stop.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.errors import InputError, require_count
from specdec_jax.memory import require_memory
from specdec_jax.protocols import Decoded, Draft, Model, Rounds
from specdec_jax.sampling import Sampling, distribution, split_keys
from specdec_jax.speculative import accept_near_argmax, speculative_sample


class State(NamedTuple):
  """What a round begins with.

  Attributes:
    tokens: [B, T + slack] committed tokens, unused past length.
    length: [B]. begins: [B], the length before the first round.
    done: [B].
    target: cache of the target: length - 1 tokens. draft: what the draft keeps.
    rounds: those so far. num_rounds: [], how many.
    not_finite: [B], as in `Decoded`.
  """

  tokens: Array
  length: Array
  begins: Array
  done: Array
  target: Any
  draft: Any
  rounds: Rounds
  num_rounds: Array
  not_finite: Array


@functools.cache
def free_draft(vocab_size: int, gamma: int = 0) -> Draft:
  """Guesses token 0 and reads nothing: a round with it is a round without drafting."""

  def propose(params, state, tokens, length, rng):
    guesses = jnp.zeros((tokens.shape[0], gamma), jnp.int32)
    return guesses, jax.nn.one_hot(guesses, vocab_size), state

  return Draft(start=lambda params, prompt, num_slots: (), propose=propose, gamma=gamma)


@functools.partial(jax.jit, static_argnames=("target", "max_new_tokens", "sampling", "eos_id"))
def autoregressive_decode(
  target: Model,
  params: Any,
  prompt: Array,
  rng: Array,
  *,
  max_new_tokens: int,
  sampling: Sampling,
  eos_id: int | None = None,
) -> Decoded:
  """Decode one token a target pass: the baseline, in one jitted program.

  Arguments and result as in `speculative_decode`; a round emits one token.
  """
  loop = functools.partial(_decode, target, free_draft(target.vocab_size), params, None)
  return loop(prompt, rng, max_new_tokens, sampling, 1.0, eos_id)


@functools.partial(
  jax.jit,
  static_argnames=("target", "draft", "max_new_tokens", "sampling", "lenience", "eos_id"),
)
def speculative_decode(
  target: Model,
  draft: Draft,
  target_params: Any,
  draft_params: Any,
  prompt: Array,
  rng: Array,
  *,
  max_new_tokens: int,
  sampling: Sampling,
  lenience: float = 1.0,
  eos_id: int | None = None,
) -> Decoded:
  """Decode a batch by speculation (Algorithm 1), in one jitted program.

  Args:
    target: M_p, whose distribution the output has.
    draft: M_q with its gamma; it must sample as `sampling` says to be useful, never to be exact.
    target_params: of the target.
    draft_params: of the draft.
    prompt: [B, P], padded.
    rng: keys [B], one a row: a row's output does not depend on its neighbours; or one key, which is
      split. Those of `jax.random.key` or of `PRNGKey`.
    max_new_tokens: limit for each row, EOS counted.
    sampling: how target logits become p.
    lenience: l of Appendix A.5; 1 for exactness.
    eos_id: ends a row; None for the target's.

  Returns:
    Tokens, lengths and a record of each round.
  """
  loop = functools.partial(_decode, target, draft, target_params, draft_params)
  return loop(prompt, rng, max_new_tokens, sampling, lenience, eos_id)


def _decode(
  target, draft, target_params, draft_params, prompt, rng, limit, sampling, lenience, eos_id
) -> Decoded:
  require_count("max_new_tokens", limit)
  rng = split_keys(rng, len(prompt))
  eos_id = target.eos_id if eos_id is None else eos_id
  models = target, draft, target_params, draft_params
  step = functools.partial(one_round, *models, rng, sampling, lenience, eos_id)
  return decoded(all_rounds(step, begin(*models, prompt, limit)))


def all_rounds(step: Callable[[State], State], s: State) -> State:
  """The state after `step`, a round, has been run from `s` until every row is done."""
  return lax.while_loop(lambda s: ~s.done.all(), step, s)


def decoded(s: State) -> Decoded:
  """What a state holds of the text: its new tokens, and the record of its rounds."""
  new = s.begins[:, None] + jnp.arange(len(s.rounds.num_accepted))
  tokens = jnp.where(new < s.length[:, None], jnp.take_along_axis(s.tokens, new, axis=1), 0)
  return Decoded(tokens, s.length - s.begins, s.rounds, s.num_rounds, s.not_finite)


def begin(target: Model, draft: Draft, target_params, draft_params, prompt, limit: int) -> State:
  """Before the first of the rounds that decode `limit` tokens: both models have read the prompt.

  Raises InputError if that is more than memory holds; traced, as it mostly is, before it is tried.
  """
  batch, gamma = prompt.shape[0], draft.gamma
  first, begins = target.begin(prompt)
  # A row at the limit may still write one block: buffer and caches have gamma + 1 slots to spare.
  num_slots = first.shape[1] + limit + gamma + 1
  state = State(
    tokens=jnp.pad(first, ((0, 0), (0, num_slots - first.shape[1]))),
    length=begins,
    begins=begins,
    done=jnp.zeros(batch, bool),
    target=target.start(target_params, prompt, num_slots),
    draft=draft.start(draft_params, prompt, num_slots),
    rounds=Rounds(
      guesses=jnp.zeros((limit, batch, gamma), jnp.int32),
      num_accepted=jnp.zeros((limit, batch), jnp.int32),
      next_token=jnp.zeros((limit, batch), jnp.int32),
      num_emitted=jnp.zeros((limit, batch), jnp.int32),
    ),
    num_rounds=jnp.zeros((), jnp.int32),
    not_finite=jnp.full(batch, -1, jnp.int32),
  )
  # Of one round at once: the target's logits and what the draft guesses from.
  probs = jax.ShapeDtypeStruct((batch, 2 * gamma + 1, target.vocab_size), jnp.float32)
  what = f"a batch of {batch} with max_new_tokens {limit} and gamma {gamma}"
  require_memory(what, (target_params, draft_params, state, probs))
  return state


def one_round(
  target: Model,
  draft: Draft,
  target_params,
  draft_params,
  rng: Array,
  sampling: Sampling,
  lenience: float,
  eos_id: int,
  s: State,
) -> State:
  """Algorithm 1; arguments as in `speculative_decode`, and what the round before left."""
  # Keyed by row and position: no round of a row ever sees a key twice.
  keys = jax.vmap(jax.random.fold_in)(rng, s.length)
  draft_rng, judge_rng = jax.vmap(jax.random.split, out_axes=1)(keys)

  # Draft: gamma guesses and the distributions they were drawn from.
  guesses, q, draft_state = draft.propose(draft_params, s.draft, s.tokens, s.length, draft_rng)

  # Verify: one target pass over [newest, x_1..x_gamma] gives p_1..p_{gamma+1}.
  newest = jnp.take_along_axis(s.tokens, s.length[:, None] - 1, axis=1)
  block = jnp.concatenate([newest, guesses], axis=1)
  logits, cache = target.extend(target_params, s.target, block)
  p = distribution(logits, sampling)
  if sampling.temperature == 0 and lenience < 1:
    p = p.at[:, :-1].set(accept_near_argmax(p[:, :-1], logits[:, :-1], guesses, lenience))

  # Accept: n guesses and one token more.
  n, next_token = speculative_sample(judge_rng, guesses, q, p, lenience)

  # Commit what fits before EOS and the limit; both models forget the rest.
  i = jnp.arange(draft.gamma + 1)
  last = s.begins + len(s.rounds.num_accepted)
  extended = jnp.pad(guesses, ((0, 0), (0, 1)))
  emitted = jnp.where(i < n[:, None], extended, next_token[:, None])  # [B, G + 1]
  is_eos = (emitted == eos_id) & (i <= n[:, None])
  num_emitted = jnp.where(is_eos.any(axis=1), is_eos.argmax(axis=1), n) + 1
  num_emitted = jnp.minimum(num_emitted, last - s.length)
  # A round with a NaN in it is not to be believed: it emits nothing and ends its row.
  finite = jnp.isfinite(logits.max(axis=-1)).all(axis=1) & jnp.isfinite(q.sum(axis=(1, 2)))
  num_emitted = jnp.where(s.done | ~finite, 0, num_emitted)
  ends_in_eos = (is_eos & (i < num_emitted[:, None])).any(axis=1)
  length = s.length + num_emitted
  # -1 where a round that began with a larger gamma would have guessed more (`adaptive`).
  unguessed = s.rounds.guesses.shape[-1] - draft.gamma
  filled = jnp.pad(guesses, ((0, 0), (0, unguessed)), constant_values=-1)
  record = Rounds(filled, n, next_token, num_emitted)
  return State(
    tokens=_write(s.tokens, emitted, s.length, num_emitted),
    length=length,
    begins=s.begins,
    done=s.done | ends_in_eos | (length >= last) | ~finite,
    target=cache.replace(length=length - 1),
    draft=draft_state,
    rounds=jax.tree.map(lambda all_, new: all_.at[s.num_rounds].set(new), s.rounds, record),
    num_rounds=s.num_rounds + 1,
    not_finite=jnp.where(s.done | finite, s.not_finite, s.length - s.begins),
  )


def require_finite(decoded: Decoded) -> Decoded:
  """The same, or an InputError that names the first row whose models gave NaN or infinity."""
  for row, token in enumerate(decoded.not_finite.tolist()):
    if token >= 0:
      raise InputError(
        f"row {row} of a batch cannot be decoded past token {token}: the target's logits or the "
        "draft's probabilities there are NaN or infinite; look for damaged weights, or use float32."
      )
  return decoded


def _write(tokens: Array, block: Array, at: Array, count: Array) -> Array:
  """tokens [B, T] with the first `count` [B] tokens of block [B, K] put at `at` [B]."""
  offset = jnp.arange(tokens.shape[1]) - at[:, None]
  inside = (offset >= 0) & (offset < count[:, None])
  moved = jnp.take_along_axis(block, jnp.clip(offset, 0, block.shape[1] - 1), axis=1)
  return jnp.where(inside, moved, tokens)
