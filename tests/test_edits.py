"""Test scores of corrections."""

import pytest

from specdec_jax.data.quality import edits, f_score, quality


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
