"""Continuous batching: when a text of a batch ends, a text that waits takes its row.

`Decoder.run` decodes a batch until its longest text has ended. Here the batch is a fixed number of
slots, and texts that wait are prefilled in blocks. A compiled loop runs rounds. After a round it
exchanges the slots whose text has ended for rows of the block, so that a used block holds results.
A row depends neither on other rows nor on its slot. So each text has the same output as with
`Decoder.run`, except for rounding, in any order of the texts. `Slots` are for texts that arrive
while others are decoded.

Axis letters are those of `core.types`; M is the number of texts. A block has B rows, as many as
there are slots, or one.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int, Key

from specdec_jax.core.context import (
  Encoded,
  Prompt,
  cut_sources,
  prompt_ids,
  without_draft,
)
from specdec_jax.core.counts import require_finite
from specdec_jax.core.decode import Decoder, DecodeState
from specdec_jax.core.sampling import split_keys
from specdec_jax.core.types import AnyArray, DecodeResult, Keys, Params
from specdec_jax.data.vocabulary import padded
from specdec_jax.errors import InputError

NO_TEXT = -1  # index of a row that has no text
# Fields of the state that `Decoder.result` reads.
_OF_RESULTS = "tokens", "length", "prompt_length", "rounds", "num_rounds", "not_finite", "log_probs"
_WINDOW = 16  # number of blocks that are formed together, from texts of similar length


class Rows(NamedTuple):
  """Rows of a batch, and the index of each row's text; NO_TEXT for a row without a text."""

  state: DecodeState
  text: Int[Array, " B"]


class Texts(NamedTuple):
  """Texts to decode.

  Attributes:
    prompt_of: function from indices of texts to their prompts, all padded to one width P.
    lengths: number of tokens of each prompt.
    limit: maximum number of new tokens of each text.
  """

  prompt_of: Callable[[np.ndarray], Prompt]
  lengths: Sequence[int]
  rng: Key[Array, " M"]
  limit: Int[AnyArray, " M"]


class Block(NamedTuple):
  """Texts that are prefilled together.

  `text` has their indices. Rows that only fill up the block repeat a text and have NO_TEXT.
  """

  prompt: Prompt
  rng: Keys
  text: Int[AnyArray, " B"]
  limit: Int[AnyArray, " B"]


def prefill(
  decoder: Decoder, params: Params, block: Block, *, max_new_tokens: int, width: int | None = None
) -> Rows:
  """Return the rows of a block before their first round; rows without a text are done.

  Encoders read `width` tokens of each source; the others are padding. With None they read all, as
  for `Encoded` sources.
  `width` is ignored if a cache of another type than `transformer.Cache` has a shape that depends on
  it.
  """
  sources: Any = block.prompt

  def init(width: int | None) -> DecodeState:
    prompt = cut_sources(sources, width)
    return decoder.init(params, prompt, block.rng, max_new_tokens, block.limit)

  def is_cache(x: Any) -> bool:
    return hasattr(x, "pad_sources")

  def pad(x: Any, full: Any) -> Any:
    return x.pad_sources(full.cross_bias.shape[3]) if is_cache(x) else x

  state = init(width)
  if width is not None and width < sources.shape[1]:
    full = jax.eval_shape(lambda: init(None))
    state = jax.tree.map(pad, state, full, is_leaf=is_cache)._replace(prompt=prompt_ids(sources))
    if [x.shape for x in jax.tree.leaves(state)] != [x.shape for x in jax.tree.leaves(full)]:
      state = init(None)
  text = jnp.asarray(block.text, jnp.int32)
  state = jax.tree.map(_without_weak_type, state._replace(done=text == NO_TEXT))
  return Rows(state, text)


def _without_weak_type(x: Array) -> Array:
  """Return the array with the type that it has after `run`, so that `run` is compiled only once."""
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return x if is_key else lax.convert_element_type(x, x.dtype)


def fill(
  slots: Rows, block: Rows, first: Int[Array, ""] | int = 0
) -> tuple[Rows, Rows, Int[Array, ""]]:
  """Exchange slots that are done for rows of a block, while there are such slots and waiting rows.

  The rows of the block from `first` on wait.

  Returns:
    The slots; the block, in which each used row now has the tokens and the rounds of the slot that
    it was exchanged for, but not its caches; and the index of the first row that still waits.
  """

  def is_free(carry: tuple[Rows, Rows, Array]) -> Array:
    slots, block, row = carry
    return slots.state.done.any() & (row < len(block.text))

  def fill_one(carry: tuple[Rows, Rows, Array]) -> tuple[Rows, Rows, Array]:
    slots, block, row = carry
    return *_exchange(slots, slots.state.done.argmax(), block, row), row + 1

  return lax.while_loop(is_free, fill_one, (slots, block, jnp.asarray(first, jnp.int32)))


