"""Decoder-only models in Flax: a decoder without source, which goes on writing its prompt.

A prompt is what vocabularies encode, as a T5's source is: tokens, EOS, padding. EOS says where it
ends and is not read, so padding may be any other token, and an empty prompt asks for a text of its
own.

Axes: B batch, P prompt tokens, K tokens in a block, T cache slots, V vocabulary.
"""

import functools

import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array

from specdec_jax.errors import InputError
from specdec_jax.models.config import GPTConfig
from specdec_jax.models.decoder import Decoder, KeysValues, empty_slots
from specdec_jax.models.layers import embedder
from specdec_jax.protocols import Model


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
  """The decoder and its table of tokens, with the methods that `gpt_model` and training call."""

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

  def extend(self, cache: GPTCache, tokens: Array) -> tuple[Array, GPTCache]:
    """Append a block [B, K] to each row at its own length; logits [B, K, V] follow each token."""
    x, embedding = self.token_embedder(tokens), self.token_embedder.embedding
    logits, layers = self.decoder(x, embedding, cached=cache.layers, length=cache.length)
    return logits, cache.replace(layers=layers, length=cache.length + tokens.shape[1])


@functools.cache
def gpt_model(config: GPTConfig) -> Model:
  """A decoder-only model behind the `Model` contract: `start` reads the prompt, in one pass.

  `start` raises InputError if a text would not fit the model's table of positions.
  """
  module = GPT(config)

  def begin(prompt: Array) -> tuple[Array, Array]:
    is_eos = prompt == config.eos_id
    length = jnp.where(is_eos, jnp.arange(1, prompt.shape[1] + 1), 1).max(axis=1)  # with EOS
    if config.start_id is None:
      return prompt, jnp.maximum(length - 1, 1)
    shifted = jnp.pad(prompt[:, :-1], ((0, 0), (1, 0)), constant_values=config.start_id)
    return shifted, length

  def start(params, prompt: Array, num_slots: int) -> GPTCache:
    if config.num_positions and num_slots > config.num_positions:
      raise InputError(
        f"A prompt of {prompt.shape[1]} tokens, the new ones and a block of guesses take "
        f"{num_slots} positions, but the model has {config.num_positions}; lower max_new_tokens, "
        "or max_source_tokens for shorter prompts."
      )
    tokens, length = begin(prompt)
    batch = len(prompt)
    cache = GPTCache(jnp.zeros(batch, jnp.int32), empty_slots(config, batch, num_slots))
    return extend(params, cache, tokens)[1].replace(length=length - 1)

  def extend(params, cache: GPTCache, tokens: Array) -> tuple[Array, GPTCache]:
    return module.apply({"params": params}, cache, tokens, method=GPT.extend)

  return Model(begin, start, extend, config.vocab_size, config.eos_id)
