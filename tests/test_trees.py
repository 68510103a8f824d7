"""Test trees of draft_tokens: their shapes, the best tree, and the acceptance of their nodes."""

import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair

from specdec_jax import theory
from specdec_jax.contrib.k_seq import KSeqVerifier
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import (
  DynamicTree,
  Tree,
  branching,
  chain,
  path_to,
  require_chain,
  require_static,
)
from specdec_jax.core.types import Outcome, Verification
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.composed import forest_draft, tree_draft
from specdec_jax.drafts.dynamic import DynamicDraft
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.several import joined_at_root
from specdec_jax.errors import InputError
from specdec_jax.measure.alpha import measure_alpha, positional_acceptance
from specdec_jax.models.t5 import T5Model

RAGGED = Tree((0, 0, 1, 1, 2, 4))


def test_attributes_of_a_ragged_tree():
  assert RAGGED.depths.tolist() == [0, 1, 1, 2, 2, 2, 3]
  assert RAGGED.levels == [(1, 3), (3, 6), (6, 7)]
  assert (RAGGED.num_nodes, RAGGED.num_draft_tokens, RAGGED.depth, RAGGED.width) == (7, 6, 3, 2)
  assert RAGGED.ranks.tolist() == [0, 1, 0, 1, 0, 0]
  assert RAGGED.children.tolist() == [[0, 1], [2, 3], [4, 6], [6, 6], [5, 6], [6, 6], [6, 6]]
  for node in range(7):
    path = []
    ancestor = node
    while ancestor:
      path.insert(0, ancestor)
      ancestor = RAGGED.parents[ancestor - 1]
    assert np.flatnonzero(RAGGED.ancestors[node]).tolist() == [0, *path]
    (padded_path,) = np.asarray(path_to(RAGGED, jnp.array([node]))).tolist()
    assert padded_path == path + [0] * (3 - len(path))
  assert not RAGGED.is_chain


def test_chains_of_one_length_are_equal_and_a_long_chain_needs_no_memory():
  assert chain(3) == Tree((0, 1, 2)) == Tree(range(3)) == Tree([0, 1, 2]) == branching(1, 1, 1)
  assert len({hash(tree) for tree in (chain(3), Tree((0, 1, 2)), branching(1, 1, 1))}) == 1
  assert chain(3).is_chain and chain(3).width == 1 and path_to(chain(3), jnp.array([2])) is None
  assert chain(0).num_nodes == 1 and chain(0).width == 0 and chain(0).depth == 0
  assert chain(3) != chain(4) and chain(3) != RAGGED
  assert chain(2**31 - 1).depth == 2**31 - 1  # exceeds any memory, but only when it is used


def test_trees_from_branching_factors():
  assert branching(2, 2) == Tree((0, 0, 1, 1, 2, 2))
  assert branching(3, 2, 1).num_draft_tokens == 3 + 6 + 6


@pytest.mark.parametrize("parents", [(1,), (0, 2), (0, 0, 1, 0), (0, -1), (-1, 0), (0, 1, 1, 0)])
def test_parents_that_are_not_in_level_order_are_rejected(parents):
  with pytest.raises(InputError, match="level order"):
    Tree(parents)


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda: require_chain("this draft", RAGGED), "this draft proposes chains"),
    (lambda: chain(-1), "gamma is -1"),
    (lambda: theory.best_tree([0.5, 0.6], 4, 2), "at most 1 together"),
    (lambda: theory.best_tree([0.5], 0, 2), "num_nodes is 0"),
  ],
)
def test_invalid_input_is_rejected(make, words):
  with pytest.raises(InputError, match=words):
    make()


# Dynamic trees and the best tree.


def test_dynamic_tree_has_the_attributes_of_static_trees():
  trees = [Tree((0, 0, 1, 1, 2, 4)), Tree((0, 1, 1, 2, 2, 3)), chain(6)]
  parents = jnp.array([[*tree.parents] for tree in trees])
  dynamic = DynamicTree(6, 6, parents)
  for row, tree in enumerate(trees):
    np.testing.assert_array_equal(dynamic.row_ancestors[row], tree.ancestors)
    np.testing.assert_array_equal(dynamic.row_depths[row], tree.depths)
  for node in range(7):
    paths = path_to(dynamic, jnp.full(3, node))
    for path, tree in zip(paths, trees):
      nodes = np.flatnonzero(tree.ancestors[node])[1:]
      assert path.tolist() == [*nodes, *[0] * (6 - len(nodes))]
  with pytest.raises(InputError, match="K-SEQ takes static trees"):
    require_static("K-SEQ", dynamic)


