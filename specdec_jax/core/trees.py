"""Trees of draft tokens: their shape, and the positions and visibility of their nodes.

Node 0 is the last committed token. Every other node is a draft token that follows its parent. Nodes
are in level order, and siblings are adjacent and in the order in which they were sampled. So a
parent comes before its children, and draft token i is node i + 1.

Axis letters are those of `core.types`.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from specdec_jax.core.arrays import gather
from specdec_jax.core.memory import require_host_memory
from specdec_jax.errors import InputError, require_count, shown

MOST_UNROLLED = 64  # maximum number of levels or siblings that a program computes one by one


class NodePlacement(NamedTuple):
  """Positions and attention mask of the nodes of a block.

  Attributes:
    positions: position of each node in the text.
    key_positions: position of the token in each cache slot; [T] if it is the same for all rows.
    visible: mask of the cache slots that each node attends to, its own included.
  """

  positions: Int[Array, "B K"]
  key_positions: Int[Array, " T"] | Int[Array, "B T"]
  visible: Bool[Array, "B K T"]


@runtime_checkable
class NodeLayout(Protocol):
  """Protocol of objects that give positions and a mask for the nodes of a block."""

  def place(
    self, length: Int[Array, " B"], first: Any, num_nodes: int, num_slots: int
  ) -> NodePlacement:
    """Return the placement of nodes `first` to `first + num_nodes - 1` after `length` tokens."""


@dataclasses.dataclass(frozen=True)
class Tree:
  """Static tree of draft tokens, the same in every round and row.

  Attributes:
    parents: for each draft token, the node that it follows: node i + 1 follows parents[i]. For a
      chain they are stored as a range.
    verify_lengths: for a chain that may end early (-1 is a token that was not proposed), the
      lengths for which a target forward pass is compiled, ascending, with gamma last. Empty for a
      tree that is always proposed as a whole.
    greedy_siblings: whether a draft model samples only the first of several siblings, and the
      others are the most probable tokens (`core.sampling.sample_siblings`).
  """

  parents: Sequence[int] = ()
  verify_lengths: tuple[int, ...] = ()
  greedy_siblings: bool = False

  def __post_init__(self):
    if isinstance(self.parents, range) and self.parents == range(len(self.parents)):
      return  # a chain of any length needs no memory
    parents = tuple(map(operator.index, self.parents))
    if not _in_level_order(parents):
      raise InputError(
        f"A tree has parents {shown(parents)}; they must be in ascending order, each a node before "
        "its child: level order, siblings adjacent."
      )
    is_chain = parents == (*range(len(parents)),)
    object.__setattr__(self, "parents", range(len(parents)) if is_chain else parents)

  @property
  def num_nodes(self) -> int:
    """K, the number of nodes, including the last committed token."""
    return len(self.parents) + 1

  @property
  def num_draft_tokens(self) -> int:
    """N, the number of draft tokens."""
    return len(self.parents)

  @functools.cached_property
  def depths(self) -> np.ndarray:
    """[K], distance of each node from the last committed token."""
    if self.is_chain:
      return np.arange(self.num_nodes, dtype=np.int32)
    depths = [0]
    for parent in self.parents:
      depths.append(depths[parent] + 1)
    return np.array(depths, np.int32)

  @property
  def depth(self) -> int:
    """D, the maximum number of draft tokens that a round can accept; gamma for a chain."""
    return self.num_draft_tokens if self.is_chain else int(self.depths[-1])

  @functools.cached_property
  def ancestors(self) -> np.ndarray:
    """[K, K], mask that is True at [i, j] if node j is node i or one of its ancestors."""
    ancestors = np.eye(self.num_nodes, dtype=bool)
    for node, parent in enumerate(self.parents, 1):
      ancestors[node] |= ancestors[parent]
    return ancestors

  @functools.cached_property
  def ranks(self) -> np.ndarray:
    """[N], number of earlier siblings of each draft token."""
    parents = np.array(self.parents, np.int32)
    return (np.arange(len(parents)) - np.searchsorted(parents, parents)).astype(np.int32)

  @functools.cached_property
  def num_children(self) -> np.ndarray:
    """[K], number of children of each node."""
    return np.bincount(np.array(self.parents, np.int32), minlength=self.num_nodes)

  @property
  def row_depths(self) -> Int[Array, "1 K"]:
    """`depths` with an axis of rows, as `DynamicTree` has them."""
    return jnp.asarray(self.depths)[None]

  @property
  def row_ancestors(self) -> Bool[Array, "1 K K"]:
    """`ancestors` with an axis of rows, as `DynamicTree` has them."""
    return jnp.asarray(self.ancestors)[None]

  @property
  def width(self) -> int:
    """W, the maximum number of children of a node; 0 for a tree without draft tokens."""
    return min(self.num_draft_tokens, 1) if self.is_chain else int(self.ranks.max()) + 1

  @functools.cached_property
  def children(self) -> np.ndarray:
    """[K, W], index of the draft token that is the child of each node at each rank; N if none."""
    children = np.full((self.num_nodes, self.width), self.num_draft_tokens, np.int32)
    children[list(self.parents), self.ranks] = np.arange(self.num_draft_tokens)
    return children

  @property
  def is_chain(self) -> bool:
    """True if every node has at most one child."""
    return isinstance(self.parents, range)

  @functools.cached_property
  def levels(self) -> list[tuple[int, int]]:
    """For each level from depth 1 on: its first node, and the node after its last one."""
    bounds = np.searchsorted(self.depths, range(1, self.depth + 2)).tolist()
    return [*zip(bounds, bounds[1:])]

  def place(
    self, length: Int[Array, " B"], first: Any, num_nodes: int, num_slots: int
  ) -> NodePlacement:
    """Return the placement of nodes `first` to `first + num_nodes - 1`; see `NodeLayout`."""
    if self.is_chain:
      return place_chain(length, first, num_nodes, num_slots)
    return _place_tree(self, length, slice(first, first + num_nodes), num_slots)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["parents"],
  meta_fields=["num_draft_tokens", "depth"],
)
@dataclasses.dataclass(frozen=True)
class DynamicTree:
  """Tree of draft tokens whose shape differs between rounds and rows.

  The shape may depend on tokens that were selected deterministically, but not on sampled ones.
  Therefore all draft tokens of the tree must be selected deterministically. Siblings must differ.

  Attributes:
    parents: [B, N], the earlier node that each draft token follows; None outside of a round.
  """

  num_draft_tokens: int
  depth: int
  parents: Any = None

  is_chain = False
  verify_lengths = ()

  def __post_init__(self):
    require_count("num_draft_tokens", self.num_draft_tokens, 0)
    require_count("depth", self.depth, 0)

  @property
  def num_nodes(self) -> int:
    """K, the number of nodes, including the last committed token."""
    return self.num_draft_tokens + 1

  @property
  def row_ancestors(self) -> Bool[Array, "B K K"]:
    """Mask that is True at [:, i, j] if node j is node i or one of its ancestors."""
    return reach(jnp.pad(self.parents, ((0, 0), (1, 0))), self.depth)

  @property
  def row_depths(self) -> Int[Array, "B K"]:
    """Distance of each node from the last committed token."""
    return self.row_ancestors.sum(axis=-1) - 1

  def place(
    self, length: Int[Array, " B"], first: Any, num_nodes: int, num_slots: int
  ) -> NodePlacement:
    """Return the placement of nodes `first` to `first + num_nodes - 1`; see `NodeLayout`."""
    return _place_tree(self, length, slice(first, first + num_nodes), num_slots)


AnyTree = Tree | DynamicTree


def place_chain(
  length: Int[Array, " B"], first: Any, num_nodes: int, num_slots: int
) -> NodePlacement:
  """Return the placement of nodes `first` to `first + num_nodes - 1` of a chain."""
  key_positions = jnp.arange(num_slots)
  positions = (length + first)[:, None] + jnp.arange(num_nodes)[None]
  return NodePlacement(positions, key_positions, key_positions[None, None] <= positions[..., None])


def _place_tree(
  tree: AnyTree, length: Int[Array, " B"], nodes: slice, num_slots: int
) -> NodePlacement:
  """Return the placement of some nodes of a tree.

  Node i is in slot length + i, at position length + depths[i]. It attends to the committed tokens,
  to its ancestors and to itself.
  """
  slots = jnp.arange(num_slots)
  node = slots[None] - length[:, None]  # [B, T], negative before the tree
  clipped = jnp.clip(node, 0, tree.num_nodes - 1)
  depths, ancestors = tree.row_depths, tree.row_ancestors
  slot_depths = jnp.take_along_axis(depths, clipped, axis=1)
  key_positions = jnp.where(node < 0, slots, length[:, None] + slot_depths)
  positions = length[:, None] + depths[:, nodes]
  related = jnp.take_along_axis(ancestors[:, nodes], clipped[:, None], axis=2)  # [B, K, T]
  visible = (node < 0)[:, None] | (related & (node < tree.num_nodes)[:, None])
  return NodePlacement(positions, key_positions, visible)


def reach(parents: Int[Array, "B K"], depth: int) -> Bool[Array, "B K K"]:
  """Return a mask that is True at [:, i, j] if node j is node i or one of its ancestors.

  A root is its own parent. `depth` is the maximum distance between a node and an ancestor.
  """
  num_nodes = parents.shape[1]
  near = jax.nn.one_hot(parents, num_nodes, dtype=bool) | np.eye(num_nodes, dtype=bool)[None]
  near = near.astype(jnp.float32)
  for _ in range(math.ceil(math.log2(max(1, depth)))):  # each pass doubles the distance
    near = jnp.minimum(near @ near, 1)
  return near > 0


def chain(gamma: int) -> Tree:
  """Return a chain of `gamma` draft tokens (Algorithm 1)."""
  require_count("gamma", gamma, 0)
  return _chain(int(gamma))


@functools.cache
def _chain(gamma: int) -> Tree:
  return Tree(range(gamma))


def branching(*widths: int) -> Tree:
  """Return a tree whose nodes at depth d have widths[d] children; (2, 2) gives 6 draft tokens."""
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


def require_tree_memory(num_nodes: int) -> None:
  """Raise InputError unless memory could hold [K, K] float32 values of a tree of K nodes."""
  require_host_memory(f"a tree of {num_nodes} nodes", num_nodes**2 * np.float32().itemsize)


def require_compilable(tree: AnyTree) -> None:
  """Raise InputError if a tree that is not a chain has more than MOST_UNROLLED levels or siblings.

  Each level, and each sibling, is compiled separately. Dynamic trees may have more siblings.
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


