"""Test the recipes: their names, and pairs with the shapes of their models and random weights."""

import copy
import dataclasses
import pathlib

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from families import sources

from specdec_jax import run
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.prompt_lookup import PromptLookupDraft
from specdec_jax.models.families import init_params, model_of
from specdec_jax.models.sizes import named_config

pytestmark = pytest.mark.slow

GIN = pathlib.Path(__file__).resolve().parents[1] / "gin"
RECIPES = sorted(path.stem for path in (GIN / "recipes").glob("*.gin"))
# Family and sizes of target and draft; None for prompt lookup. T5Gemma 9B-9B exceeds the memory of
# the test; 2B-2B has the same options.
SHAPES = {
  "flan_t5_xl": ("1.1", "xl", "small"),
  "madlad_7b": ("madlad", "7b", "3b"),
  "t5gemma_9b_9b": ("t5gemma", "2b-2b", "s-s"),
  "bart_large_cnn": ("bart", "cnn_large", "distil_cnn_6_6"),
  "nllb_3_3b": ("nllb", "3.3b", "600m"),
  "opus_mt_en_de": ("marian", "base", None),
  "byt5_large": ("byt5", "large", "small"),
}
SMALL = dict(
  vocab_size=96,
  padded_vocab_size=None,
  num_encoder_layers=1,
  num_decoder_layers=1,
  pad_id=0,
  eos_id=1,
  start_id=2,
)
GREEDY = Sampling(temperature=0.0)


def values_of(recipe, *names, after="translate"):
  """Return the values of parameters in a run that reads a recipe."""
  files = [str(GIN / f"runs/{after}.gin"), str(GIN / f"recipes/{recipe}.gin")]
  try:
    run.parse_gin(files, [], [])
    found = [gin.query_parameter(name) for name in names]
    return [copy.deepcopy(getattr(value, "configurable", value)) for value in found]
  finally:
    gin.clear_config()


@pytest.mark.parametrize("after", ["translate", "speedup", "check"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_names_a_target_and_a_draft_on_the_hub(recipe, after):
  target, draft = values_of(recipe, "%TARGET", "%DRAFT", after=after)
  if recipe == "opus_mt_en_de":
    assert target == "Helsinki-NLP/opus-mt-en-de" and draft.name == "prompt_lookup"
  else:
    assert target.count("/") == draft.count("/") == 1


def test_recipe_forces_the_target_language():
  assert values_of("nllb_3_3b", "%SOURCE_LANGUAGE", "%TARGET_TOKEN") == ["eng_Latn", 256042]
  codes = pytest.importorskip("transformers.models.nllb.tokenization_nllb").FAIRSEQ_LANGUAGE_CODES
  assert codes.index("deu_Latn") == 256042 - 256001  # 256,000 pieces and special tokens


def random_params(config, seed):
  rng = np.random.default_rng(seed)

  def random_array(path, leaf):
    scale = leaf.shape[-2] ** -0.5 if len(leaf.shape) > 1 else 0.1
    mean = 1.0 if path[-1].key == "scale" else 0.0
    return jnp.asarray(mean + scale * rng.standard_normal(leaf.shape, np.float32))

  shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
  return jax.tree.map_with_path(random_array, shapes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_pair_with_the_shapes_of_a_recipe_decodes_exactly(recipe):
  """The widths and heads are those of the models; layers, feed-forward and tables are smaller."""
  family, target_size, draft_size = SHAPES[recipe]
  changes = dict(**SMALL, mlp_dim=512)
  config = dataclasses.replace(named_config(family, target_size), **changes)
  target, params = model_of(config), random_params(config, 0)
  draft, draft_params = PromptLookupDraft(config.vocab_size, chain(3)), None
  if draft_size is not None:
    draft_config = dataclasses.replace(named_config(family, draft_size), **changes)
    draft = ModelDraft(model_of(draft_config), GREEDY, chain(3))
    draft_params = random_params(draft_config, 1)
  source, keys = sources(config, 0, 2, 12), jax.random.split(jax.random.key(0), 2)
  got = tiny.speculative_decode(
    target,
    draft,
    params,
    draft_params,
    source,
    keys,
    max_new_tokens=10,
    verifier=TokenVerifier(GREEDY),
  )
  want = tiny.autoregressive_decode(
    target, params, source, keys, max_new_tokens=10, sampling=GREEDY
  )
  np.testing.assert_array_equal(got.tokens, want.tokens)
  np.testing.assert_array_equal(got.lengths, want.lengths)
  assert len({*np.asarray(want.tokens).ravel()}) > 2
