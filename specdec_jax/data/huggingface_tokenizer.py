"""Vocabularies read by the library tokenizers or, for other files and languages, transformers."""

import pathlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from specdec_jax.data.tokenizer_config import FILE, read_tokenizer_config, require_ids
from specdec_jax.data.vocabulary import DECODER_ONLY, PAD_ID, ModelTokens, Vocabulary
from specdec_jax.errors import InputError

_ENDS = ("<|endoftext|>", "</s>")
_PADS = ("<pad>", "[PAD]")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_LANGUAGE = re.compile(r"__([a-z]+)__|([a-z]{2,3}_[A-Z][A-Za-z]{1,3})")


class HuggingFaceTokenizer(Vocabulary):
  """Vocabulary in a file `tokenizer.json`.

  The sources of an encoder-decoder have the special tokens of the post-processor in the file, or
  EOS at the end if there is none. A text of a decoder-only model ends with EOS and has no other
  special tokens.

  The token that ends a text also starts a text, because GPT-2 was trained on texts that were
  separated by this token, and the decoders of BART and of its successors start with this token.
  """

  _tokenizer: Any

  def __init__(self, path: str, tokens: ModelTokens = DECODER_ONLY):
    """Read the file, and the settings of the tokenizer next to it."""
    self._config = read_tokenizer_config(pathlib.Path(path).parent)
    try:
      self._tokenizer = tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exceptions
      raise InputError(f"{path} is not a tokenizer file of Hugging Face: {error}.") from error
    # Special and added tokens may be named only in the files next to this one, as may the space
    # before a text.
    size = tokenizer.get_vocab_size()
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for _, token in sorted(self._config.tokens(tokenizer.token_to_id, size).items()):
      own = known.get(token.content, token)  # whose other flags are those of the file
      own.special |= token.special
      tokenizer.add_tokens([own])
    prefix = self._config.fields.get("add_prefix_space")
    if prefix is not None and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
      split = tokenizer.pre_tokenizer
      split.add_prefix_space = prefix
      tokenizer.pre_tokenizer = split
    ids, named = tokenizer.get_vocab(), self._config.named
    pads = [ids[token] for token in (named.get("pad_token"), *_PADS) if token in ids]
    pad_id = tokenizer.padding["pad_id"] if tokenizer.padding else next(iter(pads), PAD_ID)
    # A file may configure truncation and padding for training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ends = [ids[token] for token in (named.get("eos_token"), *_ENDS) if token in ids]
    added = tokenizer.get_added_tokens_decoder()
    special_ids = frozenset(i for i, token in added.items() if token.special)
    self._set_tokens(path, tokens, ids, next(iter(ends), None), pad_id, special_ids)
    is_t5 = self._config.kind == "T5Tokenizer"  # which ends a text with the EOS of its settings
    if tokens.has_encoder and (tokenizer.post_processor is None or is_t5):
      eos = self._tokens[self.eos_id]
      tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", eos], special_tokens=[(eos, self.eos_id)]
      )
    self._count_end_tokens()

  def _set_tokens(
    self,
    path: str,
    tokens: ModelTokens,
    ids: Mapping[str, int],
    eos_id: int | None,
    pad_id: int,
    special_ids: frozenset[int],
  ) -> None:
    self.path, self._has_encoder = str(path), tokens.has_encoder
    self._tokens = {i: token for token, i in ids.items()}
    require_ids(path, self._tokens)
    self._size = max(self._tokens, default=-1) + 1  # ids may have gaps
    self.pad_id = pad_id if tokens.pad_id is None else tokens.pad_id
    self.special_ids = special_ids
    known = [i for i in tokens.eos_ids if i < self._size]
    if eos_id is None and not known:
      raise InputError(
        f"{path} has no token that ends a text; expected {' or '.join(_ENDS)}, or the field "
        f"eos_token in a file {FILE} in the same folder."
      )
    self.eos_id = self.start_id = tokens.eos_id(known[0] if eos_id is None else eos_id, self._size)

  def _count_end_tokens(self) -> None:
    ids = self.encode("")
    self.num_end_tokens = len(ids) - ids.index(self.eos_id) if self.eos_id in ids else 0

  def fit(self, num_rows: int) -> None:
    if {*range(num_rows, self._size)} <= self.special_ids:
      self._size = num_rows

  def __len__(self) -> int:
    return self._size

  def encode(self, text: str) -> list[int]:
    if not self._has_encoder:
      return [*self._ids(text, special=False), self.eos_id]
    return [i for i in self._ids(text, special=True) if i < self._size]

  def encode_target(self, text: str) -> list[int]:
    return [i for i in self._ids(text, special=False) if i < self._size]

  def _ids(self, text: str, special: bool) -> list[int]:
    # Unlike `encode`, `encode_batch` lets other threads run.
    return self._tokenizer.encode_batch([text], add_special_tokens=special)[0].ids

  def decode(self, ids: Iterable[int]) -> str:
    kept = [i for i in self.until_eos(ids) if i in self._tokens]
    return self._clean_up(self._tokenizer.decode(kept, skip_special_tokens=True))

  def decode_stable(self, ids: Iterable[int]) -> str:
    # One incomplete character turns all bytes next to it into U+FFFD.
    skipped, kept = self.special_ids, self.until_eos(ids)
    while kept and (kept[-1] in skipped or _BYTE.fullmatch(self._tokens.get(kept[-1], ""))):
      kept.pop()
    return super().decode_stable(kept)

  def _clean_up(self, text: str) -> str:
    is_bpe = isinstance(self._tokenizer.model, models.BPE)  # transformers does not clean these up
    return text if is_bpe else self._config.clean_up(text)

  def pieces(self, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; an incomplete character is U+FFFD, a line break U+21B5."""
    return [self._piece(int(i)) if i < len(self) else f"<{int(i)}>" for i in ids]

  def _piece(self, i: int) -> str:
    token = self._tokens.get(i, "")
    if "\u2581" in token or not token:  # a decoder would remove this space at the start of a text
      return token.replace("\u2581", " ")
    return self._tokenizer.decode([i], skip_special_tokens=False).replace("\n", "\u21b5")

  def all_pieces(self) -> list[str]:
    return [self._tokens.get(i, "") for i in range(len(self))]


class TransformersTokenizer(HuggingFaceTokenizer):
  """Vocabulary that `AutoTokenizer` of transformers reads, such as that of Marian or NLLB."""

  def __init__(self, path: str, tokens: ModelTokens = DECODER_ONLY):
    """Read the folder of the file `path`."""
    try:
      from transformers import AutoTokenizer
    except ImportError as error:
      raise InputError(
        f"{path} is a vocabulary that the library transformers reads, which is not installed; run "
        "pip install 'specdec_jax[transformers]' (in a checkout pip install -e '.[transformers]')."
      ) from error
    folder, language = pathlib.Path(path).parent, tokens.source_language
    if read_tokenizer_config(folder).fields.get("separate_vocabs"):
      raise InputError(
        f"{folder} has a separate vocabulary of the target language (separate_vocabs); only models "
        "with one vocabulary are supported."
      )
    try:
      with warnings.catch_warnings(action="ignore"):  # about sacremoses, which has no effect here
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # files of each class may be damaged in other ways
      reason = str(error).strip().partition("\n")[0].rstrip(".")
      raise InputError(f"transformers cannot read the tokenizer in {folder}: {reason}.") from error
    ids = tokenizer.get_vocab()
    if language and hasattr(tokenizer, "src_lang"):
      names = {next(filter(None, x.groups())) for x in map(_LANGUAGE.fullmatch, ids) if x}
      if language not in names:
        known = sorted(names)
        raise InputError(
          f"source_language is {language!r}, but {path} has no such language; it has {len(known)} "
          f"languages: {', '.join(known[:: max(1, len(known) // 6)][:6])}, ..."
        )
      tokenizer.src_lang = language
    elif language:
      raise no_languages(language, path)
    self._tokenizer = tokenizer
    pad_id = PAD_ID if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    special_ids = frozenset(tokenizer.all_special_ids)
    self._set_tokens(path, tokens, ids, tokenizer.eos_token_id, pad_id, special_ids)
    self._count_end_tokens()

  def _ids(self, text: str, special: bool) -> list[int]:
    return self._tokenizer(text, add_special_tokens=special, verbose=False).input_ids

  def encode_target(self, text: str) -> list[int]:
    # Of these classes only Marian's splits a target in another way, and others need its language.
    name = "text_target" if hasattr(self._tokenizer, "spm_target") else "text"
    ids = self._tokenizer(**{name: text}, add_special_tokens=False, verbose=False).input_ids
    return [i for i in ids if i < self._size]

  def _clean_up(self, text: str) -> str:
    return text


def no_languages(language: str, path: str) -> InputError:
  """Return the error for a source language of a vocabulary without source languages."""
  return InputError(
    f"source_language is {language!r}, but {path} has no source languages; leave source_language "
    "out."
  )
