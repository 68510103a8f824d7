"""Copying from the context as draft: no parameters, next to no cost (Section 3.6)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.core.trees import AnyTree, Tree, require_static
from specdec_jax.core.types import Context, Draft, DraftFactory, LoadedTarget, Proposal
from specdec_jax.errors import require_count
from specdec_jax.models.t5 import PAD_ID


def prompt_lookup(target: LoadedTarget, max_ngram: int = 3) -> DraftFactory:
  """What followed the latest tokens in the source, or earlier in the text; see `PromptLookupDraft`."""
  size = len(target.vocabulary)
  return DraftFactory(
    f"copy-{max_ngram}", lambda sampling, tree: PromptLookupDraft(size, tree, max_ngram)
  )


@dataclasses.dataclass(frozen=True)
class PromptLookupDraft(Draft):
  """Guesses that what followed the latest tokens elsewhere follows them here.

  The longest match of the newest tokens, at most `max_ngram` of them, is looked for in the source
  and in the text so far. Of matches of one length the source's come before the text's, and the
  latest before earlier ones. A match in the text goes on through its own guesses, so a repeating
  text is guessed to repeat. Where nothing matches, the source has ended, or an id is none of the
  target's, the guess is PAD_ID: a round costs the same whatever is guessed. Parameters: none, ().
  In a tree, children of the newest token begin the continuations of as many matches, best first,
  no two with the same token; behind each only the eldest is guessed, as in `branching(2, 1, 1)`.
  After a decoder-only model's prompt the source is in the text as well; nothing is lost by that
  but a guess of its EOS where the prompt's last tokens come again.

  Attributes:
    vocab_size: V.
    tree: of any one shape.
    max_ngram: tokens of a match that are looked for.

  Raises:
    InputError: the tree's shape changes, it has no guesses, or max_ngram is no whole number from 1.
  """

  vocab_size: int
  tree: AnyTree
  max_ngram: int = 3

  def __post_init__(self):
    require_count("gamma", require_static("copying from the context", self.tree).depth)
    require_count("max_ngram", self.max_ngram)

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    source, tokens, tree = context.prompt, context.tokens, require_static("copying", self.tree)
    depth = tree.depth
    num_slots, length = tokens.shape[1], context.length[:, None]

    def matched(text: Array) -> Array:
      """How many of the newest tokens end at each position of text [B, N], up to max_ngram."""
      count, so_far = jnp.zeros(text.shape, jnp.int32), True
      for n in range(self.max_ngram):
        earlier = jnp.pad(text, ((0, 0), (n, 0)), constant_values=-1)[:, : text.shape[1]]
        newest = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - n, 0), axis=1)
        so_far &= (earlier == newest) & (n < length)
        count += so_far
      return count

    # A match counts if something follows it. One score ranks by length first, then by place.
    follows = jnp.pad(source, ((0, 0), (0, 1)))[:, 1:] != PAD_ID
    counts = [
      jnp.where(jnp.arange(num_slots) < length - 1, matched(tokens), 0),
      jnp.where(follows, matched(source), 0),
    ]
    score = jnp.concatenate(counts, axis=1)
    size = score.shape[1]
    both = jnp.pad(jnp.concatenate([tokens, source], axis=1), ((0, 0), (0, depth)))
    branches: list[Array] = []
    copied = tokens
    for _ in range(tree.levels[0][1] - 1):  # children of the newest token
      if branches:  # another beginning than that of the branch before
        score = jnp.where(both[:, 1 : size + 1] == copied[:, :1], 0, score)
      best = (score * size + jnp.arange(size)).max(axis=1, keepdims=True)
      found, at = best >= size, best % size
      # What follows in the text ends at its newest token, and begins again after the match.
      period = jnp.where(at < num_slots, length - 1 - at, depth)
      copied = jnp.take_along_axis(both, at + 1 + jnp.arange(depth) % period, axis=1)
      branches.append(jnp.where(found & (copied < self.vocab_size), copied, PAD_ID))
    if tree.is_chain:
      return Proposal(branches[0]), state
    of_branch = _branches(tree)
    at_depth = jnp.stack(branches, axis=1)[:, np.maximum(of_branch, 0), tree.depths[1:] - 1]
    return Proposal(jnp.where(of_branch < 0, PAD_ID, at_depth)), state


def _branches(tree: Tree) -> np.ndarray:
  """For each guess [N] the child of the newest token that it follows as eldest, or -1."""
  found: list[int] = []
  for parent, rank in zip(tree.parents, tree.ranks.tolist()):
    found.append(rank if parent == 0 else found[parent - 1] if rank == 0 else -1)
  return np.array(found)
