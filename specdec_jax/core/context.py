"""Committed tokens of a batch between two rounds, and the texts that end at the nodes of a block.

Axis letters are those of `core.types`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.arrays import Keys, gather, gather_one, place_tokens
from specdec_jax.core.trees import AnyTree, chain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
  """Prompts of a model whose sources are not texts, such as Whisper: encoded sources.

  An index selects rows, as in an array of prompts, and `shape` is [B, C].

  Attributes:
    source: outputs of the target's encoder.
    tokens: tokens that the texts begin with, padded at the end.
    length: number of these tokens.
    draft_source: outputs of the encoder of a draft that has its own.
  """

  source: Float[Array, "B S E"]
  tokens: Int[Array, "B C"]
  length: Int[Array, " B"]
  draft_source: Float[Array, "B S F"] | None = None

  def __len__(self) -> int:
    return len(self.tokens)

  @property
  def shape(self) -> tuple[int, ...]:
    return self.tokens.shape

  def __getitem__(self, rows: Any) -> "Encoded":
    return jax.tree.map(lambda x: x[rows], self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptWithDraft:
  """Prompts, and for each a text that its output may have (`drafts.given`).

  An index selects rows, as in an array of prompts, and `shape` is that of the prompts.

  Attributes:
    prompt: array of prompts, or `Encoded` prompts.
    draft: tokens of the texts, padded at the end.
    draft_length: number of these tokens; 0 for a prompt without a text.
  """

  prompt: Any
  draft: Int[Array, "B G"]
  draft_length: Int[Array, " B"]

  def __len__(self) -> int:
    return len(self.prompt)

  @property
  def shape(self) -> tuple[int, ...]:
    return self.prompt.shape

  def __getitem__(self, rows: Any) -> "PromptWithDraft":
    return PromptWithDraft(self.prompt[rows], self.draft[rows], self.draft_length[rows])


Prompt = Any  # Int[Array, "B P"], Encoded, or PromptWithDraft


def without_draft(prompt: Prompt) -> Prompt:
  """Return prompts as models have them."""
  return prompt.prompt if isinstance(prompt, PromptWithDraft) else prompt


def cut_sources(prompt: Prompt, width: int | None) -> Prompt:
  """Return prompts whose sources have at most `width` tokens; None for all."""
  if width is None:
    return prompt
  if isinstance(prompt, PromptWithDraft):
    return dataclasses.replace(prompt, prompt=prompt.prompt[:, :width])
  return prompt[:, :width]


def prompt_ids(prompt: Prompt) -> Int[Array, "B P"]:
  """Return the tokens of prompts, which are all that drafts and processors see in a round."""
  prompt = without_draft(prompt)
  return prompt.tokens if isinstance(prompt, Encoded) else prompt


class Context(NamedTuple):
  """Inputs of a draft.

  Attributes:
    prompt: padded prompts (`prompt_ids`). When the draft is initialized, they may also be `Encoded`
      or a `PromptWithDraft`.
    tokens: committed tokens; slots from `length` on are unused.
    length: number of committed tokens of each row.
    target_cache: cache of the target, which holds length - 1 tokens.
    hidden: hidden state of the target at the second to last committed token, from which the last
      one is predicted; 0 if only one is committed, as before the first round of an encoder-decoder.
    prompt_length: number of tokens before the first generated one, including forced tokens.
    limit: maximum length of each row. Logits processors use it and `prompt_length`.
    rng: key of each row, from which `core.sampling.position_keys` derives those of its positions.
  """

  prompt: Any
  tokens: Int[Array, "B T"]
  length: Int[Array, " B"]
  target_cache: Any
  hidden: Float[Array, "B E"]
  prompt_length: Int[Array, " B"] | None = None
  limit: Int[Array, " B"] | None = None
  rng: Keys | None = None

  @property
  def last_token(self) -> Int[Array, " B"]:
    """The last committed token of each row."""
    return gather_one(self.tokens, self.length - 1)

  def with_tokens(self, tokens: Int[Array, "B N"]) -> "Context":
    """Return the context with more tokens, as if they were committed."""
    placed = place_tokens(self.tokens, tokens, self.length, tokens.shape[1])
    return self._replace(tokens=placed, length=self.length + tokens.shape[1])


class Prefixes(NamedTuple):
  """Texts that end at the nodes of a block.

  Attributes:
    tokens: the text of each node, followed by zeros. For T5 it begins with the start token.
    length: number of tokens of each text.
    prompt_length: number of tokens before the first generated one.
    limit: maximum length of the texts of each row.
    prompt: padded prompts; for T5 the sources.
  """

  tokens: Int[Array, "B K T"]
  length: Int[Array, "B K"]
  prompt_length: Int[Array, " B"]
  limit: Int[Array, " B"]
  prompt: Int[Array, "B P"]


def node_prefixes(
  context: Context,
  draft_tokens: Int[Array, "B N"],
  tree: AnyTree,
  first: int = 0,
  last: int | None = None,
) -> Prefixes:
  """Return the texts that end at nodes `first` to `last - 1` of a tree.

  Args:
    draft_tokens: draft tokens; those after node `last - 1` may be missing.
  """
  nodes = np.arange(tree.num_nodes)[first:last]
  draft_tokens = jnp.pad(jnp.maximum(draft_tokens, 0), ((0, 0), (0, 1)))  # -1 was not proposed
  slots, start = jnp.arange(context.tokens.shape[1])[None, None], context.length[:, None]
  if tree.is_chain:
    text = place_tokens(context.tokens, draft_tokens, context.length, draft_tokens.shape[1])[
      :, None
    ]
    length = start + nodes[None]
  else:
    # Each text is the committed tokens and the path to its node, one node per depth.
    batch, depths, ancestors = len(draft_tokens), tree.row_depths, tree.row_ancestors[:, nodes]
    at_depth = depths[:, None] == jnp.arange(1, tree.depth + 1)[None, :, None]
    path = (ancestors[:, :, None] & at_depth[:, None]).argmax(axis=-1)  # [B or 1, nodes, D]
    path = jnp.broadcast_to(path, (batch, *path.shape[1:])).reshape(batch, -1)
    tokens = gather(draft_tokens, jnp.clip(path - 1, 0, draft_tokens.shape[1] - 1))
    tokens = tokens.reshape(batch, len(nodes), -1)
    offset = jnp.clip(slots - start[..., None], 0, tree.depth - 1)
    offset = jnp.broadcast_to(offset, (batch, len(nodes), slots.shape[2]))
    text = jnp.take_along_axis(tokens, offset, axis=2)
    text = jnp.where(slots < start[..., None], context.tokens[:, None], text)
    length = start + depths[:, nodes]
  text = jnp.where(slots < length[..., None], text, 0)
  prompt_length, limit = context.prompt_length, context.limit
  assert prompt_length is not None and limit is not None  # a decoder sets both
  return Prefixes(text, length, prompt_length, limit, context.prompt)


def text_prefixes(context: Context) -> Prefixes:
  """Return the committed text of each row, as the `Prefixes` of a block of one node."""
  return node_prefixes(context, context.tokens[:, :0], chain(0))
