"""Tokenizers of Hugging Face's decoder-only models: GPT-2's byte pairs, and others like them."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.errors import InputError

_ENDS = ("<|endoftext|>", "</s>")


class BytePairs(Vocabulary):
  """A `tokenizer.json`. What ends a text stands before it too, as between those GPT-2 has read."""

  def __init__(self, path: str):
    self.path = str(path)
    try:
      self._tokenizer = Tokenizer.from_file(self.path)
    except Exception as error:  # the package raises nothing more special
      raise InputError(f"{path} is no tokenizer that Hugging Face's can read: {error}.") from error
    # A file may say how long texts are to be, for whoever trained with it.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    ends = [i for i in map(self._tokenizer.token_to_id, _ENDS) if i is not None]
    if not ends:
      raise InputError(f"{path} has no token that ends a text; expected {' or '.join(_ENDS)}.")
    self.eos_id = self.start_id = ends[0]
    self._size = max(self._tokenizer.get_vocab().values()) + 1  # ids may have gaps

  def __len__(self) -> int:
    return self._size

  def encode(self, text: str) -> list[int]:
    return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self.eos_id]

  def decode(self, ids: Iterable[int]) -> str:
    return self._tokenizer.decode(self.until_eos(ids))

  def pieces(self, ids: Sequence[int]) -> list[str]:
    """As everywhere; part of a character reads as U+FFFD, a line break as U+21B5, on one line."""
    piece = lambda i: self._tokenizer.decode([i], skip_special_tokens=False).replace("\n", "\u21b5")
    return [piece(int(i)) if i < len(self) else f"<{int(i)}>" for i in ids]

  def all_pieces(self) -> list[str]:
    return [self._tokenizer.id_to_token(i) or "" for i in range(len(self))]
