"""Rejection sampling, which the paper compares with speculative sampling (Appendix A.2). Exact.

The appendix has an iteration: sample x from q, return x if u < p(x) / (M q(x)) for a uniform u in
[0, 1) and M = max p / q, and otherwise try again. Each try returns x with probability p(x) / M, so
the token of the iteration has distribution p, whatever was rejected before. A try succeeds with
probability 1 / M = min q / p, often 0 for a whole vocabulary.

In a round, the children of a node are its first tries, each sampled from q independently. If all
are rejected, the rest of the iteration needs no further tries: the token that it would return has
distribution p, and is sampled from p. There is no residual. With one child, this is the
"non-iterative version" of the appendix. At temperature 0 the argmax is accepted.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather_one, gather_token, split_rows, take, uniform_rows
from specdec_jax.core.sampling import Sampling, distribution, sample
from specdec_jax.core.trees import AnyTree, Tree, require_static
from specdec_jax.core.types import Keys, Proposal, Verification, Verifier
from specdec_jax.core.verify.tokens import accepted_path, validated_q


@dataclasses.dataclass(frozen=True)
class RejectionVerifier(Verifier):
  """Verifier that uses rejection sampling; see the module docstring.

  It is exact for any q, but siblings that are not sampled independently are seldom accepted.
  """

  sampling: Sampling
  needs_independent_siblings = True

  def verify(
    self, rng: Keys, tree: AnyTree, proposal: Proposal, logits: Float[Array, "B K V"]
  ) -> Verification:
    tree, p = require_static("rejection sampling", tree), distribution(logits, self.sampling)
    q = validated_q(tree, proposal, p)
    accept_rng, next_rng = split_rows(rng)
    u = uniform_rows(accept_rng, tree.num_draft_tokens)
    q_x, p_x = draft_token_probs(tree, proposal.tokens, q, p)
    num_accepted, end, path = accepted_path(tree, u * q_x < p_x)
    return Verification(num_accepted, sample(next_rng, gather_one(p, end)), path)


def draft_token_probs(
  tree: Tree, tokens: Int[Array, "B N"], q: Float[Array, "B N V"], p: Float[Array, "B K V"]
) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
  """Return q(x) and p(x) / M of each draft token x."""
  parent_p = take(p, tree.parents)
  ratio = jnp.where(parent_p > 0, q / jnp.where(parent_p > 0, parent_p, 1.0), jnp.inf)
  return gather_token(q, tokens), ratio.min(axis=-1) * gather_token(parent_p, tokens)
