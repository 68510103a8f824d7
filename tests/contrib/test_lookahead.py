"""Test lookahead decoding against a window and a pool in plain lists, and on a repeating text."""

import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tiny import speculative_decode

from specdec_jax.contrib.lookahead import LookaheadDraft
from specdec_jax.core.arrays import take
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import Outcome
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.errors import InputError
from specdec_jax.models.decoder import commit
from specdec_jax.models.transformer import Cache

pytestmark = pytest.mark.slow

V, WINDOW, ROUNDS = 5, 4, 12
PROMPTS = np.array([[3, 4, 2, 1, 0, 0], [2, 1, 0, 0, 0, 0], [4, 4, 3, 9, 2, 1]], np.int32)


def follows(*path: int) -> int:
  """Return the argmax of a target, which depends on the whole path and rarely repeats."""
  return zlib.crc32(bytes(path)) % V


class InLists:
  """Reference in lists: the window of one row, and the successors of each token in the pool."""

  def __init__(self, prompt: list[int], gamma: int):
    text = [token if token < V else 0 for token in prompt if token]
    self.rows = [[text[(i + k) % len(text)] for k in range(WINDOW)] for i in range(gamma)]
    self.pool: dict[int, list[tuple[int, ...]]] = {}

  def to(self, row: int, column: int) -> tuple[int, ...]:
    """Return the tokens that the target attends to at a position of the window, that position
    included."""
    return (*self.rows[0][: column + 1], *(self.rows[i][column] for i in range(1, row + 1)))

  def chains(self, newest: int, gamma: int, num_ngrams: int) -> list[tuple[int, ...]]:
    known = self.pool.get(newest, [])
    return [*known, *[(0,) * gamma] * (num_ngrams - len(known))]

  def read(self, newest: int, num_ngrams: int) -> None:
    """Update window and pool after one target forward pass."""
    last = len(self.rows) - 1
    made = [follows(newest, *self.to(last, column)) for column in range(WINDOW)]
    for first, *behind in zip(*self.rows, made):
      others = [known for known in self.pool.get(first, []) if known[0] != behind[0]]
      self.pool[first] = [tuple(behind), *others][:num_ngrams]
    self.rows = [*self.rows[1:], made]


@pytest.mark.parametrize("gamma, num_ngrams", [(1, 3), (3, 2)])
def test_window_and_pool_equal_those_of_plain_lists(gamma, num_ngrams):
  """The draft tokens of each round, and the tokens before each draft token, are compared."""
  draft = LookaheadDraft(V, gamma, WINDOW, num_ngrams)
  batch, keys = len(PROMPTS), jax.random.split(jax.random.key(0), len(PROMPTS))
  propose, observe = jax.jit(draft.propose), jax.jit(draft.observe)
  text = np.random.default_rng(0).integers(1, V, (batch, ROUNDS)).astype(np.int32)
  context = Context(jnp.asarray(PROMPTS), jnp.asarray(text), jnp.full(batch, 1), None, None)
  state = draft.init((), context, jnp.zeros((batch, 1, 0)))
  lists = [InLists(prompt, gamma) for prompt in PROMPTS.tolist()]
  most = 0
  for r in range(ROUNDS):
    proposal, state = propose((), state, context._replace(length=jnp.full(batch, r + 1)), keys)
    assert proposal.q is None
    logits = np.zeros((batch, draft.tree.num_nodes, V), np.float32)
    for row, kept in enumerate(lists):
      newest, draft_tokens = text[row, r].item(), np.asarray(proposal.tokens)[row]
      paths = [tuple(draft_tokens[ancestors].tolist()) for ancestors in draft.tree.ancestors[:, 1:]]
      chains = kept.chains(newest, gamma, num_ngrams)
      of_chains = [chain[: i + 1] for chain in chains for i in range(gamma)]
      of_window = itertools.starmap(kept.to, itertools.product(range(gamma), range(WINDOW)))
      assert sorted(paths) == sorted([(), *of_chains, *of_window])
      firsts = [
        draft_token for draft_token, parent in zip(draft_tokens, draft.tree.parents) if parent == 0
      ]
      assert firsts == [*(chain[0] for chain in chains), kept.rows[0][0]]  # pool first
      logits[row, range(len(paths)), [follows(newest, *path) for path in paths]] = 1
      most = max(most, len(kept.pool.get(newest, [])))
      kept.read(newest, num_ngrams)
    state = observe((), state, Outcome(proposal, jnp.asarray(logits), *[None] * 4))
  assert most == num_ngrams  # buckets were full


class Fibonacci:
  """Target whose next token is the sum of the last two tokens, modulo V. The text repeats after 20
  tokens, and each token has several successors."""

  vocab_size, eos_id = V, -1

  def prompt_tokens(self, prompt):
    return prompt, jnp.full(len(prompt), prompt.shape[1])

  def prefill(self, params, prompt, num_slots):
    batch, count = prompt.shape
    text = jnp.pad(prompt, ((0, 0), (0, num_slots - count)))[:, None, :, None]
    return jnp.zeros((batch, count, V)), Cache(jnp.full(batch, count - 1), text, None, None)

  def extend(self, params, cache, tokens, tree=None, first=0):
    def put(text, new, at):
      return lax.dynamic_update_slice(text, new, (0, at, 0))

    text = jax.vmap(put)(cache.layers, tokens[:, None, :, None], cache.length)
    last = jnp.take_along_axis(text[:, 0, :, 0], cache.length[:, None] - 1, axis=1)
    before = jnp.concatenate([last, take(tokens, tree.parents)], axis=1)
    logits = jax.nn.one_hot((before + tokens) % V, V)
    return logits, logits, cache.replace(layers=text)

  def commit(self, cache, length, tree=None, path=None):
    return commit(cache, length, path)


def test_ngrams_of_the_pool_are_accepted():
  draft, prompts = LookaheadDraft(V, 3), jnp.array([[1, 3], [3, 3]])
  out = speculative_decode(
    *(Fibonacci(), draft, (), (), prompts, jax.random.key(0)),
    max_new_tokens=80,
    verifier=TokenVerifier(Sampling(temperature=0.0)),
  )
  text = np.concatenate([prompts, out.tokens], axis=1)
  np.testing.assert_array_equal(text[:, 2:], (text[:, :-2] + text[:, 1:-1]) % V)
  emitted, first = np.asarray(out.rounds.num_emitted), np.asarray(out.rounds.path)[:, :, 0]
  begin = emitted.cumsum(axis=0) - emitted
  known = (begin >= 40) & (begin < 76)  # two periods, and no round that the limit cuts
  # The pool has all n-grams. The window may also have their tokens, followed by one more.
  by_pool = emitted[known] == 4
  assert known.sum() > 16 and by_pool.sum() > 14 and (emitted[known][~by_pool] == 5).all()
  assert (first[known][by_pool] <= draft.num_ngrams).all()
  assert (first[known][~by_pool] > draft.num_ngrams).all()


@pytest.mark.parametrize("name", ["gamma", "window", "num_ngrams"])
def test_sizes_are_positive_integers(name):
  with pytest.raises(InputError, match=f"{name} is 0"):
    LookaheadDraft(V, **{"gamma": 2, name: 0})
