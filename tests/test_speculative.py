"""Test that speculative sampling emits the target's distribution and that faults are detected.

The first part tests one round on tables of probabilities. The second part tests the whole loop with
T5 models and compares the joint distribution of three tokens with its exact enumeration. Each
comparison must also detect broken variants. Comments state sample sizes and detectable effects;
tiny.py defines the significance levels.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import autoregressive_decode, speculative_decode

from specdec_jax.core.sampling import Sampling, distribution
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Proposal
from specdec_jax.core.verify.lossy import emitted_distribution
from specdec_jax.core.verify.tokens import TokenVerifier, residual, verify
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.models.t5 import T5Model

# One round on tables. V tokens; the text is a Markov chain, so p and q depend on the text so far.
V = 5


def markov(seed, zeros=False):
  """Return random transition probabilities [V, V], some of which are 0 if `zeros`."""
  rng = np.random.default_rng(seed)
  table = rng.dirichlet(np.full(V, 0.8), V)
  if zeros:
    table[rng.random((V, V)) < 0.3] = 0
    table[:, 0] += 0.1
  return table / table.sum(axis=1, keepdims=True)


def sample_by_inversion(table, rows, u):
  """Return the token at which the cumulative probabilities of each row exceed u."""
  tokens = (table[rows].cumsum(axis=1) <= u[:, None]).sum(axis=1)
  return np.minimum(tokens, V - 1)


@functools.partial(jax.jit, static_argnames="lenience")
def verified(key, x, q, p, lenience=1.0):
  """Verify draft tokens x [B, G] from q [B, G, V] with p [B, G + 1, V]."""
  keys = jax.random.split(key, len(x)) if key.ndim == 0 else key
  return verify(keys, chain(x.shape[1]), Proposal(x, q), p, lenience)


def library(rng, draft_uniforms, x, q, p):
  """Verify draft tokens with the function of the package; return n and the next token as arrays."""
  n, next_token, _ = verified(jax.random.key(int(rng.integers(1 << 30))), x, q, p)
  return np.asarray(n), np.asarray(next_token)


def in_numpy(rng, draft_uniforms, x, q, p, fault=None):
  """Verify draft tokens with a numpy version of Algorithm 1, with an optional common mistake."""
  gamma = x.shape[1]
  if fault == "q of another temperature":
    q = np.sqrt(q) / np.sqrt(q).sum(axis=-1, keepdims=True)
  u = draft_uniforms if fault == "uniforms of the draft used again" else rng.random(x.shape)
  px, qx = (np.take_along_axis(a, x[..., None], axis=-1)[..., 0] for a in (p[:, :gamma], q))
  accepted = u * px < qx if fault == "accept rule reversed" else u * qx < px
  n = accepted.cumprod(axis=1).sum(axis=1)
  if fault == "accepted draft tokens counted past a rejection":
    n = accepted.sum(axis=1)
  rows = np.arange(len(x))
  residual = np.maximum(p[rows, n] - np.pad(q, ((0, 0), (0, 1), (0, 0)))[rows, n], 0)
  if fault == "residual is p":
    residual = p[rows, n]
  if fault == "residual is |p - q|":
    residual = np.abs(p[rows, n] - np.pad(q, ((0, 0), (0, 1), (0, 0)))[rows, n])
  if fault == "residual of the position before":
    before = np.maximum(n - 1, 0)
    other = np.maximum(p[rows, before] - q[rows, before], 0)
    residual = np.where((n < gamma)[:, None], other, residual)
  if fault == "bonus from p_n":
    residual = np.where((n == gamma)[:, None], p[:, gamma - 1], residual)
  if fault == "bonus from q_n":
    residual = np.where((n == gamma)[:, None], q[:, gamma - 1], residual)
  residual = np.where(residual.sum(axis=1, keepdims=True) > 0, residual, p[rows, n])
  residual = residual / residual.sum(axis=1, keepdims=True)
  next_token = (residual.cumsum(axis=1) <= rng.random((len(x), 1))).sum(axis=1)
  return n, np.minimum(next_token, V - 1)


def joint_of_round(verify_draft_tokens, target, draft, gamma, n, seed=0):
  """Return counts [V] * (gamma + 1) of the tokens that follow token 0 in n texts.

  Each text has one round. After a rejection the remaining tokens are sampled from the target.
  """
  rng = np.random.default_rng(seed)
  draft_uniforms = rng.random((n, gamma))
  text = np.zeros((n, gamma + 1), int)  # text[:, 0] is token 0
  for i in range(gamma):
    text[:, i + 1] = sample_by_inversion(draft, text[:, i], draft_uniforms[:, i])
  accepted, next_token = verify_draft_tokens(
    rng, draft_uniforms, text[:, 1:], draft[text[:, :-1]], target[text]
  )
  assert ((0 <= accepted) & (accepted <= gamma)).all()
  assert ((0 <= next_token) & (next_token < V)).all()
  out = np.pad(text[:, 1:], ((0, 0), (0, 1)))
  for i in range(gamma + 1):
    sampled = sample_by_inversion(target, out[:, i - 1] if i else text[:, 0], rng.random(n))
    out[:, i] = np.where(i < accepted, out[:, i], np.where(i == accepted, next_token, sampled))
  flat = np.ravel_multi_index(tuple(out.T), [V] * (gamma + 1))
  return np.bincount(flat, minlength=V ** (gamma + 1)).reshape([V] * (gamma + 1))


def joint_of_chain(target, length):
  """Return exact probabilities [V] * length of the tokens that follow token 0."""
  probs = target[0]
  for _ in range(length - 1):
    probs = probs[..., None] * target
  return probs


@pytest.mark.slow
@pytest.mark.parametrize("zeros", [False, True], ids=["dense", "zeros"])
@pytest.mark.parametrize("gamma", [1, 3])
def test_round_emits_the_targets_distribution(gamma, zeros):
  # 100,000 texts in at most 5^4 = 625 outcomes, level 1e-6: detects effects w >= 0.07.
  n = 100_000
  target, draft = markov(1, zeros), markov(2, zeros)
  exact = joint_of_chain(target, gamma + 1)
  assert tiny.p_value(joint_of_round(library, target, draft, gamma, n), exact) > tiny.LEVEL
  assert tiny.detectable(n, exact) < 0.07


FAULTS_OF_A_ROUND = [
  "residual is p",
  "residual is |p - q|",
  "residual of the position before",
  "accept rule reversed",
  "accepted draft tokens counted past a rejection",
  "uniforms of the draft used again",
  "q of another temperature",
  "bonus from p_n",
  "bonus from q_n",
]
NEED_TWO_DRAFT_TOKENS = (
  "residual of the position before",
  "accepted draft tokens counted past a rejection",
)


@pytest.mark.parametrize(
  "gamma,fault",
  [
    (gamma, fault)
    for gamma in (1, 3)
    for fault in FAULTS_OF_A_ROUND
    if gamma > 1 or fault not in NEED_TWO_DRAFT_TOKENS
  ],
)
def test_faults_of_a_round_are_detected(gamma, fault):
  target, draft = markov(1), markov(2)
  broken = functools.partial(in_numpy, fault=fault)
  counts = joint_of_round(broken, target, draft, gamma, 100_000)
  assert tiny.p_value(counts, joint_of_chain(target, gamma + 1)) < tiny.CAUGHT


@pytest.mark.parametrize("gamma", [1, 3])
def test_numpy_version_without_faults_emits_the_targets_distribution(gamma):
  """The test above therefore detects the injected faults, not the numpy version itself."""
  target, draft = markov(1), markov(2)
  counts = joint_of_round(in_numpy, target, draft, gamma, 100_000)
  assert tiny.p_value(counts, joint_of_chain(target, gamma + 1)) > tiny.LEVEL


def outcome_probabilities(x, q, p, lenience=1.0):
  """Return exact probabilities [G + 1, V] of (n, next token) for draft tokens x [G].

  q [G, V] and p [G + 1, V] are the distributions of the draft and the target.
  """
  gamma = len(x)
  table, reached = np.zeros(p.shape), 1.0
  for i in range(gamma):
    acceptance = min(1.0, p[i, x[i]] / (lenience * q[i, x[i]]))
    residual = np.maximum(p[i] - lenience * q[i], 0)
    if acceptance < 1:
      table[i] = reached * (1 - acceptance) * residual / residual.sum()
    reached *= acceptance
  table[gamma] = reached * p[gamma]
  return table


def emitted_first(q, p, lenience=1.0):
  """Return exact probabilities [V] of the first token that a round with one draft token emits."""
  total = np.zeros(len(q))
  for x in np.flatnonzero(q):
    table = outcome_probabilities([x], q[None], np.stack([p, p]), lenience)
    total += q[x] * table[0]
    total[x] += q[x] * table[1].sum()
  return total


def repeated(n, *arrays):
  return [jnp.broadcast_to(jnp.asarray(a), (n, *np.shape(a))) for a in arrays]


@pytest.mark.parametrize("lenience", [1.0, 0.2])
@pytest.mark.parametrize("gamma", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_outcomes_for_fixed_draft_tokens_have_their_exact_probabilities(gamma, lenience):
  # 200,000 outcomes in at most 20 bins, level 1e-6: detects effects w >= 0.02.
  n = 200_000
  rng = np.random.default_rng(gamma)
  p, q = rng.dirichlet(np.ones(V), gamma + 1), rng.dirichlet(np.ones(V), gamma)
  x = (q / p[:gamma]).argmax(axis=1)  # draft tokens with q > p, so that every n occurs
  exact = outcome_probabilities(x, q, p, lenience)
  verification = verified(jax.random.key(0), *repeated(n, x, q, p), lenience)
  counts = np.zeros((gamma + 1, V))
  np.add.at(counts, (np.asarray(verification.num_accepted), np.asarray(verification.next_token)), 1)
  assert tiny.p_value(counts, exact) > tiny.LEVEL
  assert tiny.detectable(n, exact) < 0.021
  if lenience < 1:
    assert tiny.p_value(counts, outcome_probabilities(x, q, p)) < tiny.CAUGHT


def test_exact_outcome_probabilities_sum_to_the_target():
  for seed in range(20):
    p, q = np.random.default_rng(seed).dirichlet(np.full(7, 0.5), 2)
    np.testing.assert_allclose(emitted_first(q, p), p, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("lenience", [0.5])
def test_lenience_bounds_token_probabilities_and_raises_acceptance(lenience):
  """With lenience l, no token's probability exceeds p / l (Appendix A.5)."""
  # 200,000 tokens, level 1e-6 for the distribution, six standard errors for each bound.
  n = 200_000
  p, q = np.random.default_rng(4).dirichlet(np.full(V, 0.7), 2)
  x = np.random.default_rng(5).choice(V, n, p=q)
  args = repeated(n, q[None], np.stack([p, p]))
  rates = []
  for factor in (1.0, lenience):
    verification = verified(jax.random.key(1), x[:, None], *args, lenience=factor)
    first = np.where(verification.num_accepted == 1, x, verification.next_token)
    share = np.bincount(first, minlength=V) / n
    assert tiny.p_value(share * n, emitted_first(q, p, factor)) > tiny.LEVEL
    assert (share <= p / factor + 6 * np.sqrt(p / factor / n)).all()
    rates.append(verification.num_accepted.mean())
  assert rates[1] > rates[0] + 0.01
  assert (emitted_first(q, p, lenience) <= p / lenience + 1e-12).all()
  # The distribution test detects that lenience changes the distribution.
  assert tiny.p_value(share * n, p) < tiny.CAUGHT


