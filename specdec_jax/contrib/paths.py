"""A batch of all paths as verification: each path of a tree is a row of the target's batch. Exact.

A tree is usually verified as one block with an attention mask. Here, each path from the last
committed token to a leaf is a row of its own, with a copy of the cache and the mask of a chain.
Tokens that paths share are processed once per path. Of all rows, only the one with the accepted
path is kept: at temperature 0 the longest one (K. Stratos, Speculative Decoding, Appendix A).

Every node gets the target's logits back from the first of its rows, so verification is that of the
tree. Above temperature 0 it would not be exact to verify the rows independently and to keep the
longest one (`tests/test_verifiers.py`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.core.arrays import repeat_rows, take
from specdec_jax.core.trees import AnyTree, NodeLayout, Tree, require_static
from specdec_jax.core.types import Extended, First, Length, Model, Path, Tokens, WrappedModel
from specdec_jax.core.verify.tokens import TokenVerifier


@dataclasses.dataclass(frozen=True)
class PathsVerifier(TokenVerifier):
  """`TokenVerifier` for which the target processes a tree as a batch; see the module docstring."""

  def round_target(self, target: Model) -> Model:
    if isinstance(target, WrappedModel):  # it still receives the tree
      return dataclasses.replace(target, model=self.round_target(target.model))
    return PathsModel(target)


@dataclasses.dataclass(frozen=True)
class PathsModel(WrappedModel):
  """Model that processes a static tree as a batch of its paths.

  Between `extend` and `commit` of a tree that is not a chain, the cache is a pair: a row per path,
  and the cache before.
  """

  def extend(
    self, params: Any, cache: Any, tokens: Tokens, tree: NodeLayout | None = None, first: First = 0
  ) -> Extended:
    tree = require_static("a batch of paths", tree)
    if tree.is_chain:
      return self.model.extend(params, cache, tokens, tree, first)
    paths = leaf_paths(tree)
    rows, blocks = repeat_rows(cache, len(paths)), tokens[:, paths]
    outputs = self.model.extend(params, rows, blocks.reshape(-1, paths.shape[1]))
    nodes = [int(np.flatnonzero(paths.ravel() == node)[0]) for node in range(tree.num_nodes)]
    logits, hidden = (take(x.reshape(len(tokens), -1, x.shape[-1]), nodes) for x in outputs[:2])
    return logits, hidden, (outputs[2], cache)

  def commit(
    self, cache: Any, length: Length, tree: AnyTree | None = None, path: Path = None
  ) -> Any:
    if path is None:
      return self.model.commit(cache, length)
    paths = leaf_paths(require_static("a batch of paths", tree))
    is_on = (path[:, None] == paths[None, :, 1:]) | (path[:, None] == 0)  # [B, paths, D]
    row = jnp.arange(len(path)) * len(paths) + is_on.all(axis=-1).argmax(axis=1)
    # Arrays that rows share, such as the encoded source, have not been repeated.
    cache = jax.tree.map(lambda x, old: old if x.shape == old.shape else x[row], *cache)
    return self.model.commit(cache, length)


def leaf_paths(tree: Tree) -> np.ndarray:
  """Return the nodes [leaves, D + 1] from the root to each leaf, which fills up shorter paths."""
  leaves = np.flatnonzero(tree.num_children == 0)
  paths = [np.flatnonzero(tree.ancestors[leaf]) for leaf in leaves]
  return np.stack([np.pad(path, (0, tree.depth + 1 - len(path)), "edge") for path in paths])
