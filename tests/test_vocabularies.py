"""Test vocabularies of encoder-decoders: special tokens, languages, and parity with transformers.

The tests write tokenizer files like those on the Hugging Face Hub, with tiny models.
"""

import concurrent.futures
import functools
import io
import json
import re
import sys
import time

import numpy as np
import pytest
import sentencepiece
import tiny_pair
from tokenizers import (
  AddedToken,
  Regex,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
  trainers,
)

from specdec_jax.data.vocabularies import (
  find_vocabulary,
  open_vocabulary,
  open_vocabulary_of_model,
  padded_size,
)
from specdec_jax.data.vocabulary import ModelTokens
from specdec_jax.errors import InputError
from specdec_jax.load import load_pair

SENTENCES = [
  *tiny_pair.SENTENCES,
  "L'été, où ça ?",
  "Привет, мир!",
  "0123456789 .,;:!?'\"()[]<>/|_-",
]
ENCODER = ModelTokens(has_encoder=True)
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
EXTRA_IDS = [f"<extra_id_{i}>" for i in range(100)]
TEXTS = [
  *tiny_pair.SENTENCES[:12],
  *("", " ", "  ", "\n", "\t", " a", "a ", "a  b", "  two  spaces  ", "line\nbreak", "tab\there"),
  *(
    "A",
    "a b c",
    "UPPER CASE",
    "don't you 'm n't",
    "a , b . c ! d ?",
    "x\u00a0y",
    "zero\u200bwidth",
  ),
  *(
    "Fuß",
    "Ünïcödé",
    "e\u0301te\u0301",
    "\ufb01ne",
    "\u2460\u00bd\u2122",
    "日本語",
    "Привет мир",
    "مرحبا",
  ),
  *(
    "🎉",
    "👩‍👩‍👧",
    "\U0001f1e9\U0001f1ea",
    "\u2581",
    "\u2581a \u2581",
    "\ufffd",
    "\u3000wide\u3000",
  ),
  *("<s>", "</s>", "<pad>", "<unk>", "<mask>", "a </s> b", "a</s>b", " </s> ", "<pad><pad>x"),
  *("<unk> a", "a<mask>b", " <mask> a", "<extra_id_0>", "a <extra_id_1> b", "<bos>", "<2en> Hallo"),
  *(
    "<",
    "< s >",
    "</",
    "&lt;",
    "http://a.b/c?d=e",
    "def f(x):\n  return x",
    "12345.67",
    "…",
    "“q”",
  ),
]
MULTILINGUAL = [">>fra<< A man", ">>xxx<< A man", " >>fra<< A", ">>fra<<", "a >>fra<< b", ">>fra A"]
MULTILINGUAL += ["en_XX a", "fr_XX", "eng_Latn a", "a fra_Latn b", "__en__ a", "a __fr__b"]
TEXTS += MULTILINGUAL
TEXTS += [
  "a <city> b New York",
  "a<2de>b <2en>",
  "<sep> x<sep>",
  "<|end|> a",
  "<ctl> a",
  "caf\u00e9 x\u65e5",
]


def write(folder, **files):
  """Write JSON files, such as `config={...}` for config.json."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, fields in files.items():
    (folder / f"{name}.json").write_text(json.dumps(fields))


@functools.cache
def piece_model(size=100, **settings):
  """Return a SentencePiece model as bytes."""
  model, settings = io.BytesIO(), {"character_coverage": 1.0, "minloglevel": 2} | settings
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=size, **settings
  )
  return model.getvalue()


@functools.cache
def scored_pieces():
  """Return the pieces of a unigram model with scores, without special tokens."""
  model = sentencepiece.SentencePieceProcessor(model_proto=piece_model())
  return [(model.id_to_piece(i), model.get_score(i)) for i in range(3, len(model))]


def unigram(special, last=(), unk_id=3):
  """Return a tokenizer of a unigram model; `special` precede the pieces, and `last` follow them."""
  scores = [(token, 0.0) for token in special] + scored_pieces() + [(token, 0.0) for token in last]
  tokenizer = Tokenizer(models.Unigram(scores, unk_id=unk_id))
  tokenizer.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
  tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
  tokenizer.add_special_tokens([*special, *last])
  return tokenizer


def split_at_spaces(tokenizer):
  tokenizer.normalizer = normalizers.Sequence([])
  split = pre_tokenizers.WhitespaceSplit()
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
  return tokenizer


@functools.cache
def byte_level_bpe():
  """Return the ids and the merges of a byte-level BPE with the special tokens of BART."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  trainer = trainers.BpeTrainer(
    vocab_size=330,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    special_tokens=[*SPECIAL],
    show_progress=False,
  )
  tokenizer.train_from_iterator(SENTENCES, trainer)
  model = json.loads(tokenizer.to_str())["model"]
  return model["vocab"], [tuple(merge) for merge in model["merges"]]