def test_draft_tokens_are_always_accepted_when_p_equals_q():
  # 100,000 bonus tokens, level 1e-6: detects effects w >= 0.03.
  n = 100_000
  p = np.random.default_rng(0).dirichlet(np.ones(V), 4)
  x = np.stack([np.random.default_rng(i).choice(V, n, p=p[i]) for i in range(3)], axis=1)
  verification = verified(jax.random.key(0), x, *repeated(n, p[:3], p))
  assert (verification.num_accepted == 3).all()
  assert tiny.p_value(np.bincount(verification.next_token, minlength=V), p[3]) > tiny.LEVEL
  assert tiny.p_value(np.bincount(verification.next_token, minlength=V), p[2]) < tiny.CAUGHT


def test_draft_tokens_are_never_accepted_when_supports_are_disjoint():
  # 100,000 corrections, level 1e-6: detects effects w >= 0.03.
  n = 100_000
  p, q = np.asarray([0.5, 0.3, 0.2, 0, 0]), np.asarray([0, 0, 0, 0.9, 0.1])
  x = np.random.default_rng(0).choice(V, (n, 2), p=q)
  verification = verified(jax.random.key(0), x, *repeated(n, np.stack([q, q]), np.stack([p, p, p])))
  assert (verification.num_accepted == 0).all()
  assert tiny.p_value(np.bincount(verification.next_token, minlength=V), p) > tiny.LEVEL


