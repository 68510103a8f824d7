"""What a person reads is what happened: rounds in colour, records as a table."""

import dataclasses
import io

import numpy as np
import pytest
from rich.console import Console

from specdec_jax.core.types import DecodeResult, Rounds
from specdec_jax.records import Record
from specdec_jax.reporting import rounds, speeds
from specdec_jax.reporting.formats import render
from specdec_jax.reporting.rounds import (
  ACCEPTED,
  CORRECTED,
  REJECTED,
  UNUSED,
  Branch,
  Round,
  read_rounds,
  round_text,
)

WORDS = "<pad> </s> ein der Mann Hund läuft steht rot grün schnell".split()
PAD, EOS, EIN, DER, MANN, HUND, LÄUFT, STEHT, ROT, GRÜN, SCHNELL = range(len(WORDS))


def pieces(ids):
  return [" " + WORDS[int(i)] for i in ids]


def of_rounds(*rows, gamma=3):
  """A `DecodeResult` on the host, of rows of rounds (guesses, n, next token, tokens emitted)."""
  most = max(map(len, rows))
  blank = ([PAD] * gamma, 0, PAD, 0)
  rows = [[*row, *[blank] * (most - len(row))] for row in rows]
  guesses, n, next_token, emitted = (
    np.array([[row[r][field] for row in rows] for r in range(most)]) for field in range(4)
  )
  return DecodeResult(
    None, emitted.sum(axis=0), Rounds(guesses, n, next_token, emitted), most, None
  )


def read(decoded, row=0):
  """For each round, the words in each colour."""
  lines = []
  for line in map(round_text, read_rounds(decoded, row, pieces)):
    words = {ACCEPTED: [], REJECTED: [], CORRECTED: []}
    for span in line.spans:
      words[str(span.style)] += line.plain[span.start : span.end].strip("[]+- ").split()
    lines.append((words[ACCEPTED], words[REJECTED], words[CORRECTED]))
  return lines


def test_accepted_rejected_and_corrected():
  decoded = of_rounds([([EIN, MANN, STEHT], 2, LÄUFT, 3)])
  assert read(decoded) == [(["ein", "Mann"], ["steht"], ["läuft"])]


def test_nothing_accepted():
  assert read(of_rounds([([HUND, MANN, STEHT], 0, EIN, 1)])) == [([], ["Hund"], ["ein"])]


def test_all_accepted():
  """The token after them is the target's own, and nothing was rejected."""
  decoded = of_rounds([([EIN, ROT, HUND], 3, LÄUFT, 4)])
  assert read(decoded) == [(["ein", "rot", "Hund"], [], ["läuft"])]


def test_text_that_ends_inside_accepted_guesses():
  """Guesses past EOS were neither accepted nor rejected, and nothing follows."""
  assert read(of_rounds([([ROT, EOS, HUND], 3, MANN, 2)])) == [(["rot", "</s>"], [], [])]
  assert read(of_rounds([([EOS, ROT, HUND], 1, MANN, 1)])) == [(["</s>"], [], [])]


def test_text_that_ends_in_the_correction():
  assert read(of_rounds([([ROT, HUND, MANN], 1, EOS, 2)])) == [(["rot"], ["Hund"], ["</s>"])]


def test_text_cut_by_the_limit():
  """Of a round that would give 3 tokens the first, or two; its correction is not in the text."""
  round_ = ([ROT, GRÜN, HUND], 2, MANN)
  assert read(of_rounds([(*round_, 1)])) == [(["rot"], [], [])]
  assert read(of_rounds([(*round_, 2)])) == [(["rot", "grün"], [], [])]


