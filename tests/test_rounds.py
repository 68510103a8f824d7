"""Test that rounds are shown in color as they were decoded."""

import numpy as np
import pytest

from specdec_jax.commands.quickstart import show_examples
from specdec_jax.core import rounds
from specdec_jax.core.rounds import (
  ACCEPTED,
  CORRECTED,
  REJECTED,
  UNVERIFIED,
  Branch,
  Example,
  Round,
  read_rounds,
  round_text,
)
from specdec_jax.core.types import DecodeResult, Rounds

WORDS = "<pad> </s> ein der Mann Hund läuft steht rot grün schnell".split()
PAD, EOS, EIN, DER, MANN, HUND, LÄUFT, STEHT, ROT, GRÜN, SCHNELL = range(len(WORDS))


def pieces(ids):
  return [" " + WORDS[int(i)] for i in ids]


def decode_result(*rows, gamma=3):
  """Return a `DecodeResult` on the host.

  Args:
    *rows: the rounds of each row, as (draft tokens, n, next token, number of emitted tokens).
    gamma: draft tokens per round.
  """
  num_rounds = max(map(len, rows))
  blank = ([PAD] * gamma, 0, PAD, 0)
  rows = [[*row, *[blank] * (num_rounds - len(row))] for row in rows]
  draft_tokens, n, next_token, emitted = (
    np.array([[row[r][field] for row in rows] for r in range(num_rounds)]) for field in range(4)
  )
  return DecodeResult(
    None, emitted.sum(axis=0), Rounds(draft_tokens, n, next_token, emitted), num_rounds, None
  )


def read(decoded, row=0):
  """Return the accepted, the rejected and the corrected words of each round, by their colour."""
  lines = []
  for line in map(round_text, read_rounds(decoded, row, pieces)):
    words = {ACCEPTED: [], REJECTED: [], CORRECTED: []}
    for span in line.spans:
      words[str(span.style)] += line.plain[span.start : span.end].strip("[]+- ").split()
    lines.append((words[ACCEPTED], words[REJECTED], words[CORRECTED]))
  return lines


@pytest.mark.parametrize(
  "round_, shown",
  [  # draft tokens, n, next token, number of emitted tokens -> accepted, rejected, target's token
    (([EIN, MANN, STEHT], 2, LÄUFT, 3), ("ein Mann", "steht", "läuft")),
    (([HUND, MANN, STEHT], 0, EIN, 1), ("", "Hund", "ein")),
    (([EIN, ROT, HUND], 3, LÄUFT, 4), ("ein rot Hund", "", "läuft")),
    # The text ends inside accepted draft tokens, in the correction, or at the limit of 1 or 2
    # tokens.
    (([ROT, EOS, HUND], 3, MANN, 2), ("rot </s>", "", "")),
    (([EOS, ROT, HUND], 1, MANN, 1), ("</s>", "", "")),
    (([ROT, HUND, MANN], 1, EOS, 2), ("rot", "Hund", "</s>")),
    (([ROT, GRÜN, HUND], 2, MANN, 1), ("rot", "", "")),
    (([ROT, GRÜN, HUND], 2, MANN, 2), ("rot grün", "", "")),
  ],
)
def test_every_draft_token_of_a_chain_is_shown_once_and_emitted_tokens_are_the_text(round_, shown):
  decoded = decode_result([round_])
  assert read(decoded) == [tuple(words.split() for words in shown)]
  (r,) = read_rounds(decoded, 0, pieces)
  draft_tokens, n, target_token, num_emitted = round_
  rejected = () if r.rejected is None else (r.rejected,)
  assert [*r.accepted, *rejected, *r.unverified] == pieces(draft_tokens)
  assert [*r.emitted] == pieces([*draft_tokens[:n], target_token])[:num_emitted]


def test_each_round_is_one_line_until_the_row_stops():
  one = ([EIN, MANN, STEHT], 3, SCHNELL, 4)
  two = ([EIN, MANN, STEHT], 1, HUND, 2)
  idle = ([EIN, MANN, STEHT], 3, SCHNELL, 0)  # the other row is still running
  decoded = decode_result([one, two], [two, idle])
  assert read(decoded, 0) == [
    (["ein", "Mann", "steht"], [], ["schnell"]),
    (["ein"], ["Mann"], ["Hund"]),
  ]
  assert read(decoded, 1) == [(["ein"], ["Mann"], ["Hund"])]


def test_colours_and_brackets_distinguish_the_kinds_of_tokens():
  assert len({ACCEPTED, REJECTED, CORRECTED}) == 3
  (r,) = read_rounds(decode_result([([EIN, MANN, STEHT], 1, HUND, 2)]), 0, pieces)
  line = round_text(r)
  assert " ein" in line.plain and "[- Mann]" in line.plain and "[+ Hund]" in line.plain
  for word in ("accepted", "rejected", "target"):
    assert word in rounds.LEGEND.plain


def test_pieces_that_look_like_markup_are_text():
  (r,) = read_rounds(decode_result([([EIN, MANN, STEHT], 1, HUND, 2)]), 0, lambda ids: ["[/b]"])
  assert round_text(r).plain.count("[/b]") == 3


