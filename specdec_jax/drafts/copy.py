"""Copying from the context as draft: no parameters, next to no cost (Section 3.6)."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from specdec_jax.errors import require_count
from specdec_jax.models.t5 import PAD_ID
from specdec_jax.protocols import Draft


@functools.cache
def copy_draft(vocab_size: int, gamma: int, max_ngram: int = 3) -> Draft:
  """Guesses that what followed the latest tokens elsewhere follows them here.

  The longest match of the newest tokens, at most `max_ngram` of them, is looked for in the source
  and in the text so far. Of matches of one length the source's come before the text's, and the
  latest before earlier ones. A match in the text goes on through its own guesses, so a repeating
  text is guessed to repeat. Where nothing matches, the source has ended, or an id is none of the
  target's, the guess is PAD_ID: a round costs the same whatever is guessed. Parameters: none, ().
  After a decoder-only model's prompt the source is in the text as well; nothing is lost by that
  but a guess of its EOS where the prompt's last tokens come again.

  Raises:
    InputError: gamma or max_ngram is no whole number, or < 1.
  """
  require_count("gamma", gamma)
  require_count("max_ngram", max_ngram)

  def propose(params, source: Array, tokens: Array, length: Array, rng: Array):
    num_slots, length = tokens.shape[1], length[:, None]

    def matched(context: Array) -> Array:
      """How many of the newest tokens end at each position of context [B, N], up to max_ngram."""
      count, so_far = jnp.zeros(context.shape, jnp.int32), True
      for n in range(max_ngram):
        earlier = jnp.pad(context, ((0, 0), (n, 0)), constant_values=-1)[:, : context.shape[1]]
        newest = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - n, 0), axis=1)
        so_far &= (earlier == newest) & (n < length)
        count += so_far
      return count

    # A match counts if something follows it. One score ranks by length first, then by place.
    follows = jnp.pad(source, ((0, 0), (0, 1)))[:, 1:] != PAD_ID
    counts = [
      jnp.where(jnp.arange(num_slots) < length - 1, matched(tokens), 0),
      jnp.where(follows, matched(source), 0),
    ]
    score = jnp.concatenate(counts, axis=1)
    size = score.shape[1]
    best = (score * size + jnp.arange(size)).max(axis=1, keepdims=True)
    found, at = best >= size, best % size

    # What follows in the text ends at its newest token, and begins again after the match.
    period = jnp.where(at < num_slots, length - 1 - at, gamma)
    context = jnp.pad(jnp.concatenate([tokens, source], axis=1), ((0, 0), (0, gamma)))
    copied = jnp.take_along_axis(context, at + 1 + jnp.arange(gamma) % period, axis=1)
    guesses = jnp.where(found & (copied < vocab_size), copied, PAD_ID)
    return guesses, jax.nn.one_hot(guesses, vocab_size), source

  return Draft(start=lambda params, prompt, num_slots: prompt, propose=propose, gamma=gamma)
