"""Sentences extracted from texts."""

import pytest

from experiments.summaries.extracts import extract, first_sentences, sentences

PARTS = [
  "The mayor of the town opened a new bridge.",
  "Many people came to see it.",
  "It cost two million euros.",
  "The old bridge was closed in May after a flood.",
]


def test_sentences_end_at_marks_and_not_at_initials():
  text = 'He met J. Smith in Rome. "Was it late?" she asked. 20 people came! The end.'
  want = ["He met J. Smith in Rome.", '"Was it late?" she asked.', "20 people came!", "The end."]
  assert sentences(text) == want
  assert sentences(" ".join(PARTS)) == PARTS
  assert sentences("") == []


@pytest.mark.parametrize("max_words, count", [(8, 0), (9, 1), (14, 1), (15, 2), (100, 4)])
def test_first_sentences_fit_into_the_limit(max_words, count):
  assert first_sentences(PARTS, max_words) == PARTS[:count]


@pytest.mark.parametrize(
  "summary, chosen",
  [
    ("The mayor opened a new bridge.", [0]),
    ("A flood closed the old bridge in May. A new bridge cost two million euros.", [2, 3]),
    ("It cost two million euros. The mayor of the town opened a new bridge.", [0, 2]),
    ("Zebras graze quietly.", []),
  ],
)
def test_extract_has_the_sentences_that_overlap_most_in_their_order(summary, chosen):
  assert extract(PARTS, summary) == [PARTS[i] for i in chosen]


def test_extract_keeps_to_its_limits():
  summary = " ".join(PARTS)
  assert extract(PARTS, summary, max_sentences=4) == PARTS
  assert len(extract(PARTS, summary, max_sentences=2)) == 2
  assert extract(PARTS, summary, max_words=6) in ([PARTS[1]], [PARTS[2]])
