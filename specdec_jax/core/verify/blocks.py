"""Block verification of a chain, traversal verification of a tree: guesses judged together. Exact.

Sun et al., Block Verification Accelerates Speculative Decoding (ICLR 2025), for chains, and
Traversal Verification for Speculative Tree Decoding (NeurIPS 2025) for trees, which on a chain is
the same. On a chain never fewer tokens a round are expected than from `tokens.TokenVerifier`; on a tree
of branches of unlike depth there may be. With one guess, and at temperature 0, it is the same verifier.

A node has a, the chance that the path to it is accepted if it is asked for, and P, what is left of
the target there: at first a = 1 at the newest token and P = p. A child x drawn from q has
a' = min(1, a P(x) / q(x)). If all that follows it is refused, then with m = max(0, a P - q) and
s = sum m, a becomes s / (s + 1 - a) and P norm(m). What a is when no child is left is the node's
chance. Nodes are asked in post-order, children before their parent and the eldest first: the first
whose u is below its chance ends the path, and the next token is drawn from what P is there. The
newest token never refuses.

So a chain is asked from its end: of all guesses with u below their chance the last counts, not the
one before the first without.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.core.sampling import Sampling, distribution, sample
from specdec_jax.core.trees import AnyTree, Tree, path_to, require_static, take
from specdec_jax.core.types import Proposal, Verification
from specdec_jax.core.verify.tokens import laws


@dataclasses.dataclass(frozen=True)
class BlockVerifier:
  """Guesses judged together; see the module.

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
    tree = require_static("block verification", tree)
    return traverse(rng, tree, proposal, distribution(logits, self.sampling))


def traverse(rng: Array, tree: Tree, proposal: Proposal, p: Array) -> Verification:
  """Judge guesses so that what is emitted is distributed as the target.

  Args:
    rng: keys [B], so that a row does not depend on its neighbours.
    tree: shape of the guesses.
    proposal: guesses [B, N], and the q [B, N, V] that each was drawn from.
    p: the target's distributions at the nodes, [B, K, V], adjusted by the same sampling method.
  """
  q = laws(tree, proposal, p)
  accept_rng, next_rng = jax.vmap(jax.random.split, out_axes=1)(rng)
  u = jax.vmap(lambda key: jax.random.uniform(key, (tree.num_nodes,)))(accept_rng)
  asked, chance = chances(tree, proposal.tokens, q, p)
  order = np.array(post_order(tree))
  stands = take(u < chance, order).at[:, -1].set(True)  # the newest token, last of all
  end = jnp.asarray(order)[stands.argmax(axis=1)]
  left = residual_at(tree, q, p, asked, end)
  return Verification(jnp.asarray(tree.depths)[end], sample(next_rng, left), path_to(tree, end))


def chances(tree: Tree, tokens: Array, q: Array, p: Array) -> tuple[Array, Array]:
  """What a is [B, K] when each node is asked for, and when its last child has refused.

  For all nodes of a level at once, then for those of them that have one more child. None of it is
  left to chance once the guesses are drawn: whoever is asked, those before have refused.
  """
  asked = ended = jnp.ones((len(p), tree.num_nodes))
  at = lambda x, i: jnp.take_along_axis(x, i[..., None], axis=-1)[..., 0]
  for first, last in [(0, 1), *tree.levels]:
    nodes, a, left = np.arange(first, last), asked[:, first:last], p[:, first:last]
    ended = ended.at[:, nodes].set(a)
    for rank in range(tree.width):
      guesses = tree.children[nodes, rank]
      has_child = np.flatnonzero(guesses < tree.num_guesses)
      if not len(has_child):
        break
      nodes, guesses = nodes[has_child], guesses[has_child]
      a, left, law = take(a, has_child), take(left, has_child), take(q, guesses)
      x = take(tokens, guesses)
      asked = asked.at[:, guesses + 1].set(jnp.minimum(1.0, a * at(left, x) / at(law, x)))
      a, left = refused(a, left, law)
      ended = ended.at[:, nodes].set(a)
  return asked, ended


def residual_at(tree: Tree, q: Array, p: Array, asked: Array, end: Array) -> Array:
  """Weights [B, V] of the next token after the node `end` [B], whose children were all refused."""
  at = lambda x, nodes: jnp.take_along_axis(x, nodes[:, None, None], axis=1)[:, 0]
  a, left = at(asked[..., None], end)[:, 0], at(p, end)
  for children in tree.children.T:
    child = jnp.asarray(children)[end]
    law = at(q, jnp.minimum(child, tree.num_guesses - 1))
    after, has_child = refused(a, left, law), child < tree.num_guesses
    a, left = jnp.where(has_child, after[0], a), jnp.where(has_child[:, None], after[1], left)
  return left


def refused(a: Array, left: Array, q: Array) -> tuple[Array, Array]:
  """a [...] and P [..., V] of a node when all that follows a child drawn from q is refused.

  Where nothing is left the refusal had probability 0 up to rounding, or a is 0.
  """
  target = a[..., None] * left
  above = target > q  # compared first, as in `residual`
  m = jnp.where(above, jnp.maximum(target - q, jnp.finfo(q.dtype).tiny), 0.0)
  s = m.sum(axis=-1)
  some = s > 0
  a = jnp.where(some, s / jnp.where(some, s + 1 - a, 1.0), jnp.where(a < 1, 0.0, 1.0))
  return a, jnp.where(some[..., None], m / jnp.where(some, s, 1.0)[..., None], left)


def post_order(tree: Tree) -> list[int]:
  """All nodes, children before their parent, the eldest first; the newest token is the last."""

  def visit(node: int) -> list[int]:
    below = [g + 1 for g, parent in enumerate(tree.parents) if parent == node]
    return [*(x for child in below for x in visit(child)), node]

  return visit(0)
