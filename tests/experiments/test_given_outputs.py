"""Test drafts on recorded outputs: alpha, rounds as in a plain loop, resumption, and the table."""

import functools
import gzip
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from tiny import autoregressive_decode

from experiments.model_free_drafts import prepare
from experiments.model_free_drafts.given_outputs import ARGMAX, RecitingModel, given_outputs
from experiments.paper.paper import load_table
from specdec_jax.core.context import Context
from specdec_jax.core.trees import chain
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.data.vocabulary import PAD_ID, padded
from specdec_jax.drafts.ngram import bigram, unigram
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.measure import records

LINES = tiny_pair.SENTENCES
# Each output is the beginning of one sentence of its source and the end of another.
SOURCES = [f"{a} {b}" for a, b in zip(LINES[:60:5], LINES[3::9])]
OUTPUTS = [f"{source[:20]}{source[-15:]}" for source in SOURCES]


@pytest.fixture(scope="module")
def words():
  return open_vocabulary(str(tiny_pair.folder() / "vocabulary.model"))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  """Write the text in which n-grams are counted, and return its path."""
  path = tmp_path_factory.mktemp("text") / "highlights.txt"
  path.write_text("".join(f"{line}\n" for line in LINES[::7]))
  return str(path)


def run(words, output_dir, drafts, sources=SOURCES, outputs=OUTPUTS, **changes):
  settings = dict(task="tiny", target="T", gammas=(2, 5), max_new_tokens=40) | changes
  given_outputs(words, sources, outputs, drafts, str(output_dir), **settings)
  return records.read(output_dir / "results.jsonl")


def draft_tokening(words, make, gamma):
  """Return a function (source ids, ids of the text so far) -> draft tokens of one proposal."""
  drafter = make(tiny.loaded(words))
  draft = drafter.build(ARGMAX, chain(gamma))
  propose = jax.jit(draft.propose)
  keys = jax.random.split(jax.random.key(0), 1)

  def draft_tokens(source, done):
    tokens, length = padded([[PAD_ID, *done]], 60), np.array([1 + len(done)])
    context = Context(padded([source], 120), tokens, length, None, None)
    state = draft.init(drafter.params, context, jnp.zeros((1, 1, 0)))
    return propose(drafter.params, state, context, keys)[0].tokens[0].tolist()

  return draft_tokens


def test_target_emits_the_given_texts(words):
  texts = [words.encode(line) for line in OUTPUTS[:3]]
  decoded = autoregressive_decode(
    *(RecitingModel(len(words)), padded(texts, 40), padded([[5]] * 3, 8)),
    jax.random.split(jax.random.key(0), 3),
    max_new_tokens=40,
    sampling=ARGMAX,
  )
  np.testing.assert_array_equal(decoded.tokens, padded(texts, 40))


@pytest.mark.parametrize("name", ["unigram", "bigram", "copy-1", "copy-3"])
def test_alpha_and_rounds_equal_those_of_a_plain_loop(words, path, tmp_path, name):
  make = {
    "unigram": functools.partial(unigram, target_text=path),
    "bigram": functools.partial(bigram, target_text=path),
    "copy-1": functools.partial(prompt_lookup, max_ngram=1),
    "copy-3": prompt_lookup,
  }[name]
  texts = [(words.encode(source), words.encode(output)) for source, output in zip(SOURCES, OUTPUTS)]
  first = draft_tokening(words, make, 1)
  right = [[first(s, text[:t]) == [text[t]] for t in range(len(text))] for s, text in texts]
  for r in run(words, tmp_path, [make]):
    assert r.models.draft == name and r.outputs.alpha == pytest.approx(np.concatenate(right).mean())
    draft_tokens = draft_tokening(words, make, r.settings.gamma)
    rounds, stood, fell = 0, [0] * r.settings.gamma, [0] * r.settings.gamma
    for source, text in texts:
      done = 0
      while done < len(text):
        rounds += 1
        for i, draft_token in enumerate(draft_tokens(source, text[:done])):
          if draft_token != text[done]:
            fell[i] += 1
            break
          stood[i] += 1
          done += 1
          if done == len(text):
            break
        done += 1  # the target's next token, unless the text has ended
    assert (
      r.outputs.rounds == rounds and r.outputs.tokens_per_round == r.outputs.num_tokens / rounds
    )
    judged = zip(stood, fell)
    assert r.outputs.acceptance_by_position == [a / (a + b) if a + b else None for a, b in judged]


