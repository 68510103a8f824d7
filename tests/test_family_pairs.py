"""Test pairs of other encoder-decoder families: outputs with a draft equal those without."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair

from specdec_jax.checkpoints.save import save_model
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import branching, chain
from specdec_jax.core.types import Params
from specdec_jax.load import load_pair
from specdec_jax.models.kernels import skinny

pytestmark = pytest.mark.slow

FAMILIES = {"BART": tiny.BART, "T5Gemma": tiny.T5GEMMA}
GREEDY = Sampling(temperature=0.0)
LIMIT = 12


def needs_kernels(dtype=jnp.float32):
  reason = "needs a C++ compiler and a CPU with the instructions of this dtype, one device"
  return pytest.mark.skipif(not skinny.is_available(dtype), reason=reason)


CASES = [
  pytest.param("BART", dict(dtype="bfloat16"), marks=needs_kernels(jnp.bfloat16)),
  ("T5Gemma", dict(kernels="xla", dtype="bfloat16")),
  pytest.param("T5Gemma", dict(weights="int8"), marks=needs_kernels()),
]


@functools.cache
def folder(family):
  """Save a target and a draft whose draft tokens are often accepted; return the folder."""
  path = tiny_pair.folder() / family
  sizes = dict(vocab_size=tiny_pair.pair().target.model.vocab_size, layers=1)
  config = tiny.config(**sizes, **FAMILIES[family])
  params = tiny.params(config, 0, peak=2.0)
  save_model(str(path / "target"), config, params, dtype=jnp.bfloat16)
  save_model(str(path / "near"), config, tiny.near(params, 1, 0.1), dtype=jnp.bfloat16)
  return path


def load(family, **options):
  path = folder(family)
  names = str(path / "target"), str(path / "near"), str(path.parent / "vocabulary.model")
  return load_pair(*names, max_source_tokens=24, **options)


@pytest.mark.parametrize("family, options", CASES, ids=str)
def test_greedy_outputs_with_a_draft_equal_those_without(family, options):
  pair = load(family, **options)
  prompt, keys = pair.prompt(tiny_pair.SENTENCES[:6]), row_keys(0, 0, 6)
  alone, together = (
    pair.decode_fn(GREEDY, tree)(prompt, keys, max_new_tokens=LIMIT)
    for tree in (chain(0), branching(2, 1))
  )
  np.testing.assert_array_equal(together.tokens, alone.tokens)
  assert together.num_rounds < alone.num_rounds
  assert len(np.unique(alone.tokens)) > 3


@pytest.mark.parametrize("family", FAMILIES)
def test_beam_search_with_a_draft_equals_the_one_without(family):
  pair = load(family, kernels="xla")
  prompt = pair.prompt(tiny_pair.SENTENCES[:4])
  params = Params(pair.target.params, pair.draft.params)
  plain, ours = (
    pair.beam_searcher(3, gamma).run(params, prompt, max_new_tokens=LIMIT) for gamma in (0, 2)
  )
  np.testing.assert_array_equal(ours.tokens, plain.tokens)
  np.testing.assert_allclose(ours.scores, plain.scores, atol=1e-5)
  assert ours.num_rounds < plain.num_rounds
