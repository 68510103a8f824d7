"""Speculative beam search: rounds of propose, extend, replay, commit (Appendix A.4).

A target forward pass covers at most M nodes: the last token of each live beam and a forest of draft
tokens after these tokens, except the nodes that earlier passes covered. The search then runs
ordinary steps with the target's log-probabilities. A step is possible if the last tokens of all
live beams are verified nodes. So steps are run until the search ends or a new live beam ends with a
token that is not verified. A pass therefore allows 1 to D + 1 steps. Up to rounding, they are the
steps of plain beam search. Verified nodes that continue live beams are cached for the next pass.

Shapes are fixed, and one jitted loop runs the search for all rows of a batch. Plain beam search is
the same loop with a draft that proposes nothing (`NullBeamDraft`).

Axis letters are those of `beams`.
"""

import dataclasses
import functools
import logging
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Shaped

from specdec_jax.beams.drafts import BeamDraft
from specdec_jax.beams.forest import (
  BeamContext,
  Forest,
  VerifyBlock,
  block_prefixes,
  pack_block,
  verified_nodes,
)
from specdec_jax.beams.layout import (
  committed_positions,
  concatenate_prefix,
  move_nodes,
  slot_mask,
  slot_of_last_tokens,
)
from specdec_jax.beams.step import Beams, Scorer, best_first, initial_beams, search_ended, step
from specdec_jax.beams.verified import (
  NO_ENTRY,
  VerifiedNodes,
  append_nodes,
  empty_nodes,
  find_child,
  prune,
)
from specdec_jax.core.arrays import gather, gather_one, gather_or_zero
from specdec_jax.core.context import Context
from specdec_jax.core.decode import last_length
from specdec_jax.core.memory import require_memory
from specdec_jax.core.processors import Processors, process
from specdec_jax.core.settings import Settings, traced
from specdec_jax.core.types import AnyArray, DecodeResult, Model, Params, Rounds
from specdec_jax.errors import InputError, require_count, require_number


class BeamResult(NamedTuple):
  """Texts that a beam search found, in descending order of their scores.

  Attributes:
    tokens: new tokens, EOS included; 0 past the end of a text.
    lengths: number of new tokens, EOS included. It is 0 for the missing texts of a row in which
      some texts finished, but fewer than w, or that has fewer than w texts.
    scores: log-probabilities divided by `Scorer.divisor`; -inf for missing texts. If no text of a
      row finished (see `Scorer`), they are not divided.
    steps: number of search steps in each round; 0 after the search of a row has ended.
    num_rounds: number of rounds; each has one target forward pass.
    not_finite: index of the first step that failed, because logits at a node, before or after
      processors, had NaN, +inf or no finite value; -1 if none. The search of the row ends before.
  """

  tokens: Int[Array, "B w X"]
  lengths: Int[Array, "B w"]
  scores: Float[Array, "B w"]
  steps: Int[Array, "R B"]
  num_rounds: Int[Array, ""]
  not_finite: Int[Array, " B"]

  def best(self) -> DecodeResult:
    """Return the best text of each row in the form of a `DecodeResult`.

    Each search step counts as one emitted token. The rounds together may emit more tokens than the
    text has, because a search may continue after its best text has ended.
    """
    no_draft_tokens = jnp.zeros((*self.steps.shape, 0), jnp.int32)
    num_accepted = jnp.maximum(self.steps - 1, 0)
    rounds = Rounds(no_draft_tokens, num_accepted, jnp.zeros_like(self.steps), self.steps)
    tokens, lengths = self.tokens[:, 0], self.lengths[:, 0]
    return DecodeResult(tokens, lengths, rounds, self.num_rounds, self.not_finite)


class BeamState(NamedTuple):
  """The part of the state that a step of the search changes; see also `BeamContext`.

  Attributes:
    parent_entries: index, among the verified nodes, of the node before each last token.
  """

  beams: Beams
  last_tokens: Int[Array, "B w"]
  visible: Bool[Array, "B w T"]
  previous_tokens: Int[Array, "B w"]
  previous_visible: Bool[Array, "B w T"]
  hidden: Float[Array, "B w E"]
  parent_entries: Int[Array, "B w"]


