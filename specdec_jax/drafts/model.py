"""A smaller model as draft: gamma decode steps of it, each distribution kept."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.errors import require_count
from specdec_jax.protocols import Draft, Model
from specdec_jax.sampling import Sampling, draw


@functools.cache
def model_draft(model: Model, sampling: Sampling, gamma: int) -> Draft:
  """`model` guesses `gamma` tokens a round, drawn by the same `sampling` as the target's.

  Raises:
    InputError: gamma is no whole number, or < 1.
  """
  require_count("gamma", gamma)

  def propose(params, cache, tokens: Array, length: Array, rng: Array):
    # After a round whose guesses were all accepted the cache lacks the last of them. So the
    # first call always reads two tokens, [second newest, newest], writing the former again;
    # a row that holds one token reads [it, an unused slot] and takes the first logits.
    behind = jnp.maximum(length - 2, 0)
    block = jnp.take_along_axis(tokens, behind[:, None] + jnp.arange(2), axis=1)
    logits, cache = model.extend(params, cache.replace(length=behind), block)
    newest = jnp.take_along_axis(logits, (length - 1 - behind)[:, None, None], axis=1)[:, 0]
    cache = cache.replace(length=length)
    keys = jax.vmap(lambda key: jax.random.split(key, gamma), out_axes=1)(rng)  # [G, B]
    first, q_first = draw(keys[0], newest, sampling)

    def step(carry, key):
      cache, guess = carry
      logits, cache = model.extend(params, cache, guess[:, None])
      guess, q = draw(key, logits[:, 0], sampling)
      return (cache, guess), (guess, q)

    (cache, _), (guesses, q) = lax.scan(step, (cache, first), keys[1:])
    guesses = jnp.concatenate([first[None], guesses])  # [G, B]
    q = jnp.concatenate([q_first[None], q])  # [G, B, V]
    return guesses.swapaxes(0, 1), q.swapaxes(0, 1), cache

  return Draft(start=model.start, propose=propose, gamma=gamma)