def test_trees_are_joined_at_the_root():
  tree, order = joined_at_root([chain(2), branching(2, 1)])
  assert tree == Tree((0, 0, 0, 1, 2, 3)) and order == [0, 2, 3, 1, 4, 5]
  assert joined_at_root([chain(3)]) == (chain(3), [0, 1, 2])


class PathModel:
  """Model whose logits depend on the sum of a token and its ancestors in the tree.

  The parameters [S, V] are the logits for each sum. The cache is the list of input blocks.
  """

  vocab_size, eos_id = None, None
  prompt_tokens = prefill = mock.Mock()  # not called

  @staticmethod
  def commit(cache, length, tree=None, path=None):
    return cache if path is None else path

  @staticmethod
  def extend(params, cache, tokens, tree=None, first=0):
    cache, sums = [*cache, tokens], tokens
    if tree is not None:  # node 0 is the last token of the first block
      inputs = jnp.concatenate([cache[0][:, -1:], *cache[1:]], axis=1)
      nodes, on_path = (
        slice(first, first + tokens.shape[1]),
        tree.row_ancestors[..., : inputs.shape[1]],
      )
      sums = (on_path[:, nodes] * inputs[:, None]).sum(axis=-1)
    return params[sums], params[sums], cache


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_dynamic_tree_has_the_most_probable_nodes_of_the_beam(seed):
  """The expected tree is computed path by path."""
  k, depth, count, last_token = 3, 4, 14, 5
  logs = np.log(np.random.default_rng(seed).dirichlet(np.full(7, 0.5), last_token + 6 * depth))

  def children(path, score):
    log_q = logs[last_token + sum(path)]
    return [((*path, x), score + log_q[x]) for x in np.argsort(-log_q)[:k]]

  live, candidates = [((), 0.0)], []
  for _ in range(depth):
    level = [child for node in live for child in children(*node)]
    candidates += level
    live = sorted(level, key=lambda node: -node[1])[:k]
  best = sorted(candidates, key=lambda node: -node[1])[:count]
  draft = DynamicDraft(PathModel(), DynamicTree(count, depth), width=k)
  context = Context(None, jnp.array([[1, last_token]]), jnp.array([2]), None, None)
  keys = jax.random.split(jax.random.key(0), 1)
  state = [], None
  proposal, (cache, input_nodes) = draft.propose(
    jnp.asarray(logs, jnp.float32), state, context, keys
  )
  paths = [()]
  for token, parent in zip(proposal.tokens[0].tolist(), proposal.tree.parents[0].tolist()):
    paths.append((*paths[parent], token))
  assert {*paths[1:]} == {path for path, _ in best} and len(paths) == count + 1
  # Each node maps to the node under which the model ran on its token. Leaves may have none (0).
  tokens, nodes = proposal.tokens[0], np.asarray(input_nodes[0])
  inputs = np.concatenate([block[0] for block in cache[1:]])  # after the last committed token
  assert (inputs[nodes[nodes > 0] - 1] == tokens[nodes > 0]).all()
  inner = np.unique(proposal.tree.parents[0])
  assert (nodes[inner[inner > 0] - 1] > 0).all()
  path = path_to(proposal.tree, jnp.array([count]))
  outcome = Outcome(proposal, None, None, Verification(None, None, path), None, jnp.array([2]))
  committed, _ = draft.observe(None, (cache, input_nodes), outcome)
  assert committed[0].tolist() == [nodes[node - 1] if node else 0 for node in path[0].tolist()]


def all_trees(num_draft_tokens: int):
  """Generate all trees of `num_draft_tokens` draft tokens."""
  for parents in itertools.product(range(num_draft_tokens), repeat=num_draft_tokens):
    try:
      yield Tree(parents)
    except InputError:
      continue


def test_expected_tokens_of_a_chain_agree_with_equation_1():
  for gamma in range(6):
    want = theory.expected_tokens(0.7, gamma)
    assert theory.tree_tokens(chain(gamma), [0.7]) == pytest.approx(float(want))
  assert theory.tree_tokens(RAGGED, [0.6, 0.2]) == pytest.approx(
    1 + 0.6 + 0.2 + 0.36 + 0.12 + 0.12 + 0.072
  )


# Of several greedy siblings, the second one is the most probable.
GREEDY_ACCEPTANCE = ((0.8,), (0.2, 0.7), (0.15, 0.7, 0.1))