def require_static(who: str, tree: Any) -> Tree:
  """Return the tree, or raise InputError if it is dynamic."""
  if not isinstance(tree, Tree):
    raise InputError(f"{who} takes static trees, and this one is dynamic.")
  return tree


def require_chain(who: str, tree: AnyTree) -> Tree:
  """Return the tree, or raise InputError unless it is a chain of at least one draft token."""
  tree = require_static(who, tree)
  if not tree.is_chain:
    raise InputError(f"{who} proposes chains, and this tree has {tree.width} children of a node.")
  require_count("gamma", tree.depth)
  return tree


def placeholder_shape(tree: AnyTree, batch: int) -> DynamicTree | None:
  """Return a one-level placeholder for the shape of a dynamic tree; None for a static tree."""
  if isinstance(tree, Tree):
    return None
  return dataclasses.replace(tree, parents=jnp.zeros((batch, tree.num_draft_tokens), jnp.int32))


def path_to(tree: AnyTree, node: Int[Array, " B"]) -> Int[Array, "B D"] | None:
  """Return the nodes on the path to `node`, then zeros; None for a chain (see `Verification`)."""
  if tree.is_chain:
    return None
  if isinstance(tree, DynamicTree):
    on_path = gather(tree.row_ancestors, node[:, None])  # [B, 1, K]
    at_depth = tree.row_depths[:, None] == jnp.arange(1, tree.depth + 1)[None, :, None]  # [B, D, K]
    return (on_path & at_depth).argmax(axis=-1).astype(jnp.int32)
  paths = np.zeros((tree.num_nodes, tree.depth), np.int32)
  for end in range(tree.num_nodes):
    path = np.flatnonzero(tree.ancestors[end])[1:]
    paths[end, : len(path)] = path
  return jnp.asarray(paths)[node]


def _in_level_order(parents: Sequence[int]) -> bool:
  ascending = all(a <= b for a, b in itertools.pairwise(parents))
  return ascending and all(0 <= parent <= i for i, parent in enumerate(parents))
