"""Dialogs become prompts that end where the next turn begins, and lose their oldest turns."""

import json

import pytest
import tiny_pair

from specdec_jax.data.dialog import prompt, read_dialogs
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.errors import InputError

VOCABULARY = str(tiny_pair.folder() / "vocabulary.model")
TURNS = ["A man runs.", "Two dogs.", "A red ball!", "A big house."]


@pytest.fixture
def read(tmp_path):
  """read(dialogs or lines, max_tokens) -> prompts."""

  def read(*lines, max_tokens=200, **settings):
    path = tmp_path / "dialogs.jsonl"
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(line + "\n" for line in text), encoding="utf-8")
    return read_dialogs(str(path), VOCABULARY, max_tokens, **settings)

  return read


def test_a_prompt_ends_with_the_name_of_whose_turn_it_is():
  assert prompt(["Hi.", "Hello."]) == "A: Hi.\nB: Hello.\nA:"
  assert prompt(["Hi."], ("Ann", "Bob")) == "Ann: Hi.\nBob:"
  assert prompt([]) == "A:"


def test_a_turn_stays_on_its_line(read):
  assert read([" Two\ndogs.\t "]) == ["A: Two dogs.\nB:"]


def test_lines_are_lists_or_objects_with_turns(read):
  both = read(TURNS[:2], {"id": 7, "turns": TURNS[:2]})
  assert both == ["A: A man runs.\nB: Two dogs.\nA:"] * 2
  assert read(TURNS[:2], "what is past the limit", limit=1) == both[:1]


def test_long_dialogs_lose_their_oldest_turns_and_no_more_than_they_must(read):
  words = open_vocabulary(VOCABULARY)
  for left in range(1, 5):
    kept = prompt(TURNS[-left:], first=4 - left)
    assert kept.startswith("BA"[left % 2 == 0]) and kept.endswith("\nA:")
    size = len(words.encode(kept))
    assert read(TURNS, max_tokens=size) == [kept]
    if left > 1:
      assert read(TURNS, max_tokens=size - 1) == [prompt(TURNS[1 - left :], first=5 - left)]
    else:
      with pytest.raises(InputError, match=rf"newest turn of line 1 of .* {size} tokens"):
        read(TURNS, max_tokens=size - 1)


@pytest.mark.parametrize(
  "line, what",
  [
    ("Hello", "is not JSON"),
    ("", "is not JSON"),
    ({"turn": ["Hi."]}, "no dialog"),
    (["Hi.", 3], "no dialog"),
  ],
)
def test_what_is_no_dialog_is_refused_with_its_line(read, line, what):
  with pytest.raises(InputError, match=rf"line 2 of .* {what}"):
    read(TURNS, line)
