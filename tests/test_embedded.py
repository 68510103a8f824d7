"""Test the bundled pairs: they load, and speculation does not change their output.

The texts are the sentences of the quickstart and, if the data set is present, the first 96 of
Multi30k's test set.
"""

import functools
import os
import pathlib
import re

import jax
import pytest
from tiny import autoregressive_decode, speculative_decode

from specdec_jax import gin_files
from specdec_jax.core.counts import identical, num_rounds, num_tokens
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.text import read_lines
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.measure.alpha import measure_alpha
from specdec_jax.pairs import ASSETS, EMBEDDED, asset, load_pair

ROOT = pathlib.Path(__file__).resolve().parents[1]
MULTI30K = pathlib.Path(os.environ.get("SPECDEC_SHARED", "../shared")) / "data" / "multi30k"
if not EMBEDDED.is_dir():
  pytest.skip("this checkout has no trained pair yet", allow_module_level=True)

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
  assert sum(f.stat().st_size for f in EMBEDDED.rglob("*") if f.is_file()) <= 64 * 2**20


def test_draft_decoder_is_one_to_two_orders_of_magnitude_smaller(pair):
  target, draft = (
    sum(x.size for x in jax.tree.leaves(params["decoder"]))
    for params in (pair.target_params, pair.draft_params)
  )
  assert 10 <= target / draft <= 100


@pytest.mark.parametrize("draft", ["draft", "conditioned", "features"])
def test_greedy_output_equals_autoregressive_decoding(sentences, draft, batch_size=8, gamma=7):
  """`test_api.py` compares outputs of single sentences with the notebook."""
  pair = load_pair(draft=asset(f"multi30k_ende/{draft}"))
  limit, params = dict(max_new_tokens=LIMIT), (pair.target_params, pair.draft_params)
  draft = pair.draft(GREEDY, chain(gamma))
  for first in range(0, 24, batch_size):
    batch = sentences[first : first + batch_size]
    inputs = pair.prompt(batch, width=48), row_keys(0, first, batch_size)
    expected = autoregressive_decode(pair.target, params[0], *inputs, sampling=GREEDY, **limit)
    out = speculative_decode(
      pair.target, draft, *params, *inputs, verifier=TokenVerifier(GREEDY), **limit
    )
    assert identical([expected], [out]), f"gamma {gamma}, batch {batch_size}, sentence {first}"
    assert out.num_rounds < 0.6 * expected.num_rounds, "too few guesses are accepted"


def test_alpha_at_temperature_0_agrees_with_the_readme_of_the_pair(pair, sentences):
  test_sentences = sentences[24:72]
  if not test_sentences:
    pytest.skip(f"{MULTI30K} is not there; set SPECDEC_SHARED to the folder that holds data/")
  prompts, generated = [], []
  for first in range(0, len(test_sentences), 8):  # the batches of the test above
    prompts.append(pair.prompt(test_sentences[first : first + 8], width=48))
    inputs = pair.target, pair.target_params, prompts[-1], row_keys(0, first, 8)
    generated.append(autoregressive_decode(*inputs, max_new_tokens=LIMIT, sampling=GREEDY))
  alpha = measure_alpha(pair, prompts, generated, GREEDY).alpha
  claimed = float(re.search(r"alpha at temperature 0 \| ([0-9.]+)", _readme()).group(1))
  # The confidence interval is that of 48 sentences, about 700 tokens.
  assert alpha.low - 0.03 <= claimed <= alpha.high + 0.03


def _readme(folder: pathlib.Path = EMBEDDED) -> str:
  return (folder / "README.md").read_text()


# The GPT-like pair.

PROMPTS = [
  "",
  "the president",
  "in london ,",
  "he said",
  "shares of the",
  "police",
  "it is",
  "a",
]


@pytest.fixture(scope="module")
def gpt():
  files = [asset(f"lm1b/{name}") for name in ("gpt_like_4m", "gpt_like_600k", "vocabulary.txt")]
  return load_pair(*files, task="lm1b", max_source_tokens=48)


def test_gpt_like_pair_is_small():
  assert sum(f.stat().st_size for f in (ASSETS / "lm1b").rglob("*") if f.is_file()) <= 15e6


def test_greedy_output_of_the_gpt_like_pair_equals_autoregressive_decoding(gpt):
  """The batch has prompts of several lengths."""
  inputs = gpt.prompt(PROMPTS, width=8), row_keys(0, 0, len(PROMPTS))
  expected, out = (gpt.decode_fn(GREEDY, chain(g))(*inputs, max_new_tokens=LIMIT) for g in (0, 7))
  assert identical([expected], [out])


@pytest.mark.parametrize(
  "model, source", [("editor", "captions.errors"), ("summarizer", "articles")]
)
def test_english_models_copy_much_of_their_sources(model, source):
  """With a draft that copies, the outputs are unchanged, and take few rounds."""
  texts = gin_files.lines(f"tasks/{source}.txt")[:3]
  draft = functools.partial(prompt_lookup, from_start=model == "editor")
  pair = load_pair(asset(f"english/{model}"), draft, max_source_tokens=512)
  inputs = pair.prompt(texts), row_keys(0, 0, 3)
  expected, out = (
    pair.decode_fn(GREEDY, chain(gamma))(*inputs, max_new_tokens=LIMIT) for gamma in (0, 5)
  )
  assert identical([expected], [out])
  assert num_rounds([out]) < 0.5 * num_tokens([out])
