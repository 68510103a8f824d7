"""Test given texts as drafts: the place in them, exactness, batches, files, and transcripts."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_contract
import tiny
import tiny_pair
import tiny_whisper
from test_speculative import exact_joint, joint_of_loop
from tiny import speculative_decode

from specdec_jax import registry
from specdec_jax.commands.translate import translate
from specdec_jax.core.context import Context, PromptWithDraft
from specdec_jax.core.decode import NullDraft
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.settings import HashableArray
from specdec_jax.core.trees import chain
from specdec_jax.drafts.given import FIRST, GivenDraft, Place
from specdec_jax.errors import InputError
from specdec_jax.load import load_pair
from specdec_jax.speech.audio import read_audio
from specdec_jax.speech.transcribe import transcripts

GIVEN = [*range(10, 34)]  # tokens that differ
EXACT = [n for n in registry.VERIFIERS if registry.verifier(n)(Sampling()).exact]


def rounds_of(output: list[int], given: list[int], gamma: int = 16) -> list[int]:
  """Decode by hand without another draft; return the number of given tokens in each round."""
  place, done, proposed = Place.start(jnp.array([given]), jnp.array([len(given)])), 0, []
  while done < len(output):
    count = int(place.num_proposed(gamma)[0])
    start = int(place.next[0])
    proposed.append(count)
    rest = output[done:]
    right = [a == b for a, b in zip(given[start : start + count], rest)]
    n = [*right, False].index(False)
    new = rest[: n + 1]
    done += len(new)
    padded = jnp.array([new + [0] * (gamma + 1 - len(new))])
    place = place.after(padded, jnp.array([len(new)]))
  return proposed


def test_whole_text_takes_rounds_that_double():
  assert rounds_of(GIVEN, GIVEN) == [8, 15]


@pytest.mark.parametrize(
  "change, most",
  {
    "replaced": (lambda x: [*x[:6], 3, *x[7:]], 4),
    "inserted": (lambda x: [*x[:6], 3, *x[6:]], 5),
    "deleted": (lambda x: [*x[:6], *x[7:]], 4),
    "two replaced": (lambda x: [*x[:6], 3, 4, *x[8:]], 6),
    "in the middle of a longer text": (lambda x: x[12:], 6),
  }.values(),
  ids=["replaced", "inserted", "deleted", "two replaced", "in the middle"],
)
def test_place_is_found_again_after_a_change(change, most):
  assert len(rounds_of(change(GIVEN), GIVEN)) <= most


def test_text_that_does_not_fit_is_given_up():
  proposed = rounds_of([*range(50, 90)], GIVEN)
  assert proposed[0] == FIRST and not any(proposed[1:])


def test_repeated_tokens_are_found_at_the_nearest_place():
  given = [10, 11, 12, 5, 13, 14, 15, 5, 16, 17, 18]
  output = [10, 11, 12, 5, 13, 3, 14, 15, 5, 16, 17, 18]
  assert len(rounds_of(output, given)) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_samples_have_the_targets_joint_distribution(name):
  models, verifier = test_contract.t5(), registry.verifier(name)(Sampling())
  draft, params = test_contract.given(models, Sampling(), chain(8))
  draft = dataclasses.replace(draft, may_stop=verifier.allows_short_proposals)
  texts = jnp.array([[2, 3, 4, 5], [3, 1, 0, 0], [0, 0, 0, 0], [5, 5, 2, 2]])
  lengths = jnp.array([4, 2, 0, 4])

  def decode(prompt, **how):
    rows = np.arange(len(prompt)) % 4
    prompt = PromptWithDraft(jnp.asarray(prompt), texts[rows], lengths[rows])
    return speculative_decode(
      models.target, draft, models.params, params, prompt, verifier=verifier, **how
    )

  counts, accepted = joint_of_loop(decode)
  assert tiny.p_value(counts, exact_joint("temperature 1")) > tiny.LEVEL
  assert (accepted > 0).sum() > 300


@pytest.fixture(scope="module")
def pair():
  return tiny_pair.pair("near", 64)


TEXTS = tiny_pair.SENTENCES[3:11]


def tokens_of(outputs):
  return [output.tokens.tolist() for output in outputs]


def num_rounds(outputs):
  return sum(len(output.rounds.num_emitted) for output in outputs)


@functools.cache
def plain(**settings):
  return tiny_pair.pair("near", 64).generate(TEXTS, gamma=0, max_new_tokens=30, **settings)


@pytest.mark.parametrize(
  "batch_size, gamma",
  [(3, 2), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((1, 0), (1, 2), (8, 0), (8, 2)))],
)
def test_outputs_equal_those_without_given_texts(pair, batch_size, gamma):
  given = [output.text for output in plain()]
  given[1], given[2], given[3], given[4] = (
    None,
    "",
    given[0],
    f"{given[4][:9]} a ball {given[4][9:]}",
  )
  settings = dict(max_new_tokens=30, batch_size=batch_size, gamma=gamma)
  ours = pair.generate(TEXTS, draft_texts=given, **settings)
  assert tokens_of(ours) == tokens_of(plain())
  assert num_rounds(ours) < num_rounds(pair.generate(TEXTS, **settings))


def test_own_output_as_a_text_takes_few_rounds(pair):
  (output,) = pair.generate(TEXTS[:1], draft_texts=[plain()[0].text], max_new_tokens=30, gamma=0)
  assert output.tokens.tolist() == plain()[0].tokens.tolist()
  assert 2 * len(output.rounds.num_emitted) < len(output.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"n": 2}, {"forced": True}, {"stream": True}], ids=str)
def test_other_ways_to_decode_take_given_texts(pair, settings):
  text, given = TEXTS[0], plain()[0].text
  how = dict(max_new_tokens=30, gamma=2)
  if "stream" in settings:
    assert "".join(pair.stream(text, draft_text=given, **how)) == given
  elif "forced" in settings:
    start = plain()[0].tokens[:3].tolist()
    (ours,) = pair.generate([text], draft_texts=[given], decoder_input_ids=[start], **how)
    assert [*start, *ours.tokens.tolist()][:30] == plain()[0].tokens.tolist()
  else:
    how |= dict(temperature=1.0, num_return_sequences=2)
    found = pair.generate([text], draft_texts=[given], **how)
    assert len(found) == 2


@pytest.mark.slow
def test_samples_do_not_depend_on_the_batch(pair):
  given = [output.text if i % 2 else None for i, output in enumerate(plain())]
  settings = dict(max_new_tokens=20, temperature=1.0, draft_texts=given, gamma=2, seed=3)
  alone, together = (pair.generate(TEXTS, batch_size=size, **settings) for size in (1, 3))
  assert tokens_of(alone) == tokens_of(together)


@pytest.mark.parametrize(
  "arguments, message",
  [
    (dict(draft_texts=["a"]), "There are 8 texts and 1 draft_texts"),
    (dict(draft_texts=["a"] * 8, num_beams=2), "not for a beam search"),
    (dict(draft_texts=["a"] * 8, tree=[0, 0]), "do not go with a tree"),
    (dict(draft_texts=["a"] * 8, fixed_width=True), "do not go with a tree"),
    (dict(draft_texts="a"), "draft_texts is one string"),
    (dict(draft_texts=[1] * 8), r"draft_texts\[0\]"),
  ],
)
def test_wrong_arguments_are_refused(pair, arguments, message):
  with pytest.raises(InputError, match=message):
    pair.generate(TEXTS, **arguments)


@pytest.mark.parametrize(
  "kind", ["field", *(pytest.param(x, marks=pytest.mark.slow) for x in ("file", "stdin"))]
)
def test_translate_takes_texts_of_a_field_or_a_file(pair, tmp_path, monkeypatch, kind):
  given = [output.text for output in plain()]
  source, drafts, output = (tmp_path / name for name in ("in.jsonl", "drafts.txt", "out.jsonl"))
  records = [{"source": text} for text in TEXTS]
  if kind == "field":
    records = [record | {"draft_text": text} for record, text in zip(records, given)]
  source.write_text("".join(json.dumps(record) + "\n" for record in records))
  drafts.write_text("".join(f"{text}\n" for text in given))
  settings = dict(generation=GenerationConfig(max_new_tokens=30), gamma=0)
  if kind != "field":
    settings["draft_texts"] = str(drafts)
  if kind == "stdin":
    with source.open("w") as file:
      file.writelines(f"{text}\n" for text in TEXTS)
    with source.open() as file:
      monkeypatch.setattr("sys.stdin", file)
      translate(pair, "-", str(output), batch_size=2, **settings)
  else:
    translate(pair, str(source), str(output), batch_size=2, **settings)
  found = [json.loads(line) for line in output.read_text().splitlines()]
  assert [each["decoded"]["tokens"] for each in found] == tokens_of(plain())
  assert 2 * sum(each["decoded"]["rounds"] for each in found) < sum(map(len, tokens_of(plain())))
  assert [each["draft_text"] for each in found] == given


def test_text_with_another_number_of_lines_is_refused(pair, tmp_path):
  source, drafts = tmp_path / "in.txt", tmp_path / "drafts.txt"
  source.write_text("a\nb\n")
  for lines, word in (("a\n", "fewer"), ("a\nb\nc\n", "more")):
    drafts.write_text(lines)
    with pytest.raises(InputError, match=f"{word} lines"):
      translate(pair, str(source), str(tmp_path / "out.txt"), draft_texts=str(drafts))


@pytest.mark.slow
def test_transcripts_with_given_texts_equal_those_without(tmp_path):
  pair = load_pair(str(tiny_whisper.folder(tmp_path, seed=0)), "prompt_lookup")
  sounds = [
    read_audio(tiny_whisper.write_noise(tmp_path / f"{i}.wav", s, seed=i))
    for i, s in enumerate((10, 70, 3))
  ]
  for timestamps, gamma in ((None, 2), (True, 0)):
    how = dict(timestamps=timestamps, gamma=gamma)
    want = [*transcripts(pair, sounds, **how)]
    given = [str(each) for each in want]
    for texts in (given, [None, given[1]], given[1:]):
      ours = [*transcripts(pair, sounds, texts, batch_size=2, **how)]
      for one, other in zip(ours, want, strict=True):
        assert [x.tokens.tolist() for x in one.segments] == [
          x.tokens.tolist() for x in other.segments
        ]


def test_special_tokens_are_skipped_where_places_are_compared():
  special = np.zeros(40, bool)
  special[35:] = True
  draft = GivenDraft(NullDraft(), NullDraft(), 8, 40, HashableArray(special))
  tokens = jnp.array([[0, 36, 10, 11, 37, 12] + [0] * 20])
  context = Context(None, tokens, jnp.array([6]), None, None, jnp.array([1]))
  given = PromptWithDraft(jnp.zeros((1, 3), jnp.int32), jnp.array([GIVEN]), jnp.array([24]))
  start = context._replace(prompt=given, length=jnp.array([1]), prompt_length=None)
  state = draft.init((), start, jnp.zeros((1, 1, 0)))
  proposal, _ = draft.propose((), state, context, jax.random.split(jax.random.key(0), 1))
  assert proposal.tokens.tolist() == [[*range(13, 19), -1, -1]]
