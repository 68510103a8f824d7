"""Test by exact enumeration that verifiers emit the target's distribution.

All proposals are enumerated with their probabilities. The distribution of the tokens that a round
emits follows from the acceptance probabilities and residuals that the functions of the verifier
compute in float32. Nothing is sampled.
"""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specdec_jax.contrib import bild, k_seq, merging, top_beta
from specdec_jax.core.arrays import gather_one
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import DynamicTree, Tree, branching, chain
from specdec_jax.core.types import Proposal
from specdec_jax.core.verify import blocks, lossy, rejection, tokens
from specdec_jax.errors import InputError

V = 3
ATOL = 1e-6
BATCH = 1024  # proposals are verified in batches of one size, so that few programs are compiled
TREES = {
  "chain of 1": chain(1),
  "chain of 2": chain(2),
  "chain of 3": chain(3),
  "siblings": branching(3),
  "2x2": branching(2, 2),
  "ragged": Tree((0, 0, 1, 1, 2, 4)),
  "2x2x1": branching(2, 2, 1),
  "fork later": Tree((0, 1, 1)),  # the first node with children has one, the second has two
}


def tables(seed: int, depth: int, sharp: float = 1.0) -> list[np.ndarray]:
  """Return the distribution after each text of d = 0..depth tokens, as arrays [V] * d + [V]."""
  rng = np.random.default_rng(seed)
  return [rng.dirichlet(np.full(V, sharp), (V,) * d) for d in range(depth + 1)]


# Ways to propose `count` children of a node from its q. Each generates every outcome: the children,
# first child first, the probability of the outcome, and the distribution of each child given the
# earlier ones.


def without_replacement(q, count):
  for children in itertools.permutations(range(V), count):
    prob, child_qs, remaining = 1.0, [], q.copy()
    for x in children:
      remaining = remaining / remaining.sum()
      child_qs.append(remaining.copy())
      prob *= remaining[x]
      remaining[x] = 0
    yield children, prob, child_qs


def independent(q, count):
  for children in itertools.product(range(V), repeat=count):
    yield children, np.prod(q[list(children)]), [q] * count


def several_drafts(q, count):
  """Sample each child from a different draft, whose q is a rotation of the first draft's q."""
  child_qs = [np.roll(q, i) for i in range(count)]
  for children in itertools.product(range(V), repeat=count):
    yield children, np.prod([child_q[x] for child_q, x in zip(child_qs, children)]), child_qs


def deterministic(q, count):
  """Select the most probable children, with one-hot distributions."""
  best = np.argsort(-q)[:count]
  yield tuple(best), 1.0, list(np.eye(V)[best])


def greedy(q, count):
  """Sample the first child from q without its most probable tokens, the other children."""
  best, others = np.split(np.argsort(-q), [count - 1])
  rest = np.where(np.isin(np.arange(V), best), 0, q)
  for first in others:
    yield (first, *best), rest[first] / rest.sum(), [rest / rest.sum(), *np.eye(V)[best]]


def enumerated(tree: Tree, q: list[np.ndarray], draft_token):
  """Enumerate all proposals: tokens [M, N], q [M, N, V] and the probability [M] of each."""
  x, x_q, prob = np.zeros((1, 0), np.int32), np.zeros((1, 0, V), np.float32), np.ones(1)
  for node in range(tree.num_nodes):
    count = tree.parents.count(node)
    if not count:
      continue
    path = np.flatnonzero(tree.ancestors[node])[1:] - 1
    q_by_text = q[len(path)].reshape(-1, V)
    outcomes = [list(zip(*draft_token(text_q, count))) for text_q in q_by_text]
    children, probs, child_qs = (np.array(field) for field in zip(*outcomes))  # [texts, R, ...]
    text = np.ravel_multi_index(tuple(x[:, path].T), (V,) * len(path)) if len(path) else 0
    text, num_outcomes = np.broadcast_to(text, len(x)), probs.shape[1]
    x, x_q = (
      np.concatenate(
        [np.repeat(old, num_outcomes, axis=0), new[text].reshape(-1, *new.shape[2:])], axis=1
      )
      for old, new in ((x, children.astype(np.int32)), (x_q, child_qs.astype(np.float32)))
    )
    prob = (prob[:, None] * probs[text]).ravel()
  return x, x_q, prob


