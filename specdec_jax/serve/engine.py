"""Thread that decodes texts from a queue. All texts with the same decoder are decoded together."""

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from specdec_jax.batching import Slots, Text
from specdec_jax.core.decode import Decoder
from specdec_jax.errors import InputError, require_count

_MAX_ROUNDS = 4  # rounds per step if no text of a group needs the result of each round
_SECONDS_TO_STOP = 5.0


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of requests and of the engine.

  Attributes:
    batch_size: number of texts with the same settings that are decoded together.
    max_groups: number of different settings whose texts are decoded at the same time, in turns.
    queue_size: number of texts that may wait for a slot. A request for more gets status 429.
    max_new_tokens: largest `max_tokens` of a request.
    max_outputs: largest number of outputs of a request: n for each prompt.
    max_body_bytes: largest size of the body of a request for completions.
    max_audio_bytes: the same for a recording.
  """

  batch_size: int = 8
  max_groups: int = 4
  queue_size: int = 256
  max_new_tokens: int = 256
  max_outputs: int = 64
  max_body_bytes: int = 1 << 20
  max_audio_bytes: int = 25 << 20

  def __post_init__(self):
    for name, value in vars(self).items():
      require_count(name, value)
    if self.max_outputs > self.queue_size:
      raise InputError(
        f"max_outputs is {self.max_outputs} and queue_size {self.queue_size}, so that the outputs "
        "of one request may not fit into the queue; give a queue_size of at least max_outputs."
      )


class EngineStopped(Exception):
  """Exception for texts that the engine does not decode because it is being stopped."""


@dataclasses.dataclass(eq=False)
class _Group:
  """Texts with the same `Text.group`."""

  slots: Slots | None = None  # None before the first turn
  texts: set[Text] = dataclasses.field(default_factory=set)  # including those in `added`
  added: list[Text] = dataclasses.field(default_factory=list)  # not in the slots yet
  cancelled: list[Text] = dataclasses.field(default_factory=list)  # still in the slots


class Engine:
  """Bounded queue of texts, and the thread that decodes them.

  The groups take turns, one step each. Within a group, texts start in the order of the queue. If a
  text needs a further group and none is idle, the texts behind it wait too, so that it is never
  overtaken for long. An idle group is kept until another group needs its place.
  """

  def __init__(self, new_slots: Callable[[Decoder], Slots], limits: Limits):
    self._new_slots, self._limits = new_slots, limits
    self._changed = threading.Condition()
    self._waiting: dict[Text, None] = {}  # in the order of arrival
    self._cancelled: set[Text] = set()
    self._groups: dict[tuple[Decoder, Any], _Group] = {}  # the least recently used first
    self._is_closed = self._is_stopped = False
    self._thread = threading.Thread(target=self._run, name="specdec engine", daemon=True)
    self._thread.start()

  @property
  def is_healthy(self) -> bool:
    """True if the engine accepts texts."""
    return self._thread.is_alive() and not self._is_closed

  @property
  def num_waiting(self) -> int:
    """Number of texts that wait for a slot."""
    return len(self._waiting)

  @property
  def num_active(self) -> int:
    """Number of slots in use."""
    return sum(len(group.texts) for group in [*self._groups.values()])

  @property
  def total_slots(self) -> int:
    """Number of slots of all groups."""
    return self._limits.batch_size * len(self._groups)

  def submit(self, texts: Sequence[Text], continues: bool = False) -> None:
    """Append texts to the queue, always if they continue a request whose text just ends.

    Raises:
      queue.Full: the queue has not enough room for all texts.
      EngineStopped: the engine is being stopped.
    """
    with self._changed:
      if self._is_stopped or not (continues or self.is_healthy):
        raise EngineStopped("The server is shutting down.")
      if not continues and self.num_waiting + len(texts) > self._limits.queue_size:
        raise queue.Full
      self._waiting |= dict.fromkeys(texts)
      self._changed.notify_all()

  def cancel(self, texts: Sequence[Text]) -> None:
    """Remove texts from the queue and from their slots. Texts that have ended are ignored."""
    with self._changed:
      for text in texts:
        if text in self._waiting:
          del self._waiting[text]
        else:
          self._cancelled.add(text)
      self._changed.notify_all()

  def drain(self, seconds: float) -> None:
    """Accept no more texts, and wait at most `seconds` until all accepted texts have ended."""
    with self._changed:
      self._is_closed = True
      self._changed.wait_for(lambda: not (self._waiting or self.num_active), seconds)

  def stop(self) -> None:
    """Stop the thread after its current step, and report `EngineStopped` to all remaining texts.

    A step that compiles a program may take longer than this method waits.
    """
    with self._changed:
      self._is_closed = self._is_stopped = True
      self._changed.notify_all()
    self._thread.join(_SECONDS_TO_STOP)

  def _run(self) -> None:
    while True:
      with self._changed:
        self._changed.notify_all()  # for `drain`
        self._changed.wait_for(
          lambda: self._is_stopped or self._waiting or self._cancelled or self.num_active
        )
        if self._is_stopped:
          break
        self._admit()
      for key, group in [*self._groups.items()]:
        try:
          self._turn(key, group)
        except Exception as error:
          del self._groups[key]
          for text in group.texts:
            text.report(error, True)
    for text in (
      *self._waiting,
      *(text for group in self._groups.values() for text in group.texts),
    ):
      text.report(EngineStopped("The server is shutting down."), True)

  def _admit(self) -> None:
    for group in self._groups.values():
      gone = group.texts & self._cancelled
      group.texts -= gone
      group.cancelled += [text for text in gone if text not in group.added]
      group.added = [text for text in group.added if text not in gone]
    self._cancelled.clear()
    for text in [*self._waiting]:
      group = self._groups.get(text.group) or self._new_group(text.group)
      if group is None:
        break
      if len(group.texts) < self._limits.batch_size:
        del self._waiting[text]
        group.texts.add(text)
        group.added.append(text)

  def _new_group(self, key: tuple[Decoder, Any]) -> _Group | None:
    """Return a new group, which may replace an idle one; None if all places are in use."""
    if len(self._groups) == self._limits.max_groups:
      idle = [other for other, group in self._groups.items() if not group.texts]
      if not idle:
        return None
      del self._groups[idle[0]]
    return self._groups.setdefault(key, _Group())

  def _turn(self, key: tuple[Decoder, Any], group: _Group) -> None:
    if group.slots is None:
      group.slots = self._new_slots(key[0])
    for text in group.cancelled:
      group.slots.cancel(text)
    if group.added:
      group.slots.add(group.added)
    group.cancelled, group.added = [], []
    if not group.texts:
      return
    self._groups[key] = self._groups.pop(key)  # now the most recently used
    needs_rounds = any(text.needs_rounds for text in group.texts)
    group.texts -= {*group.slots.step(1 if needs_rounds else _MAX_ROUNDS)}
