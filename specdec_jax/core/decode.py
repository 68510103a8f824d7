"""The decoding loop: rounds of propose, extend, accept, commit, observe, in fixed shapes.

It knows protocols only: no model, no draft, no verifier. Plain decoding is the same loop with a draft
that guesses nothing, so both share one target pass, one way to sample and one way to stop.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.core.sampling import Sampling, split_keys
from specdec_jax.core.trees import AnyTree, DynamicTree, chain, require_compilable, some_shape
from specdec_jax.core.types import (
  Context,
  DecodeResult,
  Draft,
  Model,
  Outcome,
  Proposal,
  Rounds,
  Verification,
  Verifier,
)
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.errors import InputError, require_count
from specdec_jax.memory import require_memory


class State(NamedTuple):
  """What a round begins with.

  Attributes:
    prompt: [B, P].
    tokens: [B, T + slack] committed tokens, unused past length.
    length: [B]. prompt_length: [B], the length before the first round.
    done: [B].
    target: cache of the target: length - 1 tokens. draft: what the draft keeps.
    hidden: [B, E], as in `Context`.
    rounds: those so far. num_rounds: [], how many.
    not_finite: [B], as in `DecodeResult`.
  """

  prompt: Array
  tokens: Array
  length: Array
  prompt_length: Array
  done: Array
  target: Any
  hidden: Array
  draft: Any
  rounds: Rounds
  num_rounds: Array
  not_finite: Array

  @property
  def context(self) -> Context:
    """What of it a draft may read."""
    return Context(self.prompt, self.tokens, self.length, self.target, self.hidden)

  @property
  def limit(self) -> Array:
    """The length [B] that no row exceeds."""
    return self.prompt_length + len(self.rounds.num_accepted)


@dataclasses.dataclass(frozen=True)
class NullDraft(Draft):
  """Guesses token 0 and reads nothing: a round with it is a round without drafting.

  Attributes:
    tree: of the guesses; by default there are none, which is plain decoding.
  """

  tree: AnyTree = chain(0)

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    batch = len(context.tokens)
    guesses = jnp.zeros((batch, self.tree.num_guesses), jnp.int32)
    return Proposal(guesses, tree=some_shape(self.tree, batch)), state


@functools.partial(jax.jit, static_argnames=("target", "max_new_tokens", "sampling", "eos_id"))
def autoregressive_decode(
  target: Model,
  params: Any,
  prompt: Array,
  rng: Array,
  *,
  max_new_tokens: int,
  sampling: Sampling,
  eos_id: int | None = None,
) -> DecodeResult:
  """Decode one token a target pass: the baseline, in one jitted program.

  Arguments and result as in `speculative_decode`; a round emits one token.
  """
  verifier = TokenVerifier(sampling)
  return _decode(target, NullDraft(), params, (), prompt, rng, max_new_tokens, verifier, eos_id)


@functools.partial(
  jax.jit, static_argnames=("target", "draft", "max_new_tokens", "verifier", "eos_id")
)
def speculative_decode(
  target: Model,
  draft: Draft,
  target_params: Any,
  draft_params: Any,
  prompt: Array,
  rng: Array,
  *,
  max_new_tokens: int,
  verifier: Verifier,
  eos_id: int | None = None,
) -> DecodeResult:
  """Decode a batch by speculation (Algorithm 1), in one jitted program.

  Args:
    target: M_p, whose distribution the output has.
    draft: M_q with its tree; it must sample as the verifier's `sampling` says to be useful, never to be
      exact.
    target_params: of the target.
    draft_params: of the draft.
    prompt: [B, P], padded.
    rng: keys [B], one a row: a row's output does not depend on its neighbours; or one key, which is
      split. Those of `jax.random.key` or of `PRNGKey`.
    max_new_tokens: limit for each row, EOS counted.
    verifier: how target logits become p, and how guesses are judged by it.
    eos_id: ends a row; None for the target's.

  Returns:
    Tokens, lengths and a record of each round.
  """
  models = target, draft, target_params, draft_params
  return _decode(*models, prompt, rng, max_new_tokens, verifier, eos_id)


def _decode(
  target, draft, target_params, draft_params, prompt, rng, limit, verifier, eos_id
) -> DecodeResult:
  require_count("max_new_tokens", limit)
  rng = split_keys(rng, len(prompt))
  eos_id = target.eos_id if eos_id is None else eos_id
  models = target, draft, target_params, draft_params
  step = functools.partial(one_round, *models, verifier, rng, eos_id)
  return decoded(all_rounds(step, start(*models, prompt, limit)))


def all_rounds(step: Callable[[State], State], s: State) -> State:
  """The state after `step`, a round, has been run from `s` until every row is done."""
  return lax.while_loop(lambda s: ~s.done.all(), step, s)


def decoded(s: State) -> DecodeResult:
  """What a state holds of the text: its new tokens, and the record of its rounds."""
  new = s.prompt_length[:, None] + jnp.arange(len(s.rounds.num_accepted))
  tokens = jnp.where(new < s.length[:, None], jnp.take_along_axis(s.tokens, new, axis=1), 0)
  return DecodeResult(tokens, s.length - s.prompt_length, s.rounds, s.num_rounds, s.not_finite)


def start(target: Model, draft: Draft, target_params, draft_params, prompt, limit: int) -> State:
  """Before the first of the rounds that decode `limit` tokens: both models have read the prompt.

  Raises InputError if that is more than memory holds; traced, as it mostly is, before it is tried.
  """
  batch, tree = len(prompt), draft.tree
  require_compilable(tree)
  first, length = target.prompt_tokens(prompt)
  # A row at the limit may still write one block: buffer and caches have its K slots to spare.
  num_slots = first.shape[1] + limit + tree.num_nodes
  hidden, cache = target.prefill(target_params, prompt, num_slots)
  tokens = jnp.pad(first, ((0, 0), (0, num_slots - first.shape[1])))
  context = Context(prompt, tokens, length, cache, last_hidden(hidden, length - 2))
  of_rounds = lambda *shape: jnp.zeros((limit, batch, *shape), jnp.int32)
  state = State(
    prompt=prompt,
    tokens=tokens,
    length=length,
    prompt_length=length,
    done=jnp.zeros(batch, bool),
    target=cache,
    hidden=context.hidden,
    draft=draft.start(draft_params, context, hidden),
    rounds=Rounds(
      guesses=of_rounds(tree.num_guesses),
      num_accepted=of_rounds(),
      next_token=of_rounds(),
      num_emitted=of_rounds(),
      path=None if tree.is_chain else of_rounds(tree.depth),
      parents=of_rounds(tree.num_guesses) if isinstance(tree, DynamicTree) else None,
    ),
    num_rounds=jnp.zeros((), jnp.int32),
    not_finite=jnp.full(batch, -1, jnp.int32),
  )
  # Of one round at once: the target's logits and what the draft guesses from.
  probs = tree.num_nodes + tree.num_guesses, target.vocab_size
  guesses = f"gamma {tree.depth}" if tree.is_chain else f"a tree of {tree.num_nodes} nodes"
  what = f"a batch of {batch} with max_new_tokens {limit} and {guesses}"
  of_round = jax.ShapeDtypeStruct((batch, *probs), jnp.float32)
  require_memory(what, (target_params, draft_params, state, of_round))
  return state


def one_round(
  target: Model,
  draft: Draft,
  target_params,
  draft_params,
  verifier: Verifier,
  rng: Array,
  eos_id: int,
  s: State,
) -> State:
  """Algorithm 1; arguments as in `speculative_decode`, and what the round before left."""
  # Keyed by row and position: no round of a row ever sees a key twice.
  keys = jax.vmap(jax.random.fold_in)(rng, s.length)
  draft_rng, verify_rng = jax.vmap(jax.random.split, out_axes=1)(keys)
  context = s.context

  # Propose: guesses and the distributions they were drawn from.
  proposal, draft_state = draft.propose(draft_params, s.draft, context, draft_rng)
  tree = proposal.tree or draft.tree

  # Extend: one target pass over the newest token and all guesses gives p at each.
  block = jnp.concatenate([context.newest[:, None], proposal.tokens], axis=1)
  logits, hidden, cache = _read(target, target_params, s.target, block, tree, draft.widths)

  # Accept: n guesses and one token more; of them what fits before EOS and the limit.
  verification = verifier.accept(verify_rng, tree, proposal, logits)
  finite = _finite(logits, proposal.q)
  emitted, num_emitted, ends = _cut(proposal.tokens, verification, eos_id, s, finite)
  length = s.length + num_emitted

  # Commit: both models forget the rest.
  cache = target.commit(cache, length - 1, tree, verification.path)
  chose = verification.num_accepted if verification.path is None else verification.path.max(axis=1)

  # Observe: the draft hears what became of its guesses.
  outcome = Outcome(proposal, logits, hidden, verification, num_emitted, length)
  draft_state = draft.observe(draft_params, draft_state, outcome)

  return s._replace(
    tokens=_write(s.tokens, emitted, s.length, num_emitted),
    length=length,
    done=s.done | ends,
    target=cache,
    hidden=last_hidden(hidden, chose),
    draft=draft_state,
    rounds=_recorded(s, proposal, verification, num_emitted),
    num_rounds=s.num_rounds + 1,
    not_finite=jnp.where(s.done | finite, s.not_finite, s.length - s.prompt_length),
  )


def _read(
  target: Model, params, cache, block: Array, tree: AnyTree, widths: tuple[int, ...]
) -> tuple[Array, Array, Any]:
  """The target's `extend`; of a chain that may end early no further than some row's reaches."""
  if not widths:
    return target.extend(params, cache, block, tree)

  def first(width: int, cache):
    logits, hidden, cache = target.extend(params, cache, block[:, : width + 1], chain(width))
    unread = (0, 0), (0, block.shape[1] - 1 - width), (0, 0)
    return jnp.pad(logits, unread), jnp.pad(hidden, unread), cache

  reached = (block[:, 1:] >= 0).any(axis=0).sum()
  at = jnp.searchsorted(jnp.array(widths), reached)
  return lax.switch(at, [functools.partial(first, width) for width in widths], cache)


def last_hidden(hidden: Array, at: Array) -> Array:
  """Of states [B, k, E] one of each row, [B, E]; 0 where `at` [B] is negative."""
  found = jnp.take_along_axis(hidden, jnp.maximum(at, 0)[:, None, None], axis=1)[:, 0]
  return jnp.where(at[:, None] < 0, 0, found)


def _finite(logits: Array, q: Array | None) -> Array:
  """Whether neither a row's logits nor what its draft guessed from is NaN or infinite, [B]."""
  finite = jnp.isfinite(logits.max(axis=-1)).all(axis=1)
  return finite if q is None else finite & jnp.isfinite(q.sum(axis=(1, 2)))


