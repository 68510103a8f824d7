"""Test the small pairs of studies: their gin files parse, and speculation is exact."""

import functools

import gin
import pytest

from specdec_jax import run
from specdec_jax.core.counts import identical, num_rounds, num_tokens
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.data.text import read_lines
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.load import load_pair

GREEDY = Sampling(temperature=0.0)
LIMIT = 48
PROMPTS = ["", "the president", "in london ,", "he said", "shares of the", "police", "it is", "a"]
STEPS = "vocabulary", "target", "draft"
VOCABULARY = "experiments/editing/weights/vocabulary.model"


@pytest.fixture(autouse=True)
def in_the_clone(request, monkeypatch):
  """Paths of weights are relative to the clone."""
  monkeypatch.chdir(request.config.rootpath)


@pytest.mark.parametrize(
  "names",
  [
    ("gin/runs/speedup", "experiments/editing/editing"),
    ("gin/runs/speedup", "experiments/summaries/summaries"),
    ("gin/runs/speedup", "experiments/gpt_like/gpt_like"),
    ("gin/runs/speedup", "experiments/methods/boosted"),
    ("gin/runs/check", "experiments/gpt_like/gpt_like"),
    ("experiments/gpt_like/generate",),
    *((f"gin/runs/train_{step}", "experiments/editing/train_editing") for step in STEPS),
    ("gin/runs/train_target", "experiments/summaries/train_summaries"),
    *((f"experiments/gpt_like/train_gpt_{step}",) for step in STEPS),
  ],
  ids="+".join,
)
def test_runs_parse_with_the_files_of_studies(names):
  try:
    run.parse_gin([f"{name}.gin" for name in names], [], [])
  finally:
    gin.clear_config()


def outputs(pair, texts, gamma):
  """Return the greedy outputs of autoregressive decoding and of decoding with chains of gamma."""
  inputs = pair.prompt(texts), row_keys(0, 0, len(texts))
  return [pair.decode_fn(GREEDY, chain(g))(*inputs, max_new_tokens=LIMIT) for g in (0, gamma)]


def test_gpt_like_pair_continues_prompts_of_several_lengths():
  names = "gpt_like_4m", "gpt_like_600k", "vocabulary.txt"
  files = (f"experiments/gpt_like/weights/{name}" for name in names)
  pair = load_pair(*files, task="lm1b", max_source_tokens=48)
  expected, out = outputs(pair, PROMPTS, gamma=7)
  assert identical([expected], [out])


@pytest.mark.parametrize(
  "model, texts",
  [
    ("experiments/editing/weights/editor", "experiments/editing/captions.errors.txt"),
    ("experiments/summaries/weights/summarizer", "gin/tasks/articles.txt"),
  ],
)
def test_models_that_copy_take_few_rounds_with_prompt_lookup(model, texts):
  draft = functools.partial(prompt_lookup, from_start=model.endswith("editor"))
  pair = load_pair(model, draft, VOCABULARY, max_source_tokens=512)
  expected, out = outputs(pair, read_lines(texts, 3), gamma=5)
  assert identical([expected], [out])
  assert num_rounds([out]) < 0.5 * num_tokens([out])


def test_features_head_drafts_for_the_bundled_target():
  pair = load_pair(draft="experiments/learned_drafts/weights/features")
  expected, out = outputs(pair, read_lines("gin/tasks/sentences.txt", 8), gamma=7)
  assert identical([expected], [out])
  assert out.num_rounds < 0.6 * expected.num_rounds