# Each verifier as a function of proposals. For each node it returns the probability [M, N] that the
# round ends there and the distribution [M, N, V] of the token that follows.


@functools.cache
def jitted(function):
  return jax.jit(function, static_argnums=0)


def by_tokens(tree, x, q, p, module=tokens):
  """Token verification: children are verified first to last, until one is accepted."""
  q_x, r_x = map(np.float64, jitted(module.draft_token_probs)(tree, x, q, p))
  acceptance = np.minimum(1, r_x / q_x)
  ends = np.zeros((len(x), tree.num_nodes))
  reached = np.ones((len(x), tree.num_nodes))
  for node in range(tree.num_nodes):
    remaining = reached[:, node]
    for draft_token in [i for i, parent in enumerate(tree.parents) if parent == node]:
      reached[:, draft_token + 1] = remaining * acceptance[:, draft_token]
      remaining = remaining * (1 - acceptance[:, draft_token])
    ends[:, node] = remaining
  residuals = [
    jitted(module.residual_at)(tree, x, q, p, np.full(len(x), node))
    for node in range(tree.num_nodes)
  ]
  return ends, np.stack(residuals, axis=1)


def by_k_seq(tree, x, q, p):
  return by_tokens(tree, x, q, p, K_SEQ)


def by_rejection(tree, x, q, p):
  """Rejection sampling: the next token is sampled from p, without a residual."""
  return by_tokens(tree, x, q, p, REJECTION)


K_SEQ = types.SimpleNamespace(
  draft_token_probs=k_seq.draft_token_probs,
  residual_at=lambda tree, x, q, p, end: k_seq.residual_at(tree, q, p, end),
)
REJECTION = types.SimpleNamespace(
  draft_token_probs=rejection.draft_token_probs,
  residual_at=lambda tree, x, q, p, end: gather_one(p, end),
)


def block_residuals(tree, x, q, p, on_visit):
  """Return the residual [M, N, V] of block verification at each node."""
  residuals = [
    jitted(blocks.residual_at)(tree, q, p, on_visit, np.full(len(x), node))
    for node in range(tree.num_nodes)
  ]
  return np.stack(residuals, axis=1)


def by_blocks(tree, x, q, p):
  """Block verification: nodes are verified in post-order, until one is accepted."""
  on_visit, acceptance = jitted(blocks.acceptance_probs)(tree, x, q, p)
  ends, remaining = np.zeros((len(x), tree.num_nodes)), np.ones(len(x))
  for node in blocks.post_order(tree):
    accepted = np.float64(acceptance[:, node]) if node else 1.0
    ends[:, node] = remaining * accepted
    remaining = remaining * (1 - accepted)
  return ends, block_residuals(tree, x, q, p, on_visit)


def by_merging(tree, x, q, p):
  """Merging verification: all outcomes of the draft tokens that are verified are enumerated."""
  ends, follows = np.zeros((len(x), tree.num_nodes)), np.zeros((len(x), tree.num_nodes, V))
  q_x = np.take_along_axis(np.float64(q), x[..., None], axis=-1)[..., 0]
  for outcome in itertools.product([False, True], repeat=tree.num_draft_tokens):
    # u = 0 accepts any token with r > 0, and no token is accepted at an infinite u.
    u = np.tile(np.where(outcome, 0, np.inf).astype(np.float32), (len(x), 1))
    path = jitted(merging.follow)(tree, x, q, p, u)
    acceptance = np.minimum(1, np.float64(path.r_x) / q_x)
    each = np.where(outcome, acceptance, 1 - acceptance)
    each = np.where(path.is_tried, each, ~np.array(outcome))  # each path once
    prob = each.prod(axis=1)
    weights = np.float64(path.weights)
    rows = np.arange(len(x))
    ends[rows, path.end] += prob
    follows[rows, path.end] += prob[:, None] * weights / weights.sum(axis=1, keepdims=True)
  return ends, follows + 1e-12


