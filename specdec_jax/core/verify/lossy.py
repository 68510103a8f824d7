"""Rules that accept more than is exact. Lossy: each changes the distribution of the text.

What a verifier costs is the total variation between p and what a node with one guess emits, which
`emitted` of each verifier says. Lenience, lossy too, is `tokens.TokenVerifier`'s.
"""

import abc
import dataclasses
import math

import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.core.sampling import Sampling, distribution, sample
from specdec_jax.core.trees import AnyTree, path_to, require_static, take
from specdec_jax.core.types import Proposal, Verification
from specdec_jax.core.verify.tokens import laws, normalised
from specdec_jax.errors import require_count, require_number


class _Agreeing(abc.ABC):
  """A guess stands if it is among the tokens that the target agrees to; the next token is one too.

  It does not matter what q was. Of all paths of guesses that stand the longest is taken, of equal
  ones the first.
  """

  sampling: Sampling

  @property
  def exact(self) -> bool:
    """Whether the output is the target's own."""
    return False

  @abc.abstractmethod
  def agrees(self, p: Array) -> Array:
    """Which tokens [..., V] of p [..., V] the target agrees to; at least its likeliest."""

  def accept(self, rng: Array, tree: AnyTree, proposal: Proposal, logits: Array) -> Verification:
    """Judge a proposal by the target's logits [B, K, V] at its nodes, with keys rng [B]."""
    tree, p = require_static("a lossy verifier", tree), distribution(logits, self.sampling)
    laws(tree, proposal, p)  # the shapes fit
    greedy = (
      self.sampling.temperature == 0
    )  # then it agrees to more than the likeliest all the same
    agreed = self.agrees(distribution(logits, Sampling()) if greedy else p)
    of_parents, x = take(agreed, tree.parents), proposal.tokens[..., None]
    stands = jnp.take_along_axis(of_parents, x, axis=-1)[..., 0]
    reached = (stands[:, None] | ~tree.ancestors[1:, 1:]).all(axis=-1)
    depths = jnp.where(reached, tree.depths[1:], 0)
    n = depths.max(axis=1, initial=0)
    end = jnp.where(n > 0, 1 + (depths == n[:, None]).argmax(axis=1), 0)
    weights = jnp.where(agreed, p, 0.0)
    left = jnp.take_along_axis(weights, end[:, None, None], axis=1)[:, 0]
    return Verification(n, sample(rng, left), path_to(tree, end))

  def emitted(self, p: Array, q: Array) -> Array:
    """Distribution [..., V] of the token that a guess from q [..., V] and its judgement emit."""
    agreed = self.agrees(p)
    stands = jnp.where(agreed, q, 0.0)
    refused = 1 - stands.sum(axis=-1, keepdims=True)
    return stands + refused * normalised(jnp.where(agreed, p, 0.0))


@dataclasses.dataclass(frozen=True)
class TypicalVerifier(_Agreeing):
  """Typical acceptance (Medusa; Cai et al., 2024): p(x) > min(epsilon, delta exp(-H(p))).

  Attributes:
    sampling: how the target's logits become p.
    epsilon: most that is asked of a token.
    delta: share of exp(-H), which is what a token has where all are alike.

  Raises:
    InputError: epsilon or delta is not positive.
  """

  sampling: Sampling
  epsilon: float = 0.09
  delta: float = 0.3

  def __post_init__(self):
    for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
      object.__setattr__(self, name, require_number(name, value, 0, math.inf, "()"))

  def agrees(self, p: Array) -> Array:
    """Which tokens [..., V] of p [..., V] are typical; the likeliest is, whatever p."""
    entropy = -jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0).sum(-1, keepdims=True)
    least = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
    return (p > least) | (p == p.max(axis=-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class TopBetaVerifier(_Agreeing):
  """SpecDec's (Xia et al., 2023): x stands if it is among the target's `beta` best and its
  log-probability lies within `tau` of the best's.

  Attributes:
    sampling: how the target's logits become p.
    beta: how many.
    tau: in nats.

  Raises:
    InputError: beta is no whole number from 1, or tau is negative.
  """

  sampling: Sampling
  beta: int = 3
  tau: float = 1.0

  def __post_init__(self):
    require_count("beta", self.beta)
    object.__setattr__(self, "tau", require_number("tau", self.tau, 0, math.inf))

  def agrees(self, p: Array) -> Array:
    """Which tokens [..., V] of p [..., V] are among the best and near the best of all."""
    best, _ = lax.top_k(p, min(self.beta, p.shape[-1]))
    return (p >= best[..., -1:]) & (p >= best[..., :1] * math.exp(-self.tau))
