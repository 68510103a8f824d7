"""A draft that is itself drafted, to any depth (Section 6): a model whose own guesses are made by
speculation with a cheaper one.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.core.decode import State, last_hidden, one_round
from specdec_jax.core.sampling import Sampling, distribution, draw
from specdec_jax.core.trees import AnyTree, Tree, require_chain
from specdec_jax.core.types import Context, Draft, Model, Outcome, Proposal, Rounds
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft, read_newest


@dataclasses.dataclass(frozen=True)
class HierarchicalDraft(Draft):
  """A chain of a model's guesses: the first is drawn from it, the others are decoded from it by
  rounds of speculation with `inner`, which is exact, so that each has the model's law as its q.

  Parameters are (the model's, those of `inner`), states likewise.

  Attributes:
    model: M_q.
    inner: guesses for it, in a chain; may be hierarchical too.
    sampling: how the model's logits become q.
    tree: a chain.
    reread: as in `ModelDraft`.

  Raises:
    InputError: either tree is no chain.
  """

  model: Model
  inner: Draft
  sampling: Sampling
  tree: Tree
  reread: int = 2

  def __post_init__(self):
    require_chain("a hierarchical draft", self.tree)
    require_chain("the draft of a draft", self.inner.tree)

  def start(self, params: Any, context: Context, hidden: Array) -> Any:
    own, inner = params
    context = self._with_room(context)
    hidden, cache = self.model.prefill(own, context.prompt, context.tokens.shape[1])
    last = last_hidden(hidden, context.length - 2)
    return cache, self._noted.start(inner, context._replace(target=cache, hidden=last), hidden)

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    (own, inner_params), (cache, inner_state), gamma = params, state, self.tree.depth
    newest, hidden, cache = read_newest(self.model, own, cache, context, self.reread)
    first_rng, rng = jax.vmap(jax.random.split, out_axes=1)(rng)
    first, q = draw(first_rng, newest, self.sampling)
    if gamma == 1:
      return Proposal(first[:, None], q[:, None]), (cache, inner_state)
    context, begun = self._with_room(context), context.length + 1
    put = jnp.arange(context.tokens.shape[1]) == context.length[:, None]
    batch, more = len(first), gamma - 1
    zeros = lambda *shape: jnp.zeros((more, batch, *shape), jnp.int32)
    decoding = State(
      prompt=context.prompt,
      tokens=jnp.where(put, first[:, None], context.tokens),
      length=begun,
      prompt_length=begun,
      done=jnp.zeros(batch, bool),
      target=self.model.commit(cache, context.length),
      hidden=hidden,
      draft=_NotedState(inner_state, begun, jnp.zeros((batch, more, self.model.vocab_size))),
      rounds=Rounds(zeros(self.inner.tree.depth), zeros(), zeros(), zeros()),
      num_rounds=jnp.zeros((), jnp.int32),
      not_finite=jnp.full(batch, -1, jnp.int32),
    )
    verifier, noted = TokenVerifier(self.sampling), self._noted
    step = lambda s: one_round(self.model, noted, own, inner_params, verifier, rng, -1, s)
    decoded = lax.while_loop(lambda s: ~s.done.all(), step, decoding)
    places = context.length[:, None] + jnp.arange(gamma)
    guesses = jnp.take_along_axis(decoded.tokens, places, axis=1)
    q = jnp.concatenate([q[:, None], distribution(decoded.draft.logits, self.sampling)], axis=1)
    # Where the model gave NaN nothing was decoded: the target's loop must see it.
    q = jnp.where((decoded.not_finite >= 0)[:, None, None], jnp.nan, q)
    return Proposal(guesses, q), (decoded.target, decoded.draft.inner)

  @property
  def _noted(self) -> "_Noted":
    """The cheaper draft has not read what the model has not, the model's first guess, and, where
    that was accepted, the last guess of its own."""
    inner = self.inner
    if isinstance(inner, ModelDraft | HierarchicalDraft):
      inner = dataclasses.replace(inner, reread=self.reread + 2)
    return _Noted(inner)

  def _with_room(self, context: Context) -> Context:
    """For the last block of the inner draft, which may reach past that of this one."""
    room = self.inner.tree.num_nodes
    return context._replace(tokens=jnp.pad(context.tokens, ((0, 0), (0, room))))


class _NotedState(NamedTuple):
  """The state of a draft, the length [B] at which rounds began, and for each token since then the
  logits [B, G - 1, V] that it was drawn from."""

  inner: Any
  begun: Array
  logits: Array


@dataclasses.dataclass(frozen=True)
class _Noted(Draft):
  """Guesses as another, and notes from which logits the tokens were drawn that became of them."""

  draft: Draft
  tree: AnyTree = dataclasses.field(init=False)

  def __post_init__(self):
    object.__setattr__(self, "tree", self.draft.tree)

  def start(self, params: Any, context: Context, hidden: Array) -> Any:
    return self.draft.start(params, context, hidden)

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    proposal, inner = self.draft.propose(params, state.inner, context, rng)
    return proposal, state._replace(inner=inner)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    before = outcome.length - outcome.num_emitted - state.begun
    node = jnp.arange(state.logits.shape[1]) - before[:, None]  # whose logits each token is from
    new = (node >= 0) & (node < outcome.num_emitted[:, None])
    at = jnp.clip(node, 0, outcome.logits.shape[1] - 1)[..., None]
    drawn = jnp.take_along_axis(outcome.logits, at, axis=1)
    logits = jnp.where(new[..., None], drawn, state.logits)
    return state._replace(inner=self.draft.observe(params, state.inner, outcome), logits=logits)
