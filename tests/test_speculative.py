"""What speculation emits is distributed as the target, and these tests would see if it were not.

First one round on tables of probabilities, then the whole loop with T5s, where the joint
distribution of three tokens is compared with its exact enumeration. Each comparison comes with
broken variants that it must catch; sample sizes and detectable effects stand with the tests,
levels in tiny.py.
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
from specdec_jax.core.verify.tokens import TokenVerifier, emitted_distribution, residual, verify
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.models.t5 import T5Model

# One round on tables. V tokens; the text is a Markov chain, so p and q depend on the text so far.
V = 5


def markov(seed, zeros=False):
  """Rows of transition probabilities [V, V], some of them 0 if asked."""
  rng = np.random.default_rng(seed)
  table = rng.dirichlet(np.full(V, 0.8), V)
  if zeros:
    table[rng.random((V, V)) < 0.3] = 0
    table[:, 0] += 0.1
  return table / table.sum(axis=1, keepdims=True)


def draw(table, rows, u):
  """Tokens by inversion: where u falls in the cumulated probabilities of each row."""
  found = (table[rows].cumsum(axis=1) <= u[:, None]).sum(axis=1)
  return np.minimum(found, V - 1)


@functools.partial(jax.jit, static_argnames="lenience")
def judged(key, x, q, p, lenience=1.0):
  """The verifier's verification on guesses x [B, G] from q [B, G, V], with p [B, G + 1, V]."""
  keys = jax.random.split(key, len(x)) if key.ndim == 0 else key
  return verify(keys, chain(x.shape[1]), Proposal(x, q), p, lenience)


def library(rng, drafted_with, x, q, p):
  n, next_token, _ = judged(jax.random.key(int(rng.integers(1 << 30))), x, q, p)
  return np.asarray(n), np.asarray(next_token)


def by_hand(rng, drafted_with, x, q, p, fault=None):
  """Algorithm 1 in numpy, with the mistakes that it is known to be written with."""
  gamma = x.shape[1]
  if fault == "q of another temperature":
    q = np.sqrt(q) / np.sqrt(q).sum(axis=-1, keepdims=True)
  u = drafted_with if fault == "uniforms of the draft used again" else rng.random(x.shape)
  px, qx = (np.take_along_axis(a, x[..., None], axis=-1)[..., 0] for a in (p[:, :gamma], q))
  accepted = u * px < qx if fault == "accept rule reversed" else u * qx < px
  n = accepted.cumprod(axis=1).sum(axis=1)
  if fault == "accepted guesses counted past a refusal":
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


def joint_of_round(judge, target, draft, gamma, n, seed=0):
  """Counts [V] * (gamma + 1) of the first gamma + 1 tokens of n texts that start after token 0.

  One round each; a text cut short by a refusal goes on by plain draws from the target.
  """
  rng = np.random.default_rng(seed)
  drafted_with = rng.random((n, gamma))
  text = np.zeros((n, gamma + 1), int)  # text[:, 0] is token 0
  for i in range(gamma):
    text[:, i + 1] = draw(draft, text[:, i], drafted_with[:, i])
  accepted, next_token = judge(rng, drafted_with, text[:, 1:], draft[text[:, :-1]], target[text])
  assert ((0 <= accepted) & (accepted <= gamma)).all()
  assert ((0 <= next_token) & (next_token < V)).all()
  out = np.pad(text[:, 1:], ((0, 0), (0, 1)))
  for i in range(gamma + 1):
    plain = draw(target, out[:, i - 1] if i else text[:, 0], rng.random(n))
    out[:, i] = np.where(i < accepted, out[:, i], np.where(i == accepted, next_token, plain))
  flat = np.ravel_multi_index(tuple(out.T), [V] * (gamma + 1))
  return np.bincount(flat, minlength=V ** (gamma + 1)).reshape([V] * (gamma + 1))


def joint_of_chain(target, length):
  """Exact probabilities [V] * length of a text that starts after token 0."""
  probs = target[0]
  for _ in range(length - 1):
    probs = probs[..., None] * target
  return probs


