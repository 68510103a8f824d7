"""A draft model that is itself accelerated by speculative decoding, to any depth (Section 6).

Both levels may be trees, as in staged speculative decoding (Spector and Re, 2023).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather, gather_or_zero, place_tokens, split_rows
from specdec_jax.core.context import Context, Prefixes, text_prefixes
from specdec_jax.core.decode import Decoder, DecodeState, empty_rounds
from specdec_jax.core.processors import LogitsProcessor, process
from specdec_jax.core.sampling import Sampling, distribution, sample_draft_token, sample_siblings
from specdec_jax.core.trees import Tree
from specdec_jax.core.types import (
  Draft,
  DraftOptions,
  Keys,
  Model,
  Outcome,
  Params,
  Proposal,
  WrappedDraft,
)
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import extend_last_tokens
from specdec_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class HierarchicalDraft(Draft):
  """A draft that samples a chain from a model, which is itself decoded with a cheaper draft.

  The first token is sampled from the model. The other tokens are decoded from the model with
  `inner` and token verification. This is exact, so the q of each token is the distribution of the
  model. Its logits at the tokens of the chain also give each token siblings, which are leaves of
  the tree, at no further forward pass.

  Parameters are (parameters of the model, parameters of `inner`). The state is (cache of the model,
  state of `inner`).

  Attributes:
    inner: draft for the model, which does not stop early; it may be hierarchical too. Its
      `DraftOptions.reread` is larger by 2: its first pass covers the tokens that M_q may not have
      processed, the first token from M_q, and the last token that `inner` itself proposed.
    tree: a chain, or a `chain_with_siblings`.
  """

  model: Model
  inner: Draft
  sampling: Sampling
  tree: Tree
  options: DraftOptions = DraftOptions()

  def __post_init__(self):
    if self.tree != chain_with_siblings(self.tree.depth, self.tree.width):
      raise InputError(
        "A hierarchical draft proposes a chain, with the same number of siblings of each token."
      )
    if self.inner.tree.verify_lengths:
      raise InputError("A draft that stops early cannot be the draft of a draft.")

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    model_params, inner_params = params
    context = self._with_room(context)
    hidden, cache = self.model.prefill(model_params, context.prompt, context.tokens.shape[1])
    last_hidden = gather_or_zero(hidden, context.length - 2)
    inner_context = context._replace(target_cache=cache, hidden=last_hidden)
    return cache, self.inner.init(inner_params, inner_context, hidden)

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    (model_params, inner_params), (cache, inner_state) = params, state
    gamma = self.tree.depth
    logits, hidden, cache = extend_last_tokens(
      self.model, model_params, cache, context, self.options.reread
    )
    processors = self.options.processors
    if processors:
      logits = process(processors, logits[:, None], text_prefixes(context))[:, 0]
    sibling_rng, rng = (rng, rng) if self.tree.is_chain else split_rows(rng)
    first_rng, rng = split_rows(rng)
    first, first_q = sample_draft_token(first_rng, logits, self.sampling)
    if gamma == 1:
      proposal = jax.tree.map(lambda x: x[:, None], Proposal(first, first_q))
      return self._with_siblings(proposal, logits[:, None], sibling_rng), (cache, inner_state)

    # Decode the other gamma - 1 tokens, with the first one committed.
    batch, limit, context = len(first), gamma - 1, self._with_room(context)
    length = context.length + 1
    inner_logits = jnp.zeros((batch, limit, self.model.vocab_size), jnp.float32)
    decoder = Decoder(
      self.model,
      _LogitsRecorder(self.inner),
      TokenVerifier(self.sampling),
      eos_id=-1,
      processors=tuple(_WithLimit(each, context.limit) for each in processors),
    )
    initial = DecodeState(
      prompt=context.prompt,
      tokens=place_tokens(context.tokens, first[:, None], context.length, 1),
      length=length,
      prompt_length=length if context.prompt_length is None else context.prompt_length,
      limit=length + limit,
      done=jnp.zeros(batch, bool),
      rng=rng,
      target_cache=self.model.commit(cache, context.length),
      hidden=hidden,
      draft_state=_RecordedLogits(inner_state, length, inner_logits),
      rounds=empty_rounds(self.inner.tree, limit, batch),
      num_rounds=jnp.zeros(batch, jnp.int32),
      not_finite=jnp.full(batch, -1, jnp.int32),
    )
    final = decoder.run_rounds(Params(model_params, inner_params), initial)
    slots = context.length[:, None] + jnp.arange(gamma)[None]
    inner_logits, q = final.draft_state.logits, first_q
    if q is not None:
      inner_q = distribution(inner_logits, self.sampling)
      q = jnp.concatenate([q[:, None], inner_q], axis=1)
      # If the model's logits were not finite, report that to the loop of the target.
      q = jnp.where((final.not_finite >= 0)[:, None, None], jnp.nan, q)
    proposal = Proposal(gather(final.tokens, slots), q)
    logits = jnp.concatenate([logits[:, None], inner_logits], axis=1)
    proposal = self._with_siblings(proposal, logits, sibling_rng)
    return proposal, (final.target_cache, final.draft_state.inner)

  def _with_siblings(
    self, proposal: Proposal, logits: Float[Array, "B D V"], rng: Keys
  ) -> Proposal:
    """Return a chain with siblings of each token, sampled from the logits without this token."""
    if self.tree.is_chain:
      return proposal
    depth, count = self.tree.depth, self.tree.width - 1
    is_first = proposal.tokens[..., None] == jnp.arange(logits.shape[-1])[None, None]
    # Finite, so that a token that alone is possible is proposed again.
    logits = jnp.where(is_first, jnp.finfo(logits.dtype).min, logits)
    siblings = Proposal(*sample_siblings(rng, logits, self.sampling, np.full(depth, count)))

    def joined(first: Array, others: Array) -> Array:
      others = others.reshape(len(first), depth, count, *first.shape[2:])
      every = jnp.concatenate([first[:, :, None], others], axis=2)
      return every.reshape(len(first), depth * (count + 1), *first.shape[2:])

    return jax.tree.map(joined, proposal, siblings)

  def _with_room(self, context: Context) -> Context:
    """Return the context with slots for tokens that `inner` proposes past the end of the chain."""
    room = self.inner.tree.num_nodes
    return context._replace(tokens=jnp.pad(context.tokens, ((0, 0), (0, room))))


def chain_with_siblings(depth: int, width: int) -> Tree:
  """Return a tree of `width` nodes per level; all follow the first node of the level above."""
  return Tree([max(0, level * width - width + 1) for level in range(depth) for _ in range(width)])


@dataclasses.dataclass(frozen=True)
class _WithLimit(LogitsProcessor):
  """Logits processor that replaces the limit of the inner loop, the end of the chain."""

  processor: LogitsProcessor
  limit: Any  # [B]

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    return self.processor(logits, prefixes._replace(limit=self.limit))


class _RecordedLogits(NamedTuple):
  """State of the inner draft, and the logits of each token after the first `first_length`."""

  inner: Any
  first_length: Int[Array, " B"]
  logits: Float[Array, "B limit V"]


class _LogitsRecorder(WrappedDraft):
  def propose(
    self, params: Any, state: _RecordedLogits, context: Context, rng: Keys
  ) -> tuple[Proposal, _RecordedLogits]:
    proposal, inner = self.draft.propose(params, state.inner, context, rng)
    return proposal, state._replace(inner=inner)

  def observe(self, params: Any, state: _RecordedLogits, outcome: Outcome) -> _RecordedLogits:
    num_before = outcome.length - outcome.num_emitted - state.first_length
    node = jnp.arange(state.logits.shape[1])[None] - num_before[:, None]  # node before each token
    is_new = (node >= 0) & (node < outcome.num_emitted[:, None])
    path = outcome.verification.path
    if path is not None:
      path = jnp.pad(path, ((0, 0), (1, 0)))
      node = gather(path, jnp.clip(node, 0, path.shape[1] - 1))
    new_logits = gather(outcome.logits, jnp.clip(node, 0, outcome.logits.shape[1] - 1))
    logits = jnp.where(is_new[..., None], new_logits, state.logits)
    return state._replace(inner=self.draft.observe(params, state.inner, outcome), logits=logits)
