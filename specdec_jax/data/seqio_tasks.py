"""The paper's tasks and Multi30k for seqio, preprocessed as in T5.

The module `tasks` imports this module if seqio is installed. The inputs of an example are T5's
prefix and a text, and the targets are the reference output. Both are tokenized with T5's
vocabulary, truncated to the requested lengths and followed by EOS.

No dataset is downloaded: datasets of TFDS must be prepared on this machine. T5's vocabulary is read
when a task is first tokenized. Two environment variables name paths. SPECDEC_T5_VOCABULARY is the
path of a copy of T5's SentencePiece model, by default in gs://t5-data. SPECDEC_DATA is the path of
the folder that contains multi30k, by default `data`.

Source: t5/data/tasks.py and utils.py of google-research/text-to-text-transfer-transformer.
"""

import os
from collections.abc import Callable, Mapping, Sequence

import seqio
import tensorflow as tf

from specdec_jax.data.quality import quality
from specdec_jax.data.text import data_folder, read_lines

tf.config.set_visible_devices([], "GPU")  # TensorFlow would reserve memory that JAX needs

T5_VOCABULARY = seqio.SentencePieceVocabulary(
  os.environ.get("SPECDEC_T5_VOCABULARY", "gs://t5-data/vocabs/cc_all.32000/sentencepiece.model"),
  extra_ids=100,
)


def add_task(
  name: str,
  source: seqio.DataSource,
  prefix: str,
  inputs: str | None,
  targets: str,
  vocabulary: seqio.Vocabulary = T5_VOCABULARY,
  metrics: Sequence[str] = (),
) -> seqio.Task:
  """Register a task with seqio; its texts are tokenized in the same way as those of T5's tasks.

  Args:
    prefix: text prepended to each input.
    inputs: name of the field of an example that has the input; None for empty inputs.
    metrics: names of metrics of `quality.METRICS` that score outputs against the targets.
  """

  def text_to_text(example):
    text = example[inputs] if inputs else ""
    return {"inputs": tf.strings.join([prefix, text]), "targets": example[targets]}

  return seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=[
      seqio.map_over_dataset(text_to_text),
      seqio.preprocessors.tokenize,
      seqio.CacheDatasetPlaceholder(),
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features={
      "inputs": seqio.Feature(vocabulary, required=False),
      "targets": seqio.Feature(vocabulary),
    },
    metric_fns=[_metric(name) for name in metrics],
  )


def _metric(name: str) -> Callable[[Sequence[str], Sequence[str]], dict[str, float]]:

  def metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    return {name: quality(name, predictions, targets)}

  return metric


def text_pairs(splits: Mapping[str, tuple[str, str]]) -> seqio.DataSource:
  """Return a data source that reads examples {source, target} from files of parallel text.

  For each split, `splits` has the paths of a source and of a target file; see `read_lines`. Their
  numbers of lines must be equal.
  """

  def read(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
    sides = dict(zip(("source", "target"), map(read_lines, splits[split])))
    columns = {side: tf.constant(lines, tf.string) for side, lines in sides.items()}
    return tf.data.Dataset.from_tensor_slices(columns)

  return seqio.FunctionDataSource(read, splits=list(splits))


def prepared_tfds(
  name: str, splits: Sequence[str] = ("train", "validation", "test")
) -> seqio.TfdsDataSource:
  """Return a dataset of TFDS that is never downloaded; `tfds build NAME` prepares it once."""
  return seqio.TfdsDataSource(name, splits=splits, read_only=True)


def _in_data(name: str) -> str:
  return os.path.join(data_folder(), name)


def _multi30k(split: str) -> tuple[str, str]:
  return _in_data(f"multi30k/{split}.en.gz"), _in_data(f"multi30k/{split}.de.gz")


_EN_DE = "translate English to German: "
_MULTI30K = {"train": "train", "validation": "val", "test": "test_2016_flickr"}

# Validation is newstest2013 and test is newstest2014.
_WMT14 = prepared_tfds("wmt14_translate/de-en:1.0.0")
add_task("specdec_wmt14_ende", _WMT14, _EN_DE, "en", "de", metrics=["BLEU"])
_CNN_DM = prepared_tfds("cnn_dailymail:3.4.0")
_ROUGE = "ROUGE-1", "ROUGE-2", "ROUGE-Lsum"
add_task("specdec_cnn_dm", _CNN_DM, "summarize: ", "article", "highlights", metrics=_ROUGE)
add_task(
  "specdec_multi30k_ende",
  text_pairs({split: _multi30k(name) for split, name in _MULTI30K.items()}),
  _EN_DE,
  "source",
  "target",
  metrics=["BLEU"],
)