@pytest.mark.parametrize("zeros", [False, True], ids=["dense", "zeros"])
@pytest.mark.parametrize("gamma", [1, 3])
def test_a_round_emits_the_targets_distribution(gamma, zeros):
  # 100,000 texts in at most 5^4 = 625 outcomes, level 1e-6: finds effects w >= 0.07.
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
  "accepted guesses counted past a refusal",
  "uniforms of the draft used again",
  "q of another temperature",
  "bonus from p_n",
  "bonus from q_n",
]
NEED_TWO_GUESSES = ("residual of the position before", "accepted guesses counted past a refusal")


@pytest.mark.parametrize(
  "gamma,fault",
  [
    (gamma, fault)
    for gamma in (1, 3)
    for fault in FAULTS_OF_A_ROUND
    if gamma > 1 or fault not in NEED_TWO_GUESSES
  ],
)
def test_that_comparison_catches_broken_rounds(gamma, fault):
  target, draft = markov(1), markov(2)
  broken = functools.partial(by_hand, fault=fault)
  counts = joint_of_round(broken, target, draft, gamma, 100_000)
  assert tiny.p_value(counts, joint_of_chain(target, gamma + 1)) < tiny.CAUGHT


@pytest.mark.parametrize("gamma", [1, 3])
def test_that_comparison_passes_the_round_without_its_faults(gamma):
  """What is caught above is the fault, not the way it is written here."""
  target, draft = markov(1), markov(2)
  counts = joint_of_round(by_hand, target, draft, gamma, 100_000)
  assert tiny.p_value(counts, joint_of_chain(target, gamma + 1)) > tiny.LEVEL


def verdict_probabilities(x, q, p, lenience=1.0):
  """Exact probabilities [G + 1, V] of (n, next token) for guesses x [G], q [G, V], p [G + 1, V]."""
  gamma = len(x)
  table, reached = np.zeros(p.shape), 1.0
  for i in range(gamma):
    passes = min(1.0, p[i, x[i]] / (lenience * q[i, x[i]]))
    residual = np.maximum(p[i] - lenience * q[i], 0)
    if passes < 1:
      table[i] = reached * (1 - passes) * residual / residual.sum()
    reached *= passes
  table[gamma] = reached * p[gamma]
  return table


def emitted_first(q, p, lenience=1.0):
  """Exact probabilities [V] of the first token that a round with one guess emits."""
  total = np.zeros(len(q))
  for x in np.flatnonzero(q):
    table = verdict_probabilities([x], q[None], np.stack([p, p]), lenience)
    total += q[x] * table[0]
    total[x] += q[x] * table[1].sum()
  return total


def repeated(n, *arrays):
  return [jnp.broadcast_to(jnp.asarray(a), (n, *np.shape(a))) for a in arrays]


@pytest.mark.parametrize("lenience", [1.0, 0.2])
@pytest.mark.parametrize("gamma", [1, 3])
def test_verdicts_on_fixed_guesses_follow_their_exact_probabilities(gamma, lenience):
  # 200,000 verdicts in at most 20 outcomes, level 1e-6: finds effects w >= 0.02.
  n = 200_000
  rng = np.random.default_rng(gamma)
  p, q = rng.dirichlet(np.ones(V), gamma + 1), rng.dirichlet(np.ones(V), gamma)
  x = (q / p[:gamma]).argmax(axis=1)  # guesses that the draft overrates, so that every n occurs
  exact = verdict_probabilities(x, q, p, lenience)
  verification = judged(jax.random.key(0), *repeated(n, x, q, p), lenience)
  counts = np.zeros((gamma + 1, V))
  np.add.at(counts, (np.asarray(verification.num_accepted), np.asarray(verification.next_token)), 1)
  assert tiny.p_value(counts, exact) > tiny.LEVEL
  assert tiny.detectable(n, exact) < 0.021
  if lenience < 1:
    assert tiny.p_value(counts, verdict_probabilities(x, q, p)) < tiny.CAUGHT


def test_the_exact_probabilities_themselves_give_the_target():
  for seed in range(20):
    p, q = np.random.default_rng(seed).dirichlet(np.full(7, 0.5), 2)
    np.testing.assert_allclose(emitted_first(q, p), p, atol=1e-12)


