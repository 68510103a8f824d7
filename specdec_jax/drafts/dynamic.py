"""Dynamic trees: a model proposes more draft tokens where it is confident (EAGLE-2).

The score of a node is the product of the model's probabilities of the tokens on its path. Level by
level, the model runs over the `width` best nodes of the previous level, and the `width` best
children of each of them become candidates. The `num_draft_tokens` best candidates form the tree (Li
et al., 2024, Section 4). The shape may depend on the tokens because the tokens are selected
deterministically, not sampled.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather
from specdec_jax.core.context import Context, node_prefixes, text_prefixes
from specdec_jax.core.processors import Processors, process
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree
from specdec_jax.core.types import Draft, DraftOptions, Keys, Model, Outcome, Proposal
from specdec_jax.drafts.model import ModelDraft, extend_last_tokens
from specdec_jax.errors import InputError, require_count


@dataclasses.dataclass(frozen=True)
class DynamicDraft(Draft):
  """A draft that proposes the most probable paths of a model as a dynamic tree.

  The model processes a tree of `width` nodes per level, and the proposal is selected from these
  nodes and their children. Drafting takes `depth` forward passes. The parameters are those of the
  model. The state is (cache of the model, nodes): for each draft token, `nodes` [B, N] is its
  number among the processed nodes, from 1, or 0 if it was not processed.

  Attributes:
    width: number of nodes per level that the model processes, and number of children of each such
      node that become candidates. There must be at least as many candidates as draft tokens.
  """

  model: Model
  tree: DynamicTree
  width: int = 8
  options: DraftOptions = DraftOptions()

  def __post_init__(self):
    require_candidates(self.tree, self.width)

  @property
  def reread(self) -> int:
    """Number of tokens in the first forward pass of a round."""
    return self.options.reread

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    # The slots in `context` suffice for the proposed tree; the drafted tree may be larger.
    extra = max(0, _drafted(self.tree, self.width).num_draft_tokens - self.tree.num_draft_tokens)
    cache = self.empty_cache(params, context, context.tokens.shape[1] + extra)
    return cache, jnp.zeros((len(context.tokens), self.tree.num_draft_tokens), jnp.int32)

  def empty_cache(self, params: Any, context: Context, num_slots: int) -> Any:
    """Return the model's cache before the first round."""
    return self.model.prefill(params, context.prompt, num_slots)[1]

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    root_logits, _, cache = extend_last_tokens(self.model, params, state[0], context, self.reread)

    def extend_level(
      cache: Any,
      tokens: Int[Array, "B width"],
      chosen: Int[Array, "B width"],
      level: int,
      tree: DynamicTree,
    ) -> tuple[Float[Array, "B width V"], Any]:
      first = 1 + (level - 1) * self.width
      logits, _, cache = self.model.extend(params, cache, tokens, tree, first)
      return logits, cache

    proposal, processed, cache = grow(
      self.tree, self.width, root_logits, extend_level, cache, context, self.options.processors
    )
    return proposal, (cache, processed)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    # The model may not have processed the last node of the path. The next round then starts with a
    # pass over that token and the last committed one.
    cache, processed = state
    path: Any = outcome.verification.path
    nodes = gather(processed, jnp.maximum(path - 1, 0))
    nodes = jnp.where(path > 0, nodes, 0)
    return self.model.commit(cache, outcome.length - 1, self.tree, nodes), processed


def require_candidates(tree: DynamicTree, width: int) -> None:
  """Raise InputError if a size is not positive or a tree has fewer candidates than draft tokens."""
  require_count("width", width)
  require_count("depth", tree.depth)
  require_count("num_draft_tokens", tree.num_draft_tokens)
  candidates = width + (tree.depth - 1) * width**2
  if tree.num_draft_tokens > candidates:
    raise InputError(
      f"The tree has {tree.num_draft_tokens} tokens, and width {width} with depth {tree.depth} "
      f"has {candidates} candidates; ask for fewer draft tokens, or more of these."
    )


def model_draft(
  model: Model, sampling: Sampling, tree: AnyTree, options: DraftOptions = DraftOptions()
) -> Draft:
  """Return the draft that proposes a static or a dynamic tree with a model."""
  if isinstance(tree, DynamicTree):
    return DynamicDraft(model, tree, options=options)
  return ModelDraft(model, sampling, tree, options)


