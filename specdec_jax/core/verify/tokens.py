"""Token verification: Algorithm 1 for a chain, and for a tree the same sibling by sibling. Exact.

At a node r begins as the target's p. Its children are tried in the order in which they were drawn:
a child x, drawn from q given its elder siblings, stands if u q(x) < r(x), else r becomes
norm(max(0, r - q)). If none stands the next token is drawn from r. A chain has one child a node:
that is Algorithm 1 (Section 2.3). For siblings it holds whether they are drawn independently
(duplicates kept) or without replacement, by one draft or by several, or chosen without chance,
where q is a one-hot.

Lenience l in (0, 1] puts l q in place of q (Appendix A.5): no token's probability grows past p / l.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.core.sampling import Sampling, distribution, sample
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree, path_to, take
from specdec_jax.core.types import Proposal, Verification
from specdec_jax.errors import InputError, require_number


@dataclasses.dataclass(frozen=True)
class TokenVerifier:
  """Each guess judged by itself; see the module.

  Attributes:
    sampling: how the target's logits become p.
    lenience: l; 1 for exactness.

  Raises:
    InputError: lenience outside (0, 1].
  """

  sampling: Sampling
  lenience: float = 1.0

  def __post_init__(self):
    lenience = require_number("lenience", self.lenience, 0, 1, "(]", ", with 1 for exactness")
    object.__setattr__(self, "lenience", lenience)

  @property
  def exact(self) -> bool:
    """Whether the output is the target's own."""
    return self.lenience == 1

  def accept(self, rng: Array, tree: AnyTree, proposal: Proposal, logits: Array) -> Verification:
    """Judge a proposal by the target's logits [B, K, V] at its nodes, with keys rng [B].

    Raises:
      InputError: lenience below 1 and a tree that changes its shape.
    """
    p, agreed = distribution(logits, self.sampling), None
    if isinstance(tree, DynamicTree):
      if self.lenience < 1:
        raise InputError("A tree that changes its shape is judged without lenience.")
      return verify_chosen(rng, tree, proposal.tokens, p)
    if self.sampling.temperature == 0 and self.lenience < 1:
      agreed = within_lenience(take(logits, tree.parents), proposal.tokens, self.lenience)
    return verify(rng, tree, proposal, p, self.lenience, agreed)


def verify(
  rng: Array,
  tree: Tree,
  proposal: Proposal,
  p: Array,
  lenience: float = 1.0,
  agreed: Array | None = None,
) -> Verification:
  """Judge guesses so that what is emitted is distributed as the target.

  Args:
    rng: keys [B], so that a row does not depend on its neighbours.
    tree: shape of the guesses.
    proposal: guesses [B, N], and the q [B, N, V] that each was drawn from.
    p: the target's distributions at the nodes, [B, K, V], adjusted by the same sampling method.
    lenience: l.
    agreed: [B, N], guesses that stand whatever p says.

  Returns:
    The verification: n accepted guesses and the token after them.
  """
  q = laws(tree, proposal, p)
  accept_rng, next_rng = jax.vmap(jax.random.split, out_axes=1)(rng)
  # Accept a guess with probability min(1, r / (l q)). Compared, not divided, and strictly: u < 1,
  # so r >= q always passes and r = 0 never does.
  u = jax.vmap(lambda key: jax.random.uniform(key, (tree.num_guesses,)))(accept_rng)
  q_x, r_x = guess_probs(tree, proposal.tokens, q, p, lenience)
  accepted = u * lenience * q_x < r_x
  if agreed is not None:
    accepted |= agreed
  accepted &= proposal.tokens >= 0  # the others were not made
  num_accepted, end, path = accepted_path(tree, accepted)
  return Verification(num_accepted, sample(next_rng, residual_at(tree, q, p, end, lenience)), path)


def verify_chosen(rng: Array, tree: DynamicTree, tokens: Array, p: Array) -> Verification:
  """Judge guesses [B, N] that were all chosen, by p [B, K, V] at the nodes and keys rng [B].

  What `verify` does with one-hots comes to this: the token after each node is drawn from p, and a
  child that is that token stands.
  """
  keys = jax.vmap(lambda key: jax.random.split(key, tree.num_nodes))(rng)
  drawn = jax.vmap(sample, in_axes=1, out_axes=1)(keys, p)  # [B, K]
  stands = jnp.take_along_axis(drawn, tree.parents, axis=1) == tokens
  ancestors = tree.ancestors[:, 1:, 1:]
  reached = (stands[:, None] | ~ancestors).all(axis=-1)  # parents before children: the last is end
  end = jnp.where(reached, jnp.arange(1, tree.num_nodes), 0).max(axis=1)
  next_token = jnp.take_along_axis(drawn, end[:, None], axis=1)[:, 0]
  return Verification(reached.sum(axis=1), next_token, path_to(tree, end))


def laws(tree: Tree, proposal: Proposal, p: Array) -> Array:
  """q [B, N, V] of a proposal, one-hots where it was chosen, once all shapes are known to fit."""
  batch, _, vocab_size = p.shape
  tokens, num_guesses = proposal.tokens, tree.num_guesses
  q = jax.nn.one_hot(tokens, vocab_size) if proposal.q is None else proposal.q
  if (tokens.shape, q.shape, p.shape[1]) != (
    (batch, num_guesses),
    (batch, num_guesses, vocab_size),
    tree.num_nodes,
  ):
    raise InputError(
      f"A tree of N = {num_guesses} guesses goes with tokens [B, N], q [B, N, V] and p "
      f"[B, N + 1, V]; given {tokens.shape}, {q.shape} and {p.shape}."
    )
  return q


