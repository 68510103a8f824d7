"""Retrieval from a datastore of the task's texts (REST; He et al., 2024).

The datastore is a suffix array: all places (token positions) in the texts, sorted by the token
sequences that start there. Occurrences of the same tokens are therefore adjacent, and among them so
are occurrences with the same continuation. The longest suffix of the committed tokens that occurs
in the datastore is found by bisection, inside the compiled loop. Its continuations form a trie,
whose nodes are weighted by their frequency.
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
from jaxtyping import Bool, Int

from specdec_jax.core.arrays import gather, gather_token
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree
from specdec_jax.core.types import FILLER, Draft, DraftOptions, DraftSpec, Keys, Loaded, Proposal
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import PAD_ID, Vocabulary
from specdec_jax.errors import InputError, require_count

REACH = 32  # number of tokens by which places are sorted


class Datastore(NamedTuple):
  """Suffix array of texts, each with its start token.

  A datastore with room for more texts has unused tokens, which are -1. Their places come first.

  Attributes:
    tokens: the tokens of all texts, padded to M tokens with -1, and then REACH entries of -1.
    places: all M places, sorted by the REACH tokens that start at each place.
  """

  tokens: Int[Array, " M_plus_reach"]
  places: Int[Array, " M"]


def retrieval(
  target: Loaded,
  target_text: str | None,
  max_context: int = 8,
  num_matches: int = 64,
  tokens_per_match: int | None = None,
  capacity: int | None = None,
) -> DraftSpec:
  """Return a draft that retrieves from a text file, which has one output of the task per line.

  Without a capacity, the datastore is cached in JAX's compilation cache directory, if enabled.

  Args:
    target_text: the text file; None for an empty datastore, which needs a capacity.
    max_context: maximum number of tokens of the suffix that is looked up.
    num_matches: maximum number of continuations in the trie.
    tokens_per_match: maximum length of a continuation per token of the suffix; None for no limit.
    capacity: number of tokens that the datastore has room for; see `build_datastore`.
  """
  vocabulary = target.vocabulary
  if target_text is not None and capacity is None:
    store = cached_datastore(vocabulary, target_text)
  else:
    lines = [] if target_text is None else read_lines(target_text)
    store = build_datastore(map(vocabulary.encode_output, lines), vocabulary.start_id, capacity)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> RetrievalDraft:
    return RetrievalDraft(tree, max_context, num_matches, tokens_per_match)

  limit = "" if tokens_per_match is None else f" x{tokens_per_match}"
  return DraftSpec(f"retrieval{limit}", build, store)


def cached_datastore(vocabulary: Vocabulary, path: str) -> Datastore:
  """Return the datastore of a text file, from the cache if JAX's compilation cache is enabled."""
  lines = read_lines(path)
  cache = getattr(jax.config, "jax_compilation_cache_dir", None)
  contents = "\n".join([str(REACH), vocabulary.fingerprint(), *lines])
  name = hashlib.sha256(contents.encode()).hexdigest()[:16]
  cached_path = pathlib.Path(cache or "") / "datastores" / f"{name}.npz"
  if cache:
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
      with np.load(cached_path) as arrays:
        found = Datastore(*(arrays[name] for name in Datastore._fields))
        if {(x.dtype, x.ndim) for x in found} != {(np.dtype(np.int32), 1)}:
          raise ValueError("not a datastore")
        if len(found.tokens) == len(found.places) + REACH:
          return Datastore(*map(jnp.asarray, found))
  store = build_datastore(map(vocabulary.encode_output, lines), vocabulary.start_id)
  if cache:
    with contextlib.suppress(OSError):  # it is not cached, and the next run builds it again
      cached_path.parent.mkdir(parents=True, exist_ok=True)
      with atomic_write(cached_path, "wb") as file:
        np.savez(file, **store._asdict())
  return store


def build_datastore(
  rows: Iterable[Sequence[int]], start_id: int = PAD_ID, capacity: int | None = None
) -> Datastore:
  """Build the datastore of texts, given as token ids with EOS and without a start token.

  `capacity` is M, the number of tokens that there is room for, by default that of the texts. Only
  the last M tokens are kept.
  """
  if capacity is not None:
    require_count("capacity", capacity)
  text = _joined(rows, start_id)
  return _sorted_places(text, len(text) if capacity is None else capacity)


def with_texts(
  store: Datastore, rows: Iterable[Sequence[int]], start_id: int = PAD_ID
) -> Datastore:
  """Return a datastore of the same capacity that also has other texts; see `build_datastore`.

  Its arrays have the shapes of `store`, so it needs no new compilation. If there is not enough room
  for all tokens, the first ones are dropped. All tokens are sorted again, on the host.
  """
  tokens = np.asarray(store.tokens)
  text = np.concatenate([tokens[tokens >= 0], _joined(rows, start_id)])
  return _sorted_places(text, len(store.places))