def test_one_hot_distributions_accept_exactly_the_matching_prefix():
  """Greedy decoding is not a special case: all 3^3 proposals are tested with all 3^4 argmaxes."""
  one_hot = np.eye(3, dtype=np.float32)
  x, best = [], []
  for tokens in itertools.product(range(3), repeat=7):
    x.append(tokens[:3])
    best.append(tokens[3:])
  x, best = np.asarray(x), np.asarray(best)
  for seed in range(3):
    verification = verified(jax.random.key(seed), x, one_hot[x], one_hot[best])
    n = (x == best[:, :3]).cumprod(axis=1).sum(axis=1)
    np.testing.assert_array_equal(verification.num_accepted, n)
    np.testing.assert_array_equal(verification.next_token, best[np.arange(len(x)), n])


def test_tokens_of_target_probability_0_are_never_emitted():
  n = 100_000
  target, draft = markov(8, zeros=True), markov(9, zeros=True)
  counts = joint_of_round(library, target, draft, 3, n)
  assert not counts[joint_of_chain(target, 4) == 0].any()


def test_next_token_has_the_targets_distribution_when_the_residual_is_empty():
  # q = 2p is not a distribution. It rejects half of the draft tokens with an empty residual, as
  # rounding can do when p = q. 100,000 samples, level 1e-6: detects effects w >= 0.04 in the
  # rejected half.
  n = 100_000
  p = np.random.default_rng(3).dirichlet(np.ones(V))
  x = np.random.default_rng(0).choice(V, (n, 1), p=p)
  verification = verified(
    jax.random.key(0), x, *repeated(n, 2 * p[None], np.stack([p, np.eye(V)[0]]))
  )
  rejected = np.asarray(verification.num_accepted) == 0
  assert abs(rejected.mean() - 0.5) < 6 * 0.5 / np.sqrt(n)
  counts = np.bincount(np.asarray(verification.next_token)[rejected], minlength=V)
  assert tiny.p_value(counts, p) > tiny.LEVEL


