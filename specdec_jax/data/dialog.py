"""Dialogs as prompts: one turn a line behind its speaker's name, the last line left to be written.

  A: Have you ever been to Norway?
  B: Once, in winter. It was dark by three.
  A: What did you do all day?
  B:

Two speakers take turns. The prompt ends with the name of the one whose turn it is, so what a
decoder-only model writes is the next turn, and whatever it puts behind it. Vocabularies that read a
newline as a space (SentencePiece's and word pieces) see the names between the turns.
"""

import json
from collections.abc import Sequence

from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.errors import InputError, require_count, require_types


def prompt(turns: Sequence[str], speakers: tuple[str, str] = ("A", "B"), first: int = 0) -> str:
  """The prompt of a dialog whose turns are those from number `first` on: the even ones A's."""
  texts = *(" " + " ".join(turn.split()) for turn in turns), ""
  return "\n".join(f"{speakers[i % 2]}:{text}" for i, text in enumerate(texts, first))


def read_dialogs(
  path: str,
  vocabulary: str,
  max_tokens: int,
  limit: int | None = None,
  speakers: tuple[str, str] = ("A", "B"),
) -> list[str]:
  """Prompts of the dialogs in a file: a JSON list of turns a line, or an object that has "turns".

  A pair cuts a source that is too long at its end, where a dialog is newest. So the oldest turns of
  a long dialog are left out here, as many as it takes.

  Args:
    path: of the file, as `read_lines` takes it.
    vocabulary: the pair's; its file.
    max_tokens: limit for a prompt, EOS counted; at most the pair's `max_source_tokens`.
    limit: the first so many dialogs, or all.
    speakers: names; the first one's is the first turn.

  Raises:
    InputError: a line is no dialog, or its newest turn alone is too long.
  """
  require_types(read_dialogs, locals())
  require_count("max_tokens", max_tokens)
  words = open_vocabulary(vocabulary)
  prompts = []
  for number, line in enumerate(read_lines(path, limit), 1):
    turns = _turns(line, f"line {number} of {path}")
    for first in range(max(1, len(turns))):
      text = prompt(turns[first:], speakers, first)
      if (size := len(words.encode(text))) <= max_tokens:
        break
    else:
      raise InputError(
        f"The newest turn of line {number} of {path} takes {size} tokens by itself, and max_tokens "
        f"is {max_tokens}; shorten it, or give a larger limit."
      )
    prompts.append(text)
  return prompts


def _turns(line: str, where: str) -> list[str]:
  try:
    found = json.loads(line)
  except ValueError as error:
    raise InputError(f"{where} is not JSON: {error}.") from error
  turns = found.get("turns") if isinstance(found, dict) else found
  if not (isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)):
    raise InputError(
      f"{where} is no dialog; expected a list of texts, a turn each, or an object that has such a "
      'list as "turns".'
    )
  return turns