def bart(folder):
  ids, merges = byte_level_bpe()
  tokenizer = Tokenizer(models.BPE({**ids, "<mask>": len(ids)}, merges))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.post_processor = processors.RobertaProcessing(
    ("</s>", ids["</s>"]), ("<s>", ids["<s>"]), add_prefix_space=False
  )
  mask = AddedToken("<mask>", lstrip=True, special=True)
  tokenizer.add_special_tokens([*SPECIAL, mask])
  write(folder, tokenizer_config={"tokenizer_class": "BartTokenizer"})
  tokenizer.save(str(folder / "tokenizer.json"))


def codet5(folder):
  ids, merges = byte_level_bpe()
  sentinels = EXTRA_IDS[:3][::-1]
  named = dict(bos="<s>", eos="</s>", unk="<unk>", sep="</s>", pad="<pad>", cls="<s>")
  named = {f"{name}_token": token for name, token in named.items()}
  named["mask_token"] = dict(
    content="<mask>", lstrip=True, rstrip=False, normalized=True, single_word=False
  )
  write(
    folder,
    vocab={**ids, "<mask>": len(ids)},
    special_tokens_map={**named, "additional_special_tokens": sentinels},
    added_tokens={token: len(ids) + 1 + i for i, token in enumerate(sentinels)},
    tokenizer_config={
      "tokenizer_class": "RobertaTokenizer",
      "additional_special_tokens": sentinels,
    },
  )
  lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
  (folder / "merges.txt").write_text("\n".join([*lines, ""]))


def t5(folder):
  tokenizer = unigram(("<pad>", "</s>", "<unk>"), EXTRA_IDS[::-1], unk_id=2)
  tokenizer = split_at_spaces(tokenizer)
  tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
  fields = {"tokenizer_class": "T5Tokenizer", "additional_special_tokens": EXTRA_IDS}
  write(folder, tokenizer_config=fields | {"clean_up_tokenization_spaces": True})
  tokenizer.save(str(folder / "tokenizer.json"))


def pegasus(folder):
  unknown = [f"<unk_{i}>" for i in range(2, 103)]
  special = ("<pad>", "</s>", "<mask_1>", "<mask_2>", *unknown, "<unk>")
  tokenizer = unigram(special, unk_id=len(special) - 1)
  tokenizer.normalizer = normalizers.Sequence(
    [normalizers.Replace("\n", " "), tokenizer.normalizer]
  )
  tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
  write(folder, tokenizer_config={"tokenizer_class": "PegasusTokenizer"})
  tokenizer.save(str(folder / "tokenizer.json"))
  (folder / "spiece.model").write_bytes(piece_model())


MBART = """ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT
lv_LV my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL hr_HR
id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX
uk_UA ur_PK xh_ZA gl_ES sl_SI""".split()


def mbart50(folder):
  tokenizer = unigram(SPECIAL, [*MBART, "<mask>"])
  write(folder, tokenizer_config={"tokenizer_class": "MBart50Tokenizer"})
  tokenizer.save(str(folder / "tokenizer.json"))


def mbart50_pieces(folder):
  """As for mbart-large-50, there is no tokenizer.json."""
  write(folder, tokenizer_config={"tokenizer_class": "MBart50Tokenizer", "src_lang": "ro_RO"})
  content = piece_model(normalization_rule_name="nmt_nfkc")
  (folder / "sentencepiece.bpe.model").write_bytes(content)


def pegasus_pieces(folder):
  named = {"mask_token": "<mask_2>", "mask_token_sent": "<mask_1>"}
  write(folder, tokenizer_config={"tokenizer_class": "PegasusTokenizer", **named})
  ids = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
  (folder / "spiece.model").write_bytes(piece_model(**ids))


def mbart(folder):
  """As for mbart-large-en-ro, the class is that of the type of the model."""
  tokenizer = split_at_spaces(unigram(SPECIAL, [*MBART[:25], "<mask>"]))
  write(folder, tokenizer_config={"src_lang": "de_DE"}, config={"model_type": "mbart"})
  tokenizer.save(str(folder / "tokenizer.json"))


def bpe(special, last, **settings):
  """Return a BPE whose words begin with U+2581; `special` precede the pieces, `last` follow."""
  tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
  tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
  trainer = trainers.BpeTrainer(vocab_size=90 + len(special), special_tokens=[*special])
  trainer.show_progress = False
  tokenizer.train_from_iterator(SENTENCES, trainer)
  model = json.loads(tokenizer.to_str())["model"]
  ids = {token: i for token, i in model["vocab"].items()}
  ids |= {token: len(ids) + i for i, token in enumerate(last)}
  merges = [tuple(merge) for merge in model["merges"]]
  tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, **settings))
  tokenizer.add_special_tokens([*special, *last])
  return tokenizer


NLLB = ["ace_Arab", "deu_Latn", "eng_Latn", "fra_Latn", "zho_Hans"]


def nllb(folder, **fields):
  """The special tokens of the post-processor in the file are not those of transformers."""
  tokenizer = bpe(SPECIAL, [*NLLB, "<mask>"])
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
  tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
  tokenizer.normalizer = None
  tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
  fields = {"tokenizer_class": "NllbTokenizer", "additional_special_tokens": NLLB} | fields
  write(folder, tokenizer_config=fields)
  tokenizer.save(str(folder / "tokenizer.json"))


