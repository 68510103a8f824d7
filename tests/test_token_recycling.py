"""Test which tokens Token Recycling proposes, and what verified nodes write to its table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.core.context import Context
from specdec_jax.core.trees import Tree, chain
from specdec_jax.core.types import Outcome, Proposal, Verification
from specdec_jax.drafts.prompt_lookup import PromptLookupDraft
from specdec_jax.drafts.token_recycling import TokenRecyclingDraft

V = 10
TREE = Tree(
  (0, 0, 1, 1, 2, 3)
)  # nodes 1 and 2 follow 0; 3 and 4 follow 1; 5 follows 2; 6 follows 3
TABLE = (
  jnp.zeros((V, 3), jnp.int32)
  .at[jnp.array([4, 5, 6, 7])]
  .set(jnp.array([[5, 6, 7], [7, 8, 9], [4, 0, 0], [9, 5, 4]]))
)


def context(tokens: list[int]) -> Context:
  text = jnp.pad(jnp.array([tokens]), ((0, 0), (0, 12 - len(tokens))))
  return Context(
    jnp.zeros((1, 4), jnp.int32), text, jnp.array([len(tokens)]), None, jnp.zeros((1, 2))
  )


@pytest.mark.parametrize(
  "tokens, max_ngram, expected",
  [
    ([4], None, [5, 6, 7, 8, 4, 9]),
    ([3], None, [0, 0, 0, 0, 0, 0]),  # nothing is known about token 3
    ([4, 6, 2, 8, 1, 4], 1, [6, 5, 2, 4, 7, 8]),  # 6 2 8 follows the last 4; 6 moves to the front
    ([4, 9, 2, 8, 1, 4], 1, [9, 5, 2, 0, 7, 8]),  # 9 is not in the table's row of 4
  ],
)
def test_proposed_tokens(tokens, max_ngram, expected):
  history = max_ngram and PromptLookupDraft(V, chain(TREE.depth), max_ngram)
  draft = TokenRecyclingDraft(TREE, 3, history or None)
  given = context(tokens)
  state = draft.init(TABLE, given, jnp.zeros((1, 1, 2)))
  proposal, _ = draft.propose(TABLE, state, given, jax.random.split(jax.random.key(0), 1))
  assert proposal.q is None and proposal.tokens[0].tolist() == expected


def test_each_verified_node_writes_its_most_probable_successors():
  draft = TokenRecyclingDraft(TREE, 3)
  state = draft.init(TABLE, context([4]), jnp.zeros((1, 1, 2)))
  tokens = jnp.array([[5, 6, 5, -1, 4, 9]])  # 5 twice, and a node that was not proposed
  ranks = np.stack([np.roll(np.arange(V), i) for i in range(TREE.num_nodes)])
  logits = -jnp.array(ranks, jnp.float32)[None]  # node i: i, i + 1, i + 2, ...
  verification = Verification(jnp.array([1]), jnp.array([2]), jnp.array([[1, 0, 0]]))
  outcome = Outcome(
    Proposal(tokens), logits, jnp.zeros((1, 7, 2)), verification, jnp.array([2]), jnp.array([3])
  )
  table = np.array(draft.observe(TABLE, state, outcome).table[0])
  expected = np.array(TABLE)
  for token, node in ((6, 2), (5, 3), (4, 5), (9, 6)):  # the last node of a token counts
    expected[token] = [node, node + 1, node + 2]
  np.testing.assert_array_equal(table, expected)
