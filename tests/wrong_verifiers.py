"""Verifiers with small faults, written as a user would write one, and a right one of 15 lines."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.core.arrays import gather_one, gather_token, split_rows, take, uniform_rows
from specdec_jax.core.sampling import Sampling, distribution, sample
from specdec_jax.core.types import Verification, Verifier
from specdec_jax.core.verify import blocks, tokens
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.lossy import TypicalVerifier
from specdec_jax.core.verify.tokens import TokenVerifier, accepted_path


@dataclasses.dataclass(frozen=True)
class Matching(Verifier):
  """Sample y from p at each node, and accept a draft token if it is y. Exact."""

  sampling: Sampling
  allows_short_proposals = True
  samples_again = False

  def verify(self, rng, tree, proposal, logits):
    p = distribution(logits, self.sampling)
    keys = split_rows(rng, tree.num_nodes + 1)
    y = jnp.stack([sample(keys[i], p[:, i]) for i in range(tree.num_nodes)], axis=1)
    accepted = take(y, tree.parents) == tokens.without_repeats(tree, proposal.tokens)
    n, end, path = accepted_path(tree, accepted)
    again = sample(keys[-1], gather_one(p, end))
    return Verification(n, again if self.samples_again else gather_one(y, end), path)


class SamplesAgain(Matching):
  """Samples from p again after a rejection, although the draft token was not y."""

  samples_again = True


def changed(verifier=TokenVerifier, module=tokens, **functions):
  """Return a verifier with functions of its module replaced; each takes the original."""

  class Changed(verifier):
    exact = True

    def verify(self, *args):
      before = {name: getattr(module, name) for name in functions}
      try:
        for name, function in functions.items():
          setattr(module, name, functools.partial(function, before[name]))
        return super().verify(*args)
      finally:
        for name, function in before.items():
          setattr(module, name, function)

  return Changed


def rarely_not_normalised(exact, rng, weights):
  """In one row of 50, the missing mass of the residual goes to the last token."""
  rare = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 7)))(rng) < 0.02
  missing = weights.at[:, -1].add(jnp.maximum(1 - weights.sum(axis=1), 0))
  return exact(rng, jnp.where(rare[:, None], missing, weights))


def colder_in_odd_rows(exact, tree, proposal, p):
  q = exact(tree, proposal, p)
  colder = q ** (1 / 0.95)
  colder /= jnp.maximum(colder.sum(axis=-1, keepdims=True), 1e-30)
  return jnp.where((jnp.arange(len(q)) % 2 == 1)[:, None, None], colder, q)


def same_uniforms(exact, rng, count):
  return exact(rng, count).at[:, 1].set(exact(rng, count)[:, 0])


def residual_of_the_parent(exact, tree, tokens_, q, p, end, lenience):
  """After a rejection, takes p of the node before; the bonus token after a leaf is right."""
  of_parent = exact(tree, tokens_, q, p[:, jnp.asarray([0, *tree.parents])], end, lenience)
  has_child = jnp.asarray(tree.num_children > 0)[end]
  return jnp.where(has_child[:, None], of_parent, exact(tree, tokens_, q, p, end, lenience))


def q_of_the_next_sibling(exact, tree, tokens_, q, p, lenience):
  siblings = np.arange(tree.num_draft_tokens)
  for i in siblings[:-1]:
    if tree.parents[i] == tree.parents[i + 1]:
      siblings[i] = i + 1
  return exact(tree, tokens_, q[:, siblings], p, lenience)


def uncapped(exact, tree, draft_tokens, q, p):
  """Accept a whole block as the released code of HSD does (arXiv 2601.05724)."""
  ratio = gather_token(p[:, :-1], draft_tokens) / gather_token(q, draft_tokens)
  whole = jnp.minimum(1, ratio.prod(axis=1))
  return tuple(a.at[:, -1].set(whole) for a in exact(tree, draft_tokens, q, p))


class AcceptsWhatWasNotProposed(TokenVerifier):
  """Compares by <= and forgets that -1 was not proposed; the token then is the last one."""

  def verify(self, rng, tree, proposal, logits):
    p = distribution(logits, self.sampling)
    accept_rng, next_rng = split_rows(rng)
    u = uniform_rows(accept_rng, tree.num_draft_tokens)
    q = tokens.validated_q(tree, proposal, p)
    q_x, r_x = tokens.draft_token_probs(tree, proposal.tokens, q, p)
    accepted = (u * q_x <= r_x) & ((proposal.tokens >= 0) | (r_x == 0))
    n, end, path = accepted_path(tree, accepted)
    return Verification(
      n, sample(next_rng, tokens.residual_at(tree, proposal.tokens, q, p, end)), path
    )


class Lenient(TokenVerifier):
  exact = True

  def verify(self, rng, tree, proposal, logits):
    p = distribution(logits, self.sampling)
    return tokens.verify(rng, tree, proposal, p, 0.95)


class TypicalNamedExact(TypicalVerifier):
  exact = True


class ResidualWithoutTopP(TokenVerifier):
  """Applies top-p to the p of the acceptance, but not to the p of the residual."""

  def verify(self, rng, tree, proposal, logits):
    p = distribution(logits, self.sampling)
    unfiltered = jax.nn.softmax(logits)  # at temperature 1
    accept_rng, next_rng = split_rows(rng)
    u = uniform_rows(accept_rng, tree.num_draft_tokens)
    q = tokens.validated_q(tree, proposal, p)
    q_x, r_x = tokens.draft_token_probs(tree, proposal.tokens, q, p)
    n, end, path = accepted_path(tree, (u * q_x < r_x) & (proposal.tokens >= 0))
    return Verification(
      n, sample(next_rng, tokens.residual_at(tree, proposal.tokens, q, unfiltered, end)), path
    )


class OneUniformForBoth(TokenVerifier):
  """Uses the uniform of the first acceptance to sample the next token, too."""

  def verify(self, rng, tree, proposal, logits):
    p = distribution(logits, self.sampling)
    u = uniform_rows(rng, tree.num_draft_tokens)
    q = tokens.validated_q(tree, proposal, p)
    q_x, r_x = tokens.draft_token_probs(tree, proposal.tokens, q, p)
    n, end, path = accepted_path(tree, (u * q_x < r_x) & (proposal.tokens >= 0))
    weights = tokens.normalised(tokens.residual_at(tree, proposal.tokens, q, p, end))
    return Verification(n, (jnp.cumsum(weights, axis=1) > u[:, :1]).argmax(axis=1), path)


FAULTS = {
  "samples again after a rejection": SamplesAgain,
  "residual not normalised in one row of 50": changed(sample=rarely_not_normalised),
  "q at temperature 0.95 in odd rows": changed(validated_q=colder_in_odd_rows),
  "one uniform for two draft tokens": changed(uniform_rows=same_uniforms),
  "one uniform for acceptance and next token": OneUniformForBoth,
  "residual of the parent": changed(residual_at=residual_of_the_parent),
  "q of the next sibling": changed(draft_token_probs=q_of_the_next_sibling),
  "<= for tokens that were not proposed": AcceptsWhatWasNotProposed,
  "whole block by the uncapped ratio": changed(BlockVerifier, blocks, acceptance_probs=uncapped),
  "lenience 0.95": Lenient,
  "typical acceptance named exact": TypicalNamedExact,
  "top-p not in the residual": ResidualWithoutTopP,
}
