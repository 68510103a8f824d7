"""Settings in the tokenizer files of a Hugging Face folder, such as its special tokens."""

import json
import pathlib
import re
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken

from specdec_jax.errors import InputError

FILE = "tokenizer_config.json"
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# The classes that transformers uses for a model whose files name none, as far as they matter here.
_KINDS = {"mbart": "MBartTokenizer", "nllb-moe": "NllbTokenizer", "pegasus": "PegasusTokenizer"}
# Removed spaces (`clean_up_tokenization` in transformers).
_SPACED = " .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"


class TokenizerConfig(NamedTuple):
  """Settings of a tokenizer.

  Attributes:
    kind: class of the tokenizer in transformers without the suffix 'Fast'; '' if it is unknown.
    fields: fields of tokenizer_config.json.
    named: special tokens by name, such as 'eos_token'.
    added: special tokens and other added tokens that have an id in the files, by id.
    extra: further special tokens, such as language tokens.
  """

  kind: str = ""
  fields: Mapping[str, Any] = types.MappingProxyType({})
  named: Mapping[str, AddedToken] = types.MappingProxyType({})
  added: Mapping[int, AddedToken] = types.MappingProxyType({})
  extra: Sequence[AddedToken] = ()

  def token(self, name: str, default: str) -> str:
    """Return the text of a special token, such as 'eos_token'."""
    return self.named[name].content if name in self.named else default

  def clean_up(self, text: str) -> str:
    """Return a decoded text without spaces before punctuation, if the files ask for that."""
    if not self.fields.get("clean_up_tokenization_spaces"):
      return text
    for old in _SPACED:
      text = text.replace(old, old.strip())
    return text


def read_tokenizer_config(folder: pathlib.Path) -> TokenizerConfig:
  """Return the settings in `folder`, which may have any of the files of transformers 4 and 5."""
  fields, model = (read_fields(folder / name) for name in (FILE, "config.json"))
  if "added_tokens_decoder" in fields:
    added = {int(i): _token(token) for i, token in fields["added_tokens_decoder"].items()}
  else:  # files of transformers before 4.34
    fields = fields | read_fields(folder / "special_tokens_map.json")
    tokens = read_fields(folder / "added_tokens.json")
    special = {_token(fields[name]).content for name in _NAMED if fields.get(name)}
    special |= {token.content for token in _extra(fields)}
    added = {i: _token(token, token in special) for token, i in tokens.items()}
  by_text = {token.content: token for token in added.values()}
  named = {name: _token(fields[name]) for name in _NAMED if fields.get(name)}
  kind = fields.get("tokenizer_class") or model.get("tokenizer_class")
  return TokenizerConfig(
    kind=(kind or _KINDS.get(model.get("model_type", ""), "")).removesuffix("Fast"),
    fields=fields,
    named={name: by_text.get(token.content, token) for name, token in named.items()},
    added=added,
    extra=_extra(fields),
  )


def _extra(fields: Mapping[str, Any]) -> list[AddedToken]:
  extra = fields.get("extra_special_tokens") or fields.get("additional_special_tokens") or []
  return [_token(token) for token in (extra.values() if isinstance(extra, dict) else extra)]


def _token(value: str | Mapping[str, Any], special: bool = True) -> AddedToken:
  if isinstance(value, str):
    return AddedToken(value, special=special, normalized=not special)
  flags = {name: bool(value.get(name)) for name in ("lstrip", "rstrip", "normalized")}
  return AddedToken(value["content"], special=value.get("special", special), **flags)


def read_fields(path: pathlib.Path) -> dict[str, Any]:
  """Return the fields of a JSON file, or no fields if there is no such file.

  Raises:
    InputError: the file is damaged.
  """
  if not path.is_file():
    return {}
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise InputError(f"{path} is damaged: {error}.") from error


def split_at_added_tokens(text: str, added: Collection[AddedToken]) -> list[str]:
  """Return the parts of a text: added tokens, and the text between them, as in transformers.

  The longest token that begins first is found first. Tokens remove the space next to them if their
  flags say so.
  """
  by_text = {token.content: token for token in added}
  pattern = "|".join(map(re.escape, sorted(by_text, key=len, reverse=True)))
  parts = [part for part in re.split(f"({pattern})", text) if part] if pattern else [text]
  for i, part in enumerate(parts):
    token = by_text.get(part)
    if token and token.rstrip and i + 1 < len(parts):
      parts[i + 1] = parts[i + 1].lstrip()
    if token and token.lstrip and i:
      parts[i - 1] = parts[i - 1].rstrip()
  return [part for part in parts if part]
