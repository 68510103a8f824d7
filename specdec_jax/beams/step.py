"""One step of beam search, with the scores and rules of t5x or of transformers.

With the rules of t5x, the step equals that of t5x's `decoding.beam_search`, including the order of
equal scores.

Axis letters are those of `beams`.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from specdec_jax.core.arrays import gather
from specdec_jax.core.settings import Settings, traced


class Beams(NamedTuple):
  """Live sequences and finished texts of a search.

  After a step, the sequences are in ascending order of log-probability, and the texts in ascending
  order of score. A sequence or text that does not exist has log-probability or score -inf, for
  example if logits processors allow fewer than w.

  Attributes:
    tokens: tokens of the live sequences, including those before the search.
    scores: log-probabilities of the finished texts, divided by `Scorer.divisor`.
    finished: whether each finished text exists; a row may have fewer than w of them.
  """

  tokens: Int[Array, "B w X"]
  log_probs: Float[Array, "B w"]
  finished_tokens: Int[Array, "B w X"]
  scores: Float[Array, "B w"]
  finished: Bool[Array, "B w"]
  length: Int[Array, " B"]


def initial_beams(tokens: Int[Array, "B X"], length: Int[Array, " B"], num_beams: int) -> Beams:
  """Return the beams before the first step, for texts that have `length` tokens.

  Only the first beam of each row is live. In the first step, the other beams receive continuations
  of the first one.
  """
  batch = len(tokens)
  no_score = jnp.full((batch, num_beams), -jnp.inf, jnp.float32)
  texts = jnp.repeat(tokens[:, None], num_beams, axis=1)
  return Beams(
    tokens=texts,
    log_probs=no_score.at[:, 0].set(0),
    finished_tokens=jnp.zeros_like(texts),
    scores=no_score,
    finished=jnp.zeros((batch, num_beams), bool),
    length=length,
  )


@dataclasses.dataclass(frozen=True)
class Scorer(Settings):
  """Scores of finished texts, and the rules by which texts finish and a search ends.

  In t5x ("t5x"), the score of a text is its log-probability divided by ((5 + length) / 6) **
  length_penalty (Wu et al., 2016, equation 14), where the length includes the tokens before the
  first generated one, but not the last token. A search with w finished texts ends when no live
  sequence can reach the score of the worst of them. If no text is finished at the limit, the live
  sequences are the result.

  In transformers ("hf"), the score is the log-probability divided by length ** length_penalty,
  where the length is the number of generated tokens. A text finishes only if it is among the best w
  continuations of its step; at the limit, each of these w continuations finishes.

  Attributes:
    length_penalty: exponent; 0 for no penalty, above 0 to prefer long texts, below 0 short ones.
    early_stopping: for "hf", when a search with w finished texts ends. True: at once. False: when
      no live sequence, at its current length, has a better score than the worst of these texts.
      "never": when none can reach a better score at any length up to the limit.
  """

  kind: Literal["t5x", "hf"] = "t5x"
  length_penalty: float = traced(0.6)
  early_stopping: bool | Literal["never"] = False

  def divisor(self, length: Int[Array, " B"], start: Int[Array, " B"]) -> Float[Array, " B"]:
    """Return the divisor of log-probabilities of texts with `length` tokens before the last one.

    `start` is the number of tokens before the first generated one.
    """
    if self.kind == "t5x":
      return jnp.power((5.0 + length) / 6.0, self.length_penalty)
    return jnp.power(jnp.maximum(length + 1.0 - start, 1.0), self.length_penalty)


def step(
  beams: Beams,
  tokens: Int[Array, "B w top"],
  log_probs: Float[Array, "B w top"],
  scorer: Scorer,
  eos_ids: Int[Array, " eos"],
  start: Int[Array, " B"],
  limit: Int[Array, " B"],
) -> tuple[Beams, Int[Array, "B w"]]:
  """Extend the live sequences of each row by one token.

  The step considers 2w continuations if there is one EOS, and more if there are several, so that at
  least w of them do not end with EOS.

  Args:
    tokens: most probable next tokens of each live sequence, in descending order of probability.
    log_probs: log-probability of each live sequence, extended by each of these tokens.

  Returns:
    The beams after the step, and the index of the earlier beam that each live sequence continues.
  """
  batch, num_beams, num_top = log_probs.shape
  log_probs = jnp.where(jnp.isneginf(beams.log_probs)[..., None], -jnp.inf, log_probs)
  top, index = lax.top_k(log_probs.reshape(batch, -1), num_top)
  parents = index // num_top
  last_tokens = gather(tokens.reshape(batch, -1), index)
  texts = gather(beams.tokens, parents)
  is_new = jnp.arange(texts.shape[2])[None, None] == beams.length[:, None, None]
  texts = jnp.where(is_new, last_tokens[..., None], texts)
  ends = (last_tokens[..., None] == eos_ids[None, None]).any(axis=-1)
  ends &= (beams.length >= start)[:, None]  # not in a forced prefix
  finishes = ends
  if scorer.kind == "hf":
    ends |= (beams.length + 1 >= limit)[:, None]
    finishes = ends & (jnp.arange(num_top) < num_beams)[None]
  finishes &= top > -jnp.inf

  # Live: the best w continuations that do not end.
  live_log_probs = jnp.where(ends, -jnp.inf, top)
  _, live = lax.top_k(live_log_probs, num_beams)
  live = jnp.flip(live, axis=1)

  # Finished: the best w of the texts finished earlier and those that end now. The earlier ones come
  # first, because top_k returns the first of equal scores.
  scores = jnp.where(finishes, top / scorer.divisor(beams.length, start)[:, None], -jnp.inf)
  scores = jnp.concatenate([beams.scores, scores], axis=1)
  _, best = lax.top_k(scores, num_beams)
  best = jnp.flip(best, axis=1)
  finished_tokens = jnp.concatenate([beams.finished_tokens, texts], axis=1)
  finished = jnp.concatenate([beams.finished, finishes], axis=1)
  new_beams = Beams(
    tokens=gather(texts, live),
    log_probs=gather(live_log_probs, live),
    finished_tokens=gather(finished_tokens, best),
    scores=gather(scores, best),
    finished=gather(finished, best),
    length=beams.length + 1,
  )
  return new_beams, gather(parents, live)


def search_ended(
  beams: Beams, scorer: Scorer, start: Int[Array, " B"], limit: Int[Array, " B"]
) -> Bool[Array, " B"]:
  """Return whether the search of each row is done.

  It is done at the limit, if no live sequence exists, or by the rules of the scorer.
  """
  at_end = (beams.length >= limit) | jnp.isneginf(beams.log_probs[:, -1])
  longest = limit
  if scorer.kind == "hf":
    if scorer.early_stopping is True:
      return at_end | beams.finished.all(axis=1)
    # The divisor takes the number of tokens before the last one.
    current = beams.length - 1
    longest = current
    if scorer.early_stopping == "never":
      longest = jnp.where(jnp.asarray(scorer.length_penalty) > 0, limit - 1, current)
  best_live = beams.log_probs[:, -1] / scorer.divisor(longest, start)
  worst_finished = beams.scores.min(axis=1)
  better = best_live > worst_finished if scorer.kind == "hf" else best_live >= worst_finished
  return at_end | (beams.finished.all(axis=1) & ~better)


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
  exists = scores > -jnp.inf
  return jnp.flip(texts, axis=1), jnp.flip(scores, axis=1), jnp.flip(exists, axis=1)
