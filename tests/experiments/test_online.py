"""Test that with online learning outputs remain the target's own, and the draft improves."""

import functools

import jax
import numpy as np
import pytest
import tiny_pair

from experiments.learned_drafts.online import (
  OnlineDraft,
  decode_and_learn,
  serve_and_distill,
  serve_and_learn,
  serve_and_store,
)
from specdec_jax.contrib.retrieval import retrieval
from specdec_jax.core.decode import Decoder
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.heads import new_head
from specdec_jax.drafts.stop_at_miss import stop_at_miss_draft
from specdec_jax.load import load_pair
from specdec_jax.measure import records
from specdec_jax.measure.alpha import proposals
from specdec_jax.random_models import random_speculator


@pytest.fixture(scope="module")
def pair():
  """Return the tiny target with a random EAGLE head as its draft."""
  folder = tiny_pair.folder()
  shape = functools.partial(new_head, kind="eagle", gamma=3, emb_dim=32, mlp_dim=32)
  return load_pair(
    target=str(folder / "target"),
    draft=functools.partial(random_speculator, head=shape),
    vocabulary=str(folder / "vocabulary.model"),
    max_source_tokens=24,
    kernels="xla",
  )


def test_learning_raises_the_acceptance_length_and_keeps_the_outputs(pair, tmp_path, capsys):
  """The same text is decoded repeatedly; the frozen draft's acceptance length does not change."""
  path = tmp_path / "texts"
  path.write_text((tiny_pair.SENTENCES[0] + "\n") * 12)
  serve_and_learn(
    pair,
    [str(path)],
    str(tmp_path / "out"),
    num_texts=12,
    every=6,
    gamma=3,
    learning_rate=0.05,
    max_new_tokens=16,
  )
  measured = records.read(str(tmp_path / "out/results.jsonl"))
  assert [r.models.draft for r in measured] == ["random eagle", "random eagle, online"] * 2
  first_frozen, _, last_frozen, last_learning = (r.outputs.tokens_per_round for r in measured)
  assert first_frozen == last_frozen < last_learning
  assert (
    len({r.outputs.num_tokens for r in measured}) == 1
    and "frozen and online" in capsys.readouterr().out
  )


def test_distillation_raises_the_acceptance_length_and_keeps_the_outputs(tmp_path):
  path = tmp_path / "texts"
  path.write_text((tiny_pair.SENTENCES[0] + "\n") * 12)
  pair = tiny_pair.pair(kernels="xla")
  how = dict(every=6, gamma=3, learning_rate=0.03, texts_per_step=2, max_new_tokens=16)
  serve_and_distill(pair, [str(path)], str(tmp_path / "out"), num_texts=12, **how)
  measured = records.read(str(tmp_path / "out/results.jsonl"))
  assert measured[1].models.draft.endswith(", distilled")
  first_frozen, _, last_frozen, last_distilled = (r.outputs.tokens_per_round for r in measured)
  assert first_frozen == last_frozen < last_distilled
  assert len({r.outputs.num_tokens for r in measured}) == 1


def test_growing_datastore_raises_the_acceptance_length_without_recompiling(tmp_path, capsys):
  """Three texts are decoded twice. A copy of an earlier output is accepted to its end."""
  load = functools.partial(
    retrieval, target_text=None, max_context=8, tokens_per_match=2, capacity=500
  )
  pair = tiny_pair.pair()
  pair = pair.with_draft(stop_at_miss_draft(pair.target, load))
  path = tmp_path / "texts"
  path.write_text("".join(text + "\n" for text in tiny_pair.SENTENCES[:3] * 2))
  compiled = Decoder.run._cache_size()
  serve_and_store(
    pair, [str(path)], str(tmp_path / "out"), every=3, gamma=6, temperature=0.0, max_new_tokens=16
  )
  assert Decoder.run._cache_size() == compiled + 1
  measured = records.read(str(tmp_path / "out/results.jsonl"))
  name = "retrieval x2, as far as known"
  assert [r.models.draft for r in measured] == [name, f"{name}, growing"] * 2
  frozen, _, last_frozen, growing = (r.outputs.tokens_per_round for r in measured)
  assert frozen == last_frozen == 1 and growing > 2
  assert len({r.outputs.num_tokens for r in measured}) == 1
  assert "frozen  growing" in capsys.readouterr().out


def test_learning_from_a_sampled_text_raises_its_probability_under_the_draft(pair):
  frozen = pair.draft.build(Sampling(), chain(3))
  head_params, target_params = pair.draft.params
  draft = OnlineDraft(frozen, 0.02)
  prompt, keys = pair.prompt(tiny_pair.SENTENCES[:2]), jax.random.split(jax.random.key(0), 2)
  decoder = Decoder(pair.target.model, draft, TokenVerifier(Sampling()), pair.vocabulary.eos_id)
  params = Params(pair.target.params, (draft.initial_state(head_params), target_params))
  result, learned = decode_and_learn(decoder, params, prompt, keys, max_new_tokens=8)

  def mean_log_probability(head_params) -> float:
    params = Params(pair.target.params, (head_params, target_params))
    q = proposals(pair.target.model, frozen, params, prompt, result.tokens)[1]
    q = np.asarray(q)[:, :, 0]
    probs = np.take_along_axis(q, np.asarray(result.tokens)[..., None], axis=2)[..., 0]
    return np.log(probs)[np.arange(8) < np.asarray(result.lengths)[:, None]].mean()

  assert mean_log_probability(learned.params) > mean_log_probability(head_params) + 0.1