class BeamSearchState(NamedTuple):
  """State of a beam search between two rounds; see also `BeamContext` and `BeamResult`.

  Attributes:
    prompt_length: number of committed tokens before the first round.
    limit: maximum length of a text, including the tokens before the first round.
  """

  prompt: Int[Array, "B P"]
  prompt_length: Int[Array, " B"]
  start: Int[Array, " B"]
  limit: Int[Array, " B"]
  done: Bool[Array, " B"]
  live: BeamState
  verified: VerifiedNodes
  last_entries: Int[Array, "B w"]
  target_cache: Any
  draft_state: Any
  steps: Int[Array, "R B"]
  num_rounds: Int[Array, ""]
  not_finite: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class BeamSearcher(Settings):
  """Beam search for the most probable texts. It is hashable, and a pytree like `Decoder`.

  Texts, their order and their scores do not depend on the draft, except for rounding: texts that
  are equally probable up to rounding may change places.

  Attributes:
    target: M_p, the model whose most probable texts are searched for.
    draft: draft that searches ahead; `NullBeamDraft()` is plain beam search.
    num_beams: w, number of live sequences and of results per row.
    length_penalty: exponent of the divisor of log-probabilities (see `Scorer`); 0 for no penalty.
      The divisor must be between 1e-30 and 1e30.
    eos_id: token that ends a text, or several; None to use `target.eos_id`.
    scorer: "t5x" or "hf": the scores and rules of the search; see `Scorer`.
    early_stopping: see `Scorer`.
    processors: logits processors. As in transformers, they apply to log-probabilities, which are
      not normalized again.
  """

  target: Model
  draft: BeamDraft
  num_beams: int
  length_penalty: float | int = traced(0.6)
  eos_id: int | tuple[int, ...] | None = traced(None)
  scorer: Literal["t5x", "hf"] = "t5x"
  early_stopping: bool | Literal["never"] = False
  processors: Processors = ()

  def run(
    self,
    params: Params,
    prompt: Int[Array, "B P"],
    *,
    max_new_tokens: int,
    limit: Int[AnyArray, "*batch"] | int | None = None,
    num_forced: Int[AnyArray, " B"] | None = None,
  ) -> BeamResult:
    """Run the search for a batch in one jitted program.

    `limit` and `num_forced` are those of `Decoder.run`.

    Args:
      prompt: padded prompts. The texts of a row do not depend on its neighbors.
      max_new_tokens: maximum number of new tokens of each text, EOS included.
    """
    self._require_valid(prompt, max_new_tokens)
    # An integer would compile a separate program.
    searcher = dataclasses.replace(self, length_penalty=float(self.length_penalty))
    return run_search(searcher, params, prompt, max_new_tokens, limit, num_forced)

  def run_rounds(self, params: Params, state: BeamSearchState) -> BeamSearchState:
    """Run rounds until the search of every row has ended."""
    return lax.while_loop(lambda s: ~s.done.all(), lambda s: self.round(params, s), state)

  def round(self, params: Params, state: BeamSearchState) -> BeamSearchState:
    """Run one round: one target forward pass, and the search steps that it allows."""
    depth, context = self.draft.depth, self._context(state)

    # Propose: the draft searches ahead and returns a forest of draft tokens after the live beams.
    forest, draft_state = self.draft.propose(params.draft, state.draft_state, context)

    # Extend: one target forward pass over the last tokens and draft tokens not yet verified.
    block = pack_block(context, forest, depth, self.draft.num_nodes(self.num_beams))
    num_cached = state.verified.tokens.shape[1]
    cache = self.target.commit(state.target_cache, context.slot + num_cached)
    logits, hidden, cache = self.target.extend(params.target, cache, block.tokens, block.placed)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    if self.processors:
      prefixes = block_prefixes(context, forest, block, depth)
      log_probs = process(self.processors, log_probs, prefixes)
    new_nodes = verified_nodes(log_probs, hidden, block, context, depth, self._num_top)
    nodes = append_nodes(state.verified, new_nodes)

    # Replay: steps of plain beam search, as long as all live beams have been verified.
    finite = jnp.isfinite(logits.max(axis=-1) + log_probs.max(axis=-1)).all(axis=1)
    live, path = self._replay(state, forest, block, nodes, ~state.done & finite)
    num_steps, slot = live.beams.length - context.length, self._slot(state, live.beams.length)

    # Commit: committed nodes move to the slots of their steps, and nodes that remain cached to the
    # slots after them.
    last_entries = find_child(nodes, live.parent_entries, live.last_tokens)
    verified, last_entries, old_entries = prune(nodes, last_entries, num_cached, depth)
    if num_cached:  # without cached nodes, committed ones are in place already
      path_entries = gather(block.entries, path)
      moved = concatenate_prefix(path_entries, num_steps * self.num_beams, old_entries)
      cache = move_nodes(self.target, cache, context.slot, moved)

    return state._replace(
      done=state.done | self._ended(state, live.beams) | ~finite,
      live=live,
      verified=verified,
      last_entries=last_entries,
      target_cache=self.target.commit(cache, slot),
      draft_state=self.draft.observe(draft_state, context, path[:, self.num_beams :], slot),
      steps=state.steps.at[state.num_rounds].set(num_steps),
      num_rounds=state.num_rounds + 1,
      not_finite=jnp.where(state.done | finite, state.not_finite, context.length - state.start),
    )

  def init(
    self,
    params: Params,
    prompt: Int[Array, "B P"],
    max_new_tokens: int,
    limit: Int[AnyArray, "*batch"] | int | None = None,
    num_forced: Int[AnyArray, " B"] | None = None,
  ) -> BeamSearchState:
    """Return the state before the first round, after target and draft have processed the prompt.

    The arguments are those of `run`. Memory is checked while tracing, before anything runs.
    """
    batch, num_beams = len(prompt), self.num_beams
    first, length = self.target.prompt_tokens(prompt)
    num_draft_tokens, num_nodes = (
      self.draft.num_draft_tokens(num_beams),
      self.draft.num_nodes(num_beams),
    )
    num_cached = num_nodes if num_draft_tokens else 0  # plain beam search verifies nothing ahead
    # Maximum number of slots after the committed tokens that drafting, a pass or a move needs.
    num_spare = max(
      num_beams + num_draft_tokens,
      num_cached + num_nodes,
      num_beams * (self.draft.depth + 1) + num_cached,
    )
    num_slots = first.shape[1] + num_beams * (max_new_tokens + 1) + num_spare
    hidden, cache = self.target.prefill(params.target, prompt, num_slots)
    slot = slot_of_last_tokens(length, length, num_beams)
    last_hidden = gather_or_zero(hidden, length - 2)
    tokens = jnp.pad(first, ((0, 0), (0, num_slots - first.shape[1])))
    context = Context(prompt, tokens, length, cache, last_hidden)

    def repeat(x: Shaped[Array, " B *rest"]) -> Shaped[Array, "B w *rest"]:
      return jnp.repeat(x[:, None], num_beams, axis=1)

    texts = jnp.pad(first, ((0, 0), (0, max_new_tokens)))
    live = BeamState(
      beams=initial_beams(texts, length, num_beams),
      last_tokens=repeat(gather_one(first, length - 1)),
      visible=repeat(jnp.arange(num_slots)[None] < length[:, None] - 1),
      previous_tokens=jnp.zeros((batch, num_beams), jnp.int32),
      previous_visible=slot_mask(slot - num_beams, num_beams, num_slots),
      hidden=repeat(last_hidden),
      parent_entries=jnp.zeros((batch, num_beams), jnp.int32),
    )
    state = BeamSearchState(
      prompt=prompt,
      prompt_length=length,
      start=length if num_forced is None else length + num_forced,
      limit=last_length(self.target, length, max_new_tokens, limit),
      done=jnp.zeros(batch, bool),
      live=live,
      verified=empty_nodes(batch, num_cached, self._num_top, last_hidden),
      last_entries=jnp.full((batch, num_beams), NO_ENTRY, jnp.int32),
      target_cache=self.target.commit(cache, slot),
      draft_state=self.draft.init(params.draft, context, hidden),
      steps=jnp.zeros((max_new_tokens, batch), jnp.int32),
      num_rounds=jnp.zeros((), jnp.int32),
      not_finite=jnp.full(batch, -1, jnp.int32),
    )
    what = f"a batch of {batch} with {num_beams} beams, max_new_tokens {max_new_tokens} and "
    what += f"{num_nodes} nodes"
    # One round needs logits of the target at every node.
    logits = jax.ShapeDtypeStruct((batch, num_nodes, self.target.vocab_size), jnp.float32)
    require_memory(what, (params, state, logits))
    logging.getLogger("specdec_jax").info("Compiling for %s; this takes seconds.", what)
    return state

  def result(self, state: BeamSearchState) -> BeamResult:
    """Return the texts of a search, with the best text of each row first."""
    beams, max_new_tokens = state.live.beams, len(state.steps)
    texts, scores, exists = best_first(beams)
    i = jnp.arange(max_new_tokens)[None]
    new = state.start[:, None] + i
    last_slot = texts.shape[2] - 1
    tokens = jnp.take_along_axis(texts, jnp.minimum(new, last_slot)[:, None], axis=2)
    length_at_limit = (beams.length - state.start)[:, None]
    is_eos = (tokens[..., None] == self._eos_ids[None, None, None]).any(axis=-1)
    is_eos &= i[None] < length_at_limit[..., None]  # EOS may be token 0
    lengths = exists * jnp.where(is_eos.any(axis=2), is_eos.argmax(axis=2) + 1, length_at_limit)
    tokens = jnp.where(i[None] < lengths[..., None], tokens, 0)
    return BeamResult(tokens, lengths, scores, state.steps, state.num_rounds, state.not_finite)

  def _replay(
    self,
    state: BeamSearchState,
    forest: Forest,
    block: VerifyBlock,
    nodes: VerifiedNodes,
    active: Bool[Array, " B"],
  ) -> tuple[BeamState, Int[Array, "B path"]]:
    """Run all steps of plain beam search for which the target's log-probabilities are known.

    A row that is `active` runs the first step. It becomes inactive when its search has ended, or
    when the last token of a live beam is not verified.

    Returns:
      The live beams after the steps, and the nodes of the forest that the steps extended: w per
      step, for D + 1 steps. Entries past the last step of a row are arbitrary.
    """
    live, depth = state.live, self.draft.depth
    num_beams, num_slots = self.num_beams, live.visible.shape[2]
    live_nodes = jnp.broadcast_to(jnp.arange(num_beams, dtype=jnp.int32), live.last_tokens.shape)
    path = [live_nodes]
    for level in range(depth + 1):
      # One step: each live beam receives the continuations of its node.
      beams, entries = live.beams, gather(block.entries, live_nodes)
      continuations = gather(nodes.continuations, entries)
      log_probs = gather(nodes.log_probs, entries)
      scorer, eos_ids = self._rules, self._eos_ids
      new_beams, chosen = step(
        beams, continuations, log_probs, scorer, eos_ids, state.start, state.limit
      )
      visible = live.visible | slot_mask(self._slot(state, beams.length), num_beams, num_slots)
      parent_entries = gather(entries, chosen)
      last_tokens = jnp.take_along_axis(new_beams.tokens, beams.length[:, None, None], axis=2)
      new_live = BeamState(
        beams=new_beams,
        last_tokens=last_tokens[..., 0],
        visible=gather(visible, chosen),
        previous_tokens=live.last_tokens,
        previous_visible=visible,
        hidden=gather(nodes.hidden, parent_entries),
        parent_entries=parent_entries,
      )
      live = jax.tree.map(functools.partial(_where_rows, active), new_live, live)

      # The next step is possible if the last tokens of all live beams are verified draft tokens. A
      # beam that does not exist has no continuations.
      if level < depth:
        is_node = live.last_tokens[..., None] == forest.tokens[:, None]
        is_node &= gather(live_nodes, chosen)[..., None] == forest.parents[:, None]
        is_node &= (block.entries[:, num_beams:] >= 0)[:, None]  # [B, w, N]
        live_nodes = num_beams + is_node.argmax(axis=2).astype(jnp.int32)
        path.append(live_nodes)
        all_verified = (is_node.any(axis=2) | jnp.isneginf(live.beams.log_probs)).all(axis=1)
        active &= all_verified & ~self._ended(state, live.beams)
    return live, jnp.concatenate(path, axis=1)

  def _context(self, state: BeamSearchState) -> BeamContext:
    live, num_slots = state.live, state.live.visible.shape[2]
    return BeamContext(
      prompt=state.prompt,
      tokens=live.beams.tokens,
      length=live.beams.length,
      log_probs=live.beams.log_probs,
      last_tokens=live.last_tokens,
      visible=live.visible,
      previous_tokens=live.previous_tokens,
      previous_visible=live.previous_visible,
      slot=self._slot(state, live.beams.length),
      key_positions=committed_positions(state.prompt_length, self.num_beams, num_slots),
      target_cache=state.target_cache,
      hidden=live.hidden,
      verified=state.verified,
      last_entries=state.last_entries,
      eos_ids=self._eos_ids,
      start=state.start,
      limit=state.limit,
    )

  def _slot(self, state: BeamSearchState, length: Int[Array, " B"]) -> Int[Array, " B"]:
    """Return the slot of the first live sequence's last token, for sequences of this length."""
    return slot_of_last_tokens(length, state.prompt_length, self.num_beams)

  @property
  def _eos_ids(self) -> Int[Array, " eos"]:
    eos_ids = self.target.eos_id if self.eos_id is None else self.eos_id
    return jnp.atleast_1d(jnp.asarray(eos_ids))

  @property
  def _num_top(self) -> int:
    """Number of continuations that a step considers; at least w of them do not end with EOS."""
    num_eos = len(self.eos_id) if isinstance(self.eos_id, tuple) else 1
    return (1 + num_eos) * self.num_beams

  @property
  def _rules(self) -> Scorer:
    return Scorer(self.scorer, self.length_penalty, self.early_stopping)

  def _ended(self, state: BeamSearchState, beams: Beams) -> Bool[Array, " B"]:
    return search_ended(beams, self._rules, state.start, state.limit)

  def _require_valid(self, prompt: Int[Array, "B P"], max_new_tokens: int) -> None:
    require_count("num_beams", self.num_beams)
    require_count("max_new_tokens", max_new_tokens)
    if self.target.vocab_size < self._num_top:
      raise InputError(
        f"num_beams is {self.num_beams}, and each step considers {self._num_top} continuations, "
        f"more than the vocabulary's {self.target.vocab_size}; lower it."
      )
    # Scores are float32: the longest text's must neither be rounded to 0 nor overflow.
    longest = self.target.prompt_tokens(prompt)[0].shape[1] + max_new_tokens
    base = longest if self.scorer == "hf" else (5 + longest) / 6
    highest = math.floor(10 * math.log(1e30) / math.log(base)) / 10
    require_number("length_penalty", self.length_penalty, -highest, highest)


@functools.partial(jax.jit, static_argnames="max_new_tokens")
def run_search(
  searcher: BeamSearcher,
  params: Params,
  prompt: Int[Array, "B P"],
  max_new_tokens: int,
  limit: Int[AnyArray, "*batch"] | int | None,
  num_forced: Int[AnyArray, " B"] | None,
) -> BeamResult:
  """Run the search for a batch; see `BeamSearcher.run`."""
  state = searcher.init(params, prompt, max_new_tokens, limit, num_forced)
  return searcher.result(searcher.run_rounds(params, state))


def _where_rows(
  rows: Bool[Array, " B"], new: Shaped[Array, " B *rest"], old: Shaped[Array, " B *rest"]
) -> Shaped[Array, " B *rest"]:
  return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)
