"""Test the task of lm1b: examples have the word pieces of the GPT-like pair, and runs read it."""

import copy
import math
import pathlib

import gin
import pytest
from test_tasks import ROOT, examples, mocked, shared, tasks  # noqa: F401  a fixture

from specdec_jax import run as command
from specdec_jax.data.pieces import EOS_ID
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.data.vocabulary import PAD_ID
from specdec_jax.models.sizes import named_config

VOCABULARY = str(ROOT / "experiments" / "gpt_like" / "weights" / "vocabulary.txt")
LM1B = "experiments/gpt_like/lm1b.gin"


@pytest.fixture(scope="module")
def theirs(tasks):  # noqa: F811
  """Return seqio's vocabulary; `tasks` sets the variables that its module reads."""
  from experiments.gpt_like import lm1b

  return lm1b.WORD_PIECES


@pytest.fixture
def parse(theirs, monkeypatch):
  """Return a function that parses gin files."""
  monkeypatch.chdir(ROOT)
  yield lambda *files, bindings=(): command.parse_gin([*files], bindings, [])
  gin.clear_config()


def test_examples_have_empty_inputs_and_the_word_pieces_of_a_sentence(theirs):
  with mocked({"text": ["A man runs ."]}):
    (row,) = examples("specdec_lm1b")
  assert row["inputs"].tolist() == [EOS_ID] and row["targets_pretokenized"] == b"A man runs ."
  assert row["targets"].tolist() == open_vocabulary(VOCABULARY).encode("A man runs .")
  assert theirs.decode(row["targets"].tolist()) == "a man runs . [END]"


def test_word_pieces_equal_those_of_seqio(theirs):
  """Seqio's own class returns a padded table for words of several pieces and counts an extra id."""
  ours = open_vocabulary(VOCABULARY)
  assert (theirs.vocab_size, theirs.pad_id, theirs.eos_id) == (len(ours), PAD_ID, ours.eos_id)
  text = "The Verizon-like [END] of 2,010 \u20ac; caf\u00e9s \u65e5\u672c"
  ids = ours.encode(text)[:-1]
  assert len(ids) > len(text.split()) + 5 and [*theirs.encode(text)] == ids
  assert theirs.decode(ids) == ours.decode(ids)
  assert [*theirs.encode("")] == []


@pytest.mark.parametrize(
  "text, as_if", [("Ma\u00df", "mass"), ("so\u2026", "so..."), ("a \ufffd b", "a \u65e5 b")]
)
def test_characters_that_tensorflow_text_normalizes(theirs, text, as_if):
  ours = open_vocabulary(VOCABULARY)
  assert [*theirs.encode(text)] == [*theirs.encode(as_if)] == ours.encode(as_if)[:-1]
  assert [*theirs.encode(text)] != ours.encode(text)[:-1]


def test_sentences_have_the_same_tokens_in_seqio_as_in_training(theirs):
  (path,) = shared("lm1b_sample/1b_benchmark.dev.tokens.gz")
  lines, ours = read_lines(path, 200), open_vocabulary(VOCABULARY)
  different = [line for line in lines if [*theirs.encode(line)] != ours.encode(line)[:-1]]
  assert len(different) <= 2 and all(any(ord(c) > 127 for c in line) for line in different)


def test_single_letter_share_of_word_pieces():
  share = open_vocabulary(VOCABULARY).single_letter_share
  assert share("The Fed minutes suggested it.") < 0.1 and share("\u4e24\u53ea\u72d7") == 1


def test_unconditional_generation_has_one_empty_source_per_sentence(parse):
  parse("gin/runs/speedup.gin", LM1B, bindings=["NUM_TEXTS = 2"])
  with mocked({"text": ["one", "two", "three"]}):
    assert copy.deepcopy(gin.query_parameter("%TEXTS")) == ["", ""]


def test_ngrams_are_counted_in_sentences_of_the_task(parse, monkeypatch, tmp_path):
  parse("gin/runs/speedup.gin", LM1B)
  monkeypatch.chdir(tmp_path)
  with mocked({"text": ["one\ntwo", "three"]}):
    path = pathlib.Path(copy.deepcopy(gin.query_parameter("%TARGET_TEXT")))
  assert path.read_text() == "one two\nthree\n"


@pytest.mark.parametrize("size", ["97m", "6m"])
def test_gin_files_train_the_models_of_the_paper(parse, size):
  names = "train_gpt_target", "lm1b", f"train_gpt_like_{size}"
  parse(*(f"experiments/gpt_like/{name}.gin" for name in names))
  assert gin.query_parameter("%TRAIN_TEXTS") == ["train.targets"]
  config, settings = (
    copy.deepcopy(gin.query_parameter(f"train.train_target.{name}"))
    for name in ("config", "settings")
  )
  assert config == named_config("gpt_like", size)
  assert settings.warmup_steps < (settings.max_steps or math.inf)
