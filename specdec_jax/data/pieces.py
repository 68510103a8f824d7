"""Vocabularies of SentencePiece models, of BERT's word pieces, and of the bytes of ByT5."""

import functools
import io
import pathlib
from collections.abc import Iterable, Sequence

import sentencepiece
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.data.text import read_lines
from specdec_jax.data.tokenizer_config import (
  AddedTokens,
  TokenizerConfig,
  read_tokenizer_config,
  require_ids,
)
from specdec_jax.data.vocabulary import DECODER_ONLY, PAD_ID, ModelTokens, Vocabulary
from specdec_jax.errors import InputError

EOS_ID = 1
_PAD, _END, _UNKNOWN = "[PAD]", "[END]", "[UNK]"
_CONTINUES = "##"


class SentencePieces(Vocabulary):
  """Vocabulary in a SentencePiece model file, followed by `extra_ids` sentinels of T5.

  As in seqio, sentinels are numbered from the end. With 32,000 pieces and 100 sentinels, the last
  of the 32,100 tokens is <extra_id_0>. In T5's vocabularies, id 0 pads and starts a text, and id 1
  ends it.
  """

  start_id = PAD_ID

  def __init__(
    self,
    path: str,
    extra_ids: int = 0,
    tokens: ModelTokens = DECODER_ONLY,
    config: TokenizerConfig | None = None,
  ):
    """Read the file, and add `extra_ids` sentinels.

    `config` has the settings of a tokenizer of Hugging Face, which has further tokens and matches
    the names of special tokens in a text. It is None for a vocabulary of seqio.
    """
    self.path, self.extra_ids, self._config = str(path), extra_ids, config
    try:
      self._pieces = model = sentencepiece.SentencePieceProcessor(model_file=self.path)
    except (RuntimeError, OSError) as error:
      raise InputError(f"{path} is not a SentencePiece model: {error}.") from error
    end = len(self._pieces) + extra_ids
    require_ids(self.path, [end - 1])
    added = {end - 1 - i: AddedToken(f"<extra_id_{i}>", special=True) for i in range(extra_ids)}
    if config is not None:
      control = filter(lambda i: model.is_control(i) or model.is_unknown(i), range(len(model)))
      added |= {i: AddedToken(model.id_to_piece(i), special=True) for i in control}
      added |= config.tokens(self._id_of, end)
    self._added = AddedTokens(added)
    self._size = max([end, *(i + 1 for i in added)])
    self.special_ids = self._added.special_ids
    self._model_tokens = tokens
    own_pad = self._pieces.pad_id()
    self.pad_id = max(own_pad, PAD_ID) if tokens.pad_id is None else tokens.pad_id

  def _id_of(self, token: str) -> int | None:
    i = self._pieces.piece_to_id(token)  # that of the unknown token, if there is no such piece
    return i if self._pieces.id_to_piece(i) == token else None

  @functools.cached_property
  def eos_id(self) -> int:  # type: ignore[override]
    own = self._pieces.eos_id()  # -1 if the file has none
    if self._config is not None and (named := self._config.named.get("eos_token")):
      own = self._added.id_of(named)
    return own if own >= 0 else self._model_tokens.eos_id(EOS_ID, len(self))

  def __len__(self) -> int:
    return self._size

  def fit(self, num_rows: int) -> None:
    if self._config is not None and num_rows >= self._size:
      self._size = num_rows

  def encode(self, text: str) -> list[int]:
    return [*self.encode_target(text), self.eos_id]

  def encode_target(self, text: str) -> list[int]:
    return self._added.encode(text, self._pieces.encode)

  def decode(self, ids: Iterable[int]) -> str:
    skipped = {self.pad_id, *self.special_ids}
    kept = [i for i in self.until_eos(ids) if i not in skipped]
    if self._config is None:
      return self._pieces.decode(kept)
    text = _joined((self._byte(i), self._piece(i).replace("\u2581", " ")) for i in kept)
    return self._config.clean_up(text.removeprefix(" "))

  def pieces(self, ids: Sequence[int]) -> list[str]:
    return [self._shown(int(i)) if i < len(self) else f"<{int(i)}>" for i in ids]

  def _shown(self, i: int) -> str:
    return _joined([(self._byte(i), self._piece(i).replace("\u2581", " "))])

  def _byte(self, i: int) -> int | None:
    """Return the byte that a piece such as <0xC3> stands for; None for other pieces."""
    is_byte = i < len(self._pieces) and self._pieces.is_byte(i)
    return int(self._piece(i)[1:-1], 16) if is_byte else None

  def _piece(self, i: int) -> str:
    if i in self._added.by_id:
      return self._added.by_id[i].content
    return self._pieces.id_to_piece(i) if i < len(self._pieces) else ""  # no token has this id

  def all_pieces(self) -> list[str]:
    return [self._piece(i) for i in range(len(self))]


