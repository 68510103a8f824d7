"""Vocabulary of ByT5 (Xue et al., 2022), whose tokens are the bytes of UTF-8."""

import pathlib
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken

from specdec_jax.data.tokenizer_config import read_tokenizer_config, split_at_added_tokens
from specdec_jax.data.vocabulary import DECODER_ONLY, ModelTokens, Vocabulary
from specdec_jax.errors import InputError

_NAMED = ("<pad>", "</s>", "<unk>")
_NUM_BYTES = 256
_NUM_SENTINELS = 125


class Bytes(Vocabulary):
  """Vocabulary of bytes: padding, EOS, unknown, 256 bytes and 125 sentinels.

  A byte b has the id b + 3. The sentinel <extra_id_0> has the id 259.
  """

  pad_id, eos_id, start_id = 0, 1, 0

  def __init__(self, path: str, tokens: ModelTokens = DECODER_ONLY):
    """Read the settings of the tokenizer.

    Args:
      path: path of tokenizer_config.json.
      tokens: tokens that the model uses.

    Raises:
      InputError: the tokenizer is not that of ByT5.
    """
    self.path = str(path)
    self._config = read_tokenizer_config(pathlib.Path(path).parent)
    if self._config.kind != "ByT5Tokenizer":
      raise InputError(
        f"{path} is of the tokenizer {self._config.kind!r}; only a ByT5Tokenizer needs no other "
        "file. Give the folder or the file of the vocabulary."
      )
    added = {i: AddedToken(text, lstrip=True, rstrip=True) for i, text in enumerate(_NAMED)}
    first = len(_NAMED) + _NUM_BYTES
    added |= {first + i: AddedToken(f"<extra_id_{i}>") for i in range(_NUM_SENTINELS)}
    self._added = {**added, **self._config.added}
    self._ids = {token.content: i for i, token in self._added.items()}
    self.eos_id = tokens.eos_id(self.eos_id, len(self))
    self.pad_id = self.start_id = self.pad_id if tokens.pad_id is None else tokens.pad_id
    self.special_ids = frozenset(self._added)

  def __len__(self) -> int:
    return max(self._added) + 1

  def encode(self, text: str) -> list[int]:
    ids: list[int] = []
    for part in split_at_added_tokens(text, self._added.values()):
      known = part in self._ids
      ids += [self._ids[part]] if known else [b + len(_NAMED) for b in part.encode()]
    return ids if ids[-1:] == [self.eos_id] else [*ids, self.eos_id]  # as in transformers

  def decode(self, ids: Iterable[int]) -> str:
    kept = [i - len(_NAMED) for i in self.until_eos(ids) if i not in self.special_ids]
    return self._config.clean_up(bytes(kept).decode(errors="ignore"))

  def pieces(self, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; see `Vocabulary.pieces`.

    A byte that is not a character is returned as U+FFFD. Line breaks become U+21B5.
    """
    return [self._piece(int(i)) for i in ids]

  def _piece(self, i: int) -> str:
    if i in self._added:
      return self._added[i].content
    if i >= len(self):
      return f"<{i}>"
    return bytes([i - len(_NAMED)]).decode(errors="replace").replace("\n", "\u21b5")

  def all_pieces(self) -> list[str]:
    names = {i: token.content for i, token in self._added.items()}
    return [names.get(i, f"<0x{i - len(_NAMED):02X}>") for i in range(len(self))]

  def single_letter_share(self, text: str) -> float:
    """Return 0, because every text consists of single bytes."""
    return 0.0
