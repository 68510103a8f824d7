"""Speculative decoding (Algorithm 1): rounds of propose, extend, process, accept, commit, observe.

Shapes are fixed, and a whole batch is decoded in one jitted loop. The loop depends on the contracts
of `core.types`, but on no particular model, draft or verifier. Autoregressive decoding is the same
loop with a draft that proposes nothing (`NullDraft`), so both share the target forward pass,
sampling and the handling of EOS and limits.

Axis letters are those of `core.types`.
"""

import dataclasses
import functools
import itertools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Key

from specdec_jax.core.arrays import (
  fold_in_rows,
  gather,
  gather_or_zero,
  gather_token,
  highest,
  place_tokens,
  repeat_rows,
  split_rows,
  switch,
)
from specdec_jax.core.context import Context, Prompt, node_prefixes, prompt_ids, without_draft
from specdec_jax.core.memory import require_memory
from specdec_jax.core.processors import Processors, process
from specdec_jax.core.sampling import Sampling, distribution, position_keys, split_keys
from specdec_jax.core.settings import HashableArray, Settings, traced
from specdec_jax.core.trees import (
  AnyTree,
  DynamicTree,
  chain,
  placeholder_shape,
  require_compilable,
)
from specdec_jax.core.types import (
  AnyArray,
  DecodeResult,
  Draft,
  Keys,
  Model,
  Outcome,
  Params,
  Proposal,
  Rounds,
  Verification,
  Verifier,
  WrappedModel,
)
from specdec_jax.errors import require_count


class DecodeState(NamedTuple):
  """State of the decoding loop between two rounds; the other fields are those of `Context`.

  Attributes:
    rng: key of each row, from which the keys of its rounds or positions are derived.
    rounds: data of the rounds of each row; see `empty_rounds`.
    num_rounds: number of rounds since each row began.
    not_finite: see `DecodeResult`; also for `log_probs`, whose slots are those of `tokens`.
  """

  prompt: Int[Array, "B P"]
  tokens: Int[Array, "B T"]
  length: Int[Array, " B"]
  prompt_length: Int[Array, " B"]
  limit: Int[Array, " B"]
  done: Bool[Array, " B"]
  rng: Keys
  target_cache: Any
  hidden: Float[Array, "B E"]
  draft_state: Any
  rounds: Int[Array, "B slots numbers"]
  num_rounds: Int[Array, " B"]
  not_finite: Int[Array, " B"]
  log_probs: Float[Array, "B T 3"] | None = None

  @property
  def context(self) -> Context:
    """The part of the state that a draft may read."""
    return Context(*(getattr(self, field) for field in Context._fields))


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
  """Settings of decoding that measurements and calibration take; see `generate.outputs`."""

  sampling: Sampling
  batch_size: int = 1
  max_new_tokens: int = 128
  seed: int = 0
  lenience: float = 1.0


@dataclasses.dataclass(frozen=True)
class NullDraft(Draft):
  """Draft that takes no time. By default it proposes no tokens: decoding is autoregressive.

  With a tree, every draft token is `token`. The time of a round is then the time of all parts
  except drafting. Token -1 is never accepted: decoding is then autoregressive in passes over all
  nodes of the tree.
  """

  tree: AnyTree = chain(0)
  token: int = 0

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    batch = len(context.tokens)
    draft_tokens = jnp.full((batch, self.tree.num_draft_tokens), self.token, jnp.int32)
    return Proposal(draft_tokens, tree=placeholder_shape(self.tree, batch)), state