def _joined(parts: Iterable[tuple[int | None, str]]) -> str:
  """Return the text of tokens, each of which is a byte, or has a text."""
  found: list[bytes] = [text.encode() if byte is None else bytes([byte]) for byte, text in parts]
  return b"".join(found).decode(errors="replace")


def train_sentence_pieces(texts: Iterable[str], path: str, size: int) -> None:
  """Train a unigram SentencePiece model of `size` pieces on lines of text; write it to `path`."""
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(texts),
      model_writer=model,
      vocab_size=size,
      model_type="unigram",
      character_coverage=1.0,
      pad_id=PAD_ID,
      eos_id=EOS_ID,
      unk_id=2,
      bos_id=-1,
      minloglevel=2,
    )
  except RuntimeError as error:
    raise InputError(f"No vocabulary of {size} pieces fits these texts: {error}.") from error
  with atomic_write(path, "wb") as file:
    file.write(model.getvalue())


class Bytes(Vocabulary):
  """Vocabulary of ByT5 (Xue et al., 2022): padding, EOS, unknown, 256 bytes and 125 sentinels.

  A byte b has the id b + 3. The sentinel <extra_id_0> has the id 259.
  """

  pad_id, eos_id, start_id = 0, 1, 0
  _FIRST = 3  # id of the byte 0

  def __init__(self, path: str, tokens: ModelTokens = DECODER_ONLY):
    """Read the settings of the tokenizer in the file tokenizer_config.json at `path`."""
    self.path = str(path)
    self._config = read_tokenizer_config(pathlib.Path(path).parent)
    if self._config.kind != "ByT5Tokenizer":
      raise InputError(
        f"{path} is of the tokenizer {self._config.kind!r}; only a ByT5Tokenizer needs no other "
        "file. Give the folder or the file of the vocabulary."
      )
    named = enumerate(("<pad>", "</s>", "<unk>"))
    flags = dict(lstrip=True, rstrip=True, special=True)
    added = {i: AddedToken(text, **flags) for i, text in named}
    sentinels = range(self._FIRST + 256, self._FIRST + 381)
    added |= {i: AddedToken(f"<extra_id_{i - sentinels[0]}>", special=True) for i in sentinels}
    ids = {token.content: i for i, token in added.items()}
    self._added = AddedTokens({**added, **self._config.tokens(ids.get, sentinels.stop)})
    self.eos_id = tokens.eos_id(self.eos_id, len(self))
    self.pad_id = self.start_id = self.pad_id if tokens.pad_id is None else tokens.pad_id
    self.special_ids = self._added.special_ids

  def __len__(self) -> int:
    return max(self._added.by_id) + 1

  def encode(self, text: str) -> list[int]:
    ids = self.encode_target(text)
    return ids if ids[-1:] == [self.eos_id] else [*ids, self.eos_id]  # as in transformers

  def encode_target(self, text: str) -> list[int]:
    return self._added.encode(text, lambda part: [b + self._FIRST for b in part.encode()])

  def decode(self, ids: Iterable[int]) -> str:
    kept = (i for i in self.until_eos(ids) if i not in self.special_ids)
    names = {i: token.content.encode() for i, token in self._added.by_id.items()}
    text = b"".join(names[i] if i in names else bytes([i - self._FIRST]) for i in kept)
    return self._config.clean_up(text.decode(errors="ignore"))

  def pieces(self, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; a byte that is no character is U+FFFD, a line break U+21B5."""
    return [self._piece(int(i)) for i in ids]

  def _piece(self, i: int) -> str:
    if i in self._added.by_id:
      return self._added.by_id[i].content
    if i >= len(self):
      return f"<{i}>"
    return bytes([i - self._FIRST]).decode(errors="replace").replace("\n", "\u21b5")

  def all_pieces(self) -> list[str]:
    names = {i: token.content for i, token in self._added.by_id.items()}
    return [names.get(i, f"<0x{i - self._FIRST:02X}>") for i in range(len(self))]

  def single_letter_share(self, text: str) -> float:
    """Return 0, because every text consists of single bytes."""
    return 0.0


class WordPieces(Vocabulary):
  """Vocabulary in a file of word pieces in BERT's format: one piece per line.

  Text is lowercased, stripped of accents and split at spaces and punctuation. Decoded text has a
  space at each split. The id 0 pads and starts a text. A text ends with [END] or, in BERT's files,
  with [SEP]. `train_word_pieces` writes such a file.
  """

  start_id = PAD_ID

  def __init__(self, path: str):
    self.path = str(path)
    self._all = read_lines(self.path)
    pieces = {piece: i for i, piece in enumerate(self._all)}
    ends = [pieces[end] for end in (_END, "[SEP]") if end in pieces]
    if self._all[:1] != [_PAD] or _UNKNOWN not in pieces or not ends:
      raise InputError(
        f"{path} is not a file of BERT's word pieces; expected {_PAD} first, {_UNKNOWN} and [SEP]."
      )
    self.eos_id = ends[0]
    self._tokenizer = _tokenizer(models.WordPiece(pieces, unk_token=_UNKNOWN))

  def __len__(self) -> int:
    return len(self._all)

  def encode(self, text: str) -> list[int]:
    (encoding,) = self._tokenizer.encode_batch([text])  # which lets other threads run
    return [*encoding.ids, self.eos_id]

  def decode(self, ids: Iterable[int]) -> str:
    return "".join(self.pieces([i for i in self.until_eos(ids) if i != PAD_ID])).lstrip()

  def pieces(self, ids: Sequence[int]) -> list[str]:
    return [self._piece(int(i)).removeprefix(f" {_CONTINUES}") for i in ids]

  def _piece(self, i: int) -> str:
    return f" {self._all[i]}" if i < len(self) else f"<{i}>"

  def all_pieces(self) -> list[str]:
    return list(self._all)


def train_word_pieces(texts: Iterable[str], path: str, size: int) -> None:
  """Train at most `size` word pieces on lines of text and write them to `path`, one per line."""
  lines, special = list(texts), [_PAD, _END, _UNKNOWN]

  def train(size: int, first: list[str]) -> list[str]:
    """Return up to `size` pieces, beginning with `first`, but at least these and all characters."""
    tokenizer = _tokenizer(models.WordPiece(unk_token=_UNKNOWN))
    trainer = trainers.WordPieceTrainer(
      vocab_size=size,
      special_tokens=first,
      continuing_subword_prefix=_CONTINUES,
      show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    pieces = tokenizer.get_vocab()
    return sorted(pieces, key=pieces.__getitem__)

  # The trainer reads words in random order, numbers characters in the order in which it reads them,
  # and breaks ties by number. So the characters are given first, in sorted order: the same texts
  # then always give the same file.
  first = [*special, *sorted(train(0, special)[len(special) :])]
  if len(first) > size:
    raise InputError(f"The characters of these texts alone are {len(first)} pieces, not {size}.")
  with atomic_write(path) as file:
    file.write("\n".join([*train(size, first), ""]))


def _tokenizer(model: models.WordPiece) -> Tokenizer:
  tokenizer = Tokenizer(model)
  tokenizer.normalizer = normalizers.BertNormalizer()
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  return tokenizer