def by_samples(tree, x, q, p):
  """Verification of a dynamic tree: the token sampled at each node selects the accepted child.

  All combinations of sampled tokens are enumerated for a single proposal.
  """
  samples = np.array([*itertools.product(range(V), repeat=tree.num_nodes)])
  parents = jnp.tile(jnp.array(tree.parents, jnp.int32), (len(samples), 1))
  dynamic = DynamicTree(tree.num_draft_tokens, tree.depth, parents)
  draft_tokens = tokens.without_repeats(dynamic, jnp.tile(x[0], (len(samples), 1)))
  verification = tokens.follow(dynamic, draft_tokens, jnp.array(samples))
  prob = np.take_along_axis(np.float64(p), samples[..., None], axis=-1)[..., 0].prod(axis=-1)
  follows = np.zeros((1, tree.num_nodes, V))
  np.add.at(follows, (0, np.asarray(verification.path).max(axis=1), verification.next_token), prob)
  return follows.sum(axis=-1), follows + 1e-12


def emitted(tree: Tree, p: list[np.ndarray], proposals, verify) -> tuple[np.ndarray, float]:
  """Return the joint distribution [V] * (D + 1) of the next tokens and the mean number emitted."""
  by_length = [np.zeros((V,) * (d + 1)) for d in range(tree.depth + 1)]
  for first in range(0, len(proposals[2]), BATCH):
    batch = [field[first : first + BATCH] for field in proposals]
    if verify is not by_samples:  # fill up the last batch with proposals of probability 0
      x, x_q, prob = batch
      rows = np.arange(BATCH) % len(x)
      batch = x[rows], x_q[rows], np.pad(prob, (0, BATCH - len(x)))
    _add_emitted(tree, p, batch, verify, by_length)
  length = sum((d + 1) * joint.sum() for d, joint in enumerate(by_length))
  joint = by_length[0]
  for next_p, of_length in zip(p[1:], by_length[1:]):
    joint = joint[..., None] * next_p + of_length
  return joint, length


def _add_emitted(tree, p, proposals, verify, by_length):
  """Add what the proposals emit to `by_length`, the distribution for each number of tokens."""
  x, q, prob = proposals
  paths = [np.flatnonzero(tree.ancestors[node])[1:] - 1 for node in range(tree.num_nodes)]
  p_by_node = [np.broadcast_to(p[len(path)][tuple(x[:, path].T)], (len(x), V)) for path in paths]
  ends, follows = verify(tree, x, q, np.stack(p_by_node, axis=1).astype(np.float32))
  follows = np.float64(follows) / np.float64(follows).sum(axis=-1, keepdims=True)
  for node, path in enumerate(paths):
    weights = (prob * ends[:, node])[:, None] * follows[:, node]
    joint = by_length[len(path)].reshape(-1, V)  # indexed by the text on the path
    text = x[:, path] @ V ** np.arange(len(path))[::-1]
    for token in range(V):
      joint[:, token] += np.bincount(text, weights[:, token], minlength=len(joint))


def exact(p: list[np.ndarray]) -> np.ndarray:
  """Return the target's joint distribution [V] * (D + 1)."""
  joint = np.ones(())
  for next_p in p:
    joint = joint[..., None] * next_p
  return joint


DRAFT_TOKENS = {
  "without replacement": without_replacement,
  "independent": independent,
  "several drafts": several_drafts,
  "deterministic": deterministic,
  "greedy": greedy,
}
VERIFIERS = {
  "tokens": by_tokens,
  "blocks": by_blocks,
  "k-seq": by_k_seq,
  "merging": by_merging,
  "rejection": by_rejection,
}
CHAINS = [name for name in TREES if name.startswith("chain")]


@functools.cache
def problem(shape: str, way: str, seed: int = 0):
  tree = TREES[shape]
  p, q = tables(seed, tree.depth), tables(seed + 100, tree.depth)
  return tree, p, enumerated(tree, q, DRAFT_TOKENS[way])


def is_tested(verifier: str, shape: str, way: str) -> bool:
  """Return True if the verifier is exact for these proposals and they can be enumerated."""
  if shape == "2x2x1" and way in ("independent", "several drafts"):
    return False  # 3^10 proposals
  if shape == "fork later" and way != "without replacement":
    return False  # "ragged" covers the other ways
  if verifier == "merging" and (shape in CHAINS or shape == "2x2x1"):
    return False  # a chain has no equal siblings, and 2^10 outcomes of 2x2x1 are too many
  return verifier != "k-seq" or shape in CHAINS or way == "independent"


