"""A target that accepts as often as it is told: random weights can be timed at any alpha."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specdec_jax.core.trees import AnyTree, NodeLayout, chain, require_static
from specdec_jax.core.types import Model, WrappedModel
from specdec_jax.errors import InputError, require_number

_BASE = np.uint32(0x9E3779B1)  # odd and large: hashes are polynomials in it, modulo 2^32
CERTAIN = 1e9  # added to a logit; exp(-CERTAIN) is exactly 0 in float32, at any usual temperature


@struct.dataclass
class SimulatedCache:
  """A model's cache, and what its rows differ by.

  Attributes:
    model: the cache of the model itself.
    salt: [B], a hash of each row's prompt.
  """

  model: Any
  salt: Array

  @property
  def length(self) -> Array:
    """[B], tokens each row holds."""
    return self.model.length


@dataclasses.dataclass(frozen=True)
class SimulatedModel(WrappedModel):
  """The target `model`, working as before, with each guess right with probability `alpha`.

  A guess is judged by the logits at its parent. It is made certain or impossible there, by a
  pseudo-random function of the prompt, the position and the guess: p(guess) is 1 or 0, so
  acceptance does not depend on q or on the sampling method, and is independent from position to
  position, as Equation 1 assumes; of siblings the eldest that is right is certain. Where nothing is
  judged, and after a refusal, the token is the model's own. EOS is impossible, so each text runs to
  its limit; a guess of EOS is always refused, and acceptance is `alpha` of the other guesses. The
  texts mean nothing.

  Attributes:
    model: M_p.
    alpha: probability that a guess stands, in [0, 1].
    eos_id: the target's; -1 if it has none.
    seed: another one accepts other guesses.

  Raises:
    InputError: alpha outside [0, 1].
  """

  alpha: float
  eos_id: int = -1
  seed: int = 0

  def __post_init__(self):
    object.__setattr__(self, "alpha", require_number("alpha", self.alpha, 0, 1))

  def prefill(self, params: Any, prompt: Array, num_slots: int) -> tuple[Array, SimulatedCache]:
    hidden, cache = self.model.prefill(params, prompt, num_slots)
    # Padding adds 0 to the hash, so its width does not matter.
    powers = np.cumprod(np.full(prompt.shape[1], _BASE), dtype=np.uint32)
    salt = (prompt.astype(jnp.uint32) * powers).sum(axis=1, dtype=jnp.uint32)
    return hidden, SimulatedCache(cache, salt)

  def extend(
    self,
    params: Any,
    cache: SimulatedCache,
    tokens: Array,
    tree: NodeLayout | None = None,
    first: Array | int = 0,
  ) -> tuple[Array, Array, SimulatedCache]:
    own, hidden, inner = self.model.extend(params, cache.model, tokens, tree, first)
    tree = require_static("simulated acceptance", tree or chain(tokens.shape[1] - 1))
    if tokens.shape[1] < tree.num_nodes:
      raise InputError("Simulated acceptance judges whole blocks; it is a target, and no draft.")
    guesses, parents = tokens[:, 1:], np.array(tree.parents, np.int32)
    positions = (cache.length + first)[:, None] + jnp.asarray(tree.depths[1:])
    hashed = (cache.salt[:, None] * _BASE + positions.astype(jnp.uint32)) * _BASE
    right = jax.vmap(jax.vmap(self._is_right))(hashed + guesses.astype(jnp.uint32))  # [B, N]
    elder = (parents[:, None] == parents) & (tree.ranks[:, None] > tree.ranks)
    again = (elder & (guesses[:, :, None] == guesses[:, None])).any(axis=-1)  # as an elder sibling
    right &= ~(right[:, None] & elder).any(axis=-1)
    vocabulary = jnp.arange(own.shape[-1])
    bonus = jnp.where(again, 0.0, jnp.where(right, CERTAIN, -CERTAIN))
    bonus = bonus[..., None] * (guesses[..., None] == vocabulary)
    if tree.is_chain:
      bonus = jnp.pad(bonus, ((0, 0), (0, 1), (0, 0)))  # the last token is judged by none
    else:
      bonus = jnp.zeros(own.shape).at[:, parents].add(bonus)
    # Added, so that the model's work is still needed: a compiler drops what nothing depends on.
    logits = own.astype(jnp.float32) + jnp.where(vocabulary == self.eos_id, -CERTAIN, bonus)
    return logits, hidden, cache.replace(model=inner)

  def commit(
    self,
    cache: SimulatedCache,
    length: Array,
    tree: AnyTree | None = None,
    path: Array | None = None,
  ) -> SimulatedCache:
    return cache.replace(model=self.model.commit(cache.model, length, tree, path))

  def _is_right(self, hashed: Array) -> Array:
    return jax.random.uniform(jax.random.fold_in(jax.random.key(self.seed), hashed)) < self.alpha


def unwrapped(model: Model) -> Model:
  """Return the model itself of a target whose acceptance is simulated; any other model as it is."""
  return model.model if isinstance(model, SimulatedModel) else model


def unwrapped_cache(cache: Any) -> Any:
  """Return the cache of `unwrapped(model)`."""
  return cache.model if isinstance(cache, SimulatedCache) else cache