@dataclasses.dataclass(frozen=True)
class Decoder(Settings):
  """Speculative decoder: a target, a draft and a verifier.

  It is hashable, and a pytree whose leaves are the values of its traced fields (`settings`).

  Attributes:
    target: M_p, the model whose distribution the output has if the verifier is exact.
    draft: M_q and its tree of draft tokens; `NullDraft()` is autoregressive decoding.
    verifier: verifier that accepts or rejects draft tokens. Its `sampling` is the sampling method
      of the output. The draft should use the same method to be useful; exactness does not depend on
      it.
    eos_id: token that ends a text, or several; None to use `target.eos_id`.
    processors: logits processors of the target, in the order in which they apply. The draft should
      have the same (`DraftOptions`).
    records_log_probs: whether results have the log-probabilities of each token.
  """

  target: Model
  draft: Draft
  verifier: Verifier
  eos_id: int | HashableArray | None = traced(None)
  processors: Processors = ()
  records_log_probs: bool = False

  @functools.partial(jax.jit, static_argnames=("max_new_tokens", "num_samples"))
  def run(
    self,
    params: Params,
    prompt: Prompt,
    rng: Key[Array, "*batch"] | Array,
    *,
    max_new_tokens: int,
    limit: Int[AnyArray, "*rows"] | int | None = None,
    num_forced: Int[AnyArray, " rows"] | None = None,
    num_samples: int = 1,
  ) -> DecodeResult:
    """Decode a batch in one jitted program.

    Args:
      rng: one key per row, so that a row does not depend on its neighbors; or one key, which is
        split. A key is made by `jax.random.key` or `PRNGKey`.
      max_new_tokens: maximum number of new tokens of each row, EOS included.
      limit: another limit, one for all rows or one per row, traced. The smaller limit applies. A
        text also ends where the target has no position for another token.
      num_forced: number of tokens at the start of each row that a processor forces. They count
        against the limits, but are not part of the result.
      num_samples: number of consecutive rows per prompt; rng, limit and num_forced are per row.

    Raises:
      InputError: an argument is invalid, the tree has too many levels or siblings, or there is not
        enough memory.
    """
    require_count("max_new_tokens", max_new_tokens)
    state = self.init(params, prompt, rng, max_new_tokens, limit, num_forced, num_samples)
    return self.result(self.run_rounds(params, state))

  def run_rounds(self, params: Params, state: DecodeState) -> DecodeState:
    """Run rounds until every row has ended."""
    return lax.while_loop(lambda s: ~s.done.all(), lambda s: self.round(params, s), state)

  def round(self, params: Params, state: DecodeState) -> DecodeState:
    """Run one round of Algorithm 1."""
    # One key per row and position: rows are independent, and no round of a row repeats a key.
    draft_rng, verify_rng = split_rows(fold_in_rows(state.rng, state.length))
    if self.verifier.uses_position_keys:
      verify_rng = position_keys(state.rng, state.length, self.draft.tree.depth + 1)

    # Propose: the draft samples tokens x_1, ..., x_N, each from its distribution q.
    context = state.context
    proposal, draft_state = self.draft.propose(params.draft, state.draft_state, context, draft_rng)
    tree = proposal.tree or self.draft.tree

    # Extend: one target forward pass over the last token and x_1, ..., x_N gives p at every node.
    block = jnp.concatenate([context.last_token[:, None], proposal.tokens], axis=1)
    target = self.verifier.round_target(self.target)
    logits, hidden, cache = _extend(target, params.target, state.target_cache, block, tree)

    # Process: the logits at each node are adjusted by the text that ends there.
    model_logits = logits
    if self.processors:
      logits = process(self.processors, logits, node_prefixes(context, proposal.tokens, tree))

    # Accept: the longest accepted path, and one token sampled by the target after it.
    verification = self.verifier.verify(verify_rng, tree, proposal, logits)
    finite = _all_finite(logits, proposal.q)
    emitted, num_emitted, ends = self._cut(state, proposal, verification, finite)
    length = state.length + num_emitted

    log_probs = state.log_probs
    if log_probs is not None:
      new = self._log_probs(model_logits, logits, verification, emitted)
      log_probs = place_tokens(log_probs, new, state.length, num_emitted)

    # Commit: the target's cache keeps the accepted path.
    cache = target.commit(cache, length - 1, tree, verification.path)

    # Observe: the draft receives the outcome, and rolls back its own cache.
    outcome = Outcome(proposal, logits, hidden, verification, num_emitted, length)
    draft_state = self.draft.observe(params.draft, draft_state, outcome)

    return state._replace(
      tokens=place_tokens(state.tokens, emitted, state.length, num_emitted),
      length=length,
      done=state.done | ends,
      target_cache=cache,
      hidden=gather_or_zero(hidden, _last_node(verification)),
      draft_state=draft_state,
      rounds=_recorded(state, proposal, verification, num_emitted),
      num_rounds=state.num_rounds + 1,
      not_finite=jnp.where(
        state.done | finite, state.not_finite, state.length - state.prompt_length
      ),
      log_probs=log_probs,
    )

  def init(
    self,
    params: Params,
    prompt: Prompt,
    rng: Key[Array, "*batch"] | Array,
    max_new_tokens: int,
    limit: Int[AnyArray, "*rows"] | int | None = None,
    num_forced: Int[AnyArray, " rows"] | None = None,
    num_samples: int = 1,
  ) -> DecodeState:
    """Return the state before the first round, after target and draft have processed the prompt.

    The arguments and errors are those of `run`, except that max_new_tokens is not checked. In
    `jax.jit`, memory is checked while tracing, before anything runs.
    """
    batch, tree = len(prompt) * num_samples, self.draft.tree
    require_compilable(tree)
    source = without_draft(prompt)
    first, length = self.target.prompt_tokens(source)
    # A row at the limit may still write one block, so tokens and caches have K slots to spare.
    num_slots = first.shape[1] + max_new_tokens + tree.num_nodes
    hidden, cache = self.target.prefill(params.target, source, num_slots)
    tokens = jnp.pad(first, ((0, 0), (0, num_slots - first.shape[1])))
    last_hidden = gather_or_zero(hidden, length - 2)
    context = Context(prompt, tokens, length, cache, last_hidden)
    draft_state = self.draft.init(params.draft, context, hidden)
    context = context._replace(prompt=prompt_ids(prompt))
    if num_samples > 1:
      context, draft_state = repeat_rows((context, draft_state), num_samples)
    length = context.length
    state = DecodeState(
      prompt=context.prompt,
      tokens=context.tokens,
      length=length,
      prompt_length=length if num_forced is None else length + num_forced,
      limit=last_length(self.target, length, max_new_tokens, limit),
      done=jnp.zeros(batch, bool),
      rng=split_keys(rng, batch),
      target_cache=context.target_cache,
      hidden=context.hidden,
      draft_state=draft_state,
      rounds=empty_rounds(tree, max_new_tokens, batch),
      num_rounds=jnp.zeros(batch, jnp.int32),
      not_finite=jnp.full(batch, -1, jnp.int32),
      log_probs=jnp.zeros((batch, num_slots, 3), jnp.float32) if self.records_log_probs else None,
    )
    # One round needs logits of the target at every node, and q of every draft token.
    num_distributions = tree.num_nodes + tree.num_draft_tokens
    logits = jax.ShapeDtypeStruct((batch, num_distributions, self.target.vocab_size), jnp.float32)
    draft_tokens = f"gamma {tree.depth}" if tree.is_chain else f"a tree of {tree.num_nodes} nodes"
    what = f"a batch of {batch} with max_new_tokens {max_new_tokens} and {draft_tokens}"
    require_memory(what, (params, state, logits))
    logging.getLogger("specdec_jax").info("Compiling for %s; this takes seconds.", what)
    return state

  def result(self, state: DecodeState) -> DecodeResult:
    """Return the new tokens in a state, and the data of its rounds."""
    rounds = unpacked_rounds(self.draft.tree, state.rounds)
    new = state.prompt_length[:, None] + jnp.arange(len(rounds.num_accepted))[None]
    exists = new < state.length[:, None]
    tokens = jnp.where(exists, gather(state.tokens, new), 0)
    lengths = jnp.maximum(state.length - state.prompt_length, 0)
    log_probs = state.log_probs
    if log_probs is not None:
      log_probs = jnp.where(exists[..., None], gather(log_probs, new), 0)
    counts = state.num_rounds.max(), state.not_finite
    return DecodeResult(tokens, lengths, rounds, *counts, log_probs)

  def _log_probs(
    self,
    model_logits: Float[Array, "B K V"],
    logits: Float[Array, "B K V"],
    verification: Verification,
    emitted: Int[Array, "B emitted"],
  ) -> Float[Array, "B emitted 3"]:
    # Each token was sampled at the node before it.
    nodes, path = jnp.broadcast_to(jnp.arange(emitted.shape[1]), emitted.shape), verification.path
    if path is not None:
      nodes = jnp.pad(path, ((0, 0), (1, 0)))

    before, after = (gather(x, nodes).astype(jnp.float32) for x in (model_logits, logits))
    sampling, processed = self.verifier.sampling, jax.nn.log_softmax(after)
    sampled = processed if sampling.is_argmax else jnp.log(distribution(after, sampling))
    all_tokens = jax.nn.log_softmax(before), processed, sampled
    tokens = jnp.maximum(emitted, 0)
    return jnp.stack([gather_token(x, tokens) for x in all_tokens], axis=-1)

  def _cut(
    self,
    state: DecodeState,
    proposal: Proposal,
    verification: Verification,
    finite: Bool[Array, " B"],
  ) -> tuple[Int[Array, "B emitted"], Int[Array, " B"], Bool[Array, " B"]]:
    """Truncate the tokens of a round at EOS and at the limit of the row.

    A row that is not `finite` emits nothing and is marked done.

    Returns:
      The accepted tokens followed by the next token; the number of these tokens that are added to
      the text; and whether the row ends.
    """
    eos_id = self.target.eos_id if self.eos_id is None else self.eos_id
    eos_ids = jnp.asarray(eos_id).reshape(1, 1, -1)
    n, path, draft_tokens = verification.num_accepted, verification.path, proposal.tokens
    if path is not None:
      draft_tokens = gather(draft_tokens, jnp.maximum(path - 1, 0))
    i = jnp.arange(draft_tokens.shape[1] + 1)[None]
    padded = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
    emitted = jnp.where(i < n[:, None], padded, verification.next_token[:, None])
    is_eos = (emitted[..., None] == eos_ids).any(axis=-1) & (i <= n[:, None])
    is_eos &= state.length[:, None] + i >= state.prompt_length[:, None]  # not in a forced prefix
    num_emitted = jnp.where(is_eos.any(axis=1), is_eos.argmax(axis=1), n) + 1
    num_emitted = jnp.minimum(num_emitted, state.limit - state.length)
    num_emitted = jnp.where(state.done | ~finite, 0, num_emitted).astype(jnp.int32)
    emits_eos = (is_eos & (i < num_emitted[:, None])).any(axis=1)
    reaches_limit = state.length + num_emitted >= state.limit
    return emitted, num_emitted, emits_eos | reaches_limit | ~finite


