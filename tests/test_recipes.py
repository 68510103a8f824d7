"""Test that the recipes can be read, and the names in them."""

import copy
import pathlib

import gin
import pytest

from specdec_jax import run

pytestmark = pytest.mark.slow

GIN = pathlib.Path(__file__).resolve().parents[1] / "gin"
RECIPES = sorted(path.stem for path in (GIN / "recipes").glob("*.gin"))


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
    assert target == "Helsinki-NLP/opus-mt-en-de" and draft == "prompt_lookup"
  else:
    assert target.count("/") == draft.count("/") == 1


def test_recipe_forces_the_target_language():
  assert values_of("nllb_3_3b", "%SOURCE_LANGUAGE", "%TARGET_TOKEN") == ["eng_Latn", 256042]
  codes = pytest.importorskip("transformers.models.nllb.tokenization_nllb").FAIRSEQ_LANGUAGE_CODES
  assert codes.index("deu_Latn") == 256042 - 256001  # 256,000 pieces and special tokens
