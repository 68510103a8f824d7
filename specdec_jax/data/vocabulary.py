"""Interface of vocabularies, which convert between text and token ids."""

import abc
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

PAD_ID = 0
# A smaller vocabulary splits most words into single characters.
_MIN_PIECES = 1000
_UNKNOWN = ("<unk>", "[UNK]")


class Vocabulary(abc.ABC):
  """Conversion between text and token ids.

  Attributes:
    path: path of the vocabulary file.
    eos_id: id of the token that ends a text (EOS).
    start_id: id of the token that some models need before a text.
    extra_ids: number of T5's sentinels after the pieces.
  """

  path: str
  eos_id: int
  start_id: int
  extra_ids: int = 0

  @abc.abstractmethod
  def __len__(self) -> int: ...

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Return the token ids of a text, followed by EOS."""

  @abc.abstractmethod
  def decode(self, ids: Iterable[int]) -> str:
    """Return the text of the token ids before EOS.

    Ids outside of the vocabulary are skipped, and so is its padding token, if it has one.
    """

  @abc.abstractmethod
  def pieces(self, ids: Sequence[int]) -> list[str]:
    """Return the text that each token has inside a text, with a leading space if it starts a word.

    An id outside of the vocabulary, which only a model with a larger embedding table can emit, is
    returned as '<id>'.
    """

  @abc.abstractmethod
  def all_pieces(self) -> list[str]:
    """Return all pieces in the order of their ids, as stored in the file of the vocabulary."""

  def single_letter_share(self, text: str) -> float:
    """Return the fraction of letters that are unknown or are single-letter pieces inside a word.

    The share is about a tenth for texts like those that the vocabulary was trained on, and 1 for a
    text in a different script. For a vocabulary of fewer than 1,000 pieces, return 0, because such
    a vocabulary has few longer pieces.
    """
    if len(self) < _MIN_PIECES:
      return 0.0
    pieces = (
      piece for piece in self.pieces(self.encode(text)[:-1]) if piece.strip() not in _UNKNOWN
    )
    # A single letter after a space is a word.
    in_pieces = sum(
      _num_letters(p) for p in pieces if _num_letters(p) > (0 if p.startswith(" ") else 1)
    )
    num_letters = _num_letters(text)
    return max(0.0, 1 - in_pieces / num_letters) if num_letters else 0.0

  def fingerprint(self) -> str:
    """Return a hash of all pieces in the order of their ids, which identifies the vocabulary."""
    return hashlib.sha256("\n".join(self.all_pieces()).encode()).hexdigest()[:16]

  def until_eos(self, ids: Iterable[int]) -> list[int]:
    """Return the ids before EOS, without ids outside of the vocabulary."""
    valid = []
    for i in map(int, ids):
      if i == self.eos_id:
        break
      if i < len(self):
        valid.append(i)
    return valid


def _num_letters(text: str) -> int:
  return sum(map(str.isalpha, text))


def padded(rows: Sequence[Sequence[int]], length: int, pad_id: int = PAD_ID) -> np.ndarray:
  """Return rows of token ids as an int32 array [len(rows), length], padded with `pad_id`."""
  out = np.full((len(rows), length), pad_id, np.int32)
  for i, row in enumerate(rows):
    out[i, : len(row)] = row
  return out
