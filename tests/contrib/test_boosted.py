"""Test training of a draft where the drafts before it are rejected."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
import tiny_pair
from test_training import CONFIG, batch_of, copies, initial_params

from specdec_jax.checkpoints.save import save_model
from specdec_jax.contrib.boosted import residual_labels
from specdec_jax.data.vocabulary import padded
from specdec_jax.train.distillation import teacher_topk

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("count", [1, 2, 3])
def test_labels_are_what_other_drafts_leave_of_the_teachers_distribution(count, tmp_path):
  """They are the residual distribution, times the probability that all drafts are rejected."""
  params, text = initial_params(), copies()
  others = [tiny_pair.random_params(CONFIG, seed) for seed in range(1, count + 1)]
  teacher = teacher_topk(CONFIG, params, text, k=12, tokens_per_batch=32)
  text = dataclasses.replace(text, teacher=teacher)
  folders = [str(tmp_path / f"{i}") for i in range(count)]
  for folder, other in zip(folders, others):
    save_model(folder, CONFIG, other)
  labels = residual_labels(text, None, folders)
  batch = batch_of(text.targets, length=8)
  inputs = np.pad(batch.targets[:, :-1], ((0, 0), (1, 0)))
  logits = [tiny.teacher_forced(CONFIG)(x, padded(text.sources, 8), inputs) for x in others]
  qs = np.stack([*map(jax.nn.softmax, logits)], axis=1)  # [B, drafts, T, V]
  for (tokens, p), (same_tokens, weights), q in zip(teacher, labels.teacher, qs, strict=True):
    np.testing.assert_array_equal(tokens, same_tokens)
    residual, rejected = np.float64(p) / np.float64(p).sum(axis=1, keepdims=True), 1.0
    for of_draft in q[:, : len(tokens)]:
      difference = np.maximum(residual - np.take_along_axis(of_draft, tokens, axis=1), 0)
      mass = difference.sum(axis=1, keepdims=True)
      residual, rejected = difference / mass, rejected * mass
    np.testing.assert_allclose(weights, rejected * residual, atol=2e-3)
    assert weights.max() > 0.01
