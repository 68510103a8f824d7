"""The exact laws of what happens in rounds: of each guess, its acceptance and the token after it.

q is what the draft reports of its guesses; p comes from a parallel pass of the target over the text
that was decoded, never from the loop.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specdec_jax.decoding import all_rounds, begin, decoded, one_round, require_finite
from specdec_jax.experiments.alpha import teacher_forced_logits
from specdec_jax.experiments.drift import Judged, joined
from specdec_jax.experiments.speed import row_keys
from specdec_jax.pairs import Pair
from specdec_jax.protocols import Decoded, Draft, Model, Rounds
from specdec_jax.sampling import Sampling, distribution

Rule = Callable[[Array, Array, Array], tuple[Array, Array]]
Decode = Callable[..., tuple[Decoded, Array]]  # (prompt [B, P], keys [B], max_new_tokens=)


def algorithm_1(p: Array, q: Array, guess: Array) -> tuple[Array, Array]:
  """Probability [...] that `guess` [...] is accepted, and weights [..., V] of the token if not.

  Where there is no guess q is 0, and p is left. Not `speculative.residual`, which is checked.
  """
  p_x, q_x = (jnp.take_along_axis(x, guess[..., None], axis=-1)[..., 0] for x in (p, q))
  return jnp.where(p_x < q_x, p_x / q_x, 1.0), jnp.maximum(p - q, 0.0)


def recorded(pair: Pair, sampling: Sampling, gamma: int) -> Decode:
  """As `pair.decoder`, with the q [B, T, V] of the guess judged at each token, 0 at a bonus token.

  The rounds are the loop's own, of a draft that keeps what it reports.
  """
  models = pair.target, _recording(pair.draft(sampling, gamma), pair.target.vocab_size)
  common: dict[str, Any] = dict(sampling=sampling, eos_id=pair.vocabulary.eos_id)
  params = pair.target_params, pair.draft_params
  return functools.partial(_recorded_decode, *models, *params, **common)


@functools.cache
def _recording(draft: Draft, vocab_size: int) -> Draft:
  """The same draft, whose state holds the q of every slot too.

  A slot past the text is written again by the next round, as a cache is; a bonus token's never was.
  """

  def start(params, prompt: Array, num_slots: int):
    own = draft.start(params, prompt, num_slots)
    return own, jnp.zeros((prompt.shape[0], num_slots, vocab_size))

  def propose(params, state, tokens: Array, length: Array, rng: Array):
    own, all_q = state
    guesses, q, own = draft.propose(params, own, tokens, length, rng)
    write = lambda row, new, at: lax.dynamic_update_slice(row, new, (at, 0))
    return guesses, q, (own, jax.vmap(write)(all_q, q.astype(all_q.dtype), length))

  return Draft(start, propose, draft.gamma)


@functools.partial(
  jax.jit, static_argnames=("target", "draft", "max_new_tokens", "sampling", "eos_id")
)
def _recorded_decode(
  target: Model,
  draft: Draft,
  target_params,
  draft_params,
  prompt: Array,
  rng: Array,
  *,
  max_new_tokens: int,
  sampling: Sampling,
  eos_id: int,
) -> tuple[Decoded, Array]:
  models = target, draft, target_params, draft_params
  step = functools.partial(one_round, *models, rng, sampling, 1.0, eos_id)
  s = all_rounds(step, begin(*models, prompt, max_new_tokens))
  slots = s.begins[:, None] + jnp.arange(max_new_tokens)
  return decoded(s), jnp.take_along_axis(s.draft[1], slots[..., None], axis=1)


def judge_rounds(
  pair: Pair,
  texts: Sequence[str],
  sampling: Sampling,
  decode: Decode,
  num_guesses: int,
  max_new_tokens: int,
  seed: int,
  rule: Rule = algorithm_1,
  batch_size: int = 32,
) -> Judged:
  """Decode the texts, again and again if need be, until `num_guesses` guesses have been judged.

  Args:
    pair: its target gives p, in one parallel pass over what was decoded.
    texts: sources.
    sampling: how p is adjusted.
    decode: see `recorded`.
    num_guesses: at least so many; when to stop depends on the past alone, so means stay 0.
    max_new_tokens: limit for each output.
    seed: of the draws.
    rule: what a guess's probability is, and what is left if it is refused.
    batch_size: rows decoded together; q alone takes 4 V bytes for each of their tokens.
  """
  prompts, found, count, at = pair.prompt(texts), [], 0, 0
  while count < num_guesses:
    prompt = prompts[np.arange(at, at + batch_size) % len(texts)]
    result, q = decode(prompt, row_keys(seed, at, batch_size), max_new_tokens=max_new_tokens)
    longest = -(-int(require_finite(result).lengths.max()) // 32) * 32  # few widths, few programs
    tokens, models = result.tokens[:, :longest], (pair.target, pair.target_params)
    scores = _scores(*models, prompt, tokens, q[:, :longest], result.rounds, sampling, rule)
    written = np.arange(tokens.shape[1]) < np.asarray(result.lengths)[:, None]
    found.append(Judged(*(np.asarray(x, float)[written] for x in scores)))
    count += sum(int(x.sum()) for x in result.rounds.judged())
    at += batch_size
  return joined(found)


@functools.partial(jax.jit, static_argnames=("target", "sampling", "rule"))
def _scores(
  target: Model,
  params,
  prompt: Array,
  tokens: Array,
  q: Array,
  rounds: Rounds,
  sampling: Sampling,
  rule: Rule,
) -> tuple[Array, ...]:
  """The fields of `Judged`, [B, T] each; what lies past a row's end means nothing."""
  ends = jnp.cumsum(rounds.num_emitted, axis=0).T  # [B, R]
  t = jnp.arange(tokens.shape[1])
  number = (ends[:, None] <= t[:, None]).sum(axis=-1)  # of the round that emitted a token, [B, T]
  of_round = lambda x: jnp.take_along_axis(x.T, number, axis=1, mode="clip")
  position = t - of_round(ends.T - rounds.num_emitted)
  gamma = rounds.guesses.shape[-1]
  guesses = rounds.guesses.swapaxes(0, 1).reshape(len(tokens), -1)  # [B, R G]
  at = number * gamma + jnp.clip(position, 0, gamma - 1)
  guess = jnp.take_along_axis(guesses, at, axis=1, mode="clip")
  accepted = position < of_round(rounds.num_accepted)
  p = distribution(teacher_forced_logits(target, params, prompt, tokens), sampling)
  probability, left = rule(p, q, guess)
  drawn = jnp.where(accepted[..., None], 0.0, jnp.where(left.any(-1, keepdims=True), left, p))
  return position, accepted, probability, *_rank(q, guess), *_rank(drawn, tokens)


def _rank(weights: Array, token: Array) -> tuple[Array, Array]:
  """Mass [...] of what is likelier than `token` [...] plus half of its own, less 1/2: mean 0.

  Equally likely tokens share a rank, which makes the variance, given beside it, smaller than it is
  said to be. Both are 0 where weights [..., V] are.
  """
  total = weights.sum(axis=-1, keepdims=True)
  law = jnp.where(total > 0, weights / total, 0.0)
  own = jnp.take_along_axis(law, token[..., None], axis=-1)
  half_ranks = jnp.where(law > own, 1.0, jnp.where(law == own, 0.5, 0.0))
  whole = law.sum(axis=-1)
  variance = jnp.maximum(whole - (law**3).sum(axis=-1), 0.0) / 12
  return (law * half_ranks).sum(axis=-1) - whole / 2, variance
