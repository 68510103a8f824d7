"""BERT's word pieces (Devlin et al., 2019), uncased, as the paper's GPT-like models have them."""

import pathlib
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from specdec_jax.data.vocabulary import PAD_ID, Vocabulary
from specdec_jax.errors import InputError

_PAD, _END, _UNKNOWN = "[PAD]", "[END]", "[UNK]"
_CONTINUES = "##"


class WordPieces(Vocabulary):
  """A file of word pieces, one a line, as BERT has it: `train_word_pieces` writes one.

  Text is lowercased, stripped of accents and split at spaces and punctuation. 0 pads, and starts
  a text; [END] ends it, in BERT's own files [SEP].
  """

  start_id = PAD_ID

  def __init__(self, path: str):
    self.path = str(path)
    try:
      self._all = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
      raise InputError(f"{path} is not UTF-8 text: {error}.") from error
    ends = [i for i, piece in enumerate(self._all) if piece in (_END, "[SEP]")]
    if self._all[:1] != [_PAD] or _UNKNOWN not in self._all or not ends:
      raise InputError(f"{path} has no word pieces of BERT's: {_PAD} first, {_UNKNOWN}, [SEP].")
    self.eos_id = ends[0]
    pieces = {piece: i for i, piece in enumerate(self._all)}
    self._tokenizer = _tokenizer(models.WordPiece(pieces, unk_token=_UNKNOWN))

  def __len__(self) -> int:
    return len(self._all)

  def encode(self, text: str) -> list[int]:
    return [*self._tokenizer.encode(text).ids, self.eos_id]

  def decode(self, ids: Iterable[int]) -> str:
    return self._tokenizer.decode([i for i in self.until_eos(ids) if i != PAD_ID])

  def pieces(self, ids: Sequence[int]) -> list[str]:
    piece = lambda i: f" {self._all[i]}" if i < len(self) else f"<{i}>"
    return [piece(int(i)).removeprefix(f" {_CONTINUES}") for i in ids]

  def all_pieces(self) -> list[str]:
    return list(self._all)


def train_word_pieces(texts: Iterable[str], path: str, size: int) -> None:
  """Fit word pieces, at most `size`, to lines of text and write them to `path`, one a line."""
  tokenizer = _tokenizer(models.WordPiece(unk_token=_UNKNOWN))
  trainer = trainers.WordPieceTrainer(
    vocab_size=size,
    special_tokens=[_PAD, _END, _UNKNOWN],
    continuing_subword_prefix=_CONTINUES,
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  pieces = tokenizer.get_vocab()
  if len(pieces) > size:
    raise InputError(f"The characters of these texts alone are {len(pieces)} pieces, not {size}.")
  pathlib.Path(path).write_text("\n".join([*sorted(pieces, key=pieces.__getitem__), ""]), "utf-8")


def _tokenizer(model: models.WordPiece) -> Tokenizer:
  tokenizer = Tokenizer(model)
  tokenizer.normalizer = normalizers.BertNormalizer()
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUES)
  return tokenizer