def run(
  decoder: Decoder,
  params: Params,
  slots: Rows,
  block: Rows,
  min_active: Int[Array, ""] | int = 1,
  first: Int[Array, ""] | int = 0,
) -> tuple[Rows, Rows]:
  """Run rounds, and `fill` the slots before each of them; return slots and block as `fill` does.

  The loop ends when all rows of the block were used, and fewer than `min_active` slots have a text
  that has not ended.
  """

  def goes_on(carry: tuple[Rows, Rows, Array]) -> Array:
    slots, block, row = carry
    return ((~slots.state.done).sum() >= min_active) | (row < len(block.text))

  def step(carry: tuple[Rows, Rows, Array]) -> tuple[Rows, Rows, Array]:
    slots, block, row = carry
    slots, block, row = fill(slots, block, row)
    return slots._replace(state=decoder.round(params, slots.state)), block, row

  return lax.while_loop(goes_on, step, (slots, block, jnp.asarray(first, jnp.int32)))[:2]


def run_rounds(
  decoder: Decoder, params: Params, state: DecodeState, num_rounds: Int[Array, ""] | int
) -> DecodeState:
  """Run at most `num_rounds` rounds, until a row ends that had not ended before."""
  ended = state.done.sum()

  def goes_on(carry: tuple[DecodeState, Array]) -> Array:
    return (carry[0].done.sum() == ended) & (carry[1] < num_rounds)

  def step(carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
    return decoder.round(params, carry[0]), carry[1] + 1

  return lax.while_loop(goes_on, step, (state, jnp.zeros((), jnp.int32)))[0]


def _exchange(slots: Rows, slot: Array, block: Rows, row: Array) -> tuple[Rows, Rows]:
  """Exchange a row of `slots` for a row of `block`, which receives the fields of results only."""

  def with_row(target: DecodeState, j: Array, source: DecodeState, i: Array, names: Sequence[str]):
    def copy(source: Array, target: Array) -> Array:
      return lax.dynamic_update_index_in_dim(target, lax.dynamic_index_in_dim(source, i), j, 0)

    fields = ({name: getattr(state, name) for name in names} for state in (source, target))
    return target._replace(**jax.tree.map(copy, *fields))

  new_slots = with_row(slots.state, slot, block.state, row, DecodeState._fields)
  used = with_row(block.state, row, slots.state, slot, _OF_RESULTS)
  texts = slots.text.at[slot].set(block.text[row]), block.text.at[row].set(slots.text[slot])
  return Rows(new_slots, texts[0]), Rows(used, texts[1])


jitted_prefill = jax.jit(prefill, static_argnames=("max_new_tokens", "width"))
_run = jax.jit(run, donate_argnames=("slots", "block"))
_fill = jax.jit(lambda slots, block: fill(slots, block)[0], donate_argnums=0)
_run_rounds = jax.jit(run_rounds, donate_argnames="state")
jitted_result = jax.jit(Decoder.result)


def decode_texts(
  decoder: Decoder,
  params: Params,
  texts: Texts,
  *,
  batch_size: int,
  max_new_tokens: int,
  has_encoder: bool,
) -> Iterator[tuple[int, DecodeResult, int]]:
  """Decode more than `batch_size` texts, `batch_size` at a time.

  Texts are prefilled in blocks of `batch_size`. So that encoders read little padding, the texts of
  `_WINDOW` blocks are sorted by length before they are divided into blocks. The host waits for
  results once per block, while the device decodes the next one. `max_new_tokens` is the largest
  limit of a text.

  Yields:
    For each text, in the order in which they end, its index, a result, and its row in the result.
  """
  lengths, window = np.array(texts.lengths), _WINDOW * batch_size
  order = np.concatenate(
    [
      first + np.argsort(-lengths[first : first + window], kind="stable")
      for first in range(0, len(lengths), window)
    ]
  )
  slots: Rows | None = None
  used: Rows | None = None  # the previous block, whose rows hold results
  for start in range(0, len(order), batch_size):
    chosen = order[start : start + batch_size]
    rows = np.resize(chosen, batch_size)
    text = np.where(np.arange(batch_size) < len(chosen), rows, NO_TEXT)
    prompt: Any = jax.tree.map(jnp.asarray, texts.prompt_of(rows))
    block = Block(prompt, texts.rng[rows], text, texts.limit[rows])
    longest = size_of_sources(int(lengths[chosen].max()))
    width = min(longest, prompt.shape[1]) if has_encoder else None
    waiting = jitted_prefill(decoder, params, block, max_new_tokens=max_new_tokens, width=width)
    if slots is None:
      slots = waiting
      continue
    earlier = used
    slots, used = _run(decoder, params, slots, waiting, min_active=batch_size, first=0)
    if earlier is not None:  # the device decodes the next block meanwhile
      yield from _finished(decoder, earlier)
    del earlier  # which frees its caches before the next block is prefilled
  if slots is None or used is None:
    raise InputError(f"There are {len(order)} texts, not more than batch_size, {batch_size}.")
  yield from _finished(decoder, used)
  # No row waits any more. These are the shapes of the loop above, so that one program serves both.
  slots, _ = _run(decoder, params, slots, used, min_active=1, first=batch_size)
  yield from _finished(decoder, slots)


def _finished(decoder: Decoder, rows: Rows) -> Iterator[tuple[int, DecodeResult, int]]:
  result, text = jax.device_get((jitted_result(decoder, rows.state), rows.text))
  require_finite(result._replace(not_finite=np.where(text == NO_TEXT, -1, result.not_finite)))
  for row in np.flatnonzero(text != NO_TEXT).tolist():
    yield int(text[row]), result, row


def by_rows(result: DecodeResult) -> Any:
  """Return the arrays of a result, with the rows as their first axis."""
  rounds = jax.tree.map(lambda x: x.swapaxes(0, 1), result.rounds)
  return result.tokens, result.lengths, rounds, result.not_finite, result.log_probs


def from_rows(arrays: Any) -> DecodeResult:
  """Return the result with the arrays that `by_rows` returns."""
  tokens, lengths, rounds, not_finite, log_probs = arrays
  rounds = jax.tree.map(lambda x: x.swapaxes(0, 1), rounds)
  num_rounds = (rounds.num_emitted > 0).sum(axis=0).max()
  return DecodeResult(tokens, lengths, rounds, num_rounds, not_finite, log_probs)


def one_row(result: DecodeResult, row: int) -> DecodeResult:
  """Return a row of a result, as a batch of one row."""
  return from_rows(jax.tree.map(lambda x: x[[row]], by_rows(result)))


def decode_all(
  decoder: Decoder,
  params: Params,
  prompt: Int[Array, "M P"],
  rng: Key[Array, "*batch"] | Array,
  *,
  batch_size: int,
  max_new_tokens: int,
  limit: Int[AnyArray, ""] | int | None = None,
) -> DecodeResult:
  """Decode M texts with a given number of rows, in one program; see `Decoder.run`.

  `limit` is another limit for all texts, traced. The smaller limit applies.
  """
  num_texts = len(prompt)
  num_blocks = -(-num_texts // batch_size) + 1  # the last one is empty
  rows = jnp.arange(num_blocks * batch_size).reshape(num_blocks, batch_size)
  exists = rows < num_texts
  texts = jnp.where(exists, rows, 0)
  keys = split_keys(rng, num_texts)
  limits = jnp.full(batch_size, max_new_tokens if limit is None else limit, jnp.int32)

  def prefill_rows(texts: Array, exists: Array) -> Rows:
    block = Block(prompt[texts], keys[texts], jnp.where(exists, texts, NO_TEXT), limits)
    return prefill(decoder, params, block, max_new_tokens=max_new_tokens)

  shapes = jax.eval_shape(prefill_rows, texts[0], exists[0])
  empty = jax.tree.map(lambda x: lax.full(x.shape, 0, x.dtype), shapes)
  state = empty.state._replace(done=jnp.ones(batch_size, bool))
  empty = Rows(state, jnp.full(batch_size, NO_TEXT, jnp.int32))

  def results_of(rows: Rows) -> tuple[Any, Array]:
    return by_rows(decoder.result(rows.state)), rows.text

  def step(slots: Rows, rows: tuple[Array, Array]) -> tuple[Rows, tuple[Any, Array]]:
    texts, exists = rows
    waiting = lax.cond(exists.any(), prefill_rows, lambda *_: empty, texts, exists)
    is_last = ~exists.any()
    min_active, first = jnp.where(is_last, 1, batch_size), jnp.where(is_last, batch_size, 0)
    slots, used = run(decoder, params, slots, waiting, min_active, first=first)
    return slots, results_of(used)

  slots, of_blocks = lax.scan(step, empty, (texts, exists))
  of_slots = jax.tree.map(lambda x: x[None], results_of(slots))
  arrays, text = jax.tree.map(lambda *x: jnp.concatenate(x), of_blocks, of_slots)
  text = text.reshape(-1)
  place = jnp.where(text == NO_TEXT, num_texts, text)
  row_of = jnp.zeros(num_texts, jnp.int32).at[place].set(jnp.arange(len(text)), mode="drop")
  return from_rows(jax.tree.map(lambda x: lax.collapse(x, 0, 2)[row_of], arrays))


def size_of_sources(length: int) -> int:
  """Return `length`, rounded up to 8, 16, 24, 32, 48, 64, ...: 2^k, or 1.5 * 2^k from 24 on."""
  power = 8
  while power < length:
    if power > 8 and power * 3 // 2 >= length:
      return power * 3 // 2
    power *= 2
  return power


@dataclasses.dataclass(eq=False)
class Text:
  """Text to decode in `Slots`.

  Attributes:
    rng: random key of the text.
    limit: maximum number of new tokens.
    report: function that the engine's thread calls with the result so far, a batch of one row, and
      with whether it is final; or with an exception and True.
    needs_rounds: whether `report` must be called after each round, not only after several.
  """

  decoder: Decoder
  prompt: Any
  rng: Any
  limit: int
  report: Callable[[DecodeResult | Exception, bool], None]
  needs_rounds: bool = False

  @property
  def group(self) -> tuple[Decoder, Any]:
    """Decoder and shape of the tokens of an `Encoded` prompt, equal for all texts of `Slots`."""
    prompt = without_draft(self.prompt)
    return self.decoder, prompt.tokens.shape if isinstance(prompt, Encoded) else None


PromptsFn = Callable[[Sequence[Any]], tuple[Any, int | None]]


def token_prompts(width: int, pad_id: int = 0, has_encoder: bool = True) -> PromptsFn:
  """Return the function `prompts` of `Slots` for lists of at most `width` tokens."""

  def prompts(rows: Sequence[Sequence[int]]) -> tuple[Array, int | None]:
    longest = min(size_of_sources(max(map(len, rows))), width)
    return jnp.asarray(padded(rows, width, pad_id)), longest if has_encoder else None

  return prompts


class Slots:
  """A fixed number of slots, each of which holds one text or none; texts are added as they arrive.

  The output of a text depends neither on the other texts nor on its slot. A text that is added
  alone is prefilled alone; several are prefilled together.

  Args:
    max_new_tokens: maximum of the limits of all texts.
    prompts: function from the prompts of texts to the prompts of a block, and the `width` of
      `prefill`. Blocks of all calls have the same shape but for the number of rows.
  """

  def __init__(
    self,
    decoder: Decoder,
    params: Params,
    batch_size: int,
    max_new_tokens: int,
    prompts: PromptsFn,
  ):
    self.decoder, self.params, self.batch_size = decoder, params, batch_size
    self.max_new_tokens, self._prompts = max_new_tokens, prompts
    self._texts: list[Text | None] = [None] * batch_size
    self._rows: Rows | None = None  # a slot is done if it has no text

  @property
  def num_free(self) -> int:
    """Number of slots without a text."""
    return self._texts.count(None)

  def add(self, texts: Sequence[Text]) -> None:
    """Add at least one text, and at most `num_free`."""
    alone = len(texts) == 1 and self._rows is not None
    num_rows = 1 if alone else self.batch_size
    index = [i % len(texts) for i in range(num_rows)]
    prompt, width = self._prompts([texts[i].prompt for i in index])
    block = Block(
      prompt,
      jnp.stack([texts[i].rng for i in index]),
      np.array([i if row < len(texts) else NO_TEXT for row, i in enumerate(index)]),
      np.array([texts[i].limit for i in index], np.int32),
    )
    rows = jitted_prefill(
      self.decoder, self.params, block, max_new_tokens=self.max_new_tokens, width=width
    )
    self._rows = rows if self._rows is None else _fill(self._rows, rows)
    for text in texts:  # the lowest free slots are filled first
      self._texts[self._texts.index(None)] = text

  def cancel(self, text: Text) -> None:
    """Free the slot of a text."""
    assert self._rows is not None
    slot, state = self._texts.index(text), self._rows.state
    self._texts[slot] = None
    self._rows = self._rows._replace(state=state._replace(done=state.done.at[slot].set(True)))

  def step(self, max_rounds: int = 1) -> list[Text]:
    """Run at most `max_rounds` rounds, until a text ends, and report the results of all texts.

    Return the texts that have ended. Their slots are free.
    """
    assert self._rows is not None
    state = _run_rounds(self.decoder, self.params, self._rows.state, max_rounds)
    self._rows = self._rows._replace(state=state)
    result, done = jax.device_get((jitted_result(self.decoder, state), state.done))
    texts = [(slot, text) for slot, text in enumerate(self._texts) if text is not None]
    self._texts = [None if done[slot] else text for slot, text in enumerate(self._texts)]
    for slot, text in texts:
      text.report(one_row(result, slot), bool(done[slot]))
    return [text for slot, text in texts if done[slot]]
