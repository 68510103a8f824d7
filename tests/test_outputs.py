"""Test `generate.outputs`, the way from texts to outputs that generate and the commands share."""

import pytest
import tiny_pair

from specdec_jax.core.trees import Tree
from specdec_jax.errors import InputError
from specdec_jax.generate import EMPTY, outputs

TEXTS = [tiny_pair.SENTENCES[i] for i in (0, 14, 33, 60, 80)]
SAMPLED = dict(temperature=1.0, gamma=3, seed=5, max_new_tokens=10)


def texts_of(found) -> list[str]:
  return [*map(str, found)]


@pytest.fixture(scope="module")
def pair():
  return tiny_pair.pair()


@pytest.fixture(scope="module")
def own(pair):
  """Outputs of one text at a time, the same keys as in a batch."""
  found = [next(outputs(pair, [text], first=i, **SAMPLED)) for i, text in enumerate(TEXTS)]
  return texts_of(found)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_lists_and_iterators_have_the_outputs_of_single_texts(pair, own, batch_size):
  how = dict(SAMPLED, batch_size=batch_size)
  assert texts_of(outputs(pair, TEXTS, **how)) == own
  assert texts_of(outputs(pair, iter(TEXTS), **how)) == own
  assert texts_of(pair.generate(iter(TEXTS), **how)) == own


def test_text_is_read_when_the_one_before_is_decoded(pair, own):
  read = []
  found = outputs(pair, (read.append(text) or text for text in TEXTS), batch_size=2, **SAMPLED)
  assert not read
  for i, output in enumerate(found):
    assert len(read) == min(len(TEXTS), i + 2 - i % 2) and output.text == own[i]


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("given", [list, iter])
def test_none_has_an_empty_output_and_keeps_the_keys_of_others(pair, own, given, batch_size):
  with_gaps = [TEXTS[0], None, None, *TEXTS[3:]]
  found = [*outputs(pair, given(with_gaps), batch_size=batch_size, **SAMPLED)]
  assert texts_of(found) == [own[0], "", "", *own[3:]]
  assert found[1] is EMPTY and EMPTY.acceptance_counts == (0, 0) and not len(EMPTY.tokens)
  assert [*outputs(pair, given([None]), **SAMPLED)] == [EMPTY]
  assert [*outputs(pair, given([]), **SAMPLED)] == []


@pytest.mark.parametrize(
  "tree", [(0, 0, 1), iter((0, 0, 1)), Tree((0, 0, 1))], ids=["list", "iterator", "tree"]
)
def test_tree_is_parents_or_a_tree(pair, tree):
  (output,) = pair.generate(TEXTS[:1], tree=tree, max_new_tokens=10)
  assert output.rounds.draft_tokens.shape[1] == 3
  assert str(output) == str(pair.generate(TEXTS[:1], gamma=0, max_new_tokens=10)[0])


def test_iterators_are_arguments(pair):
  plain = pair.generate(TEXTS[:2], max_new_tokens=10)
  stop = str(plain[0])[3:6]
  (want, other), (got, same) = (
    pair.generate(TEXTS[:2], stop_strings=stops, max_new_tokens=10)
    for stops in ([stop], iter([stop]))
  )
  assert want.finish_reason == "stop_string"
  assert (str(got), str(same)) == (str(want), str(other))
  prefixes = [[5], [6, 7]]
  both = [
    pair.generate(given(TEXTS[:2]), decoder_input_ids=given(prefixes), max_new_tokens=5)
    for given in (list, iter)
  ]
  assert texts_of(both[0]) == texts_of(both[1])


def test_none_switches_a_setting_of_the_checkpoint_off(pair):
  plain = pair.generate(TEXTS[:1], max_new_tokens=5)
  first = int(plain[0].tokens[0])
  strict = pair.with_target(generation={"suppress_tokens": [first], "max_new_tokens": 5})
  assert strict.generate(TEXTS[:1])[0].tokens[0] != first
  assert texts_of(strict.generate(TEXTS[:1], suppress_tokens=None)) == texts_of(plain)
  with_default = strict.generate(TEXTS[:1], suppress_tokens=None, max_new_tokens=None)
  assert len(with_default[0].tokens) > 5


@pytest.mark.parametrize(
  "arguments, error, words",
  [
    (dict(texts="A man"), InputError, "texts is one string"),
    (dict(texts=iter(["A\0"])), InputError, r"texts\[0\] "),
    (dict(texts=TEXTS, nodes=8), InputError, "for a beam search"),
    (dict(texts=TEXTS, temprature=1.0), TypeError, "temprature"),
    (dict(texts=TEXTS, temprature=None), TypeError, "temprature"),
  ],
  ids=["string", "NUL", "nodes", "name", "name of None"],
)
def test_invalid_arguments(pair, arguments, error, words):
  with pytest.raises(error, match=words):
    [*outputs(pair, **arguments)]
