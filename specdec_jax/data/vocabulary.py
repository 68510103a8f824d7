"""Interface of vocabularies, which convert between text and token ids."""

import abc
import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence

import numpy as np

PAD_ID = 0
# A smaller vocabulary splits most words into single characters.
_MIN_PIECES = 1000
_UNKNOWN = ("<unk>", "[UNK]")
# Ends of a text that its next token may change: an incomplete character, and a space or an
# apostrophe that `TokenizerConfig.clean_up` removes before some texts.
_UNSTABLE = re.compile(r"(?: [ n']*[vr]?|')?\ufffd*\Z")


@dataclasses.dataclass(frozen=True)
class ModelTokens:
  """Tokens that a model uses, as far as the files of its vocabulary do not determine them.

  Attributes:
    has_encoder: whether the model is an encoder-decoder. If so, a tokenizer of Hugging Face adds to
      a source the special tokens that transformers adds. For a decoder-only model, EOS is added.
    eos_ids: ids that end a text, if they are known.
    pad_id: id that pads sources; None for that of the files.
    source_language: language of the sources, such as 'fra_Latn' (NLLB), 'fr_XX' (mBART-50) or 'fr'
      (M2M100); None for that of the files.
  """

  has_encoder: bool = False
  eos_ids: tuple[int, ...] = ()
  pad_id: int | None = None
  source_language: str | None = None

  def eos_id(self, own: int, size: int) -> int:
    """Return the id that ends a text in a vocabulary of `size` tokens whose files have EOS `own`.

    For an encoder-decoder that has other EOS ids, it is the first of these in the vocabulary.
    """
    known = [eos_id for eos_id in self.eos_ids if eos_id < size]
    return own if own in known or not (known and self.has_encoder) else known[0]


DECODER_ONLY = ModelTokens()


class Vocabulary(abc.ABC):
  """Conversion between text and token ids.

  Attributes:
    start_id: id of the token that some models need before a text.
    extra_ids: number of T5's sentinels after the pieces.
    special_ids: ids of special tokens besides EOS, which are not part of a text.
    num_end_tokens: number of special tokens with which every encoded text ends.
  """

  path: str
  eos_id: int
  start_id: int
  pad_id: int = PAD_ID
  extra_ids: int = 0
  special_ids: frozenset[int] = frozenset()
  num_end_tokens: int = 1

  @abc.abstractmethod
  def __len__(self) -> int: ...

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Return the token ids of a source with special tokens; for most models, these are EOS only."""

  def encode_target(self, text: str) -> list[int]:
    """Return the token ids of the beginning of a target text, which have no special tokens."""
    return self.encode(text)[:-1]

  def encode_output(self, text: str) -> list[int]:
    """Return the token ids of a whole output of the model: those of a target text, and EOS."""
    return [*self.encode_target(text), self.eos_id]

  @abc.abstractmethod
  def decode(self, ids: Iterable[int]) -> str:
    """Return the text of the ids before EOS, without special tokens and ids out of range."""

  def decode_stable(self, ids: Iterable[int]) -> str:
    """Return the beginning of `decode(ids)` that no further tokens can change."""
    return _UNSTABLE.sub("", self.decode(ids), count=1)

  def space_before(self, ids: Iterable[int]) -> str:
    """Return the space with which the first piece of a text begins and the text does not, or ''."""
    pieces = self.pieces([int(i) for i in ids if int(i) not in self.special_ids])
    is_removed = "".join(pieces[:1]).startswith(" ") and not self.decode(ids).startswith(" ")
    return " " * is_removed

  @abc.abstractmethod
  def pieces(self, ids: Sequence[int]) -> list[str]:
    """Return the text that each token has inside a text, with a leading space if it starts a word.

    An id outside of the vocabulary is returned as '<id>'.
    """

  @abc.abstractmethod
  def all_pieces(self) -> list[str]:
    """Return all pieces in the order of their ids, as stored in the file of the vocabulary."""

  def single_letter_share(self, text: str) -> float:
    """Return the fraction of letters that are unknown or are single-letter pieces inside a word.

    It is about a tenth for texts like those that the vocabulary was trained on, and 1 for a text in
    a different script. For fewer than 1,000 pieces it is 0, because few of them are longer.
    """
    if len(self) < _MIN_PIECES:
      return 0.0
    ids = [i for i in self.encode(text) if i != self.eos_id and i not in self.special_ids]
    pieces = (piece for piece in self.pieces(ids) if piece.strip() not in _UNKNOWN)
    # A single letter after a space is a word.
    in_pieces = sum(
      _num_letters(p) for p in pieces if _num_letters(p) > (0 if p.startswith(" ") else 1)
    )
    num_letters = _num_letters(text)
    return max(0.0, 1 - in_pieces / num_letters) if num_letters else 0.0

  def fit(self, num_rows: int) -> None:
    """Change the number of ids to the number of rows of an embedding table, if that is possible.

    Ids without a token are added, or the last tokens are removed if they are special. For example,
    the tables of NLLB have two more rows than the vocabulary has tokens, and those of some BARTs
    have no row for the mask token.
    """
    del num_rows  # most kinds of vocabularies have a fixed size

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
