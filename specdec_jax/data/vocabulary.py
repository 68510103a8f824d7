"""Vocabularies: text <-> token ids, whatever the pieces are."""

import abc
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

PAD_ID = 0
_SPELLS = 1000  # pieces of a vocabulary
_UNKNOWN = ("<unk>", "[UNK]")


class Vocabulary(abc.ABC):
  """Text <-> token ids.

  Attributes:
    path: the file.
    eos_id: ends a text.
    start_id: stands before a text, where a model has a token there.
    extra_ids: sentinels after the pieces, which T5 has.
  """

  path: str
  eos_id: int
  start_id: int
  extra_ids: int = 0

  @abc.abstractmethod
  def __len__(self) -> int: ...

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Token ids of a text, EOS last."""

  @abc.abstractmethod
  def decode(self, ids: Iterable[int]) -> str:
    """The text of token ids up to EOS; padding and ids past the vocabulary are skipped."""

  @abc.abstractmethod
  def pieces(self, ids: Sequence[int]) -> list[str]:
    """Each id as it reads inside a text, with a leading space where a word starts.

    An id past the vocabulary, which only a model with a larger table can emit, reads as '<id>'.
    """

  @abc.abstractmethod
  def all_pieces(self) -> list[str]:
    """Every piece as it is stored, by id."""

  def foreign(self, text: str) -> float:
    """Share of a text's letters that stand in no piece of several, nor are words: they were spelt.

    On texts of the kind that a vocabulary was made from it is a tenth, in another script 1. It is 0
    for a vocabulary so small that it spells everything.
    """
    if len(self) < _SPELLS:
      return 0.0
    pieces = (
      piece for piece in self.pieces(self.encode(text)[:-1]) if piece.strip() not in _UNKNOWN
    )
    letters = lambda piece: sum(map(str.isalpha, piece))
    read = sum(letters(p) for p in pieces if letters(p) > (0 if p.startswith(" ") else 1))
    return max(0.0, 1 - read / letters(text)) if letters(text) else 0.0

  def fingerprint(self) -> str:
    """A hash of all pieces in order: two vocabularies are the same iff these are."""
    return hashlib.sha256("\n".join(self.all_pieces()).encode()).hexdigest()[:16]

  def until_eos(self, ids: Iterable[int]) -> list[int]:
    """What can be decoded of token ids: those before EOS, without ids past the vocabulary."""
    kept = []
    for i in map(int, ids):
      if i == self.eos_id:
        break
      if i < len(self):
        kept.append(i)
    return kept


def padded(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
  """Token rows as int32 [len(rows), length], padded with PAD_ID."""
  out = np.full((len(rows), length), PAD_ID, np.int32)
  for i, row in enumerate(rows):
    out[i, : len(row)] = row
  return out
