"""Test token verification with hypothesis, for arbitrary p and q.

The distributions have zeros, ties, a single outcome, disjoint supports or tiny probabilities, in
float32 and bfloat16. Emitted distributions are enumerated exactly from the residual that `verify`
samples from, and decisions to accept are compared with the condition on the same uniforms.
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
from specdec_jax.core.verify import lossy
from specdec_jax.core.verify.tokens import TokenVerifier, residual, verify, within_lenience

V = 4
LENIENCES = (1.0, 0.7, 0.3, 0.05)
DTYPES = (jnp.float32, jnp.bfloat16)
many = settings(max_examples=150, deadline=None, derandomize=True)
few = settings(max_examples=40, deadline=None, derandomize=True)
emitted_distribution = jax.jit(lossy.emitted_distribution, static_argnums=2)

weight = st.one_of(
  st.just(0.0),
  st.sampled_from([1.0, 0.5, 0.25]),  # ties
  st.floats(1e-30, 1e-6),  # tiny compared with the others
  st.floats(0.01, 1.0),
)
one_distribution = (
  st.lists(weight, min_size=V, max_size=V)
  .filter(lambda w: sum(w) > 1e-20)
  .map(lambda w: np.asarray(w) / sum(w))
)


def rounded(probs, dtype) -> np.ndarray:
  """Return `probs` as a model with this dtype does: rounded to the dtype, normalized in float32."""
  x = jnp.asarray(probs, dtype).astype(jnp.float32)
  return np.asarray(x / x.sum(axis=-1, keepdims=True))


@st.composite
def pairs_of(draw, count: int = 1):
  """Generate p and q [count, V]: unrelated, equal, nearly equal, or with disjoint supports."""
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
def test_emitted_token_has_the_targets_distribution(pq):
  p, q = map(jnp.asarray, pq)
  np.testing.assert_allclose(emitted_distribution(p, q), p, atol=3e-7)


@many
@given(pairs_of(), st.sampled_from(LENIENCES))
def test_emitted_distribution_sums_to_1_and_is_bounded_by_lenience(pq, lenience):
  p, q = (np.asarray(x, np.float64) for x in pq)
  p32, q32 = map(jnp.asarray, pq)
  emitted = np.asarray(emitted_distribution(p32, q32, lenience))
  assert emitted.sum() == pytest.approx(1, abs=1e-6) and (emitted >= 0).all()
  assert (emitted <= p / lenience + 1e-6).all()
  # Without lenience, the accepted mass and the residual mass sum to 1.
  if lenience == 1:
    accepted = np.minimum(p, q).sum()
    residual_mass = np.asarray(residual(p32, q32)).sum()
    if residual_mass < 1 - 1e-6:  # when p = q the residual is empty and p replaces it
      assert accepted + residual_mass == pytest.approx(1, abs=1e-6)


@functools.partial(jax.jit, static_argnums=3)
def verify_one(keys, proposal, targets, lenience):
  return verify(keys, chain(1), proposal, targets, lenience)


@jax.jit
@jax.vmap
def uniforms(key):
  """Return the uniform number that accepts or rejects the only draft token of a row."""
  return jax.random.uniform(jax.random.split(key)[0], (1,))[0]


@few
@given(pairs_of(), st.sampled_from(LENIENCES), st.integers(0, 2**31 - 1))
def test_draft_token_is_accepted_iff_u_lenience_q_is_less_than_p(pq, lenience, seed):
  """Emitted tokens are valid and have a positive probability."""
  p, q = pq
  n = 64
  possible = np.flatnonzero(q[0] > 0)
  x = np.random.default_rng(seed).choice(possible, (n, 1))
  keys = jax.random.split(jax.random.key(seed), n)
  targets = jnp.broadcast_to(jnp.stack([p[0], p[0]]), (n, 2, V))
  proposal = Proposal(jnp.asarray(x), jnp.broadcast_to(q[0], (n, 1, V)))
  verification = verify_one(keys, proposal, targets, lenience)
  accepted, next_token = map(np.asarray, verification[:2])
  assert ((0 <= accepted) & (accepted <= 1)).all()
  assert ((0 <= next_token) & (next_token < V)).all()
  u = np.asarray(uniforms(keys))
  p_x, q_x = p[0][x[:, 0]], q[0][x[:, 0]]
  assert (accepted == (u * np.float32(lenience) * q_x < p_x)).all()
  assert not accepted[p_x == 0].any()
  assert accepted[(p_x >= q_x) & (p_x > 0)].all()
  after_rejection = np.asarray(residual(jnp.asarray(p[0]), jnp.asarray(q[0]), lenience))
  weights = np.where(accepted[:, None] == 1, p[0], after_rejection)
  assert (np.take_along_axis(weights, next_token[:, None], axis=1) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1, 2, 3])
@few
@given(data=st.data())
def test_round_with_several_draft_tokens_emits_the_targets_joint_distribution(gamma, data):
  """All draft tokens and all accept patterns are enumerated.

  A round emits a prefix of the text. The remaining tokens follow the target's conditional
  distributions, as they do in later rounds by induction. p and q depend on the position only.
  """
  p, q = data.draw(pairs_of(gamma + 1))
  p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)[:gamma]
  joint = np.zeros((V,) * (gamma + 1))

  def add(prefix, mass):
    tail = mass
    for probs in p[len(prefix) :]:
      tail = np.multiply.outer(tail, probs)
    joint[prefix] += tail

  for x in itertools.product(range(V), repeat=gamma):
    mass = np.prod([q[i, x[i]] for i in range(gamma)])
    for i in range(gamma):
      if mass == 0:
        break
      accept = min(1.0, p[i, x[i]] / q[i, x[i]])
      weights = np.asarray(residual(jnp.asarray(p[i]), jnp.asarray(q[i])), np.float64)
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
def test_lenience_at_temperature_0_accepts_draft_tokens_near_the_argmax(
  logits, draft_token, lenience
):
  """The next token is the argmax, and the first of tied tokens.

  On a CPU, XLA treats subnormal numbers as 0, in autoregressive decoding, too.
  """
  logits = np.asarray(logits, np.float32)
  logits[np.abs(logits) < np.finfo(np.float32).tiny] = 0
  gap = float(logits.max()) - float(logits[draft_token])
  if abs(gap + np.log(lenience)) < 1e-4 and lenience < 1:
    return  # within rounding error of the threshold
  near = gap <= -np.log(lenience)
  assert within_lenience(jnp.asarray(logits), jnp.asarray(draft_token), lenience) == near
  verification = greedy_verification(
    TokenVerifier(Sampling(temperature=0.0), lenience), logits, draft_token
  )
  accepted = near if lenience < 1 else draft_token == logits.argmax()
  assert [x.item() for x in verification[:2]] == [accepted, logits.argmax()]


@functools.partial(jax.jit, static_argnums=0)
def greedy_verification(verifier, logits, draft_token):
  """Verify one draft token with the same logits for its position and the next one."""
  keys = jax.random.split(jax.random.key(0), 1)
  proposal = Proposal(jnp.asarray(draft_token).reshape(1, 1))
  return verifier.verify(keys, chain(1), proposal, jnp.stack([logits, logits])[None])