@pytest.mark.parametrize("lenience", [0.5])
def test_lenience_bounds_what_grows(lenience):
  """Appendix A.5: no token's probability grows past p / l, and acceptance rises."""
  # 200,000 tokens, level 1e-6 for the distribution, six standard errors for each bound.
  n = 200_000
  p, q = np.random.default_rng(4).dirichlet(np.full(V, 0.7), 2)
  x = np.random.default_rng(5).choice(V, n, p=q)
  args = repeated(n, q[None], np.stack([p, p]))
  rates = []
  for at in (1.0, lenience):
    verification = judged(jax.random.key(1), x[:, None], *args, lenience=at)
    first = np.where(verification.num_accepted == 1, x, verification.next_token)
    share = np.bincount(first, minlength=V) / n
    assert tiny.p_value(share * n, emitted_first(q, p, at)) > tiny.LEVEL
    assert (share <= p / at + 6 * np.sqrt(p / at / n)).all()
    rates.append(verification.num_accepted.mean())
  assert rates[1] > rates[0] + 0.01
  assert (emitted_first(q, p, lenience) <= p / lenience + 1e-12).all()
  # An inexact setting is seen as such.
  assert tiny.p_value(share * n, p) < tiny.CAUGHT


def test_same_distribution_always_accepts():
  # 100,000 bonus tokens, level 1e-6: finds effects w >= 0.03.
  n = 100_000
  p = np.random.default_rng(0).dirichlet(np.ones(V), 4)
  x = np.stack([np.random.default_rng(i).choice(V, n, p=p[i]) for i in range(3)], axis=1)
  verification = judged(jax.random.key(0), x, *repeated(n, p[:3], p))
  assert (verification.num_accepted == 3).all()
  assert tiny.p_value(np.bincount(verification.next_token, minlength=V), p[3]) > tiny.LEVEL
  assert tiny.p_value(np.bincount(verification.next_token, minlength=V), p[2]) < tiny.CAUGHT


def test_disjoint_support_never_accepts():
  # 100,000 corrections, level 1e-6: finds effects w >= 0.03.
  n = 100_000
  p, q = np.asarray([0.5, 0.3, 0.2, 0, 0]), np.asarray([0, 0, 0, 0.9, 0.1])
  x = np.random.default_rng(0).choice(V, (n, 2), p=q)
  verification = judged(jax.random.key(0), x, *repeated(n, np.stack([q, q]), np.stack([p, p, p])))
  assert (verification.num_accepted == 0).all()
  assert tiny.p_value(np.bincount(verification.next_token, minlength=V), p) > tiny.LEVEL


def test_one_hots_accept_exactly_the_matching_prefix():
  """Greedy is no special case: all 3^3 guesses against all 3^4 argmaxes."""
  one_hot = np.eye(3, dtype=np.float32)
  x, best = [], []
  for tokens in itertools.product(range(3), repeat=7):
    x.append(tokens[:3])
    best.append(tokens[3:])
  x, best = np.asarray(x), np.asarray(best)
  for seed in range(3):
    verification = judged(jax.random.key(seed), x, one_hot[x], one_hot[best])
    n = (x == best[:, :3]).cumprod(axis=1).sum(axis=1)
    np.testing.assert_array_equal(verification.num_accepted, n)
    np.testing.assert_array_equal(verification.next_token, best[np.arange(len(x)), n])


def test_what_the_target_never_says_is_never_emitted():
  n = 100_000
  target, draft = markov(8, zeros=True), markov(9, zeros=True)
  counts = joint_of_round(library, target, draft, 3, n)
  assert not counts[joint_of_chain(target, 4) == 0].any()


def test_an_empty_residual_falls_back_to_the_target():
  # q = 2p is no distribution, but refuses half the guesses with nothing left over, as p = q may do
  # in rounding. 100,000 draws, level 1e-6: finds effects w >= 0.04 in the refused half.
  n = 100_000
  p = np.random.default_rng(3).dirichlet(np.ones(V))
  x = np.random.default_rng(0).choice(V, (n, 1), p=p)
  verification = judged(
    jax.random.key(0), x, *repeated(n, 2 * p[None], np.stack([p, np.eye(V)[0]]))
  )
  refused = np.asarray(verification.num_accepted) == 0
  assert abs(refused.mean() - 0.5) < 6 * 0.5 / np.sqrt(n)
  counts = np.bincount(np.asarray(verification.next_token)[refused], minlength=V)
  assert tiny.p_value(counts, p) > tiny.LEVEL


