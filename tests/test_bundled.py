"""Test the bundled pair: it loads, and speculation does not change its output.

The texts are the sentences of the quickstart and, if the data set is present, the first 96 of
Multi30k's test set.
"""

import os
import pathlib
import re

import jax
import pytest
from tiny import autoregressive_decode, speculative_decode

from specdec_jax.core.counts import identical
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.text import read_lines
from specdec_jax.load import BUNDLED, asset, load_pair
from specdec_jax.measure.alpha import measure_alpha

ROOT = pathlib.Path(__file__).resolve().parents[1]
MULTI30K = pathlib.Path(os.environ.get("SPECDEC_SHARED", "../shared")) / "data" / "multi30k"

GREEDY = Sampling(temperature=0.0)
LIMIT = 48


@pytest.fixture(scope="module")
def pair():
  return load_pair(draft=asset("multi30k_ende/draft"))


@pytest.fixture(scope="module")
def sentences():
  quickstart = (ROOT / "gin" / "tasks" / "sentences.txt").read_text(encoding="utf-8").splitlines()
  assert len(quickstart) == 24
  test_set = MULTI30K / "test_2016_flickr.en.gz"
  return quickstart + (read_lines(str(test_set))[:96] if test_set.is_file() else [])


def test_bundled_pair_is_small_enough_for_a_repository():
  assert sum(f.stat().st_size for f in BUNDLED.rglob("*") if f.is_file()) <= 64 * 2**20


def test_draft_decoder_is_one_to_two_orders_of_magnitude_smaller(pair):
  target, draft = (
    sum(x.size for x in jax.tree.leaves(params["decoder"]))
    for params in (pair.target.params, pair.draft.params)
  )
  assert 10 <= target / draft <= 100


@pytest.mark.parametrize("draft", [pytest.param("draft", marks=pytest.mark.slow), "conditioned"])
def test_greedy_output_equals_autoregressive_decoding(sentences, draft, batch_size=8, gamma=7):
  """`test_api.py` compares outputs of single sentences with the notebook."""
  pair = load_pair(draft=asset(f"multi30k_ende/{draft}"))
  limit, params = dict(max_new_tokens=LIMIT), (pair.target.params, pair.draft.params)
  draft = pair.draft.build(GREEDY, chain(gamma))
  for first in range(0, 24, batch_size):
    batch = sentences[first : first + batch_size]
    inputs = pair.prompt(batch, width=48), row_keys(0, first, batch_size)
    expected = autoregressive_decode(
      pair.target.model, params[0], *inputs, sampling=GREEDY, **limit
    )
    out = speculative_decode(
      pair.target.model, draft, *params, *inputs, verifier=TokenVerifier(GREEDY), **limit
    )
    assert identical([expected], [out]), f"gamma {gamma}, batch {batch_size}, sentence {first}"
    assert out.num_rounds < 0.6 * expected.num_rounds, "too few draft tokens are accepted"


@pytest.mark.slow
def test_alpha_at_temperature_0_agrees_with_the_readme_of_the_pair(pair, sentences):
  test_sentences = sentences[24:72]
  if not test_sentences:
    pytest.skip(f"{MULTI30K} is not there; set SPECDEC_SHARED to the folder that holds data/")
  prompts, generated = [], []
  for first in range(0, len(test_sentences), 8):  # the batches of the test above
    prompts.append(pair.prompt(test_sentences[first : first + 8], width=48))
    inputs = pair.target.model, pair.target.params, prompts[-1], row_keys(0, first, 8)
    generated.append(autoregressive_decode(*inputs, max_new_tokens=LIMIT, sampling=GREEDY))
  measured = measure_alpha(pair, prompts, generated, GREEDY)
  readme = (BUNDLED / "README.md").read_text()
  claimed = float(re.search(r"alpha of the draft at temperature 0 \| ([0-9.]+)", readme).group(1))
  # The confidence interval is that of 48 sentences, about 700 tokens.
  assert measured.alpha_low - 0.03 <= claimed <= measured.alpha_high + 0.03
