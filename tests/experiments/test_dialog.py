"""Test prompts of dialogs: their format, and truncation of early turns."""

import json

import pytest
import tiny_pair

from experiments.table3.dialog import prompt, read_dialogs
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.errors import InputError

VOCABULARY = str(tiny_pair.folder() / "vocabulary.model")
TURNS = ["A man runs.", "Two dogs.", "A red ball!", "A big house."]


@pytest.fixture
def read(tmp_path):
  """Return a function that returns the prompts of dialogs or of lines of a file."""

  def read(*lines, max_tokens=200, **settings):
    path = tmp_path / "dialogs.jsonl"
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(line + "\n" for line in text), encoding="utf-8")
    return read_dialogs(str(path), VOCABULARY, max_tokens, **settings)

  return read


def test_prompt_ends_with_the_name_of_the_next_speaker():
  assert prompt(["Hi.", "Hello."]) == "A: Hi.\nB: Hello.\nA:"
  assert prompt(["Hi."], ("Ann", "Bob")) == "Ann: Hi.\nBob:"
  assert prompt([]) == "A:"


def test_line_is_a_list_or_an_object_with_turns(read):
  both = read(TURNS[:2], {"id": 7, "turns": TURNS[:2]})
  assert both == ["A: A man runs.\nB: Two dogs.\nA:"] * 2
  assert read(TURNS[:2], "a line past the limit", limit=1) == both[:1]


def test_earliest_turns_of_a_long_dialog_are_dropped(read):
  words = open_vocabulary(VOCABULARY)
  for num_turns in range(1, 5):
    text = prompt(TURNS[-num_turns:], first=4 - num_turns)
    assert text.startswith("BA"[num_turns % 2 == 0]) and text.endswith("\nA:")
    size = len(words.encode(text))
    assert read(TURNS, max_tokens=size) == [text]
    if num_turns > 1:
      assert read(TURNS, max_tokens=size - 1) == [
        prompt(TURNS[1 - num_turns :], first=5 - num_turns)
      ]
    else:
      with pytest.raises(InputError, match=rf"last turn of line 1 of .* {size} tokens"):
        read(TURNS, max_tokens=size - 1)
