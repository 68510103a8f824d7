"""Joint verification: block verification of chains, traversal verification of trees. Exact.

Sources: Sun et al., Block Verification Accelerates Speculative Decoding (ICLR 2025), for chains,
and Traversal Verification for Speculative Tree Decoding (NeurIPS 2025), for trees; on a chain the
two agree. On a chain a round emits at least as many tokens in expectation as a round of
`tokens.TokenVerifier`; on a tree with branches of different depth it may emit fewer. With one draft
token, and at temperature 0, the two verifiers agree.

Each node has a probability a that the path to it is accepted, given the rejections so far, and a
residual target distribution P, at first p. The last committed token has a = 1. A child x sampled
from q starts with a' = min(1, a P(x) / q(x)). If the subtree of x is rejected, a and P of its
parent change: with m = max(0, a P - q) and s = sum m, a becomes s / (s + 1 - a) and P becomes
m / s. The acceptance probability of a node is the value of a after its last child is rejected.

Nodes are visited in post-order, children before their parent and earlier siblings first. The path
ends at the first node whose uniform u is below its acceptance probability, and the next token is
sampled from P of that node. The last committed token is always accepted. So a chain is visited from
its end: the path ends at the last draft token with such a u, even if earlier ones have no such u.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather_one, gather_token, split_rows, take, uniform_rows
from specdec_jax.core.sampling import Sampling, argmax, distribution, sample
from specdec_jax.core.trees import AnyTree, Tree, path_to, require_static
from specdec_jax.core.types import Keys, Proposal, Verification, Verifier
from specdec_jax.core.verify.tokens import follow, validated_q


@dataclasses.dataclass(frozen=True)
class BlockVerifier(Verifier):
  """Verifier that verifies all draft tokens jointly; see the module docstring."""

  sampling: Sampling

  def verify(
    self, rng: Keys, tree: AnyTree, proposal: Proposal, logits: Float[Array, "B K V"]
  ) -> Verification:
    tree = require_static("block verification", tree)
    if self.sampling.is_argmax:
      return follow(tree, proposal.tokens, argmax(logits))
    return traverse(rng, tree, proposal, distribution(logits, self.sampling))


def traverse(rng: Keys, tree: Tree, proposal: Proposal, p: Float[Array, "B K V"]) -> Verification:
  """Verify draft tokens so that emitted tokens have the target's distribution."""
  q = validated_q(tree, proposal, p)
  accept_rng, next_rng = split_rows(rng)
  u = uniform_rows(accept_rng, tree.num_nodes)
  on_visit, after_children = acceptance_probs(tree, proposal.tokens, q, p)
  order = np.array(post_order(tree))
  accepts = take(u < after_children, order).at[:, -1].set(True)  # the last committed token
  end = jnp.asarray(order)[accepts.argmax(axis=1)]
  weights = residual_at(tree, q, p, on_visit, end)
  return Verification(jnp.asarray(tree.depths)[end], sample(next_rng, weights), path_to(tree, end))


def acceptance_probs(
  tree: Tree, tokens: Int[Array, "B N"], q: Float[Array, "B N V"], p: Float[Array, "B K V"]
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
  """Return the acceptance probability a of each node before and after its children are rejected.

  All nodes of a level are computed together, child by child. No random numbers are needed, because
  a node is visited only after all nodes before it in post-order were rejected.
  """
  on_visit = after_children = jnp.ones((len(p), tree.num_nodes), p.dtype)
  for first, last in [(0, 1), *tree.levels]:
    nodes, a, weights = np.arange(first, last), on_visit[:, first:last], p[:, first:last]
    after_children = after_children.at[:, nodes].set(a)
    for rank in range(tree.width):
      draft_tokens = tree.children[nodes, rank]
      has_child = np.flatnonzero(draft_tokens < tree.num_draft_tokens)
      if not len(has_child):
        break
      nodes, draft_tokens = nodes[has_child], draft_tokens[has_child]
      a, weights, child_q = take(a, has_child), take(weights, has_child), take(q, draft_tokens)
      x = take(tokens, draft_tokens)
      ratio = a * gather_token(weights, x) / gather_token(child_q, x)
      on_visit = on_visit.at[:, draft_tokens + 1].set(jnp.minimum(1.0, ratio))
      a, weights = after_rejection(a, weights, child_q)
      after_children = after_children.at[:, nodes].set(a)
  return on_visit, after_children


def residual_at(
  tree: Tree,
  q: Float[Array, "B N V"],
  p: Float[Array, "B K V"],
  on_visit: Float[Array, "B K"],
  end: Int[Array, " B"],
) -> Float[Array, "B V"]:
  """Return weights of the next token after the node `end`, all of whose subtrees were rejected."""
  a, weights = gather_one(on_visit, end), gather_one(p, end)
  for children in tree.children.T:
    child = jnp.asarray(children)[end]
    child_q = gather_one(q, jnp.minimum(child, tree.num_draft_tokens - 1))
    next_a, next_weights = after_rejection(a, weights, child_q)
    has_child = child < tree.num_draft_tokens
    a = jnp.where(has_child, next_a, a)
    weights = jnp.where(has_child[:, None], next_weights, weights)
  return weights


def after_rejection(
  a: Float[Array, "*batch"], weights: Float[Array, "*batch V"], q: Float[Array, "*batch V"]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch V"]]:
  """Return the acceptance probability a and the residual P of a node after a child is rejected.

  The child was sampled from q. If m = 0, P stays; a becomes 0, or stays 1 if P = q up to rounding.
  """
  target = a[..., None] * weights
  above = target > q  # compared first, as in `tokens.residual`
  m = jnp.where(above, jnp.maximum(target - q, jnp.finfo(q.dtype).tiny), 0.0)
  s = m.sum(axis=-1)
  remains = s > 0
  a = jnp.where(remains, s / jnp.where(remains, s + (1 - a), 1.0), jnp.where(a < 1, 0.0, 1.0))
  normalized = m / jnp.where(remains, s, 1.0)[..., None]
  return a, jnp.where(remains[..., None], normalized, weights)


def post_order(tree: Tree) -> list[int]:
  """Return all nodes in post-order: children before their parent, earlier siblings first."""

  def visit(node: int) -> list[int]:
    children = [
      draft_token + 1 for draft_token, parent in enumerate(tree.parents) if parent == node
    ]
    return [*(x for child in children for x in visit(child)), node]

  return visit(0)
