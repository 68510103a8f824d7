"""Token Recycling: a table of the most probable tokens after each token (Luo et al., 2025).

The table has, for each token, the target's most probable tokens where it was last processed.
Draft tokens are read from it level by level, so a draft costs one gather per level and no model.
Every verified node updates the table, also those that were rejected (arXiv 2408.08696).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, Tree, chain, require_static
from specdec_jax.core.types import (
  FILLER,
  Draft,
  DraftOptions,
  DraftSpec,
  Keys,
  Loaded,
  Outcome,
  Proposal,
)
from specdec_jax.data.text import read_lines
from specdec_jax.drafts.ngram import fit_ngrams
from specdec_jax.drafts.prompt_lookup import PromptLookupDraft
from specdec_jax.errors import require_count


def token_recycling(
  target: Loaded,
  target_text: str | None = None,
  num_successors: int = 8,
  max_ngram: int | None = None,
) -> DraftSpec:
  """Return a draft that uses Token Recycling; see `TokenRecyclingDraft`.

  Args:
    target_text: file with one output of the task per line, whose most frequent successors of each
      token are the table at the start of a text; None for an empty table.
    num_successors: number of tokens in the table for each token.
    max_ngram: maximum number of tokens of a match in the prompt and the text, whose continuation is
      proposed before tokens of the table (RACER; 2026); None for the table alone.
  """
  vocabulary = target.vocabulary
  require_count("num_successors", num_successors)
  table = jnp.full((len(vocabulary), num_successors), FILLER, jnp.int32)
  if target_text is not None:
    rows = map(vocabulary.encode_output, read_lines(target_text))
    ngrams = fit_ngrams(rows, len(vocabulary), num_successors, vocabulary.start_id)
    table = jnp.where(ngrams.counts > 0, ngrams.successors, FILLER)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> TokenRecyclingDraft:
    tree = require_static("Token Recycling", tree)
    history = max_ngram and PromptLookupDraft(len(vocabulary), chain(tree.depth), max_ngram)
    return TokenRecyclingDraft(tree, num_successors, history or None)

  name = "token recycling" if max_ngram is None else f"copy-{max_ngram}, token recycling"
  return DraftSpec(name, build, table)


class TokenRecyclingState(NamedTuple):
  """The table, and the last committed token, which is node 0 of the last proposal."""

  table: Int[Array, "B V successors"]
  last_token: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class TokenRecyclingDraft(Draft):
  """A draft that proposes the tokens of a table that the target's logits fill.

  The child of rank r of a node is entry r of the table for the token of the node. All tokens are
  selected deterministically; a token that the table does not have is FILLER. The parameters are
  the table [V, successors] at the start of a text.

  Attributes:
    history: draft whose chain precedes the table: its tokens are the first children, from the last
      committed token on.
  """

  tree: Tree
  num_successors: int = 8
  history: PromptLookupDraft | None = None
  depends_on_outcomes = True

  def __post_init__(self):
    require_count("gamma", self.tree.depth)
    require_count("num_successors", self.num_successors, self.tree.width)

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    table = jnp.broadcast_to(params, (len(context.tokens), *params.shape))
    return TokenRecyclingState(table, context.last_token)

  def propose(
    self, params: Any, state: TokenRecyclingState, context: Context, rng: Keys
  ) -> tuple[Proposal, TokenRecyclingState]:
    tree, nodes = self.tree, context.last_token[:, None]  # tokens of the nodes so far
    copied = jnp.full((len(nodes), tree.depth), FILLER, jnp.int32)
    if self.history is not None:
      copied = self.history.propose((), (), context, rng)[0].tokens
    first_child = 0  # node on the path of first children
    for level, (first, end) in enumerate(tree.levels):
      parents, ranks = np.array(tree.parents[first - 1 : end - 1]), tree.ranks[first - 1 : end - 1]
      successors = gather(state.table, nodes[:, parents])  # [B, W, successors]
      token = copied[:, level, None, None]
      is_copied = (parents == first_child)[None, :, None] & (token != FILLER)
      successors = jnp.where(is_copied, _with_first(token, successors), successors)
      tokens = jnp.take_along_axis(successors, jnp.asarray(ranks)[None, :, None], axis=2)[..., 0]
      nodes = jnp.concatenate([nodes, tokens], axis=1)
      first_child = next(iter(first + np.flatnonzero((parents == first_child) & (ranks == 0))), -1)
    return Proposal(nodes[:, 1:]), state._replace(last_token=context.last_token)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> TokenRecyclingState:
    nodes = jnp.concatenate([state.last_token[:, None], outcome.proposal.tokens], axis=1)
    successors = lax.top_k(outcome.logits, self.num_successors)[1]
    # Of equal tokens, the last node counts; the others are written past the table, and dropped.
    is_later = np.tri(nodes.shape[1], k=-1, dtype=bool).T[None]
    is_repeated = ((nodes[:, :, None] == nodes[:, None]) & is_later).any(axis=-1)
    slots = jnp.where(is_repeated | (nodes < 0), state.table.shape[1], nodes)
    write = jax.vmap(lambda table, slots, new: table.at[slots].set(new, mode="drop"))
    return state._replace(table=write(state.table, slots, successors))


def _with_first(
  token: Int[Array, "B 1 1"], successors: Int[Array, "B W successors"]
) -> Int[Array, "B W successors"]:
  """Return the successors with a token in front, from where another occurrence is removed."""
  first = jnp.broadcast_to(token, successors[..., :1].shape)
  shifted = jnp.concatenate([first, successors[..., :-1]], axis=2)
  occurs = successors == token
  return jnp.where(jnp.cumsum(occurs, axis=2) > occurs, successors, shifted)
