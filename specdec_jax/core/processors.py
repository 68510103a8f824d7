"""Logits processors: functions that adjust the logits of the next token, given the text before it.

The adjusted logits at a node of a block depend on its logits, on the prompt and length limit of its
row, and on the text that ends at the node: the committed tokens and the path to the node. They do
not depend on siblings or other rows. So the target with processors is a target like any other, and
exact verifiers remain exact for it. Axis letters are those of `core.types`.
"""

import abc
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather, place_tokens
from specdec_jax.core.trees import AnyTree, chain
from specdec_jax.settings import Settings


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


class LogitsProcessor(Settings, abc.ABC):
  """Base class of logits processors: frozen dataclasses whose fields may be traced (`settings`)."""

  @abc.abstractmethod
  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    """Return the adjusted logits of the token after each text; -inf excludes a token."""


Processors = tuple[LogitsProcessor, ...]


def process(
  processors: Processors, logits: Float[Array, "B K V"], prefixes: Prefixes
) -> Float[Array, "B K V"]:
  """Return logits after all processors, in their order, in float32.

  At a node where the processors exclude all tokens, the logits are returned unadjusted.
  """
  logits = processed = logits.astype(jnp.float32)
  for processor in processors:
    processed = processor(processed, prefixes)
  return jnp.where((processed > -jnp.inf).any(axis=-1, keepdims=True), processed, logits)


def node_prefixes(
  context: Any,
  guesses: Int[Array, "B guesses"],
  tree: AnyTree,
  first: int = 0,
  last: int | None = None,
) -> Prefixes:
  """Return the texts that end at nodes `first` to `last - 1` of a tree.

  Args:
    context: the `Context` of the round.
    guesses: draft tokens; those after node `last - 1` may be missing.
    tree: shape of the proposal.
    first: index of the first node.
    last: index of the node after the last one; None to include all nodes from `first` on.
  """
  nodes = np.arange(tree.num_nodes)[first:last]
  guesses = jnp.pad(jnp.maximum(guesses, 0), ((0, 0), (0, 1)))  # -1 was not proposed
  slots, start = jnp.arange(context.tokens.shape[1]), context.length[:, None]
  if tree.is_chain:
    text = place_tokens(context.tokens, guesses, context.length, guesses.shape[1])[:, None]
    length = start + nodes
  else:
    # Each text is the committed tokens and the path to its node, one node per depth.
    batch, depths = len(guesses), jnp.atleast_2d(jnp.asarray(tree.depths))
    ancestors = jnp.reshape(tree.ancestors, (-1, tree.num_nodes, tree.num_nodes))[:, nodes]
    at_depth = depths[:, None] == jnp.arange(1, tree.depth + 1)[:, None]
    path = (ancestors[:, :, None] & at_depth[:, None]).argmax(axis=-1)  # [B or 1, nodes, D]
    path = jnp.broadcast_to(path, (batch, *path.shape[1:])).reshape(batch, -1)
    tokens = gather(guesses, jnp.clip(path - 1, 0, guesses.shape[1] - 1))
    tokens = tokens.reshape(batch, len(nodes), -1)
    offset = jnp.clip(slots - start, 0, tree.depth - 1)
    offset = jnp.broadcast_to(offset[:, None], (batch, len(nodes), len(slots)))
    text = jnp.take_along_axis(tokens, offset, axis=2)
    text = jnp.where((slots < start)[:, None], context.tokens[:, None], text)
    length = start + depths[:, nodes]
  text = jnp.where(slots < length[..., None], text, 0)
  return Prefixes(text, length, context.prompt_length, context.limit, context.prompt)


def text_prefixes(context: Any) -> Prefixes:
  """Return the committed text of each row, as the `Prefixes` of a block of one node."""
  return node_prefixes(context, context.tokens[:, :0], chain(0))
