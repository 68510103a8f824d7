"""A smaller model as a draft, which proposes a chain or a static tree level by level."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Key

from specdec_jax.beams.drafts import ModelBeamDraft
from specdec_jax.core.arrays import gather, gather_one, split_rows
from specdec_jax.core.processors import Processors, node_prefixes, process, text_prefixes
from specdec_jax.core.sampling import Sampling, sample_logits, sample_siblings
from specdec_jax.core.trees import Tree
from specdec_jax.core.types import Context, Draft, Model, Outcome, Proposal
from specdec_jax.errors import require_count


@dataclasses.dataclass(frozen=True)
class ModelDraft(Draft):
  """A draft that samples tokens from a model.

  Its parameters are those of the model, and its state is the cache of the model. After a round, the
  cache may lack the last accepted token, because the model does not process the last level of a
  tree.

  Attributes:
    model: the approximation model, M_q.
    sampling: sampling method, which turns the model's logits into q; usually the target's.
    tree: tree of the proposals; drafting takes one forward pass per level.
    independent: whether siblings are sampled independently, with replacement (SpecInfer, SpecTr),
      instead of without replacement.
    reread: number of tokens in the first forward pass of a round, which ends with the last
      committed token. 2 suffices unless rounds commit tokens of other drafts (`drafts.forest`).
    processors: logits processors, which apply to the model's logits.
    coupled: whether samples share the noise of the target's samples (`core.verify.gumbel`).

  Raises:
    InputError: the tree has no draft tokens.
  """

  model: Model
  sampling: Sampling
  tree: Tree
  independent: bool = False
  reread: int = 2
  processors: Processors = ()
  coupled: bool = False

  def __post_init__(self):
    require_count("gamma", self.tree.depth)

  def with_reread(self, num_tokens: int) -> "ModelDraft":
    return dataclasses.replace(self, reread=num_tokens)

  def with_processors(self, processors: Processors) -> "ModelDraft":
    return dataclasses.replace(self, processors=processors)

  @property
  def uses_position_keys(self) -> bool:  # type: ignore[override]
    return self.coupled

  def with_position_keys(self) -> "ModelDraft":
    return dataclasses.replace(self, coupled=True)

  def with_independent_siblings(self) -> "ModelDraft":
    return dataclasses.replace(self, independent=True)

  def as_beam_draft(self, num_beams: int, num_nodes: int | None) -> ModelBeamDraft:
    return ModelBeamDraft(self, num_beams, num_nodes)

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
      params: parameters of the model.
      cache: cache of the model.
      hidden: for each token, hidden state of the target at the start of the round that processes
        it (M is the number of tokens); or a single state for all tokens (M is 1).
      offsets: number of tokens from the start of the round to each token.
      slot: slot of the first token that will be processed.
    """
    return cache

  def propose(
    self, params: Any, state: Any, context: Context, rng: Key[Array, " B *depths"]
  ) -> tuple[Proposal, Any]:
    logits, cache = self.start_round(params, state, context)
    return self.propose_after(params, cache, context, logits, rng)

  def start_round(
    self, params: Any, state: Any, context: Context
  ) -> tuple[Float[Array, "B V"], Any]:
    """Run the model over the last committed tokens; return logits at the last one, and the cache.

    The cache holds that token in slot `cache.length`.
    """
    logits, _, cache = extend_last_tokens(self.model, params, state, context, self.reread)
    return logits, cache

  def propose_after(
    self,
    params: Any,
    cache: Any,
    context: Context,
    logits: Float[Array, "B V"],
    rng: Key[Array, " B *depths"],
  ) -> tuple[Proposal, Any]:
    """Propose tokens, given logits at the last committed token.

    The cache holds that token in slot `cache.length`.
    """
    propose = self._propose_chain if self.tree.is_chain else self._propose_tree
    return propose(params, cache, context, logits, rng)

  def sample_next(
    self, rng: Key[Array, " B"], context: Context, logits: Float[Array, "B V"]
  ) -> tuple[Int[Array, " B"], Float[Array, "B V"], Int[Array, "B T"]]:
    """Sample the token after the text of a context; return it, its q, and the extended text.

    Only logits processors need that text. Without them, the text is returned without the token.
    """
    if self.processors:
      logits = process(self.processors, logits[:, None], text_prefixes(context))[:, 0]
    token, q = sample_logits(rng, logits, self.sampling, self.coupled)
    return (
      token,
      q,
      context.with_tokens(token[:, None]).tokens if self.processors else context.tokens,
    )

  def _propose_chain(
    self,
    params: Any,
    cache: Any,
    context: Context,
    logits: Float[Array, "B V"],
    rng: Key[Array, " B *depths"],
  ) -> tuple[Proposal, Any]:
    """Sample a chain, one token at a time."""
    gamma = self.tree.depth
    keys = rng.T if self.coupled else split_rows(rng, gamma)  # [gamma, B]
    first, first_q, text = self.sample_next(keys[0], context, logits)

    def step(carry, node_and_key):
      cache, guess, text = carry
      node, key = node_and_key
      logits, _, cache = self.model.extend(params, cache, guess[:, None], self.tree, node)
      after = context._replace(tokens=text, length=context.length + node)
      guess, q, text = self.sample_next(key, after, logits[:, 0])
      return (cache, guess, text), (guess, q)

    nodes = jnp.arange(1, gamma)
    (cache, *_), (guesses, q) = lax.scan(step, (cache, first, text), (nodes, keys[1:gamma]))
    guesses = jnp.concatenate([first[None], guesses])  # [gamma, B]
    q = jnp.concatenate([first_q[None], q])  # [gamma, B, V]
    return Proposal(guesses.swapaxes(0, 1), q.swapaxes(0, 1)), cache

  def _propose_tree(
    self,
    params: Any,
    cache: Any,
    context: Context,
    logits: Float[Array, "B V"],
    rng: Key[Array, " B *depths"],
  ) -> tuple[Proposal, Any]:
    """Sample a tree, one level at a time."""
    tree, level_logits = self.tree, logits[:, None]  # [B, nodes of the level, V]
    tokens, q, parent_level = [context.tokens[:, :0]], [], 0
    keys = rng.T if self.coupled else split_rows(rng, tree.depth)
    for (first, last), level_keys in zip(tree.levels, keys):
      if self.processors:
        guesses = jnp.concatenate(tokens, axis=1)
        prefixes = node_prefixes(context, guesses, tree, parent_level, first)
        level_logits = process(self.processors, level_logits, prefixes)
      counts = [tree.parents.count(node) for node in range(parent_level, first)]
      level_tokens, level_q = sample_siblings(
        level_keys, level_logits, self.sampling, counts, self.independent, self.coupled
      )
      tokens.append(level_tokens)
      q.append(level_q)
      if last < tree.num_nodes:  # the last level is not processed
        level_logits, _, cache = self.model.extend(params, cache, level_tokens, tree, first)
      parent_level = first
    return Proposal(jnp.concatenate(tokens, axis=1), jnp.concatenate(q, axis=1)), cache

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    if self.tree.is_chain:
      return state
    return self.model.commit(state, outcome.length - 1, self.tree, outcome.verification.path)


def extend_last_tokens(
  model: Model, params: Any, cache: Any, context: Context, count: int = 2
) -> tuple[Float[Array, "B V"], Float[Array, "B E"], Any]:
  """Run a draft model over the last committed tokens.

  After a round whose draft tokens were all accepted, the cache lacks the last of them. Therefore
  the pass always covers `count` tokens, although the cache may already hold all but the last. In a
  row with fewer than `count` tokens, the pass also covers unused slots after them, whose results
  are not returned.

  Returns:
    (logits at the last committed token, hidden states at that token, cache). The length of the
    cache is the number of tokens before that token.
  """
  length = context.length
  start = jnp.maximum(length - count, 0)
  block = gather(context.tokens, start[:, None] + jnp.arange(count))
  logits, hidden, cache = model.extend(params, model.commit(cache, start), block)
  last = length - 1 - start
  return gather_one(logits, last), gather_one(hidden, last), model.commit(cache, length - 1)
