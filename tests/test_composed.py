"""Drafts made of others, as pairs take them."""

import jax
import numpy as np
import pytest
import tiny_pair

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.drafts.layer_skip import layer_skip
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.errors import InputError
from specdec_jax.pairs import (
  DraftFactory,
  cascade_draft,
  checkpoint_draft,
  draft_sampling,
  forest_draft,
  hierarchical_draft,
  stopping_draft,
)

GREEDY, RANDOM = Sampling(0.0), Sampling()


def near(target) -> DraftFactory:
  return checkpoint_draft(target, str(tiny_pair.folder() / "near"))


def named(name: str):
  """A drafter that makes what it is asked for."""
  return lambda target: DraftFactory(name, lambda sampling, tree: (sampling, tree), name.upper())


def test_a_cascade_shares_gamma_out():
  target = tiny_pair.pair().loaded_target
  made = cascade_draft(target, [near, prompt_lookup], [2])
  assert made.name == "near, then copy-3" and len(made.params) == 2
  depths = lambda gamma: [d.tree.depth for d in made.build(GREEDY, chain(gamma)).drafts]
  assert (depths(1), depths(2), depths(5)) == ([1], [2], [2, 3])


def test_merged_drafts_are_branches():
  made = forest_draft(tiny_pair.pair().loaded_target, [near, prompt_lookup])
  draft = made.build(GREEDY, chain(2))
  assert made.name == "near and copy-3" and draft.tree.parents == (0, 0, 1, 2)


def test_a_draft_samples_in_its_own_way():
  target, tree = tiny_pair.pair().loaded_target, chain(3)
  made = draft_sampling(target, named("a"), temperature=0.5, top_k=3)
  assert made.name == "a (temperature 0.5, top_k 3)" and made.params == "A"
  assert made.build(Sampling(top_p=0.9), tree) == (Sampling(0.5, 3, 0.9), tree)
  assert made.build(GREEDY, tree) == (GREEDY, tree)  # the argmax is its best guess
  assert draft_sampling(target, named("a")).name == "a"


@pytest.mark.parametrize(
  "make, sentence",
  [
    (lambda target: cascade_draft(target, [near], [2]), "1 drafts in a row and 1 gammas"),
    (lambda target: cascade_draft(target, [near, near], [0]), "gamma is 0"),
    (lambda target: stopping_draft(target, prompt_lookup, 0.5), "copy-3 is no model"),
    (lambda target: hierarchical_draft(target, prompt_lookup, near), "copy-3 is no model"),
  ],
)
def test_what_cannot_be_put_together(make, sentence):
  with pytest.raises(InputError, match=sentence):
    make(tiny_pair.pair().loaded_target).build(RANDOM, chain(2))


def test_only_token_verification_judges_what_stops():
  pair = tiny_pair.pair()
  pair = pair.with_draft(stopping_draft(pair.loaded_target, near, 0.5))._replace(
    verifier=BlockVerifier
  )
  with pytest.raises(InputError, match=r"near \(stops below 0.5\) stops early"):
    pair.decoder(RANDOM, 2)


def test_layers_are_the_targets_own_arrays():
  pair = tiny_pair.pair()
  with_layers = pair.with_draft(layer_skip(pair.loaded_target, [0]))
  assert with_layers.draft_name == "layers 0"
  of_target = {id(leaf) for leaf in jax.tree.leaves(pair.target_params)}
  assert {id(leaf) for leaf in jax.tree.leaves(with_layers.draft_params)} < of_target
  # All its layers are the target itself, whose guesses stand.
  out = with_layers.decode_fn(GREEDY, 3)(
    pair.prompt(tiny_pair.SENTENCES[:2]), jax.random.split(jax.random.key(0), 2), max_new_tokens=12
  )
  accepted, rejected = out.rounds.acceptance_counts()
  assert accepted.sum() > 8 and not np.asarray(rejected).any()


@pytest.mark.parametrize("layers", [[], [1], [0, 0], [-1]])
def test_layers_that_there_are_not(layers):
  pair = tiny_pair.pair()
  with pytest.raises(InputError, match="decoder has layers 0 to 0"):
    pair.with_draft(layer_skip(pair.loaded_target, layers))