def _joined(rows: Iterable[Sequence[int]], start_id: int) -> np.ndarray:
  return np.concatenate([[], *([start_id, *row] for row in rows)]).astype(np.int32)


def _sorted_places(text: np.ndarray, capacity: int) -> Datastore:
  if not capacity:
    raise InputError("The rows to look up hold no tokens.")
  text = text[-capacity:]
  unused = np.arange(len(text), capacity)
  tokens = np.concatenate([text, np.full(len(unused) + REACH, -1, np.int32)])
  order = np.lexsort([tokens[i : i + len(text)] for i in reversed(range(REACH))])
  places = np.concatenate([unused, order])  # unused tokens are less than all others
  return Datastore(jnp.asarray(tokens), jnp.asarray(places, jnp.int32))


class _Trie(NamedTuple):
  """Trie of continuations, which are in sorted order.

  Attributes:
    leader: for each token, index of the first continuation that is equal up to and including that
      token. It represents the node of the trie.
    counts: number of continuations that pass through a node, at its leader; 0 elsewhere.
  """

  tokens: Int[Array, "B matches D"]
  leader: Int[Array, "B matches D"]
  counts: Int[Array, "B matches D"]


@dataclasses.dataclass(frozen=True)
class RetrievalDraft(Draft):
  """A draft that proposes the most frequent continuations in a datastore.

  Its parameters are a `Datastore`. The continuations form a trie. A dynamic tree consists of the
  most frequent nodes of the trie; missing tokens are -1. In a static tree, each node has its most
  frequent children; missing tokens are FILLER. All tokens are selected deterministically.

  Attributes:
    max_context: maximum number of tokens of the suffix that is looked up. The sum of it and the
      depth of the tree is at most REACH.
    num_matches: maximum number of continuations that form the trie. If there are more, they are
      subsampled at even intervals.
    tokens_per_match: maximum length of a continuation per token of the suffix, so that a longer
      match is continued for longer (SuffixDecoding; Oliaro et al., 2024); None for no limit.
  """

  tree: AnyTree
  max_context: int = 8
  num_matches: int = 64
  tokens_per_match: int | None = None

  def __post_init__(self):
    require_count("max_context", self.max_context)
    require_count("num_matches", self.num_matches)
    if self.tokens_per_match is not None:
      require_count("tokens_per_match", self.tokens_per_match)
    require_count("gamma", depth := self.tree.depth)
    if self.max_context + depth > REACH:
      raise InputError(
        f"max_context is {self.max_context} and the depth {depth}: a datastore is sorted by "
        f"{REACH} tokens, so that they may be {REACH} together."
      )
    if isinstance(self.tree, DynamicTree):
      most = -(-self.tree.num_draft_tokens // depth)
    else:
      most = self.tree.width
    if most > self.num_matches:
      raise InputError(
        f"num_matches is {self.num_matches}; this tree needs {most} continuations or more."
      )

  def propose(
    self, params: Datastore, state: Any, context: Context, rng: Keys
  ) -> tuple[Proposal, Any]:
    trie = self._trie(params, context)
    if isinstance(self.tree, DynamicTree):
      return _most_frequent_nodes(trie, self.tree), state
    return Proposal(_most_frequent_children(trie, self.tree)), state

  def _trie(self, store: Datastore, context: Context) -> _Trie:
    """Return the trie of the continuations of the longest suffix that occurs in the datastore."""
    most, depth = self.max_context, self.tree.depth
    # Row n - 1 of `suffixes` [B, most, most] holds the last n tokens, and then arbitrary tokens.
    n, i = jnp.arange(1, most + 1)[None, :, None], jnp.arange(most)[None, None]
    slots = context.length[:, None, None] - n + i
    slots = jnp.clip(slots, 0, context.tokens.shape[1] - 1)
    suffixes = jax.vmap(lambda row, slots: row[slots])(context.tokens, slots)
    low, high = _interval(store, suffixes, i < n)
    occurs = (high > low) & (n[:, :, 0] <= context.length[:, None])
    # Index of the longest suffix that occurs. If no suffix occurs, it is the index of the longest
    # suffix, which has no match.
    longest = most - 1 - occurs[:, ::-1].argmax(axis=1, keepdims=True)
    low = gather(low, longest)
    num_found = gather(jnp.where(occurs, high, low) - low, longest)  # [B, 1]
    rank = jnp.arange(self.num_matches)[None]
    is_match = rank < num_found
    # The steps are floats, because the product of integers could exceed 32 bits.
    step = jnp.maximum(1.0, num_found / self.num_matches)
    match = jnp.minimum(low + (rank * step).astype(jnp.int32), len(store.places) - 1)
    start = store.places[match] + longest + 1
    tokens = store.tokens[start[..., None] + jnp.arange(depth)[None, None]]  # [B, matches, D]
    if self.tokens_per_match is not None:
      is_within = jnp.arange(depth)[None] < self.tokens_per_match * (longest + 1)  # [B, D]
      tokens = jnp.where(is_within[:, None], tokens, -1)
    # A continuation is a leader from its first token that differs from the previous continuation.
    before = jnp.pad(tokens, ((0, 0), (1, 0), (0, 0)), constant_values=-2)[:, :-1]
    is_leader = is_match[..., None] & (jnp.cumsum(tokens != before, axis=2) > 0)
    leader = lax.cummax(jnp.where(is_leader, rank[..., None], 0), axis=1)
    same_node = (leader[:, :, None] == leader[:, None]) & is_match[:, None, :, None]
    counts = jnp.where(is_leader & (tokens >= 0), same_node.sum(axis=2), 0)
    return _Trie(tokens, leader, counts)


def _interval(
  store: Datastore, suffixes: Int[Array, "B most most"], is_token: Bool[Array, "1 most most"]
) -> tuple[Int[Array, "B most"], Int[Array, "B most"]]:
  """Return, by bisection, the interval [low, high) of `store.places` in which each suffix occurs.

  Row n - 1 of `suffixes` holds the last n tokens, where `is_token` is True.
  """
  passes_equal = jnp.array([False, True])  # the upper bound is past the places that are equal
  size, i = len(store.places), jnp.arange(suffixes.shape[-1])[None, None, None]

  def halve(_, bounds):
    low, high = bounds  # [B, most, 2]
    middle = (low + high) // 2
    place = store.places[jnp.minimum(middle, size - 1)]
    tokens = store.tokens[place[..., None] + i]  # [B, most, 2, most]
    differs = (tokens != suffixes[:, :, None]) & is_token[:, :, None]
    first = differs.argmax(axis=-1)
    wanted = gather_token(jnp.broadcast_to(suffixes[:, :, None], tokens.shape), first)
    is_smaller = gather_token(tokens, first) < wanted
    continues = jnp.where(differs.any(axis=-1), is_smaller, passes_equal) & (low < high)
    return jnp.where(continues, middle + 1, low), jnp.where(continues, high, middle)

  shape = (*suffixes.shape[:2], 2)
  bounds = jnp.zeros(shape, jnp.int32), jnp.full(shape, size, jnp.int32)
  low, _ = lax.fori_loop(0, size.bit_length(), halve, bounds)
  return low[..., 0], low[..., 1]


def _most_frequent_nodes(trie: _Trie, tree: DynamicTree) -> Proposal:
  batch, num_matches, depth = trie.counts.shape

  def by_level(field: Int[Array, "B matches D"]) -> Int[Array, "B nodes"]:
    return field.swapaxes(1, 2).reshape(batch, -1)

  # A node is at most as frequent as its parent, and `top_k` takes the first of equal counts.
  # Therefore the parents of selected nodes are selected too.
  selected = jnp.sort(lax.top_k(by_level(trie.counts), tree.num_draft_tokens)[1], axis=1)  # [B, N]
  # First index of the level of the parent.
  parent_level = jnp.arange(-1, depth - 1)[None, None] * num_matches
  parents = parent_level + jnp.pad(trie.leader, ((0, 0), (0, 0), (1, 0)))[..., :depth]
  parent_nodes = 1 + jax.vmap(jnp.searchsorted)(selected, gather(by_level(parents), selected))
  exists = gather(by_level(trie.counts), selected) > 0
  parent_nodes = jnp.where(exists & (selected >= num_matches), parent_nodes, 0).astype(jnp.int32)
  tokens = jnp.where(exists, gather(by_level(trie.tokens), selected), -1)
  return Proposal(tokens, tree=dataclasses.replace(tree, parents=parent_nodes))


def _most_frequent_children(trie: _Trie, tree: Tree) -> Int[Array, "B N"]:
  batch, num_matches, _ = trie.counts.shape
  draft_tokens, parent_level = [], 0
  through_node = jnp.ones((batch, 1, num_matches), bool)  # for each node of a level
  for level, (first, end) in enumerate(tree.levels):
    parents = np.array(tree.parents[first - 1 : end - 1]) - parent_level
    ranks = tree.ranks[first - 1 : end - 1]
    counts = jnp.where(through_node, trie.counts[:, None, :, level], 0)  # [B, W, matches]
    best = lax.top_k(counts, int(ranks.max()) + 1)
    count, match = (field[:, parents, ranks] for field in best)
    token = gather(trie.tokens[..., level], match)
    draft_tokens.append(jnp.where(count > 0, token, FILLER))
    through_node = (trie.leader[:, None, :, level] == match[..., None]) & (count > 0)[..., None]
    parent_level = first
  return jnp.concatenate(draft_tokens, axis=1)