def _drafted(tree: DynamicTree, width: int) -> DynamicTree:
  """Return the size of the tree that the model processes, as a `DynamicTree` without parents.

  It has `width` nodes per level, but not the last level of `tree`, which is not processed.
  """
  return DynamicTree(width * (tree.depth - 1), max(1, tree.depth - 1))


def grow(
  tree: DynamicTree,
  width: int,
  root_logits: Float[Array, "B V"],
  extend_level: Callable[..., tuple[Array, Any]],
  carry: Any,
  context: Context,
  processors: Processors = (),
) -> tuple[Proposal, Int[Array, "B N"], Any]:
  """Propose the dynamic tree of the candidates with the best scores.

  `extend_level` processes a level of the tree. It takes (carry, tokens [B, width], parents [B,
  width], level from 1, tree of the processed nodes) and returns (logits [B, width, V] at the
  tokens, new carry). `parents` are indices into the processed nodes of the previous level; for
  level 1 they are 0, for the last committed token. Return (proposal, nodes, last carry), with
  `nodes` as in the state of a `DynamicDraft`.
  """
  batch, k = len(root_logits), width
  rows = jnp.arange(batch)[:, None]
  shape = _drafted(tree, width)
  shape = dataclasses.replace(shape, parents=jnp.zeros((batch, shape.num_draft_tokens), jnp.int32))
  draft_tokens = jnp.zeros((batch, shape.num_draft_tokens), jnp.int32)
  if processors:
    root_logits = process(processors, root_logits[:, None], text_prefixes(context))[:, 0]
  scores = jnp.zeros((batch, 1), jnp.float32)
  scores, tokens = _best_children(root_logits[:, None], scores, k)  # [B, 1, k]
  scores, tokens = scores[:, 0], tokens[:, 0]
  # `processed` are indices into the candidates. A candidate has a token, a score, a parent
  # candidate (-1 for the last committed token) and a position in the order of processing (0 if it
  # is not processed).
  processed = order = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
  num_before = 0
  chosen = jnp.zeros((batch, k), jnp.int32)
  candidates = [(tokens, scores, jnp.full_like(order, -1), (order + 1) * (tree.depth > 1))]
  for level in range(1, tree.depth):
    first, last = 1 + (level - 1) * k, 1 + level * k
    draft_tokens = draft_tokens.at[:, first - 1 : last - 1].set(tokens)
    if level > 1:
      parents = shape.parents.at[:, first - 1 : last - 1].set(first - k + chosen)
      shape = dataclasses.replace(shape, parents=parents)
    logits, carry = extend_level(carry, tokens, chosen, level, shape)
    if processors:
      logits = process(processors, logits, node_prefixes(context, draft_tokens, shape, first, last))
    child_scores, children = _best_children(logits, scores, k)  # [B, k, k]
    child_scores, children = child_scores.reshape(batch, -1), children.reshape(batch, -1)
    parents = jnp.repeat(processed, k, axis=1)  # [B, k * k]
    scores, best = lax.top_k(child_scores, k)
    tokens, chosen = gather(children, best), best // k
    num_before += candidates[-1][0].shape[1]
    processed = num_before + best
    nodes = jnp.zeros((batch, k * k), jnp.int32)
    if level < tree.depth - 1:
      nodes = nodes.at[rows, best].set(1 + level * k + order)
    candidates.append((children, child_scores, parents, nodes))
  tokens, scores, parents, nodes = (jnp.concatenate(field, axis=1) for field in zip(*candidates))
  # The score of a candidate is at most the score of its parent, and `top_k` takes the first of
  # equal scores. Therefore the parents of selected candidates are selected too.
  selected = jnp.sort(lax.top_k(scores, tree.num_draft_tokens)[1], axis=1)  # [B, N]
  parents = gather(parents, selected)
  parent_nodes = 1 + jax.vmap(jnp.searchsorted)(selected, parents)
  parent_nodes = jnp.where(parents < 0, 0, parent_nodes).astype(jnp.int32)
  selected_tree = dataclasses.replace(tree, parents=parent_nodes)
  return Proposal(gather(tokens, selected), tree=selected_tree), gather(nodes, selected), carry


def _best_children(
  logits: Float[Array, "B M V"], scores: Float[Array, "B M"], k: int
) -> tuple[Float[Array, "B M {k}"], Int[Array, "B M {k}"]]:
  log_probs, tokens = lax.top_k(jax.nn.log_softmax(logits.astype(jnp.float32)), k)
  return scores[..., None] + log_probs, tokens