def a_batch(batch=64, gamma=3, seed=0):
  rng = np.random.default_rng(seed)
  q = rng.dirichlet(np.ones(V), (batch, gamma)).astype(np.float32)
  p = rng.dirichlet(np.ones(V), (batch, gamma + 1)).astype(np.float32)
  return rng.integers(0, V, (batch, gamma)), q, p


def test_something_is_left_however_the_compiler_rounds():
  """p <= q by rounding alone, with p made in the same program, which may round it in two ways.

  Compiled as tests are (`conftest.py`), a residual whose sum was compared with 0 came out empty.
  """
  logits = 3 * np.random.default_rng(0).normal(size=(16, 72)).astype(np.float32)
  by_numpy = np.exp(logits - logits.max(axis=-1, keepdims=True))
  q = np.maximum(by_numpy / by_numpy.sum(axis=-1, keepdims=True), jax.nn.softmax(logits))
  emitted = lambda logits, q: emitted_distribution(jax.nn.softmax(logits), q)
  left = lambda logits, q: residual(jax.nn.softmax(logits), q)
  assert (jax.jit(left)(logits, q).sum(axis=-1) > 0).all()
  np.testing.assert_allclose(jax.jit(emitted)(logits, q), q, atol=1e-6)


def test_a_row_does_not_depend_on_its_neighbours():
  x, q, p = a_batch()
  keys = jax.random.split(jax.random.key(7), len(x))
  whole = judged(keys, x, q, p)
  for i in (0, 5, 63):
    one = slice(i, i + 1)
    alone = judged(keys[one], x[one], q[one], p[one])
    assert alone.num_accepted[0] == whole.num_accepted[i]
    assert alone.next_token[0] == whole.next_token[i]


def test_rows_of_one_batch_draw_independently():
  # Equal rows under one key: were the key shared, all would agree.
  x, q, p = (np.repeat(a[:1], 500, axis=0) for a in a_batch())
  assert len(set(np.asarray(judged(jax.random.key(0), x, q, p).next_token))) > 1


