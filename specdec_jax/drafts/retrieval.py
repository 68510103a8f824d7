"""What followed the latest tokens in a datastore of the task's texts (REST, He et al., 2024).

The datastore is a suffix array: all places of the text, sorted by what stands there, so that those
where a run of tokens occurs lie side by side, and so do equal continuations. The longest run of the
newest tokens that occurs is looked up by bisection, inside the compiled loop; what followed it is a
trie, whose nodes are worth how often they occur.
"""

import contextlib
import dataclasses
import hashlib
import pathlib
import zipfile
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specdec_jax.atomic_files import atomic_write
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree
from specdec_jax.core.types import Context, Draft, DraftFactory, LoadedTarget, Proposal
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.t5 import PAD_ID

REACH = 32  # tokens by which places are sorted


class Datastore(NamedTuple):
  """Texts of M tokens in all, each with its start token before it.

  Attributes:
    tokens: [M + REACH], -1 past the end.
    places: [M], sorted by the REACH tokens from there on.
  """

  tokens: Array
  places: Array


def retrieval(
  target: LoadedTarget, path: str, max_context: int = 8, num_matches: int = 64
) -> DraftFactory:
  """What follows in a text, one output of the task a line; arguments as `RetrievalDraft`.

  The datastore is kept where jax keeps its programs, if it does.
  """
  store = cached_datastore(target.vocabulary, path)
  make = lambda sampling, tree: RetrievalDraft(tree, max_context, num_matches)
  return DraftFactory("retrieval", make, store)


def cached_datastore(vocabulary: Vocabulary, path: str) -> Datastore:
  """The datastore of a file, built or found where an earlier run left it."""
  lines = read_lines(path)
  cache = getattr(jax.config, "jax_compilation_cache_dir", None)
  about = "\n".join([str(REACH), vocabulary.fingerprint(), *lines])
  name = hashlib.sha256(about.encode()).hexdigest()[:16]
  kept = pathlib.Path(cache or "") / "datastores" / f"{name}.npz"
  if cache:
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
      with np.load(kept) as arrays:
        return Datastore(*(jnp.asarray(arrays[name]) for name in Datastore._fields))
  store = build_datastore(map(vocabulary.encode, lines), vocabulary.start_id)
  if cache:
    with contextlib.suppress(OSError):  # then it is built again
      kept.parent.mkdir(parents=True, exist_ok=True)
      with atomic_write(kept, "wb") as file:
        np.savez(file, **store._asdict())
  return store


def build_datastore(rows: Iterable[Sequence[int]], start_id: int = PAD_ID) -> Datastore:
  """Of rows of token ids, EOS last, no start token.

  Raises:
    InputError: there is no token.
  """
  text = np.concatenate([[], *([start_id, *row] for row in rows)]).astype(np.int32)
  if not len(text):
    raise InputError("The rows to look up hold no tokens.")
  tokens = np.concatenate([text, np.full(REACH, -1, np.int32)])
  order = np.lexsort([tokens[at : at + len(text)] for at in reversed(range(REACH))])
  return Datastore(jnp.asarray(tokens), jnp.asarray(order, jnp.int32))


class _Trie(NamedTuple):
  """What followed, sorted: R continuations of D tokens.

  Attributes:
    tokens: [B, R, D].
    leader: [B, R, D], the first continuation that agrees with this one so far.
    counts: [B, R, D], how many do, where this is the first; else 0.
  """

  tokens: Array
  leader: Array
  counts: Array