def test_a_line_a_round_until_the_row_stopped():
  one = ([EIN, MANN, STEHT], 3, SCHNELL, 4)
  two = ([EIN, MANN, STEHT], 1, HUND, 2)
  idle = ([EIN, MANN, STEHT], 3, SCHNELL, 0)  # its neighbour was still running
  decoded = of_rounds([one, two], [two, idle])
  assert read(decoded, 0) == [
    (["ein", "Mann", "steht"], [], ["schnell"]),
    (["ein"], ["Mann"], ["Hund"]),
  ]
  assert read(decoded, 1) == [(["ein"], ["Mann"], ["Hund"])]


def test_colours_and_brackets_tell_the_three_apart():
  """By colour, and without it."""
  assert len({ACCEPTED, REJECTED, CORRECTED}) == 3
  (r,) = read_rounds(of_rounds([([EIN, MANN, STEHT], 1, HUND, 2)]), 0, pieces)
  line = round_text(r)
  assert " ein" in line.plain and "[- Mann]" in line.plain and "[+ Hund]" in line.plain
  for word in ("accepted", "rejected", "target"):
    assert word in rounds.LEGEND.plain


def test_pieces_that_look_like_markup_are_text():
  (r,) = read_rounds(of_rounds([([EIN, MANN, STEHT], 1, HUND, 2)]), 0, lambda ids: ["[/b]"])
  assert rendered(round_text(r)).count("[/b]") == 3


# Trees.

#   0 - 1 ein - 4 Mann - 6 läuft
#   |     |            - 7 steht
#   |     ----- 5 Hund
#   --- 2 der
#   --- 3 rot
PARENTS = (0, 0, 0, 1, 1, 4, 4)
GUESSES = [EIN, DER, ROT, MANN, HUND, LÄUFT, STEHT]


def of_tree(path, own, num_emitted):
  decoded = of_rounds([(GUESSES, len(path), own, num_emitted)], gamma=len(GUESSES))
  path = np.array([[path + [0] * (3 - len(path))]])
  decoded = decoded._replace(rounds=decoded.rounds._replace(path=path))
  (r,) = read_rounds(decoded, 0, pieces, PARENTS)
  return r


def test_a_tree_shows_its_path_its_rejected_siblings_and_the_next_token():
  r = of_tree([1, 5], GRÜN, 3)  # the elder sibling of 5 was judged, the younger ones of 1 were not
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
    "             steht",  # where läuft stands
    " der",
    " rot",
  ]
  styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
  assert styles[" ein"] == styles[" Hund"] == ACCEPTED and styles["[+ grün]"] == CORRECTED
  assert styles["[- Mann]"] == REJECTED and styles[" läuft"] == styles[" der"] == UNUSED


def test_last_children_are_rejected_unless_the_text_ended():
  first_two = [branch.rejected for branch in of_tree([1, 4], GRÜN, 3).branches[:2]]
  assert first_two == [" läuft", " steht"]
  for r in of_tree([1, 4], GRÜN, 2), of_tree([1, 4, 6], GRÜN, 2):  # EOS or the limit at 4
    assert r.accepted == (" ein", " Mann") and r.own is None
    assert r.branches[:2] == (Branch(2, None, (" läuft",)), Branch(2, None, (" steht",)))
  assert [b.rejected for b in of_tree([], GRÜN, 1).branches] == [" ein", None, None, " der", " rot"]


@pytest.mark.parametrize("path", [[], [1], [2], [3], [1, 4], [1, 5], [1, 4, 6], [1, 4, 7]])
@pytest.mark.parametrize("ended", [0, 1])
def test_every_guess_of_a_tree_is_shown_once(path, ended):
  if ended and not path:
    return
  r = of_tree(path, GRÜN, len(path) + 1 - ended)
  shown = [*r.accepted]
  for branch in r.branches:
    shown += [piece for piece in (branch.rejected, *branch.unused) if piece is not None]
  assert sorted(shown) == sorted(pieces(GUESSES)) and r.rejected is None and r.unused == ()
  assert r.emitted == tuple(pieces([GUESSES[i - 1] for i in path] + [GRÜN][ended:]))


