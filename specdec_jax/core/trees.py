"""Trees of guesses: their shape, and what follows from it alone.

Node 0 is the newest token; each other node is a guess of what follows its parent. Nodes stand in
level order, siblings beside each other in the order in which they were drawn, so a parent comes
before its children and guess i is node i + 1.

Axes: K nodes, N = K - 1 guesses, D depth, W width.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.errors import InputError, require_count, require_types, shown
from specdec_jax.memory import require_host_memory

MOST_UNROLLED = 64  # levels, or siblings, that a program has one after the other


@dataclasses.dataclass(frozen=True)
class Tree:
  """The shape of a round's guesses, the same in every round and row; equal if its parents are.

  Attributes:
    parents: of each guess, [N]: parents[i] is the node that node i + 1 follows. Kept as a range if
      it is a chain.

  Raises:
    InputError: a parent does not come before its child, or nodes are not in level order with
      siblings beside each other.
  """

  parents: Sequence[int] = ()

  def __post_init__(self):
    if isinstance(self.parents, range) and self.parents == range(len(self.parents)):
      return  # a chain, of any length: nothing is made of it that takes memory before it is tried
    parents = _whole_numbers(self.parents)
    if parents is None or not _in_level_order(parents):
      raise InputError(
        f"A tree has parents {shown(self.parents if parents is None else parents)}; they must be "
        "whole numbers in ascending order, each a node before its child: level order, siblings "
        "beside each other."
      )
    is_chain = parents == (*range(len(parents)),)
    object.__setattr__(self, "parents", range(len(parents)) if is_chain else parents)

  @property
  def num_nodes(self) -> int:
    """K, the newest token included."""
    return len(self.parents) + 1

  @property
  def num_guesses(self) -> int:
    """N."""
    return len(self.parents)

  @functools.cached_property
  def depths(self) -> np.ndarray:
    """How far each node [K] lies behind the newest token."""
    if self.is_chain:
      return np.arange(self.num_nodes, dtype=np.int32)
    depths = [0]
    for parent in self.parents:
      depths.append(depths[parent] + 1)
    return np.array(depths, np.int32)

  @property
  def depth(self) -> int:
    """D, the most guesses that one round can accept: gamma of a chain."""
    return self.num_guesses if self.is_chain else int(self.depths[-1])

  @functools.cached_property
  def ancestors(self) -> np.ndarray:
    """[K, K]: whether the second node is the first or one that it follows."""
    ancestors = np.eye(self.num_nodes, dtype=bool)
    for node, parent in enumerate(self.parents, 1):
      ancestors[node] |= ancestors[parent]
    return ancestors

  @functools.cached_property
  def ranks(self) -> np.ndarray:
    """How many elder siblings each guess [N] has."""
    parents = np.array(self.parents, np.int32)
    return (np.arange(len(parents)) - np.searchsorted(parents, parents)).astype(np.int32)

  @property
  def width(self) -> int:
    """W, most children of a node; 1 for a chain, 0 where nothing is guessed."""
    return min(self.num_guesses, 1) if self.is_chain else int(self.ranks.max()) + 1

  @functools.cached_property
  def children(self) -> np.ndarray:
    """Guess [K, W] that is each node's child of each rank; N where it has none."""
    children = np.full((self.num_nodes, self.width), self.num_guesses, np.int32)
    children[list(self.parents), self.ranks] = np.arange(self.num_guesses)
    return children

  @property
  def is_chain(self) -> bool:
    """Whether each node has one child at most."""
    return isinstance(self.parents, range)

  @functools.cached_property
  def levels(self) -> list[tuple[int, int]]:
    """For each depth from 1 the nodes there, which lie beside each other: the first, and past the
    last."""
    bounds = np.searchsorted(self.depths, range(1, self.depth + 2)).tolist()
    return [*zip(bounds, bounds[1:])]


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["parents"], meta_fields=["num_guesses", "depth"]
)
@dataclasses.dataclass(frozen=True)
class DynamicTree:
  """A shape that changes from round to round and from row to row.

  It answers what `Tree` answers, with an axis of rows B before. Its shape may depend on what was
  chosen, never on what was drawn: all its guesses are chosen, and siblings differ.

  Attributes:
    num_guesses: N.
    depth: D, the most guesses that a path has.
    parents: of each guess, [B, N], a node before it; None before there is a round.
  """

  num_guesses: int
  depth: int
  parents: Any = None

  is_chain = False

  def __post_init__(self):
    require_count("num_guesses", self.num_guesses, 0)
    require_count("depth", self.depth, 0)

  @property
  def num_nodes(self) -> int:
    """K, the newest token included."""
    return self.num_guesses + 1

  @property
  def ancestors(self) -> Array:
    """[B, K, K]: whether the second node is the first or one that it follows."""
    return reach(jnp.pad(self.parents, ((0, 0), (1, 0))), self.depth)

  @property
  def depths(self) -> Array:
    """How far each node [B, K] lies behind the newest token."""
    return self.ancestors.sum(axis=-1) - 1


AnyTree = Tree | DynamicTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placed:
  """In place of a tree, for nodes that are told slot by slot of a cache what they see (`beams`).

  Attributes:
    positions: [B, K], where they stand in the text.
    keys_at: [B, T], where what each slot holds stands.
    seen: [B, K, T], which slots each sees, its own among them.
  """

  positions: Array
  keys_at: Array
  seen: Array


AnyNodes = AnyTree | Placed


