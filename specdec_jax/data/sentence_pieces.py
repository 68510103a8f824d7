"""SentencePiece vocabularies. In those of T5, id 0 pads and starts a text, and id 1 ends it."""

import functools
import io
from collections.abc import Iterable, Sequence

import sentencepiece

from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.data.vocabulary import DECODER_ONLY, PAD_ID, ModelTokens, Vocabulary
from specdec_jax.errors import InputError

EOS_ID = 1


class SentencePieces(Vocabulary):
  """Vocabulary in a SentencePiece model file, followed by `extra_ids` sentinels of T5.

  As in seqio, sentinels are numbered from the end. With 32,000 pieces and 100 sentinels, the last
  of the 32,100 tokens is <extra_id_0>.
  """

  start_id = PAD_ID

  def __init__(self, path: str, extra_ids: int = 0, tokens: ModelTokens = DECODER_ONLY):
    self.path, self.extra_ids = str(path), extra_ids
    self._pieces = open_pieces(self.path)
    if extra_ids:
      from sentencepiece import sentencepiece_model_pb2  # the only import that needs protobuf

      model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
      model.ParseFromString(self._pieces.serialized_model_proto())
      kind = model.SentencePiece.USER_DEFINED
      for i in reversed(range(extra_ids)):
        model.pieces.add(piece=f"\u2581<extra_id_{i}>", score=0.0, type=kind)
      self._pieces.load_from_serialized_proto(model.SerializeToString())
    self._model_tokens = tokens
    own_pad = self._pieces.pad_id()  # -1 if the file has none
    self.pad_id = max(own_pad, PAD_ID) if tokens.pad_id is None else tokens.pad_id

  @functools.cached_property
  def eos_id(self) -> int:  # type: ignore[override]
    own = self._pieces.eos_id()  # -1 if the file has none
    return own if own >= 0 else self._model_tokens.eos_id(EOS_ID, len(self))

  def __len__(self) -> int:
    return self._pieces.get_piece_size()

  def encode(self, text: str) -> list[int]:
    return [*self._pieces.encode(text), self.eos_id]

  def decode(self, ids: Iterable[int]) -> str:
    return self._pieces.decode([i for i in self.until_eos(ids) if i != self.pad_id])

  def pieces(self, ids: Sequence[int]) -> list[str]:
    return [self._piece(int(i)).replace("\u2581", " ") for i in ids]

  def _piece(self, i: int) -> str:
    return self._pieces.id_to_piece(i) if i < len(self) else f"<{i}>"

  def all_pieces(self) -> list[str]:
    return [self._pieces.id_to_piece(i) for i in range(len(self))]


def open_pieces(path: str) -> sentencepiece.SentencePieceProcessor:
  """Open the SentencePiece model in a file.

  Raises:
    InputError: the file is missing, or it is not a SentencePiece model.
  """
  try:
    return sentencepiece.SentencePieceProcessor(model_file=path)
  except (RuntimeError, OSError) as error:
    raise InputError(f"{path} is not a SentencePiece model: {error}.") from error


def train_sentence_pieces(texts: Iterable[str], path: str, size: int) -> None:
  """Train a unigram SentencePiece model of `size` pieces on lines of text and write it to `path`.

  Raises:
    InputError: the texts do not allow a vocabulary of that size.
  """
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
