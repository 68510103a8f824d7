"""A draft that learns while it serves: its outputs stay the target's, and it gets better."""

import functools

import jax
import numpy as np
import pytest
import tiny_pair

from specdec_jax import records
from specdec_jax.commands.online import serve_and_learn
from specdec_jax.core.decode import Decoder
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import branching, chain
from specdec_jax.core.types import Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.errors import InputError
from specdec_jax.measurement.alpha import proposals
from specdec_jax.models.speculator import speculator_config
from specdec_jax.pairs import load_pair, random_speculator
from specdec_jax.training.online import OnlineDraft, decode_and_learn


@pytest.fixture(scope="module")
def pair():
  """The tiny target with a draft that knows nothing yet."""
  folder = tiny_pair.folder()
  shape = functools.partial(speculator_config, kind="eagle", gamma=3, emb_dim=32, mlp_dim=32)
  return load_pair(
    target=str(folder / "target"),
    draft=functools.partial(random_speculator, config=shape),
    vocabulary=str(folder / "vocabulary.model"),
    max_source_tokens=24,
    kernels="xla",
  )


def test_it_learns_and_the_outputs_stay_the_targets(pair, tmp_path, capsys):
  """One text again and again: what was learned of it is guessed, and the frozen draft stays."""
  path = tmp_path / "texts"
  path.write_text((tiny_pair.SENTENCES[0] + "\n") * 12)
  how = dict(num_texts=12, every=6, gamma=3, learning_rate=0.05, max_new_tokens=16)
  serve_and_learn(pair, [str(path)], str(tmp_path / "out"), **how)
  found = records.read(str(tmp_path / "out/results.jsonl"))
  assert [r.draft for r in found] == ["random eagle", "random eagle, online"] * 2
  frozen, _, still, learned = (r.tokens_per_round for r in found)
  assert frozen == still < learned
  assert len({r.num_tokens for r in found}) == 1 and "learning" in capsys.readouterr().out


def test_a_text_moves_the_draft_towards_what_was_judged(pair):
  """What the target wrote, sampled, is likelier to the draft that learned of it."""
  frozen = pair.draft(Sampling(), chain(3))
  own, read = pair.draft_params
  draft = OnlineDraft(frozen, 0.02)
  prompt, keys = pair.prompt(tiny_pair.SENTENCES[:2]), jax.random.split(jax.random.key(0), 2)
  decoder = Decoder(pair.target, draft, TokenVerifier(Sampling()), pair.vocabulary.eos_id)
  params = Params(pair.target_params, (draft.begin(own), read))
  decoded, learned = decode_and_learn(decoder, params, prompt, keys, max_new_tokens=8)
  of_text = functools.partial(proposals, pair.target, frozen, pair.target_params)

  def likelihood(params) -> float:
    q = np.asarray(of_text((params, read), prompt, decoded.tokens)[1])[:, :, 0]
    chances = np.take_along_axis(q, np.asarray(decoded.tokens)[..., None], axis=2)[..., 0]
    return np.log(chances)[np.arange(8) < np.asarray(decoded.lengths)[:, None]].mean()

  assert likelihood(learned.own) > likelihood(own) + 0.1


def test_what_it_cannot_do_is_refused(pair, tmp_path):
  with pytest.raises(InputError, match="guesses chains"):
    OnlineDraft(pair.draft(Sampling(), branching(2, 1)))
  with pytest.raises(InputError, match="does not learn while it serves"):
    serve_and_learn(tiny_pair.pair(), ["none"], "nowhere")
  (tmp_path / "results.jsonl").touch()
  with pytest.raises(InputError, match="is there already"):
    serve_and_learn(pair, ["none"], str(tmp_path))
