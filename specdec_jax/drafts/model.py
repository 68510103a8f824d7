"""A smaller model as draft: a chain or a tree of its own guesses, a call of it a level."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.core.sampling import Sampling, draw, draw_siblings
from specdec_jax.core.trees import Tree
from specdec_jax.core.types import Context, Draft, Model, Outcome, Proposal
from specdec_jax.errors import require_count


@dataclasses.dataclass(frozen=True)
class ModelDraft(Draft):
  """Guesses drawn from a model by the same sampling as the target's; its parameters are its own.

  After a round its cache may lack the newest accepted guess: the accepted_path of a tree is never read.

  Attributes:
    model: M_q.
    sampling: how its logits become q.
    tree: of the guesses; drafting takes `depth` calls of the model.
    independent: whether siblings are drawn independently, some of them equal (SpecInfer, SpecTr),
      instead of without replacement.
    reread: tokens that the first call of a round reads, the newest among them. 2, unless rounds
      commit what this draft did not guess (`drafts.merged`).

  Raises:
    InputError: there is nothing to guess.
  """

  model: Model
  sampling: Sampling
  tree: Tree
  independent: bool = False
  reread: int = 2

  def __post_init__(self):
    require_count("gamma", self.tree.depth)

  def start(self, params: Any, context: Context, hidden: Array) -> Any:
    return self.model.prefill(params, context.prompt, context.tokens.shape[1])[1]

  def tell(self, params: Any, cache: Any, hidden: Array, ages: Array | int, slot: Array) -> Any:
    """The cache of tokens that are to be read in the slots from `slot` [B] on, told the target's
    states [B, K, E] where their rounds began, so many tokens ago; by default nothing is told."""
    return cache

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    newest, _, cache = read_newest(self.model, params, state, context, self.reread)
    return self.guess(params, cache, newest, rng)

  def guess(self, params: Any, cache: Any, newest: Array, rng: Array) -> tuple[Proposal, Any]:
    """Guesses after the newest token, whose logits [B, V] are given; it is in the cache, behind
    its length."""
    guess = self._chain if self.tree.is_chain else self._tree
    return guess(params, cache, newest, rng)

  def _chain(self, params: Any, cache: Any, newest: Array, rng: Array) -> tuple[Proposal, Any]:
    """One after the other."""
    gamma = self.tree.depth
    keys = jax.vmap(lambda key: jax.random.split(key, gamma), out_axes=1)(rng)  # [G, B]
    first, q_first = draw(keys[0], newest, self.sampling)

    def step(carry, at):
      cache, guess = carry
      node, key = at
      logits, _, cache = self.model.extend(params, cache, guess[:, None], self.tree, node)
      guess, q = draw(key, logits[:, 0], self.sampling)
      return (cache, guess), (guess, q)

    nodes = jnp.arange(1, gamma)
    (cache, _), (guesses, q) = lax.scan(step, (cache, first), (nodes, keys[1:]))
    guesses = jnp.concatenate([first[None], guesses])  # [G, B]
    q = jnp.concatenate([q_first[None], q])  # [G, B, V]
    return Proposal(guesses.swapaxes(0, 1), q.swapaxes(0, 1)), cache

  def _tree(self, params: Any, cache: Any, newest: Array, rng: Array) -> tuple[Proposal, Any]:
    """Level by level."""
    tree, logits = self.tree, newest[:, None]  # [B, nodes of the level, V]
    keys = jax.vmap(lambda key: jax.random.split(key, tree.depth), out_axes=1)(rng)  # [D, B]
    tokens, q, above = [], [], 0
    for (first, last), level_keys in zip(tree.levels, keys):
      counts = [tree.parents.count(node) for node in range(above, first)]
      guesses, laws = draw_siblings(level_keys, logits, self.sampling, counts, self.independent)
      tokens.append(guesses)
      q.append(laws)
      if last < tree.num_nodes:
        logits, _, cache = self.model.extend(params, cache, tokens[-1], tree, first)
      above = first
    return Proposal(jnp.concatenate(tokens, axis=1), jnp.concatenate(q, axis=1)), cache

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    if self.tree.is_chain:
      return state
    return self.model.commit(state, outcome.length - 1, self.tree, outcome.verification.path)


def read_newest(
  model: Model, params: Any, cache: Any, context: Context, count: int = 2
) -> tuple[Array, Array, Any]:
  """Logits [B, V] and state [B, E] after the newest token, and the cache of what is committed
  before it.

  After a round whose guesses were all accepted the cache lacks the last of them. So `count` tokens
  are always read, the newest last, writing those before again; a row that holds fewer reads unused
  slots behind and takes the logits before.
  """
  length = context.length
  behind = jnp.maximum(length - count, 0)
  block = jnp.take_along_axis(context.tokens, behind[:, None] + jnp.arange(count), axis=1)
  logits, hidden, cache = model.extend(params, model.commit(cache, behind), block)
  of_newest = lambda x: jnp.take_along_axis(x, (length - 1 - behind)[:, None, None], axis=1)[:, 0]
  return of_newest(logits), of_newest(hidden), model.commit(cache, length - 1)
