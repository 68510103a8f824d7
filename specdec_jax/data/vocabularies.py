"""Vocabularies in files, opened by what their names say they are."""

import pathlib

from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.errors import InputError, require_types

_MOST_EXTRA_IDS = 1_000_000  # each is put in by itself: that takes seconds


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
  for name in ("spiece.model", "tokenizer.json"):
    path = str(file) if (file := pathlib.Path(path) / name).is_file() else path
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