@pytest.mark.parametrize(
  "verifier, shape, way",
  [case for case in itertools.product(VERIFIERS, TREES, DRAFT_TOKENS) if is_tested(*case)],
)
def test_verifier_emits_the_targets_distribution(verifier, shape, way):
  tree, p, proposals = problem(shape, way)
  assert proposals[2].sum() == pytest.approx(1)
  joint, _ = emitted(tree, p, proposals, VERIFIERS[verifier])
  np.testing.assert_allclose(joint, exact(p), atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [name for name in TREES if name != "2x2x1"])
def test_dynamic_tree_emits_the_targets_distribution(shape):
  tree, p, proposals = problem(shape, "deterministic")
  assert len(proposals[2]) == 1
  joint, length = emitted(tree, p, proposals, by_samples)
  np.testing.assert_allclose(joint, exact(p), atol=ATOL)
  assert length == pytest.approx(emitted(tree, p, proposals, by_tokens)[1], abs=1e-5)


def test_dynamic_tree_with_equal_siblings_emits_the_targets_distribution():
  tree, p, (x, q, prob) = problem("ragged", "deterministic")
  joint, _ = emitted(tree, p, (np.zeros_like(x), q, prob), by_samples)
  np.testing.assert_allclose(joint, exact(p), atol=ATOL)


# Comparisons of the verifiers.


def lengths(shape: str, way: str, seed: int) -> dict[str, float]:
  """Return the mean number of tokens that a round emits, by verifier."""
  tree, p, proposals = problem(shape, way, seed)
  return {name: emitted(tree, p, proposals, verify)[1] for name, verify in VERIFIERS.items()}


@pytest.mark.parametrize("shape", CHAINS)
def test_blocks_emit_at_least_as_many_tokens_as_algorithm_1(shape):
  """For one draft token, verifiers emit equally many tokens; on a chain, K-SEQ is Algorithm 1."""
  gains = []
  for seed in range(4):
    means = lengths(shape, "without replacement", seed)
    assert means["k-seq"] == pytest.approx(means["tokens"], abs=1e-5)
    gains.append(means["blocks"] - means["tokens"])
  assert min(gains) > -1e-6 and (max(gains) < 1e-6) == (shape == "chain of 1")


def test_blocks_may_emit_fewer_tokens_when_branches_differ_in_depth():
  """Traversal emits more tokens on a balanced tree, and fewer on a ragged tree for two seeds."""
  gains = {"2x2": [], "ragged": []}
  for shape, seed in itertools.product(gains, range(4)):
    means = lengths(shape, "without replacement", seed)
    gains[shape].append(means["blocks"] / means["tokens"])
  assert min(gains["2x2"]) > 1.002
  assert min(gains["ragged"][:2]) > 1.01 and max(gains["ragged"][2:]) < 0.995


def test_example_of_the_block_verification_paper():
  """p = (1/3, 2/3), q = (2/3, 1/3), gamma 2: tokens accept 10/9 of them, blocks accept 11/9."""
  p, q = (
    [np.broadcast_to(np.array(probs), (3,) * d + (3,)) for d in range(3)]
    for probs in ([1 / 3, 2 / 3, 0], [2 / 3, 1 / 3, 0])
  )
  proposals = enumerated(chain(2), [np.maximum(x, 1e-12) for x in q], independent)
  accepted = {
    name: emitted(chain(2), p, proposals, verify)[1] - 1 for name, verify in VERIFIERS.items()
  }
  assert accepted["tokens"] == pytest.approx(10 / 9, abs=1e-5)
  assert accepted["blocks"] == pytest.approx(11 / 9, abs=1e-5)


@pytest.mark.slow
def test_merged_nodes_are_continued_by_the_union_of_their_children():
  """Two chains of two drafts: with equal first tokens, the second chain continues both."""
  fork = Tree((0, 0, 1, 2))
  means = []
  for seed in range(20):
    p, q = tables(seed, 2), tables(seed + 100, 2)
    proposals = enumerated(fork, q, several_drafts)
    for verify in (by_tokens, by_merging):
      joint, length = emitted(fork, p, proposals, verify)
      np.testing.assert_allclose(joint, exact(p), atol=ATOL)
      means.append(length)
  apart, merged = np.reshape(means, (20, 2)).mean(axis=0)
  assert (np.reshape(means, (20, 2))[:, 1] >= np.reshape(means, (20, 2))[:, 0] - 1e-6).all()
  assert merged > apart + 0.01
  # At temperature 0: the drafts propose 1, 0 and 1, 2, and the target's tokens are 1, 2, 0.
  x = np.array([[1, 1, 0, 2]])
  p = np.eye(V)[[[1, 2, 2, 0, 0]]].astype(np.float32)
  found = merging.follow(fork, jnp.array(x), jnp.eye(V)[x], jnp.array(p), jnp.full((1, 4), 0.5))
  assert found.end.tolist() == [4] and found.weights.argmax(axis=1).tolist() == [0]