def guess_probs(
  tree: Tree, tokens: Array, q: Array, p: Array, lenience: float = 1.0
) -> tuple[Array, Array]:
  """q(x) and r(x) [B, N] of each guess x, should it be tried.

  All eldest children are judged at once, then those next in age, by what their elders left.
  """
  of_drafts, of_targets = [], []
  order: list[np.ndarray] = []
  for rank in range(tree.width):
    guesses = np.flatnonzero(tree.ranks == rank)
    if rank == 0:
      r = take(p, np.array(tree.parents)[guesses])
    else:
      had_next = np.flatnonzero(np.isin(order[-1], guesses - 1))  # siblings lie beside each other
      r = normalised(residual(take(r, had_next), take(q, guesses - 1), lenience))
    x = take(tokens, guesses)[..., None]
    of_drafts.append(jnp.take_along_axis(take(q, guesses), x, axis=-1)[..., 0])
    of_targets.append(jnp.take_along_axis(r, x, axis=-1)[..., 0])
    order.append(guesses)
  if not order:
    return q[..., 0], q[..., 0]  # no guesses: [B, 0]
  in_order = np.argsort(np.concatenate(order))
  q_x, r_x = (take(jnp.concatenate(x, axis=1), in_order) for x in (of_drafts, of_targets))
  return q_x, r_x


def residual_at(tree: Tree, q: Array, p: Array, end: Array, lenience: float = 1.0) -> Array:
  """Weights [B, V] of the next token after the node `end` [B], whose children were all refused.

  norm(max(0, p - l q)) for a chain; with q = 0 where there is no child, that is also the bonus
  token's p.
  """
  at = lambda probs, nodes: jnp.take_along_axis(probs, nodes[:, None, None], axis=1)[:, 0]
  left = at(p, end)
  for rank, children in enumerate(tree.children.T):
    child = end if tree.is_chain else jnp.asarray(children)[end]
    of_child = at(q, jnp.minimum(child, tree.num_guesses - 1))
    of_child = jnp.where((child < tree.num_guesses)[:, None], of_child, 0.0)
    left = residual(left if rank == 0 else normalised(left), of_child, lenience)
  return left


def accepted_path(tree: Tree, accepted: Array) -> tuple[Array, Array, Array | None]:
  """How far the guesses that stand, accepted [B, N], reach from the newest token without a gap.

  Of siblings the eldest that stands counts. Returns n [B], the node [B] where they end, and the
  path [B, D] to it, None for a chain.
  """
  if tree.is_chain:
    n = jnp.cumprod(accepted, axis=1).sum(axis=1)
    return n, n, None
  parents = np.array(tree.parents)
  elder = (parents[:, None] == parents) & (tree.ranks[:, None] > tree.ranks)
  chosen = accepted & ~(accepted[:, None] & elder).any(axis=-1)
  reached = (chosen[:, None] | ~tree.ancestors[1:, 1:]).all(axis=-1)
  end = jnp.where(reached, jnp.arange(1, tree.num_nodes), 0).max(axis=1)
  return reached.sum(axis=1), end, path_to(tree, end)


def normalised(weights: Array) -> Array:
  """weights [..., V], not all 0, as a distribution."""
  return weights / weights.sum(axis=-1, keepdims=True)


def residual(p: Array, q: Array, lenience: float = 1.0) -> Array:
  """Weights [..., V] of what replaces a refused guess: max(0, p - l q) (Section 2.3).

  p = q up to rounding can leave nothing at all; a refusal then had probability 0 up to rounding,
  and p itself is the right limit.
  """
  q = lenience * q
  # Decided by comparing: a compiler may work out p - q twice, rounded in two ways (a fused
  # multiply-add in one), and then what is found to be left in one place is not there in the other.
  above = p > q
  left = jnp.where(above, jnp.maximum(p - q, jnp.finfo(p.dtype).tiny), 0.0)
  return jnp.where(above.any(axis=-1, keepdims=True), left, p)


def emitted_distribution(p: Array, q: Array, lenience: float = 1.0) -> Array:
  """Distribution [..., V] of what one guess from q and its judgement emit: p itself if l = 1.

  min(q, p / l) + (1 - sum min(q, p / l)) norm(residual), which never exceeds p / l (Appendix A.5).
  """
  accepted = jnp.minimum(q, p / lenience)
  refused = 1 - accepted.sum(axis=-1, keepdims=True)
  return accepted + refused * normalised(residual(p, q, lenience))


def within_lenience(logits: Array, guesses: Array, lenience: float) -> Array:
  """Argmax with lenience: whether p(x) >= l max p for guesses x [...] (Appendix A.5).

  Args:
    logits: [..., V]; the verifier compares their softmax.
    guesses: [...].
    lenience: l in (0, 1].
  """
  of_guess = jnp.take_along_axis(logits, guesses[..., None], axis=-1)[..., 0]
  return of_guess >= logits.max(axis=-1) + jnp.log(lenience)
