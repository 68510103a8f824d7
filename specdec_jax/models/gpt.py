"""Decoder-only models in Flax, which continue their prompt.

A prompt consists of tokens, EOS and padding, as `Vocabulary.encode` returns them. EOS marks the end
of the prompt and is not processed. Padding may be any token except EOS. If the prompt is empty, the
model generates text unconditionally.

Axis letters are those of `core.types`; in keys and values, D is the size of a head.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.models.config import GPTConfig
from specdec_jax.models.decoder import DecoderStack, empty_slots
from specdec_jax.models.layers import embedder
from specdec_jax.models.transformer import Cache, Transformer, TransformerModel


class GPT(Transformer):
  """Decoder-only model, with the methods that `GPTModel` and training call."""

  config: GPTConfig

  def setup(self):
    self.token_embedder = embedder(self.config)
    self.decoder = DecoderStack(self.config, self.feature_layers)

  def __call__(
    self, source: Any, inputs: Int[Array, "B K"], deterministic: bool = True
  ) -> Float[Array, "B K V"]:
    """Return teacher-forced logits. The inputs are the texts, shifted right by one position.

    `source` is ignored. It is a parameter because training calls `T5` and `GPT` in the same way.
    """
    x, embedding = self.token_embedder(inputs), self.token_embedder.embedding
    return self.decoder(x, embedding, deterministic=deterministic)[0]


@dataclasses.dataclass(frozen=True)
class GPTModel(TransformerModel):
  """Decoder-only model as a `Model`: `prefill` processes the prompt in one forward pass."""

  config: GPTConfig

  module_type = GPT

  def prompt_tokens(self, prompt: Int[Array, "B P"]) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    is_eos = prompt == self.config.eos_id
    lengths = jnp.arange(1, prompt.shape[1] + 1, dtype=jnp.int32)
    length = jnp.where(is_eos, lengths, 1).max(axis=1)  # with EOS
    start_id = self.config.start_id
    if start_id is None:
      return prompt, jnp.maximum(length - 1, 1)
    return jnp.pad(prompt[:, :-1], ((0, 0), (1, 0)), constant_values=start_id), length

  def prefill(
    self, params: Any, prompt: Int[Array, "B P"], num_slots: int
  ) -> tuple[Float[Array, "B C E"], Cache]:
    config, batch = self.config, len(prompt)
    tokens, length = self.prompt_tokens(prompt)
    cache = Cache(jnp.zeros(batch, jnp.int32), empty_slots(config, batch, num_slots))
    _, hidden, cache = self.extend(params, cache, tokens)
    return hidden, self.commit(cache, length - 1)
