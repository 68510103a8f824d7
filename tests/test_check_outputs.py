"""Outputs of any engine are checked against the target: `specdec check --outputs`."""

import dataclasses
import functools
import json

import pytest
import tiny_pair

from specdec_jax.commands.check import check_exactness
from specdec_jax.contrib.top_beta import TopBetaVerifier
from specdec_jax.core.verify.lossy import TypicalVerifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.errors import InputError
from specdec_jax.exactness import outputs
from specdec_jax.files.records import decode_records, json_line

TEXTS = tiny_pair.SENTENCES[:4]
EOS = tiny_pair.pair().vocabulary.eos_id


@pytest.fixture
def check(tmp_path, capsys):
  """Return a function that checks records, and returns whether they hold, and the report."""

  def checked(records, **settings):
    path = tmp_path / "outputs.jsonl"
    path.write_text("".join(map(json_line, records)))
    try:
      check_exactness(tiny_pair.pair(), [], outputs=str(path), batch_sizes=[16], **settings)
    except SystemExit as ended:
      return ended.code != 1, capsys.readouterr().out
    return True, capsys.readouterr().out

  return checked


@functools.cache
def argmax() -> str:
  records = [{"source": text} for text in [*TEXTS, TEXTS[0]]]
  arguments = dict(max_new_tokens=12, gamma=2, batch_size=4)
  return json.dumps([row for row, _ in decode_records(tiny_pair.pair(), records, **arguments)])


def changed(change):
  """Return the records of argmax outputs, with the tokens of the second one changed."""
  records = json.loads(argmax())
  records[1]["decoded"]["tokens"] = change(records[1]["decoded"]["tokens"])
  return records


def test_records_of_translate_hold_and_a_wrong_token_is_a_fault(check, monkeypatch):
  holds, said = check(json.loads(argmax()))
  assert holds and "5 of 5" in said and "1 of 1 checks hold" in said
  wrong = changed(lambda tokens: tokens[:3] + [tokens[3] % 60 + 1] + tokens[4:])
  holds, said = check(wrong)
  assert not holds and "4 of 5" in said
  assert " text 2, token 4: " in said and said.count("FAULT") == 1
  monkeypatch.setattr(outputs, "SHARES", {"float32": 1.0})
  holds, said = check(wrong)
  assert holds and "4 of 5" in said and "a tie" in said


def test_output_that_ends_early_or_does_not_end_is_a_fault(check):
  records = changed(lambda tokens: tokens[:7])
  holds, said = check(records)
  assert not holds and " text 2, token 8: " in said and "became '(end)'" in said
  assert check([row | {"stop_strings": "x"} for row in records])[0]  # which may end an output
  tokens = records[0]["decoded"]["tokens"]
  holds, said = check([records[0] | {"eos_token_id": tokens[5]}])
  end = tokens.index(tokens[5]) + 1
  assert not holds and f" text 1, token {end + 1}: '(end)' became " in said


def test_processors_apply_to_the_lines_that_name_them(check):
  given = dict(repetition_penalty=1.8, no_repeat_ngram_size=2)
  output = tiny_pair.pair().generate(TEXTS, gamma=0, max_new_tokens=12, batch_size=4, **given)
  penalized = [
    {"text": text, "tokens": each.tokens.tolist(), **given} for text, each in zip(TEXTS, output)
  ]
  holds, said = check([*json.loads(argmax()), *penalized])
  assert holds and "2 of 2 checks hold" in said and "repetition_penalty 1.8" in said
  assert not check([{**row, "repetition_penalty": 1} for row in penalized])[0]


def test_text_stands_for_the_tokens_that_the_vocabulary_encodes():
  records, tokens = [{"output": "a red ball."}], tiny_pair.pair().vocabulary.encode_output
  for given, length in (({}, None), ({"max_new_tokens": 2}, 2)):
    (group,) = outputs.groups_of(tiny_pair.pair(), TEXTS[:1], records, given)
    assert group.outputs == [tokens("a red ball.")[:length]]


def test_settings_of_lines_precede_flags_and_equal_ones_are_tested_together():
  lines = [{}, {"temperature": 0.5}, {"temperature": 1.0}, {"do_sample": False}, {"tokens": []}]
  records = [{"tokens": [3, EOS], "engine": "x", **line} for line in lines]
  texts = ["a", "b", "c", "d", " "]
  groups = outputs.groups_of(tiny_pair.pair(), texts, records, {"temperature": 1.0, "top_k": 3})
  assert [(str(group), group.numbers) for group in groups] == [
    ("temperature 1.0, top_k 3", [1, 3]),
    ("temperature 0.5, top_k 3", [2]),
    ("temperature 0.0, top_k 3", [4]),
  ]


@pytest.mark.parametrize(
  "record, settings, words",
  [
    ({"tokens": [900]}, {}, "output 1 has the sequence"),
    ({"tokens": "3 4"}, {}, "Output 1 has no list"),
    ({"output": "a"}, {"temperatures": [1.0]}, "Output 1 has no list of 'tokens'"),
    ({"tokens": [3]}, {"temperatures": [0.0, 1.0]}, "Several temperatures"),
    (None, {}, "has no outputs"),
  ],
)
def test_invalid_outputs_are_reported(check, record, settings, words):
  with pytest.raises(InputError, match=words):
    check([{"source": TEXTS[0], **record}] if record else [], **settings)


def sampled(verifier=TokenVerifier, **given):
  """Return the records of 400 outputs of each text."""
  pair = dataclasses.replace(tiny_pair.pair(), verifier=verifier)
  found = pair.generate(TEXTS * 400, max_new_tokens=8, gamma=3, batch_size=32, **given)
  return [
    {"source": text, "tokens": each.tokens.tolist(), "temperature": given["temperature"]}
    for text, each in zip(TEXTS * 400, found)
  ]


@pytest.mark.slow
def test_exact_samples_hold_and_others_fail(check):
  own, filtered = sampled(temperature=0.8), sampled(temperature=0.8, top_k=10)
  holds, said = check([*own, *(row | {"top_k": 10} for row in filtered)])
  assert holds and "3 of 3 checks hold" in said and "temperature 0.8, top_k 10" in said
  assert "detects a temperature wrong by" in said and "Smallest errors" in said
  assert not check([row | {"temperature": 0.7} for row in own])[0]
  holds, said = check([row | {"top_k": 10} for row in own])
  assert not holds and "outputs impossible" in said and "a FAULT" in said


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes", [dict(verifier=TypicalVerifier), dict(verifier=TopBetaVerifier), dict(lenience=0.5)]
)
def test_samples_of_lossy_verifiers_fail(check, changes):
  assert not check(sampled(temperature=1.0, **changes))[0]