def random_proposals(batch=64, gamma=3, seed=0):
  """Return draft tokens [B, G], q [B, G, V] and p [B, G + 1, V]."""
  rng = np.random.default_rng(seed)
  q = rng.dirichlet(np.ones(V), (batch, gamma)).astype(np.float32)
  p = rng.dirichlet(np.ones(V), (batch, gamma + 1)).astype(np.float32)
  return rng.integers(0, V, (batch, gamma)), q, p


def test_residual_is_not_empty_when_rounding_makes_p_at_most_q():
  """Because of rounding, p <= q everywhere, and one program may round p in two ways.

  With the compiler flags of `conftest.py`, comparing the sum of the residual with 0 once returned
  an empty residual.
  """
  logits = 3 * np.random.default_rng(0).normal(size=(16, 72)).astype(np.float32)
  by_numpy = np.exp(logits - logits.max(axis=-1, keepdims=True))
  q = np.maximum(by_numpy / by_numpy.sum(axis=-1, keepdims=True), jax.nn.softmax(logits))

  @jax.jit
  def emitted(logits, q):
    return emitted_distribution(jax.nn.softmax(logits), q)

  @jax.jit
  def residual_of_logits(logits, q):
    return residual(jax.nn.softmax(logits), q)

  assert (residual_of_logits(logits, q).sum(axis=-1) > 0).all()
  np.testing.assert_allclose(emitted(logits, q), q, atol=1e-6)


def test_row_does_not_depend_on_other_rows():
  x, q, p = random_proposals()
  keys = jax.random.split(jax.random.key(7), len(x))
  whole = verified(keys, x, q, p)
  for i in (0, 5, 63):
    row = slice(i, i + 1)
    alone = verified(keys[row], x[row], q[row], p[row])
    assert alone.num_accepted[0] == whole.num_accepted[i]
    assert alone.next_token[0] == whole.next_token[i]


def test_rows_of_one_batch_are_sampled_independently():
  # The rows are equal, so they would all agree if they shared a key.
  x, q, p = (np.repeat(a[:1], 500, axis=0) for a in random_proposals())
  assert len(set(np.asarray(verified(jax.random.key(0), x, q, p).next_token))) > 1


def test_verifying_no_draft_tokens_samples_from_the_target():
  # 100,000 samples, level 1e-6: detects effects w >= 0.03.
  n = 100_000
  p = np.random.default_rng(1).dirichlet(np.ones(V))
  verification = verified(
    jax.random.key(0), jnp.zeros((n, 0), jnp.int32), jnp.zeros((n, 0, V)), *repeated(n, p[None])
  )
  assert (verification.num_accepted == 0).all()
  assert tiny.p_value(np.bincount(verification.next_token, minlength=V), p) > tiny.LEVEL