def test_merging_verification_skips_tokens_that_were_not_proposed():
  """Their q is 0, so that each uniform number would accept them."""
  x, p = jnp.array([[-1, 2]]), jnp.full((1, 3, V), 1 / 3)
  q = jnp.stack([jnp.zeros(V), jnp.eye(V)[2]])[None]
  for u, end in ((0.0, 2), (0.9, 0)):
    found = merging.follow(branching(2), x, q, p, jnp.full((1, 2), u))
    assert found.end.tolist() == [end] and found.is_tried.tolist() == [[False, True]]


def test_rejection_sampling_accepts_a_token_within_k_tries_as_appendix_a2_says():
  """The tries are independent, and each succeeds with probability min q / p."""
  for seed, count in itertools.product(range(4), (1, 2, 3)):
    p, q = tables(seed, 1), tables(seed + 100, 1)
    _, length = emitted(
      branching(count), p, enumerated(branching(count), q, independent), by_rejection
    )
    rate = (q[0] / p[0]).min()
    assert length - 1 == pytest.approx(1 - (1 - rate) ** count, abs=1e-5)
    assert 0.01 < rate <= np.minimum(p[0], q[0]).sum()


def test_siblings_without_replacement_are_accepted_more_often():
  """Siblings without replacement are compared with two independently sampled siblings."""
  tree = branching(2)
  for seed in range(4):
    p, q = tables(seed, 1), tables(seed + 100, 1)
    proposals = (enumerated(tree, q, way) for way in (without_replacement, independent))
    without, independently = (emitted(tree, p, each, by_tokens)[1] for each in proposals)
    assert without > independently


# Injected faults: none of these emits the target's distribution.


def unadjusted(q, count):
  """Sample without replacement, but report the first child's q for every child."""
  for children, prob, _ in without_replacement(q, count):
    yield children, prob, [q] * count


def in_reverse_order(q, count):
  """Sample without replacement, but verify the children in reverse order."""
  for children, prob, child_qs in without_replacement(q, count):
    yield children[::-1], prob, child_qs[::-1]


def merged_in_random_order(q, count):
  """Merge two independent children if they are equal, and shuffle them otherwise.

  The shape of the tree then depends on the sampled tokens. The later of two merged children can
  never be accepted.
  """
  for children, prob, child_qs in independent(q, count):
    if len(set(children)) < count:
      one_hot = np.full(V, 0.0)
      one_hot[children[1]] = 1.0
      yield children, prob, [child_qs[0], one_hot]
    else:
      for order in itertools.permutations(children):
        yield order, prob / 2, child_qs


def more_probable_of_two(q, count):
  """Keep the more probable of two samples, so that the shape depends on the sampled tokens."""
  for children, prob, child_qs in independent(q, 2):
    yield (max(children, key=lambda x: q[x]),), prob, child_qs[:1]


def first_failure(tree, x, q, p):
  """Verify blocks, but end a chain at the first rejected token, not at the last accepted one."""
  on_visit, acceptance = jitted(blocks.acceptance_probs)(tree, x, q, p)
  acceptance = np.float64(acceptance)
  ends, remaining = np.zeros((len(x), tree.num_nodes)), np.ones(len(x))
  for node in range(tree.depth):
    ends[:, node] = remaining * (1 - acceptance[:, node + 1])
    remaining = remaining * acceptance[:, node + 1]
  ends[:, -1] = remaining
  return ends, block_residuals(tree, x, q, p, on_visit)