def reach(parents: Array, depth: int) -> Array:
  """[B, K, K]: whether the second node is the first or one that it follows, `depth` away at most,
  of nodes with parents [B, K]; a root is its own."""
  num_nodes = parents.shape[1]
  near = jnp.minimum(jax.nn.one_hot(parents, num_nodes) + jnp.eye(num_nodes), 1)
  for _ in range(math.ceil(math.log2(max(1, depth)))):  # twice as far each time
    near = jnp.minimum(near @ near, 1)
  return near > 0


def chain(gamma: int) -> Tree:
  """`gamma` guesses, each after the one before (Algorithm 1)."""
  require_count("gamma", gamma, 0)
  return _chain(int(gamma))


@functools.cache
def _chain(gamma: int) -> Tree:
  return Tree(range(gamma))


def branching(*widths: int) -> Tree:
  """A tree in which each node at depth d has widths[d] children: branching(2, 2) has 6 guesses."""
  parents, level, at_depth, num_nodes = [], [0], 1, 1
  for width in widths:
    require_count("width", width)
    at_depth *= int(width)
    num_nodes += at_depth
    require_tree_memory(num_nodes)
  for width in widths:
    parents += [node for node in level for _ in range(width)]
    level = list(range(len(parents) + 1 - len(level) * width, len(parents) + 1))
  return Tree(tuple(parents))


def merged(paths: Sequence[Sequence[int]]) -> Tree:
  """The tree that paths of ranks make together, as Medusa writes one: (0,), (1,), (0, 0), ...

  Raises:
    InputError: an elder sibling, or a beginning of a path, is missing.
  """
  require_types(merged, locals())
  nodes: list[tuple[int, ...]] = [()]
  nodes += sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
  for path in nodes[1:]:
    elder = (*path[:-1], path[-1] - 1) if path[-1] else path[:-1]
    if elder not in nodes:
      raise InputError(f"A tree has the path {path} but not {elder}, which comes before it.")
  return Tree(tuple(nodes.index(path[:-1]) for path in nodes[1:]))


def require_tree_memory(num_nodes: int) -> None:
  """Raise InputError unless memory could hold the attention mask [K, K] of a tree of K nodes."""
  require_host_memory(f"a tree of {num_nodes} nodes", num_nodes**2 * np.float32().itemsize)


def require_compilable(tree: AnyTree) -> None:
  """Raise InputError if a tree that is no chain has more than MOST_UNROLLED levels or siblings.

  Each of them is compiled separately.
  """
  if tree.is_chain:
    return
  width = tree.width if isinstance(tree, Tree) else 1
  for what, count in (("children of a node", width), ("levels", tree.depth)):
    if count > MOST_UNROLLED:
      raise InputError(
        f"The tree has {count} {what}, each of which is compiled separately, which would take "
        f"minutes; use at most {MOST_UNROLLED}, or a chain of gamma draft tokens."
      )


def require_static(who: str, tree: AnyNodes) -> Tree:
  """The same, or an InputError if its shape changes from round to round."""
  if not isinstance(tree, Tree):
    raise InputError(f"{who} takes trees of one shape, and this one changes from round to round.")
  return tree


def require_chain(who: str, tree: AnyTree) -> None:
  """Raise InputError unless a tree of guesses is a chain, of one at least."""
  tree = require_static(who, tree)
  if not tree.is_chain:
    raise InputError(f"{who} guesses chains, and this tree has {tree.width} children of a node.")
  require_count("gamma", tree.depth)


def some_shape(tree: AnyTree, batch: int) -> DynamicTree | None:
  """Of a tree whose shape changes one of its shapes, where any will do: all guesses follow the
  newest token. None for a tree that has a shape."""
  if isinstance(tree, Tree):
    return None
  return dataclasses.replace(tree, parents=jnp.zeros((batch, tree.num_guesses), jnp.int32))


def path_to(tree: AnyTree, node: Array) -> Array | None:
  """The nodes [B, D] on the way to `node` [B], 0 past it; None for a chain (`Verification`)."""
  if tree.is_chain:
    return None
  if isinstance(tree, DynamicTree):
    on_path = jnp.take_along_axis(tree.ancestors, node[:, None, None], axis=1)  # [B, 1, K]
    at_depth = tree.depths[:, None] == jnp.arange(1, tree.depth + 1)[:, None]  # [B, D, K]
    return (on_path & at_depth).argmax(axis=-1).astype(jnp.int32)
  paths = np.zeros((tree.num_nodes, tree.depth), np.int32)
  for end in range(tree.num_nodes):
    path = np.flatnonzero(tree.ancestors[end])[1:]
    paths[end, : len(path)] = path
  return jnp.asarray(paths)[node]


def _whole_numbers(values: Any) -> tuple[int, ...] | None:
  """Values as Python's whole numbers; None if they are no list of these."""
  if isinstance(values, str | bytes | bytearray | memoryview):
    return None
  try:
    return tuple(operator.index(value) for value in values)
  except TypeError:
    return None


def _in_level_order(parents: Sequence[int]) -> bool:
  ascending = all(a <= b for a, b in itertools.pairwise(parents))
  return ascending and all(0 <= parent <= i for i, parent in enumerate(parents))


def take(x: Array, nodes: Sequence[int] | np.ndarray) -> Array:
  """x [B, N, ...] at the given places of its second axis; a slice where they lie side by side."""
  places = np.asarray(nodes)
  if len(places) and (places == np.arange(places[0], places[0] + len(places))).all():
    return x[:, places[0] : places[0] + len(places)]
  return jnp.take(x, jnp.asarray(places, jnp.int32), axis=1)
