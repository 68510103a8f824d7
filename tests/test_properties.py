"""The judgement over its whole input space: any p, any q, by hypothesis.

Distributions here have zeros, ties, one point, disjoint supports and tiny probabilities, in
float32 and bfloat16. What is emitted is enumerated exactly from the same residual that
`verify` draws from, and the accept decisions are those of their uniforms.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Proposal
from specdec_jax.core.verify.tokens import (
  TokenVerifier,
  emitted_distribution,
  residual,
  verify,
  within_lenience,
)

V = 4
LENIENCES = (1.0, 0.7, 0.3, 0.05)
DTYPES = (jnp.float32, jnp.bfloat16)
many = settings(max_examples=150, deadline=None, derandomize=True)
few = settings(max_examples=40, deadline=None, derandomize=True)

weight = st.one_of(
  st.just(0.0),
  st.sampled_from([1.0, 0.5, 0.25]),  # ties
  st.floats(1e-30, 1e-6),  # tiny beside the others
  st.floats(0.01, 1.0),
)
one_distribution = (
  st.lists(weight, min_size=V, max_size=V)
  .filter(lambda w: sum(w) > 1e-20)
  .map(lambda w: np.asarray(w) / sum(w))
)


def rounded(probs, dtype) -> np.ndarray:
  """What a distribution is after a model of that dtype: float32 probabilities of rounded values."""
  x = jnp.asarray(probs, dtype).astype(jnp.float32)
  return np.asarray(x / x.sum(axis=-1, keepdims=True))


@st.composite
def pairs_of(draw, count: int = 1):
  """p and q [count, V]: unrelated, equal, nearly equal, or of disjoint support."""
  dtype = draw(st.sampled_from(DTYPES))
  p, q = (np.stack([draw(one_distribution) for _ in range(count)]) for _ in range(2))
  relation = draw(st.sampled_from(["unrelated", "equal", "near", "disjoint"]))
  if relation == "equal":
    q = p
  elif relation == "near":
    q = p * (1 + 1e-7 * np.arange(V))
  elif relation == "disjoint":
    half = np.arange(V) < V // 2
    p, q = p * half + 1e-9 * half, q * ~half + 1e-9 * ~half
  return rounded(p, dtype), rounded(q, dtype)


@many
@given(pairs_of())
def test_what_is_emitted_has_the_targets_distribution(pq):
  p, q = pq
  np.testing.assert_allclose(emitted_distribution(p, q), p, atol=3e-7)


@many
@given(pairs_of(), st.sampled_from(LENIENCES))
def test_accepted_and_residual_mass_are_one(pq, lenience):
  p, q = (np.asarray(x, np.float64) for x in pq)
  emitted = np.asarray(emitted_distribution(*pq, lenience))
  assert emitted.sum() == pytest.approx(1, abs=1e-6) and (emitted >= 0).all()
  assert (emitted <= p / lenience + 1e-6).all()
  # The mass that is not accepted is the residual's own, up to the factor of lenience.
  if lenience == 1:
    accepted = np.minimum(p, q).sum()
    left = np.asarray(residual(*pq)).sum()
    if left < 1 - 1e-6:  # p = q leaves nothing, and p stands in
      assert accepted + left == pytest.approx(1, abs=1e-6)


@few
@given(pairs_of(), st.sampled_from(LENIENCES), st.integers(0, 2**31 - 1))
def test_verdicts_follow_their_uniforms(pq, lenience, seed):
  """Accepted exactly when u l q < p; never a token of probability 0; always within range."""
  p, q = pq
  n = 64
  drawable = np.flatnonzero(q[0] > 0)
  x = np.random.default_rng(seed).choice(drawable, (n, 1))
  keys = jax.random.split(jax.random.key(seed), n)
  targets = np.broadcast_to(np.stack([p[0], p[0]]), (n, 2, V))
  proposal = Proposal(x, np.broadcast_to(q[0], (n, 1, V)))
  verification = verify(keys, chain(1), proposal, targets, lenience)
  accepted, next_token = map(np.asarray, verification[:2])
  assert ((0 <= accepted) & (accepted <= 1)).all()
  assert ((0 <= next_token) & (next_token < V)).all()
  of_judgement = jax.vmap(lambda key: jax.random.split(key)[0])(keys)
  u = np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (1,)))(of_judgement))[:, 0]
  of_x = lambda probs: probs[0][x[:, 0]]
  assert (accepted == (u * np.float32(lenience) * of_x(q) < of_x(p))).all()
  assert not accepted[of_x(p) == 0].any()
  assert accepted[(of_x(p) >= of_x(q)) & (of_x(p) > 0)].all()
  weights = np.where(accepted[:, None] == 1, p[0], np.asarray(residual(p[0], q[0], lenience)))
  assert (np.take_along_axis(weights, next_token[:, None], axis=1) > 0).all()


@pytest.mark.parametrize("gamma", [1, 2, 3])
@few
@given(data=st.data())
def test_rounds_of_several_guesses_enumerate_to_the_target(gamma, data):
  """All guesses, all accept patterns: the joint distribution of a text is the target's.

  A round emits a prefix; the text goes on with the target's own conditionals, as a next round
  would by induction. p and q depend on the position only, which is all that a round can see.
  """
  p, q = data.draw(pairs_of(gamma + 1))
  p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)[:gamma]
  joint = np.zeros((V,) * (gamma + 1))
  rest = lambda i: [p[j] for j in range(i, gamma + 1)]

  def add(prefix, mass):
    tail = mass
    for probs in rest(len(prefix)):
      tail = np.multiply.outer(tail, probs)
    joint[prefix] += tail

  for x in itertools.product(range(V), repeat=gamma):
    mass = np.prod([q[i, x[i]] for i in range(gamma)])
    for i in range(gamma):
      if mass == 0:
        break
      accept = min(1.0, p[i, x[i]] / q[i, x[i]])
      weights = np.asarray(residual(p[i], q[i]), np.float64)
      for token in range(V):
        add((*x[:i], token), mass * (1 - accept) * weights[token] / weights.sum())
      mass *= accept
    else:
      add(x, mass)
  exact = p[0]
  for probs in p[1:]:
    exact = np.multiply.outer(exact, probs)
  np.testing.assert_allclose(joint, exact, atol=2e-6)


@many
@given(
  st.lists(st.floats(-20, 20, width=32), min_size=V, max_size=V),
  st.integers(0, V - 1),
  st.sampled_from(LENIENCES),
)
def test_lenient_argmax_takes_a_guess_near_the_best(logits, guess, lenience):
  """And where it does not, or for the token after it, the best: the first of those that tie."""
  logits = np.asarray(logits, np.float32)
  gap = float(logits.max()) - float(logits[guess])
  if abs(gap + np.log(lenience)) < 1e-4 and lenience < 1:
    return  # on the threshold, where rounding decides
  near = np.exp(-gap) >= lenience
  assert within_lenience(logits, jnp.asarray(guess), lenience) == near
  verification = greedy_verdict(TokenVerifier(Sampling(temperature=0.0), lenience), logits, guess)
  stands = near if lenience < 1 else guess == logits.argmax()
  assert [x.item() for x in verification[:2]] == [stands, logits.argmax()]


@functools.partial(jax.jit, static_argnums=0)
def greedy_verdict(verifier, logits, guess):
  """On one guess, when these are the logits there and after it."""
  keys = jax.random.split(jax.random.key(0), 1)
  proposal = Proposal(jnp.asarray(guess).reshape(1, 1))
  return verifier.verify(keys, chain(1), proposal, jnp.stack([logits, logits])[None])
