"""What the target has read and may still need: kept from pass to pass, so that nothing is read
twice.

Entries are numbered: 0..M-1 those kept so far, M.. those that a pass reads. They lie in that order
in the slots behind what is committed. What is no entry has -1.

Axes: B batch, w beams, n any nodes, M kept, N read in a pass, E entries (M, or M + N after a pass).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from specdec_jax.beam_search.step import NONE

NOT = -1


class Entries(NamedTuple):
  """Tokens that the target has read behind what is committed.

  Attributes:
    tokens: [B, E]. parents: [B, E], the entry that each follows; -1 for a live text's newest, and
      where there is none.
    continuations: [B, E, 2w], the likeliest tokens after each, in order. sums: [B, E, 2w], the
      target's log-probabilities of the texts that they make.
    hidden: [B, E, H], the target's last state at each.
  """

  tokens: Array
  parents: Array
  continuations: Array
  sums: Array
  hidden: Array


def of(x: Array, nodes: Array) -> Array:
  """x [B, n, ...] at nodes [B, k]."""
  return jnp.take_along_axis(x, nodes.reshape(*nodes.shape, *[1] * (x.ndim - 2)), axis=1)


def nothing(batch: int, count: int, width: int, hidden: Array) -> Entries:
  """Before the first pass; states will be like `hidden` [B, H]."""
  return Entries(
    tokens=jnp.zeros((batch, count), jnp.int32),
    parents=jnp.full((batch, count), NOT),
    continuations=jnp.zeros((batch, count, 2 * width), jnp.int32),
    sums=jnp.zeros((batch, count, 2 * width), jnp.float32),
    hidden=jnp.zeros((batch, count, hidden.shape[-1]), hidden.dtype),
  )


def join(kept: Entries, read: Entries) -> Entries:
  """Those kept, and behind them those that a pass read."""
  return Entries(*(jnp.concatenate(both, axis=1) for both in zip(kept, read)))


def child(entries: Entries, parents: Array, tokens: Array) -> Array:
  """The entry [B, n] of `tokens` [B, n] behind entries `parents` [B, n]."""
  if not entries.tokens.shape[1]:
    return jnp.full(tokens.shape, NOT)
  same = entries.parents[:, None] == parents[..., None]
  same &= (entries.tokens[:, None] == tokens[..., None]) & (parents[..., None] >= 0)
  return jnp.where(same.any(axis=2), same.argmax(axis=2), NOT)


def sum_at(entries: Entries, parents: Array, tokens: Array) -> Array:
  """The log-probability [B, n] of the text that `tokens` [B, n] make behind entries `parents`
  [B, n]; NONE for a token that is not among the likeliest, or behind no entry."""
  if not entries.tokens.shape[1]:
    return jnp.full(tokens.shape, NONE, jnp.float32)
  at = jnp.maximum(parents, 0)
  same = (of(entries.continuations, at) == tokens[..., None]) & (parents[..., None] >= 0)
  return jnp.where(same, of(entries.sums, at), NONE).max(axis=2)


def keep(entries: Entries, live: Array, count: int, depth: int) -> tuple[Entries, Array, Array]:
  """Of entries those that are a live text's newest token, `live` [B, w], or follow one of these,
  the first `count` of them, `depth` away at most.

  Returns:
    The kept, `live` as they are numbered now, and what they were before, [B, count].
  """
  if not count:
    none = jnp.zeros((len(live), 0), jnp.int32)
    return Entries(*(x[:, :0] for x in entries)), jnp.full(live.shape, NOT), none
  numbers = jnp.arange(entries.tokens.shape[1])
  above = jnp.maximum(entries.parents, 0)
  stays = (live[..., None] == numbers).any(axis=1)
  for _ in range(depth):  # who follows comes after whom it follows
    stays |= (entries.parents >= 0) & of(stays, above)
  rank = jnp.cumsum(stays, axis=1) - 1
  number = jnp.where(stays & (rank < count), rank, NOT)  # [B, E]
  is_it = number[:, None] == jnp.arange(count)[:, None]  # [B, count, E]
  source, there = is_it.argmax(axis=2), is_it.any(axis=2)
  kept = Entries(*(of(x, source) for x in entries))
  renumbered = lambda old: jnp.where(old >= 0, of(number, jnp.maximum(old, 0)), NOT)
  parents = jnp.where(there, renumbered(kept.parents), NOT)
  return kept._replace(parents=parents), renumbered(live), source