def test_no_guesses_is_plain_sampling():
  # 100,000 draws, level 1e-6: finds effects w >= 0.03.
  n = 100_000
  p = np.random.default_rng(1).dirichlet(np.ones(V))
  verification = judged(
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
def test_shapes_that_do_not_fit_are_refused(cut):
  with pytest.raises(ValueError, match="A tree of N"):
    judged(jax.random.key(0), *cut(*a_batch()))


@pytest.mark.parametrize("lenience", [0.0, -1.0, 1.5, float("nan")])
def test_lenience_outside_its_range_is_refused(lenience):
  with pytest.raises(ValueError, match="lenience is"):
    TokenVerifier(Sampling(), lenience)


# The whole loop: T5s over 6 tokens, three tokens of text, EOS among them.
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
  # A draft that is often wrong, so that every part of the verifier is at work.
  return tiny.params(CONFIG, seed=2, peak=0.9), tiny.params(DRAFT_CONFIG, seed=3, peak=0.5)


@functools.cache
def exact_joint(method: str):
  """Probabilities [V, V, V] of three tokens, 0 standing for what comes after EOS."""
  s = METHODS[method]
  pairs = np.asarray(list(itertools.product(range(6), repeat=2)), np.int32)
  inputs = np.pad(pairs, ((0, 0), (1, 0)))  # [start, a, b]
  source = np.repeat(tiny.sources(CONFIG, 0, 1), 36, axis=0)
  logits = tiny.teacher_forced(CONFIG)(target_and_draft()[0], source, inputs)
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
  """Counts [V, V, V] of three tokens over n_batches * batch rows of one source."""
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


def test_the_loop_emits_the_targets_joint_distribution(gamma=3):
  # 8,192 rows in at most 156 outcomes, level 1e-6: finds effects w >= 0.16.
  counts, accepted = joint_at_top_p()
  exact = exact_joint("top-p")
  assert tiny.p_value(counts, exact) > tiny.LEVEL
  assert tiny.detectable(8192, exact) < 0.16
  # The draft was right and wrong often enough for the test to mean something.
  assert (np.bincount(accepted, minlength=gamma + 1) > 300).all()


def test_plain_decoding_emits_the_targets_joint_distribution():
  # 8,192 rows in at most 156 outcomes, level 1e-6: finds effects w >= 0.16.
  decode = functools.partial(
    autoregressive_decode, T5Model(CONFIG), target_and_draft()[0], sampling=METHODS["top-p"]
  )
  assert tiny.p_value(joint_of_loop(decode)[0], exact_joint("top-p")) > tiny.LEVEL


def test_sampling_methods_are_told_apart():
  """Temperature or truncation applied on one side only would show."""
  counts, _ = joint_at_top_p()
  for method in ("temperature 1", "temperature 0.7", "top-k"):
    assert tiny.p_value(counts, exact_joint(method)) < tiny.CAUGHT


def test_a_draft_that_samples_otherwise_is_still_exact():
  """The draft's own temperature costs acceptance, never exactness."""
  draft = ModelDraft(T5Model(DRAFT_CONFIG), Sampling(2.0), chain(2))
  counts, _ = joint_of_loop(speculate(draft, "temperature 0.7"))
  assert tiny.p_value(counts, exact_joint("temperature 0.7")) > tiny.LEVEL


# What a draft may say of its guesses x, drawn from q.
REPORTS = {
  "the truth": lambda x, q: (x, q),
  # However a guess was found, a one-hot is true of it: only acceptance suffers.
  "one-hots of its guesses": lambda x, q: (x, jax.nn.one_hot(x, 6)),
  "q of another temperature": lambda x, q: (x, distribution(2 * jnp.log(q), Sampling(1.0))),
  "uniform q": lambda x, q: (x, jnp.full_like(q, 1 / 6)),
  "q of the position before": lambda x, q: (x, jnp.roll(q, 1, axis=1)),
  "q of sampling for guesses by argmax": lambda x, q: (q.argmax(axis=-1).astype(x.dtype), q),
  "q of its own for guesses of a neighbour": lambda x, q: (jnp.roll(x, 1, axis=0), q),
}
EXACT = ("the truth", "one-hots of its guesses")


def report_as_told(params, proposal):
  """The proposal as parameters say with an index into REPORTS."""
  told = [report(proposal.tokens, proposal.q) for report in REPORTS.values()]
  # All of them and not a `switch`, in whose program jaxlib 0.12 fails with an internal error.
  return Proposal(*(jnp.stack(each)[params["report"]] for each in zip(*told)))


@dataclasses.dataclass(frozen=True)
class ToldDraft(tiny.ChangedDraft):
  """A draft whose parameters hold its own under 'draft'."""

  def init(self, params, context, hidden):
    return self.draft.init(params["draft"], context, hidden)

  def propose(self, params, state, context, rng):
    proposal, state = self.draft.propose(params["draft"], state, context, rng)
    return self.change(params, proposal), state


@pytest.mark.parametrize("report", REPORTS)
def test_only_drafts_that_misreport_q_are_caught(report):
  # 8,192 rows in at most 156 outcomes, level 1e-6: finds effects w >= 0.16.
  method = "temperature 1"
  own = ModelDraft(T5Model(DRAFT_CONFIG), METHODS[method], chain(2))
  target_params, draft_params = target_and_draft()
  decode = functools.partial(
    speculative_decode,
    T5Model(CONFIG),
    ToldDraft(own, report_as_told),
    target_params,
    {"draft": draft_params, "report": list(REPORTS).index(report)},
    verifier=TokenVerifier(METHODS[method]),
  )
  got = tiny.p_value(joint_of_loop(decode)[0], exact_joint(method))
  assert got > tiny.LEVEL if report in EXACT else got < tiny.CAUGHT
