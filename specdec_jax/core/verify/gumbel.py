"""Gumbel verification: target and draft share noise, so texts do not depend on the draft. Exact.

Source: Gumbel-max list sampling (arXiv 2506.05632). The token at a position of a row is the argmax
of log p + G. The Gumbel noise G, of shape [V], is a function of the row's key and the position, so
the distribution of the token is p. The noise does not depend on the round, so the text is that of
autoregressive decoding with the same keys, whatever the draft, its tree and the batch are; only
near ties may differ, as at temperature 0.

A draft token is accepted if it equals the target's token. If a draft selects the argmax of log q +
G with the same noise, or the W largest values for W children, one of its tokens is accepted with a
probability of at least (1 - TV) / (1 + TV), where TV is the total variation distance of p and q.
Token verification accepts a single draft token with probability 1 - TV, and its samples depend on
the draft.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Key

from specdec_jax.core.arrays import gather
from specdec_jax.core.sampling import Sampling, argmax, perturbed
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import Proposal, Verification, Verifier
from specdec_jax.core.verify.tokens import follow


@dataclasses.dataclass(frozen=True)
class GumbelVerifier(Verifier):
  """Verifier that accepts draft tokens that equal the target's samples (module docstring)."""

  sampling: Sampling
  allows_short_proposals = True
  uses_position_keys = True

  def verify(
    self,
    rng: Key[Array, " B *depths"],
    tree: AnyTree,
    proposal: Proposal,
    logits: Float[Array, "B K V"],
  ) -> Verification:
    depths = jnp.broadcast_to(tree.row_depths, logits.shape[:2])
    tokens = argmax(perturbed(gather(rng, depths), logits, self.sampling))
    return follow(tree, proposal.tokens, tokens)
