"""The pairs that come with the package: they load, and speculation leaves their output alone.

Real sentences: those of the quickstart, and 96 of Multi30k's test set where it lies at hand.
"""

import os
import pathlib
import re

import jax
import pytest
from tiny import autoregressive_decode, speculative_decode

from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.counts import identical
from specdec_jax.data.text import read_lines
from specdec_jax.measurement.alpha import measure_alpha
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
  own = (ROOT / "gin" / "tasks" / "sentences.txt").read_text(encoding="utf-8").splitlines()
  assert len(own) == 24
  test_set = MULTI30K / "test_2016_flickr.en.gz"
  return own + (read_lines(str(test_set))[:96] if test_set.is_file() else [])


def test_is_small_enough_for_a_repository():
  assert sum(f.stat().st_size for f in EMBEDDED.rglob("*") if f.is_file()) <= 64 * 2**20


def test_draft_is_one_to_two_orders_of_magnitude_smaller_per_step(pair):
  read = lambda params: sum(x.size for x in jax.tree.leaves(params["decoder"]))
  assert 10 <= read(pair.target_params) / read(pair.draft_params) <= 100


@pytest.mark.parametrize("draft", ["draft", "anchored"])
def test_greedy_output_is_plain_decodings(sentences, draft, batch_size=8, gamma=7):
  """One at a time it is the notebook's (test_api.py)."""
  pair = load_pair(draft=asset(f"multi30k_ende/{draft}"))
  limit, params = dict(max_new_tokens=LIMIT), (pair.target_params, pair.draft_params)
  draft = pair.draft(GREEDY, chain(gamma))
  for at in range(0, 24, batch_size):
    text = pair.prompt(sentences[at : at + batch_size], width=48), row_keys(0, at, batch_size)
    plain = autoregressive_decode(pair.target, params[0], *text, sampling=GREEDY, **limit)
    ours = speculative_decode(
      pair.target, draft, *params, *text, verifier=TokenVerifier(GREEDY), **limit
    )
    assert identical([plain], [ours]), f"gamma {gamma}, batch {batch_size}, sentence {at}"
    assert ours.num_rounds < 0.6 * plain.num_rounds, "its guesses are worth nothing"


def test_alpha_at_temperature_0_is_what_its_readme_says(pair, sentences):
  of_test_set = sentences[24:72]
  if not of_test_set:
    pytest.skip(f"{MULTI30K} is not there; set SPECDEC_SHARED to the folder that holds data/")
  prompt = pair.prompt(of_test_set, width=48)
  plain = autoregressive_decode(
    pair.target,
    pair.target_params,
    prompt,
    row_keys(0, 0, len(of_test_set)),
    max_new_tokens=LIMIT,
    sampling=GREEDY,
  )
  alpha = measure_alpha(pair, [prompt], [plain], GREEDY).alpha
  claimed = float(re.search(r"alpha at temperature 0 \| ([0-9.]+)", _readme()).group(1))
  # 48 sentences, about 700 tokens: the interval says how far chance can carry it.
  assert alpha.low - 0.03 <= claimed <= alpha.high + 0.03


def _readme(folder: pathlib.Path = EMBEDDED) -> str:
  return (folder / "README.md").read_text()


# The GPT-like pair.

BEGINNINGS = [
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


def test_the_gpt_like_pair_is_small():
  assert sum(f.stat().st_size for f in (ASSETS / "lm1b").rglob("*") if f.is_file()) <= 15e6


def test_the_gpt_like_pair_goes_on_as_its_target_does(gpt):
  """Beginnings of several lengths together."""
  asked = gpt.prompt(BEGINNINGS, width=8), row_keys(0, 0, len(BEGINNINGS))
  plain, ours = (gpt.decode_fn(GREEDY, g)(*asked, max_new_tokens=LIMIT) for g in (0, 7))
  assert identical([plain], [ours])
