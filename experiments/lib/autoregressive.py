"""Autoregressive decoding of the text on which alpha is measured."""

import warnings
from collections.abc import Sequence

import jax
from jax import Array

from specdec_jax.core.counts import num_tokens, require_finite
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.pair import Pair


def generate(
  pair: Pair, texts: Sequence[str], settings: DecodeSettings, min_tokens: int
) -> list[tuple[Array, Array, DecodeResult]]:
  """Decode batches of texts autoregressively until the outputs have `min_tokens` tokens.

  If all texts together give fewer tokens, a warning is issued.

  Returns:
    (prompts, keys, outputs) of each batch.
  """
  batches, count = [], 0
  decode = pair.decode_fn(settings.sampling, chain(0))
  for first in range(0, len(texts), settings.batch_size):
    prompt = pair.prompt(texts[first : first + settings.batch_size])
    keys = row_keys(settings.seed, first, len(prompt))
    result = decode(prompt, keys, max_new_tokens=settings.max_new_tokens)
    output = require_finite(jax.device_get(result))
    batches.append((prompt, keys, output))
    count += num_tokens([output])
    if count >= min_tokens:
      return batches
  warnings.warn(
    f"The texts gave {count} tokens, fewer than min_tokens = {min_tokens}.", stacklevel=2
  )
  return batches
