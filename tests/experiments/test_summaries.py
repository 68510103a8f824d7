"""Test sentences extracted from texts, and targets that write given texts."""

import numpy as np
import pytest
import tiny_pair

from experiments.summaries.prepare import extract, first_sentences, sentences
from experiments.summaries.replay import replayed_pair
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import branching, chain
from specdec_jax.drafts.prompt_lookup import prompt_lookup

GREEDY = Sampling(0.0)

TEXTS = tiny_pair.SENTENCES[:5]

LIMIT = 12

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


@pytest.mark.parametrize(
  "kind, tree, batch_size",
  [("model", chain(3), 5), ("prompt lookup", branching(2, 1), 1)],
  ids=["model", "prompt lookup"],
)
def test_outputs_and_rounds_are_those_of_the_given_pair(kind, tree, batch_size):
  """The draft model reads no state of the target, so it is accepted as often as before."""
  pair = tiny_pair.pair("near")
  if kind == "prompt lookup":
    pair = pair.with_draft(prompt_lookup(pair.target))
  replayed = replayed_pair(pair, TEXTS, size="tiny", max_new_tokens=LIMIT)
  assert replayed.target.name == "t5_1.1_tiny" and replayed.task == f"{pair.task}, replayed"
  for i in range(0, len(TEXTS), batch_size):
    texts = TEXTS[i : i + batch_size]
    prompt, keys = pair.prompt(texts), row_keys(0, i, len(texts))
    want, got = (
      each.decode_fn(GREEDY, tree)(prompt, keys, max_new_tokens=LIMIT) for each in (pair, replayed)
    )
    for name in ("tokens", "lengths", "num_rounds"):
      np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    np.testing.assert_array_equal(got.rounds.num_emitted, want.rounds.num_emitted)
