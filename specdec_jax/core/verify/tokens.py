"""Token verification: Algorithm 1 for chains, and its generalization to siblings. Exact.

At a node, the residual r starts as the target's p. The children of the node are verified in the
order in which they were sampled. A child x, sampled from q given its earlier siblings, is accepted
if u q(x) < r(x) for a uniform u in [0, 1); otherwise r becomes max(0, r - q), normalized. If all
children are rejected, the next token is sampled from r. For a chain this is Algorithm 1 (Section
2.3). Siblings may be sampled independently (with duplicates) or without replacement, by one or
several drafts. They may also be selected deterministically, with a one-hot as q. At temperature 0
the argmax is accepted, and of equal siblings the one with the longest accepted continuation.

Lenience l in (0, 1] replaces q by l q (Appendix A.5), and is exact only for l = 1. A token is then
emitted with a probability of at most p / l, except at temperature 0 (see `within_lenience`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from specdec_jax.core import arrays
from specdec_jax.core.arrays import gather_one, gather_token, split_rows, take, uniform_rows
from specdec_jax.core.sampling import Sampling, argmax, distribution, sample
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree, path_to, require_static
from specdec_jax.core.types import Keys, Proposal, Verification, Verifier
from specdec_jax.errors import InputError, require_number


@dataclasses.dataclass(frozen=True)
class TokenVerifier(Verifier):
  """Verifier that verifies each draft token separately; see the module docstring.

  Attributes:
    lenience: lenience l in (0, 1]; 1 is exact.
  """

  sampling: Sampling
  lenience: float = 1.0
  allows_short_proposals = True

  def __post_init__(self):
    lenience = require_number("lenience", self.lenience, 0, 1, "(]", ", with 1 for exactness")
    object.__setattr__(self, "lenience", lenience)

  @property
  def exact(self) -> bool:  # type: ignore[override]
    """True if emitted tokens have the target's distribution."""
    return self.lenience == 1

  def with_lenience(self, lenience: float) -> "TokenVerifier":
    return self if lenience == 1 else dataclasses.replace(self, lenience=lenience)

  def verify(
    self, rng: Keys, tree: AnyTree, proposal: Proposal, logits: Float[Array, "B K V"]
  ) -> Verification:
    if self.sampling.is_argmax and self.lenience == 1:
      return follow(tree, proposal.tokens, argmax(logits))
    p, always_accepted = distribution(logits, self.sampling), None
    if isinstance(tree, DynamicTree):
      if self.lenience < 1:
        raise InputError("A dynamic tree is verified without lenience; use lenience 1.")
      keys = jax.vmap(lambda key: jax.random.split(key, tree.num_nodes))(rng)
      tokens = jax.vmap(sample, in_axes=1, out_axes=1)(keys, p)
      return follow(tree, without_repeats(tree, proposal.tokens), tokens)
    if self.sampling.is_argmax:
      parent_logits = take(logits, tree.parents)
      always_accepted = within_lenience(parent_logits, proposal.tokens, self.lenience)
    return verify(rng, tree, proposal, p, self.lenience, always_accepted)


def verify(
  rng: Keys,
  tree: Tree,
  proposal: Proposal,
  p: Float[Array, "B K V"],
  lenience: float = 1.0,
  always_accepted: Bool[Array, "B N"] | None = None,
) -> Verification:
  """Verify draft tokens; without lenience, emitted tokens have the target's distribution.

  Args:
    p: the target's distribution after each node, by the sampling method of the output.
    lenience: lenience l in (0, 1]; 1 is exact.
    always_accepted: mask of draft tokens that are accepted regardless of p.
  """
  q = validated_q(tree, proposal, p)
  accept_rng, next_rng = split_rows(rng)
  # Accept with probability min(1, r / (l q)). The comparison is strict and nothing is divided:
  # since u < 1, a token with r >= q is always accepted, and a token with r = 0 never is.
  u = uniform_rows(accept_rng, tree.num_draft_tokens)
  q_x, r_x = draft_token_probs(tree, proposal.tokens, q, p, lenience)
  accepted = u * lenience * q_x < r_x
  if always_accepted is not None:
    accepted |= always_accepted
  accepted &= proposal.tokens >= 0  # -1 was not proposed
  num_accepted, end, path = accepted_path(tree, accepted)
  next_token = sample(next_rng, residual_at(tree, proposal.tokens, q, p, end, lenience))
  return Verification(num_accepted, next_token, path)


