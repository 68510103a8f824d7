"""K-SEQ: verification of independently sampled siblings with one common threshold. Exact.

Source: Sun et al., SpecTr: Fast Speculative Decoding via Optimal Transport (NeurIPS 2023). K
siblings x are sampled from one q, possibly with duplicates. The first with u < p(x) / (rho q(x)) is
accepted, where each has its own u, uniform in [0, 1). The threshold rho in [1, K] solves
1 - (1 - beta)^K = rho beta with beta = sum_x min(q(x), p(x) / rho). If all are rejected, the next
token is sampled from p(x) - min(q(x), p(x) / rho) (1 - (1 - beta)^K) / beta, normalized.

The method is exact for siblings that are sampled independently (`Draft.independent_siblings`) and
for chains, where it is Algorithm 1. It is not exact for siblings sampled without replacement.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather, gather_token, split_rows, take, uniform_rows
from specdec_jax.core.sampling import Sampling, distribution, sample
from specdec_jax.core.trees import AnyTree, Tree, require_static
from specdec_jax.core.types import Keys, Proposal, Verification, Verifier
from specdec_jax.core.verify.tokens import accepted_path, validated_q


@dataclasses.dataclass(frozen=True)
class KSeqVerifier(Verifier):
  """Verifier that uses one threshold for all children of a node; see the module docstring."""

  sampling: Sampling
  needs_independent_siblings = True

  def verify(
    self, rng: Keys, tree: AnyTree, proposal: Proposal, logits: Float[Array, "B K V"]
  ) -> Verification:
    tree, p = require_static("K-SEQ", tree), distribution(logits, self.sampling)
    q = validated_q(tree, proposal, p)
    accept_rng, next_rng = split_rows(rng)
    u = uniform_rows(accept_rng, tree.num_draft_tokens)
    q_x, p_x = draft_token_probs(tree, proposal.tokens, q, p)
    num_accepted, end, path = accepted_path(tree, u * q_x < p_x)
    return Verification(num_accepted, sample(next_rng, residual_at(tree, q, p, end)), path)


def draft_token_probs(
  tree: Tree, tokens: Int[Array, "B N"], q: Float[Array, "B N V"], p: Float[Array, "B K V"]
) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
  """Return rho q(x) and p(x) of each draft token x, where rho is the threshold of its siblings."""
  parents = np.array(tree.parents)
  counts = tree.num_children[None, parents].astype(np.float32)
  parent_p = take(p, parents)
  rho = threshold(q, parent_p, counts)
  return rho * gather_token(q, tokens), gather_token(parent_p, tokens)


def threshold(
  q: Float[Array, "B N V"], p: Float[Array, "B N V"], count: np.ndarray | Array
) -> Float[Array, "B N"]:
  """Return the threshold rho for K = `count` siblings sampled from q and verified against p.

  The threshold is found by bisection: 1 - (1 - beta)^K - rho beta decreases from at least 0 at
  rho = 1 to at most 0 at rho = K.
  """

  def halve(_, bounds):
    low, high = bounds
    rho = (low + high) / 2
    beta = jnp.minimum(q, p / rho[..., None]).sum(axis=-1)
    too_small = 1 - (1 - beta) ** count > rho * beta
    return jnp.where(too_small, rho, low), jnp.where(too_small, high, rho)

  ones = jnp.ones(q.shape[:-1], q.dtype)
  return lax.fori_loop(0, 24, halve, (ones, ones * count))[1]


def residual_at(
  tree: Tree, q: Float[Array, "B N V"], p: Float[Array, "B K V"], end: Int[Array, " B"]
) -> Float[Array, "B V"]:
  """Return weights of the next token after the node `end`, whose children were all rejected."""
  count = jnp.asarray(tree.num_children, jnp.int32)[end]
  child = jnp.asarray(tree.children[:, 0])[end]
  child_q = gather(q, jnp.minimum(child, tree.num_draft_tokens - 1)[:, None])  # [B, 1, V]
  target = gather(p, end[:, None])
  q_or_0 = jnp.where((count > 0)[:, None, None], child_q, 0.0)
  rho = threshold(child_q, target, jnp.maximum(count, 1)[:, None])
  accepted = jnp.minimum(q_or_0, target / rho[..., None])
  beta = accepted.sum(axis=-1, keepdims=True)
  share = (1 - (1 - beta) ** count[:, None, None]) / jnp.where(beta > 0, beta, 1.0)
  weights = jnp.maximum(target - accepted * share, 0.0)
  return jnp.where(weights.any(axis=-1, keepdims=True), weights, target)[:, 0]
