"""Vocabularies of SentencePiece models whose ids are in a separate file (Marian and M2M100)."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence

from tokenizers import AddedToken

from specdec_jax.data.huggingface_tokenizer import unknown_language
from specdec_jax.data.sentence_pieces import open_pieces
from specdec_jax.data.tokenizer_config import (
  read_fields,
  read_tokenizer_config,
  split_at_added_tokens,
)
from specdec_jax.data.vocabulary import DECODER_ONLY, ModelTokens, Vocabulary
from specdec_jax.errors import InputError

# Languages of the two kinds of M2M100 models, in the order of their ids, which follow vocab.json.
LANGUAGES = {
  "m2m100": (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu "
    "ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms "
    "my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur "
    "uz vi wo xh yi yo zh zu"
  ),
  "wmt21": "en ha is ja cs ru zh de",
}


VOCAB = "vocab.json"
_NAMED = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}  # tokens that a vocabulary must have


class MappedPieces(Vocabulary):
  """Vocabulary of SentencePiece models whose pieces have their ids in a file `vocab.json`.

  A text is encoded with the tokens `prefix`, its pieces, and EOS. A piece without an id is encoded
  as <unk>.
  """

  def __init__(
    self,
    source: pathlib.Path,
    target: pathlib.Path,
    ids: Mapping[str, int],
    tokens: ModelTokens,
    special: Sequence[str] = (),
  ):
    """Read the files.

    Args:
      source: path of the SentencePiece model that encodes.
      target: path of the SentencePiece model that decodes.
      ids: id of each token.
      tokens: tokens that the model uses.
      special: special tokens that the files need not name.

    Raises:
      InputError: a file is missing or damaged.
    """
    self.path = str(source)
    self._source, self._target = open_pieces(str(source)), open_pieces(str(target))
    self._config = config = read_tokenizer_config(source.parent)
    named = [config.token(f"{name}_token", token) for name, token in _NAMED.items()]
    self._ids = {**ids, **{token.content: i for i, token in config.added.items()}}
    eos, self._unknown_id, pad = (self._ids[token] for token in named)
    added = [AddedToken(token, special=True) for token in (*named, *special)]
    added += [*config.extra, *config.added.values(), *config.named.values()]
    self._added = {token.content: token for token in added if token.content in self._ids}
    self._tokens = {i: token for token, i in self._ids.items()}
    self._size = max(self._tokens) + 1
    self.special_ids = frozenset(self._ids[t] for t, token in self._added.items() if token.special)
    self.eos_id = tokens.eos_id(eos, self._size)
    self.pad_id = self.start_id = pad if tokens.pad_id is None else tokens.pad_id
    self._prefix: list[int] = []

  def fit(self, num_rows: int) -> None:
    self._size = max(self._size, num_rows)

  def __len__(self) -> int:
    return self._size

  def encode(self, text: str) -> list[int]:
    parts = split_at_added_tokens(text, self._added.values())
    tokens = [x for part in parts for x in ([part] if part in self._added else self._split(part))]
    ids = [self._ids.get(token, self._unknown_id) for token in tokens]
    return [*self._prefix, *ids, self.eos_id]

  def _split(self, text: str) -> list[str]:
    """Return the pieces of a text without added tokens."""
    return self._source.encode(text, out_type=str)

  def decode(self, ids: Iterable[int]) -> str:
    kept = [i for i in self.until_eos(ids) if i in self._tokens and i not in self.special_ids]
    text = self._target.decode_pieces([self._tokens[i] for i in kept])
    return self._config.clean_up(text.replace("\u2581", " ").strip())

  def pieces(self, ids: Sequence[int]) -> list[str]:
    return [self._tokens.get(int(i), f"<{int(i)}>").replace("\u2581", " ") for i in ids]

  def all_pieces(self) -> list[str]:
    return [self._tokens.get(i, "") for i in range(len(self))]


class MarianPieces(MappedPieces):
  """Vocabulary of a Marian model, such as Opus-MT: source.spm, target.spm and vocab.json.

  A text of a model with several target languages begins with a token such as `>>fra<<`.
  """

  def __init__(self, path: str, tokens: ModelTokens = DECODER_ONLY):
    source = pathlib.Path(path)
    if read_tokenizer_config(source.parent).fields.get("separate_vocabs"):
      raise InputError(
        f"{source.parent} has a separate vocabulary of the target language (separate_vocabs); only "
        "models with one vocabulary are supported."
      )
    ids = read_fields(source.with_name(VOCAB))
    super().__init__(source, source.with_name("target.spm"), ids, tokens)

  def _split(self, text: str) -> list[str]:
    language, separator, rest = text.partition("<<")
    if not (text.startswith(">>") and separator):
      return super()._split(text)
    return [language + separator, *super()._split(rest)]


class M2M100Pieces(MappedPieces):
  """Vocabulary of an M2M100: sentencepiece.bpe.model, vocab.json and languages.

  A text begins with the token of the source language, such as `__en__`.
  """

  def __init__(self, path: str, tokens: ModelTokens = DECODER_ONLY):
    source = pathlib.Path(path)
    ids = read_fields(source.with_name(VOCAB))
    fields = read_tokenizer_config(source.parent).fields
    names = LANGUAGES[fields.get("language_codes") or "m2m100"].split()
    languages = {f"__{name}__": len(ids) + i for i, name in enumerate(names)}
    super().__init__(source, source, {**ids, **languages}, tokens, ["<s>"])
    self.start_id = self.eos_id
    self.special_ids |= {*languages.values()}
    language = tokens.source_language or fields.get("src_lang") or "en"
    if language not in names:
      raise unknown_language(language, self.path, names)
    self._prefix = [languages[f"__{language}__"]]
