"""Functions that open vocabulary files. The suffix of a file name determines the type."""

import pathlib
from collections.abc import Sequence
from typing import Literal

from specdec_jax.data.huggingface_tokenizer import (
  HuggingFaceTokenizer,
  TransformersTokenizer,
  no_languages,
)
from specdec_jax.data.pieces import Bytes, SentencePieces, WordPieces
from specdec_jax.data.tokenizer_config import FILE, TokenizerConfig, read_tokenizer_config
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
  ("tokenizer.json",),
  ("spiece.model",),
  ("sentencepiece.bpe.model",),
  ("vocab.json", "merges.txt"),
)
# Tokenizers of transformers, by file and by class. Those with source languages add special tokens
# that a tokenizer.json does not name.
_TRANSFORMERS_FILES = "source.spm", "sentencepiece.bpe.model", "vocab.json"
_WITH_LANGUAGES = "MBartTokenizer", "MBart50Tokenizer", "NllbTokenizer", "M2M100Tokenizer"


def open_vocabulary(
  path: str, extra_ids: int = 0, tokens: ModelTokens = DECODER_ONLY
) -> Vocabulary:
  """Open the vocabulary in a file.

  Args:
    path: path of a vocabulary file, or of a Hugging Face folder that contains one. A `.txt` file
      has BERT's word pieces, a `.json` file is a tokenizer of Hugging Face (such as GPT-2's),
      `spiece.model` is the SentencePiece model of a T5 of Hugging Face, and any other file is a
      SentencePiece model, whose tokens are those of seqio. The library transformers reads the files
      of a Marian (`source.spm`), of M2M100, NLLB and mBART (`sentencepiece.bpe.model`, or a
      `tokenizer.json` of their classes), of a PEGASUS (`spiece.model`), and a byte-level BPE
      (`vocab.json`). The vocabulary of ByT5 is opened by its `tokenizer_config.json`.
    extra_ids: number of sentinels to add to a SentencePiece model.

  Raises:
    InputError: the file does not exist or is not of the type that its name says, `extra_ids` does
      not fit it, it lacks the source language, or transformers is not installed.
  """
  require_count("extra_ids", extra_ids, least=0)
  path = _huggingface_file(pathlib.Path(path)) or path
  file = pathlib.Path(path)
  if not file.is_file():
    raise InputError(
      f"There is no vocabulary at {path}; expected a SentencePiece model file, word pieces (.txt) "
      "or a tokenizer.json."
    )
  is_huggingface = file.name in {name for names in _HUGGING_FACE for name in names}
  config = read_tokenizer_config(file.parent) if is_huggingface else TokenizerConfig()
  pegasus = file.name == "spiece.model" and config.kind.startswith("Pegasus")
  if file.name in _TRANSFORMERS_FILES or config.kind in _WITH_LANGUAGES or pegasus:
    vocabulary: Vocabulary = TransformersTokenizer(path, tokens)
  elif tokens.source_language:
    raise no_languages(tokens.source_language, path)
  elif file.suffix == ".txt":
    vocabulary = WordPieces(path)
  elif file.name == FILE:
    vocabulary = Bytes(path, tokens)
  elif file.suffix == ".json":
    vocabulary = HuggingFaceTokenizer(path, tokens)
  else:
    own = config if file.name == "spiece.model" else None
    return SentencePieces(path, extra_ids, tokens, own)
  if extra_ids:
    raise InputError(
      f"extra_ids is {extra_ids}, but {path} lists all of its tokens; only a SentencePiece model "
      "can have more. Leave extra_ids out, or give 0."
    )
  return vocabulary


def open_vocabulary_of_model(
  path: str,
  num_rows: int,
  extra_ids: int | Literal["auto"] = "auto",
  tokens: ModelTokens = DECODER_ONLY,
) -> Vocabulary:
  """Open the vocabulary of a model whose embedding table has `num_rows` rows, padding included.

  If the tables of an encoder-decoder have a few more or fewer rows than the files have tokens, the
  size of the vocabulary is `num_rows`; see `Vocabulary.fit`. The other arguments are those of
  `open_vocabulary`.

  Args:
    extra_ids: number of sentinels to add. 'auto' adds to a SentencePiece model without sentinels as
      many as `tokenizer_config.json` says. If it does not say, 'auto' adds the 100 sentinels of T5
      if `num_rows` is then the number of tokens, or that number padded. For example, 32,000 pieces
      and 100 sentinels are 32,100 tokens, which are padded to 32,128 rows.
  """
  if extra_ids != "auto":
    return open_vocabulary(path, extra_ids, tokens)
  words = open_vocabulary(path, tokens=tokens)
  if isinstance(words, SentencePieces):
    count = _stated_extra_ids(words)
    count = count_extra_ids(words.all_pieces(), num_rows) if count is None else count
    words = open_vocabulary(words.path, count, tokens) if count else words
  if tokens.has_encoder and num_rows < padded_size(len(words)):
    words.fit(num_rows)
  return words


def _stated_extra_ids(words: SentencePieces) -> int | None:
  """Return the number of sentinels that files of transformers name; None if they name none."""
  config = read_tokenizer_config(pathlib.Path(words.path).parent)
  if any("<extra_id_0>" in piece for piece in words.all_pieces()):
    return 0
  sentinels = [token for token in config.extra if token.startswith("<extra_id_")]
  return config.fields.get("extra_ids", len(sentinels) or None)


def count_extra_ids(pieces: Sequence[str], num_rows: int) -> int:
  """Return the number of sentinels, 100 or 0, that 'auto' adds; see `open_vocabulary_of_model`."""
  size = len(pieces) + _T5_EXTRA_IDS
  has_sentinels = any("<extra_id_0>" in piece for piece in pieces)  # such as mT5's model
  return _T5_EXTRA_IDS if num_rows in (size, padded_size(size)) and not has_sentinels else 0


def padded_size(num_tokens: int) -> int:
  """Return the number of rows of T5's embedding table for a vocabulary of `num_tokens` tokens."""
  return -(-num_tokens // _TABLE_MULTIPLE) * _TABLE_MULTIPLE


def find_vocabulary(folder: str) -> str | None:
  """Return the path of the vocabulary in `folder` or, for this project's pairs, in its parent."""
  inside = pathlib.Path(folder)
  ours = [place / name for place in (inside, inside.parent) for name in _OURS]
  files = (str(file) for file in ours if file.is_file())
  return _huggingface_file(inside) or next(files, None)


def _huggingface_file(folder: pathlib.Path) -> str | None:
  for names in _HUGGING_FACE:
    if all((folder / name).is_file() for name in names):
      return str(folder / names[0])
  is_byt5 = (folder / FILE).is_file() and read_tokenizer_config(folder).kind == "ByT5Tokenizer"
  return str(folder / FILE) if is_byt5 else None
