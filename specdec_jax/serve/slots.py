"""Slots of a server: rows that are decoded together, to which texts are added as they arrive."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from specdec_jax.batching import (
  NO_TEXT,
  Block,
  Rows,
  fill,
  one_row,
  prefill,
  run_rounds,
  size_of_sources,
)
from specdec_jax.core.decode import Decoder
from specdec_jax.core.types import DecodeResult, Params
from specdec_jax.data.vocabulary import padded

# A text's name, the tokens of its prompt, its random key, and its limit of new tokens.
NewText = tuple[Hashable, Sequence[int], Key[Array, ""], int]


class Progress(NamedTuple):
  """State of one text after a call of `Slots.step`.

  Attributes:
    name: name of the text.
    result: the new tokens so far, on the host; a batch of one row.
    done: whether the text has ended. If so, its slot is free.
  """

  name: Hashable
  result: DecodeResult
  done: bool


class Slots:
  """A fixed number of slots, each of which holds one text or none.

  The output of a text depends neither on the other texts nor on its slot. A text that is added
  alone is prefilled alone; several are prefilled together.

  Attributes:
    prompt_width: maximum number of tokens of a prompt.
    max_new_tokens: upper bound of the limits of all texts.
  """

  def __init__(
    self,
    decoder: Decoder,
    params: Params,
    num_slots: int,
    prompt_width: int,
    max_new_tokens: int,
    pad_id: int = 0,
    has_encoder: bool = True,
  ):
    self.decoder, self.params, self.num_slots = decoder, params, num_slots
    self.prompt_width, self.max_new_tokens, self.pad_id = prompt_width, max_new_tokens, pad_id
    self.has_encoder = has_encoder
    self._names: list[Hashable | None] = [None] * num_slots
    self._rows: Rows | None = None  # a slot is done if it has no name

  @property
  def num_free(self) -> int:
    """Number of slots without a text."""
    return self._names.count(None)

  def add(self, texts: Sequence[NewText]) -> None:
    """Add at most `num_free` texts."""
    if not texts:
      return
    alone = len(texts) == 1 and self._rows is not None
    block = self._block(texts, 1 if alone else self.num_slots)
    longest = size_of_sources(max(len(tokens) for _, tokens, *_ in texts))
    width = min(longest, self.prompt_width) if self.has_encoder else None
    rows = _prefill(
      self.decoder, self.params, block, max_new_tokens=self.max_new_tokens, width=width
    )
    self._rows = rows if self._rows is None else _fill(self._rows, rows)
    for name, *_ in texts:  # the lowest free slots are filled first
      self._names[self._names.index(None)] = name

  def _block(self, texts: Sequence[NewText], num_rows: int) -> Block:
    names, prompts, keys, limits = zip(*texts)
    rows = np.resize(np.arange(len(names)), num_rows)
    text = np.where(np.arange(num_rows) < len(names), rows, NO_TEXT)
    prompt = jnp.asarray(padded(prompts, self.prompt_width, self.pad_id)[rows])
    return Block(prompt, jnp.stack(keys)[rows], text, np.array(limits, np.int32)[rows])

  def cancel(self, name: Hashable) -> None:
    """Free the slot of a text."""
    assert self._rows is not None
    slot, state = self._names.index(name), self._rows.state
    self._names[slot] = None
    self._rows = self._rows._replace(state=state._replace(done=state.done.at[slot].set(True)))

  def step(self, max_rounds: int = 1) -> list[Progress]:
    """Run rounds until a text ends, at most `max_rounds`, and return the progress of all texts."""
    assert self._rows is not None
    state = _run_rounds(self.decoder, self.params, self._rows.state, max_rounds)
    self._rows = self._rows._replace(state=state)
    result, done = jax.device_get((_result(self.decoder, state), state.done))
    found = [
      Progress(name, one_row(result, slot), bool(done[slot]))
      for slot, name in enumerate(self._names)
      if name is not None
    ]
    self._names = [None if done[slot] else name for slot, name in enumerate(self._names)]
    return found


_prefill = jax.jit(prefill, static_argnames=("max_new_tokens", "width"))
_fill = jax.jit(lambda slots, block: fill(slots, block)[0], donate_argnums=0)
_run_rounds = jax.jit(run_rounds, donate_argnames="state")
_result = jax.jit(Decoder.result)
