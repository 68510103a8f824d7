"""Vocabularies of the library tokenizers, such as those in a Hugging Face file `tokenizer.json`."""

import json
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tokenizers import (
  AddedToken,
  Regex,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)

from specdec_jax.data.tokenizer_config import TokenizerConfig, read_fields, read_tokenizer_config
from specdec_jax.data.vocabulary import DECODER_ONLY, PAD_ID, ModelTokens, Vocabulary
from specdec_jax.errors import InputError

_ENDS = ("<|endoftext|>", "</s>")
_PADS = ("<pad>", "[PAD]")
_DEFAULTS = (*_ENDS, "<s>", "<pad>", "<unk>", "<mask>")  # special tokens of byte-level BPEs
_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}")


class _Languages(NamedTuple):
  """Source languages of a class of tokenizers.

  Attributes:
    default: source language if the files name none.
    precedes: whether the language token precedes a text; otherwise it follows EOS.
  """

  default: str
  precedes: bool


_LANGUAGES = {
  "MBartTokenizer": _Languages("en_XX", precedes=False),
  "MBart50Tokenizer": _Languages("en_XX", precedes=True),
  "NllbTokenizer": _Languages("eng_Latn", precedes=True),
}
_MBART50 = (
  "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV "
  "my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID "
  "ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA "
  "ur_PK xh_ZA gl_ES sl_SI"
)
# Special tokens before and after the pieces of a SentencePiece model.
_SPECIAL = {
  "MBart50Tokenizer": (("<s>", "<pad>", "</s>", "<unk>"), (*_MBART50.split(), "<mask>")),
  "PegasusTokenizer": (
    ("<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, 103))),
    (),
  ),
}


class HuggingFaceTokenizer(Vocabulary):
  """Vocabulary in files of Hugging Face that the library tokenizers reads.

  The sources of an encoder-decoder have the special tokens of the post-processor in the file, or
  EOS at the end if there is none. A text of a decoder-only model ends with EOS and has no other
  special tokens.

  The token that ends a text also starts a text, because GPT-2 was trained on texts that were
  separated by this token, and the decoders of BART and of its successors start with this token.
  """

  def __init__(
    self,
    path: str,
    tokens: ModelTokens = DECODER_ONLY,
    read: Callable[[str, TokenizerConfig], Tokenizer] | None = None,
  ):
    """Read the files.

    Args:
      path: path of the file, in the folder that may contain the settings of the tokenizer.
      tokens: tokens that the model uses.
      read: function that reads the file; by default, the file is a `tokenizer.json`.

    Raises:
      InputError: the files are damaged, or they have no EOS or no such source language.
    """
    self.path, self._has_encoder = str(path), tokens.has_encoder
    uses_config = tokens.has_encoder or read is not None
    folder = pathlib.Path(path).parent
    self._config = read_tokenizer_config(folder) if uses_config else TokenizerConfig()
    try:
      tokenizer = read(self.path, self._config) if read else Tokenizer.from_file(self.path)
    except InputError:
      raise
    except Exception as error:  # tokenizers raises plain Exceptions
      raise InputError(f"{path} is not a tokenizer file of Hugging Face: {error}.") from error
    self._tokenizer = tokenizer
    self._size = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
    pads = [i for i in map(tokenizer.token_to_id, _PADS) if i is not None]
    pads = [tokenizer.padding["pad_id"]] if tokenizer.padding else pads
    self.pad_id = tokens.pad_id if tokens.pad_id is not None else next(iter(pads), PAD_ID)
    # A file may configure truncation and padding for training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    self.eos_id = self.start_id = self._find_eos(tokens)
    if tokens.has_encoder:
      self._set_post_processor(tokens.source_language)
      self.special_ids = self._find_special_ids()
      ends = tokenizer.encode("").ids
      while ends and ends[0] != self.eos_id:
        ends = ends[1:]
      self.num_end_tokens = len(ends)

  def _find_eos(self, tokens: ModelTokens) -> int:
    of_config = (self._config.token("eos_token", ""),) if tokens.has_encoder else ()
    ends = [i for i in map(self._tokenizer.token_to_id, of_config + _ENDS) if i is not None]
    known = [i for i in tokens.eos_ids if i < self._size]
    if not (ends or known):
      raise InputError(f"{self.path} has no token that ends a text; expected {' or '.join(_ENDS)}.")
    return tokens.eos_id((ends or known)[0], self._size)

  def _set_post_processor(self, source_language: str | None) -> None:
    """Add the source language, or EOS if the file adds no special tokens."""
    fields, languages = self._config.fields, _LANGUAGES.get(self._config.kind)
    eos = self._tokenizer.id_to_token(self.eos_id)
    template, special = ["$A", eos], [(eos, self.eos_id)]
    if languages:
      language = source_language or fields.get("src_lang") or languages.default
      precedes = languages.precedes and not fields.get("legacy_behaviour")
      template = [language, *template] if precedes else [*template, language]
      special.append((language, self._id_of_language(language)))
    elif source_language:
      raise InputError(
        f"source_language is {source_language!r}, but {self.path} is of no tokenizer with source "
        f"languages ({', '.join(_LANGUAGES)}); leave it out."
      )
    elif self._tokenizer.post_processor is not None:
      return
    self._tokenizer.post_processor = processors.TemplateProcessing(
      single=template, special_tokens=special
    )

  def _id_of_language(self, language: str) -> int:
    ids = self._tokenizer.get_vocab()
    known = sorted(filter(_LANGUAGE.fullmatch, ids))
    if language not in known:
      raise unknown_language(language, self.path, known)
    return ids[language]

  def _find_special_ids(self) -> frozenset[int]:
    added = self._tokenizer.get_added_tokens_decoder()
    return frozenset(i for i, token in added.items() if token.special)

  def fit(self, num_rows: int) -> None:
    if num_rows < self._size:
      if not {*range(num_rows, self._size)} <= self.special_ids:
        return
      state = json.loads(self._tokenizer.to_str())
      state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < num_rows]
      self._tokenizer = Tokenizer.from_str(json.dumps(state))
      self.special_ids = self._find_special_ids()
    self._size = num_rows

  def __len__(self) -> int:
    return self._size

  def encode(self, text: str) -> list[int]:
    if self._has_encoder:
      return self._tokenizer.encode(text).ids
    return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self.eos_id]

  def decode(self, ids: Iterable[int]) -> str:
    text = self._tokenizer.decode(self.until_eos(ids))
    is_bpe = isinstance(self._tokenizer.model, models.BPE)  # transformers does not clean these up
    return text if is_bpe or not self._has_encoder else self._config.clean_up(text)

  def pieces(self, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; see `Vocabulary.pieces`.

    A token that is an incomplete character is returned as U+FFFD. Line breaks become U+21B5.
    """
    return [self._piece(int(i)) if i < len(self) else f"<{int(i)}>" for i in ids]

  def _piece(self, i: int) -> str:
    token = self._tokenizer.id_to_token(i) or ""
    if "\u2581" in token:  # a decoder would remove this space at the start of a text
      return token.replace("\u2581", " ")
    return self._tokenizer.decode([i], skip_special_tokens=False).replace("\n", "\u21b5")

  def all_pieces(self) -> list[str]:
    return [self._tokenizer.id_to_token(i) or "" for i in range(len(self))]


def unknown_language(language: str, path: str, known: Sequence[str]) -> InputError:
  """Return the error for a source language that a vocabulary does not have."""
  some = ", ".join(known[:: max(1, len(known) // 6)][:6])
  return InputError(
    f"source_language is {language!r}, but {path} has no such language; it has {len(known)} "
    f"languages: {some}{', ...' if len(known) > 6 else ''}."
  )


def read_byte_level_bpe(path: str, config: TokenizerConfig) -> Tokenizer:
  """Return the tokenizer in files vocab.json and merges.txt, as used by RoBERTa, BART and CodeT5.

  Args:
    path: path of vocab.json.
    config: settings of the tokenizer.

  Raises:
    InputError: a file is missing or damaged.
  """
  merges = pathlib.Path(path).with_name("merges.txt")
  ids = read_fields(pathlib.Path(path))
  tokenizer = Tokenizer(models.BPE.from_file(path, str(merges)))
  spaced = bool(config.fields.get("add_prefix_space"))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
  tokenizer.decoder = decoders.ByteLevel()
  defaults = [AddedToken(token, normalized=False, special=True) for token in _DEFAULTS]
  named = {token.content: token for token in defaults if token.content in ids}
  named |= {token.content: token for token in config.named.values()}
  of_files = [config.added[i] for i in sorted(config.added)]
  tokenizer.add_tokens([token for token in of_files if not token.special])
  tokenizer.add_special_tokens([*filter(lambda token: token.special, of_files), *named.values()])
  tokenizer.add_special_tokens([*config.extra])
  sep, cls = config.token("sep_token", "</s>"), config.token("cls_token", "<s>")
  ids = tokenizer.get_vocab()
  if sep in ids and cls in ids:  # not in GPT-2
    tokenizer.post_processor = processors.RobertaProcessing(
      (sep, ids[sep]), (cls, ids[cls]), add_prefix_space=spaced
    )
  return tokenizer


def read_unigram(path: str, config: TokenizerConfig) -> Tokenizer:
  """Return the tokenizer of mBART-50 or PEGASUS in a SentencePiece file, as transformers does.

  The ids of special tokens are those of fairseq or of PEGASUS, not those of the file.

  Args:
    path: path of the SentencePiece model.
    config: settings of the tokenizer.

  Raises:
    InputError: the ids of this kind of tokenizer are not known, or the file is damaged.
  """
  from sentencepiece import sentencepiece_model_pb2  # needs protobuf

  if config.kind not in _SPECIAL:
    raise InputError(
      f"{path} is of the tokenizer {config.kind!r}, whose ids are read from a tokenizer.json only; "
      "write it with AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers."
    )
  model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
  model.ParseFromString(pathlib.Path(path).read_bytes())
  first, last = _SPECIAL[config.kind]
  num_skipped = 3 if "<unk>" in first else 2  # special tokens of the file
  scores = [(piece.piece, piece.score) for piece in model.pieces][num_skipped:]
  scores = [(token, 0.0) for token in first] + scores + [(token, 0.0) for token in last]
  unknown_id = [token for token, _ in scores].index("<unk>")
  tokenizer = Tokenizer(models.Unigram(scores, unknown_id, byte_fallback=False))
  spaces = normalizers.Replace(Regex(" {2,}"), " ")
  charsmap = model.normalizer_spec.precompiled_charsmap
  tokenizer.normalizer = (
    normalizers.Sequence([normalizers.Precompiled(charsmap), spaces]) if charsmap else spaces
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
  tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
  mask = AddedToken("<mask>", lstrip=True, normalized=True, special=True)
  special = [token for token in (*first, *last, "<unk>", "</s>") if token != "<mask>"]
  tokenizer.add_special_tokens([*special, *([mask] if "<mask>" in last else [])])
  return tokenizer
