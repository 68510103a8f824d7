"""Slots of a server: rows that are decoded together, to which texts are added as they arrive."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.batching import (
  NO_TEXT,
  Block,
  Rows,
  fill,
  jitted_prefill,
  jitted_result,
  one_row,
  run_rounds,
  size_of_sources,
)
from specdec_jax.core.decode import Decoder
from specdec_jax.core.types import DecodeResult, Params
from specdec_jax.data.vocabulary import padded


@dataclasses.dataclass(eq=False)
class Text:
  """Text to decode.

  Attributes:
    rng: random key of the text.
    limit: maximum number of new tokens.
    report: function that the engine's thread calls with the result so far, a batch of one row, and
      with whether it is final; or with an exception and True.
    needs_rounds: whether `report` must be called after each round, not only after several.
  """

  decoder: Decoder
  prompt: Sequence[int]
  rng: Any
  limit: int
  report: Callable[[DecodeResult | Exception, bool], None]
  needs_rounds: bool = False


class Slots:
  """A fixed number of slots, each of which holds one text or none.

  The output of a text depends neither on the other texts nor on its slot. A text that is added
  alone is prefilled alone; several are prefilled together. `prompt_width` is the maximum number of
  tokens of a prompt, and `max_new_tokens` that of the limits of all texts.
  """

  def __init__(
    self,
    decoder: Decoder,
    params: Params,
    batch_size: int,
    prompt_width: int,
    max_new_tokens: int,
    pad_id: int = 0,
    has_encoder: bool = True,
  ):
    self.decoder, self.params, self.batch_size = decoder, params, batch_size
    self.prompt_width, self.max_new_tokens, self.pad_id = prompt_width, max_new_tokens, pad_id
    self.has_encoder = has_encoder
    self._texts: list[Text | None] = [None] * batch_size
    self._rows: Rows | None = None  # a slot is done if it has no text

  @property
  def num_free(self) -> int:
    """Number of slots without a text."""
    return self._texts.count(None)

  def add(self, texts: Sequence[Text]) -> None:
    """Add at least one text, and at most `num_free`."""
    alone = len(texts) == 1 and self._rows is not None
    block = self._block(texts, 1 if alone else self.batch_size)
    longest = size_of_sources(max(len(text.prompt) for text in texts))
    width = min(longest, self.prompt_width) if self.has_encoder else None
    rows = jitted_prefill(
      self.decoder, self.params, block, max_new_tokens=self.max_new_tokens, width=width
    )
    self._rows = rows if self._rows is None else _fill(self._rows, rows)
    for text in texts:  # the lowest free slots are filled first
      self._texts[self._texts.index(None)] = text

  def _block(self, texts: Sequence[Text], num_rows: int) -> Block:
    rows = np.resize(np.arange(len(texts)), num_rows)
    text = np.where(np.arange(num_rows) < len(texts), rows, NO_TEXT)
    prompts, limits = [text.prompt for text in texts], [text.limit for text in texts]
    prompt = jnp.asarray(padded(prompts, self.prompt_width, self.pad_id)[rows])
    keys = jnp.stack([text.rng for text in texts])[rows]
    return Block(prompt, keys, text, np.array(limits, np.int32)[rows])

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


_fill = jax.jit(lambda slots, block: fill(slots, block)[0], donate_argnums=0)
_run_rounds = jax.jit(run_rounds, donate_argnames="state")
