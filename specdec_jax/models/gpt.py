"""Decoder-only models in Flax, which continue their prompt.

A prompt consists of tokens, EOS and padding, as `Vocabulary.encode` returns them. EOS marks the end
of the prompt and is not processed. Padding may be any token except EOS. If the prompt is empty, the
model generates text unconditionally.

Axis letters are those of `core.types`; in keys and values, D is the size of a head.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.trees import AnyTree, NodeLayout
from specdec_jax.models.config import GPTConfig
from specdec_jax.models.decoder import Decoder, KeysValues, commit, empty_slots
from specdec_jax.models.layers import embedder


@struct.dataclass
class GPTCache:
  """Cache of a decoder-only model: all committed tokens except the last one."""

  length: Int[Array, " B"]
  layers: tuple[KeysValues, ...]


class GPT(nn.Module):
  """Decoder-only model, with the methods that `GPTModel` and training call."""

  config: GPTConfig
  feature_layers: tuple[int, ...] = ()

  def setup(self):
    self.token_embedder = embedder(self.config)
    self.decoder = Decoder(self.config, self.feature_layers)

  def __call__(
    self, source: Any, inputs: Int[Array, "B K"], deterministic: bool = True
  ) -> Float[Array, "B K V"]:
    """Return teacher-forced logits. The inputs are the texts, shifted right by one position.

    `source` is ignored. It is a parameter because training calls `T5` and `GPT` in the same way.
    """
    x, embedding = self.token_embedder(inputs), self.token_embedder.embedding
    return self.decoder(x, embedding, deterministic=deterministic)[0]

  def extend(
    self,
    cache: GPTCache,
    tokens: Int[Array, "B K"],
    tree: NodeLayout | None = None,
    first: Int[Array, ""] | int = 0,
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K states"], GPTCache]:
    """Process a block of tokens that follows the cached tokens; see `core.types.Model.extend`."""
    return self.extend_embedded(cache, self.token_embedder(tokens), tree, first)

  def extend_embedded(
    self,
    cache: GPTCache,
    x: Float[Array, "B K E"],
    tree: NodeLayout | None = None,
    first: Int[Array, ""] | int = 0,
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K states"], GPTCache]:
    """Process a block of token embeddings, or of vectors that replace token embeddings."""
    logits, hidden, layers = self.decoder(
      x,
      self.token_embedder.embedding,
      cached=cache.layers,
      length=cache.length,
      tree=tree,
      first=first,
    )
    return logits, hidden, cache.replace(layers=layers)

  def logits(self, hidden: Float[Array, "*batch E"]) -> Float[Array, "*batch V"]:
    """Return the logits of hidden states after the final norm."""
    return self.decoder.logits(hidden, self.token_embedder.embedding)


@dataclasses.dataclass(frozen=True)
class GPTModel:
  """Decoder-only model as a `Model`: `prefill` processes the prompt in one forward pass."""

  config: GPTConfig
  feature_layers: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  @property
  def eos_id(self) -> int:
    return self.config.eos_id

  def prompt_tokens(self, prompt: Int[Array, "B P"]) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    is_eos = prompt == self.config.eos_id
    length = jnp.where(is_eos, jnp.arange(1, prompt.shape[1] + 1), 1).max(axis=1)  # with EOS
    start_id = self.config.start_id
    if start_id is None:
      return prompt, jnp.maximum(length - 1, 1)
    return jnp.pad(prompt[:, :-1], ((0, 0), (1, 0)), constant_values=start_id), length

  def prefill(
    self, params: Any, prompt: Int[Array, "B P"], num_slots: int
  ) -> tuple[Float[Array, "B C E"], GPTCache]:
    config, batch = self.config, len(prompt)
    tokens, length = self.prompt_tokens(prompt)
    cache = GPTCache(jnp.zeros(batch, jnp.int32), empty_slots(config, batch, num_slots))
    _, hidden, cache = self.extend(params, cache, tokens)
    return hidden, self.commit(cache, length - 1)

  def extend(
    self,
    params: Any,
    cache: GPTCache,
    tokens: Int[Array, "B K"],
    tree: NodeLayout | None = None,
    first: Int[Array, ""] | int = 0,
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K E"], GPTCache]:
    module = GPT(self.config, self.feature_layers)
    return module.apply({"params": params}, cache, tokens, tree, first, method=GPT.extend)

  def commit(
    self,
    cache: Any,
    length: Int[Array, " B"],
    tree: AnyTree | None = None,
    path: Int[Array, "B D"] | None = None,
  ) -> Any:
    return commit(cache, length, path)
