"""Test tasks of seqio: examples have the tokens of T5, and runs read texts with the same tokens.

TFDS mocks its own data. Real texts and T5's vocabulary are used if they are on this machine.
TensorFlow takes ten seconds to import, so all tests that need it are in this file, and no module is
imported to find out whether it is installed.
"""

import copy
import importlib.util
import json
import pathlib

import gin
import numpy as np
import pytest
import sentencepiece
import tiny
import tiny_pair

from specdec_jax import run as command
from specdec_jax.data.pieces import EOS_ID
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.data.vocabulary import PAD_ID
from specdec_jax.errors import InputError

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec("seqio") is None, reason="seqio is not installed (extra 'tasks')"
  ),
]

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = tiny.SHARED.resolve() / "data"
SPIECE = DATA / "t5_vocab" / "spiece.model"
TRANSLATE = "translate English to German: "


@pytest.fixture(scope="module")
def tasks():
  """Return the module `tasks` with T5's vocabulary, or a stand-in if it is not on this machine."""
  vocabulary = SPIECE if SPIECE.exists() else tiny_pair.folder() / "vocabulary.model"
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("SPECDEC_T5_VOCABULARY", str(vocabulary))
    patch.setenv("SPECDEC_DATA", str(DATA))
    import seqio

    # Another test of this process may have registered the tasks with the default paths.
    from specdec_jax.data import seqio_tasks, tasks

    for name in [*filter(lambda name: name.startswith("specdec_"), seqio.TaskRegistry.names())]:
      seqio.TaskRegistry.remove(name)
    importlib.reload(seqio_tasks)
    for name in tasks._SEQIO_NAMES:
      setattr(tasks, name, getattr(seqio_tasks, name))
  return tasks


def shared(*names):
  """Return the paths of real texts, or skip the test if one is missing."""
  paths = [DATA / name for name in names]
  for path in (SPIECE, *paths):
    if not path.exists():
      pytest.skip(f"{path} is missing; set SPECDEC_SHARED to the folder that contains data/")
  return [str(path) for path in paths]


def mocked(columns=None):
  """Mock the data of TFDS: these columns, or random examples with the fields of TFDS."""
  import tensorflow as tf
  import tensorflow_datasets as tfds

  def as_dataset(self, **_):
    return tf.data.Dataset.from_tensor_slices(columns)

  return tfds.testing.mock_data(num_examples=3, as_dataset_fn=as_dataset if columns else None)


def dataset(task, length, split="test"):
  import seqio

  # The mock does not know the number of examples, which caching in memory would need.
  options = dict(shuffle=False, try_in_mem_cache=False)
  lengths = {"inputs": length, "targets": length}
  return seqio.TaskRegistry.get(task).get_dataset(lengths, split, **options)


def examples(task, split="test", length=16):
  return [*dataset(task, length, split).as_numpy_iterator()]


def encoder_inputs(task, length):
  """Return the tokens [B, S] of a split from seqio's converter for encoder-decoders."""
  import seqio

  lengths = {"inputs": length, "targets": length}
  rows = seqio.EncDecFeatureConverter(pack=False)(dataset(task, length), lengths)
  return np.stack([row["encoder_input_tokens"] for row in rows.as_numpy_iterator()])


def prompt(tasks, texts, length):
  """Return the tokens [B, S] of texts that a pair passes to its models."""
  file = tasks.T5_VOCABULARY.sentencepiece_model_file
  pair = tiny_pair.pair(max_source_tokens=length)
  pair = pair.with_target(vocabulary=open_vocabulary(file, extra_ids=100))
  return np.asarray(pair.prompt(texts, width=length))


# Tasks of TFDS.


@pytest.mark.parametrize(
  "task, split, prefix",
  [("wmt14_ende", "test", TRANSLATE), ("cnn_dm", "validation", "summarize: ")],
)
def test_examples_of_tfds_have_the_prefix_and_the_tokens_of_the_vocabulary(
  tasks, task, split, prefix
):
  with mocked():
    found = examples(f"specdec_{task}", split, 64)
    texts = tasks.sources(f"specdec_{task}", split)
  assert len(found) == 3 and [row["inputs_pretokenized"].decode() for row in found] == texts
  for row, source in zip(found, texts):
    written = row["targets_pretokenized"].decode()
    assert source.startswith(prefix) and written
    for ids, text in ((row["inputs"], source), (row["targets"], written)):
      assert ids.tolist() == [*tasks.T5_VOCABULARY.encode(text), EOS_ID]
      assert not {EOS_ID, PAD_ID} & {*ids[:-1]}