def _cut(
  guesses: Array, verification: Verification, eos_id: int, s: State, finite: Array
) -> tuple[Array, Array, Array]:
  """Tokens [B, D + 1] of a verification, how many of them [B] enter the text, and what rows [B] end.

  EOS is the last of a row, and no row passes its limit. A round with a NaN in it is not to be
  believed: it emits nothing and ends its row.
  """
  n, path = verification.num_accepted, verification.path
  if path is not None:
    guesses = jnp.take_along_axis(guesses, jnp.maximum(path - 1, 0), axis=1)
  i = jnp.arange(guesses.shape[1] + 1)
  extended = jnp.pad(guesses, ((0, 0), (0, 1)))
  emitted = jnp.where(i < n[:, None], extended, verification.next_token[:, None])
  is_eos = (emitted == eos_id) & (i <= n[:, None])
  num_emitted = jnp.where(is_eos.any(axis=1), is_eos.argmax(axis=1), n) + 1
  num_emitted = jnp.minimum(num_emitted, s.limit - s.length)
  num_emitted = jnp.where(s.done | ~finite, 0, num_emitted)
  in_eos = (is_eos & (i < num_emitted[:, None])).any(axis=1)
  return emitted, num_emitted, in_eos | (s.length + num_emitted >= s.limit) | ~finite


