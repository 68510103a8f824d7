"""Vocabularies in files, opened by what their names say they are."""

import pathlib
from collections.abc import Sequence
from typing import Literal

from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.errors import InputError, require_types

_MOST_EXTRA_IDS = 1_000_000  # each is put in by itself: that takes seconds
_T5_EXTRA_IDS = 100
_TABLE_MULTIPLE = 128  # T5's tables have that many rows times some number: 32,128 for 32,100 tokens
_HUGGING_FACE = "spiece.model", "tokenizer.json"
_OURS = "vocabulary.model", "vocabulary.txt"
_WITHOUT_EXTRA_IDS = ".txt", ".json"


def open_vocabulary(path: str, extra_ids: int = 0) -> Vocabulary:
  """The vocabulary in a file: `.txt` of BERT's word pieces, `.json` of Hugging Face's tokenizers
  (GPT-2's byte pairs), any other of SentencePiece; or in a Hugging Face folder, its file of it.

  Raises:
    InputError: it is not there, or not what its name says.
  """
  require_types(open_vocabulary, locals())
  if not 0 <= extra_ids <= _MOST_EXTRA_IDS:
    raise InputError(
      f"extra_ids is {extra_ids}; it must be from 0 to {_MOST_EXTRA_IDS} (T5's own has 100)."
    )
  path = _found([pathlib.Path(path) / name for name in _HUGGING_FACE]) or path
  if not pathlib.Path(path).is_file():
    raise InputError(
      f"There is no vocabulary at {path}; expected a SentencePiece model file, word pieces (.txt) "
      "or a tokenizer.json."
    )
  # Each needs a package that the others do without.
  kind = pathlib.Path(path).suffix
  if extra_ids and kind in _WITHOUT_EXTRA_IDS:
    raise InputError(
      f"extra_ids is {extra_ids}, but {path} lists all of its tokens; only a SentencePiece model "
      "takes more. Leave extra_ids out, or give 0."
    )
  if kind == ".txt":
    from specdec_jax.data.word_pieces import WordPieces

    return WordPieces(path)
  if kind == ".json":
    from specdec_jax.data.byte_pairs import BytePairs

    return BytePairs(path)
  from specdec_jax.data.sentence_pieces import SentencePieces

  return SentencePieces(path, extra_ids)


def open_vocabulary_of_model(
  path: str, num_rows: int, extra_ids: int | Literal["auto"] = "auto"
) -> Vocabulary:
  """Open the vocabulary of a model whose embedding table has `num_rows` rows.

  Args:
    path: as for `open_vocabulary`.
    num_rows: of the table, which may be padded (`padded_size`).
    extra_ids: number of sentinels to add. 'auto' adds T5's 100 to a SentencePiece model that has
      none if the table has room for them: 32,128 rows are those of 32,000 pieces and 100 sentinels.

  Raises:
    InputError: as `open_vocabulary`.
  """
  if extra_ids != "auto":
    return open_vocabulary(path, extra_ids)
  words = open_vocabulary(path)
  if pathlib.Path(words.path).suffix in _WITHOUT_EXTRA_IDS:
    return words
  count = count_extra_ids(words.all_pieces(), num_rows)
  return open_vocabulary(words.path, count) if count else words


def count_extra_ids(pieces: Sequence[str], num_rows: int) -> int:
  """Return the number of sentinels to add to a SentencePiece model: T5's 100, or 0.

  Args:
    pieces: all pieces of the model.
    num_rows: of the embedding table, which may be padded (`padded_size`).
  """
  size = len(pieces) + _T5_EXTRA_IDS
  has_sentinels = any("<extra_id_0>" in piece for piece in pieces)  # as mT5's model
  return _T5_EXTRA_IDS if num_rows in (size, padded_size(size)) and not has_sentinels else 0


def padded_size(num_tokens: int) -> int:
  """Return the number of rows that T5's tables have for a vocabulary of `num_tokens` tokens."""
  return -(-num_tokens // _TABLE_MULTIPLE) * _TABLE_MULTIPLE


def find_vocabulary(folder: str) -> str | None:
  """Return the path of the vocabulary of the model in `folder`, or None if it has none.

  Hugging Face keeps it in the folder. This project's own pairs share the one next to theirs.
  """
  inside = pathlib.Path(folder)
  beside = [inside.parent / name for name in _OURS]
  return _found([*(inside / name for name in (*_HUGGING_FACE, *_OURS)), *beside])


def _found(files: Sequence[pathlib.Path]) -> str | None:
  """The first of the files that exists."""
  return next((str(file) for file in files if file.is_file()), None)
