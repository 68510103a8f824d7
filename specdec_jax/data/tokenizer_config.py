"""Settings in the tokenizer files of a Hugging Face folder, such as its added tokens."""

import pathlib
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken

from specdec_jax.data.text import read_fields
from specdec_jax.errors import InputError

FILE = "tokenizer_config.json"
SENTINEL = "<extra_id_"
_MAX_TOKENS = 2**22  # several times as many as the largest vocabularies have
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# The classes that transformers uses for a model whose files name none, as far as they matter here.
_KINDS = {"mbart": "MBartTokenizer", "nllb-moe": "NllbTokenizer", "pegasus": "PegasusTokenizer"}
# Removed spaces (`clean_up_tokenization` in transformers).
_SPACED = " .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"


class TokenizerConfig(NamedTuple):
  """Settings of a tokenizer.

  Attributes:
    kind: class of the tokenizer in transformers without the suffix 'Fast'; '' if it is unknown.
    named: special tokens by name, such as 'eos_token'.
    added: special tokens and other added tokens of which the files have the id, by id.
    extra: further special tokens, such as sentinels.
  """

  kind: str = ""
  fields: Mapping[str, Any] = types.MappingProxyType({})
  named: Mapping[str, str] = types.MappingProxyType({})
  added: Mapping[int, AddedToken] = types.MappingProxyType({})
  extra: tuple[str, ...] = ()

  def tokens(self, id_of: Callable[[str], int | None], size: int) -> dict[int, AddedToken]:
    """Return all special and added tokens by id, those that are new after the `size` others.

    `id_of` returns the id of a token in the file of the vocabulary, or None. Sentinels of T5 are
    left out, because their number is chosen with that of the model's rows.
    """
    found = dict(self.added)
    ids = {token.content: i for i, token in found.items()}
    for content in (*self.named.values(), *self.extra):
      if content in ids:
        found[ids[content]].special = True
      elif not content.startswith(SENTINEL):
        known, end = id_of(content), max([size, *(i + 1 for i in found)])
        ids[content] = end if known is None else known
        found[ids[content]] = AddedToken(content, special=True)
    return found

  def clean_up(self, text: str) -> str:
    """Return a decoded text without spaces before punctuation, if the files ask for that."""
    if not self.fields.get("clean_up_tokenization_spaces"):
      return text
    for old in _SPACED:
      text = text.replace(old, old.strip())
    return text


def read_tokenizer_config(folder: pathlib.Path) -> TokenizerConfig:
  """Return the settings in `folder`, which may have any of the files of transformers 4 and 5."""
  fields, model = (_read_fields(folder / name) for name in (FILE, "config.json"))
  if "added_tokens_decoder" not in fields:  # files of transformers before 4.34
    fields = fields | _read_fields(folder / "special_tokens_map.json")
  named = {name: _content(fields[name]) for name in _NAMED if fields.get(name)}
  extra = fields.get("extra_special_tokens") or fields.get("additional_special_tokens") or []
  extra = tuple(map(_content, extra.values() if isinstance(extra, dict) else extra))
  if "added_tokens_decoder" in fields:
    added = {int(i): _token(**token) for i, token in fields["added_tokens_decoder"].items()}
  else:
    ids, special = _read_fields(folder / "added_tokens.json"), {*named.values(), *extra}
    ids = dict(sorted(ids.items(), key=lambda item: item[1]))
    added = {i: AddedToken(token, special=token in special) for token, i in ids.items()}
  require_ids(str(folder), added)
  kind = fields.get("tokenizer_class") or model.get("tokenizer_class")
  kind = (kind or _KINDS.get(model.get("model_type", ""), "")).removesuffix("Fast")
  return TokenizerConfig(kind, fields, named, added, extra)


def require_ids(path: str, ids: Iterable[int]) -> None:
  """Raise InputError if a token of a vocabulary has an id for which no memory would suffice."""
  if (largest := max(ids, default=0)) >= _MAX_TOKENS:
    raise InputError(f"{path} has a token with the id {largest}; ids lie below {_MAX_TOKENS}.")


def _content(value: str | Mapping[str, Any]) -> str:
  return value if isinstance(value, str) else value["content"]


def _token(content: str, **flags: Any) -> AddedToken:
  names = "lstrip", "rstrip", "normalized", "single_word", "special"
  return AddedToken(content, **{name: bool(flags[name]) for name in names if name in flags})


def _read_fields(path: pathlib.Path) -> dict[str, Any]:
  if not path.is_file():
    return {}
  try:
    return read_fields(path)
  except ValueError as error:
    raise InputError(f"{path} is damaged: {error}.") from error


class AddedTokens:
  """Tokens that are matched as a whole in a text, as in transformers."""

  def __init__(self, by_id: Mapping[int, AddedToken]):
    self.by_id = by_id
    self.special_ids = frozenset(i for i, token in by_id.items() if token.special)
    self._ids = {token.content: i for i, token in by_id.items()}
    longest_first = sorted(self._ids, key=len, reverse=True)
    self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if by_id else None

  def id_of(self, token: str) -> int:
    """Return the id of an added token."""
    return self._ids[token]

  def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the ids of a text; `encode` returns those of the parts between added tokens."""
    parts = [part for part in self._pattern.split(text) if part] if self._pattern else [text]
    for i, part in enumerate(parts):
      token = self.by_id[self._ids[part]] if part in self._ids else None
      if token and token.rstrip and i + 1 < len(parts):
        parts[i + 1] = parts[i + 1].lstrip()
      if token and token.lstrip and i:
        parts[i - 1] = parts[i - 1].rstrip()
    ids = ([self._ids[part]] if part in self._ids else encode(part) for part in parts if part)
    return [i for part in ids for i in part]