def test_fields_of_inputs_and_targets(tasks):
  with mocked({"en": ["A man"], "de": ["Ein Mann"]}):
    (row,) = examples("specdec_wmt14_ende")
  assert row["inputs_pretokenized"] == b"translate English to German: A man"
  assert row["targets_pretokenized"] == b"Ein Mann"
  with mocked({"article": ["A man runs."], "highlights": ["He runs."], "id": ["1"]}):
    (row,) = examples("specdec_cnn_dm")
  assert row["inputs_pretokenized"] == b"summarize: A man runs."
  assert row["targets_pretokenized"] == b"He runs."


def test_limit_returns_the_first_sources(tasks):
  with mocked({"en": ["one", "two", "three"], "de": ["eins", "zwei", "drei"]}):
    assert tasks.sources("specdec_wmt14_ende", limit=2) == [TRANSLATE + "one", TRANSLATE + "two"]
    assert len(tasks.sources("specdec_wmt14_ende", limit=9)) == 3
    with pytest.raises(InputError, match="limit is 0"):
      tasks.sources("specdec_wmt14_ende", limit=0)


def test_data_of_tfds_is_not_downloaded(tasks, tmp_path):
  import seqio

  seqio.set_tfds_data_dir_override(str(tmp_path))
  try:
    with pytest.raises(InputError, match="could not find data in .*tfds build"):
      tasks.sources("specdec_wmt14_ende")
  finally:
    seqio.set_tfds_data_dir_override(None)


def test_unknown_tasks_and_splits_are_reported(tasks):
  with pytest.raises(InputError, match="no task wmt14; .*specdec_wmt14_ende"):
    tasks.sources("wmt14")
  with pytest.raises(InputError, match="no split dev; it has train, validation, test"):
    tasks.sources("specdec_wmt14_ende", "dev")


# Real text with T5's vocabulary.


def test_tokens_are_those_of_t5(tasks):
  shared()
  text = TRANSLATE + "The house is wonderful."
  ids = [13959, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5, EOS_ID]
  with mocked({"en": ["The house is wonderful."], "de": ["Das Haus ist wunderbar."]}):
    (row,) = examples("specdec_wmt14_ende")
  assert row["inputs"].tolist() == ids
  assert open_vocabulary(str(SPIECE)).encode(text) == ids
  assert row["targets"].tolist() == [644, 4598, 229, 19250, 5, EOS_ID]


def test_sentinels_equal_those_of_seqio(tasks):
  shared()
  ours, theirs = open_vocabulary(str(SPIECE), extra_ids=100), tasks.T5_VOCABULARY
  assert len(ours) == theirs.vocab_size == 32_100
  text = "Thank you <extra_id_0> me to your party <extra_id_1> week. <extra_id_99>"
  assert ours.encode(text) == [*theirs.encode(text), EOS_ID]
  assert ours.encode(text)[2] == 32_099 and ours.encode(text)[-2] == 32_000
  assert ours.decode(ours.encode(text)) == "Thank you me to your party week."
  assert ours.pieces([32_099, 32_000]) == ["<extra_id_0>", "<extra_id_99>"]


def test_newstest2014_has_the_same_tokens_from_seqio_and_from_lines(tasks):
  english, german = shared(
    "wmt_newstest_ende/newstest2014.en.gz", "wmt_newstest_ende/newstest2014.de.gz"
  )
  with mocked({"en": read_lines(english), "de": read_lines(german)}):
    texts = tasks.sources("specdec_wmt14_ende")
  assert len(texts) == 3003 and texts == read_lines(english, prefix=TRANSLATE)
  few = {"en": read_lines(english, 300), "de": read_lines(german, 300)}
  with mocked(few):
    tokens = encoder_inputs("specdec_wmt14_ende", 64)
  np.testing.assert_array_equal(tokens, prompt(tasks, texts[:300], 64))
  assert {EOS_ID, PAD_ID} == {*tokens[:, -1]}  # some are truncated, others are not


@pytest.mark.parametrize("length", [64, 1024])
def test_articles_are_truncated_to_the_length_of_the_task(tasks, length):
  (rows,) = shared("cnn_dm/cnn_dm.validation500.jsonl.gz")
  rows = [json.loads(line) for line in read_lines(rows, 20)]
  columns = {key: [row[key] for row in rows] for key in ("article", "highlights")}
  with mocked(columns):
    texts = tasks.sources("specdec_cnn_dm")
    tokens = encoder_inputs("specdec_cnn_dm", length)
  assert texts == [f"summarize: {row['article']}" for row in rows]
  np.testing.assert_array_equal(tokens, prompt(tasks, texts, length))
  pieces = sentencepiece.SentencePieceProcessor(model_file=str(SPIECE))
  for text, row in zip(texts, tokens):
    ids = pieces.encode(text)[: length - 1]
    assert row.tolist() == [*ids, EOS_ID] + [PAD_ID] * (length - 1 - len(ids))


