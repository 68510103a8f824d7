"""One step of beam search. It is that of t5x's `decoding.beam_search`, with equal order of ties.

Axis letters as in `beam_search`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from specdec_jax.core.arrays import gather

NEG_SCORE = -1e7  # log-probability or score of a text that does not exist


class Beams(NamedTuple):
  """Live and finished texts of a search, each in ascending order of their scores.

  Attributes:
    tokens: tokens of the live sequences, including those before the search.
    log_probs: log-probabilities of the live sequences.
    finished_tokens: tokens of the finished texts, EOS included.
    scores: log-probabilities of the finished texts, divided by the length penalty.
    finished: whether each finished text exists; a row may have fewer than w of them.
    length: number of tokens of the live sequences.
  """

  tokens: Int[Array, "B w X"]
  log_probs: Float[Array, "B w"]
  finished_tokens: Int[Array, "B w X"]
  scores: Float[Array, "B w"]
  finished: Bool[Array, "B w"]
  length: Int[Array, " B"]


def initial_beams(tokens: Int[Array, "B X"], length: Int[Array, " B"], num_beams: int) -> Beams:
  """Return the beams before the first step, for texts that have `length` tokens.

  Only the first beam of each row is alive. The other beams receive continuations of it in the first
  step.
  """
  batch = len(tokens)
  no_score = jnp.full((batch, num_beams), NEG_SCORE, jnp.float32)
  texts = jnp.repeat(tokens[:, None], num_beams, axis=1)
  return Beams(
    tokens=texts,
    log_probs=no_score.at[:, 0].set(0),
    finished_tokens=jnp.zeros_like(texts),
    scores=no_score,
    finished=jnp.zeros((batch, num_beams), bool),
    length=length,
  )


def step(
  beams: Beams,
  tokens: Int[Array, "B w 2*w"],
  log_probs: Float[Array, "B w 2*w"],
  length_penalty: float,
  eos_id: int,
) -> tuple[Beams, Int[Array, "B w"]]:
  """Extend the live sequences of each row by one token.

  The step considers the 2w best continuations. At most w of them end, so at least w stay alive.

  Args:
    beams: beams before the step.
    tokens: most probable next tokens of each live sequence, in descending order.
    log_probs: log-probability of each live sequence with its next token.
    length_penalty: see `BeamSearcher`.
    eos_id: token that ends a text.

  Returns:
    The beams after the step, and the index of the earlier beam that each live sequence continues.
  """
  batch, num_beams, _ = log_probs.shape
  top, index = lax.top_k(log_probs.reshape(batch, -1), 2 * num_beams)
  parents = index // (2 * num_beams)
  last_tokens = gather(tokens.reshape(batch, -1), index)
  texts = gather(beams.tokens, parents)
  is_new = jnp.arange(texts.shape[2]) == beams.length[:, None, None]
  texts = jnp.where(is_new, last_tokens[..., None], texts)
  ends = last_tokens == eos_id

  # Live: the best w continuations that do not end.
  live_log_probs = top + ends * NEG_SCORE
  _, live = lax.top_k(live_log_probs, num_beams)
  live = jnp.flip(live, axis=1)

  # Finished: the best w of the texts finished earlier and those that end now. The earlier ones come
  # first, because top_k returns the first of equal scores.
  scores = top / length_divisor(beams.length, length_penalty)[:, None] + ~ends * NEG_SCORE
  scores = jnp.concatenate([beams.scores, scores], axis=1)
  _, best = lax.top_k(scores, num_beams)
  best = jnp.flip(best, axis=1)
  finished_tokens = jnp.concatenate([beams.finished_tokens, texts], axis=1)
  finished = jnp.concatenate([beams.finished, ends], axis=1)
  new_beams = Beams(
    tokens=gather(texts, live),
    log_probs=gather(live_log_probs, live),
    finished_tokens=gather(finished_tokens, best),
    scores=gather(scores, best),
    finished=gather(finished, best),
    length=beams.length + 1,
  )
  return new_beams, gather(parents, live)


def length_divisor(length: Int[Array, " B"], length_penalty: float) -> Float[Array, " B"]:
  """Return the divisor of log-probabilities, ((5 + length) / 6) ** length_penalty.

  This is equation 14 of Wu et al. (2016). As in t5x, `length` is the number of tokens before the
  last one, which equals the number of tokens without T5's start token.
  """
  return jnp.power((5.0 + length) / 6.0, length_penalty)


def search_ended(beams: Beams, limit: Int[Array, " B"], length_penalty: float) -> Bool[Array, " B"]:
  """Return whether the search of each row is done.

  A search is done when its texts have reached the limit, or when w texts are finished and no live
  sequence can become better than the worst of them.
  """
  best_live = beams.log_probs[:, -1] / length_divisor(limit, length_penalty)
  worst_finished = beams.scores.min(axis=1)
  return (beams.length >= limit) | (beams.finished.all(axis=1) & (worst_finished > best_live))


def best_first(
  beams: Beams,
) -> tuple[Int[Array, "B w X"], Float[Array, "B w"], Bool[Array, "B w"]]:
  """Return texts in descending order of score, their scores, and whether each text exists.

  The texts are the finished texts of a row. If a row has none, they are its live sequences, whose
  scores are their log-probabilities.
  """
  any_finished = beams.finished.any(axis=1)[:, None]
  texts = jnp.where(any_finished[..., None], beams.finished_tokens, beams.tokens)
  scores = jnp.where(any_finished, beams.scores, beams.log_probs)
  exists = beams.finished | ~any_finished
  return jnp.flip(texts, axis=1), jnp.flip(scores, axis=1), jnp.flip(exists, axis=1)
