"""The target's distribution of each token of a known output, after logits processors.

The text before each token is taken from the output, not from `core.context.node_prefixes`, and
top-k and top-p are computed by sorting, not by `core.sampling`. Both are under test.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather
from specdec_jax.core.context import Prefixes, Prompt, prompt_ids
from specdec_jax.core.processors import Processors, process
from specdec_jax.core.sampling import Sampling, distribution
from specdec_jax.core.types import AnyArray, Model
from specdec_jax.measure.alpha import teacher_forced_logits


def processed(
  processors: Processors,
  model: Model,
  prompt: Prompt,
  tokens: Int[Array, "B T"],
  limit: int | Int[AnyArray, " B"],
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
  prefixes = Prefixes(texts, length, prompt_length, prompt_length + limit, prompt_ids(prompt))
  return process(processors, logits, prefixes)


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def target_probs(
  model: Model,
  params: Any,
  prompt: Prompt,
  tokens: Int[Array, "B T"],
  sampling: Sampling,
  limit: int,
  processors: Processors,
) -> Float[Array, "B T V"]:
  """Return the target's distribution of each token of an output, given the tokens before it."""
  logits = teacher_forced_logits(model, params, prompt, tokens)
  return target_distribution(processed(processors, model, prompt, tokens, limit, logits), sampling)


def target_distribution(
  logits: Float[Array, "*batch V"], sampling: Sampling
) -> Float[Array, "*batch V"]:
  """Return the distribution that a sampling method gives the next token.

  Top-k and top-p are computed by sorting, unlike in `core.sampling.distribution`.
  """
  if sampling.is_argmax:
    return jax.nn.one_hot(logits.argmax(axis=-1), logits.shape[-1])
  logits, top_p = logits.astype(jnp.float32) / sampling.temperature, sampling.top_p
  if sampling.top_k:
    kth = jnp.sort(logits, axis=-1)[..., -min(sampling.top_k, logits.shape[-1]), None]
    logits = jnp.where(logits >= kth, logits, -jnp.inf)
  if top_p < 1:
    probs = jax.nn.softmax(logits)
    falling = -jnp.sort(-probs, axis=-1)
    before = jnp.cumsum(falling, axis=-1) - falling
    least = jnp.where(before < top_p, falling, 1.0).min(axis=-1, keepdims=True)
    logits = jnp.where(probs >= least, logits, -jnp.inf)
  # The filters that are not part of the paper are not computed twice.
  return distribution(logits, dataclasses.replace(sampling, temperature=1.0, top_k=0, top_p=1.0))
