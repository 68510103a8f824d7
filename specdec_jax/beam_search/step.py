"""One step of beam search, as t5x's `decoding.beam_search` takes it, to the order of equal scores.

Axes: B batch, w beams, T tokens of a text (those before the search among them), V vocabulary.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

NONE = -1e7  # in place of a log-probability or a score where there is no text


class Beams(NamedTuple):
  """What a search has found so far; live texts and finished ones each in ascending order.

  Attributes:
    tokens: [B, w, T], live texts. log_probs: [B, w], theirs.
    finished_tokens: [B, w, T], with EOS. scores: [B, w], theirs. finished: [B, w], whether there is
      one.
    length: [B], tokens of the live texts.
  """

  tokens: Array
  log_probs: Array
  finished_tokens: Array
  scores: Array
  finished: Array
  length: Array


def begin(tokens: Array, length: Array, width: int) -> Beams:
  """Before the first step, of texts [B, T] that have `length` [B] tokens: one beam a row is alive,
  and the others wait for its continuations."""
  batch = len(tokens)
  none = jnp.full((batch, width), NONE, jnp.float32)
  each = jnp.repeat(tokens[:, None], width, axis=1)
  return Beams(
    tokens=each,
    log_probs=none.at[:, 0].set(0),
    finished_tokens=jnp.zeros_like(each),
    scores=none,
    finished=jnp.zeros((batch, width), bool),
    length=length,
  )


def step(
  beams: Beams, tokens: Array, sums: Array, length_penalty: float, eos_id: int
) -> tuple[Beams, Array]:
  """Each row one token further: its beams, and of which beam before each is a continuation [B, w].

  Twice as many continuations are looked at as there are beams, so that w stay alive if all the
  others end.

  Args:
    beams: before.
    tokens: [B, w, 2w], the likeliest continuations of each beam, in order.
    sums: [B, w, 2w], log-probabilities of the texts that they make.
    length_penalty: of `penalty`.
    eos_id: ends a text.
  """
  batch, width, _ = sums.shape
  top, at = lax.top_k(sums.reshape(batch, -1), 2 * width)
  parents = at // (2 * width)
  newest = jnp.take_along_axis(tokens.reshape(batch, -1), at, axis=1)
  texts = jnp.take_along_axis(beams.tokens, parents[..., None], axis=1)
  here = jnp.arange(texts.shape[2]) == beams.length[:, None, None]
  texts = jnp.where(here, newest[..., None], texts)
  ends = newest == eos_id

  alive = top + ends * NONE
  _, best = lax.top_k(alive, width)
  best = jnp.flip(best, axis=1)

  # The best of those that had finished and those that do now; of equals the former.
  scores = top / penalty(beams.length, length_penalty)[:, None] + ~ends * NONE
  scores = jnp.concatenate([beams.scores, scores], axis=1)
  _, kept = lax.top_k(scores, width)
  kept = jnp.flip(kept, axis=1)
  finished_tokens = jnp.concatenate([beams.finished_tokens, texts], axis=1)
  finished = jnp.concatenate([beams.finished, ends], axis=1)
  of = lambda x, i: jnp.take_along_axis(x, i.reshape(*i.shape, *[1] * (x.ndim - 2)), axis=1)
  after = Beams(
    tokens=of(texts, best),
    log_probs=of(alive, best),
    finished_tokens=of(finished_tokens, kept),
    scores=of(scores, kept),
    finished=of(finished, kept),
    length=beams.length + 1,
  )
  return after, of(parents, best)


def penalty(length: Array, length_penalty: float) -> Array:
  """What the log-probability of a text is divided by (Wu et al., 2016, equation 14): its tokens
  are those up to `length` without the one that all begin with."""
  return jnp.power((5.0 + length) / 6.0, length_penalty)


def ended(beams: Beams, limit: Array, length_penalty: float) -> Array:
  """Whether a row's search is over, [B]: its texts have reached the limit [B], or no live one can
  become better than the worst finished."""
  best_live = beams.log_probs[:, -1] / penalty(limit, length_penalty)
  worst = beams.scores.min(axis=1)
  return (beams.length >= limit) | (beams.finished.all(axis=1) & (worst > best_live))


def best_first(beams: Beams) -> tuple[Array, Array, Array]:
  """Texts [B, w, T], scores [B, w], and whether there is such a text, [B, w]: the finished ones, or
  where a row has none the live ones with their log-probabilities."""
  any_finished = beams.finished.any(axis=1)[:, None]
  texts = jnp.where(any_finished[..., None], beams.finished_tokens, beams.tokens)
  scores = jnp.where(any_finished, beams.scores, beams.log_probs)
  there = beams.finished | ~any_finished
  return jnp.flip(texts, axis=1), jnp.flip(scores, axis=1), jnp.flip(there, axis=1)
