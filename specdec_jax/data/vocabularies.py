"""Functions that open vocabulary files. The suffix of a file name determines the type."""

import pathlib
from collections.abc import Sequence
from typing import Literal

from specdec_jax.data.vocabulary import DECODER_ONLY, ModelTokens, Vocabulary
from specdec_jax.errors import InputError, require_count

_T5_EXTRA_IDS = 100
_TABLE_MULTIPLE = 128  # the rows of T5's tables are a multiple of this: 32,128 for 32,100 tokens
_OURS = "vocabulary.model", "vocabulary.txt"
# Files of Hugging Face that open a vocabulary, and those that they need next to them. The first one
# that is complete takes precedence.
_HUGGING_FACE: tuple[tuple[str, ...], ...] = (
  ("source.spm", "target.spm", "vocab.json"),
  ("sentencepiece.bpe.model", "vocab.json"),
  ("spiece.model",),
  ("tokenizer.json",),
  ("sentencepiece.bpe.model",),
  ("vocab.json", "merges.txt"),
)
_WITH_LANGUAGES = "M2M100", "byte-level BPE", "tokenizer.json", "unigram"


def open_vocabulary(
  path: str, extra_ids: int = 0, tokens: ModelTokens = DECODER_ONLY
) -> Vocabulary:
  """Open the vocabulary in a file.

  Args:
    path: path of a vocabulary file, or of a Hugging Face folder that contains one. A `.txt` file
      has BERT's word pieces, a `.json` file is a tokenizer of Hugging Face (such as GPT-2's), and
      any other file is a SentencePiece model. A vocabulary of several files is opened by
      `source.spm` (Marian), `sentencepiece.bpe.model` (M2M100) or `vocab.json` (byte-level BPE),
      and that of ByT5 by its `tokenizer_config.json`. The class in `tokenizer_config.json` says
      whether a SentencePiece model is that of mBART-50 or PEGASUS.
    extra_ids: number of sentinels to add to a SentencePiece model.
    tokens: tokens that the model uses; by default, those of a decoder-only model.

  Raises:
    InputError: the file does not exist, or it is not of the type that its name says; `extra_ids` is
      out of range, or it is positive and the file is not a SentencePiece model; or the vocabulary
      does not have the source language.
  """
  require_count("extra_ids", extra_ids, least=0)
  path = _huggingface_file(pathlib.Path(path)) or path
  if not pathlib.Path(path).is_file():
    raise InputError(
      f"There is no vocabulary at {path}; expected a SentencePiece model file, word pieces (.txt) "
      "or a tokenizer.json."
    )
  kind = _kind(pathlib.Path(path))
  if extra_ids and kind != "SentencePiece":
    raise InputError(
      f"extra_ids is {extra_ids}, but {path} lists all of its tokens; only a SentencePiece model "
      "can have more. Leave extra_ids out, or give 0."
    )
  if tokens.source_language and kind not in _WITH_LANGUAGES:
    raise InputError(
      f"source_language is {tokens.source_language!r}, but {path} has no source languages; leave "
      "source_language out."
    )
  # Each type is imported when it is used, because it needs a package that the others do not.
  match kind:
    case "word pieces":
      from specdec_jax.data.word_pieces import WordPieces

      return WordPieces(path)
    case "tokenizer.json":
      from specdec_jax.data.huggingface_tokenizer import HuggingFaceTokenizer

      return HuggingFaceTokenizer(path, tokens)
    case "byte-level BPE":
      from specdec_jax.data.huggingface_tokenizer import HuggingFaceTokenizer, read_byte_level_bpe

      return HuggingFaceTokenizer(path, tokens, read_byte_level_bpe)
    case "unigram":
      from specdec_jax.data.huggingface_tokenizer import HuggingFaceTokenizer, read_unigram

      return HuggingFaceTokenizer(path, tokens, read_unigram)
    case "ByT5":
      from specdec_jax.data.byte_vocabulary import Bytes

      return Bytes(path, tokens)
    case "Marian":
      from specdec_jax.data.mapped_pieces import MarianPieces

      return MarianPieces(path, tokens)
    case "M2M100":
      from specdec_jax.data.mapped_pieces import M2M100Pieces

      return M2M100Pieces(path, tokens)
  from specdec_jax.data.sentence_pieces import SentencePieces

  return SentencePieces(path, extra_ids, tokens)


def _kind(path: pathlib.Path) -> str:
  """Return the kind of the vocabulary in a file."""
  if path.name == "sentencepiece.bpe.model":  # of mBART-50 without vocab.json
    return "M2M100" if path.with_name("vocab.json").is_file() else "unigram"
  if path.name == "spiece.model" and _tokenizer_class(path.parent).startswith("Pegasus"):
    return "unigram"
  kinds = {
    "source.spm": "Marian",
    "vocab.json": "byte-level BPE",
    "tokenizer_config.json": "ByT5",
    ".json": "tokenizer.json",
    ".txt": "word pieces",
  }
  return kinds.get(path.name) or kinds.get(path.suffix, "SentencePiece")


def open_vocabulary_of_model(
  path: str,
  num_rows: int,
  extra_ids: int | Literal["auto"] = "auto",
  tokens: ModelTokens = DECODER_ONLY,
) -> Vocabulary:
  """Open the vocabulary of a model whose embedding table has `num_rows` rows.

  If the tables of an encoder-decoder have a few more or fewer rows than the files have tokens, the
  size of the vocabulary is `num_rows`; see `Vocabulary.fit`.

  Args:
    path: path of a file or Hugging Face folder; see `open_vocabulary`.
    num_rows: number of rows of the table, including padding (`padded_size`).
    extra_ids: number of sentinels to add. 'auto' adds the 100 sentinels of T5 to a SentencePiece
      model that has none, if `num_rows` is then the number of tokens, or that number padded. For
      example, 32,000 pieces and 100 sentinels are 32,100 tokens, which are padded to 32,128 rows.
    tokens: tokens that the model uses; by default, those of a decoder-only model.

  Raises:
    InputError: the vocabulary cannot be opened; see `open_vocabulary`.
  """
  if extra_ids != "auto":
    return open_vocabulary(path, extra_ids, tokens)
  words = open_vocabulary(path, tokens=tokens)
  if _kind(pathlib.Path(words.path)) == "SentencePiece":
    count = count_extra_ids(words.all_pieces(), num_rows)
    return open_vocabulary(words.path, count, tokens) if count else words
  if tokens.has_encoder and num_rows < padded_size(len(words)):
    words.fit(num_rows)
  return words


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
  ours = [place / name for place in (inside, inside.parent) for name in _OURS]
  files = (str(file) for file in ours if file.is_file())
  return _huggingface_file(inside) or next(files, None)


def _huggingface_file(folder: pathlib.Path) -> str | None:
  """Return the file that opens the vocabulary in a Hugging Face folder, or None."""
  complete = [names[0] for names in _HUGGING_FACE if all((folder / x).is_file() for x in names)]
  if complete[:2] == ["spiece.model", "tokenizer.json"]:
    # The ids of PEGASUS are not those of its SentencePiece model.
    complete = complete[_tokenizer_class(folder).startswith("Pegasus") :]
  if complete:
    return str(folder / complete[0])
  file = folder / "tokenizer_config.json"
  return str(file) if file.is_file() and _tokenizer_class(folder) == "ByT5Tokenizer" else None


def _tokenizer_class(folder: pathlib.Path) -> str:
  """Return the class of the tokenizer in a Hugging Face folder; '' if it is unknown."""
  from specdec_jax.data.tokenizer_config import read_tokenizer_config

  return read_tokenizer_config(folder).kind
