"""Test that named decoder-only shapes have the parameter counts of their papers and checkpoints."""

import jax
import numpy as np
import pytest

from specdec_jax.models.families import init_params
from specdec_jax.models.sizes import named_config

pytestmark = pytest.mark.slow

GPT_2 = {  # of the released checkpoints
  "distil": 81_912_576,
  "small": 124_439_808,
  "medium": 354_823_168,
  "large": 774_030_080,
  "xl": 1_557_611_200,
}
# (layers, units, heads, parameters without embeddings) of Thoppilan et al., 2022; 100m is ours.
LAMDA = {
  "100m": (8, 640, 10, 100e6),
  "2b": (10, 2560, 40, 2e9),
  "8b": (16, 4096, 64, 8e9),
  "137b": (64, 8192, 128, 137e9),
}


def count(tree) -> int:
  return sum(int(np.prod(x.shape, dtype=np.int64)) for x in jax.tree.leaves(tree))


def shapes(family: str, size: str):
  config = named_config(family, size)
  return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


@pytest.mark.parametrize("size", GPT_2)
def test_gpt_2_has_as_many_as_its_checkpoints(size):
  assert count(shapes("gpt2", size)) == GPT_2[size]


@pytest.mark.parametrize("size, millions", [("97m", 97), ("6m", 6)])
def test_gpt_like_has_as_many_as_the_paper_says(size, millions):
  assert round(count(shapes("gpt_like", size)) / 1e6) == millions


@pytest.mark.parametrize("size", LAMDA)
def test_lamda_has_as_many_as_its_name_says_without_embeddings(size):
  """A layer has heads of 128 units, a gated feed-forward of 8 times the units, and two norms."""
  layers, units, heads, named = LAMDA[size]
  width, hidden = heads * 128, 8 * units
  tree = shapes("lamda", size)
  in_layers = count([v for k, v in tree["decoder"].items() if k.startswith("layers_")])
  assert in_layers == layers * (4 * units * width + 3 * units * hidden + 2 * units)
  assert in_layers == pytest.approx(named, rel=0.08)  # 8.59 billion are called 8
  assert count(tree) == in_layers + 2 * 32_000 * units + units + 32 * heads  # tables, norm, bias
