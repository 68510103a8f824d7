"""Stop strings end an output where `StopStringCriteria` of transformers ends it."""

import types

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult, Rounds
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.generate import GenerateCall
from specdec_jax.load import BUNDLED

TEXTS = ["Zwei Männer hören 日本 \U0001f642.", "Ein Mädchen – fünf €, ein Euro"]


def call_and_result(
  vocabulary: Vocabulary, ids: list[int], stops: str | list[str]
) -> tuple[GenerateCall, DecodeResult]:
  """Return a call with stop strings, and the result of decoding one text to these tokens."""
  count = np.array([[len(ids)]])
  rounds = Rounds(count[..., None], count, count, count)
  result = DecodeResult(np.array([ids]), count[0], rounds, 1, np.array([-1]), None)
  pair = types.SimpleNamespace(vocabulary=vocabulary, proposed_tree=lambda sampling, tree: tree)
  return GenerateCall(pair, GenerationConfig(stop_strings=stops), chain(0)), result


def stopped(vocabulary: Vocabulary, ids: list[int], stops: str | list[str]) -> tuple[str, int]:
  """Return the text and the number of tokens of an output that stop strings cut."""
  call, result = call_and_result(vocabulary, ids, stops)
  output = call.output(result, 0)
  return output.text, len(output.tokens)


def byte_level() -> Tokenizer:
  """Return a tokenizer of GPT-2's kind, whose pieces are bytes."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  settings = dict(special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False)
  tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=290, **settings))
  return tokenizer


def byte_fallback() -> Tokenizer:
  """Return a tokenizer of Llama's kind, with the bytes of characters that no piece has."""
  pieces = ["</s>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *"\u2581abcdefghinrstuwZEM"]
  merges = [("\u2581", "Z"), ("w", "e"), ("n", "n"), ("\u2581", "E"), ("i", "n")]
  ids = {piece: i for i, piece in enumerate([*pieces, *map("".join, merges)])}
  tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
  parts = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()
  tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
  tokenizer.add_special_tokens(["</s>", "<unk>"])
  return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_outputs_end_where_transformers_ends_them(make, tmp_path):
  """Half of the texts are random tokens, many of which are parts of no character."""
  torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
  path, rng, cut = str(tmp_path / "tokenizer.json"), np.random.default_rng(0), 0
  make().save(path)
  vocabulary = open_vocabulary(path)
  theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=path)
  for seed in range(60):
    ids = vocabulary.encode_target(TEXTS[seed % 2])
    if seed >= 30:
      ids = rng.integers(2, len(vocabulary), 20).tolist()
    text = vocabulary.decode(ids)
    start = rng.integers(len(text))
    stop = text[start : start + rng.integers(1, 5)] if seed % 3 else f" {text[:3].lstrip()}"
    criteria = transformers.StopStringCriteria(theirs, stop)
    ends = (bool(criteria(torch.tensor([ids[:i]]), None)) for i in range(1, len(ids) + 1))
    want = next((i for i, is_end in enumerate(ends, 1) if is_end), len(ids))
    assert stopped(vocabulary, ids, stop)[1] == want, (stop, text)
    cut += want < len(ids)
  assert cut > 20


@pytest.mark.parametrize(
  "stops, want",
  [
    (" Ein", ("Ein", 1)),  # the space before the first word is part of its token
    (" ", ("Ein", 1)),
    ("n M", ("Ein Mann", 2)),
    ([" in", " Mann"], ("Ein Mann", 2)),
    ("  Ein", ("Ein Mann in der", 4)),
    ("\ufffd", ("Ein Mann in der", 4)),
  ],
)
def test_first_word_begins_with_a_space(stops, want):
  vocabulary = open_vocabulary(str(BUNDLED / "vocabulary.model"))
  ids = vocabulary.encode_target("Ein Mann in der")
  assert vocabulary.pieces(ids) == [" Ein", " Mann", " in", " der"]
  assert stopped(vocabulary, ids, stops) == want


@pytest.mark.parametrize(
  "stop, count, text", [(" Ein", 1, ""), ("n M", 2, "Ei"), (" der", 4, "Ein Mann in")]
)
def test_server_sends_the_text_before_a_stop_string(stop, count, text):
  pytest.importorskip("starlette")
  from specdec_jax.serve.completion import Choice

  vocabulary = open_vocabulary(str(BUNDLED / "vocabulary.model"))
  ids = vocabulary.encode_target("Ein Mann in der")
  choice = Choice(call_and_result(vocabulary, ids, stop)[0], 0)
  for i in range(1, count + 1):  # the space before the first word may begin a stop string
    choice.update(call_and_result(vocabulary, ids[:i], stop)[1], done=False)
    assert "Ein Mann in".startswith(choice.text)
  assert choice.ended and choice.text == text


def test_byte_that_is_no_character_matches_no_stop_string(tmp_path):
  path = str(tmp_path / "tokenizer.json")
  byte_fallback().save(path)
  vocabulary = open_vocabulary(path)
  ids = [vocabulary.all_pieces().index(piece) for piece in ("a", "<0xFF>", "b")]
  assert vocabulary.decode(ids) == "a\ufffdb"
  assert stopped(vocabulary, ids, ["\ufffd", "a\ufffd"]) == ("a\ufffdb", 3)
  assert stopped(vocabulary, ids, "b") == ("a\ufffdb", 3)
