"""SentencePiece vocabularies, T5's way: 0 pads, 1 ends a text."""

import hashlib
import io
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece

from specdec_jax.errors import InputError

PAD_ID = 0
EOS_ID = 1


class Vocabulary:
  """Text <-> token ids by a SentencePiece model file.

  Attributes:
    path: the file.
    extra_ids: T5's sentinels, numbered from the end as seqio has them: 32,000 pieces and 100 extra
      ids make 32,100, of which the last is <extra_id_0>.
  """

  def __init__(self, path: str, extra_ids: int = 0):
    if not pathlib.Path(path).is_file():
      raise InputError(f"There is no vocabulary at {path}; expected a SentencePiece model file.")
    self.path, self.extra_ids = str(path), extra_ids
    try:
      self._pieces = sentencepiece.SentencePieceProcessor(model_file=self.path)
    except RuntimeError as error:
      raise InputError(f"{path} is not a SentencePiece model: {error}.") from error
    if extra_ids:
      from sentencepiece import sentencepiece_model_pb2  # needs protobuf, which little else does

      model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
      model.ParseFromString(self._pieces.serialized_model_proto())
      kind = model.SentencePiece.USER_DEFINED
      for i in reversed(range(extra_ids)):
        model.pieces.add(piece=f"\u2581<extra_id_{i}>", score=0.0, type=kind)
      self._pieces.load_from_serialized_proto(model.SerializeToString())

  def __len__(self) -> int:
    return self._pieces.get_piece_size()

  def encode(self, text: str) -> list[int]:
    """Token ids of a text, EOS last."""
    return [*self._pieces.encode(text), EOS_ID]

  def decode(self, ids: Iterable[int]) -> str:
    """The text of token ids up to EOS; padding and ids past the vocabulary are skipped."""
    known = []
    for i in map(int, ids):
      if i == EOS_ID:
        break
      if i != PAD_ID and i < len(self):
        known.append(i)
    return self._pieces.decode(known)

  def pieces(self, ids: Sequence[int]) -> list[str]:
    """Each id as it reads inside a text: a leading space where a word starts, '</s>' for EOS.

    An id past the vocabulary, which only a model with a larger table can emit, reads as '<id>'.
    """
    piece = lambda i: self._pieces.id_to_piece(i) if i < len(self) else f"<{i}>"
    return [piece(int(i)).replace("\u2581", " ") for i in ids]

  def fingerprint(self) -> str:
    """A hash of all pieces in order: two vocabularies are the same iff these are."""
    pieces = "\n".join(self._pieces.id_to_piece(i) for i in range(len(self)))
    return hashlib.sha256(pieces.encode()).hexdigest()[:16]


def padded(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
  """Token rows as int32 [len(rows), length], padded with PAD_ID."""
  out = np.full((len(rows), length), PAD_ID, np.int32)
  for i, row in enumerate(rows):
    out[i, : len(row)] = row
  return out


def train_vocabulary(texts: Iterable[str], path: str, size: int) -> None:
  """Fit a unigram SentencePiece model of `size` pieces to lines of text and write it to `path`."""
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
  pathlib.Path(path).write_bytes(model.getvalue())