def empty_rounds(tree: AnyTree, max_rounds: int, batch: int) -> Int[Array, "B slots numbers"]:
  """Return the data of no rounds, with slots for `max_rounds` rounds of proposals of `tree`.

  The fields of `Rounds` are in one array, so that a round writes them at once. Rows that have ended
  may write to the last slot, which is not part of the result.
  """
  return jnp.zeros((batch, max_rounds + 1, _field_bounds(tree)[-1]), jnp.int32)


def _field_bounds(tree: AnyTree) -> list[int]:
  """Return where the fields of `Rounds` after the first begin, and the number of all entries."""
  n, depth = tree.num_draft_tokens, 0 if tree.is_chain else tree.depth
  sizes = n, 1, 1, 1, depth, n if isinstance(tree, DynamicTree) else 0
  return list(itertools.accumulate(sizes))


def unpacked_rounds(tree: AnyTree, rounds: Int[Array, "B slots numbers"]) -> Rounds:
  """Return the fields of the rounds that are in one array; see `empty_rounds`."""
  fields = jnp.split(rounds[:, :-1].swapaxes(0, 1), _field_bounds(tree)[:-1], axis=-1)
  draft_tokens, num_accepted, next_token, num_emitted, path, parents = fields
  return Rounds(
    draft_tokens,
    num_accepted[..., 0],
    next_token[..., 0],
    num_emitted[..., 0],
    None if tree.is_chain else path,
    parents if isinstance(tree, DynamicTree) else None,
  )


