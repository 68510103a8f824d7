"""Training of a draft where the drafts before it are rejected (SpecInfer; Miao et al., 2024).

The draft is one of several in a tree (`drafts.composed.forest_draft`). `residual_labels` is the
`relabel` of `commands.train.train_draft`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding

from specdec_jax.checkpoints.load import load_model
from specdec_jax.models.families import module_of
from specdec_jax.train.batches import Batch, ParallelText
from specdec_jax.train.distillation import by_pair
from specdec_jax.train.objectives import teacher_forced


def residual_labels(
  text: ParallelText, batch_sharding: Sharding | None, after: Sequence[str]
) -> ParallelText:
  """Return the text with labels for the target's tokens that other drafts leave to a further one.

  The labels r are at first p, the distribution of the teacher in `text`. Each of the other drafts,
  in the order in which its tokens are tried, replaces r by max(0, r - s q), where q is its
  distribution and s is the sum of r over the labels, at first 1. So r becomes the residual
  distribution, times the probability that all of these drafts are rejected. A draft that is trained
  on r learns most where that is likely (boost-tuning).

  Args:
    batch_sharding: sharding of the rows of a batch; None for one device.
    after: folders of the other drafts, in this order.
  """
  assert text.teacher is not None
  configs, params = zip(*map(load_model, after))
  modules = [*map(module_of, configs)]

  def residual(params: Any, batch: Batch) -> Array:
    labels, mass = jnp.asarray(batch.weights), jnp.ones(())
    for draft, draft_params in zip(modules, params):
      q = jax.nn.softmax(teacher_forced(draft, draft_params, batch))
      q_labels = jnp.take_along_axis(q, batch.labels, axis=-1)
      labels = jnp.maximum(labels - mass * q_labels, 0)
      mass = labels.sum(axis=-1, keepdims=True)
    return labels

  teacher = list(text.teacher)
  for i, weights in by_pair(residual, params, text, batch_sharding=batch_sharding):
    teacher[i] = teacher[i][0], weights[: len(teacher[i][0])].astype(np.float16)
  return dataclasses.replace(text, teacher=teacher)