@pytest.mark.parametrize(
  "cut",
  [
    lambda x, q, p: (x, q[:, :-1], p),
    lambda x, q, p: (x[:, :-1], q, p),
    lambda x, q, p: (x, q, p[:, :-1]),  # no p for the bonus token
    lambda x, q, p: (x[:-1], q, p),
    lambda x, q, p: (x, q, p[:-1]),
    lambda x, q, p: (x, q, p[..., :-1]),  # different vocabularies
    lambda x, q, p: (x, q[..., :1], p),  # would broadcast
  ],
  ids=["q short", "x short", "no bonus", "x rows", "p rows", "vocabularies", "one-token q"],
)
@pytest.mark.usefixtures("unchecked")
def test_inconsistent_shapes_are_rejected(cut):
  with pytest.raises(ValueError, match="A tree of N"):
    verified(jax.random.key(0), *cut(*random_proposals()))


@pytest.mark.parametrize("lenience", [0.0, -1.0, 1.5, float("nan")])
def test_lenience_outside_its_range_is_rejected(lenience):
  with pytest.raises(ValueError, match="lenience is"):
    TokenVerifier(Sampling(), lenience)


# The whole loop: T5 models with 6 tokens, EOS included, and texts of three tokens.
CONFIG = tiny.config(vocab_size=6, layers=1)
DRAFT_CONFIG = tiny.config(vocab_size=6, layers=1, emb_dim=8)
EOS = 1
METHODS = {
  "temperature 1": Sampling(1.0),
  "temperature 0.7": Sampling(0.7),
  "top-k": Sampling(1.0, top_k=3),
  "top-p": Sampling(1.0, top_p=0.8),
}


@functools.cache
def target_and_draft():
  # The draft is often rejected, so that every part of the verifier is used.
  return tiny.params(CONFIG, seed=2, peak=0.9), tiny.params(DRAFT_CONFIG, seed=3, peak=0.5)


def target():
  return CONFIG, target_and_draft()[0]


@functools.cache
def exact_joint(method: str, of=target):
  """Return probabilities [V, V, V] of three tokens; tokens after EOS are 0.

  `of` returns the configuration and the parameters of an encoder-decoder.
  """
  s, (config, params) = METHODS[method], of()
  pairs = np.asarray(list(itertools.product(range(6), repeat=2)), np.int32)
  inputs = np.pad(pairs, ((0, 0), (1, 0)))  # [start, a, b]
  source = np.repeat(tiny.sources(CONFIG, 0, 1), 36, axis=0)
  logits = tiny.teacher_forced(config)(params, source, inputs)
  p = tiny.adjusted(logits, s.temperature, s.top_k, s.top_p).reshape(6, 6, 3, 6)
  joint = np.zeros((6, 6, 6))
  for a, b in itertools.product(range(6), repeat=2):
    if a == EOS:
      joint[a, 0, 0] = p[a, 0, 0, a]
    elif b == EOS:
      joint[a, b, 0] = p[a, 0, 0, a] * p[a, 0, 1, b]
    else:
      joint[a, b] = p[a, 0, 0, a] * p[a, 0, 1, b] * p[a, b, 2]
  return joint


def joint_of_loop(decode, n_batches=2, batch=4096):
  """Return counts [V, V, V] of three tokens in n_batches * batch rows of one source, and all n."""
  counts = np.zeros((6, 6, 6))
  prompt = np.repeat(tiny.sources(CONFIG, 0, 1), batch, axis=0)
  accepted = []
  for i in range(n_batches):
    keys = jax.random.split(jax.random.key(100 + i), batch)
    out = decode(prompt=prompt, rng=keys, max_new_tokens=3, eos_id=EOS)
    np.add.at(counts, tuple(np.asarray(out.tokens).T), 1)
    accepted.append(np.asarray(out.rounds.num_accepted)[0])
  return counts, np.concatenate(accepted)


def speculate(draft, method):
  target_params, draft_params = target_and_draft()
  return functools.partial(
    speculative_decode,
    T5Model(CONFIG),
    draft,
    target_params,
    draft_params,
    verifier=TokenVerifier(METHODS[method]),
  )


@functools.cache
def joint_at_top_p(gamma=3):
  draft = ModelDraft(T5Model(DRAFT_CONFIG), METHODS["top-p"], chain(gamma))
  return joint_of_loop(speculate(draft, "top-p"))