@pytest.mark.parametrize(
  "acceptance", [(0.6, 0.2, 0.1), (0.9, 0.05), (0.4, 0.2, 0.3, 0.05), GREEDY_ACCEPTANCE]
)
@pytest.mark.parametrize("depth", [1, 2, 5, 10_000])
def test_best_tree_is_the_best_of_all_trees(acceptance, depth):
  for num_draft_tokens in range(1, 6):
    shallow = [tree for tree in all_trees(num_draft_tokens) if tree.depth <= depth]
    best = max(theory.tree_tokens(tree, acceptance) for tree in shallow)
    tree = theory.best_tree(acceptance, num_draft_tokens + 1, depth)
    assert tree.depth <= depth and tree.num_draft_tokens <= num_draft_tokens
    assert theory.tree_tokens(tree, acceptance) == pytest.approx(best)
    assert tree.greedy_siblings == (acceptance == GREEDY_ACCEPTANCE)


# Acceptance of nodes.


def small_pair():
  """Return a pair of random models with a vocabulary of 12 tokens."""
  target = tiny.config(vocab_size=12, layers=1)
  draft = tiny.config(vocab_size=12, layers=1, emb_dim=8)
  return tiny_pair.changed(
    tiny_pair.pair(),
    model=T5Model(target),
    params=tiny_pair.random_params(target, 0),
    draft=functools.partial(ModelDraft, T5Model(draft)),
    draft_params=tiny_pair.random_params(draft, 3),
  )


@pytest.mark.slow
@pytest.mark.parametrize("greedy_siblings", [False, True])
def test_positional_acceptance_agrees_with_the_rounds_of_decoding(greedy_siblings):
  """With one level of siblings, 1,000 rounds on generated texts agree within 6 standard errors."""
  pair, sampling, limit = small_pair(), Sampling(), dict(max_new_tokens=12)
  tree = Tree([0] * 4, greedy_siblings=greedy_siblings)
  prompt = tiny.sources(tiny.config(vocab_size=12), 0, 160)
  generated = pair.decode_fn(sampling, chain(0))(prompt, row_keys(0, 0, 160), **limit)
  texts = [prompt], [jax.device_get(generated)]
  acceptance = positional_acceptance(pair, *texts, sampling, 4, greedy_siblings=greedy_siblings)
  out = jax.device_get(pair.decode_fn(sampling, tree)(prompt, row_keys(1, 0, 160), **limit))
  whole = out.rounds.num_emitted == out.rounds.num_accepted + 1
  accepted = out.rounds.path[..., 0][whole]  # 0: no sibling was accepted
  shares = [(accepted == node).mean() for node in range(1, 5)]
  assert len(accepted) > 1000
  np.testing.assert_allclose(acceptance, shares, atol=6 * 0.5 / np.sqrt(len(accepted)))
  assert acceptance.sum() < 1 and (greedy_siblings or (np.diff(acceptance) < 0).all())
  argmax = Sampling(temperature=0.0)
  acceptance = positional_acceptance(pair, *texts, argmax, width=12, lenience=0.3)
  assert acceptance.sum() == pytest.approx(1)  # all tokens are proposed
  alpha = measure_alpha(pair, *texts, argmax, lenience=0.3).alpha
  assert acceptance[0] == pytest.approx(alpha)


def test_k_seq_requires_independently_sampled_siblings():
  pair = dataclasses.replace(tiny_pair.pair("near"), verifier=KSeqVerifier)
  assert pair.decoder(Sampling(), branching(2)).draft.independent_siblings
  # Drafts that propose a tree if a chain is requested.
  target, near = pair.target, lambda target: pair.draft
  tree = pair.with_draft(tree_draft(target, near, (2,)))
  assert tree.decoder(Sampling(), chain(2)).draft.independent_siblings
  forest = pair.with_draft(forest_draft(target, [near, near]))
  for each, shape in ((pair, DynamicTree(4, 2)), (forest, chain(2))):
    with pytest.raises(
      InputError, match="KSeqVerifier verifies siblings that are sampled independently"
    ):
      each.decode_fn(Sampling(), shape)


def test_pair_uses_its_own_verifier():
  pair = dataclasses.replace(tiny_pair.pair(), verifier=BlockVerifier)
  assert isinstance(pair.verifier_for(Sampling()), BlockVerifier)
  assert pair.verifier_name == "BlockVerifier"
  with pytest.raises(InputError, match="lenience below 1 goes with TokenVerifier"):
    pair.verifier_for(Sampling(), 0.5)
  assert tiny_pair.pair().verifier_for(Sampling(), 0.5) == TokenVerifier(Sampling(), 0.5)
