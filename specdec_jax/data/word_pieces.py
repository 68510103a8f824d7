"""Vocabularies of BERT's uncased word pieces (Devlin et al., 2019), used by the GPT-like models."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import PAD_ID, Vocabulary
from specdec_jax.errors import InputError

_PAD, _END, _UNKNOWN = "[PAD]", "[END]", "[UNK]"
_CONTINUES = "##"


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
    return [*self._tokenizer.encode(text).ids, self.eos_id]

  def decode(self, ids: Iterable[int]) -> str:
    return "".join(self.pieces([i for i in self.until_eos(ids) if i != PAD_ID])).lstrip()

  def pieces(self, ids: Sequence[int]) -> list[str]:
    return [self._piece(int(i)).removeprefix(f" {_CONTINUES}") for i in ids]

  def _piece(self, i: int) -> str:
    return f" {self._all[i]}" if i < len(self) else f"<{i}>"

  def all_pieces(self) -> list[str]:
    return list(self._all)


def train_word_pieces(texts: Iterable[str], path: str, size: int) -> None:
  """Train at most `size` word pieces on lines of text and write them to `path`, one per line.

  Raises:
    InputError: the special tokens and the characters of the texts alone need more than `size`
      pieces.
  """
  lines, special = list(texts), [_PAD, _END, _UNKNOWN]

  def train(size: int, first: list[str]) -> list[str]:
    """Return up to `size` pieces, but at least `first`, with which they begin, and characters."""
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