def test_loop_emits_the_targets_joint_distribution(gamma=3):
  # 8,192 rows in at most 156 outcomes, level 1e-6: detects effects w >= 0.16.
  counts, accepted = joint_at_top_p()
  exact = exact_joint("top-p")
  assert tiny.p_value(counts, exact) > tiny.LEVEL
  assert tiny.detectable(8192, exact) < 0.16
  # Each number of accepted draft tokens occurs often enough for the test to be meaningful.
  assert (np.bincount(accepted, minlength=gamma + 1) > 300).all()


@pytest.mark.slow
def test_autoregressive_decoding_emits_the_targets_joint_distribution():
  # 8,192 rows in at most 156 outcomes, level 1e-6: detects effects w >= 0.16.
  decode = functools.partial(
    autoregressive_decode, T5Model(CONFIG), target_and_draft()[0], sampling=METHODS["top-p"]
  )
  assert tiny.p_value(joint_of_loop(decode)[0], exact_joint("top-p")) > tiny.LEVEL


def test_sampling_methods_are_distinguished():
  """Temperature or truncation applied only to the draft or only to the target would be detected."""
  counts, _ = joint_at_top_p()
  for method in ("temperature 1", "temperature 0.7", "top-k"):
    assert tiny.p_value(counts, exact_joint(method)) < tiny.CAUGHT


@pytest.mark.slow
def test_draft_with_another_temperature_leaves_the_output_exact():
  """The draft's temperature affects acceptance only."""
  draft = ModelDraft(T5Model(DRAFT_CONFIG), Sampling(2.0), chain(2))
  counts, _ = joint_of_loop(speculate(draft, "temperature 0.7"))
  assert tiny.p_value(counts, exact_joint("temperature 0.7")) > tiny.LEVEL


# Proposals that a draft may report for draft tokens x sampled from q.
REPORTS = {
  "the truth": lambda x, q: (x, q),
  # A one-hot q is correct for any draft token, and only lowers acceptance.
  "one-hots of its draft tokens": lambda x, q: (x, jax.nn.one_hot(x, 6)),
  "q of another temperature": lambda x, q: (x, distribution(2 * jnp.log(q), Sampling(1.0))),
  "uniform q": lambda x, q: (x, jnp.full_like(q, 1 / 6)),
  "q of the position before": lambda x, q: (x, jnp.roll(q, 1, axis=1)),
  "q of sampling for draft tokens by argmax": lambda x, q: (q.argmax(axis=-1).astype(x.dtype), q),
  "q of each row for draft tokens of another row": lambda x, q: (jnp.roll(x, 1, axis=0), q),
}
EXACT = ("the truth", "one-hots of its draft tokens")


def select_report(params, proposal):
  """Return the proposal of the report whose index into REPORTS is in the parameters."""
  reports = [report(proposal.tokens, proposal.q) for report in REPORTS.values()]
  # All reports are computed, because jaxlib 0.12 fails with an internal error on a `switch`.
  return Proposal(*(jnp.stack(each)[params["report"]] for each in zip(*reports)))


@dataclasses.dataclass(frozen=True)
class ReportingDraft(tiny.ChangedDraft):
  """Wrapped draft whose parameters hold those of the original draft under 'draft'."""

  def init(self, params, context, hidden):
    return self.draft.init(params["draft"], context, hidden)

  def propose(self, params, state, context, rng):
    proposal, state = self.draft.propose(params["draft"], state, context, rng)
    return self.change(params, proposal), state


@pytest.mark.parametrize(
  "report",
  [
    *EXACT,
    "q of another temperature",
    *(pytest.param(x, marks=pytest.mark.slow) for x in [*REPORTS][3:]),
  ],
)
def test_exactly_the_drafts_that_misreport_q_are_detected(report):
  # 8,192 rows in at most 156 outcomes, level 1e-6: detects effects w >= 0.16.
  method = "temperature 1"
  draft = ModelDraft(T5Model(DRAFT_CONFIG), METHODS[method], chain(2))
  target_params, draft_params = target_and_draft()
  decode = functools.partial(
    speculative_decode,
    T5Model(CONFIG),
    ReportingDraft(draft, select_report),
    target_params,
    {"draft": draft_params, "report": list(REPORTS).index(report)},
    verifier=TokenVerifier(METHODS[method]),
  )
  p_value = tiny.p_value(joint_of_loop(decode)[0], exact_joint(method))
  assert p_value > tiny.LEVEL if report in EXACT else p_value < tiny.CAUGHT