def test_output_cut_off_at_the_limit_has_no_eos(words, tmp_path):
  make = [prompt_lookup]
  (cut,) = run(words, tmp_path / "cut", make, LINES[:1], LINES[:1], gammas=(3,), max_new_tokens=4)
  (whole,) = run(words, tmp_path / "whole", make, LINES[:1], LINES[:1], gammas=(3,))
  assert cut.outputs.num_tokens == 4 and whole.outputs.num_tokens == len(words.encode(LINES[0]))


def test_recorded_settings_are_not_measured_again(words, path, tmp_path, capsys):
  (one,) = run(words, tmp_path, [prompt_lookup], gammas=(2,))
  before = (tmp_path / "results.jsonl").read_bytes()
  counted = functools.partial(unigram, target_text=path)
  measured = run(words, tmp_path, [prompt_lookup, counted])
  assert (tmp_path / "results.jsonl").read_bytes().startswith(before)
  assert [(r.models.draft, r.settings.gamma) for r in measured] == [
    *(("copy-3", 2), ("copy-3", 5), ("unigram", 2), ("unigram", 5))
  ]
  assert measured[1].outputs.alpha == one.outputs.alpha  # which does not depend on gamma
  for r in measured:
    assert (
      r.settings.temperature == 0
      and r.models.target == "T"
      and r.settings.num_examples == len(SOURCES)
    )
    assert r.times.speedup is None and r.times.c is None  # nothing was timed


def test_table_has_the_values_of_the_paper(words, path, tmp_path, capsys):
  counted = functools.partial(unigram, target_text=path)
  rows = load_table(3)
  changes = dict(paper_rows=rows, paper_target="T5-XXL (CNNDM)", gammas=(2,))
  run(words, tmp_path, [counted, prompt_lookup], **changes)
  lines = [line.split() for line in capsys.readouterr().out.splitlines()]

  def shown(name):
    return next(line for line in lines if line[:1] == [name])

  assert shown("unigram")[3] == "0.13" and shown("copy-3")[3] == "-"
  assert shown("T5-small")[1:] == ["-", "0.65", "-"]
  assert not any(line[:1] == ["Unigram"] for line in lines)


def test_prepared_texts_are_the_sources_and_outputs_of_t5(tmp_path, monkeypatch):
  data = tmp_path / "data"
  (data / "realsumm").mkdir(parents=True)
  (data / "cnn_dm").mkdir()
  (data / "realsumm" / "ptr_generator.src.txt").write_text(
    "<t> `` it 's ' very hard ' , '' he ( a boy ) did n't say . </t>\n<t> a ‘ b ’ - c </t>"
  )
  (data / "realsumm" / "t5.out_11B.txt").write_text(
    "<t> it's hard . </t> <t> he's a boy . </t>\n<t> b, c </t>"
  )
  for name, highlights in (
    ("train200_desixmimi", "A man runs.\nTwo Dogs, too!"),
    ("validation500", "The U.S. won .\n'Yes'"),
  ):
    with gzip.open(data / "cnn_dm" / f"cnn_dm.{name}.jsonl.gz", "wt") as file:
      file.write(json.dumps({"article": "A\nb", "highlights": highlights}) + "\n")
  monkeypatch.setattr(sys, "argv", ["", "--data", str(data), "--output", str(tmp_path / "out")])
  prepare.main()

  def lines(name):
    return read_lines(str(tmp_path / "out" / f"{name}.txt"))

  assert lines("articles") == ["\"it's 'very hard',\" he (a boy) didn't say.", "a ‘b’ - c"]
  assert lines("articles_tokenised")[1] == "a ‘ b ’ - c"
  assert lines("t5_11b") == ["it's hard . he's a boy .", "b, c"]
  assert lines("validation") == ["A b"]
  assert lines("highlights") == ["a man runs . two dogs, too!", "the u.s. won . 'yes'"]
