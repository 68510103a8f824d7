"""A smaller model as draft, whose tree goes where it is sure: EAGLE-2's dynamic tree.

A node is worth the product of the model's probabilities on its path. Level by level the model reads
the `width` best of the level before, all of whose `width` best children become candidates; of all
candidates the `num_guesses` best are the tree (Li et al., 2024, Section 4). They are chosen, none
drawn, so that the shape may follow them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree
from specdec_jax.core.types import Context, Draft, Model, Outcome, Proposal
from specdec_jax.drafts.model import ModelDraft, extend_last_tokens
from specdec_jax.errors import InputError, require_count


@dataclasses.dataclass(frozen=True)
class DynamicDraft(Draft):
  """Guesses chosen by a model; its parameters are its own.

  Attributes:
    model: M_q.
    tree: its sizes, N guesses at most D deep; drafting takes D calls of the model.
    width: nodes of a level that the model reads, and children of each.

  Raises:
    InputError: there are fewer candidates than the tree has guesses.
  """

  model: Model
  tree: DynamicTree
  width: int = 8

  def __post_init__(self):
    require_candidates(self.tree, self.width)

  @property
  def _drafted(self) -> DynamicTree:
    """Sizes of the tree that the model reads: `width` nodes a level but the last."""
    return DynamicTree(self.width * (self.tree.depth - 1), max(1, self.tree.depth - 1))

  def init(self, params: Any, context: Context, hidden: Array) -> Any:
    # The loop leaves room for the tree proposed; more may be read on the way to it.
    more = max(0, self._drafted.num_guesses - self.tree.num_guesses)
    cache = self.model.prefill(params, context.prompt, context.tokens.shape[1] + more)[1]
    return cache, jnp.zeros((len(context.tokens), self.tree.num_guesses), jnp.int32)

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    newest, _, cache = extend_last_tokens(self.model, params, state[0], context)
    width, drafted = self.width, self._drafted
    parents = jnp.zeros((len(newest), drafted.num_guesses), jnp.int32)

    def read(carry, tokens: Array, before: Array, level: int):
      cache, parents = carry
      first = 1 + (level - 1) * width
      if level > 1:
        parents = parents.at[:, first - 1 : first + width - 1].set(first - width + before)
      shape = dataclasses.replace(drafted, parents=parents)
      logits, _, cache = self.model.extend(params, cache, tokens, shape, first)
      return logits, (cache, parents)

    proposal, reads, (cache, _) = grow(self.tree, width, newest, read, (cache, parents))
    return proposal, (cache, reads)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    # The last of the path may not have been read; it is read with the newest token.
    cache, reads = state
    path: Any = outcome.verification.path
    nodes = jnp.take_along_axis(reads, jnp.maximum(path - 1, 0), axis=1)
    nodes = jnp.where(path > 0, nodes, 0)
    return self.model.commit(cache, outcome.length - 1, self.tree, nodes), reads


def require_candidates(tree: DynamicTree, width: int) -> None:
  """Raise InputError if levels of such a width have fewer candidates than the tree has guesses."""
  require_count("width", width)
  require_count("depth", tree.depth)
  require_count("num_guesses", tree.num_guesses)
  candidates = width + (tree.depth - 1) * width**2
  if tree.num_guesses > candidates:
    raise InputError(
      f"A tree of {tree.num_guesses} guesses was asked, and width {width} with depth {tree.depth} "
      f"has {candidates} candidates; ask for fewer guesses, or more of these."
    )


def model_draft(model: Model, sampling: Sampling, tree: AnyTree) -> Draft:
  """A model as draft, of a tree of either kind."""
  if isinstance(tree, DynamicTree):
    return DynamicDraft(model, tree)
  return ModelDraft(model, sampling, tree)


def grow(
  tree: DynamicTree, width: int, newest: Array, read: Callable[..., tuple[Array, Any]], carry: Any
) -> tuple[Proposal, Array, Any]:
  """The tree of guesses that are likeliest together.

  Args:
    tree: its sizes.
    width: nodes of a level that are read, and children of each.
    newest: [B, V], logits of what follows the newest token.
    read: (carry, tokens [B, width], of which of the level before each is a child [B, width], depth
      of them, from 1) -> their logits [B, width, V], and the carry after them.
    carry: before any is read.

  Returns:
    The guesses; for each, [B, N], which of the nodes that were read it is, counted from 1 in the
    order in which they were read, 0 for none; the carry.
  """
  batch, k = len(newest), width
  rows = jnp.arange(batch)[:, None]
  worth, tokens = _best(newest[:, None], jnp.zeros((batch, 1)), k)  # [B, 1, k]
  worth, tokens = worth[:, 0], tokens[:, 0]
  # Of all candidates: token, worth, the candidate before (-1: the newest token), and the node by
  # which it is read (0: none).
  live, at = jnp.broadcast_to(jnp.arange(k), (batch, k)), 0  # candidates that are read
  before = jnp.zeros((batch, k), jnp.int32)
  candidates = [(tokens, worth, jnp.full((batch, k), -1), (live + 1) * (tree.depth > 1))]
  for level in range(1, tree.depth):
    logits, carry = read(carry, tokens, before, level)
    more, children = _best(logits, worth, k)  # [B, k, k]
    more, children = more.reshape(batch, -1), children.reshape(batch, -1)
    follows = jnp.repeat(live, k, axis=1)  # [B, k * k]
    worth, best = lax.top_k(more, k)
    tokens, before = jnp.take_along_axis(children, best, axis=1), best // k
    at += candidates[-1][0].shape[1]
    live = at + best
    reads = jnp.zeros((batch, k * k), jnp.int32)
    if level < tree.depth - 1:
      reads = reads.at[rows, best].set(1 + level * k + jnp.arange(k))
    candidates.append((children, more, follows, reads))
  tokens, worth, follows, reads = (jnp.concatenate(field, axis=1) for field in zip(*candidates))
  # A path is worth no more than its beginning, and of equals the first is taken: so the parents
  # of what is taken are, too.
  kept = jnp.sort(lax.top_k(worth, tree.num_guesses)[1], axis=1)  # [B, N]
  of_kept = lambda field: jnp.take_along_axis(field, kept, axis=1)
  parents = 1 + jax.vmap(jnp.searchsorted)(kept, of_kept(follows))
  parents = jnp.where(of_kept(follows) < 0, 0, parents).astype(jnp.int32)
  shape = dataclasses.replace(tree, parents=parents)
  return Proposal(of_kept(tokens), tree=shape), of_kept(reads), carry


def _best(logits: Array, worth: Array, k: int) -> tuple[Array, Array]:
  """Worth and tokens [B, n, k] of the k best children of nodes with logits [B, n, V]."""
  logs = jax.nn.log_softmax(logits.astype(jnp.float32))
  best, tokens = lax.top_k(logs, k)
  return worth[..., None] + best, tokens
