"""Checks at temperature 0 of which the outcome is known: the target as its own draft.

Its tokens are put on one path of each round's tree, with other tokens next to that path, and the
whole path must be accepted.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree, chain
from specdec_jax.core.types import Context, Outcome, Proposal
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.pairs import Pair


class Plans(NamedTuple):
  """P ways to put a text on a path of a tree, for its N guesses of depth D at most.

  Attributes:
    parents: [P, N], of each guess.
    depths: [P, N], of each guess, from 1.
    offsets: [P, N], what is added to the token of the text at that depth: 0 on the path.
    paths: [P, L, D], nodes from the root to each leaf, the leaf of the path first; 0 past a leaf,
      and all 0 where a shape has fewer leaves.
    lengths: [P], guesses on the path.
  """

  parents: np.ndarray
  depths: np.ndarray
  offsets: np.ndarray
  paths: np.ndarray
  lengths: np.ndarray

  def tokens(self, plan: Array, text: Array, vocab_size: int) -> Array:
    """Guesses [B, N] by the plan [B] of each row, given the tokens [B, D] of the text."""
    of_text = jnp.take_along_axis(text, jnp.asarray(self.depths - 1)[plan], axis=1)
    return (of_text + jnp.asarray(self.offsets)[plan]) % vocab_size

  def shape(self, plan: Array, tree: AnyTree) -> AnyTree:
    """The tree in which these guesses lie."""
    if isinstance(tree, Tree):
      return tree
    return dataclasses.replace(tree, parents=jnp.asarray(self.parents)[plan])


@functools.cache
def plans_of(tree: AnyTree) -> Plans:
  """A plan for each leaf of a tree; of a dynamic tree, for each leaf of some of its shapes."""
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
  """Nodes without children."""
  return np.setdiff1d(np.arange(tree.num_nodes), tree.parents).tolist()


def shapes_of(tree: DynamicTree, count: int = 3) -> list[Tree]:
  """Some shapes of a dynamic tree: a longest path with other guesses added at random."""
  shapes = []
  for seed in range(count):
    rng = np.random.default_rng(seed)
    depth = min(tree.depth, tree.num_guesses)
    nodes = [tuple([0] * length) for length in range(depth + 1)]  # as paths of ranks
    while len(nodes) <= tree.num_guesses:
      parent = nodes[rng.integers(len(nodes))]
      if len(parent) < tree.depth:
        rank = sum(node[:-1] == parent for node in nodes if node)
        nodes.append((*parent, rank))
    nodes.sort(key=lambda node: (len(node), node))
    shapes.append(Tree(tuple(nodes.index(node[:-1]) for node in nodes[1:])))
  return shapes


@dataclasses.dataclass(frozen=True)
class PathDraft(ModelDraft):
  """The next tokens of its model on one path of the tree, by another plan in each round and row.

  At temperature 0, with the target as its model, the whole path is accepted.
  """

  def init(self, params: Any, context: Context, hidden: Array) -> Any:
    return super().init(params, context, hidden), jnp.arange(len(context.tokens))

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    (cache, plan), plans = state, plans_of(self.tree)
    own = ModelDraft(self.model, self.sampling, chain(self.tree.depth))
    (text, *_), cache = own.propose(params, cache, context, rng)
    tokens = plans.tokens(plan, text, self.model.vocab_size)
    shape = plans.shape(plan, self.tree)
    dynamic = shape if isinstance(shape, DynamicTree) else None
    return Proposal(tokens, tree=dynamic), (cache, (plan + 1) % len(plans.lengths))

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    return state


def rounds_of_self_draft(
  pair: Pair,
  texts: Sequence[str],
  tree: AnyTree,
  batch_size: int,
  max_new_tokens: int,
  by_paths: bool = False,
) -> tuple[int, int]:
  """Rounds that argmax takes with the target as its own draft, and the fewest possible.

  Every round must accept the path of first children to its end, gamma tokens of a chain; what
  breaks this (a lost bonus token, a draft that falls a token behind) costs speed, and need not show
  in the output. With `by_paths` the target's tokens lie on the path to each leaf in turn
  (`PathDraft`), so that later siblings are accepted too.
  """
  itself = functools.partial(PathDraft if by_paths else ModelDraft, pair.target)
  own = pair._replace(draft=itself, draft_params=pair.target_params)
  decode = own.decode_fn(Sampling(temperature=0.0), tree)
  if by_paths:
    lengths = plans_of(tree).lengths
  else:
    assert isinstance(tree, Tree)
    first = [of_node[1:] @ tree.ranks == 0 for of_node in tree.ancestors]
    lengths = tree.depths[np.flatnonzero(first)[-1:]]
  # Cumulative number of tokens that the rounds of a row can emit.
  most = lambda row: np.cumsum(np.resize(np.roll(lengths, -row) + 1, max_new_tokens))
  rounds = fewest = 0
  for rows, prompt, count in batches(pair, texts, batch_size):
    decoded = decode(prompt, row_keys(0, rows[0], batch_size), max_new_tokens=max_new_tokens)
    rounds += int((decoded.rounds.num_emitted[:, :count] > 0).sum())
    fewest += sum(
      1 + int(np.searchsorted(most(row % len(lengths)), length))
      for row, length in enumerate(np.asarray(decoded.lengths)[:count].tolist())
    )
  return rounds, fewest


def batches(
  pair: Pair, texts: Sequence[str], batch_size: int
) -> Iterator[tuple[np.ndarray, Array, int]]:
  """Numbers of texts [B], their prompts [B, S], and how many of them are new.

  The last batch is filled up with the first texts. All are as wide as the widest text, so each
  program is compiled once.
  """
  prompts = pair.prompt(texts)
  for at in range(0, len(texts), batch_size):
    rows = np.arange(at, at + batch_size)
    yield rows, prompts[rows % len(prompts)], int((rows < len(prompts)).sum())
