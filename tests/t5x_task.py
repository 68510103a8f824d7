"""Task of a few lines of bytes for t5x's own infer.py, registered by importing this module."""

import seqio
import tensorflow as tf

from specdec_jax.data import tasks

VOCABULARY = seqio.ByteVocabulary()
LINES = ["a dog", "two men", "a boat at sea", "red", "snow falls"]


def _read(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
  return tf.data.Dataset.from_tensor_slices({"source": LINES, "target": LINES})


tasks.add_task(
  "specdec_bytes",
  seqio.FunctionDataSource(_read, splits=["test"]),
  "say: ",
  "source",
  "target",
  VOCABULARY,
)
