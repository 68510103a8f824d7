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
    status.COMPUTED: "27",
    status.NO_GAMMA: "3",
    status.ROUNDED: "3",
    status.WEIGHTS_AND_TPU: "15",
    status.WEIGHTS: "47",
  }
  (lamda,) = {c.reproduction for c in claims if "LaMDA" in c.quantity}
  assert "runs only the shapes" in lamda
  commands = [
    c.reproduction for c in claims if c.status == status.WEIGHTS and c.reproduction != lamda
  ]
  assert {*commands} == {
    f"`specdec reproduce {name} --gin_file=experiments/paper/fine_tuned.gin`"
    for name in ("table3", "table5")
  }
  table = status.status_table(claims)
  assert sum(int(row[2]) for row in table.rows) == 95 and "95 numbers" in table.notes[0]


def test_stand_in_matches_draft_temperature_lenience_and_filter():
  record = RECORD.replace(draft="draft", alpha=0.8349)
  others = [
    record.replace(temperature=1.0, top_k=40),
    record.replace(lenience=0.5, alpha=0.9),
  ]
  claims = all_claims({"sizes/alphas.jsonl": [record, *others], "table5/results.jsonl": others})
  argmax, sampled = select(claims, "3", "T5-XXL (EnDe), T5-large")
  assert (argmax.status, argmax.ours, argmax.printed) == (status.STAND_IN, "0.83", "0.82")
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


def test_only_records_of_the_papers_own_models_have_their_status():
  ende = RECORD.replace(task="wmt14_ende", alpha=0.7549, speedup=3.26, gamma=7)
  own = ende.replace(target="the paper's T5-XXL", draft="the paper's T5-small")
  base = own.replace(draft="the paper's T5-base", temperature=1.0, lenience=0.3, alpha=0.8149)
  others = [ende.replace(target="t5_11B", draft="t5_small"), own.replace(gamma=5, speedup=3.0)]
  row = dict(task="EnDe", m_q="T5-small", temperature=0.0, c=0.01, speed=3.3)
  claims = all_claims({"paper/results.jsonl": [own, base, *others[1:]]}, [row])
  alpha, _ = select(claims, "3", "T5-XXL (EnDe), T5-small")
  speed, sampled = select(claims, "2, 4", "EnDe, T5-small")
  lenient = select(claims, "5", "T5-BASE")
  assert (alpha.status, alpha.ours, alpha.printed) == (status.MEASURED, "0.75", "0.75")
  assert (speed.status, speed.ours, speed.printed) == (status.MEASURED, "3.3", "3.4")
  assert "over own" in speed.reproduction and sampled.status == status.WEIGHTS_AND_TPU
  assert [(c.status, c.ours) for c in lenient if c.ours != "-"] == [(status.MEASURED, "0.81")]
  assert dict(status.status_counts_table(claims).rows)[status.MEASURED] == "3"
  claims = all_claims({"paper/results.jsonl": others[:1]})
  assert dict(status.status_counts_table(claims).rows)[status.MEASURED] == "0"


def test_each_number_of_ours_is_in_the_column_of_its_kind():
  table = status.status_table()
  headings = "computed", "compiled (speed: Theorem 8 with the paper's alpha)", "measured"
  for cells in (dict(zip(table.columns, row, strict=True)) for row in table.rows):
    kinds = [heading for heading in headings if cells[heading] != "-"]
    assert len(kinds) == (0 if cells["status"] == status.WEIGHTS else 1)
    if kinds:
      assert cells["status"].startswith(kinds[0].partition(" ")[0])


@pytest.mark.parametrize("number, field", [(1, "speed"), (4, "exp")])
def test_number_that_differs_is_reported(number, field):
  first, *others = PAPER[number]
  claims = all_claims(paper={**PAPER, number: [{**first, field: first[field] + 0.3}, *others]})
  assert [c.status for c in claims].count(status.DIFFERS) == 1


def test_improvement_factors_of_appendix_a5():
  """Factors at temperature 0, and 5X at 1, follow from Theorem 8; the others do at no gamma."""
  argmax, sampled = (
    select(all_claims(), "5", f"speed, lenience 1 / 0.5 / 0.3 / 0.1; T5-small, temperature {t}")
    for t in (0, 1)
  )
  assert [(c.printed, c.ours) for c in argmax] == [(x, x) for x in ("3.3", "3.3", "3.9", "4.9")]
  assert [c.printed for c in sampled] == ["2.5", "3.1", "3.6", "5"]
  assert [c.ours for c in sampled] == ["2.33", "2.94", "3.45", "5"]  # 4.79
  assert [c.status for c in sampled] == [status.NO_GAMMA] * 3 + [status.COMPUTED]
