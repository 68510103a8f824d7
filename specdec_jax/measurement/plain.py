"""What a target writes by itself: the texts that alpha is measured on."""

import warnings
from collections.abc import Sequence

import jax
from jax import Array

from specdec_jax.core.decode import require_finite
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.types import DecodeResult
from specdec_jax.counts import num_tokens
from specdec_jax.pairs import Pair


def generate(
  pair: Pair,
  texts: Sequence[str],
  sampling: Sampling,
  batch_size: int,
  max_new_tokens: int,
  min_tokens: int,
  seed: int,
) -> list[tuple[Array, Array, DecodeResult]]:
  """The target's own (prompt, keys, output) of batches of texts, until they have min_tokens."""
  batches, count = [], 0
  for at in range(0, len(texts), batch_size):
    prompt = pair.prompt(texts[at : at + batch_size])
    keys = row_keys(seed, at, len(prompt))
    decoded = pair.decode_fn(sampling, 0)(prompt, keys, max_new_tokens=max_new_tokens)
    batches.append((prompt, keys, require_finite(jax.device_get(decoded))))
    count += num_tokens([batches[-1][-1]])
    if count >= min_tokens:
      return batches
  warnings.warn(f"The texts gave {count} tokens, fewer than the {min_tokens} asked.", stacklevel=2)
  return batches
