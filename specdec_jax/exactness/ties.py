"""Where two argmax outputs part, and whether rounding can explain it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specdec_jax.protocols import Model


class Divergence(NamedTuple):
  """The first token at which a row of speculative output is not plain decoding's.

  Attributes:
    row: of the batch.
    position: of the token in the output, from 0.
    plain: token that plain decoding chose.
    speculative: token that speculation emitted.
    gap: how far the target's logit of `plain` lies above that of `speculative`, read a token at a
      time as plain decoding does.
    rounding: largest difference of a logit of this row between reading a token at a time and
      reading blocks, as verification does.
  """

  row: int
  position: int
  plain: int
  speculative: int
  gap: float
  rounding: float

  @property
  def is_tie(self) -> bool:
    """Whether rounding both logits apart by `rounding` can have swapped them."""
    return self.gap <= 2 * self.rounding


def first_divergences(
  target: Model, params, prompt: Array, plain: np.ndarray, speculative: np.ndarray, block: int
) -> list[Divergence]:
  """The rows of two outputs that differ, each judged.

  Args:
    target: the model of both.
    params: its parameters.
    prompt: source tokens [B, P].
    plain: output of plain decoding [B, T].
    speculative: output of speculative decoding [B, T].
    block: tokens that verification reads at a time: gamma + 1, or a tree's nodes.
  """
  rows = np.flatnonzero((plain != speculative).any(axis=1))
  if not len(rows):
    return []
  by_one, by_block = (np.asarray(_logits(target, params, prompt, plain, k)) for k in (1, block))
  found = []
  for row in rows.tolist():
    at = int((plain[row] != speculative[row]).argmax())
    tokens = int(plain[row, at]), int(speculative[row, at])
    gap = float(by_one[row, at, tokens[0]] - by_one[row, at, tokens[1]])
    rounding = float(np.abs(by_one[row, : at + 1] - by_block[row, : at + 1]).max())
    found.append(Divergence(row, at, *tokens, gap, rounding))
  return found


def _logits(target: Model, params, prompt: Array, tokens: np.ndarray, block: int) -> Array:
  """Target's logits [B, T, V] before each of tokens [B, T], reading `block` tokens a pass."""
  first, length = target.prompt_tokens(prompt)
  batch, count = tokens.shape
  num_blocks = -(-count // block)
  # Rows may begin at different lengths; each reads its newest token, then the output.
  newest = jnp.take_along_axis(first, length[:, None] - 1, axis=1)
  text = jnp.concatenate([newest, jnp.asarray(tokens[:, :-1])], axis=1)
  text = jnp.pad(text, ((0, 0), (0, num_blocks * block - count)))
  blocks = text.reshape(batch, num_blocks, block).swapaxes(0, 1)

  @jax.jit
  def read(params):
    def step(cache, tokens):
      logits, _, cache = target.extend(params, cache, tokens)
      return target.commit(cache, cache.length + block), logits

    _, cache = target.prefill(params, prompt, first.shape[1] + num_blocks * block)
    return lax.scan(step, cache, blocks)[1]  # [N, B, K, V]

  logits = read(params).swapaxes(0, 1)
  return logits.reshape(batch, num_blocks * block, -1)[:, :count]