def longest_of_rows(tree, x, q, p):
  """Verify two chains of two tokens independently, and keep the longer one, or the first."""
  by_row = []  # for each chain: where it ends [M, 3], and the next token there [M, 3, V]
  for chain_of, at in (([0, 2], [0, 1, 3]), ([1, 3], [0, 2, 4])):
    by_row.append(by_tokens(chain(2), x[:, chain_of], q[:, chain_of], p[:, at]))
  (first, next_first), (second, next_second) = by_row
  ends, follows = np.zeros((len(x), 5)), np.zeros((len(x), 5, V))
  for m, n in itertools.product(range(3), range(3)):
    node = (0, 2, 4)[n] if n > m else (0, 1, 3)[m]
    prob = first[:, m] * second[:, n]
    token = next_second[:, n] if n > m else next_first[:, m]
    ends[:, node] += prob
    token = np.float64(token)
    follows[:, node] += prob[:, None] * token / token.sum(axis=-1, keepdims=True)
  return ends, follows + 1e-12


def no_residual(tree, x, q, p):
  """Accept as token verification does, but sample the next token from p, as A.2 does."""
  return by_tokens(tree, x, q, p)[0], p


def residual_of_tokens(tree, x, q, p):
  """Verify blocks, but sample the next token from max(0, p - q)."""
  ends, _ = by_blocks(tree, x, q, p)
  return ends, by_tokens(tree, x, q, p)[1]


def q_taken_as_1(tree, x, q, p):
  """Accept sampled draft tokens with q = 1, and use p in place of the residual."""
  return by_tokens(tree, x, np.eye(V, dtype=np.float32)[x], p)[0], p


FAULTS = {
  "q of siblings not adjusted": ("siblings", unadjusted, by_tokens),
  "siblings in reverse order": ("siblings", in_reverse_order, by_tokens),
  "duplicates merged in random order": ("two", merged_in_random_order, by_tokens),
  "more probable of two samples": ("chain of 2", more_probable_of_two, by_tokens),
  "first failure": ("chain of 3", independent, first_failure),
  "residual of tokens": ("chain of 3", independent, residual_of_tokens),
  "q taken as 1": ("chain of 2", independent, q_taken_as_1),
  "longest of independent rows": ("two chains", several_drafts, longest_of_rows),
  "no residual": ("chain of 1", independent, no_residual),
  "k-seq without replacement": ("siblings", without_replacement, by_k_seq),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_detected(fault):
  shape, way, verify = FAULTS[fault]
  tree = {"two": branching(2), "two chains": Tree((0, 0, 1, 2)), **TREES}[shape]
  largest_error = 0.0
  for seed in range(4):
    p, q = tables(seed, tree.depth), tables(seed + 100, tree.depth)
    joint, _ = emitted(tree, p, enumerated(tree, q, way), verify)
    largest_error = max(largest_error, np.abs(joint - exact(p)).max())
  assert largest_error > 1000 * ATOL


def test_threshold_of_k_seq_solves_its_equation():
  p, q = jnp.float32(np.random.default_rng(0).dirichlet(np.ones(V), (2, 1, 4)))
  count = np.array([2, 2, 3, 5], np.float32)
  rho = k_seq.threshold(q, p, count)
  beta = jnp.minimum(q, p / rho[..., None]).sum(axis=-1)
  np.testing.assert_allclose(1 - (1 - beta) ** count, rho * beta, atol=1e-5)


def test_empty_residual_is_replaced_by_the_targets_distribution():
  """If p = q, a rejection has probability 0 up to rounding, and the residual is empty."""
  p = jnp.array([[0.0, 0.25, 0.75]])
  a, residual = blocks.after_rejection(jnp.array([1.0]), p, p)
  assert a.tolist() == [1] and residual.tolist() == p.tolist()
  a, residual = blocks.after_rejection(jnp.array([0.5]), p, p)
  assert a.tolist() == [0] and residual.tolist() == p.tolist()
  p_by_node = jnp.broadcast_to(p, (1, 3, 3))
  residual = k_seq.residual_at(branching(2), p_by_node[:, :2], p_by_node, jnp.array([0]))
  np.testing.assert_allclose(residual, p)


def test_draft_token_that_was_not_proposed_is_never_accepted():
  """A missing draft token is -1 with q 0; the last token of the vocabulary is the most probable."""
  p = jnp.broadcast_to(jnp.array([0.1, 0.1, 0.8]), (64, 3, 3))
  q = jnp.broadcast_to(jnp.eye(3)[2], (64, 2, 3)).at[:, 1].set(0)
  keys = jax.random.split(jax.random.key(0), 64)
  proposal = Proposal(jnp.broadcast_to(jnp.array([2, -1]), (64, 2)), q)
  verification = jax.jit(functools.partial(tokens.verify, keys, chain(2)))(proposal, p)
  assert set(verification.num_accepted.tolist()) == {0, 1}


@pytest.mark.parametrize("x", [(2, -1), (-1, 2), (-1, -1)], ids=str)
@pytest.mark.parametrize("tree", [chain(2), branching(2)], ids=["chain", "siblings"])
def test_q_of_a_token_that_was_not_proposed_has_no_effect(tree, x):
  """A draft may leave any q at -1; subtracting it from p would bias the next token."""
  p = jnp.broadcast_to(jnp.array([0.1, 0.6, 0.3]), (64, 3, 3))
  q = jnp.broadcast_to(jnp.array([0.1, 0.5, 0.4]), (64, 2, 3))
  x = jnp.broadcast_to(jnp.array(x), (64, 2))
  keys = jax.random.split(jax.random.key(0), 64)
  verify = jax.jit(functools.partial(tokens.verify, keys, tree))
  left, zero = (verify(Proposal(x, y), p) for y in (q, jnp.where(x[..., None] < 0, 0.0, q)))
  assert left.num_accepted.tolist() == zero.num_accepted.tolist()
  assert left.next_token.tolist() == zero.next_token.tolist()


# Uniforms lie in [0, 1), so u = 0 occurs.


@pytest.mark.parametrize(
  "verifier",
  [
    tokens.TokenVerifier,
    blocks.BlockVerifier,
    k_seq.KSeqVerifier,
    rejection.RejectionVerifier,
  ],
)
@pytest.mark.parametrize("tree", [chain(2), branching(2)], ids=["chain", "siblings"])
def test_draft_token_of_target_probability_0_is_rejected_at_u_0(verifier, tree, monkeypatch):
  """The next token has a positive probability, though tokens of probability 0 precede it."""
  monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.zeros(shape, dtype))
  p = np.array([0, 0, 0.3, 0.7], np.float32)  # draft tokens are the first two tokens
  q = jnp.eye(4)[None, :2]
  keys = jax.random.split(jax.random.key(0), 1)
  logits = jnp.broadcast_to(jnp.log(p), (1, 3, 4))
  accept = functools.partial(
    verifier(Sampling()).verify, keys, tree, Proposal(jnp.array([[0, 1]]), q)
  )
  verification = jax.jit(accept)(logits)
  assert (verification.num_accepted.tolist(), verification.next_token.tolist()) == ([0], [2])