def follow(
  tree: AnyTree, draft_tokens: Int[Array, "B N"], tokens: Int[Array, "B K"]
) -> Verification:
  """Accept the draft tokens that equal the target's tokens, sampled from p at each node.

  This is exact if equal siblings have equal target tokens, as at temperature 0 and with Gumbel
  noise, or if siblings are distinct. For draft tokens that were all selected deterministically, the
  result has the same distribution as that of `verify`.
  """
  parents = jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), draft_tokens.shape)
  depths = jnp.broadcast_to(tree.row_depths, tokens.shape)
  accepted = arrays.gather(tokens, parents) == draft_tokens
  reached = (accepted[:, None] | ~tree.row_ancestors[:, 1:, 1:]).all(axis=-1)
  reached = jnp.pad(reached, ((0, 0), (1, 0)), constant_values=True)
  end = jnp.where(reached, depths, -1).argmax(axis=1)  # the first of the deepest reached nodes
  return Verification(gather_one(depths, end), gather_one(tokens, end), path_to(tree, end))


def without_repeats(tree: AnyTree, draft_tokens: Int[Array, "B N"]) -> Int[Array, "B N"]:
  """Return the draft tokens, with -1 for each one that is equal to an earlier sibling."""
  parents = jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), draft_tokens.shape)
  is_equal = draft_tokens[:, :, None] == draft_tokens[:, None]
  is_sibling = parents[:, :, None] == parents[:, None]
  earlier = np.tri(draft_tokens.shape[1], k=-1, dtype=bool)
  return jnp.where((is_equal & is_sibling & earlier[None]).any(axis=-1), -1, draft_tokens)


def validated_q(tree: Tree, proposal: Proposal, p: Float[Array, "B K V"]) -> Float[Array, "B N V"]:
  """Return the distributions q of a proposal; if it has none, return one-hots of its tokens."""
  batch, _, vocab_size = p.shape
  tokens, num_draft_tokens = proposal.tokens, tree.num_draft_tokens
  q = jax.nn.one_hot(tokens, vocab_size, dtype=jnp.float32) if proposal.q is None else proposal.q
  if (tokens.shape, q.shape, p.shape[1]) != (
    (batch, num_draft_tokens),
    (batch, num_draft_tokens, vocab_size),
    tree.num_nodes,
  ):
    raise InputError(
      f"A tree of N = {num_draft_tokens} draft tokens goes with tokens [B, N], q [B, N, V] and p "
      f"[B, N + 1, V]; given {tokens.shape}, {q.shape} and {p.shape}."
    )
  return q


def draft_token_probs(
  tree: Tree,
  tokens: Int[Array, "B N"],
  q: Float[Array, "B N V"],
  p: Float[Array, "B K V"],
  lenience: float = 1.0,
) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
  """Return q(x) and the residual r(x) of each draft token x, if its earlier siblings are rejected.

  All first children are computed together, then all second children from the residuals, and so on.
  """
  q_x, r_x = [], []
  order: list[np.ndarray] = []
  for rank in range(tree.width):
    draft_tokens = np.flatnonzero(tree.ranks == rank)
    if rank == 0:
      r = take(p, np.array(tree.parents)[draft_tokens])
    else:
      # Siblings are adjacent: those before the current ones, among the siblings of the last rank.
      has_next = np.flatnonzero(np.isin(order[-1], draft_tokens - 1))
      earlier_q = proposed_q(take(tokens, draft_tokens - 1), take(q, draft_tokens - 1))
      r = normalised(residual(take(r, has_next), earlier_q, lenience))
    x = take(tokens, draft_tokens)
    q_x.append(gather_token(take(q, draft_tokens), x))
    r_x.append(gather_token(r, x))
    order.append(draft_tokens)
  if not order:
    return q[..., 0], q[..., 0]  # no draft tokens: [B, 0]
  by_node = np.argsort(np.concatenate(order))
  return take(jnp.concatenate(q_x, axis=1), by_node), take(jnp.concatenate(r_x, axis=1), by_node)


