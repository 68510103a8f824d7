"""Decoder-only models in Flax: a decoder without source, which goes on writing its prompt.

A prompt is what vocabularies encode, as a T5's source is: tokens, EOS, padding. EOS says where it
ends and is not read, so padding may be any other token, and an empty prompt asks for a text of its
own.

Axes: B batch, P prompt tokens, K tokens in a block, T cache slots, V vocabulary.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array

from specdec_jax.core.trees import AnyTree, NodeLayout
from specdec_jax.errors import InputError
from specdec_jax.models.config import GPTConfig
from specdec_jax.models.decoder import Decoder, KeysValues, commit, empty_slots
from specdec_jax.models.layers import embedder


@struct.dataclass
class GPTCache:
  """What the decoder needs of the tokens behind it.

  Attributes:
    length: [B], tokens each row holds; slots at or past it are masked, then overwritten.
    layers: per layer, keys and values, each [B, H, T, D].
  """

  length: Array
  layers: tuple[KeysValues, ...]


class GPT(nn.Module):
  """The decoder and its table of tokens, with the methods that `GPTModel` and training call."""

  config: GPTConfig

  def setup(self):
    self.token_embedder = embedder(self.config)
    self.decoder = Decoder(self.config)

  def __call__(self, source: Array, inputs: Array, deterministic: bool = True) -> Array:
    """Teacher-forced logits [B, K, V] of inputs [B, K] (texts shifted right).

    `source` is there for training, which is the same for both families, and is not read.
    """
    x, embedding = self.token_embedder(inputs), self.token_embedder.embedding
    return self.decoder(x, embedding, deterministic=deterministic)[0]

  def extend(
    self, cache: GPTCache, tokens: Array, tree: NodeLayout | None = None, first: Array | int = 0
  ) -> tuple[Array, Array, GPTCache]:
    """Read a block [B, K] behind what each row holds; logits [B, K, V] follow each token."""
    return self.read(cache, self.token_embedder(tokens), tree, first)

  def read(
    self, cache: GPTCache, x: Array, tree: NodeLayout | None = None, first: Array | int = 0
  ) -> tuple[Array, Array, GPTCache]:
    """`extend` by embedded tokens [B, K, E], or what stands for some."""
    logits, hidden, layers = self.decoder(
      x,
      self.token_embedder.embedding,
      cached=cache.layers,
      length=cache.length,
      tree=tree,
      first=first,
    )
    return logits, hidden, cache.replace(layers=layers)

  def logits(self, hidden: Array) -> Array:
    """[..., V] of last states [..., E]."""
    return self.decoder.logits(hidden, self.token_embedder.embedding)


@dataclasses.dataclass(frozen=True)
class GPTModel:
  """A decoder-only model behind the `Model` contract: `prefill` reads the prompt, in one pass.

  `prefill` raises InputError if a text would not fit the model's table of positions.

  Attributes:
    config: its shape.
  """

  config: GPTConfig

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  @property
  def eos_id(self) -> int:
    return self.config.eos_id

  def prompt_tokens(self, prompt: Array) -> tuple[Array, Array]:
    is_eos = prompt == self.config.eos_id
    length = jnp.where(is_eos, jnp.arange(1, prompt.shape[1] + 1), 1).max(axis=1)  # with EOS
    start_id = self.config.start_id
    if start_id is None:
      return prompt, jnp.maximum(length - 1, 1)
    return jnp.pad(prompt[:, :-1], ((0, 0), (1, 0)), constant_values=start_id), length

  def prefill(self, params: Any, prompt: Array, num_slots: int) -> tuple[Array, GPTCache]:
    config, batch = self.config, len(prompt)
    if config.num_positions and num_slots > config.num_positions:
      raise InputError(
        f"A prompt of {prompt.shape[1]} tokens, the new ones and a block of guesses take "
        f"{num_slots} positions, but the model has {config.num_positions}; lower max_new_tokens, "
        "or max_source_tokens for shorter prompts."
      )
    tokens, length = self.prompt_tokens(prompt)
    cache = GPTCache(jnp.zeros(batch, jnp.int32), empty_slots(config, batch, num_slots))
    _, hidden, cache = self.extend(params, cache, tokens)
    return hidden, self.commit(cache, length - 1)

  def extend(
    self,
    params: Any,
    cache: GPTCache,
    tokens: Array,
    tree: NodeLayout | None = None,
    first: Array | int = 0,
  ) -> tuple[Array, Array, GPTCache]:
    return GPT(self.config).apply({"params": params}, cache, tokens, tree, first, method=GPT.extend)

  def commit(
    self, cache: GPTCache, length: Array, tree: AnyTree | None = None, path: Array | None = None
  ) -> GPTCache:
    return commit(cache, length, path)
