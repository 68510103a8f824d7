"""Constrained decoding: outputs are sequences of a given set, stored as a trie.

The trie is stored like a CSR matrix (compressed sparse rows), as in STATIC (2026): nodes are in
level order, the edges of a node are adjacent and in ascending order of their tokens, and edge e
leads to node e + 1. The node of a text is found by following its generated tokens from the root,
with a binary search per token.

Axis letters are those of `core.types`; n is the number of edges, and m the number of nodes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from specdec_jax.core.processors import LogitsProcessor, Prefixes
from specdec_jax.errors import InputError, require_count
from specdec_jax.settings import HashableArray, traced

_OUTSIDE = -1  # node of a text that no sequence begins with


@dataclasses.dataclass(frozen=True)
class TrieConstraint(LogitsProcessor):
  """Logits processor that allows only the sequences of a trie, each followed by EOS.

  The sequences start after the prompt and a forced prefix. If no sequence begins with the generated
  tokens, all tokens are excluded, so that `core.processors.process` does not adjust the logits.

  Attributes:
    tokens: [n], token of each edge.
    first_edges: [m + 1], first edge of each node; the last entry is n.
    max_children: largest number of edges of a node, rounded up to a power of two.
  """

  tokens: HashableArray = traced(HashableArray(np.zeros(0, np.int32)))
  first_edges: HashableArray = traced(HashableArray(np.zeros(1, np.int32)))
  max_children: int = 1

  @classmethod
  def of(cls, sequences: Sequence[Sequence[int]], eos_id: int) -> "TrieConstraint":
    """Return the constraint for `sequences` of tokens, given without EOS.

    Raises:
      InputError: there are no sequences, or one of them has a negative token.
    """
    if not len(sequences):
      raise InputError("There are no sequences to allow; give at least one.")
    ordered = sorted({(*sequence, eos_id) for sequence in sequences})
    for sequence in ordered:
      for token in sequence:
        require_count("a token of an allowed sequence", token, 0)
    # Level by level: a node is a range of `ordered`, whose sequences share their first tokens.
    tokens, first_edges = [], [0]
    level = [(0, len(ordered))]
    for depth in range(max(map(len, ordered))):
      next_level = []
      for first, last in level:
        row = first
        while row < last:
          token, start = ordered[row][depth], row
          while row < last and ordered[row][depth] == token:
            row += 1
          tokens.append(token)
          longer = start if len(ordered[start]) > depth + 1 else row  # the end of a sequence
          next_level.append((longer, row))
        first_edges.append(len(tokens))
      level = next_level
    first_edges += [len(tokens)] * (len(tokens) + 2 - len(first_edges))
    edges = np.array(first_edges, np.int32)
    most = int(np.diff(edges).max())
    return cls(
      HashableArray(np.array(tokens, np.int32)), HashableArray(edges), 1 << (most - 1).bit_length()
    )

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    tokens, first_edges = jnp.asarray(self.tokens), jnp.asarray(self.first_edges)
    node = self._nodes(tokens, first_edges, prefixes)
    first = first_edges[jnp.maximum(node, 0)][..., None]
    last = jnp.where(node == _OUTSIDE, 0, first_edges[jnp.maximum(node, 0) + 1])[..., None]
    edges = first + jnp.arange(self.max_children)
    vocab_size = logits.shape[-1]
    allowed = jnp.where(edges < last, tokens[jnp.minimum(edges, len(tokens) - 1)], vocab_size)

    def mask(row: Int[Array, " children"]) -> Bool[Array, " V"]:
      return jnp.zeros(vocab_size, bool).at[row].set(True, mode="drop")

    return jnp.where(jax.vmap(jax.vmap(mask))(allowed), logits, -jnp.inf)

  def _nodes(
    self, tokens: Int[Array, " n"], first_edges: Int[Array, " m"], prefixes: Prefixes
  ) -> Int[Array, "B K"]:
    """Return the node that the generated tokens of each text lead to; _OUTSIDE if there is none."""
    num_new = prefixes.length - prefixes.prompt_length[:, None]

    def find(i: Any, node: Int[Array, "B K"]) -> Int[Array, "B K"]:
      """Follow the edge of the i-th new token."""
      at = (prefixes.prompt_length[:, None] + i)[..., None]
      at = jnp.broadcast_to(at, (*node.shape, 1))
      token = jnp.take_along_axis(prefixes.tokens, at, axis=2, mode="clip")[..., 0]
      known = jnp.maximum(node, 0)
      low, end = first_edges[known], first_edges[known + 1]

      def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        is_below = (middle < high) & (tokens[jnp.minimum(middle, len(tokens) - 1)] < token)
        return jnp.where(is_below, middle + 1, low), jnp.where(is_below, high, middle)

      low, _ = lax.fori_loop(0, self.max_children.bit_length() + 1, halve, (low, end))
      found = (low < end) & (tokens[jnp.minimum(low, len(tokens) - 1)] == token)
      next_node = jnp.where(found & (node != _OUTSIDE), low + 1, _OUTSIDE)
      return jnp.where(i < num_new, next_node, node)

    return lax.fori_loop(0, num_new.max(), find, jnp.zeros_like(prefixes.length))
