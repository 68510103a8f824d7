"""Prompt lookup: draft tokens copied from the context, at negligible cost (Section 3.6)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from specdec_jax.core.arrays import gather
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, Tree, require_static
from specdec_jax.core.types import FILLER, Draft, DraftOptions, DraftSpec, Keys, Loaded, Proposal
from specdec_jax.data.vocabulary import PAD_ID
from specdec_jax.errors import require_count


def prompt_lookup(
  target: Loaded,
  max_ngram: int = 3,
  tokens_per_match: int | None = None,
  from_start: bool = False,
) -> DraftSpec:
  """Return a draft that uses prompt lookup; see `PromptLookupDraft`."""
  vocab_size = len(target.vocabulary)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> PromptLookupDraft:
    return PromptLookupDraft(vocab_size, tree, max_ngram, tokens_per_match, from_start)

  limit = "" if tokens_per_match is None else f"x{tokens_per_match}"
  start = " from start" if from_start else ""
  return DraftSpec(f"copy-{max_ngram}{limit}{start}", build)


@dataclasses.dataclass(frozen=True)
class PromptLookupDraft(Draft):
  """A draft that proposes the tokens after an earlier occurrence of the last committed tokens.

  It searches the prompt and the text so far for the longest match of the last committed tokens. A
  match has at most `max_ngram` tokens. Among matches of equal length, matches in the prompt are
  preferred to matches in the text, and later matches to earlier ones. If the continuation of a
  match reaches the end of the text, it starts again after the match, so that a repeating pattern is
  extended.

  In a tree, each child of the last committed token starts the continuation of a different match,
  best match first, and the children are distinct tokens. Below them, tokens are proposed only for
  first children, so `branching(2, 1, 1)` is a suitable tree.

  All tokens are selected deterministically. A draft token is FILLER where there is no match, where
  the prompt has ended, and where the copied token is not in the target's vocabulary. There are no
  parameters. For a decoder-only model, the text includes the prompt, which is thus searched twice.
  The copy that ends with EOS is preferred, so the EOS of the prompt may be proposed if the last
  tokens of the prompt occur again.

  Attributes:
    max_ngram: maximum number of tokens of a match.
    tokens_per_match: maximum number of draft tokens per token of the match, so that a longer match
      is continued for longer (SuffixDecoding; Oliaro et al., 2024); None for no limit.
    from_start: whether the first round proposes the first tokens of the prompt, for an
      encoder-decoder whose output resembles its source (aggressive decoding; Sun et al., 2021).
  """

  vocab_size: int
  tree: AnyTree
  max_ngram: int = 3
  tokens_per_match: int | None = None
  from_start: bool = False

  def __post_init__(self):
    require_count("gamma", require_static("copying from the context", self.tree).depth)
    require_count("max_ngram", self.max_ngram)
    if self.tokens_per_match is not None:
      require_count("tokens_per_match", self.tokens_per_match)

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    source, tokens, tree = context.prompt, context.tokens, require_static("copying", self.tree)
    depth = tree.depth
    num_slots, length = tokens.shape[1], context.length[:, None]

    def match_length(text: Int[Array, "B T"]) -> Int[Array, "B T"]:
      """Return the length, up to `max_ngram`, of the longest suffix that ends at each position."""
      count, is_match = jnp.zeros(text.shape, jnp.int32), True
      for n in range(self.max_ngram):
        earlier = jnp.pad(text, ((0, 0), (n, 0)), constant_values=-1)[:, : text.shape[1]]
        last = gather(tokens, jnp.maximum(length - 1 - n, 0))
        is_match &= (earlier == last) & (n < length)
        count += is_match
      return count

    # A match needs a token after it. The score orders matches by length, then by position.
    has_successor = jnp.pad(source, ((0, 0), (0, 1)))[:, 1:] != PAD_ID
    counts = [
      jnp.where(jnp.arange(num_slots)[None] < length - 1, match_length(tokens), 0),
      jnp.where(has_successor, match_length(source), 0),
    ]
    score = jnp.concatenate(counts, axis=1)
    if self.from_start:  # a match before the prompt, while there is only the start token
      score = score.at[:, num_slots - 1].set(self.max_ngram * (context.length == 1))
    size = score.shape[1]
    both = jnp.pad(jnp.concatenate([tokens, source], axis=1), ((0, 0), (0, depth)))
    branches: list[Array] = []
    copied = tokens
    for _ in range(tree.levels[0][1] - 1):  # children of the last committed token
      if branches:  # drop matches with the same first token as the previous branch
        score = jnp.where(both[:, 1 : size + 1] == copied[:, :1], 0, score)
      best = (score * size + jnp.arange(size)[None]).max(axis=1, keepdims=True)
      match_tokens, match = best // size, best % size
      # A continuation in the text ends at the last token, and then starts again after the match.
      period = jnp.where(match < num_slots - 1, length - 1 - match, depth)
      copied = gather(both, match + 1 + jnp.arange(depth)[None] % period)
      per_match = self.tokens_per_match or depth
      is_copied = jnp.arange(depth)[None] < per_match * match_tokens
      branches.append(jnp.where(is_copied & (copied < self.vocab_size), copied, FILLER))
    if tree.is_chain:
      return Proposal(branches[0]), state
    branch = _branch_of_draft_token(tree)
    tokens = jnp.stack(branches, axis=1)[:, np.maximum(branch, 0), tree.depths[1:] - 1]
    return Proposal(jnp.where(branch < 0, FILLER, tokens)), state


def _branch_of_draft_token(tree: Tree) -> np.ndarray:
  """Return the rank of the root's child whose first children lead to each draft token, or -1."""
  branches: list[int] = []
  for parent, rank in zip(tree.parents, tree.ranks.tolist()):
    branches.append(rank if parent == 0 else branches[parent - 1] if rank == 0 else -1)
  return np.array(branches)
