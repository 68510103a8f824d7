"""Token verification in which equal tokens of several drafts are merged. Exact.

Several drafts in one tree (`drafts.several`) may propose the same token after the same text, with
different continuations. SpecInfer (Miao et al., 2024) merges such nodes in a prefix tree. Above
temperature 0, `core.verify.tokens` follows only the continuation of the node that it accepts.

Here, the nodes after the text so far are verified in order, each with its own q, as in
`core.verify.tokens`. If one of them is accepted, the text continues at all nodes with its token,
also those that were rejected before or were not verified. This is exact: each node is verified
against the residual of the ones before it, and the continuations were sampled independently of the
outcome. It would not be exact to leave out a node because an earlier one has its token.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from specdec_jax.core.arrays import gather_one, gather_token, split_rows, uniform_rows
from specdec_jax.core.sampling import Sampling, distribution, sample
from specdec_jax.core.trees import AnyTree, Tree, path_to, require_static
from specdec_jax.core.types import Keys, Proposal, Verification, Verifier
from specdec_jax.core.verify.tokens import normalised, residual, validated_q


@dataclasses.dataclass(frozen=True)
class MergingVerifier(Verifier):
  """Verifier for trees of several drafts; see the module docstring."""

  sampling: Sampling

  def verify(
    self, rng: Keys, tree: AnyTree, proposal: Proposal, logits: Float[Array, "B K V"]
  ) -> Verification:
    tree = require_static("merging verification", tree)
    p = distribution(logits, self.sampling)
    q = validated_q(tree, proposal, p)
    accept_rng, next_rng = split_rows(rng)
    u = uniform_rows(accept_rng, tree.num_draft_tokens)
    found = follow(tree, proposal.tokens, q, p, u)
    num_accepted = jnp.asarray(tree.depths)[found.end]
    return Verification(num_accepted, sample(next_rng, found.weights), path_to(tree, found.end))


class Path(NamedTuple):
  """Path of accepted draft tokens.

  `is_tried` says which draft tokens were verified, and `r_x` has their residual probabilities then.
  """

  end: Int[Array, " B"]
  weights: Float[Array, "B V"]
  is_tried: Bool[Array, "B N"]
  r_x: Float[Array, "B N"]


def follow(
  tree: Tree,
  tokens: Int[Array, "B N"],
  q: Float[Array, "B N V"],
  p: Float[Array, "B K V"],
  u: Float[Array, "B N"],
) -> Path:
  """Follow the accepted draft tokens from the last committed token on.

  A draft token x is accepted if u q(x) < r(x) for its uniform number u.
  """
  batch = len(tokens)
  q_x = gather_token(q, tokens)
  on_path = jnp.zeros((batch, tree.num_nodes), bool).at[:, 0].set(True)
  end, weights = jnp.zeros(batch, jnp.int32), p[:, 0]
  is_tried, r_x = jnp.zeros(tokens.shape, bool), jnp.zeros(q_x.shape, q_x.dtype)
  for first, last in tree.levels:
    has_accepted, token = jnp.zeros(batch, bool), jnp.full(batch, -1)
    follows = on_path[:, list(tree.parents[first - 1 : last - 1])]
    for i, draft_token in enumerate(range(first - 1, last - 1)):
      x = tokens[:, draft_token]
      tries = follows[:, i] & ~has_accepted & (x >= 0)  # -1 was not proposed
      r = gather_token(weights, x)
      accepts = tries & (u[:, draft_token] * q_x[:, draft_token] < r)
      is_tried, r_x = is_tried.at[:, draft_token].set(tries), r_x.at[:, draft_token].set(r)
      rejected = normalised(residual(weights, q[:, draft_token]))
      weights = jnp.where((tries & ~accepts)[:, None], rejected, weights)
      end = jnp.where(accepts, draft_token + 1, end)
      token = jnp.where(accepts, x, token)
      has_accepted |= accepts
    same = follows & (tokens[:, first - 1 : last - 1] == token[:, None]) & has_accepted[:, None]
    on_path = on_path.at[:, first:last].set(same)
    weights = jnp.where(has_accepted[:, None], gather_one(p, end), weights)
  return Path(end, weights, is_tried, r_x)