def num_positions(model: Model) -> int | None:
  """Return the number of tokens of a text that a model can process; None if there is no limit."""
  while isinstance(model, WrappedModel):
    model = model.model
  return getattr(getattr(model, "config", None), "num_positions", None)


def last_length(
  target: Model,
  length: Int[Array, " B"],
  max_new_tokens: int,
  limit: Int[AnyArray, "*batch"] | int | None,
) -> Int[Array, " B"]:
  """Return the length at which the text of each row ends: at its limits, or at the last position.

  The last token of a text is not processed, so it has no position. Nodes of a block that lie past
  the last position are never part of a text.
  """
  end = length + jnp.minimum(max_new_tokens, max_new_tokens if limit is None else limit)
  most = num_positions(target)
  return end if most is None else jnp.maximum(length, jnp.minimum(end, most + 1))


def _last_node(verification: Verification) -> Int[Array, " B"]:
  """Return the last accepted node of each row, after which the next token was sampled."""
  path = verification.path
  return verification.num_accepted if path is None else path.max(axis=1)


def _all_finite(
  logits: Float[Array, "B K V"], q: Float[Array, "B N V"] | None
) -> Bool[Array, " B"]:
  """Return for each row whether q and, at each node, the maximum of the logits are finite."""
  finite = jnp.isfinite(highest(logits)).all(axis=(1, 2))
  return finite if q is None else finite & jnp.isfinite(q.sum(axis=(1, 2)))


