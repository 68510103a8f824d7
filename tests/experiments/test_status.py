"""Test that the reproduction status counts each printed number once, with a record per result."""

import pytest
from test_tables import RECORD

from experiments.paper import status
from experiments.paper.paper import load_table

PAPER = {number: load_table(number) for number in range(1, 6)}


def all_claims(records=None, compiled=(), paper=PAPER):
  return status.claims(paper, records or {}, compiled)


def select(claims, table, quantity):
  return [claim for claim in claims if claim.table == table and quantity in claim.quantity]


def test_every_printed_number_counts_once():
  claims = all_claims()
  computed = [c for c in claims if c.status.startswith("computed")]
  assert (len(claims), len(computed)) == (95, 33)  # 62 measured by the paper, 33 computed
  assert {c.ours for c in claims if c not in computed} == {"-"}
  counts = dict(status.status_counts_table(claims).rows)
  assert counts == {
    status.MEASURED: "0",
    status.COMPUTED: "26",
    status.NO_GAMMA: "4",
    status.ROUNDED: "3",
    status.WEIGHTS_AND_TPU: "15",
    status.WEIGHTS: "47",
  }
  table = status.status_table(claims)
  assert sum(int(row[2]) for row in table.rows) == 95 and "95 numbers" in table.notes[0]


def test_stand_in_matches_draft_temperature_lenience_and_filter():
  record = RECORD.replace(draft="draft", alpha=0.8349)
  others = [
    record.replace(temperature=1.0, top_k=40),
    record.replace(lenience=0.5, alpha=0.9),
  ]
  claims = all_claims({"table3/results.jsonl": [record, *others], "table5/results.jsonl": others})
  argmax, sampled = select(claims, "3", "T5-XXL (EnDe), T5-small")
  assert (argmax.status, argmax.ours, argmax.printed) == (status.STAND_IN, "0.83", "0.75")
  assert (sampled.status, sampled.ours) == (status.WEIGHTS, "-")
  lenient, *_ = select(claims, "5", "T5-small, temperature 0")
  assert (lenient.printed, lenient.ours) == ("0.75", "0.90")
  # It is not a stand-in for rows of another task or draft.
  rest = [c for c in claims if c not in (argmax, lenient)]
  assert status.STAND_IN not in {c.status for c in rest}


def test_compiled_estimates_are_shown_with_the_speed_and_c_of_their_row():
  row = dict(task="EnDe", m_q="T5-large", temperature=0.0, c=0.0741, speed=2.84)
  claims = all_claims(compiled=[row])
  speed, other = select(claims, "2, 4", "EnDe, T5-large")
  assert (speed.status, speed.printed, speed.ours) == (status.COMPILED, "1.7", "2.8")
  assert other.status == status.WEIGHTS_AND_TPU
  (c,) = select(claims, "4", "c; T5-large")
  assert (c.printed, c.ours, c.status) == ("0.11", "0.074", status.COMPILED)


@pytest.mark.parametrize("number, field", [(1, "speed"), (4, "exp")])
def test_number_that_differs_is_reported(number, field):
  first, *others = PAPER[number]
  claims = all_claims(paper={**PAPER, number: [{**first, field: first[field] + 0.3}, *others]})
  assert [c.status for c in claims].count(status.DIFFERS) == 1


def test_improvement_factors_of_appendix_a5():
  """Factors at temperature 0 follow from Theorem 8; factors at temperature 1 do at no gamma."""
  argmax, sampled = (
    select(all_claims(), "5", f"speed, lenience 1 / 0.5 / 0.3 / 0.1; T5-small, temperature {t}")
    for t in (0, 1)
  )
  assert [(c.printed, c.ours) for c in argmax] == [(x, x) for x in ("3.3", "3.3", "3.9", "4.9")]
  assert [c.printed for c in sampled] == ["2.5", "3.1", "3.6", "5.0"]
  assert [c.ours for c in sampled] == ["2.33", "2.94", "3.45", "4.79"]
  assert {c.status for c in sampled} == {status.NO_GAMMA}
