"""Test the study of given texts on a tiny pair."""

import random

import pytest
import tiny_pair

from experiments.given import given


def test_words_are_changed():
  text = "a man rides a red bike"
  for count in (1, 3, 9):
    parts = given.changed(text, count, ["dog", "cat"], random.Random(0)).split()
    assert sum(a != b for a, b in zip(parts, text.split(), strict=True)) == min(count, 6)


@pytest.mark.slow
def test_sets_are_measured_and_no_output_differs():
  pair, sources = tiny_pair.pair("near", 64), tiny_pair.SENTENCES[:8]
  sets = {each.name: each for each in given.caption_sets(pair, sources)}
  growing = sets["growing source"]
  assert growing.sources[1].startswith(f"{growing.sources[0]} ") and growing.drafts[0] is None
  for name in ("1 word changed", "one source of eight"):
    rows = [*given.measured(sets[name], pair, given.generate, 2, 1, draft_seconds=1.0)]
    assert [row["way"] for row in rows] == [*given.WAYS]
    assert not any(row["differing"] for row in rows)
    assert rows[0]["tokens_per_round"] == 1 < rows[1]["tokens_per_round"]
    assert len(given.given_table(rows).rows) == 3