def legacy_nllb(folder):
  nllb(folder, legacy_behaviour=True, src_lang="fra_Latn")


def t5gemma(folder):
  """The tokenizer adds <bos> in front of a text and nothing at its end."""
  as_bytes = [f"<0x{i:02X}>" for i in range(256)]
  special = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<2mass>")
  tokenizer = bpe(special, as_bytes, byte_fallback=True)
  state = json.loads(tokenizer.to_str())
  state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 6]
  tokenizer = Tokenizer.from_str(json.dumps(state))
  tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
  tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
  tokenizer.decoder = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
  )
  tokenizer.post_processor = processors.TemplateProcessing(
    "<bos> $A", special_tokens=[("<bos>", 2)]
  )
  named = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk", "mask")}
  fields = {"add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False}
  write(folder, tokenizer_config={"tokenizer_class": "GemmaTokenizer", **named, **fields})
  tokenizer.save(str(folder / "tokenizer.json"))


def marian(folder):
  """Some pieces have no id, and there are tokens of target languages."""
  write(folder, tokenizer_config={"source_lang": "en", "target_lang": "roa"})
  write(folder, config={"model_type": "marian"})
  parts = {"source.spm": piece_model(), "target.spm": piece_model(90, seed_sentencepiece_size=1000)}
  pieces = {}
  for name, content in parts.items():
    (folder / name).write_bytes(content)
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    pieces |= dict.fromkeys(model.id_to_piece(i) for i in range(3, len(model)))
  pieces = [piece for piece in pieces if not piece.strip("\u2581").isdigit()]
  tokens = ["</s>", "<unk>", *pieces, ">>fra<<", ">>ron<<", "<pad>"]
  write(folder, vocab={token: i for i, token in enumerate(tokens)})


def m2m100(folder, **fields):
  from transformers.models.m2m_100 import tokenization_m2m_100

  names = tokenization_m2m_100.FAIRSEQ_LANGUAGE_CODES["m2m100"]
  pieces = [piece for piece, _ in scored_pieces()]
  extra = {"additional_special_tokens": [f"__{name}__" for name in names]}
  write(
    folder,
    vocab={token: i for i, token in enumerate([*SPECIAL, *pieces])},
    tokenizer_config={"tokenizer_class": "M2M100Tokenizer", **fields},
    special_tokens_map=extra,
  )
  (folder / "sentencepiece.bpe.model").write_bytes(piece_model())


def t5_pieces(folder):
  """As for umT5 and fastchat-t5, files name the number of sentinels, and further tokens."""
  folder.mkdir(parents=True)
  (folder / "spiece.model").write_bytes(piece_model(pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
  fields = {"extra_ids": 10, "clean_up_tokenization_spaces": True}
  write(folder, tokenizer_config={"tokenizer_class": "T5Tokenizer", **fields})
  write(folder, added_tokens={"{": 110, "}": 111, "<2en>": 112})


def byt5(folder):
  write(folder, tokenizer_config={"tokenizer_class": "ByT5Tokenizer"})


def t5_named(folder):
  """Files name another EOS, and tokens without an id; <ctl> is a control symbol of the pieces."""
  folder.mkdir(parents=True)
  ids = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
  (folder / "spiece.model").write_bytes(piece_model(control_symbols="<ctl>", **ids))
  extra = {"additional_special_tokens": ["<2de>", "<2en>"]}
  named = {"eos_token": "<|end|>", "pad_token": "<pad>", "unk_token": "<unk>"}
  fields = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, **extra, **named}
  write(folder, tokenizer_config=fields, added_tokens={"<|end|>": 100})


def byt5_added(folder):
  flags = dict(lstrip=True, rstrip=True, normalized=False, single_word=False, special=True)
  added = {i: {"content": token} | flags for i, token in enumerate(("<pad>", "</s>", "<unk>"))}
  flags |= dict(lstrip=False, rstrip=False)
  sentinels = [f"<extra_id_{i}>" for i in range(125)]
  added |= {259 + i: {"content": token} | flags for i, token in enumerate(sentinels)}
  added[384] = {"content": "<city>"} | flags | dict(special=False)
  added[385] = {"content": "New York"} | flags
  extra = {"extra_special_tokens": [*sentinels, "New York"], "extra_ids": 0}
  fields = {"tokenizer_class": "ByT5Tokenizer", "added_tokens_decoder": added, **extra}
  write(folder, tokenizer_config=fields)


def bart_named(folder):
  """Only files next to tokenizer.json name these tokens."""
  bart(folder)
  extra = {"additional_special_tokens": ["<sep>"]}
  write(folder, tokenizer_config={"tokenizer_class": "BartTokenizer", **extra})
  write(folder, added_tokens={"<city>": 331})


def madlad(folder):
  """In MADLAD-400, the ids of special tokens differ from those of T5."""
  folder.mkdir()
  (folder / "spiece.model").write_bytes(piece_model(user_defined_symbols="<2de>,<2en>"))


# For each tokenizer: its path in the folder, and what it adds before and after a text.
KINDS = {
  bart: ("tokenizer.json", ["<s>"], ["</s>"]),
  codet5: ("vocab.json", ["<s>"], ["</s>"]),
  t5: ("tokenizer.json", [], ["</s>"]),
  pegasus: ("tokenizer.json", [], ["</s>"]),
  mbart: ("tokenizer.json", [], ["</s>", "de_DE"]),
  mbart50: ("tokenizer.json", ["en_XX"], ["</s>"]),
  mbart50_pieces: ("sentencepiece.bpe.model", ["ro_RO"], ["</s>"]),
  pegasus_pieces: ("spiece.model", [], ["</s>"]),
  nllb: ("tokenizer.json", ["eng_Latn"], ["</s>"]),
  legacy_nllb: ("tokenizer.json", [], ["</s>", "fra_Latn"]),
  t5gemma: ("tokenizer.json", ["<bos>"], []),
  marian: ("source.spm", [], ["</s>"]),
  m2m100: ("sentencepiece.bpe.model", ["__en__"], ["</s>"]),
  byt5: ("tokenizer_config.json", [], ["</s>"]),
  t5_pieces: ("spiece.model", [], ["</s>"]),
  t5_named: ("spiece.model", [], ["<|end|>"]),
  byt5_added: ("tokenizer_config.json", [], ["</s>"]),
  bart_named: ("tokenizer.json", ["<s>"], ["</s>"]),
  madlad: ("spiece.model", [], ["</s>"]),
}
ENDS = {"t5gemma": "<eos>", "t5_named": "<|end|>"}
NAMES = {make.__name__: make for make in KINDS}
# Those that transformers reads.
THEIRS = "codet5", "mbart", "mbart50", "mbart50_pieces", "pegasus_pieces", "nllb", "legacy_nllb"
THEIRS += "marian", "m2m100"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
  """Return a function from the name of a tokenizer to the folder with its files."""

  @functools.cache
  def folder(name):
    if name in THEIRS:
      pytest.importorskip("transformers", reason="transformers is not installed")
    path = tmp_path_factory.mktemp("tokenizers") / name
    NAMES[name](path)
    return path

  return folder


def open_source(folder, **tokens):
  """Open the vocabulary in a folder as that of an encoder-decoder."""
  tokens = ModelTokens(has_encoder=True, **tokens)
  return open_vocabulary_of_model(
    str(folder), 113 if folder.name == "t5_pieces" else 1, tokens=tokens
  )


def transformers_tokenizer(folder, **options):
  transformers = pytest.importorskip("transformers", reason="transformers is not installed")
  return transformers.AutoTokenizer.from_pretrained(str(folder), **options)


# Encoding and decoding.


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_surround_a_text(folder_of, name):
  file, before, after = KINDS[NAMES[name]]
  words = open_source(folder_of(name))
  assert words.path == find_vocabulary(str(folder_of(name))) == str(folder_of(name) / file)
  pieces = words.all_pieces()
  assert len(pieces) == len(words) and [pieces[i] for i in words.encode("")] == before + after
  assert words.num_end_tokens == len(after)
  for text in ("A man runs.", tiny_pair.SENTENCES[0]):
    tokens = [pieces[i] for i in words.encode(text)]
    end = len(tokens) - len(after)
    assert tokens[: len(before)] == before and tokens[end:] == after
    assert not {*before, *after} & {*tokens[len(before) : end]}
  assert pieces[words.eos_id] == ENDS.get(name, "</s>")
  assert name == "madlad" or pieces[words.pad_id] == "<pad>"


@pytest.mark.parametrize("name", NAMES)
def test_decoded_text_is_that_before_eos_without_special_tokens(folder_of, name):
  words = open_source(folder_of(name))
  ids = words.encode("A man runs")
  assert words.decode(ids) == words.decode([*ids, words.eos_id, *ids]) == "A man runs"
  start = [words.pad_id, *words.special_ids - {words.eos_id}]
  assert words.decode([*start, *ids[: len(ids) - words.num_end_tokens]]) == "A man runs"
  assert words.decode([10**6, *ids]) == "A man runs" and words.decode([words.eos_id, *ids]) == ""


@pytest.mark.parametrize("name", NAMES)
def test_pieces_concatenate_to_the_text(folder_of, name):
  words = open_source(folder_of(name))
  ids = [i for i in words.encode("A man runs") if i != words.eos_id and i not in words.special_ids]
  assert "".join(words.pieces(ids)).strip() == "A man runs"
  assert words.pieces([len(words)]) == [f"<{len(words)}>"]
  assert 0 <= words.single_letter_share("A man runs") < 0.5


@pytest.mark.parametrize("name", NAMES)
def test_all_texts_can_be_encoded(folder_of, name):
  words = open_source(folder_of(name))
  for text in TEXTS:
    ids = words.encode(text)
    assert ids and all(0 <= i < len(words) for i in ids) and isinstance(words.decode(ids), str)


@pytest.mark.parametrize("name", NAMES)
def test_stable_text_does_not_change(folder_of, name):
  words, rng = open_source(folder_of(name)), np.random.default_rng(0)
  marked = [i for i, piece in enumerate(words.all_pieces()) if {*piece} & {*" \u2581\u0120'<nst."}]
  texts = [words.encode(text) for text in ("It's €1 's n't ' . 'm 🎉🎉 don't", *TEXTS)]
  texts += [rng.choice(ids, 30).tolist() for ids in [[*range(len(words))], marked] * 10]
  for ids in texts:
    stable, whole = "", words.decode(ids)
    for i in range(len(ids) + 1):
      previous, stable = stable, words.decode_stable(ids[:i])
      assert stable.startswith(previous) and whole.startswith(stable), (ids[:i], whole)


@pytest.mark.parametrize(
  "name, text, expected",
  [
    ("t5", "A 's", ["", "", "A", "A", "A", "A's"]),
    ("t5gemma", "€A", ["", "", "", "", "€A"]),
    ("bart", "€A", ["", "", "", "€", "€A"]),
    ("byt5", "€A", ["", "", "", "€", "€A"]),
  ],
)
def test_stable_text_ends_before_what_may_change(folder_of, name, text, expected):
  words = open_source(folder_of(name))
  ids = words.encode_target(text)
  assert [words.decode_stable(ids[:i]) for i in range(len(ids) + 1)] == expected


@pytest.mark.parametrize("name", ["bart", "word pieces"])
def test_other_threads_run_while_a_long_text_is_encoded(folder_of, name):
  path = tiny_pair.gpt_folder() / "vocabulary.txt" if name == "word pieces" else folder_of(name)
  words, ticks = open_source(path), 0
  with concurrent.futures.ThreadPoolExecutor() as pool:
    encoding = pool.submit(words.encode, "Two dogs are playing. " * 20000)
    while not encoding.done():
      ticks += 1
      time.sleep(0.001)
  assert len(encoding.result()) > 20000 and ticks > 20


PARITY = [name for name in NAMES if name != "madlad"]  # whose ids transformers 5 does not read


@pytest.mark.parametrize("saved", [False, True], ids=["written here", "saved by transformers"])
@pytest.mark.parametrize("name", PARITY)
@pytest.mark.filterwarnings("ignore")
def test_tokens_and_texts_are_those_of_transformers(folder_of, tmp_path, name, saved):
  expected = transformers_tokenizer(folder_of(name))
  if saved:
    expected.save_pretrained(str(tmp_path))
  words = open_source(tmp_path if saved else folder_of(name))
  assert (len(words), words.eos_id) == (len(expected), expected.eos_token_id)
  assert words.pad_id == expected.pad_token_id
  assert len(TEXTS) > 50
  for text in TEXTS:
    if name == "t5_named" and re.search("</s>|<ctl>", text):
      continue  # as control symbols that no file names, transformers reads them with a space before
    ids = expected(text).input_ids
    assert words.encode(text) == ids, text
    ids = ids[: ids.index(words.eos_id)] if words.eos_id in ids else ids  # a text may name EOS
    assert words.decode(ids) == expected.decode(ids, skip_special_tokens=True), text
    how = {"text_target" if name == "marian" else "text": text}
    assert words.encode_target(text) == expected(**how, add_special_tokens=False).input_ids, text


LANGUAGES = [("mbart", "fr_XX"), ("mbart50", "fr_XX"), ("mbart50_pieces", "fr_XX")]
LANGUAGES += [("nllb", "fra_Latn"), ("m2m100", "fr")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, language", LANGUAGES)
def test_source_language(folder_of, name, language):
  default, words = (
    open_source(folder_of(name)),
    open_source(folder_of(name), source_language=language),
  )
  pieces, changed = words.all_pieces(), []
  for before, after in zip(default.encode("A man"), words.encode("A man"), strict=True):
    changed += [pieces[after]] if before != after else []
  assert changed == [f"__{language}__" if name == "m2m100" else language]
  assert words.decode(words.encode("A man")) == "A man"
  theirs = transformers_tokenizer(folder_of(name), src_lang=language)
  assert [words.encode(x) for x in TEXTS[::4]] == [theirs(x).input_ids for x in TEXTS[::4]]
  with pytest.raises(InputError, match="source_language is 'xx_YY', but .* it has .* languages: a"):
    open_source(folder_of(name), source_language="xx_YY")


@pytest.mark.parametrize("name", NAMES)
def test_target_texts_have_no_special_tokens(folder_of, name):
  words = open_source(folder_of(name), source_language=dict(LANGUAGES).get(name))
  pieces, ids = words.all_pieces(), words.encode_target("A man runs")
  assert not {words.eos_id, *words.special_ids} & {*ids} and words.decode(ids) == "A man runs"
  if name == "marian":  # split by target.spm, whose pieces are shorter
    model = sentencepiece.SentencePieceProcessor(str(folder_of(name) / "target.spm"))
    text = "Ein kleines Mädchen spielt mit dem Hund."
    want = [token if token in pieces else "<unk>" for token in model.encode(text, out_type=str)]
    assert [pieces[i] for i in words.encode_target(text)] == want
    assert [pieces[i] for i in words.encode(text)[:-1]] != want


def test_missing_transformers_is_reported(tmp_path, monkeypatch):
  """The message names the command that installs it."""
  marian(tmp_path / "marian")
  monkeypatch.setitem(sys.modules, "transformers", None)
  with pytest.raises(InputError, match=r"run pip install 'specdec_jax\[transformers\]'"):
    open_source(tmp_path / "marian")


@pytest.mark.parametrize("name", ["bart", "codet5", "t5", "marian", "byt5", "madlad"])
def test_source_language_of_other_vocabularies_is_reported(folder_of, name):
  with pytest.raises(InputError, match="source_language is 'fr', but .*; leave .*out"):
    open_source(folder_of(name), source_language="fr")


# Special ids.


def test_decoder_only_models_get_eos_at_the_end_only(folder_of):
  """The post-processor of the file applies to encoder-decoders."""
  words = open_vocabulary(str(folder_of("bart")))
  source = open_source(folder_of("bart"))
  assert words.encode("A man") == source.encode("A man")[1:] and words.encode("") == [2]
  assert words.pad_id == 1 and words.num_end_tokens == 1
  assert words.fingerprint() == source.fingerprint()


def test_byte_level_bpe_of_a_decoder_only_model(tmp_path):
  """As for GPT-2 without tokenizer.json, <|endoftext|> is the only special token."""
  ids, merges = byte_level_bpe()
  ids = {token: i - len(SPECIAL) for token, i in ids.items() if token not in SPECIAL}
  ids["<|endoftext|>"] = len(ids)
  pytest.importorskip("transformers", reason="transformers is not installed")
  write(tmp_path, vocab=ids, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
  (tmp_path / "merges.txt").write_text("\n".join(" ".join(merge) for merge in merges) + "\n")
  words = open_vocabulary_of_model(str(tmp_path), len(ids))
  assert len(words) == len(ids) and words.eos_id == words.start_id == ids["<|endoftext|>"]
  assert words.encode("") == [words.eos_id] and words.pad_id == 0
  text = " A <s> man\n"
  assert words.decode(words.encode(text)) == text and words.encode(text).count(words.eos_id) == 1


@pytest.mark.parametrize("name", ["bart", "t5gemma", "marian", "m2m100", "byt5"])
def test_eos_and_padding_of_the_model_take_precedence(folder_of, name):
  own = open_source(folder_of(name))
  words = open_source(folder_of(name), eos_ids=(10**6, 5, 6), pad_id=7)
  assert (words.eos_id, words.pad_id) == (5, 7)
  words = open_source(folder_of(name), eos_ids=(5, own.eos_id))
  assert (words.eos_id, words.pad_id) == (own.eos_id, own.pad_id)
  assert words.fingerprint() == own.fingerprint()


def test_sentence_pieces_have_the_eos_of_their_file(folder_of):
  model = sentencepiece.SentencePieceProcessor(str(folder_of("madlad") / "spiece.model"))
  words = open_source(folder_of("madlad"), eos_ids=(7,), pad_id=1)  # `load_pair` rejects this EOS
  assert words.eos_id == model.eos_id() == 2 and words.all_pieces()[:3] == ["<unk>", "<s>", "</s>"]
  for text in TEXTS:
    if not re.search("<unk>|<s>|</s>", text):
      assert words.encode(text) == [*model.encode(text), 2]
  ids = words.encode("<2de> A man")
  assert words.all_pieces()[ids[1]] == "<2de>" and words.decode([1, *ids, 1, 5]) == "<2de> A man"


@pytest.mark.parametrize("of_file, of_settings", [(False, True), (True, False)])
def test_settings_say_whether_a_space_precedes_a_text(tmp_path, of_file, of_settings):
  bart(tmp_path)
  state = json.loads((tmp_path / "tokenizer.json").read_text())
  state["pre_tokenizer"]["add_prefix_space"] = of_file
  (tmp_path / "tokenizer.json").write_text(json.dumps(state))
  by_file = open_source(tmp_path).encode("A man")
  fields = {"tokenizer_class": "BartTokenizer", "add_prefix_space": of_settings}
  write(tmp_path, tokenizer_config=fields)
  words = open_source(tmp_path)
  assert words.encode("A man") == transformers_tokenizer(tmp_path)("A man").input_ids != by_file


def test_byte_of_a_piece_is_a_byte_of_the_text(tmp_path):
  """transformers 5 reads such bytes as unknown tokens."""
  ids = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1, byte_fallback=True)
  content = piece_model(316, character_coverage=0.98, **ids)
  (tmp_path / "spiece.model").write_bytes(content)
  model, words = sentencepiece.SentencePieceProcessor(model_proto=content), open_source(tmp_path)
  for text in (text for text in TEXTS if "<" not in text):
    ids = words.encode(text)
    assert ids == [*model.encode(text), 1] and words.decode(ids) == model.decode(ids), text
  ids = words.encode_target("caf\u00e9 \u65e5")
  assert [words.all_pieces()[i] for i in ids if model.is_byte(i)][-3:] == [
    "<0xE6>",
    "<0x97>",
    "<0xA5>",
  ]
  assert words.pieces(ids)[-3:] == ["\ufffd"] * 3 and words.decode_stable(ids[:-1]) == "caf\u00e9"


def test_special_tokens_of_t5_in_texts(folder_of, tmp_path):
  """Transformers gives these ids and texts too (`test_tokens_and_texts_are_those_of_...`)."""
  words = open_source(folder_of("t5_pieces"))
  assert len(words) == 113 and words.extra_ids == 10
  a, b = words.encode_target("a"), words.encode_target("b")
  for token, i in {"</s>": 1, "<pad>": 0, "<extra_id_0>": 109, "<extra_id_9>": 100}.items():
    assert words.encode(f"a {token} b") == words.encode(f"a{token}b") == [*a, i, *b, 1]
  assert words.encode("{a}") == [110, *a, 111, 1] and words.decode([110, *a, 111]) == "{ a}"
  assert words.decode([0, *a, 2, 109, *b, 1, *a]) == "a b"
  # In another file of SentencePiece only sentinels are matched, as in seqio.
  (tmp_path / "words.model").write_bytes((folder_of("t5_pieces") / "spiece.model").read_bytes())
  words = open_vocabulary(str(tmp_path / "words.model"), 10)
  assert not {0, 1} & {*words.encode_target("a </s> <pad>")}
  assert words.encode("a <extra_id_0>") == [*a, 109, 1] and words.decode([*a, 109, *b]) == "a b"


@pytest.mark.parametrize("name", ["t5_pieces", "t5"])
def test_tables_of_t5_with_added_tokens(folder_of, tmp_path, name):
  """A table has the rows of the tokens, a multiple of 8 as transformers can pad it, or T5's 128."""
  path = folder_of(name) / KINDS[NAMES[name]][0]
  if name == "t5":  # the folder of t5_pieces has added_tokens.json
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["{", "}", "<2en>"])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
  size = len(open_vocabulary(str(path), 10 if name == "t5_pieces" else 0, ENCODER))
  padded_by_8 = -(-size // 8) * 8
  for num_rows, want in ((size, size), (padded_by_8, padded_by_8), (padded_size(size), size)):
    words = open_vocabulary_of_model(str(path), num_rows, tokens=ENCODER)
    assert len(words) == len(words.all_pieces()) == want
    ids, a = words.encode("{a}<2en>"), words.encode_target("a")
    assert ids == [size - 3, *a, size - 2, size - 1, 1]
    assert words.decode([*ids[:2], size, *ids[2:]]) == words.decode(ids)  # no token has this id


@pytest.mark.parametrize(
  "files, num_rows, size",
  [
    ({}, 200, 200),
    ({}, 256, 200),
    ({}, 128, 100),
    ({"tokenizer_config": {"extra_ids": 50}}, 256, 150),
    ({"tokenizer_config": {"extra_ids": 0}}, 256, 100),
    ({"special_tokens_map": {"additional_special_tokens": EXTRA_IDS[:30]}}, 256, 130),
    ({"added_tokens": {"{": 200, "}": 204}, "tokenizer_config": {"extra_ids": 100}}, 205, 205),
  ],
)
def test_number_of_sentinels(tmp_path, files, num_rows, size):
  """It is that of the files, or otherwise 100 if the table has rows for them."""
  write(tmp_path, **files)
  (tmp_path / "spiece.model").write_bytes(piece_model(pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
  assert len(open_vocabulary_of_model(str(tmp_path), num_rows, tokens=ENCODER)) == size


def test_bytes_of_byt5(folder_of):
  words = open_source(folder_of("byt5"))
  assert len(words) == 384 and words.single_letter_share("日本語") == 0
  assert words.encode("aß\n") == [ord("a") + 3, 0xC3 + 3, 0x9F + 3, ord("\n") + 3, 1]
  assert words.encode("<extra_id_0> <extra_id_124>") == [259, 35, 383, 1]
  assert words.pieces([100, 0xC3 + 3, 13, 1, 259]) == [
    "a",
    "\ufffd",
    "\u21b5",
    "</s>",
    "<extra_id_0>",
  ]
  assert words.all_pieces()[2:5] == ["<unk>", "<0x00>", "<0x01>"]
  assert words.decode([0xC3 + 3, 100, 259]) == "a"


# Vocabularies of models.


@pytest.mark.parametrize("name", ["nllb", "m2m100", "marian"])
def test_rows_without_a_token_are_part_of_the_vocabulary(folder_of, name):
  """NLLB has two such rows, and M2M100 eight."""
  own = open_source(folder_of(name))
  size = len(own)
  words = open_vocabulary_of_model(str(folder_of(name)), size + 2, tokens=ENCODER)
  assert len(words) == size + 2 and words.all_pieces() == [*own.all_pieces(), "", ""]
  assert words.encode("A man") == own.encode("A man")
  assert words.decode([size, *words.encode("A man"), size + 1]) == "A man"
  for rows in (padded_size(size), padded_size(size) + 1):  # padding, and a different vocabulary
    assert len(open_vocabulary_of_model(str(folder_of(name)), rows, tokens=ENCODER)) == size
  assert len(open_vocabulary_of_model(str(folder_of("nllb")), 102)) == 100  # decoder-only


def test_special_tokens_without_a_row_are_removed(folder_of):
  """In the models of BART for summaries, <mask> has no row."""
  own = open_source(folder_of("bart"))
  words = open_vocabulary_of_model(str(folder_of("bart")), len(own) - 1, tokens=ENCODER)
  assert words.all_pieces() == own.all_pieces()[:-1] and own.all_pieces()[-1] == "<mask>"
  assert words.encode("A man") == own.encode("A man")
  assert own.encode("<mask>") == [0, len(own) - 1, 2]
  assert words.encode("<mask>") == [0, 2]
  with_more = open_vocabulary_of_model(str(folder_of("bart")), len(own) - 2, tokens=ENCODER)
  assert len(with_more) == len(own)


# Sources.


@pytest.mark.parametrize("name", NAMES)
def test_truncated_sources_keep_the_special_tokens_at_their_end(folder_of, name):
  words = open_source(folder_of(name))
  ids, text = words.encode(tiny_pair.SENTENCES[0]), tiny_pair.SENTENCES[0]
  end = ids[len(ids) - words.num_end_tokens :]
  for most in range(1, len(ids) + 2):
    pair = tiny_pair.pair(max_source_tokens=most).with_target(vocabulary=words)
    kept = pair.encode(text)
    middle = max(min(most, len(ids)) - len(end), 0)
    assert kept == ids[:middle] + end[max(len(end) - most, 0) :]
    assert (pair.cut(text) is None) == (most >= len(ids))
    prompt = pair.prompt([text]).tolist()[0]
    assert prompt == kept + [words.pad_id] * (-most % 8 if most < len(ids) else -len(ids) % 8)


def test_source_language_of_a_pair_without_languages_is_reported():
  with pytest.raises(InputError, match="source_language is 'fr', but .*vocabulary.model has no"):
    load_pair(source_language="fr")


def test_extra_ids_of_complete_vocabularies_are_reported(folder_of):
  for name in ("bart", "byt5"):
    with pytest.raises(InputError, match="extra_ids is 3, but .* lists all"):
      open_vocabulary_of_model(str(folder_of(name)), 100, 3)
    assert open_vocabulary_of_model(str(folder_of(name)), 100).extra_ids == 0


# Files.


def test_tokenizer_json_takes_precedence(folder_of, tmp_path):
  (tmp_path / "spiece.model").write_bytes(piece_model())
  assert find_vocabulary(str(tmp_path)) == str(tmp_path / "spiece.model")
  (tmp_path / "tokenizer.json").write_bytes((folder_of("t5") / "tokenizer.json").read_bytes())
  assert find_vocabulary(str(tmp_path)) == str(tmp_path / "tokenizer.json")


def test_eos_of_a_tokenizer_json_is_that_of_the_model_or_named_next_to_it(tmp_path):
  Tokenizer(models.BPE({"a": 0, "[end]": 1}, [])).save(str(tmp_path / "tokenizer.json"))
  with pytest.raises(InputError, match="or the field eos_token in a file tokenizer_config.json"):
    open_vocabulary(str(tmp_path))
  of_model = ModelTokens(has_encoder=True, eos_ids=(1,))  # of a config.json
  assert open_vocabulary(str(tmp_path), tokens=of_model).encode("a") == [0, 1]
  write(tmp_path, tokenizer_config={"eos_token": "[end]"})
  assert open_vocabulary(str(tmp_path)).encode("a") == [0, 1]


def test_folders_without_a_vocabulary(tmp_path):
  write(tmp_path, config={"model_type": "t5"}, tokenizer_config={"tokenizer_class": "T5Tokenizer"})
  assert find_vocabulary(str(tmp_path)) is None
  with pytest.raises(InputError, match="only a ByT5Tokenizer needs no other file"):
    open_vocabulary(str(tmp_path / "tokenizer_config.json"))
  with pytest.raises(InputError, match="There is no vocabulary at"):
    open_vocabulary(str(tmp_path))


@pytest.mark.parametrize(
  "name, file, content, message",
  [
    ("marian", "target.spm", "text", "transformers cannot read the tokenizer in .*marian: "),
    ("marian", "tokenizer_config.json", '{"separate_vocabs": true}', "one vocabulary"),
    ("madlad", "spiece.model", "text", "is not a SentencePiece model"),
    ("bart", "tokenizer_config.json", "{", "tokenizer_config.json is damaged"),
    ("bart", "tokenizer.json", "{", "is not a tokenizer file"),
  ],
)
def test_damaged_files_are_reported(tmp_path, name, file, content, message):
  if name in THEIRS:
    pytest.importorskip("transformers", reason="transformers is not installed")
  NAMES[name](tmp_path / name)
  (tmp_path / name / file).write_text(content)
  with pytest.raises(InputError, match=message):
    open_source(tmp_path / name)
