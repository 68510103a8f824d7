"""K-SEQ: the children of a node drawn independently, and judged by one threshold for all. Exact.

Sun et al., SpecTr: Fast Speculative Decoding via Optimal Transport (NeurIPS 2023). With
beta(rho) = sum_x min(q(x), p(x) / rho), rho in [1, K] solves 1 - (1 - beta)^K = rho beta. Of K
guesses drawn from one q, duplicates kept, the first with u < p(x) / (rho q(x)) stands; if none does
the next token is drawn from p(x) - min(q(x), p(x) / rho) (1 - (1 - beta)^K) / beta, normalised.

It is exact for guesses that are drawn so (`drafts.model.ModelDraft.independent`), and for chains,
where it is Algorithm 1; not for children without replacement.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specdec_jax.core.sampling import Sampling, distribution, sample
from specdec_jax.core.trees import AnyTree, Tree, require_static, take
from specdec_jax.core.types import Proposal, Verification
from specdec_jax.core.verify.tokens import accepted_path, laws


@dataclasses.dataclass(frozen=True)
class KSeqVerifier:
  """Siblings judged by one threshold; see the module.

  Attributes:
    sampling: how the target's logits become p.
  """

  sampling: Sampling

  @property
  def exact(self) -> bool:
    """Whether the output is the target's own."""
    return True

  def accept(self, rng: Array, tree: AnyTree, proposal: Proposal, logits: Array) -> Verification:
    """Judge a proposal by the target's logits [B, K, V] at its nodes, with keys rng [B]."""
    tree, p = require_static("K-SEQ", tree), distribution(logits, self.sampling)
    q = laws(tree, proposal, p)
    accept_rng, next_rng = jax.vmap(jax.random.split, out_axes=1)(rng)
    u = jax.vmap(lambda key: jax.random.uniform(key, (tree.num_guesses,)))(accept_rng)
    q_x, p_x = guess_probs(tree, proposal.tokens, q, p)
    num_accepted, end, path = accepted_path(tree, u * q_x < p_x)
    return Verification(num_accepted, sample(next_rng, residual_at(tree, q, p, end)), path)


def guess_probs(tree: Tree, tokens: Array, q: Array, p: Array) -> tuple[Array, Array]:
  """rho q(x) and p(x) [B, N] of each guess x, should it be tried."""
  parents = np.array(tree.parents)
  counts = np.array([tree.parents.count(parent) for parent in parents], np.float32)
  of_guess = lambda probs: jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
  target = take(p, parents)
  return threshold(q, target, counts) * of_guess(q), of_guess(target)


def threshold(q: Array, p: Array, count: np.ndarray | Array) -> Array:
  """rho [B, N] of `count` [..., N] guesses drawn from q [B, N, V] against p [B, N, V].

  By bisection: 1 - (1 - beta)^K - rho beta falls from not below 0 at rho = 1 to not above it at K.
  """

  def halve(_, bounds):
    low, high = bounds
    rho = (low + high) / 2
    beta = jnp.minimum(q, p / rho[..., None]).sum(axis=-1)
    too_small = 1 - (1 - beta) ** count > rho * beta
    return jnp.where(too_small, rho, low), jnp.where(too_small, high, rho)

  ones = jnp.ones(q.shape[:-1])
  return lax.fori_loop(0, 24, halve, (ones, ones * count))[1]


def residual_at(tree: Tree, q: Array, p: Array, end: Array) -> Array:
  """Weights [B, V] of the next token after the node `end` [B], whose children were all refused."""
  at = lambda x, nodes: jnp.take_along_axis(x, nodes[:, None, None], axis=1)
  count = jnp.asarray([tree.parents.count(node) for node in range(tree.num_nodes)])[end]
  child = jnp.asarray(tree.children[:, 0])[end]
  law = at(q, jnp.minimum(child, tree.num_guesses - 1))
  target, q_or_0 = at(p, end), jnp.where((count > 0)[:, None, None], law, 0.0)
  rho = threshold(law, target, jnp.maximum(count, 1)[:, None])
  taken = jnp.minimum(q_or_0, target / rho[..., None])
  beta = taken.sum(axis=-1, keepdims=True)
  share = (1 - (1 - beta) ** count[:, None, None]) / jnp.where(beta > 0, beta, 1.0)
  left = jnp.maximum(target - taken * share, 0.0)
  return jnp.where(left.any(axis=-1, keepdims=True), left, target)[:, 0]