def test_only_a_newline_ends_a_line_of_parallel_text(tasks):
  german, english = shared(
    "wmt_newstest_ende/newstest2009.de.gz", "wmt_newstest_ende/newstest2009.en.gz"
  )
  source = tasks.text_pairs({"test": (german, english)})
  tasks.add_task("newstest2009_deen", source, "translate German to English: ", "source", "target")
  texts = tasks.sources("newstest2009_deen")
  assert len(texts) == 2525 and texts == read_lines(german, prefix="translate German to English: ")
  odd = [i for i, text in enumerate(texts) if "\u0085" in text]
  assert odd
  found = examples("newstest2009_deen", length=512)
  assert [row["targets_pretokenized"].decode() for row in found] == read_lines(english)
  pieces = sentencepiece.SentencePieceProcessor(model_file=str(SPIECE))
  for i in (0, *odd, 2524):
    assert found[i]["inputs"].tolist() == [*pieces.encode(texts[i]), EOS_ID]


def test_batches_of_prompts_as_documented(tasks):
  (english,) = shared("multi30k/test_2016_flickr.en.gz")
  import seqio

  batches = seqio.get_dataset(
    "specdec_multi30k_ende",
    {"inputs": 32, "targets": 32},
    seqio.EncDecFeatureConverter(pack=False),
    dataset_split="test",
    batch_size=8,
  )
  batch = next(iter(batches.as_numpy_iterator()))
  texts = read_lines(english, 8, TRANSLATE)
  assert tasks.sources("specdec_multi30k_ende", limit=8) == texts
  np.testing.assert_array_equal(batch["encoder_input_tokens"], prompt(tasks, texts, 32))


# Local text.


def test_parallel_text_in_two_files(tasks, tmp_path):
  (tmp_path / "a").write_text("one\ntwo\u0085too\n")
  (tmp_path / "b").write_text("eins\nzwei\n")

  def path(name):
    return str(tmp_path / name)

  splits = {
    "test": (path("a"), path("b")),
    "gone": (path("a"), path("d")),
  }
  tasks.add_task("two_files", tasks.text_pairs(splits), "say: ", "source", "target")
  assert tasks.sources("two_files") == ["say: one", "say: two\u0085too"]
  assert [row["targets_pretokenized"] for row in examples("two_files")] == [b"eins", b"zwei"]
  with pytest.raises(InputError, match="no text file at .*d"):
    tasks.sources("two_files", "gone")


# Bindings of the gin files.


@pytest.fixture
def texts_of(monkeypatch):
  """Return a function of gin files and bindings that returns the texts that an experiment reads."""
  monkeypatch.chdir(ROOT)

  def read(*files, bindings=""):
    gin.clear_config()
    command.parse_gin([f"gin/{file}.gin" for file in files], bindings.splitlines())
    experiment = gin.query_parameter("run.run.experiment").selector
    return copy.deepcopy(
      gin.query_parameter(f"{experiment}.texts")
    )  # copying calls the bound function

  yield read
  gin.clear_config()


@pytest.fixture
def lines(tmp_path):
  """Return gin bindings with which a run reads two lines of a file."""
  (tmp_path / "text").write_text("one\ntwo\n")
  return f"TEXTS = @text.read_lines()\nINPUT = {str(tmp_path / 'text')!r}"


RUNS = ("speedup", "check")


@pytest.mark.parametrize(
  "task, prefix, fields, limit",
  [
    ("wmt_ende", TRANSLATE, ("en", "de"), 256),
    ("cnn_dm", "summarize: ", ("article", "highlights"), 512),
  ],
)
def test_file_of_a_task_gives_its_texts_to_every_run(tasks, texts_of, task, prefix, fields, limit):
  with mocked({field: ["one", "two", "three"] for field in fields}):
    for run in RUNS:
      texts = texts_of(f"runs/{run}", f"tasks/{task}", bindings="NUM_TEXTS = 2")
      assert texts == [prefix + "one", prefix + "two"]
  for pair in ("load.load_pair", "random_models.random_pair"):
    assert gin.query_parameter(f"{pair}.max_source_tokens") == limit


