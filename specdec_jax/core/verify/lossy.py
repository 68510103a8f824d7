"""Lossy verifiers, which accept more tokens than exactness allows and change the distribution.

The loss of a verifier is the total variation distance between p and the distribution of the emitted
token if one draft token is verified. The method `emitted` of a lossy verifier returns that
distribution. Lenience is lossy too; it is an option of `tokens.TokenVerifier`.
"""

import abc
import dataclasses
import math

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from specdec_jax.core.arrays import gather_one, gather_token, take
from specdec_jax.core.sampling import Sampling, distribution, sample
from specdec_jax.core.trees import AnyTree, path_to, require_static
from specdec_jax.core.types import Keys, Proposal, Verification, Verifier
from specdec_jax.core.verify.tokens import normalised, residual, validated_q
from specdec_jax.errors import require_number


class AcceptableSetVerifier(Verifier):
  """Base class of verifiers that accept the draft tokens in a set that depends on the target only.

  By default, the next token is sampled from p restricted to this set. At temperature 0, the set is
  that of the softmax of the logits. q is ignored. Of all accepted paths the longest is taken; of
  several longest ones, the first.
  """

  exact = False
  allows_short_proposals = True

  @abc.abstractmethod
  def acceptable(self, p: Float[Array, "*batch V"]) -> Bool[Array, "*batch V"]:
    """Return a mask of the acceptable tokens."""

  def next_weights(
    self, p: Float[Array, "*batch V"], acceptable: Bool[Array, "*batch V"]
  ) -> Float[Array, "*batch V"]:
    """Return weights of the next token; at least the most probable token must be acceptable."""
    return jnp.where(acceptable, p, 0.0)

  def verify(
    self, rng: Keys, tree: AnyTree, proposal: Proposal, logits: Float[Array, "B K V"]
  ) -> Verification:
    tree, p = require_static("a lossy verifier", tree), distribution(logits, self.sampling)
    validated_q(tree, proposal, p)  # checks the shapes
    # At temperature 0 more tokens than the argmax are acceptable, by the unadjusted distribution.
    greedy = self.sampling.is_argmax
    acceptable = self.acceptable(distribution(logits, Sampling()) if greedy else p)
    accepted = gather_token(take(acceptable, tree.parents), proposal.tokens)
    accepted &= proposal.tokens >= 0  # -1 was not proposed
    reached = (accepted[:, None] | ~tree.ancestors[None, 1:, 1:]).all(axis=-1)
    depths = jnp.where(reached, tree.depths[1:], 0)
    n = depths.max(axis=1, initial=0)
    end = jnp.where(n > 0, 1 + (depths == n[:, None]).argmax(axis=1), 0)
    weights = gather_one(self.next_weights(p, acceptable), end)
    return Verification(n, sample(rng, weights), path_to(tree, end))

  def emitted(
    self, p: Float[Array, "*batch V"], q: Float[Array, "*batch V"]
  ) -> Float[Array, "*batch V"]:
    """Return the distribution of the emitted token if one draft token from q is verified."""
    acceptable = self.acceptable(p)
    accepted = jnp.where(acceptable, q, 0.0)
    rejected = 1 - accepted.sum(axis=-1, keepdims=True)
    return accepted + rejected * normalised(self.next_weights(p, acceptable))


@dataclasses.dataclass(frozen=True)
class TypicalVerifier(AcceptableSetVerifier):
  """Verifier with typical acceptance (Medusa; Cai et al., 2024).

  It accepts token x if p(x) > min(epsilon, delta exp(-H(p))), where H is the entropy, or if x is
  the most probable token.

  Attributes:
    epsilon: upper bound of the threshold.
    delta: factor of exp(-H). For n equally probable tokens, exp(-H) is 1/n.
  """

  sampling: Sampling
  epsilon: float = 0.09
  delta: float = 0.3

  def __post_init__(self):
    for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
      object.__setattr__(self, name, require_number(name, value, 0, math.inf, "()"))

  def acceptable(self, p: Float[Array, "*batch V"]) -> Bool[Array, "*batch V"]:
    """Return a mask of the typical tokens; the most probable one is always typical."""
    entropy = -jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0).sum(-1, keepdims=True)
    least = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
    return (p > least) | (p == p.max(axis=-1, keepdims=True))


def emitted_distribution(
  p: Float[Array, "*batch V"], q: Float[Array, "*batch V"], lenience: float = 1.0
) -> Float[Array, "*batch V"]:
  """Return the distribution of the token that `TokenVerifier` emits with one draft token.

  It is a + (1 - sum a) r with a = min(q, p / l), where l is the lenience and r is the normalized
  residual. It equals p if l = 1, and never exceeds p / l (Appendix A.5). At temperature 0 with
  l < 1, `TokenVerifier` accepts more tokens (`within_lenience`), which are not included here.
  """
  accepted = jnp.minimum(q, p / lenience)
  rejected = 1 - accepted.sum(axis=-1, keepdims=True)
  return accepted + rejected * normalised(residual(p, q, lenience))
