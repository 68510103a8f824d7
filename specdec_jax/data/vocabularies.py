"""Functions that open vocabulary files. The suffix of a file name determines the type."""

import pathlib
from collections.abc import Sequence
from typing import Literal

from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.errors import InputError, require_types

_MAX_EXTRA_IDS = 1_000_000  # sentinels are added one by one, which takes seconds for this number
_T5_EXTRA_IDS = 100
_TABLE_MULTIPLE = 128  # the rows of T5's tables are a multiple of this: 32,128 for 32,100 tokens
_HUGGING_FACE = "spiece.model", "tokenizer.json"
_OURS = "vocabulary.model", "vocabulary.txt"
_WITHOUT_EXTRA_IDS = ".txt", ".json"


def open_vocabulary(path: str, extra_ids: int = 0) -> Vocabulary:
  """Open the vocabulary in a file.

  Args:
    path: path of a vocabulary file, or of a Hugging Face folder that contains one. A `.txt` file
      has BERT's word pieces, a `.json` file is a tokenizer of Hugging Face (such as GPT-2's), and
      any other file is a SentencePiece model.
    extra_ids: number of sentinels to add to a SentencePiece model.

  Raises:
    InputError: the file does not exist, it is not of the type that its name says, `extra_ids` is
      out of range, or it is positive and the file is not a SentencePiece model.
  """
  require_types(open_vocabulary, locals())
  if not 0 <= extra_ids <= _MAX_EXTRA_IDS:
    raise InputError(
      f"extra_ids is {extra_ids}; it must be from 0 to {_MAX_EXTRA_IDS} (T5's has 100)."
    )
  path = _first_file([pathlib.Path(path) / name for name in _HUGGING_FACE]) or path
  if not pathlib.Path(path).is_file():
    raise InputError(
      f"There is no vocabulary at {path}; expected a SentencePiece model file, word pieces (.txt) "
      "or a tokenizer.json."
    )
  # Each type is imported when it is used, because it needs a package that the others do not.
  kind = pathlib.Path(path).suffix
  if extra_ids and kind in _WITHOUT_EXTRA_IDS:
    raise InputError(
      f"extra_ids is {extra_ids}, but {path} lists all of its tokens; only a SentencePiece model "
      "can have more. Leave extra_ids out, or give 0."
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
    path: path of a file or Hugging Face folder; see `open_vocabulary`.
    num_rows: number of rows of the table, including padding (`padded_size`).
    extra_ids: number of sentinels to add. 'auto' adds the 100 sentinels of T5 to a SentencePiece
      model that has none, if `num_rows` is then the number of tokens, or that number padded. For
      example, 32,000 pieces and 100 sentinels are 32,100 tokens, which are padded to 32,128 rows.

  Raises:
    InputError: the vocabulary cannot be opened; see `open_vocabulary`.
  """
  if extra_ids != "auto":
    return open_vocabulary(path, extra_ids)
  words = open_vocabulary(path)
  if pathlib.Path(words.path).suffix in _WITHOUT_EXTRA_IDS:
    return words
  count = count_extra_ids(words.all_pieces(), num_rows)
  return open_vocabulary(words.path, count) if count else words


def count_extra_ids(pieces: Sequence[str], num_rows: int) -> int:
  """Return the number of sentinels that 'auto' adds to a SentencePiece model, 100 or 0.

  See `open_vocabulary_of_model`.

  Args:
    pieces: all pieces of the model.
    num_rows: number of rows of the embedding table, including padding (`padded_size`).
  """
  size = len(pieces) + _T5_EXTRA_IDS
  has_sentinels = any("<extra_id_0>" in piece for piece in pieces)  # such as mT5's model
  return _T5_EXTRA_IDS if num_rows in (size, padded_size(size)) and not has_sentinels else 0


def padded_size(num_tokens: int) -> int:
  """Return the number of rows of T5's embedding table for a vocabulary of `num_tokens` tokens."""
  return -(-num_tokens // _TABLE_MULTIPLE) * _TABLE_MULTIPLE


def find_vocabulary(folder: str) -> str | None:
  """Return the path of the vocabulary of the model in `folder`, or None if there is none.

  A Hugging Face folder contains the vocabulary. Pairs of this project have it in the parent folder
  of their models.
  """
  inside = pathlib.Path(folder)
  in_parent = [inside.parent / name for name in _OURS]
  return _first_file([*(inside / name for name in (*_HUGGING_FACE, *_OURS)), *in_parent])


def _first_file(files: Sequence[pathlib.Path]) -> str | None:
  """Return the path of the first file that exists, or None."""
  return next((str(file) for file in files if file.is_file()), None)
