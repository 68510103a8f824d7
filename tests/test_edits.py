"""Synthetic errors, and scores of their corrections."""

import random

import pytest

from experiments.editing.corruptions import corrupt
from specdec_jax import gin_files
from specdec_jax.data.quality import edits, f_score, quality
from specdec_jax.data.text import read_lines
from specdec_jax.errors import InputError

SENTENCE = "Their dog has run through the wet grass of the old park, and it barks at two men."


def test_edits_replace_spans_of_words():
  assert edits("a b c d", "a b c d") == set()
  assert edits("a b c d", "a x c d") == {(1, 2, ("x",))}
  assert edits("a b c", "a c d") == {(1, 2, ()), (3, 3, ("d",))}


def test_f_score_weighs_precision_twice():
  source, reference = "he go to school yesterday", "he went to school yesterday"
  assert f_score([source], [reference], [reference]) == 100
  assert f_score([source], [source], [reference]) == 0  # no edit, and one was expected
  assert f_score([source], [source], [source]) == 100
  # One correct edit of two: precision 1/2, recall 1.
  both = "he went to a school yesterday"
  assert f_score([source], [both], [reference]) == pytest.approx(100 * 1.25 * 0.5 / (0.125 + 1))
  # One correct edit, two expected: precision 1, recall 1/2.
  assert f_score([source], [reference], [both]) == pytest.approx(100 * 1.25 * 0.5 / (0.25 + 0.5))
  assert quality("F0.5", [reference], [reference], [source]) == 100
  assert quality("exact match", [source, reference], [reference] * 2) == 50
  with pytest.raises(InputError, match="needs the sources"):
    quality("F0.5", [reference], [reference])


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
  errors = read_lines("experiments/editing/captions.errors.txt")
  assert errors == [corrupt(line, rng) for line in captions]


def test_errors_leave_short_texts_legible():
  for seed in range(50):
    assert corrupt("No.", random.Random(seed)).replace(".", "").lower() in ("no", "")
