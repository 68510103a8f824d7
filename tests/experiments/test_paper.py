"""Test that the paper's tables are complete, as printed, and consistent with each other."""

import csv
import re

import pytest

from experiments.paper.paper import CONFIGS, load_table

ROWS = {1: 6, 2: 12, 3: 32, 4: 12, 5: 20}
TEXT = {"task", "m_p", "m_q"}
# Beyond its column's name, what a value must be.
RANGES = {
  "temperature": {0, 1},
  "gamma": {2, 3, 5, 7, 8, 10},
  "lenience": {1, 0.5, 0.3, 0.1},
  "c": {0.015, 0.02, 0.04, 0.11},
}


def of(number, **cells):
  """Return the only row of a table with these cells."""
  (row,) = (r for r in load_table(number) if cells.items() <= r.items())
  return row


@pytest.mark.parametrize("number", ROWS)
def test_tables_are_whole(number):
  rows = load_table(number)
  assert len(rows) == ROWS[number]
  may_be_empty = {"gamma", "c", "speed"} if number == 5 else set()
  for row in rows:
    for name, value in row.items():
      if value is None:
        assert name in may_be_empty
      else:
        assert type(value) is (str if name in TEXT else float)
      if isinstance(value, float):
        assert value in RANGES.get(name, {value})
        assert name != "alpha" or 0 < value < 1
  key = [name for name in rows[0] if name in TEXT | {"temperature", "lenience"}]
  assert number == 1 or len({tuple(row[name] for name in key) for row in rows}) == len(rows)


@pytest.mark.parametrize("number", ROWS)
def test_digits_are_kept_as_printed(number):
  """Cells are text, because a float would print 0.80 in Table 3 as 0.8."""
  with (CONFIGS / f"table{number}.csv").open(newline="") as file:
    cells = [cell for row in csv.DictReader(file) for n, cell in row.items() if n not in TEXT]
  assert all(re.fullmatch(r"(\d+(\.\d+)?)?", cell) for cell in cells)
  kept_zero = {1: "1.60", 2: "3.0", 3: "0.80", 4: "2.0", 5: "0.90"}
  assert kept_zero[number] in cells


def test_cells_read_again_in_the_paper():
  assert of(1, alpha=0.7)["operations"] == 1.58
  assert of(1, alpha=0.9, gamma=10)["speed"] == 6.86
  assert of(2, task="EnDe", m_q="T5-small", temperature=0)["speed"] == 3.4
  assert of(2, task="CNNDM", m_q="T5-small", temperature=1)["speed"] == 2.3
  assert of(3, m_p="GPT-like (97M)", m_q="GPT-like (6M)", temperature=1)["alpha"] == 0.89
  assert of(3, m_p="T5-XXL (CNNDM)", m_q="Bigram", temperature=0)["alpha"] == 0.23
  assert of(3, m_p="LaMDA (137B)", m_q="LaMDA (8B)", temperature=1)["alpha"] == 0.74
  assert of(4, task="EnDe", m_q="T5-large", temperature=1)["emp"] == 1.4
  assert of(4, task="CNNDM", m_q="T5-base", temperature=0)["c"] == 0.04
  assert of(5, m_q="UNIGRAM", lenience=0.1)["alpha"] == 0.16
  assert of(5, m_q="T5-SMALL (77M)", lenience=0.1)["speed"] == 5
  assert of(5, temperature=0, lenience=0.3) == {
    "temperature": 0,
    "m_q": "T5-small",
    "lenience": 0.3,
    "alpha": 0.8,
    "gamma": 8,
    "c": 0.015,
    "speed": 3.9,
  }


def test_table_4_repeats_table_2():
  for ours, theirs in zip(load_table(2), load_table(4), strict=True):
    assert ours.pop("speed") == theirs["emp"]
    assert ours.items() <= theirs.items()


def test_table_3_repeats_the_alphas_of_table_2():
  for row in load_table(2):
    m_p = f"T5-XXL ({row['task']})"
    twin = of(3, m_p=m_p, m_q=row["m_q"], temperature=row["temperature"])
    assert twin["alpha"] == row["alpha"]


def test_table_5_without_lenience_repeats_table_3():
  for row in load_table(5):
    if row["lenience"] == 1:
      m_q = row["m_q"].partition(" (")[0].capitalize()  # UNIGRAM, T5-SMALL (77M)
      twin = of(3, m_p="T5-XXL (EnDe)", m_q=m_q, temperature=row["temperature"])
      assert twin["alpha"] == row["alpha"]
