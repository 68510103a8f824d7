"""Test that each named draft and verifier loads by its name, in Python and by flags."""

import pathlib

import gin
import pytest

from specdec_jax import registry, run
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Draft, Verifier
from specdec_jax.errors import InputError
from specdec_jax.load import load_pair
from specdec_jax.random_models import random_pair

ROOT = pathlib.Path(__file__).resolve().parents[1]
CAPTIONS = str(ROOT / "gin" / "tasks" / "captions.de.txt")


@pytest.fixture(scope="module")
def pair():
  return load_pair()


def settings(name: str) -> dict:
  """Return values of the settings of a draft that have no default."""
  given = {
    "one_pass_tree": {"draft": load_pair().draft.path},
    "tree": {"draft": "ngrams", "widths": (2,)},
  }
  found = given.get(name, {})
  if "target_text" in registry.draft_parameters(name, found):
    found = {**found, "target_text": CAPTIONS}
  return found


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.DRAFTS)
def test_draft_loads_by_its_name(pair, name):
  spec = registry.draft(name, **settings(name))(pair.target)
  if name != "one_pass_tree":  # the bundled head proposes no dynamic trees
    assert isinstance(spec.build(Sampling(), chain(4)), Draft)


@pytest.mark.parametrize("name", registry.VERIFIERS)
def test_verifier_has_a_name(name):
  assert isinstance(registry.verifier(name)(Sampling()), Verifier)


def test_settings_reach_the_drafts_that_have_them(pair):
  load = registry.draft("suffix_decoding", max_ngram=5)
  assert load(pair.target).name == "copy-5x2, as far as known"
  tree = registry.draft("tree", draft="ngrams", target_text=CAPTIONS, order=3, widths=(2,))
  assert tree(pair.target).name == "3-gram, tree 2"
  forest = registry.draft("forest", drafts=["unigram", "ngrams"], target_text=CAPTIONS)
  assert forest(pair.target).name == "unigram and 4-gram"


def test_functions_of_a_user_are_named_by_their_path(pair, tmp_path, monkeypatch):
  (tmp_path / "my_drafts.py").write_text(
    "from specdec_jax.core.verify.tokens import TokenVerifier as Mine\n"
    "from specdec_jax.drafts.uniform import uniform\n"
    "def nothing(target, ignored=2):\n"
    "  return uniform(target)\n"
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  assert registry.draft("my_drafts:nothing", ignored=3)(pair.target).name == "uniform"
  assert load_pair(draft="my_drafts:nothing", verifier="my_drafts:Mine").draft.name == "uniform"
  with pytest.raises(InputError, match="'my_drafts:nothing' has no setting order"):
    registry.draft("my_drafts:nothing", order=3)
  bindings = "registry.draft.name = 'my_drafts:nothing'", "registry.draft.ignored = 4"
  with gin.unlock_config():
    gin.clear_config()
  run.parse_files([str(ROOT / "gin" / "runs" / "translate.gin")])
  found = run.to_bindings(["--draft", "my_drafts:nothing", "--ignored", "4"])
  assert {*bindings} <= {*found}
  gin.clear_config()


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda: registry.draft("no_module:draft"), "There is no module no_module for"),
    (lambda: registry.draft("json:draft"), "There is no draft in the module json"),
    (lambda: registry.draft("prompt_lookup", order=3), "'prompt_lookup' has no setting order"),
    (lambda: registry.draft("ngrams"), "'ngrams' needs a value of target_text"),
    (lambda: registry.draft("tree"), "'tree' needs a value of draft"),
    (lambda: registry.verifier("token"), "no verifier 'token'; there are tokens"),
    (lambda: registry.verifier("typical", beta=3), "'typical' has no setting beta"),
  ],
)
def test_invalid_settings(make, words):
  with pytest.raises(InputError, match=words):
    make()


def test_pairs_take_names(tmp_path, monkeypatch):
  named = load_pair(draft="prompt_lookup", verifier="blocks")
  assert named.draft.name == "copy-3" and type(named.verifier(Sampling())).__name__.startswith("Bl")
  small = random_pair("small", "prompt_lookup", 0.8, verifier="gumbel")
  assert small.draft.name == "copy-3" and small.verifier is registry.verifier("gumbel")
  monkeypatch.chdir(tmp_path)
  with pytest.raises(InputError, match="There is no model in ./ngrams"):
    load_pair(draft="./ngrams")
  with pytest.raises(InputError, match="no model in promt_lookup.* the name 'prompt_lookup'"):
    load_pair(draft="promt_lookup")


def bound(*arguments: str) -> tuple[dict, dict]:
  """Return the bindings of `load_pair` and of the named draft in a run of `speedup`."""
  try:
    run.parse_files(["gin/runs/speedup.gin"])
    run.parse_bindings(run.to_bindings(arguments))
    draft = gin.get_bindings("registry.draft", resolve_references=False)
    return gin.get_bindings("load.load_pair"), draft
  finally:
    gin.clear_config()


def test_flags_of_a_named_draft_are_its_settings():
  arguments = "--draft", "tree", "--base_draft", "ngrams", "--widths", "4,2", "--order", "3"
  pair, draft = bound(*arguments, "--target_text", CAPTIONS, "--verifier", "typical")
  assert {k: v for k, v in draft.items() if k != "target_text"} == {
    "name": "tree",
    "draft": "ngrams",
    "widths": (4, 2),
    "order": 3,
  }
  assert pair["draft"].keywords["widths"] == (4, 2)
  assert pair["verifier"] is registry.verifier("typical")
  pair, _ = bound("--verifier=typical", "--epsilon=0.2")
  assert pair["verifier"](Sampling()).epsilon == 0.2
  assert bound("--draft", "runs/mine")[0]["draft"] == "runs/mine"
  assert bound("--draft", "forest", "--drafts", "unigram,uniform")[1]["drafts"] == (
    "unigram",
    "uniform",
  )


@pytest.mark.parametrize(
  "arguments, words",
  [
    (["--draft", "prompt_lookup", "--order", "3"], "no setting --order"),
    (["--order", "3"], "no setting --order"),
    (["--draft", "ngrams", "--order", "many"], "--order: 'many' is not a whole number"),
    (["--draft"], "--draft needs a value"),
    (["--verifier", "mine"], "no verifier 'mine'; there are tokens"),
    (["--draft", "prompt_lookup", "--max_ngram"], "--max_ngram needs a value: a whole number"),
  ],
  ids=str,
)
def test_invalid_flags_of_named_drafts(arguments, words):
  with pytest.raises(InputError, match=words):
    bound(*arguments)
