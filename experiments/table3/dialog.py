"""Dialogs as prompts: each line is a turn, which follows the name of its speaker.

  A: Have you ever been to Norway?
  B: Once, in winter. It was dark by three.
  A: What did you do all day?
  B:

Two speakers take turns. The prompt ends with the name of the next speaker, so that a decoder-only
model continues it with the next turn, and possibly with further turns. Vocabularies that treat a
newline as a space (SentencePiece and word pieces) still see the names between the turns.
"""

import json
from collections.abc import Sequence

from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.errors import InputError


def prompt(turns: Sequence[str], speakers: tuple[str, str] = ("A", "B"), first: int = 0) -> str:
  """Return the prompt for the next turn of a dialog.

  Args:
    turns: texts of the turns; the first turns of a dialog may be left out.
    speakers: names of the speakers. The first speaker has turns 0, 2, ... of the dialog.
    first: index in the dialog of `turns[0]`.
  """
  texts = *(" " + " ".join(turn.split()) for turn in turns), ""
  return "\n".join(f"{speakers[i % 2]}:{text}" for i, text in enumerate(texts, first))


def read_dialogs(
  path: str,
  vocabulary: str,
  max_tokens: int,
  limit: int | None = None,
  speakers: tuple[str, str] = ("A", "B"),
) -> list[str]:
  """Return the prompts of the dialogs in a file.

  Each line of the file is a JSON list of turns, or a JSON object with such a list in field "turns".

  A pair truncates a long source at its end, where a dialog has its latest turns. This function
  therefore drops the earliest turns of a dialog that exceeds `max_tokens`.

  Args:
    path: path of the file; see `read_lines`.
    vocabulary: path of the vocabulary of the pair.
    max_tokens: maximum number of tokens of a prompt, EOS included; at most the pair's
      `max_source_tokens`.
    limit: maximum number of dialogs to read; None to read all.
    speakers: names of the speakers; the first one has the first turn.

  Raises:
    InputError: the last turn of a dialog alone exceeds `max_tokens`.
  """
  words = open_vocabulary(vocabulary)
  prompts = []
  for number, line in enumerate(read_lines(path, limit), 1):
    value = json.loads(line)
    turns = value["turns"] if isinstance(value, dict) else value
    for first in range(max(1, len(turns))):
      text = prompt(turns[first:], speakers, first)
      if (size := len(words.encode(text))) <= max_tokens:
        break
    else:
      raise InputError(
        f"The last turn of line {number} of {path} has {size} tokens alone, and max_tokens is "
        f"{max_tokens}; shorten it, or give a larger limit."
      )
    prompts.append(text)
  return prompts