def _recorded(
  s: State, proposal: Proposal, verification: Verification, num_emitted: Array
) -> Rounds:
  """The record of all rounds, this one's among them."""
  # -1 where a round that began with a larger gamma would have guessed more (`adaptive`).
  unguessed = s.rounds.guesses.shape[-1] - proposal.tokens.shape[1]
  guesses = jnp.pad(proposal.tokens, ((0, 0), (0, unguessed)), constant_values=-1)
  parents = None if proposal.tree is None else proposal.tree.parents
  record = Rounds(
    guesses,
    verification.num_accepted,
    verification.next_token,
    num_emitted,
    verification.path,
    parents,
  )
  return jax.tree.map(lambda all_, new: all_.at[s.num_rounds].set(new), s.rounds, record)


def require_finite(decoded: DecodeResult) -> DecodeResult:
  """The same, or an InputError that names the first row whose models gave NaN or infinity."""
  for row, token in enumerate(decoded.not_finite.tolist()):
    if token >= 0:
      raise InputError(
        f"row {row} of a batch cannot be decoded past token {token}: the target's logits or the "
        "draft's probabilities there are NaN or infinite; look for damaged weights, or use float32."
      )
  return decoded


def _write(tokens: Array, block: Array, at: Array, count: Array) -> Array:
  """tokens [B, T] with the first `count` [B] tokens of block [B, k] put at `at` [B]."""
  offset = jnp.arange(tokens.shape[1]) - at[:, None]
  inside = (offset >= 0) & (offset < count[:, None])
  moved = jnp.take_along_axis(block, jnp.clip(offset, 0, block.shape[1] - 1), axis=1)
  return jnp.where(inside, moved, tokens)
