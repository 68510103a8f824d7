"""A target that accepts as often as it is told: random weights can be timed at any alpha."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specdec_jax.errors import InputError
from specdec_jax.protocols import Model

_BASE = np.uint32(0x9E3779B1)  # odd and large: hashes are polynomials in it, modulo 2^32
CERTAIN = 1e9  # added to a logit; exp(-CERTAIN) is exactly 0 in float32, at any usual temperature


@struct.dataclass
class SimulatedCache:
  """A model's cache, and what its rows differ by.

  Attributes:
    length: [B], tokens each row holds.
    model: the cache of the model itself.
    salt: [B], a hash of each row's prompt.
  """

  length: Array
  model: Any
  salt: Array


@functools.cache
def simulated_acceptance(
  model: Model, alpha: float, eos_id: int | None = None, seed: int = 0
) -> Model:
  """The target `model`, working as before, with each guess right with probability `alpha`.

  In a block the token after tokens[:, i] is a guess that logits[:, i] judge. It is made certain or
  impossible, by a pseudo-random function of the prompt, the position and the guess: p(guess) is 1
  or 0, so acceptance does not depend on q or on the sampling method, and is independent from
  position to position, as Equation 1 assumes. Where nothing is judged, and after a refusal, the
  token is the model's own. EOS is impossible, so each text runs to its limit; a guess of EOS is
  always refused, and acceptance is `alpha` of the other guesses. The texts mean nothing.

  Args:
    model: M_p.
    alpha: probability that a guess stands, in [0, 1].
    eos_id: None for the target's; -1 if it has none.
    seed: another one accepts other guesses.

  Raises:
    InputError: alpha outside [0, 1].
  """
  if not 0 <= alpha <= 1:
    raise InputError(f"alpha is {alpha}; an acceptance rate lies in [0, 1].")
  eos_id = model.eos_id if eos_id is None else eos_id

  def start(params, prompt: Array, num_slots: int) -> SimulatedCache:
    cache = model.start(params, prompt, num_slots)
    # Padding adds 0 to the hash, so its width does not matter.
    powers = np.cumprod(np.full(prompt.shape[1], _BASE), dtype=np.uint32)
    salt = (prompt.astype(jnp.uint32) * powers).sum(axis=1, dtype=jnp.uint32)
    return SimulatedCache(length=cache.length, model=cache, salt=salt)

  def is_right(hashed: Array) -> Array:
    return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), hashed)) < alpha

  def extend(params, cache: SimulatedCache, tokens: Array) -> tuple[Array, SimulatedCache]:
    own, inner = model.extend(params, cache.model.replace(length=cache.length), tokens)
    guesses = tokens[:, 1:]
    positions = cache.length[:, None] + 1 + jnp.arange(guesses.shape[1])
    hashed = (cache.salt[:, None] * _BASE + positions.astype(jnp.uint32)) * _BASE
    right = jax.vmap(jax.vmap(is_right))(hashed + guesses.astype(jnp.uint32))  # [B, K - 1]
    vocabulary = jnp.arange(own.shape[-1])
    bonus = jnp.where(right, CERTAIN, -CERTAIN)[..., None] * (guesses[..., None] == vocabulary)
    bonus = jnp.pad(bonus, ((0, 0), (0, 1), (0, 0)))  # the last token of a block is judged by none
    # Added, so that the model's work is still needed: a compiler drops what nothing depends on.
    logits = own.astype(jnp.float32) + jnp.where(vocabulary == eos_id, -CERTAIN, bonus)
    return logits, cache.replace(length=inner.length, model=inner)

  return Model(model.begin, start, extend, model.vocab_size, eos_id)