# Trees.

#   0 - 1 ein - 4 Mann - 6 läuft
#   |     |            - 7 steht
#   |     ----- 5 Hund
#   --- 2 der
#   --- 3 rot
PARENTS = (0, 0, 0, 1, 1, 4, 4)
DRAFT_TOKENS = [EIN, DER, ROT, MANN, HUND, LÄUFT, STEHT]


def tree_round(path, target_token, num_emitted):
  decoded = decode_result(
    [(DRAFT_TOKENS, len(path), target_token, num_emitted)], gamma=len(DRAFT_TOKENS)
  )
  path = np.array([[path + [0] * (3 - len(path))]])
  decoded = decoded._replace(rounds=decoded.rounds._replace(path=path))
  (r,) = read_rounds(decoded, 0, pieces, PARENTS)
  return r


def test_tree_shows_its_path_its_rejected_siblings_and_the_next_token():
  r = tree_round(
    [1, 5], GRÜN, 3
  )  # the earlier sibling of 5 was verified, the later ones of 1 were not
  assert r == Round(
    (" ein", " Hund"),
    None,
    (),
    " grün",
    (Branch(1, " Mann", (" läuft",)), Branch(2, None, (" steht",)), Branch(0, None, (" der",)))
    + (Branch(0, None, (" rot",)),),
  )
  assert r.emitted == (" ein", " Hund", " grün")
  text = round_text(r)
  assert text.plain.splitlines() == [
    " ein Hund[+ grün]",
    "    [- Mann] läuft",
    "             steht",  # in the column of läuft
    " der",
    " rot",
  ]
  styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
  assert styles[" ein"] == styles[" Hund"] == ACCEPTED and styles["[+ grün]"] == CORRECTED
  assert styles["[- Mann]"] == REJECTED and styles[" läuft"] == styles[" der"] == UNVERIFIED


def test_children_of_the_last_node_are_rejected_unless_the_text_ended():
  first_two = [branch.rejected for branch in tree_round([1, 4], GRÜN, 3).branches[:2]]
  assert first_two == [" läuft", " steht"]
  for r in tree_round([1, 4], GRÜN, 2), tree_round([1, 4, 6], GRÜN, 2):  # EOS or the limit at 4
    assert r.accepted == (" ein", " Mann") and r.target_token is None
    assert r.branches[:2] == (Branch(2, None, (" läuft",)), Branch(2, None, (" steht",)))
  assert [b.rejected for b in tree_round([], GRÜN, 1).branches] == [
    " ein",
    None,
    None,
    " der",
    " rot",
  ]


@pytest.mark.parametrize("path", [[], [1], [2], [3], [1, 4], [1, 5], [1, 4, 6], [1, 4, 7]])
@pytest.mark.parametrize("ended", [0, 1])
def test_every_draft_token_of_a_tree_is_shown_once(path, ended):
  if ended and not path:
    return
  r = tree_round(path, GRÜN, len(path) + 1 - ended)
  shown = [*r.accepted]
  for branch in r.branches:
    shown += [piece for piece in (branch.rejected, *branch.unverified) if piece is not None]
  assert sorted(shown) == sorted(pieces(DRAFT_TOKENS)) and r.rejected is None and r.unverified == ()
  assert r.emitted == tuple(pieces([DRAFT_TOKENS[i - 1] for i in path] + [GRÜN][ended:]))


def test_dynamic_tree_has_other_parents_in_each_round():
  parents = np.array([[PARENTS], [(0, 1, 2, 3, 4, 5, 6)]])
  rows = [(DRAFT_TOKENS, 1, GRÜN, 2), (DRAFT_TOKENS, 1, GRÜN, 2)]
  decoded = decode_result(rows, gamma=len(DRAFT_TOKENS))
  path = np.array([[[1] + [0] * 6]] * 2)
  decoded = decoded._replace(rounds=decoded.rounds._replace(path=path, parents=parents))
  tree, chain = read_rounds(decoded, 0, pieces)
  assert len(tree.branches) == 5
  assert chain.branches == (Branch(1, " der", tuple(pieces(DRAFT_TOKENS[2:]))),)


def test_draft_tokens_that_were_not_proposed_are_not_shown():
  """A vocabulary has no piece for -1."""

  def only_tokens(ids):
    assert min(ids) >= 0
    return pieces(ids)

  (r,) = read_rounds(decode_result([([EIN, MANN, -1], 2, HUND, 3)]), 0, only_tokens)
  assert (r.accepted, r.rejected, r.unverified) == (tuple(pieces([EIN, MANN])), None, ())


def test_examples_show_translations_below_their_sources(capsys):
  decoded = Round((" Ein", " Mann"), None, (), "</s>")
  show_examples([Example(f"A man {i}.", f"Ein Mann {i}.", 0.0, 3, (decoded,)) for i in (1, 2)], 1)
  printed = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
  assert printed[-6:] == [
    "  A man 1.",
    "    Ein Mann 1.",
    "      | Ein Mann[+</s>]",
    "      3 tokens from 1 target forward passes",
    "  A man 2.",
    "    Ein Mann 2.",
  ]
