"""Test drafts that are composed of other drafts."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_pair

from specdec_jax.contrib.cascade import cascade_draft
from specdec_jax.contrib.stopping import stopping_draft
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import Tree, chain
from specdec_jax.core.types import DraftSpec
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.drafts.composed import draft_sampling, forest_draft, tree_draft
from specdec_jax.drafts.layer_skip import layer_skip
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.errors import InputError
from specdec_jax.load import checkpoint_draft

GREEDY, RANDOM = Sampling(0.0), Sampling()


def near(target) -> DraftSpec:
  return checkpoint_draft(target, str(tiny_pair.folder() / "near"))


def named(name: str):
  """Return a function that loads a draft whose `build` returns its first two arguments."""
  return lambda target: DraftSpec(name, lambda *args: args[:2], name.upper())


def test_cascade_divides_gamma_among_its_drafts():
  target = tiny_pair.pair().target
  factory = cascade_draft(target, [near, prompt_lookup], [2])
  assert factory.name == "near, then copy-3" and len(factory.params) == 2

  def depths(gamma):
    return [draft.tree.depth for draft in factory.build(GREEDY, chain(gamma)).drafts]

  assert (depths(1), depths(2), depths(5)) == ([1], [2], [2, 3])


def test_drafts_of_a_forest_are_branches():
  factory = forest_draft(tiny_pair.pair().target, [near, prompt_lookup])
  draft = factory.build(GREEDY, chain(2))
  assert factory.name == "near and copy-3" and draft.tree.parents == (0, 0, 1, 2)


def test_greedy_siblings_of_a_tree():
  spec = tree_draft(tiny_pair.pair().target, near, (2,), greedy_siblings=True)
  assert spec.build(RANDOM, chain(2)).tree == Tree((0, 0, 1, 2), greedy_siblings=True)
  assert spec.name == "near, greedy siblings, tree 2"


@pytest.mark.usefixtures("unchecked")
def test_draft_sampling_overrides_the_sampling_of_the_draft():
  target, tree = tiny_pair.pair().target, chain(3)
  factory = draft_sampling(target, named("a"), draft_temperature=0.5, draft_top_k=3)
  assert factory.name == "a (temperature 0.5, top_k 3)" and factory.params == "A"
  assert factory.build(Sampling(top_p=0.9), tree) == (Sampling(0.5, 3, 0.9), tree)
  assert factory.build(GREEDY, tree) == (GREEDY, tree)  # the argmax is the best draft token
  assert draft_sampling(target, named("a")).name == "a"


@pytest.mark.parametrize(
  "make, sentence",
  [
    (lambda target: cascade_draft(target, [near], [2]), "1 drafts in a row and 1 gammas"),
    (lambda target: cascade_draft(target, [near, near], [0]), "gamma is 0"),
  ],
)
def test_invalid_composition_is_rejected(make, sentence):
  with pytest.raises(InputError, match=sentence):
    make(tiny_pair.pair().target).build(RANDOM, chain(2))


def test_draft_that_stops_early_requires_token_verification():
  pair = tiny_pair.pair()
  pair = dataclasses.replace(pair, verifier=BlockVerifier)
  pair = pair.with_draft(stopping_draft(pair.target, near, 0.5))
  with pytest.raises(InputError, match=r"near \(stops below 0.5\) stops early"):
    pair.decoder(RANDOM, chain(2))


def test_layer_skip_shares_the_targets_arrays():
  pair = tiny_pair.pair()
  with_layers = pair.with_draft(layer_skip(pair.target, [0]))
  assert with_layers.draft.name == "layers 0"
  target_arrays = {id(leaf) for leaf in jax.tree.leaves(pair.target.params)}
  assert {id(leaf) for leaf in jax.tree.leaves(with_layers.draft.params)} < target_arrays
  # The target has one layer, so the draft equals the target and every draft token is accepted.
  out = with_layers.decode_fn(GREEDY, chain(3))(
    pair.prompt(tiny_pair.SENTENCES[:2]), jax.random.split(jax.random.key(0), 2), max_new_tokens=12
  )
  accepted, rejected = out.rounds.acceptance_counts()
  assert accepted.sum() > 8 and not np.asarray(rejected).any()


@pytest.mark.parametrize("layers", [[], [1], [0, 0], [-1]])
def test_invalid_layers_are_rejected(layers):
  pair = tiny_pair.pair()
  with pytest.raises(InputError, match="decoder has layers 0 to 0"):
    pair.with_draft(layer_skip(pair.target, layers))
