"""Every verifier emits the target's distribution: summed over all guesses and verdicts, none sampled.

Guesses are enumerated with the probability of each draw, and what becomes of them is worked out
from the chances that the verifier's own functions give, in float32.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specdec_jax import lossy_verifiers as lossy
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import DynamicTree, Tree, branching, chain
from specdec_jax.core.types import Proposal
from specdec_jax.core.verify import blocks, k_seq, tokens
from specdec_jax.errors import InputError

V = 3
ATOL = 1e-6
AT_ONCE = 1024  # proposals judged together: one number of them, so that few programs do
TREES = {
  "chain of 1": chain(1),
  "chain of 2": chain(2),
  "chain of 3": chain(3),
  "siblings": branching(3),
  "2x2": branching(2, 2),
  "ragged": Tree((0, 0, 1, 1, 2, 4)),
  "2x2x1": branching(2, 2, 1),
  "fork later": Tree((0, 1, 1)),  # the first of the nodes with children has one, the next has two
}


def tables(seed: int, depth: int, sharp: float = 1.0) -> list[np.ndarray]:
  """Distributions after each text of 0..depth tokens: [V] * d + [V]."""
  rng = np.random.default_rng(seed)
  return [rng.dirichlet(np.full(V, sharp), (V,) * d) for d in range(depth + 1)]


# Ways to guess the children of a node from its q: each outcome, eldest first, with its probability
# and the law of each child given its elders.


def without_replacement(q, count):
  for children in itertools.permutations(range(V), count):
    chance, law, left = 1.0, [], q.copy()
    for x in children:
      left = left / left.sum()
      law.append(left.copy())
      chance *= left[x]
      left[x] = 0
    yield children, chance, law


def independent(q, count):
  for children in itertools.product(range(V), repeat=count):
    yield children, np.prod(q[list(children)]), [q] * count


def of_several_drafts(q, count):
  """Each child is another draft's, whose q is the first's, turned round."""
  of = [np.roll(q, i) for i in range(count)]
  for children in itertools.product(range(V), repeat=count):
    yield children, np.prod([law[x] for law, x in zip(of, children)]), of


def chosen(q, count):
  best = np.argsort(-q)[:count]
  yield tuple(best), 1.0, list(np.eye(V)[best])


def enumerated(tree: Tree, q: list[np.ndarray], guess):
  """All proposals: tokens [M, N], q [M, N, V] and the probability [M] of each."""
  x, law, chance = np.zeros((1, 0), np.int32), np.zeros((1, 0, V), np.float32), np.ones(1)
  for node in range(tree.num_nodes):
    count = tree.parents.count(node)
    if not count:
      continue
    path = np.flatnonzero(tree.ancestors[node])[1:] - 1
    after = q[len(path)].reshape(-1, V)  # of each text
    outcomes = [list(zip(*guess(own, count))) for own in after]
    children, chances, laws = (np.array(field) for field in zip(*outcomes))  # [texts, R, ...]
    text = np.ravel_multi_index(tuple(x[:, path].T), (V,) * len(path)) if len(path) else 0
    text, more = np.broadcast_to(text, len(x)), chances.shape[1]
    x, law = (
      np.concatenate([np.repeat(old, more, axis=0), new[text].reshape(-1, *new.shape[2:])], axis=1)
      for old, new in ((x, children.astype(np.int32)), (law, laws.astype(np.float32)))
    )
    chance = (chance[:, None] * chances[text]).ravel()
  return x, law, chance


# What a verifier does with a proposal: for each node, the probability that the round ends there, and
# the distribution of the token that follows.


@functools.cache
def jitted(function):
  return jax.jit(function, static_argnums=0)


def by_tokens(tree, x, q, p, of=tokens):
  q_x, r_x = map(np.float64, jitted(of.guess_probs)(tree, x, q, p))
  stands = np.minimum(1, r_x / q_x)
  ends = np.zeros((len(x), tree.num_nodes))
  reached = np.ones((len(x), tree.num_nodes))
  for node in range(tree.num_nodes):
    left = reached[:, node]
    for guess in [i for i, parent in enumerate(tree.parents) if parent == node]:
      reached[:, guess + 1] = left * stands[:, guess]
      left = left * (1 - stands[:, guess])
    ends[:, node] = left
  follow = lambda node: jitted(of.residual_at)(tree, q, p, np.full(len(x), node))
  follows = [follow(node) for node in range(tree.num_nodes)]
  return ends, np.stack(follows, axis=1)


def by_k_seq(tree, x, q, p):
  return by_tokens(tree, x, q, p, of=k_seq)


def by_blocks(tree, x, q, p):
  asked, chance = jitted(blocks.acceptance_probs)(tree, x, q, p)
  order = blocks.post_order(tree)
  ends, left = np.zeros((len(x), tree.num_nodes)), np.ones(len(x))
  for node in order:
    stands = np.float64(chance[:, node]) if node else 1.0
    ends[:, node] = left * stands
    left = left * (1 - stands)
  follow = lambda node: jitted(blocks.residual_at)(tree, q, p, asked, np.full(len(x), node))
  follows = [follow(node) for node in range(tree.num_nodes)]
  return ends, np.stack(follows, axis=1)


def by_draws(tree, x, q, p):
  """A tree that changes its shape: what is drawn at each node says which child stands."""
  drawn = np.array([*itertools.product(range(V), repeat=tree.num_nodes)])
  rows = lambda one: np.tile(one, (len(drawn), 1))
  shape = DynamicTree(tree.num_guesses, tree.depth, rows(np.array(tree.parents, np.int32)))
  keys = jax.random.split(jax.random.key(0), len(drawn))
  verification = tokens.verify_selected(keys, shape, rows(x[0]), np.eye(V, dtype=np.float32)[drawn])
  chance = np.take_along_axis(np.float64(p), drawn[..., None], axis=-1)[..., 0].prod(axis=-1)
  follows = np.zeros((1, tree.num_nodes, V))
  np.add.at(
    follows, (0, np.asarray(verification.path).max(axis=1), verification.next_token), chance
  )
  return follows.sum(axis=-1), follows + 1e-12


def emitted(tree: Tree, p: list[np.ndarray], proposals, judge) -> tuple[np.ndarray, float]:
  """The joint distribution [V] * (D + 1) of the next tokens, and how many a round emits."""
  by_length = [np.zeros((V,) * (d + 1)) for d in range(tree.depth + 1)]
  for first in range(0, len(proposals[2]), AT_ONCE):
    some = [field[first : first + AT_ONCE] for field in proposals]
    if judge is not by_draws:  # the last ones filled up with what has no chance
      x, law, chance = some
      rows = np.arange(AT_ONCE) % len(x)
      some = x[rows], law[rows], np.pad(chance, (0, AT_ONCE - len(x)))
    _emitted(tree, p, some, judge, by_length)
  length = sum((d + 1) * joint.sum() for d, joint in enumerate(by_length))
  joint = by_length[0]
  for law, more in zip(p[1:], by_length[1:]):
    joint = joint[..., None] * law + more
  return joint, length


def _emitted(tree, p, proposals, judge, by_length):
  """Adds what the proposals emit to the distribution of each number of tokens."""
  x, q, chance = proposals
  paths = [np.flatnonzero(tree.ancestors[node])[1:] - 1 for node in range(tree.num_nodes)]
  of_path = lambda path: np.broadcast_to(p[len(path)][tuple(x[:, path].T)], (len(x), V))
  ends, follows = judge(tree, x, q, np.stack([*map(of_path, paths)], axis=1).astype(np.float32))
  follows = np.float64(follows) / np.float64(follows).sum(axis=-1, keepdims=True)
  for node, path in enumerate(paths):
    weights = (chance * ends[:, node])[:, None] * follows[:, node]
    joint = by_length[len(path)].reshape(-1, V)  # by text so far
    text = x[:, path] @ V ** np.arange(len(path))[::-1]
    for token in range(V):
      joint[:, token] += np.bincount(text, weights[:, token], minlength=len(joint))


def exact(p: list[np.ndarray]) -> np.ndarray:
  joint = np.ones(())
  for law in p:
    joint = joint[..., None] * law
  return joint


GUESSES = {
  "without replacement": without_replacement,
  "independent": independent,
  "several drafts": of_several_drafts,
  "chosen": chosen,
}
RULES = {"tokens": by_tokens, "blocks": by_blocks, "k-seq": by_k_seq}
CHAINS = [name for name in TREES if name.startswith("chain")]


@functools.cache
def problem(shape: str, way: str, seed: int = 0):
  tree = TREES[shape]
  p, q = tables(seed, tree.depth), tables(seed + 100, tree.depth)
  return tree, p, enumerated(tree, q, GUESSES[way])


def holds(verifier: str, shape: str, way: str) -> bool:
  """Whether a verifier claims to be exact there, and what there is can be enumerated."""
  if shape == "2x2x1" and way in ("independent", "several drafts"):
    return False  # 3^10 proposals
  if shape == "fork later" and way != "without replacement":
    return False  # "ragged" has the other ways
  return verifier != "k-seq" or shape in CHAINS or way == "independent"


@pytest.mark.parametrize(
  "verifier, shape, way",
  [case for case in itertools.product(RULES, TREES, GUESSES) if holds(*case)],
)
def test_a_rule_emits_the_targets_distribution(verifier, shape, way):
  tree, p, proposals = problem(shape, way)
  assert proposals[2].sum() == pytest.approx(1)
  joint, _ = emitted(tree, p, proposals, RULES[verifier])
  np.testing.assert_allclose(joint, exact(p), atol=ATOL)


@pytest.mark.parametrize("shape", [name for name in TREES if name != "2x2x1"])
def test_a_tree_that_changes_its_shape_emits_the_targets_distribution(shape):
  tree, p, proposals = problem(shape, "chosen")
  assert len(proposals[2]) == 1
  joint, length = emitted(tree, p, proposals, by_draws)
  np.testing.assert_allclose(joint, exact(p), atol=ATOL)
  assert length == pytest.approx(emitted(tree, p, proposals, by_tokens)[1], abs=1e-5)


# What is known of the rules beside each other.


def lengths(shape: str, way: str, seed: int) -> dict[str, float]:
  tree, p, proposals = problem(shape, way, seed)
  return {name: emitted(tree, p, proposals, judge)[1] for name, judge in RULES.items()}


@pytest.mark.parametrize("shape", CHAINS)
def test_blocks_emit_no_fewer_tokens_than_algorithm_1(shape):
  """As many with one guess; and on a chain K-SEQ is Algorithm 1."""
  gains = []
  for seed in range(4):
    found = lengths(shape, "without replacement", seed)
    assert found["k-seq"] == pytest.approx(found["tokens"], abs=1e-5)
    gains.append(found["blocks"] - found["tokens"])
  assert min(gains) > -1e-6 and (max(gains) < 1e-6) == (shape == "chain of 1")


def test_traversal_may_emit_fewer_tokens_where_branches_are_of_unlike_depth():
  """More on the even tree of every seed; on the uneven one fewer for the last two."""
  gains = {
    shape: [found["blocks"] / found["tokens"] for found in of_seeds]
    for shape in ("2x2", "ragged")
    for of_seeds in [[lengths(shape, "without replacement", seed) for seed in range(4)]]
  }
  assert min(gains["2x2"]) > 1.002
  assert min(gains["ragged"][:2]) > 1.01 and max(gains["ragged"][2:]) < 0.995


def test_the_toy_of_block_verification():
  """p = (1/3, 2/3), q = (2/3, 1/3), gamma 2: 10/9 accepted by tokens, 11/9 by blocks."""
  law = lambda x: [np.broadcast_to(x, (3,) * d + (3,)) for d in range(3)]
  p, q = law(np.array([1 / 3, 2 / 3, 0])), law(np.array([2 / 3, 1 / 3, 0]))
  proposals = enumerated(chain(2), [np.maximum(x, 1e-12) for x in q], independent)
  by = {name: emitted(chain(2), p, proposals, judge)[1] - 1 for name, judge in RULES.items()}
  assert by["tokens"] == pytest.approx(10 / 9, abs=1e-5)
  assert by["blocks"] == pytest.approx(11 / 9, abs=1e-5)


def test_children_without_replacement_are_accepted_more_often():
  """Of two, drawn without replacement one stands more often than of two drawn independently."""
  tree = branching(2)
  for seed in range(4):
    p, q = tables(seed, 1), tables(seed + 100, 1)
    proposals = (enumerated(tree, q, way) for way in (without_replacement, independent))
    without, with_ = (emitted(tree, p, each, by_tokens)[1] for each in proposals)
    assert without > with_


# Planted faults: each of these is not the target's distribution.


def unadjusted(q, count):
  """Without replacement, with q said to be what it was for the eldest."""
  for children, chance, _ in without_replacement(q, count):
    yield children, chance, [q] * count


def in_another_order(q, count):
  """Drawn without replacement, tried the other way round."""
  for children, chance, law in without_replacement(q, count):
    yield children[::-1], chance, law[::-1]


def merged_in_random_order(q, count):
  """Of two drawn independently equal ones become one child; which is tried first is left to chance.

  A tree whose shape depends on what was drawn; where they merged the younger can never stand.
  """
  for children, chance, law in independent(q, count):
    if len(set(children)) < count:
      never = np.full(V, 0.0)
      never[children[1]] = 1.0
      yield children, chance, [law[0], never]
    else:
      for order in itertools.permutations(children):
        yield order, chance / 2, law


def the_likelier_of_two(q, count):
  """Of two that were drawn one is kept for what it is: a shape that depends on what was drawn."""
  for children, chance, law in independent(q, 2):
    yield (max(children, key=lambda x: q[x]),), chance, law[:1]


def first_failure(tree, x, q, p):
  """Blocks, but a chain ends before the first guess whose u is above its chance."""
  asked, chance = jitted(blocks.acceptance_probs)(tree, x, q, p)
  chance = np.float64(chance)
  ends, left = np.zeros((len(x), tree.num_nodes)), np.ones(len(x))
  for node in range(tree.depth):
    ends[:, node] = left * (1 - chance[:, node + 1])
    left = left * chance[:, node + 1]
  ends[:, -1] = left
  follow = lambda node: jitted(blocks.residual_at)(tree, q, p, asked, np.full(len(x), node))
  return ends, np.stack([follow(node) for node in range(tree.num_nodes)], axis=1)


def residual_of_tokens(tree, x, q, p):
  """Blocks, but the next token is drawn from max(0, p - q)."""
  ends, _ = by_blocks(tree, x, q, p)
  return ends, by_tokens(tree, x, q, p)[1]


def q_taken_as_1(tree, x, q, p):
  """Guesses whose q is not known accepted with p as if certain, and nothing taken out."""
  return by_tokens(tree, x, np.eye(V, dtype=np.float32)[x], p)[0], p


FAULTS = {
  "q of siblings not adjusted": ("siblings", unadjusted, by_tokens),
  "tried in another order": ("siblings", in_another_order, by_tokens),
  "duplicates merged in random order": ("two", merged_in_random_order, by_tokens),
  "kept for what was drawn": ("chain of 2", the_likelier_of_two, by_tokens),
  "first failure": ("chain of 3", independent, first_failure),
  "residual of tokens": ("chain of 3", independent, residual_of_tokens),
  "q taken as 1": ("chain of 2", independent, q_taken_as_1),
  "k-seq without replacement": ("siblings", without_replacement, by_k_seq),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_show(fault):
  shape, way, judge = FAULTS[fault]
  tree = {"two": branching(2), **TREES}[shape]
  furthest = 0.0
  for seed in range(4):
    p, q = tables(seed, tree.depth), tables(seed + 100, tree.depth)
    joint, _ = emitted(tree, p, enumerated(tree, q, way), judge)
    furthest = max(furthest, np.abs(joint - exact(p)).max())
  assert furthest > 1000 * ATOL


def test_the_threshold_of_k_seq_solves_its_equation():
  p, q = np.random.default_rng(0).dirichlet(np.ones(V), (2, 1, 4)).astype(np.float32)
  count = np.array([2, 2, 3, 5], np.float32)
  rho = k_seq.threshold(q, p, count)
  beta = np.minimum(q, p / rho[..., None]).sum(axis=-1)
  np.testing.assert_allclose(1 - (1 - beta) ** count, rho * beta, atol=1e-5)


def test_where_the_residual_is_empty_the_next_token_is_the_targets():
  """p = q: a rejection has probability 0 up to rounding, and then no token would be left."""
  p = jnp.array([[0.0, 0.25, 0.75]])
  a, left = blocks.after_rejection(jnp.array([1.0]), p, p)
  assert a.tolist() == [1] and left.tolist() == p.tolist()
  a, left = blocks.after_rejection(jnp.array([0.5]), p, p)
  assert a.tolist() == [0] and left.tolist() == p.tolist()
  each = jnp.broadcast_to(p, (1, 3, 3))
  left = k_seq.residual_at(branching(2), each[:, :2], each, jnp.array([0]))
  np.testing.assert_allclose(left, p)


def test_a_guess_that_was_not_made_is_never_accepted():
  """Token -1 with q = 0, where the target would emit any token, the last one most probably."""
  p = jnp.broadcast_to(jnp.array([0.1, 0.1, 0.8]), (64, 3, 3))
  q = jnp.broadcast_to(jnp.eye(3)[2], (64, 2, 3)).at[:, 1].set(0)
  keys = jax.random.split(jax.random.key(0), 64)
  proposal = Proposal(jnp.broadcast_to(jnp.array([2, -1]), (64, 2)), q)
  verification = jax.jit(functools.partial(tokens.verify, keys, chain(2)))(proposal, p)
  assert set(verification.num_accepted.tolist()) == {0, 1}


# Uniforms of [0, 1): 0 is one of them.


@pytest.mark.parametrize(
  "verifier", [tokens.TokenVerifier, blocks.BlockVerifier, k_seq.KSeqVerifier]
)
@pytest.mark.parametrize("tree", [chain(2), branching(2)], ids=["chain", "siblings"])
def test_a_guess_of_probability_0_is_rejected_at_u_0(verifier, tree, monkeypatch):
  """And the next token is one that the target may emit, though it is not the first of them."""
  monkeypatch.setattr(jax.random, "uniform", lambda key, shape: jnp.zeros(shape))
  p = np.array([0, 0, 0.3, 0.7], np.float32)  # guesses are the first two tokens
  q = np.eye(4, dtype=np.float32)[None, :2]
  keys = jax.random.split(jax.random.key(0), 1)
  logits = jnp.broadcast_to(jnp.log(p), (1, 3, 4))
  accept = functools.partial(
    verifier(Sampling()).verify, keys, tree, Proposal(jnp.array([[0, 1]]), q)
  )
  verification = jax.jit(accept)(logits)
  assert (verification.num_accepted.tolist(), verification.next_token.tolist()) == ([0], [2])


# Lossy rules.


LOSSY = {
  "typical": lossy.TypicalVerifier(Sampling(), epsilon=0.3, delta=0.6),
  "top-beta": lossy.TopBetaVerifier(Sampling(), beta=2, tau=0.7),
}


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_rule_emits_what_it_says(name):
  # 100,000 tokens, level 1e-6: finds effects w >= 0.03.
  verifier, n = LOSSY[name], 100_000
  p, q = np.random.default_rng(5).dirichlet(np.full(V, 0.9), 2).astype(np.float32)
  x = np.random.default_rng(1).choice(V, n, p=q / q.sum(dtype=np.float64))
  proposal = Proposal(jnp.asarray(x[:, None]), jnp.broadcast_to(q, (n, 1, V)))
  keys = jax.random.split(jax.random.key(0), n)
  verification = verifier.verify(keys, chain(1), proposal, jnp.broadcast_to(jnp.log(p), (n, 2, V)))
  first = np.where(verification.num_accepted == 1, x, verification.next_token)
  says = np.asarray(verifier.emitted(p, q))
  counts = np.bincount(first, minlength=V)
  assert not verifier.exact and says.sum() == pytest.approx(1, abs=1e-5)
  assert tiny.p_value(counts, says / says.sum()) > tiny.LEVEL
  assert tiny.p_value(counts, p / p.sum()) < tiny.CAUGHT  # its total variation shows


def test_what_lossy_rules_agree_to():
  p = jnp.array([0.5, 0.3, 0.15, 0.05])
  agrees = lambda verifier: np.flatnonzero(verifier.verifyable(p)).tolist()
  assert agrees(lossy.TopBetaVerifier(Sampling(), beta=2, tau=9.0)) == [0, 1]
  assert agrees(lossy.TopBetaVerifier(Sampling(), beta=4, tau=1.3)) == [0, 1, 2]
  assert agrees(lossy.TopBetaVerifier(Sampling(), beta=4, tau=0.0)) == [0]
  # exp(-H) = 0.319: at least 0.09, or 0.3 of that.
  assert agrees(lossy.TypicalVerifier(Sampling())) == [0, 1, 2]
  assert agrees(lossy.TypicalVerifier(Sampling(), epsilon=0.2, delta=1.0)) == [0, 1]
  flat = jnp.full(1000, 1e-3)
  assert lossy.TypicalVerifier(Sampling(), delta=2.0).acceptable(flat).all()  # the likeliest always


@pytest.mark.parametrize("name", LOSSY)
def test_the_longest_path_that_stands_is_taken(name):
  """Not the eldest child's: in a tree whose first branch ends early."""
  tree = Tree((0, 0, 2))
  p = np.array([[0.5, 0.45, 0.05]] * 4, np.float32)
  proposal = Proposal(jnp.array([[0, 1, 0]]))
  keys = jax.random.split(jax.random.key(0), 1)
  n, _, path = LOSSY[name].verify(keys, tree, proposal, jnp.log(p)[None])
  assert (n.tolist(), path.tolist()) == ([2], [[2, 3]])


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_rule_accepts_more_than_the_argmax_at_temperature_0(name):
  """And never more than the target agrees to; the next token is the argmax at the last of them."""
  p = jnp.broadcast_to(jnp.array([[0.5, 0.45, 0.05], [0.1, 0.1, 0.8]]), (3, 2, 3))
  verifier = dataclasses.replace(LOSSY[name], sampling=Sampling(temperature=0.0))
  keys = jax.random.split(jax.random.key(0), 3)
  accept = functools.partial(verifier.verify, keys, chain(1), Proposal(jnp.array([[0], [1], [2]])))
  verification = jax.jit(accept)(jnp.log(p))
  assert verification.num_accepted.tolist() == [1, 1, 0] and verification.next_token.tolist() == [
    2,
    2,
    0,
  ]


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda: lossy.TypicalVerifier(Sampling(), epsilon=0.0), "epsilon is 0.0"),
    (lambda: lossy.TopBetaVerifier(Sampling(), beta=0), "beta is 0"),
    (lambda: lossy.TopBetaVerifier(Sampling(), tau=-1.0), "tau is -1.0"),
  ],
)
def test_bad_settings_of_rules(make, words):
  with pytest.raises(InputError, match=words):
    make()
