"""Beam search by rounds of propose, extend, replay, in fixed shapes: plain search guesses nothing.

A pass of the target reads the newest token of each live beam and a forest of guesses behind them,
less what it has read in passes before. Its own log-probabilities then replay steps of the search,
as long as all beams that live after one are among what was read; the step at which one is not
stands too, since what it is made of was read. So a pass makes 1 to D + 1 steps, those of plain
search; and what follows the beams that then live is kept, for the next to begin with.

Axes: B batch, w beams, G guesses, K = w + G nodes, D depth, N read in a pass, M = N entries kept, T
slots of a cache, L tokens of a text, V vocabulary.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.beam_search.drafts import BeamDraft, NullBeamDraft
from specdec_jax.beam_search.entries import Entries, child, join, keep, nothing, of
from specdec_jax.beam_search.forest import BeamContext, entries_read, of_round
from specdec_jax.beam_search.layout import joined, move, own_slots, places, slot_of_newest
from specdec_jax.beam_search.step import Beams, begin, best_first, ended, step
from specdec_jax.core.arrays import gather_or_zero
from specdec_jax.core.types import Context, DecodeResult, Model, Rounds
from specdec_jax.errors import InputError, require_count, require_number
from specdec_jax.memory import require_memory


class Found(NamedTuple):
  """What a search found, the best first.

  Attributes:
    tokens: [B, w, T], new tokens with EOS, 0 past the end.
    lengths: [B, w]; 0 where fewer than w texts ended.
    scores: [B, w], log-probabilities divided by the length penalty; of a row none of whose texts
      ended before the limit, log-probabilities.
    steps: [R, B], of each pass of the target; 0 where a row was over.
    num_rounds: [], passes.
    not_finite: [B], the step that was not made because a logit was NaN or infinite; -1 if all were
      finite.
  """

  tokens: Array
  lengths: Array
  scores: Array
  steps: Array
  num_rounds: Array
  not_finite: Array


class Live(NamedTuple):
  """What a step changes; fields without a word here as in `BeamContext`.

  Attributes:
    follows: [B, w], the entries that the newest tokens follow.
  """

  beams: Beams
  newest: Array
  seen: Array
  before: Array
  seen_before: Array
  hidden: Array
  follows: Array


class State(NamedTuple):
  """What a round begins with.

  Attributes:
    prompt: [B, P]. prompt_length: [B], committed tokens before the first round.
    limit: [B], the length that no text exceeds. done: [B]. live: see `Live`.
    kept, known: as in `BeamContext`.
    target: its cache. draft: its state.
    steps, num_rounds, not_finite: as in `Found`.
  """

  prompt: Array
  prompt_length: Array
  limit: Array
  done: Array
  live: Live
  kept: Entries
  known: Array
  target: Any
  draft: Any
  steps: Array
  num_rounds: Array
  not_finite: Array


def best(found: Found) -> DecodeResult:
  """The best text of each row, as decoding gives one; a round emits the steps of a pass, which may
  be more than the text has tokens, since a search goes on behind its best."""
  none = jnp.zeros((*found.steps.shape, 0), jnp.int32)
  made = jnp.maximum(found.steps - 1, 0)
  rounds = Rounds(none, made, jnp.zeros_like(found.steps), found.steps)
  first = found.tokens[:, 0], found.lengths[:, 0]
  return DecodeResult(*first, rounds, found.num_rounds, found.not_finite)


@functools.partial(
  jax.jit, static_argnames=("target", "width", "max_new_tokens", "length_penalty", "eos_id")
)
def beam_search(
  target: Model,
  params: Any,
  prompt: Array,
  *,
  width: int,
  max_new_tokens: int,
  length_penalty: float = 0.6,
  eos_id: int | None = None,
) -> Found:
  """The likeliest texts, a step a pass of the target, in one jitted program: the baseline.

  Arguments and result as in `speculative_beam_search`.
  """
  how = width, max_new_tokens, length_penalty, eos_id
  return _search(target, NullBeamDraft(), params, (), prompt, *how)


@functools.partial(
  jax.jit,
  static_argnames=("target", "draft", "width", "max_new_tokens", "length_penalty", "eos_id"),
)
def speculative_beam_search(
  target: Model,
  draft: BeamDraft,
  target_params: Any,
  draft_params: Any,
  prompt: Array,
  *,
  width: int,
  max_new_tokens: int,
  length_penalty: float = 0.6,
  eos_id: int | None = None,
) -> Found:
  """The same texts, order and scores, in fewer passes of the target (A.4), in one jitted program.

  Scores differ from plain search's by the rounding of sums in another order, and so may the order
  of texts that are equally likely to that precision.

  Args:
    target: M_p.
    draft: guesses how beams go on.
    target_params: of the target.
    draft_params: of the draft.
    prompt: [B, P], padded; a row's texts do not depend on its neighbours.
    width: w, beams of a row, and texts found for it.
    max_new_tokens: limit for each text, EOS counted.
    length_penalty: alpha in ((5 + length) / 6) ** alpha, by which log-probabilities are divided; 0
      for none (Wu et al., 2016, equation 14). As in t5x, the tokens of a decoder-only model's
      prompt count. Not negative, and divisors stay below 1e30.
    eos_id: ends a text; None for the target's.

  Raises:
    InputError: width or max_new_tokens is no whole number from 1, there are fewer than two tokens a
      beam, or it is more than memory holds.
  """
  how = width, max_new_tokens, length_penalty, eos_id
  return _search(target, draft, target_params, draft_params, prompt, *how)


def _search(
  target, draft, target_params, draft_params, prompt, width, limit, length_penalty, eos_id
) -> Found:
  require_count("beams", width)
  require_count("max_new_tokens", limit)
  if target.vocab_size < 2 * width:
    raise InputError(
      f"beams is {width}, and each step looks at twice as many continuations of a beam, more than "
      f"the vocabulary's {target.vocab_size}; lower it."
    )
  # Scores are float32: the longest text's must not be rounded to 0.
  longest = target.prompt_tokens(prompt)[0].shape[1] + limit
  most = math.floor(10 * math.log(1e30) / math.log((5 + longest) / 6)) / 10
  length_penalty = require_number("length_penalty", length_penalty, 0, most)
  eos_id = target.eos_id if eos_id is None else eos_id
  models = target, draft, target_params, draft_params
  a_round = functools.partial(one_round, *models, length_penalty, eos_id)
  s = lax.while_loop(lambda s: ~s.done.all(), a_round, start(*models, prompt, width, limit))
  texts, scores, there = best_first(s.live.beams)
  new = s.prompt_length[:, None] + jnp.arange(limit)
  tokens = jnp.take_along_axis(texts, new[:, None], axis=2)
  is_eos = tokens == eos_id
  unended = (s.live.beams.length - s.prompt_length)[:, None]
  lengths = there * jnp.where(is_eos.any(axis=2), is_eos.argmax(axis=2) + 1, unended)
  return Found(tokens, lengths, scores, s.steps, s.num_rounds, s.not_finite)


def start(target, draft: BeamDraft, target_params, draft_params, prompt, width, limit) -> State:
  """Before the first round: both models have read the prompt. Arguments as in
  `speculative_beam_search`, `limit` for max_new_tokens."""
  batch, (first, length) = len(prompt), target.prompt_tokens(prompt)
  num_guesses, num_nodes = draft.num_guesses(width), draft.num_nodes(width)
  num_kept = num_nodes if num_guesses else 0  # plain search has read nothing ahead
  behind = max(width + num_guesses, num_kept + num_nodes, width * (draft.depth + 1) + num_kept)
  num_slots = first.shape[1] + width * (limit + 1) + behind
  hidden, cache = target.prefill(target_params, prompt, num_slots)
  slot, newest_hidden = slot_of_newest(length, length, width), gather_or_zero(hidden, length - 2)
  tokens = jnp.pad(first, ((0, 0), (0, num_slots - first.shape[1])))
  context = Context(prompt, tokens, length, cache, newest_hidden)
  each = lambda x: jnp.repeat(x[:, None], width, axis=1)
  live = Live(
    beams=begin(jnp.pad(first, ((0, 0), (0, limit))), length, width),
    newest=each(jnp.take_along_axis(first, length[:, None] - 1, axis=1)[:, 0]),
    seen=each(jnp.arange(num_slots) < length[:, None] - 1),
    before=jnp.zeros((batch, width), jnp.int32),
    seen_before=own_slots(slot - width, width, num_slots),
    hidden=each(newest_hidden),
    follows=jnp.zeros((batch, width), jnp.int32),
  )
  state = State(
    prompt=prompt,
    prompt_length=length,
    limit=length + limit,
    done=jnp.zeros(batch, bool),
    live=live,
    kept=nothing(batch, num_kept, width, newest_hidden),
    known=jnp.full((batch, width), -1),
    target=target.commit(cache, slot),
    draft=draft.init(draft_params, context, hidden),
    steps=jnp.zeros((limit, batch), jnp.int32),
    num_rounds=jnp.zeros((), jnp.int32),
    not_finite=jnp.full(batch, -1, jnp.int32),
  )
  what = f"a batch of {batch} with {width} beams, max_new_tokens {limit} and {num_nodes} nodes"
  of_round = jax.ShapeDtypeStruct((batch, num_nodes, target.vocab_size), jnp.float32)
  require_memory(what, (target_params, draft_params, state, of_round))
  return state


def one_round(
  target: Model,
  draft: BeamDraft,
  target_params,
  draft_params,
  length_penalty: float,
  eos_id: int,
  s: State,
) -> State:
  """One pass of the target, and the steps that it is good for."""
  live, num_kept = s.live, s.kept.tokens.shape[1]
  width, num_slots = live.newest.shape[1], live.seen.shape[2]
  slot_of = lambda beams: slot_of_newest(beams.length, s.prompt_length, width)
  context = BeamContext(
    prompt=s.prompt,
    tokens=live.beams.tokens,
    length=live.beams.length,
    log_probs=live.beams.log_probs,
    newest=live.newest,
    seen=live.seen,
    before=live.before,
    seen_before=live.seen_before,
    slot=slot_of(live.beams),
    places=places(s.prompt_length, width, num_slots),
    target_cache=s.target,
    hidden=live.hidden,
    kept=s.kept,
    known=s.known,
    eos_id=eos_id,
  )

  # Propose, and extend: one target pass over the newest tokens and guesses that it has not read.
  forest, draft_state = draft.propose(draft_params, s.draft, context)
  read = of_round(context, forest, draft.depth, draft.num_nodes(width))
  behind_kept = target.commit(s.target, context.slot + num_kept)
  logits, hidden, cache = target.extend(target_params, behind_kept, read.tokens, read.placed)
  entries = join(s.kept, entries_read(logits, hidden, read, context, draft.depth))

  # Replay: steps of plain search, from level to level while all that live have been read.
  finite = jnp.isfinite(logits.max(axis=-1)).all(axis=1)
  active = ~s.done & finite
  nodes = jnp.broadcast_to(jnp.arange(width), live.newest.shape)
  path = [nodes]
  for level in range(draft.depth + 1):
    beams, at = live.beams, of(read.entries, nodes)
    more = of(entries.continuations, at), of(entries.sums, at)
    after, chosen = step(beams, *more, length_penalty, eos_id)
    seen = live.seen | own_slots(slot_of(beams), width, num_slots)
    follows = of(at, chosen)
    after = Live(
      beams=after,
      newest=jnp.take_along_axis(after.tokens, beams.length[:, None, None], axis=2)[..., 0],
      seen=of(seen, chosen),
      before=live.newest,
      seen_before=seen,
      hidden=of(entries.hidden, follows),
      follows=follows,
    )
    live = jax.tree.map(functools.partial(_where, active), after, live)
    if level < draft.depth:
      same = live.newest[..., None] == forest.tokens[:, None]
      same &= of(nodes, chosen)[..., None] == forest.parents[:, None]
      same &= (read.entries[:, width:] >= 0)[:, None]  # [B, w, G]
      nodes = width + same.argmax(axis=2)
      path.append(nodes)
      active &= same.any(axis=2).all(axis=1) & ~ended(live.beams, s.limit, length_penalty)

  # Commit: what came to stand lies where plain search would have put it, and what may yet behind.
  stood = jnp.concatenate(path, axis=1)
  made, slot = live.beams.length - context.length, slot_of(live.beams)
  known = child(entries, live.follows, live.newest)
  kept, known, were = keep(entries, known, num_kept, draft.depth)
  if num_kept:  # else the newest tokens lie where they are to
    path = joined(of(read.entries, stood), made * width, were)
    cache = move(target, target.commit(cache, context.slot), path)
  return s._replace(
    done=s.done | ended(live.beams, s.limit, length_penalty) | ~finite,
    live=live,
    kept=kept,
    known=known,
    target=target.commit(cache, slot),
    draft=draft.observe(draft_state, context, stood[:, width:], slot),
    steps=s.steps.at[s.num_rounds].set(made),
    num_rounds=s.num_rounds + 1,
    not_finite=jnp.where(s.done | finite, s.not_finite, context.length - s.prompt_length),
  )


def _where(rows: Array, new: Array, old: Array) -> Array:
  """Rows [B] of the one, and the others of the other, [B, ...]."""
  return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)