def residual_at(
  tree: Tree,
  tokens: Int[Array, "B N"],
  q: Float[Array, "B N V"],
  p: Float[Array, "B K V"],
  end: Int[Array, " B"],
  lenience: float = 1.0,
) -> Float[Array, "B V"]:
  """Return weights of the next token after the node `end`, whose children were all rejected.

  For a chain they are max(0, p - l q) with lenience l. At a node without children q = 0, and the
  weights are p, the distribution of the bonus token.
  """
  weights = gather_one(p, end)
  for rank, children in enumerate(tree.children.T):
    child = end if tree.is_chain else jnp.asarray(children)[end]
    i = jnp.minimum(child, tree.num_draft_tokens - 1)
    token = jnp.where(child < tree.num_draft_tokens, gather_one(tokens, i), -1)
    child_q = proposed_q(token, gather_one(q, i))
    weights = residual(weights if rank == 0 else normalised(weights), child_q, lenience)
  return weights


def proposed_q(
  tokens: Int[Array, "*batch"], q: Float[Array, "*batch V"]
) -> Float[Array, "*batch V"]:
  """Return q, with zeros for tokens that were not proposed (-1): they are not rejected either."""
  return jnp.where((tokens >= 0)[..., None], q, 0.0)


def accepted_path(
  tree: AnyTree, accepted: Bool[Array, "B N"]
) -> tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, "B D"] | None]:
  """Find the path of accepted draft tokens that starts at the last committed token.

  Of several accepted siblings, only the first is on the path.

  Returns:
    n, the number of draft tokens on the path; the node at which the path ends; and the path as in
    `Verification`.

  Raises:
    InputError: the tree is dynamic.
  """
  tree = require_static("accepted_path", tree)
  if tree.is_chain:
    n = jnp.cumprod(accepted, axis=1).sum(axis=1)
    return n, n, None
  parents = np.array(tree.parents)
  earlier_sibling = (parents[:, None] == parents) & (tree.ranks[:, None] > tree.ranks)
  first_accepted = accepted & ~(accepted[:, None] & earlier_sibling[None]).any(axis=-1)
  reached = (first_accepted[:, None] | ~tree.ancestors[None, 1:, 1:]).all(axis=-1)
  end = jnp.where(reached, jnp.arange(1, tree.num_nodes), 0).max(axis=1)
  return reached.sum(axis=1), end, path_to(tree, end)


def normalised(weights: Float[Array, "*batch V"]) -> Float[Array, "*batch V"]:
  """Return the distribution that is proportional to `weights`, which must not all be 0."""
  return weights / weights.sum(axis=-1, keepdims=True)


def residual(
  p: Float[Array, "*batch V"], q: Float[Array, "*batch V"], lenience: float = 1.0
) -> Float[Array, "*batch V"]:
  """Return weights max(0, p - l q) of the token that replaces a rejected one (Section 2.3).

  l is the lenience. If p = l q up to rounding, all weights may be 0. A rejection then has about
  probability 0, and p itself is returned.
  """
  q = lenience * q
  # Compare first. A compiler may compute p - q twice with different rounding, for example once with
  # a fused multiply-add; the support of the residual must not depend on that.
  above = p > q
  weights = jnp.where(above, jnp.maximum(p - q, jnp.finfo(p.dtype).tiny), 0.0)
  return jnp.where(above.any(axis=-1, keepdims=True), weights, p)


def within_lenience(
  logits: Float[Array, "*#batch V"], draft_tokens: Int[Array, "*#batch"], lenience: float
) -> Bool[Array, "..."]:
  """Return whether p(x) >= l max p for each draft token x: argmax with lenience (Appendix A.5).

  p is the softmax of the logits, and l in (0, 1] is the lenience.
  """
  return gather_token(logits, draft_tokens) >= logits.max(axis=-1) + jnp.log(lenience)
