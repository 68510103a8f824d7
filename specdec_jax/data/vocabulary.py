"""Vocabularies: text <-> token ids, whatever the pieces are."""

import abc
import hashlib
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from specdec_jax.errors import InputError, require_types

PAD_ID = 0
_MOST_EXTRA_IDS = 1_000_000  # each is put in by itself: that takes seconds


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


def open_vocabulary(path: str, extra_ids: int = 0) -> Vocabulary:
  """The vocabulary in a file: `.txt` of BERT's word pieces, `.json` of Hugging Face's tokenizers
  (GPT-2's byte pairs), any other of SentencePiece.

  Raises:
    InputError: it is not there, or not what its name says.
  """
  require_types(open_vocabulary, locals())
  if not 0 <= extra_ids <= _MOST_EXTRA_IDS:
    raise InputError(
      f"extra_ids is {extra_ids}; it must be from 0 to {_MOST_EXTRA_IDS} (T5's own has 100)."
    )
  if not pathlib.Path(path).is_file():
    raise InputError(
      f"There is no vocabulary at {path}; expected a SentencePiece model file, word pieces (.txt) "
      "or a tokenizer.json."
    )
  # Each needs a package that the others do without.
  kind = pathlib.Path(path).suffix
  if extra_ids and kind in (".txt", ".json"):
    raise InputError(f"extra_ids is {extra_ids}; only SentencePiece's vocabularies have any.")
  if kind == ".txt":
    from specdec_jax.data.word_pieces import WordPieces

    return WordPieces(path)
  if kind == ".json":
    from specdec_jax.data.byte_pairs import BytePairs

    return BytePairs(path)
  from specdec_jax.data.sentence_pieces import SentencePieces

  return SentencePieces(path, extra_ids)


def padded(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
  """Token rows as int32 [len(rows), length], padded with PAD_ID."""
  out = np.full((len(rows), length), PAD_ID, np.int32)
  for i, row in enumerate(rows):
    out[i, : len(row)] = row
  return out