def test_a_tree_may_change_from_round_to_round():
  two = np.array([[PARENTS], [(0, 1, 2, 3, 4, 5, 6)]])
  rows = [(GUESSES, 1, GRÜN, 2), (GUESSES, 1, GRÜN, 2)]
  decoded = of_rounds(rows, gamma=len(GUESSES))
  path = np.array([[[1] + [0] * 6]] * 2)
  decoded = decoded._replace(rounds=decoded.rounds._replace(path=path, parents=two))
  tree, line = read_rounds(decoded, 0, pieces)
  assert len(tree.branches) == 5
  assert line.branches == (Branch(1, " der", tuple(pieces(GUESSES[2:]))),)


# The table.


def rendered(what):
  console = Console(record=True, width=100, file=io.StringIO())
  console.print(what)
  return console.export_text()


RECORD = Record(
  task="some captions",
  target="t",
  draft="d",
  temperature=0.0,
  gamma=5,
  batch_size=1,
  platform="cpu",
  device_kind="x86",
  dtype="float32",
  seed=0,
  num_examples=24,
  num_tokens=1000,
  rounds=400,
  alpha=0.8149,
  alpha_low=0.7851,
  alpha_high=0.8402,
  acceptance_rate=0.83,
  tokens_per_round=1000 / 400,
  c=0.0614,
  verify_cost=1.3816,
  predicted_theorem8=2.9871,
  predicted_measured_cost=2.1549,
  predicted_finite_length=2.1549,
  baseline_tokens_per_s=100.0,
  speculative_tokens_per_s=206.3,
  speedup=2.0634,
  identical=True,
)
OTHER = dataclasses.replace(
  RECORD,
  temperature=1.0,
  gamma=3,
  alpha=0.6651,
  alpha_low=0.6299,
  alpha_high=0.7012,
  c=0.0723,
  verify_cost=1.2249,
  predicted_theorem8=1.9149,
  predicted_measured_cost=1.7251,
  predicted_finite_length=1.7251,
  tokens_per_round=1000 / 625,
  speedup=1.6849,
  identical=None,
)


def row_of(text, number):
  (row,) = [line for line in text.splitlines() if f" {number} " in f"{line} "]
  return row


@pytest.mark.parametrize(
  "speedup, numbers",
  [
    ("2.06", ["0", "5", "0.81", "0.79", "0.84", "0.061", "1.38", "2.99", "2.15", "2.50"]),
    ("1.68", ["1", "3", "0.67", "0.63", "0.70", "0.072", "1.22", "1.91", "1.73", "1.60"]),
  ],
)
def test_a_row_has_the_numbers_of_its_record(speedup, numbers):
  row = row_of(render(speeds.speed_table([RECORD, OTHER]), "terminal"), speedup)
  found = row.replace("[", " ").replace("]", " ").replace(",", " ").split()
  for number in numbers:
    assert number in found, (number, row)


def test_the_title_says_of_what_the_numbers_are():
  text = render(speeds.speed_table([RECORD, OTHER]), "terminal")
  for words in ("some captions", "24", "batch 1", "float32", "x86"):
    assert words in text


def test_a_table_fits_100_columns_and_nothing_is_cut():
  text = render(speeds.speed_table([RECORD, OTHER]), "terminal")
  assert max(map(len, text.splitlines())) <= 100 and "…" not in text


def test_outputs_that_differ_are_shown():
  """Identical, different, and sampled, where there is nothing to be identical to."""
  last = lambda identical: row_of(
    render(speeds.speed_table([dataclasses.replace(RECORD, identical=identical)]), "terminal"),
    "2.06",
  ).split()[-2]
  assert (last(True), last(False), last(None)) == ("yes", "NO", "-")


def test_every_heading_is_explained():
  text = render(speeds.speed_table([RECORD]), "terminal")
  for word in ("alpha", "c", "v", "Thm 8", "speedup", "acceptance", "same"):
    assert word in text and word in speeds.LEGEND
