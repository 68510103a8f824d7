"""Target with simulated acceptance, to time models with random weights at any alpha."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int, UInt

from specdec_jax.core.context import Prompt, prompt_ids
from specdec_jax.core.trees import AnyTree, NodeLayout, chain, require_static
from specdec_jax.core.types import Length, Model, Path, WrappedModel
from specdec_jax.errors import require_number

_BASE = np.uint32(0x9E3779B1)  # odd and large: hashes are polynomials in it, modulo 2^32
CERTAIN = 1e9  # added to a logit; exp(-CERTAIN / temperature) is exactly 0 in float32


@struct.dataclass
class SimulatedCache:
  """Cache of a `SimulatedModel`: the cache of its model, and a hash of the prompt of each row."""

  model: Any
  salt: UInt[Array, " B"]

  @property
  def length(self) -> Int[Array, " B"]:
    """Number of cached tokens of each row."""
    return self.model.length


@dataclasses.dataclass(frozen=True)
class SimulatedModel(WrappedModel):
  """Target that runs `model`, and adjusts its logits so that `alpha` is the acceptance rate.

  A pseudo-random function of the prompt, the position and the token decides whether a draft token
  has p = 1 or p = 0. Acceptance therefore does not depend on q or on the sampling method, and is
  independent between positions, as Equation 1 assumes. If several siblings would have p = 1, only
  the first of them does. At nodes without children, and after a rejection, the next token has the
  model's own distribution, but EOS and rejected tokens are impossible, so each text has the maximum
  length.

  Attributes:
    alpha: probability that a draft token other than EOS is accepted, in [0, 1].
    eos_id: id of EOS of the target; -1 if it has no EOS.
    seed: seed of the pseudo-random function.
  """

  alpha: float
  eos_id: int = -1
  seed: int = 0

  def __post_init__(self):
    object.__setattr__(self, "alpha", require_number("alpha", self.alpha, 0, 1))

  def prefill(
    self, params: Any, prompt: Prompt, num_slots: int
  ) -> tuple[Float[Array, "B C E"], SimulatedCache]:
    hidden, cache = self.model.prefill(params, prompt, num_slots)
    # Padding adds 0 to the hash, which is therefore independent of the width of the batch.
    ids = prompt_ids(prompt)
    powers = np.cumprod(np.full(ids.shape[1], _BASE), dtype=np.uint32)
    salt = (ids.astype(jnp.uint32) * powers).sum(axis=1, dtype=jnp.uint32)
    return hidden, SimulatedCache(cache, salt)

  def extend(
    self,
    params: Any,
    cache: SimulatedCache,
    tokens: Int[Array, "B K"],
    tree: NodeLayout | None = None,
    first: Int[Array, ""] | int = 0,
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K E"], SimulatedCache]:
    model_logits, hidden, inner = self.model.extend(params, cache.model, tokens, tree, first)
    tree = require_static("simulated acceptance", tree or chain(tokens.shape[1] - 1))
    draft_tokens, parents = tokens[:, 1:], np.array(tree.parents, np.int32)
    positions = (cache.length + first)[:, None] + jnp.asarray(tree.depths[None, 1:])
    hashed = (cache.salt[:, None] * _BASE + positions.astype(jnp.uint32)) * _BASE
    right = jax.vmap(jax.vmap(self._is_right))(hashed + draft_tokens.astype(jnp.uint32))  # [B, N]
    # is_earlier[i, j]: j is an earlier sibling of i.
    is_earlier = ((parents[:, None] == parents) & (tree.ranks[:, None] > tree.ranks))[None]
    is_repeated = (is_earlier & (draft_tokens[:, :, None] == draft_tokens[:, None])).any(axis=-1)
    right &= ~(right[:, None] & is_earlier).any(axis=-1)
    vocabulary = jnp.arange(model_logits.shape[-1])[None, None]
    bonus = jnp.where(is_repeated, 0.0, jnp.where(right, CERTAIN, -CERTAIN))
    bonus = bonus[..., None] * (draft_tokens[..., None] == vocabulary)
    if tree.is_chain:
      bonus = jnp.pad(bonus, ((0, 0), (0, 1), (0, 0)))  # the last token verifies no draft token
    else:
      bonus = jnp.zeros_like(model_logits).at[:, parents].add(bonus)
    # The bonus is added to the logits, so that the compiler cannot drop the model's computation.
    logits = model_logits.astype(jnp.float32) + jnp.where(
      vocabulary == self.eos_id, -CERTAIN, bonus
    )
    return logits, hidden, cache.replace(model=inner)

  def commit(
    self, cache: SimulatedCache, length: Length, tree: AnyTree | None = None, path: Path = None
  ) -> SimulatedCache:
    return cache.replace(model=self.model.commit(cache.model, length, tree, path))

  def _is_right(self, hashed: UInt[Array, ""]) -> Bool[Array, ""]:
    key = jax.random.fold_in(jax.random.key(self.seed), hashed)
    return jax.random.uniform(key, (), jnp.float32) < self.alpha


def unwrapped(model: Model) -> Model:
  """Return the model that a `SimulatedModel` wraps; return any other model unchanged."""
  return model.model if isinstance(model, SimulatedModel) else model


def unwrapped_cache(cache: Any) -> Any:
  """Return the cache that a `SimulatedCache` wraps; return any other cache unchanged."""
  return cache.model if isinstance(cache, SimulatedCache) else cache
