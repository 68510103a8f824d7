"""Test the choice of a draft by expected speed.

All draft tokens are enumerated, to show that texts keep the target's distribution.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from test_verifiers import ATOL, V, by_tokens, exact, tables

from specdec_jax.contrib.fastest import FastestDraft
from specdec_jax.core.context import Context
from specdec_jax.core.trees import Tree, chain
from specdec_jax.core.types import Draft, Outcome, Proposal, Verification
from specdec_jax.theory import walltime_improvement

pytestmark = pytest.mark.slow

TREE, LENGTH = chain(2), 3  # draft tokens, and tokens of a text
# Indices of the texts of each length in the tables below.
NUMBER = V ** np.arange(LENGTH + TREE.depth)


def table(seed: int) -> np.ndarray:
  """Return the distribution after each text, indexed by its length and its number."""
  found = np.zeros((LENGTH + TREE.depth, V ** (LENGTH + TREE.depth - 1), V), np.float32)
  for length, each in enumerate(tables(seed, LENGTH + TREE.depth - 1)):
    # The first token of a text has the smallest place value.
    found[length, : V**length] = each.transpose(*range(length)[::-1], length).reshape(-1, V)
  return found


P, Q = table(0), np.stack([table(1), table(2)])


@functools.partial(jax.jit, static_argnames="depth")
def following(of: Any, number: Any, length: Any, x: Any, depth: int) -> Any:
  """Return the distributions at the first `depth` nodes of chains x after texts."""
  rows = []
  for node in range(depth):
    rows.append(of[length + node, number])
    number = number + x[:, min(node, TREE.depth - 1)] * jnp.array(NUMBER)[length + node]
  return jnp.stack(rows, axis=1)


@dataclasses.dataclass(frozen=True)
class GivenTokens(Draft):
  """A draft whose tokens are its parameters, and whose q is a table."""

  index: int
  tree: Tree = TREE

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    number = context.tokens[:, 0]
    q = following(jnp.array(Q)[self.index], number, context.length, params, TREE.depth)
    return Proposal(params, q), state


class ChoiceByToken(FastestDraft):
  """The first draft if its first token is 0, which is not exact."""

  def propose(self, params, state, context, rng):
    is_first = params[0][:, :1] == 0
    wanted = jnp.where(is_first, jnp.array([1e3, 0]), jnp.array([0, 1e3]))
    proposal, after = super().propose(params, state._replace(accepted=wanted), context, rng)
    return proposal, after._replace(accepted=state.accepted)


def fastest(cls=FastestDraft, **options) -> FastestDraft:
  drafts = GivenTokens(0), GivenTokens(1)
  return cls(drafts, drafts, (0.5, 0.5), (0.1, 0.11), V, prior_tokens=2, **options)


def joint_of_texts(draft: FastestDraft) -> tuple[np.ndarray, list[set[int]]]:
  """Return the joint distribution of the first LENGTH tokens, and the drafts chosen in each round.

  All draft tokens of both drafts, whether they are accepted, and all next tokens are enumerated.
  """
  each = np.stack(np.meshgrid(*[np.arange(V)] * 4, indexing="ij"), axis=-1).reshape(-1, 2, 2)
  nothing = jnp.zeros((1, 1), jnp.int32)
  start = Context(nothing, nothing, jnp.zeros(1, jnp.int32), None, jnp.zeros((1, 1)))
  state = jax.tree.map(np.asarray, draft.init(((), ()), start, jnp.zeros((1, 1, 1))))
  texts, lengths, probs = np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1)
  joint, chosen = np.zeros(V**LENGTH), []
  propose, observe = jax.jit(draft.propose), jax.jit(draft.observe)
  while len(texts):
    rows, tokens = np.repeat(np.arange(len(texts)), len(each)), np.tile(each, (len(texts), 1, 1))
    state = jax.tree.map(lambda x, rows=rows: jnp.asarray(x[rows]), state)
    texts, lengths, probs = texts[rows], lengths[rows], probs[rows]
    params = jnp.array(tokens[:, 0]), jnp.array(tokens[:, 1])
    for i in range(2):
      q = np.asarray(following(Q[i], texts, lengths, tokens[:, i], TREE.depth), np.float64)
      probs = probs * np.take_along_axis(q, tokens[:, i, :, None], axis=-1)[..., 0].prod(axis=-1)
    keys = jax.random.split(jax.random.key(0), len(texts))
    context = Context(nothing, texts[:, None], lengths, None, jnp.zeros((len(texts), 1)))
    (x, q, _), state = propose(params, state, context, keys)
    chosen.append(set(np.asarray(state.idle).argmin(axis=1).tolist()))
    p = following(P, texts, lengths, x, TREE.num_nodes)
    ends, follows = by_tokens(TREE, np.asarray(x), np.asarray(q), np.asarray(p))
    follows = np.float64(follows) / np.float64(follows).sum(axis=-1, keepdims=True)
    # Each number of accepted tokens, and each next token, is an outcome of each row.
    num_accepted, next_token = np.divmod(np.arange(TREE.num_nodes * V), V)
    count = len(num_accepted)
    probs = (
      probs[:, None] * (ends[:, num_accepted] * follows[:, num_accepted, next_token])
    ).ravel()
    rows, outcomes = np.divmod(np.arange(len(probs)), count)
    num_accepted, next_token = num_accepted[outcomes], next_token[outcomes]
    x, q, p, texts, lengths = (np.asarray(each)[rows] for each in (x, q, p, texts, lengths))
    state = jax.tree.map(lambda x, rows=rows: x[rows], state)
    emitted = np.pad(x, ((0, 0), (0, 1)))
    emitted[np.arange(len(rows)), num_accepted] = next_token
    nodes = np.arange(TREE.num_nodes)
    places = lengths[:, None] + nodes
    is_new = (nodes <= num_accepted[:, None]) & (places < LENGTH)
    texts = texts + (emitted * is_new * NUMBER[places]).sum(axis=1)
    verification = Verification(jnp.array(num_accepted), jnp.array(next_token))
    num_emitted = jnp.array(num_accepted + 1)
    lengths = lengths + num_accepted + 1
    outcome = Outcome(Proposal(x, q), p, p, verification, num_emitted, jnp.array(lengths))
    state = jax.tree.map(np.asarray, observe(params, state, outcome))
    is_done = lengths >= LENGTH
    np.add.at(joint, texts[is_done], probs[is_done])
    # Outcomes with the same text and state are merged.
    key = np.concatenate([texts[:, None], lengths[:, None], *state[1:]], axis=1)[~is_done]
    _, first, group = np.unique(key, axis=0, return_index=True, return_inverse=True)
    probs = np.bincount(group, probs[~is_done], minlength=len(first))
    texts, lengths, state = jax.tree.map(
      lambda x, rows=~is_done, first=first: x[rows][first], (texts, lengths, state)
    )
  return joint, chosen


def test_texts_have_the_targets_distribution():
  joint, chosen = joint_of_texts(fastest(patience=3))
  assert chosen[:2] == [{0}, {0, 1}]  # the choice depends on the first round
  np.testing.assert_allclose(joint, target(), atol=ATOL)


def test_choice_by_tokens_of_the_round_is_detected():
  joint, _ = joint_of_texts(fastest(ChoiceByToken))
  assert np.abs(joint - target()).max() > 1000 * ATOL


def target() -> np.ndarray:
  """Return the target's joint distribution of texts, by number."""
  return exact(tables(0, LENGTH - 1)).transpose(*range(LENGTH)[::-1]).ravel()


@pytest.mark.parametrize(
  "idle, expected",
  [([0, 0], [0, 1]), ([0, 2], [1, 1]), ([2, 0], [0, 0])],
  ids=["by speed", "second is tried again", "first is tried again"],
)
def test_draft_of_the_highest_expected_speed_is_chosen(idle, expected):
  """One row for an alpha of 0.8 and 0.5, and one for an alpha of 0.2 and 0.5."""
  draft = dataclasses.replace(fastest(patience=2), costs=(0.3, 0.1))
  accepted = jnp.array([[8.0, 5], [2, 5]])
  context = Context(*[jnp.zeros((2, 1), jnp.int32)] * 2, jnp.zeros(2, jnp.int32), None, accepted)
  state = draft.init(((), ()), context, jnp.zeros((2, 1, 1)))
  state = state._replace(accepted=accepted, rejected=10 - accepted, idle=jnp.array([idle] * 2))
  speeds = draft.speeds(state)
  if idle == [0, 0]:
    costs = np.array([0.3, 0.1])
    np.testing.assert_allclose(speeds, walltime_improvement(accepted / 10, 2, costs), rtol=1e-5)
  assert speeds.argmax(axis=1).tolist() == expected
