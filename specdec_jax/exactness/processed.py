"""Logits after logits processors, at each token of a known output.

The text before each token is taken from the output, not from `core.context.node_prefixes`, which
is under test.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather
from specdec_jax.core.context import Prefixes
from specdec_jax.core.processors import Processors, process
from specdec_jax.core.types import Model


def processed(
  processors: Processors,
  model: Model,
  prompt: Int[Array, "B P"],
  tokens: Int[Array, "B T"],
  limit: int,
  logits: Float[Array, "B T V"],
) -> Float[Array, "B T V"]:
  """Return the logits that predict each token of actual or hypothetical outputs, processed.

  `limit` is the maximum number of tokens of each output, EOS included.
  """
  if not processors:
    return logits
  first, prompt_length = model.prompt_tokens(prompt)
  num_tokens = tokens.shape[1]
  slots, start = jnp.arange(first.shape[1] + num_tokens), prompt_length[:, None]
  output = gather(tokens, jnp.clip(slots - start, 0, num_tokens - 1))
  text = jnp.where(slots < start, jnp.pad(first, ((0, 0), (0, num_tokens))), output)
  length = start + jnp.arange(num_tokens)
  texts = jnp.where(slots < length[..., None], text[:, None], 0)
  prefixes = Prefixes(texts, length, prompt_length, prompt_length + limit, prompt)
  return process(processors, logits, prefixes)
