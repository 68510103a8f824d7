"""A smaller model as a draft, which proposes a chain or a static tree level by level."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, Key

from specdec_jax.core.arrays import gather, gather_one, split_rows
from specdec_jax.core.context import Context, node_prefixes, text_prefixes
from specdec_jax.core.processors import process
from specdec_jax.core.sampling import Sampling, position_keys, sample_draft_token, sample_siblings
from specdec_jax.core.trees import Tree
from specdec_jax.core.types import Draft, DraftOptions, Keys, Model, Outcome, Proposal
from specdec_jax.errors import require_count


@dataclasses.dataclass(frozen=True)
class ModelDraft(Draft):
  """A draft that samples tokens from a model.

  Its parameters are those of the model, and its state is the cache of the model. After a round, the
  cache may lack the last accepted token, because the model does not process the last level of a
  tree.

  Attributes:
    sampling: turns the model's logits into q; usually the target's.
    tree: tree with at least one draft token; drafting takes one forward pass per level.
  """

  model: Model
  sampling: Sampling
  tree: Tree
  options: DraftOptions = DraftOptions()

  def __post_init__(self):
    require_count("gamma", self.tree.depth)

  @property
  def independent_siblings(self) -> bool:  # type: ignore[override]
    return self.options.independent_siblings

  @property
  def reread(self) -> int:
    """Number of tokens in the first forward pass of a round."""
    return self.options.reread

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    return self.model.prefill(params, context.prompt, context.tokens.shape[1])[1]

  def condition(
    self,
    params: Any,
    cache: Any,
    hidden: Float[Array, "B M E"],
    offsets: Int[Array, " K"] | int,
    slot: Int[Array, " B"],
  ) -> Any:
    """Return the cache, conditioned on hidden states of the target; by default, it is unchanged.

    Args:
      hidden: for each token, hidden state of the target at the start of the round that processes it
        (M is the number of tokens); or a single state for all tokens (M is 1).
      offsets: number of tokens from the start of the round to each token.
      slot: slot of the first token that will be processed.
    """
    return cache

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    logits, cache = self.start_round(params, state, context)
    return self.propose_after(params, cache, context, logits, rng)

  def start_round(
    self, params: Any, state: Any, context: Context
  ) -> tuple[Float[Array, "B V"], Any]:
    """Return the logits at the last committed token, and the cache, with it in slot `length`."""
    logits, _, cache = extend_last_tokens(self.model, params, state, context, self.reread)
    return logits, cache

  def propose_after(
    self,
    params: Any,
    cache: Any,
    context: Context,
    logits: Float[Array, "B V"],
    rng: Keys,
  ) -> tuple[Proposal, Any]:
    """Propose tokens, given logits at the last committed token, in slot `cache.length`."""
    if self.tree.is_chain:
      return self._propose_chain(params, cache, context, logits, rng)

    def extend_level(cache: Any, tokens: Array, parents: list[int], level: int, tree: Tree):
      logits, _, cache = self.model.extend(params, cache, tokens, tree, tree.levels[level - 1][0])
      return logits, cache

    return draft_tree(self, logits[:, None], extend_level, cache, context, rng)

  def _propose_chain(
    self,
    params: Any,
    cache: Any,
    context: Context,
    logits: Float[Array, "B V"],
    rng: Keys,
  ) -> tuple[Proposal, Any]:
    gamma = self.tree.depth
    keys = depth_keys(self.options, context, rng, gamma)
    first, first_q, text = sample_next(self, keys[0], context, logits)

    def step(carry, node_and_key):
      cache, draft_token, text = carry
      node, key = node_and_key
      logits, _, cache = self.model.extend(params, cache, draft_token[:, None], self.tree, node)
      after = context._replace(tokens=text, length=context.length + node)
      draft_token, q, text = sample_next(self, key, after, logits[:, 0])
      return (cache, draft_token, text), (draft_token, q)

    nodes = np.arange(1, gamma, dtype=np.int32)
    (cache, *_), (draft_tokens, q) = lax.scan(step, (cache, first, text), (nodes, keys[1:]))
    proposal = jax.tree.map(
      lambda first, rest: jnp.concatenate([first[None], rest]).swapaxes(0, 1),
      Proposal(first, first_q),
      Proposal(draft_tokens, q),
    )
    return proposal, cache

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    if self.tree.is_chain:
      return state
    return self.model.commit(state, outcome.length - 1, self.tree, outcome.verification.path)


def depth_keys(
  options: DraftOptions, context: Context, rng: Keys, depth: int
) -> Key[Array, "{depth} B"]:
  """Return the keys of the draft tokens of each depth; if coupled, those of their positions."""
  if not options.coupled:
    return split_rows(rng, depth)
  assert context.rng is not None
  return position_keys(context.rng, context.length, depth).T


def sample_next(
  draft: Any, rng: Keys, context: Context, logits: Float[Array, "B V"]
) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None, Int[Array, "B T"]]:
  """Sample the token after the text of a context; return it, its q, and the extended text.

  Without logits processors, which alone need it, the text is returned without the token.
  """
  processors, text = draft.options.processors, context.tokens
  if processors:
    logits = process(processors, logits[:, None], text_prefixes(context))[:, 0]
  token, q = sample_draft_token(rng, logits, draft.sampling, draft.options.coupled)
  return token, q, context.with_tokens(token[:, None]).tokens if processors else text


def draft_tree(
  draft: Any,
  logits: Float[Array, "B 1 V"],
  extend_level: Callable[..., tuple[Array, Any]],
  carry: Any,
  context: Context,
  rng: Keys,
) -> tuple[Proposal, Any]:
  """Sample a static tree, one level at a time; return the proposal and the last carry.

  `extend_level` processes a level of the tree. It takes (carry, tokens [B, M], parents, level from
  1, tree) and returns (logits [B, M, V] after each token, new carry). `parents` are indices into
  the level above. The last level is not processed. `draft` has `tree`, `sampling` and `options`.
  """
  tree, options, above = draft.tree, draft.options, 0  # `above`: first node of the level above
  levels: list[Proposal] = []
  keys = depth_keys(options, context, rng, tree.depth)
  for level, (first, last) in enumerate(tree.levels, 1):
    if options.processors:
      empty = context.tokens[:, :0]
      draft_tokens = jnp.concatenate([empty, *(each.tokens for each in levels)], axis=1)
      prefixes = node_prefixes(context, draft_tokens, tree, above, first)
      logits = process(options.processors, logits, prefixes)
    level_tokens, level_q = sample_siblings(
      keys[level - 1],
      logits,
      draft.sampling,
      tree.num_children[above:first],
      options.independent_siblings,
      options.coupled,
      tree.greedy_siblings,
    )
    levels.append(Proposal(level_tokens, level_q))
    if last < tree.num_nodes:
      parents = [parent - above for parent in tree.parents[first - 1 : last - 1]]
      logits, carry = extend_level(carry, level_tokens, parents, level, tree)
    above = first
  return jax.tree.map(lambda *each: jnp.concatenate(each, axis=1), *levels), carry


def extend_last_tokens(
  model: Model, params: Any, cache: Any, context: Context, count: int = 2
) -> tuple[Float[Array, "B V"], Float[Array, "B E"], Any]:
  """Run a draft model over the last `count` committed tokens.

  The cache lacks the last draft token of a round if all were accepted. Therefore the pass always
  covers `count` tokens, or all slots of the text if these are fewer, although the cache may already
  hold all but the last. In a row with fewer tokens, it also covers unused slots after them, whose
  results are not returned. Return the logits and hidden states at the last committed token, and the
  cache of the tokens before it.
  """
  length, count = context.length, min(count, context.tokens.shape[1])
  start = jnp.maximum(length - count, 0)
  block = gather(context.tokens, start[:, None] + jnp.arange(count)[None])
  logits, hidden, cache = model.extend(params, model.commit(cache, start), block)
  last = length - 1 - start
  return gather_one(logits, last), gather_one(hidden, last), model.commit(cache, length - 1)
