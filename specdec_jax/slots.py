"""Rows that are decoded together, each of which is replaced by the next text when it ends."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from specdec_jax.core.decode import Decoder, DecodeState
from specdec_jax.core.types import DecodeResult, Params
from specdec_jax.data.vocabulary import PAD_ID, padded


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

  Attributes:
    decoder: decoder of all texts.
    params: parameters of target and draft.
    num_slots: number of slots.
    prompt_width: number of tokens of a padded prompt.
    max_new_tokens: upper bound of the limits of all texts.
  """

  def __init__(
    self,
    decoder: Decoder,
    params: Params,
    num_slots: int,
    prompt_width: int,
    max_new_tokens: int,
  ):
    self.decoder, self.params, self.num_slots = decoder, params, num_slots
    self.prompt_width, self.max_new_tokens = prompt_width, max_new_tokens
    self._states: dict[Hashable, DecodeState] = {}

  @property
  def num_free(self) -> int:
    """Number of slots without a text."""
    return self.num_slots - len(self._states)

  def add(self, rows: Sequence[tuple[Hashable, Sequence[int], Key[Array, ""], int]]) -> None:
    """Add texts, at most `num_free`.

    Args:
      rows: for each text, its name, the tokens of its prompt, its random key, and its limit of new
        tokens.
    """
    pad_id = getattr(getattr(self.decoder.target, "config", None), "pad_id", PAD_ID)
    for name, tokens, rng, limit in rows:
      prompt = jnp.asarray(padded([tokens], self.prompt_width, pad_id))
      limits = np.array([limit], np.int32)
      self._states[name] = _init(
        self.decoder, self.params, prompt, rng[None], self.max_new_tokens, limits
      )

  def cancel(self, name: Hashable) -> None:
    """Free the slot of a text."""
    del self._states[name]

  def step(self, max_rounds: int = 1) -> list[Progress]:
    """Run rounds until a text ends, at most `max_rounds`, and return the progress of all texts."""
    for _ in range(max_rounds):
      for name, state in self._states.items():
        self._states[name] = _round(self.decoder, self.params, state)
      if any(state.done.all() for state in self._states.values()):
        break
    found = []
    for name, state in [*self._states.items()]:
      result, done = jax.device_get((_result(self.decoder, state), state.done))
      found.append(Progress(name, result, bool(done[0])))
      if done[0]:
        del self._states[name]
    return found


_init = jax.jit(Decoder.init, static_argnums=4)
_round = jax.jit(Decoder.round)
_result = jax.jit(Decoder.result)
