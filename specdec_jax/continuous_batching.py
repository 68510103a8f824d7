"""Continuous batching: when a text of a batch ends, a text that waits takes its row.

`Decoder.run` decodes a batch until its longest text has ended. Here the batch is a fixed number of
slots, and texts that wait are prefilled in blocks. A compiled loop runs rounds. After a round it
exchanges the slots whose text has ended for rows of the block, so that a used block holds results.
A row depends neither on other rows nor on its slot. So each text has the same output as with
`Decoder.run`, except for rounding, in any order of the texts.

Axis letters are those of `core.types`; M is the number of texts, and W that of rows in a block.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int, Key

from specdec_jax.core.decode import Decoder, DecodeState
from specdec_jax.core.sampling import split_keys
from specdec_jax.core.types import AnyArray, DecodeResult, Params
from specdec_jax.counts import require_finite

NO_TEXT = -1  # index of a row that has no text
_NO_LIMIT = np.iinfo(np.int32).max


class Rows(NamedTuple):
  """Rows of a batch, and the text that each of them decodes.

  Attributes:
    state: state of the rows.
    index: index of the text of each row; NO_TEXT if there is none, or none any more.
  """

  state: DecodeState
  index: Int[Array, " W"]


class Block(NamedTuple):
  """Texts to decode; a block with fewer texts than rows is filled up with copies of its first one.

  Attributes:
    prompt: padded prompts.
    rng: key of each text.
    index: index of each text; NO_TEXT for copies.
    limit: maximum number of new tokens of each text.
  """

  prompt: Int[AnyArray, "W P"]
  rng: Key[Array, " W"]
  index: Int[AnyArray, " W"]
  limit: Int[AnyArray, " W"]


def blocks(
  prompt_of: Callable[[np.ndarray], Array],
  rng: Key[Array, " M"],
  limit: Int[AnyArray, " M"],
  num_rows: int,
  index: Sequence[int] | None = None,
) -> Iterator[Block]:
  """Yield blocks of `num_rows` rows.

  Args:
    prompt_of: function that returns the padded prompts of the texts at given positions, 0 to M - 1.
    rng: see `Block`.
    limit: see `Block`.
    num_rows: W.
    index: index of each text in results; its position by default.
  """
  numbers = np.arange(len(limit)) if index is None else np.asarray(index)
  for first in range(0, len(numbers), num_rows):
    rows = np.arange(first, first + num_rows)
    exists = rows < len(numbers)
    rows = np.where(exists, rows, first)
    yield Block(prompt_of(rows), rng[rows], np.where(exists, numbers[rows], NO_TEXT), limit[rows])


def prefill(decoder: Decoder, params: Params, block: Block, *, max_new_tokens: int) -> Rows:
  """Return the rows of a block before their first round; rows without a text are done.

  The arguments and errors are those of `Decoder.init`.
  """
  state = decoder.init(params, block.prompt, block.rng, max_new_tokens, block.limit)
  index = jnp.asarray(block.index, jnp.int32)
  return Rows(state._replace(done=index == NO_TEXT), index)


def run(
  decoder: Decoder,
  params: Params,
  slots: Rows,
  block: Rows,
  min_active: Int[Array, ""] | int = 1,
  max_rounds: Int[Array, ""] | int = _NO_LIMIT,
  first: Int[Array, ""] | int = 0,
) -> tuple[Rows, Rows]:
  """Run rounds, and exchange slots that are done for rows of a block.

  Args:
    decoder: the decoder.
    params: parameters of target and draft.
    slots: rows that are decoded.
    block: rows that wait.
    min_active: the loop stops when fewer slots than this have a text, and no row waits.
    max_rounds: maximum number of rounds.
    first: index of the first row of the block that waits.

  Returns:
    The slots; and the block. Each row that waited and was used now has the tokens and rounds of the
    slot that it was exchanged for, but not its caches.
  """
  num_rows = len(block.index)

  def is_free(carry: tuple[Rows, Rows, Array]) -> Array:
    slots, _, row = carry
    return slots.state.done.any() & (row < num_rows)

  def fill_one(carry: tuple[Rows, Rows, Array]) -> tuple[Rows, Rows, Array]:
    slots, block, row = carry
    return *_exchange(slots, slots.state.done.argmax(), block, row), row + 1

  def goes_on(carry: tuple[tuple[Rows, Rows, Array], Array]) -> Array:
    (slots, *_), num_rounds = carry
    return ((~slots.state.done).sum() >= min_active) & (num_rounds < max_rounds)

  def step(carry: tuple[tuple[Rows, Rows, Array], Array]) -> tuple[Any, Array]:
    (slots, block, row), num_rounds = carry
    slots = slots._replace(state=decoder.round(params, slots.state))
    return lax.while_loop(is_free, fill_one, (slots, block, row)), num_rounds + 1

  filled = lax.while_loop(is_free, fill_one, (slots, block, jnp.asarray(first, jnp.int32)))
  (slots, block, _), _ = lax.while_loop(goes_on, step, (filled, jnp.zeros((), jnp.int32)))
  return slots, block


def _exchange(slots: Rows, slot: Array, block: Rows, row: Array) -> tuple[Rows, Rows]:
  """Exchange a row of `slots` for a row of `block`, to which no caches are copied."""
  axes = jax.tree.map(lambda _: 0, slots)
  state = axes.state._replace(rounds=jax.tree.map(lambda _: 1, axes.state.rounds))
  axes = axes._replace(state=state)

  def copied(source: Rows, i: Array, target: Rows, j: Array) -> Rows:
    def copy(axis: int, source: Array, target: Array) -> Array:
      one = lax.dynamic_index_in_dim(source, i, axis)
      return lax.dynamic_update_index_in_dim(target, one, j, axis)

    return jax.tree.map(copy, axes, source, target)

  used = copied(slots, slot, block, row).state
  caches = {name: getattr(block.state, name) for name in ("target_cache", "draft_state")}
  index = block.index.at[row].set(slots.index[slot])
  return copied(block, row, slots, slot), Rows(used._replace(**caches), index)


def empty_rows(decoder: Decoder, params: Params, block: Block, *, max_new_tokens: int) -> Rows:
  """Return rows of zeros without texts, with the shapes of the rows of a block."""
  shapes = jax.eval_shape(
    functools.partial(prefill, max_new_tokens=max_new_tokens), decoder, params, block
  )
  zeros = jax.tree.map(lambda x: lax.full(x.shape, 0, x.dtype), shapes)
  state = zeros.state._replace(done=jnp.ones_like(zeros.state.done))
  return Rows(state, jnp.full_like(zeros.index, NO_TEXT))


def decode_block(
  decoder: Decoder, params: Params, slots: Rows, block: Block, *, max_new_tokens: int
) -> tuple[Rows, DecodeResult, Int[Array, " W"]]:
  """Decode until the texts of a block are in slots and a slot is free, or none is left to decode.

  A block without texts ends the decoding: all slots are decoded to their end, and the result is
  empty. The results of these slots are in the slots.

  Returns:
    The slots; the results of rows whose text has ended; and the index of the text of each result.
  """

  def prefilled() -> Rows:
    return prefill(decoder, params, block, max_new_tokens=max_new_tokens)

  has_texts = (jnp.asarray(block.index) != NO_TEXT).any()
  empty = functools.partial(empty_rows, decoder, params, block, max_new_tokens=max_new_tokens)
  waiting = lax.cond(has_texts, prefilled, empty)
  min_active = jnp.where(has_texts, len(slots.index), 1)
  first = jnp.where(has_texts, 0, len(block.index))
  slots, used = run(decoder, params, slots, waiting, min_active, first=first)
  return slots, decoder.result(used.state), used.index


_decode_block = jax.jit(decode_block, static_argnames="max_new_tokens", donate_argnames="slots")
_empty_rows = jax.jit(empty_rows, static_argnames="max_new_tokens")
_result = jax.jit(Decoder.result)


def decode_blocks(
  decoder: Decoder, params: Params, blocks: Iterable[Block], *, max_new_tokens: int
) -> Iterator[tuple[int, DecodeResult, int]]:
  """Decode texts with as many slots as a block has rows.

  The host waits for results once per block, while the device decodes the next block.

  Args:
    decoder: the decoder.
    params: parameters of target and draft.
    blocks: the texts, in blocks of one shape.
    max_new_tokens: maximum number of new tokens of each text, EOS included.

  Yields:
    For each text, in the order in which they end, its index, a result, and its row in the result.

  Raises:
    InputError: a text cannot be decoded; see `require_finite`.
  """
  decode = functools.partial(_decode_block, decoder, params, max_new_tokens=max_new_tokens)
  slots, block, earlier = None, None, None
  for block in blocks:
    if slots is None:
      slots = _empty_rows(decoder, params, block, max_new_tokens=max_new_tokens)
    slots, *finished = decode(slots, block)
    if earlier:
      yield from _finished(*earlier)
    earlier = finished
  if slots is not None and block is not None and earlier:
    slots, *_ = decode(slots, block._replace(index=np.full_like(block.index, NO_TEXT)))
    yield from _finished(*earlier)
    yield from _finished(_result(decoder, slots.state), slots.index)


def _finished(result: DecodeResult, index: Array) -> Iterator[tuple[int, DecodeResult, int]]:
  """Yield the index, the result and the row of each text of a result."""
  result, index = jax.device_get((result, index))
  ended = index != NO_TEXT
  require_finite(result._replace(not_finite=np.where(ended, result.not_finite, -1)))
  for row in np.flatnonzero(ended).tolist():
    yield int(index[row]), result, row


def decode_all(
  decoder: Decoder,
  params: Params,
  prompt: Int[Array, "M P"],
  rng: Key[Array, "*batch"] | Array,
  *,
  num_slots: int,
  max_new_tokens: int,
) -> DecodeResult:
  """Decode M texts with a given number of slots, in one program.

  See `Decoder.run` for the arguments. The result has the order of the texts.
  """
  num_texts = len(prompt)
  rows = jnp.arange(-(-num_texts // num_slots) * num_slots + num_slots)  # the last block is empty
  rows = rows.reshape(-1, num_slots)
  exists = rows < num_texts
  texts = jnp.where(exists, rows, 0)
  keys = split_keys(rng, num_texts)
  limit = jnp.full(num_slots, max_new_tokens)

  def block_of(texts: Array, exists: Array) -> Block:
    return Block(prompt[texts], keys[texts], jnp.where(exists, texts, NO_TEXT), limit)

  def step(slots: Rows, rows: tuple[Array, Array]) -> tuple[Rows, tuple[DecodeResult, Array]]:
    block = block_of(*rows)
    slots, *finished = decode_block(decoder, params, slots, block, max_new_tokens=max_new_tokens)
    return slots, tuple(finished)

  first = block_of(texts[0], exists[0])
  slots = empty_rows(decoder, params, first, max_new_tokens=max_new_tokens)
  slots, (results, index) = lax.scan(step, slots, (texts, exists))
  last = decoder.result(slots.state)

  # Rows of all blocks, then those of the slots.
  index = jnp.concatenate([index.reshape(-1), slots.index])
  place = jnp.where(index == NO_TEXT, num_texts, index)
  row_of = jnp.zeros(num_texts, jnp.int32).at[place].set(jnp.arange(len(index)), mode="drop")

  def in_order(of_blocks: Array, of_slots: Array) -> Array:
    return jnp.concatenate([lax.collapse(of_blocks, 0, 2), of_slots])[row_of]

  def rounds_in_order(of_blocks: Array, of_slots: Array) -> Array:
    return jnp.swapaxes(in_order(of_blocks.swapaxes(1, 2), of_slots.swapaxes(0, 1)), 0, 1)

  rounds = jax.tree.map(rounds_in_order, results.rounds, last.rounds)
  num_rounds = jnp.maximum(results.num_rounds.max(), last.num_rounds)
  results, last = (x._replace(rounds=(), num_rounds=()) for x in (results, last))
  return jax.tree.map(in_order, results, last)._replace(rounds=rounds, num_rounds=num_rounds)