# Lossy verifiers.


LOSSY = {
  "typical": lossy.TypicalVerifier(Sampling(), epsilon=0.3, delta=0.6),
  "top-beta": top_beta.TopBetaVerifier(Sampling(), beta=2, tau=0.7),
  "rollback": bild.RollbackVerifier(Sampling(), rollback=1.4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSY)
def test_lossy_verifier_emits_the_distribution_that_it_reports(name):
  # 100,000 tokens, level 1e-6: detects effects w >= 0.03.
  verifier, n = LOSSY[name], 100_000
  p, q = jnp.float32(np.random.default_rng(5).dirichlet(np.full(V, 0.9), 2))
  x = np.random.default_rng(1).choice(V, n, p=np.float64(q) / np.float64(q).sum())
  proposal = Proposal(jnp.asarray(x[:, None]), jnp.broadcast_to(q, (n, 1, V)))
  keys = jax.random.split(jax.random.key(0), n)
  verification = verifier.verify(keys, chain(1), proposal, jnp.broadcast_to(jnp.log(p), (n, 2, V)))
  first = np.where(verification.num_accepted == 1, x, verification.next_token)
  reported = np.asarray(verifier.emitted(p, q))
  counts = np.bincount(first, minlength=V)
  assert not verifier.exact and reported.sum() == pytest.approx(1, abs=1e-5)
  assert tiny.p_value(counts, reported / reported.sum()) > tiny.LEVEL
  assert tiny.p_value(counts, p / p.sum()) < tiny.CAUGHT  # the deviation from p is detected


def test_tokens_that_lossy_verifiers_accept():
  p = jnp.array([0.5, 0.3, 0.15, 0.05])

  def accepted_by(verifier):
    return np.flatnonzero(verifier.acceptable(p)).tolist()

  assert accepted_by(top_beta.TopBetaVerifier(Sampling(), beta=2, tau=9.0)) == [0, 1]
  assert accepted_by(top_beta.TopBetaVerifier(Sampling(), beta=4, tau=1.3)) == [0, 1, 2]
  assert accepted_by(top_beta.TopBetaVerifier(Sampling(), beta=4, tau=0.0)) == [0]
  assert accepted_by(bild.RollbackVerifier(Sampling(), rollback=2.0)) == [0, 1, 2]
  assert accepted_by(bild.RollbackVerifier(Sampling(), rollback=0.6)) == []
  # exp(-H) = 0.319: at least 0.09, or 0.3 of that.
  assert accepted_by(lossy.TypicalVerifier(Sampling())) == [0, 1, 2]
  assert accepted_by(lossy.TypicalVerifier(Sampling(), epsilon=0.2, delta=1.0)) == [0, 1]
  flat = jnp.full(1000, 1e-3)
  # The most probable tokens are always acceptable.
  assert lossy.TypicalVerifier(Sampling(), delta=2.0).acceptable(flat).all()


@pytest.mark.parametrize(
  "parents, accepted, expected",  # the length, the end and the nodes of the path
  [
    ((0, 1, 2), [1, 1, 0], (2, 2, None)),
    ((0, 1, 2), [0, 1, 1], (0, 0, None)),
    ((0, 0, 1, 1, 2), [1, 1, 0, 1, 1], (2, 4, [1, 4])),  # of siblings 1 and 2, the first
    ((0, 0, 1, 1, 2), [0, 1, 1, 1, 1], (2, 5, [2, 5])),  # children of a rejected token do not count
    ((0, 0, 1, 1, 2), [1, 1, 0, 0, 1], (1, 1, [1, 0])),  # nor do those of a later sibling
    ((0, 0, 1, 1, 2), [0, 0, 1, 1, 1], (0, 0, [0, 0])),
  ],
)
def test_path_of_accepted_draft_tokens(parents, accepted, expected):
  found = tokens.accepted_path(Tree(parents), jnp.array([accepted], bool))
  n, end, path = (None if x is None else x[0].tolist() for x in found)
  assert (n, end, path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSY)
def test_longest_accepted_path_is_selected(name):
  """The branch of the first child is also accepted but is shorter."""
  tree = Tree((0, 0, 2))
  p = np.array([[0.5, 0.45, 0.05]] * 4, np.float32)
  proposal = Proposal(jnp.array([[0, 1, 0]]))
  keys = jax.random.split(jax.random.key(0), 1)
  n, _, path = LOSSY[name].verify(keys, tree, proposal, jnp.log(p)[None])
  assert (n.tolist(), path.tolist()) == ([2], [[2, 3]])


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_verifier_accepts_more_than_the_argmax_at_temperature_0(name):
  """The improbable draft token is rejected; the next token is the argmax after the accepted one."""
  p = jnp.broadcast_to(jnp.array([[0.5, 0.45, 0.05], [0.1, 0.1, 0.8]]), (3, 2, 3))
  verifier = dataclasses.replace(LOSSY[name], sampling=Sampling(temperature=0.0))
  keys = jax.random.split(jax.random.key(0), 3)
  accept = functools.partial(verifier.verify, keys, chain(1), Proposal(jnp.array([[0], [1], [2]])))
  verification = jax.jit(accept)(jnp.log(p))
  assert verification.num_accepted.tolist() == [1, 1, 0]
  assert verification.next_token.tolist() == [2, 2, 0]


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda: lossy.TypicalVerifier(Sampling(), epsilon=0.0), "epsilon is 0.0"),
    (lambda: top_beta.TopBetaVerifier(Sampling(), beta=0), "beta is 0"),
    (lambda: top_beta.TopBetaVerifier(Sampling(), tau=-1.0), "tau is -1.0"),
  ],
)
def test_invalid_settings_of_lossy_verifiers_are_rejected(make, words):
  with pytest.raises(InputError, match=words):
    make()
