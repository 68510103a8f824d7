"""Texts placed on one path of a tree, with other tokens on its other nodes; batches of texts."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.core.arrays import gather
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import row_keys
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree
from specdec_jax.core.types import Keys
from specdec_jax.pair import Pair


class Plans(NamedTuple):
  """Plans for placing a text on one path of a tree with N draft tokens and depth D.

  A plan consists of a shape of the tree and the leaf at which the path ends.

  Attributes:
    parents: [plans, N].
    depths: [plans, N]; children of the root have depth 1.
    offsets: [plans, N], number that is added to the text's token at the depth of each draft token;
      0 for draft tokens on the path.
    paths: [plans, leaves, D], nodes below the root on the path to each leaf. The path with the text
      is first. Entries past a leaf are 0, and so are the paths of leaves that a shape lacks.
    lengths: [plans], number of draft tokens on the path with the text.
  """

  parents: np.ndarray
  depths: np.ndarray
  offsets: np.ndarray
  paths: np.ndarray
  lengths: np.ndarray

  def tokens(self, plan: Array, text: Array, vocab_size: int) -> Array:
    """Return draft tokens [B, N], given the plan number [B] and next tokens [B, D] of each row."""
    text_tokens = gather(text, jnp.asarray(self.depths - 1)[plan])
    return (text_tokens + jnp.asarray(self.offsets)[plan]) % vocab_size

  def shape(self, plan: Array, tree: AnyTree) -> AnyTree:
    """Return the tree; a dynamic tree gets the shape of the plan [B] of each row."""
    if isinstance(tree, Tree):
      return tree
    return dataclasses.replace(tree, parents=jnp.asarray(self.parents)[plan])


@functools.cache
def plans_of(tree: AnyTree) -> Plans:
  """Return one plan per leaf of a static tree, or per leaf of some shapes of a dynamic tree."""
  shapes = [tree] if isinstance(tree, Tree) else shapes_of(tree)
  leaves = [(shape, leaf) for shape in shapes for leaf in leaves_of(shape)]
  most = max(len(leaves_of(shape)) for shape in shapes)
  paths = np.zeros((len(leaves), most, tree.depth), np.int32)
  for plan, (shape, first) in enumerate(leaves):
    for number, leaf in enumerate(sorted(leaves_of(shape), key=lambda leaf: leaf != first)):
      path = np.flatnonzero(shape.ancestors[leaf])[1:]
      paths[plan, number, : len(path)] = path
  on_path = [shape.ancestors[leaf, 1:] for shape, leaf in leaves]
  return Plans(
    parents=np.array([[*shape.parents] for shape, _ in leaves], np.int32),
    depths=np.array([shape.depths[1:] for shape, _ in leaves], np.int32),
    offsets=np.array(
      [np.where(on, 0, 1 + shape.ranks) for on, (shape, _) in zip(on_path, leaves)], np.int32
    ),
    paths=paths,
    lengths=np.array([on.sum() for on in on_path], np.int32),
  )


def leaves_of(tree: Tree) -> list[int]:
  """Return the nodes of a tree that have no children."""
  return np.setdiff1d(np.arange(tree.num_nodes), tree.parents).tolist()


def shapes_of(tree: DynamicTree, count: int = 3) -> list[Tree]:
  """Return `count` random shapes of a dynamic tree, each as deep as the tree allows."""
  shapes = []
  for seed in range(count):
    rng = np.random.default_rng(seed)
    depth = min(tree.depth, tree.num_draft_tokens)
    nodes = [(0,) * length for length in range(depth + 1)]  # the ranks on the path to each node
    while len(nodes) <= tree.num_draft_tokens:
      parent = nodes[rng.integers(len(nodes))]
      if len(parent) < tree.depth:
        rank = sum(node[:-1] == parent for node in nodes if node)
        nodes.append((*parent, rank))
    nodes.sort(key=lambda node: (len(node), node))
    shapes.append(Tree(tuple(nodes.index(node[:-1]) for node in nodes[1:])))
  return shapes


def batches(
  pair: Pair, texts: Sequence[str], settings: DecodeSettings
) -> Iterator[tuple[int, Array, Keys]]:
  """Yield the number of the first row, prompts [B, P] and keys of batches, without end.

  The texts are repeated in order. All prompts are padded to the longest text, so that each program
  is compiled once.
  """
  prompts, size = pair.prompt(texts), settings.batch_size
  for first in itertools.count(0, size):
    rows = np.arange(first, first + size) % len(prompts)
    yield first, prompts[rows], row_keys(settings.seed, first, size)