@pytest.mark.parametrize(
  "task, fields",
  [("cnn_dm", ("article", "highlights")), ("wmt_ende", ("en", "de"))],
)
def test_ngrams_are_counted_in_targets_of_the_task(tasks, monkeypatch, tmp_path, task, fields):
  monkeypatch.chdir(ROOT)
  gin.clear_config()
  for file in ("runs/speedup", f"tasks/{task}"):
    gin.parse_config_file(f"gin/{file}.gin")
  monkeypatch.chdir(tmp_path)
  with mocked({field: ["one\ntwo", "three"] for field in fields}):
    path = pathlib.Path(copy.deepcopy(gin.query_parameter("%TARGET_TEXT")))
  gin.clear_config()
  assert path.parts[:2] == ("runs", "tasks") and path.parent.name.endswith("_100000")
  assert path.read_text() == "one two\nthree\n"


def test_reproduction_reads_the_tasks_of_the_paper(tasks, monkeypatch):
  monkeypatch.chdir(ROOT)
  gin.clear_config()
  try:
    files = [f"experiments/paper/{name}.gin" for name in ("reproduce", "t5_1_0")]
    command.parse_gin(files, [], [])
    by_name = copy.deepcopy(gin.query_parameter("%TASKS"))
    models = copy.deepcopy(gin.query_parameter("%MODELS"))
    with mocked():
      sources = {name: task.sources() for name, task in by_name.items()}
  finally:
    gin.clear_config()
  assert sources["EnDe"][0].startswith(TRANSLATE) and len(sources["EnDe"]) == 3
  assert sources["CNNDM"][0].startswith("summarize: ")
  xxl = models.config("T5-XXL", by_name["EnDe"], True)
  assert xxl.num_decoder_layers == 24 and xxl.tied_logits and "T5-XXL" in models.paths


@pytest.mark.parametrize(
  "name, scores",
  [
    ("specdec_wmt14_ende", {"BLEU": 100}),
    ("specdec_multi30k_ende", {"BLEU": 100}),
    ("specdec_cnn_dm", {"ROUGE-1": 100, "ROUGE-2": 100, "ROUGE-Lsum": 100}),
  ],
)
def test_tasks_have_the_metrics_of_their_outputs(tasks, name, scores):
  import seqio

  texts = ["Four different words here .", "And four more words ."]
  metrics = seqio.TaskRegistry.get(name).metric_fns
  found = [metric(texts, texts) for metric in metrics]
  assert {key: value for each in found for key, value in each.items()} == pytest.approx(scores)
  worse = [metric(texts, ["Four words here .", "And words ."]) for metric in metrics]
  assert all(0 < value < 100 for each in worse for value in each.values())


def test_training_reads_the_texts_of_a_task(tasks, monkeypatch, tmp_path):
  monkeypatch.chdir(ROOT)
  gin.clear_config()
  try:
    files = ("runs/train_target", "tasks/wmt_ende", "tasks/training_text")
    command.parse_gin([f"gin/{name}.gin" for name in files], [], [])
    monkeypatch.chdir(tmp_path)
    with mocked({"en": ["one\ntwo", "three"], "de": ["eins zwei", "drei"]}):
      folder = tmp_path / copy.deepcopy(gin.query_parameter("%DATA"))
    sources = gin.query_parameter("train.train_target.sources")
  finally:
    gin.clear_config()
  assert (folder / sources[0]).read_text() == f"{TRANSLATE}one two\n{TRANSLATE}three\n"
  assert (folder / "validation.targets").read_text() == "eins zwei\ndrei\n"


@pytest.mark.parametrize(
  "task",
  ["wmt_ende", "cnn_dm"],
)
def test_gin_files_fine_tune_a_t5_on_a_task(tasks, monkeypatch, task):
  names = "runs/train_target", f"tasks/{task}", "tasks/training_text", "models/finetune_t5"
  monkeypatch.chdir(ROOT)
  gin.clear_config()
  try:
    command.parse_gin([f"gin/{name}.gin" for name in names], [], [])
    bound = gin.get_bindings("train.train_target", resolve_references=False)
    settings = copy.deepcopy(gin.query_parameter("train.train_target.settings"))
  finally:
    gin.clear_config()
  assert bound["sources"][0] == "train.inputs"
  assert "start" in bound and bound["max_source_tokens"] == 512
  assert settings.warmup_steps < settings.max_steps


@pytest.mark.parametrize(
  "task, prefix",
  [("wmt_ende", TRANSLATE), ("multi30k", TRANSLATE), ("cnn_dm", "summarize: ")],
)
def test_local_lines_get_the_prefix_of_the_task(tasks, texts_of, lines, task, prefix):
  texts = texts_of("runs/speedup", f"tasks/{task}", bindings=lines)
  assert texts == [prefix + "one", prefix + "two"]


def test_runs_without_a_task_read_lines_unchanged(texts_of, lines):
  for run in RUNS:
    assert texts_of(f"runs/{run}", bindings=lines) == ["one", "two"]
