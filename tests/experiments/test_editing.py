"""Test synthetic errors."""

import random

from experiments.editing.prepare import corrupt
from specdec_jax import gin_files
from specdec_jax.data.quality import edits
from specdec_jax.data.text import read_lines

SENTENCE = "Their dog has run through the wet grass of the old park, and it barks at two men."


def test_errors_are_reproducible_varied_and_moderate():
  texts = [corrupt(SENTENCE, random.Random(seed)) for seed in range(300)]
  assert texts == [corrupt(SENTENCE, random.Random(seed)) for seed in range(300)]
  assert len({*texts}) > 200 and 20 < texts.count(SENTENCE) < 90
  counts = [len(edits(text, SENTENCE)) for text in texts]
  assert 1 < sum(counts) / len(counts) < 3 and max(counts) <= 6
  words = {word for text in texts for word in text.split()}
  for example in ("There", "their", "the,", "bark", "grass"):
    assert example in words, example
  shorter, longer = (sum(len(text.split()) == n for text in texts) for n in (17, 19))
  assert shorter > 10 and longer > 5  # missing and doubled words


def test_bundled_captions_with_errors_are_made_of_the_bundled_captions():
  captions, rng = gin_files.lines("tasks/captions.en.txt"), random.Random("errors of captions")
  assert read_lines("experiments/editing/captions.errors.txt") == [
    corrupt(line, rng) for line in captions
  ]