@dataclasses.dataclass(frozen=True)
class RetrievalDraft(Draft):
  """Guesses the continuations that occur most often; its parameters are a `Datastore`.

  A tree that changes takes the nodes of the trie that occur most, -1 where there are fewer; one of
  a fixed shape at each node the children that do, PAD_ID where there are fewer. Nothing is drawn.

  Attributes:
    tree: of any shape.
    max_context: tokens of the longest run that is looked for.
    num_matches: R, continuations that are looked at, of more as many in even steps.

  Raises:
    InputError: max_context and the depth of the tree are together more than REACH, or a node has
      more children than num_matches.
  """

  tree: AnyTree
  max_context: int = 8
  num_matches: int = 64

  def __post_init__(self):
    require_count("max_context", self.max_context)
    require_count("num_matches", self.num_matches)
    require_count("gamma", depth := self.tree.depth)
    if self.max_context + depth > REACH:
      raise InputError(
        f"max_context is {self.max_context} and the depth {depth}: a datastore is sorted by "
        f"{REACH} tokens, so that they may be {REACH} together."
      )
    if isinstance(self.tree, DynamicTree):
      most = -(-self.tree.num_guesses // depth)
    else:
      most = self.tree.width
    if most > self.num_matches:
      raise InputError(
        f"num_matches is {self.num_matches}; this tree needs {most} continuations or more."
      )

  def propose(
    self, params: Datastore, state: Any, context: Context, rng: Array
  ) -> tuple[Proposal, Any]:
    trie = self._trie(params, context)
    if isinstance(self.tree, DynamicTree):
      return _best(trie, self.tree), state
    return Proposal(_children(trie, self.tree)), state

  def _trie(self, store: Datastore, context: Context) -> _Trie:
    """What followed the longest run of newest tokens that occurs."""
    most, depth = self.max_context, self.tree.depth
    # A run of n tokens in row n - 1, those of no meaning behind it: [B, L, L].
    n, i = jnp.arange(1, most + 1)[:, None], jnp.arange(most)
    at = context.length[:, None, None] - n + i
    at = jnp.clip(at, 0, context.tokens.shape[1] - 1)
    runs = jax.vmap(lambda row, places: row[places])(context.tokens, at)
    low, high = _interval(store, runs, i < n)
    occurs = (high > low) & (n[:, 0] <= context.length[:, None])
    longest = most - 1 - occurs[:, ::-1].argmax(axis=1, keepdims=True)  # of none the first: no row
    low = jnp.take_along_axis(low, longest, axis=1)
    found = jnp.take_along_axis(jnp.where(occurs, high, low) - low, longest, axis=1)  # [B, 1]
    rank = jnp.arange(self.num_matches)
    real = rank < found
    # In even steps, by floats: their product could be more than an integer of 32 bits holds.
    step = jnp.maximum(1.0, found / self.num_matches)
    match = jnp.minimum(low + (rank * step).astype(jnp.int32), len(store.places) - 1)
    start = store.places[match] + longest + 1
    tokens = store.tokens[start[..., None] + jnp.arange(depth)]  # [B, R, D]
    before = jnp.pad(tokens, ((0, 0), (1, 0), (0, 0)), constant_values=-2)[:, :-1]
    first = real[..., None] & (jnp.cumsum(tokens != before, axis=2) > 0)
    leader = lax.cummax(jnp.where(first, rank[:, None], 0), axis=1)
    alike = (leader[:, :, None] == leader[:, None]) & real[:, None, :, None]
    return _Trie(tokens, leader, jnp.where(first & (tokens >= 0), alike.sum(axis=2), 0))


def _interval(store: Datastore, runs: Array, meant: Array) -> tuple[Array, Array]:
  """Bounds [B, L] of the places where runs [B, L, L] occur, as far as they are `meant` [L, L]."""
  past = jnp.array([False, True])  # the bound behind goes on over equal ones
  size = len(store.places)

  def halve(_, bounds):
    low, high = bounds  # [B, L, 2]
    middle = (low + high) // 2
    here = store.places[jnp.minimum(middle, size - 1)]
    seen = store.tokens[here[..., None] + jnp.arange(runs.shape[-1])]  # [B, L, 2, L]
    differs = (seen != runs[:, :, None]) & meant[:, None]
    at = differs.argmax(axis=-1)[..., None]
    wanted = jnp.take_along_axis(jnp.broadcast_to(runs[:, :, None], seen.shape), at, axis=-1)
    smaller = (jnp.take_along_axis(seen, at, axis=-1) < wanted)[..., 0]
    go_on = jnp.where(differs.any(axis=-1), smaller, past) & (low < high)
    return jnp.where(go_on, middle + 1, low), jnp.where(go_on, high, middle)

  shape = (*runs.shape[:2], 2)
  bounds = jnp.zeros(shape, jnp.int32), jnp.full(shape, size, jnp.int32)
  low, _ = lax.fori_loop(0, size.bit_length(), halve, bounds)
  return low[..., 0], low[..., 1]


def _best(trie: _Trie, tree: DynamicTree) -> Proposal:
  """The nodes that occur most, as a tree of their own shape."""
  batch, num_rows, depth = trie.counts.shape
  flat = lambda of_trie: of_trie.swapaxes(1, 2).reshape(batch, -1)  # level by level
  # A node occurs no more often than its parent, and of equals the first is taken.
  kept = jnp.sort(lax.top_k(flat(trie.counts), tree.num_guesses)[1], axis=1)  # [B, N]
  of_kept = lambda field: jnp.take_along_axis(flat(field), kept, axis=1)
  above = jnp.arange(-1, depth - 1) * num_rows  # where the level above begins
  parent = above + jnp.pad(trie.leader, ((0, 0), (0, 0), (1, 0)))[..., :depth]
  follows = 1 + jax.vmap(jnp.searchsorted)(kept, of_kept(parent))
  made = of_kept(trie.counts) > 0
  follows = jnp.where(made & (kept >= num_rows), follows, 0).astype(jnp.int32)
  tokens = jnp.where(made, of_kept(trie.tokens), -1)
  return Proposal(tokens, tree=dataclasses.replace(tree, parents=follows))


def _children(trie: _Trie, tree: Tree) -> Array:
  """Guesses [B, N]: of each node its children that occur most, the eldest most often."""
  batch, num_rows, _ = trie.counts.shape
  guesses, above = [], 0
  inside = jnp.ones((batch, 1, num_rows), bool)  # continuations through each node of a level
  for level, (first, end) in enumerate(tree.levels):
    parents = np.array(tree.parents[first - 1 : end - 1]) - above
    ranks = tree.ranks[first - 1 : end - 1]
    counts = jnp.where(inside, trie.counts[:, None, :, level], 0)  # [B, W, R]
    count, row = (found[:, parents, ranks] for found in lax.top_k(counts, int(ranks.max()) + 1))
    token = jnp.take_along_axis(trie.tokens[..., level], row, axis=1)
    guesses.append(jnp.where(count > 0, token, PAD_ID))
    inside = (trie.leader[:, None, :, level] == row[..., None]) & (count > 0)[..., None]
    above = first
  return jnp.concatenate(guesses, axis=1)
