"""`import specdec_jax`, as a user's own program uses it."""

import subprocess
import sys

import numpy as np
import pytest
import tiny_pair

import specdec_jax
from specdec_jax.errors import InputError
from specdec_jax.sampling import Sampling, row_keys

TEXTS = [tiny_pair.SENTENCES[i] for i in (0, 14, 60)]
SHORT = dict(max_new_tokens=16)


def test_loading_it_loads_neither_jax_nor_tensorflow():
  heavy = "{'jax', 'tensorflow'} & {*sys.modules}"
  code = f"import sys, specdec_jax; print(specdec_jax.__version__, {heavy})"
  said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert said.stdout.split() == [specdec_jax.__version__, "set()"]
  with pytest.raises(AttributeError, match="no attribute 'loadpair'"):
    specdec_jax.loadpair  # noqa: B018


def test_a_pair_is_loaded_and_its_programs_are_kept(tmp_path, monkeypatch):
  """In a process of its own: settings of jax are for all of one."""
  paths = [str(tiny_pair.folder() / name) for name in ("target", "near", "vocabulary.model")]
  code = (
    "import sys, jax, specdec_jax; pair = specdec_jax.load_pair(*sys.argv[1:], dtype='auto'); "
    "print(jax.config.jax_compilation_cache_dir, pair.target_name, pair.dtype)"
  )
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "kept"))
  said = subprocess.run(
    [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True
  )
  assert said.stdout.split() == [str(tmp_path / "kept"), "target", "float32"]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_texts_become_the_targets_own(batch_size):
  pair = tiny_pair.pair()
  ours = pair.generate(TEXTS, gamma=2, batch_size=batch_size, **SHORT)
  plain = pair.decoder(Sampling(temperature=0.0), 0)(
    pair.prompt(TEXTS), row_keys(0, 0, len(TEXTS)), **SHORT
  )
  assert ours == [pair.vocabulary.decode(row) for row in np.asarray(plain.tokens)]
  for text, row, length in zip(ours, np.asarray(plain.tokens), plain.lengths):
    assert isinstance(text, str) and text.tokens.tolist() == row[:length].tolist()
    assert text.rounds.num_emitted.sum() == length and (text.rounds.num_emitted > 0).all()
    assert text.acceptance_length == length / len(text.rounds.guesses) > 1


def test_a_seed_says_what_is_sampled_whatever_the_batch():
  sampled = dict(gamma=2, temperature=1.0, top_k=20, **SHORT)
  generate = tiny_pair.pair().generate
  first = generate(TEXTS, seed=1, **sampled)
  assert first == generate(TEXTS, seed=1, batch_size=2, **sampled)
  assert first != generate(TEXTS, seed=2, **sampled)


@pytest.mark.parametrize("how", [dict(gamma=0), dict(tree=(0, 0, 1), temperature=1.0)], ids=str)
def test_pieces_of_a_stream_are_the_whole(how):
  pair = tiny_pair.pair()
  (whole,) = pair.generate(TEXTS[1:2], **how, **SHORT)
  pieces = [*pair.stream(TEXTS[1], **how, **SHORT)]
  assert "".join(pieces) == whole
  assert 1 < len(pieces) <= len(whole.rounds.num_emitted)


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(texts="A man"), "texts is 'A man'; it must be a list"),
    (dict(gamma=-1), "gamma is -1"),
    (dict(temperature="cold"), "temperature is 'cold'"),
    (dict(tree=(1,)), "level order"),
    (dict(seed=1.5), "seed is 1.5"),
    (dict(batch_size=0), "batch_size is 0"),
    (dict(max_new_tokens=0), "max_new_tokens is 0"),
  ],
  ids=str,
)
def test_what_is_asked_is_checked(changes, words):
  with pytest.raises(InputError, match=words):
    tiny_pair.pair().generate(**{"texts": TEXTS, **changes})