def _extend(
  target: Model, params: Any, cache: Any, block: Int[Array, "B K"], tree: AnyTree
) -> tuple[Float[Array, "B K V"], Float[Array, "B K E"], Any]:
  """Run the target over a block, cut to the `verify_lengths` that covers the longest proposal."""
  lengths = tree.verify_lengths
  if not lengths:
    return target.extend(params, cache, block, tree)

  def extend_prefix(length: int, cache: Any) -> tuple[tuple[Array, Array], Any]:
    # Without a barrier, XLA computes what does not depend on the cache for all lengths.
    tokens, cache = lax.optimization_barrier((block[:, : length + 1], cache))
    logits, hidden, cache = target.extend(params, cache, tokens, chain(length))
    padding = (0, 0), (0, block.shape[1] - 1 - length), (0, 0)
    return (jnp.pad(logits, padding), jnp.pad(hidden, padding)), cache

  longest = (block[:, 1:] >= 0).any(axis=0).sum()
  branch = jnp.searchsorted(jnp.array(lengths), longest)
  branches = [functools.partial(extend_prefix, length) for length in lengths]
  (logits, hidden), cache = switch(branch, branches, cache)
  return logits, hidden, cache


def _recorded(
  state: DecodeState,
  proposal: Proposal,
  verification: Verification,
  num_emitted: Int[Array, " B"],
) -> Int[Array, "B slots numbers"]:
  numbers = verification.num_accepted, verification.next_token, num_emitted
  fields = [proposal.tokens, jnp.stack(numbers, axis=1)]
  if verification.path is not None:
    fields.append(verification.path)
  if proposal.tree is not None:
    fields.append(proposal.tree.parents)
  # A round may propose fewer tokens than the array has room for (experiments/gamma/adaptive.py).
  missing = state.rounds.shape[-1] - sum(field.shape[1] for field in fields)
  fields[0] = jnp.pad(proposal.tokens, ((0, 0), (0, missing)), constant_values=-1)
  record = jnp.concatenate(fields, axis=1).astype(state.rounds.dtype)
  if len(record) == 1:
    return lax.dynamic_update_slice_in_dim(state.rounds, record[:, None], state.num_rounds[0], 1)
  # The numbers of a row are on one axis: with two, a program for a TPU needs more memory.
  write = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
  flat, starts = state.rounds.reshape(len(record), -1), state.num_rounds * record.shape[1]
  return write(flat, record, starts).reshape(state.rounds.shape)
