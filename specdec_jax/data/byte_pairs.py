"""Vocabularies in a Hugging Face file `tokenizer.json`, such as GPT-2's byte pair encoding."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.errors import InputError

_ENDS = ("<|endoftext|>", "</s>")


class BytePairs(Vocabulary):
  """Vocabulary in a Hugging Face file `tokenizer.json`.

  The token that ends a text also starts a text, because GPT-2 was trained on texts that were
  separated by this token.
  """

  def __init__(self, path: str):
    self.path = str(path)
    try:
      self._tokenizer = Tokenizer.from_file(self.path)
    except Exception as error:  # tokenizers raises plain Exceptions
      raise InputError(f"{path} is not a tokenizer file of Hugging Face: {error}.") from error
    # A file may configure truncation and padding for training.
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
    """Return the text of each token; see `Vocabulary.pieces`.

    A token that is an incomplete character is returned as U+FFFD. Line breaks become U+21B5.
    """
    return [self._piece(int(i)) if i < len(self) else f"<{int(i)}>" for i in ids]

  def _piece(self, i: int) -> str:
    return self._tokenizer.decode([i], skip_special_tokens=False).replace("\n", "\u21b5")

  def all_pieces(self) -> list[str]:
    return [self._tokenizer.id_to_token(i) or "" for i in range(len(self))]
