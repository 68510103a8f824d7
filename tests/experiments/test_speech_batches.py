"""Test bytes and operations of the study of batches of Whisper and T5-XXL."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from experiments.speech import batches
from specdec_jax.measure import plan
from specdec_jax.models.families import init_params
from specdec_jax.models.layout import Layout
from specdec_jax.models.whisper import without_encoder

LAYERS, VOCAB, SOURCE, NEW = 2, 200, 8, 16


def test_work_of_a_whisper_equals_that_counted_by_hand():
  """Batch and gamma are not among those from which all others are computed."""
  options = tiny.WHISPER | dict(source_positions=SOURCE, tied_logits=False)
  layout = Layout(dtype=jnp.dtype("bfloat16"), fused=True)
  whisper = tiny.config(vocab_size=VOCAB, layers=LAYERS, layout=layout, **options)
  small = dataclasses.replace(whisper, num_decoder_layers=1)
  batch, gamma = 5, 4
  got = plan.Counts(plan.PairShapes(whisper, small, SOURCE, NEW))(batch, gamma)
  dim, mlp, tokens = whisper.emb_dim, whisper.mlp_dim, batch * (gamma + 1)
  matrices = LAYERS * (6 * dim**2 + 2 * dim * mlp) + dim * VOCAB  # keys of the source are cached
  vectors = LAYERS * (4 * dim + 2 * dim + mlp + dim + 3 * 2 * dim) + 2 * dim  # biases and norms
  looked_up = 2 * tokens * dim  # embeddings and positions
  integers = 4 * (batch * SOURCE + batch + tokens)  # bias of the source, lengths, tokens
  row = 2 * dim * (SOURCE + 4 + NEW + 1)  # keys and values of a layer
  caches = 2 * batch * LAYERS * row
  weights = 2 * (matrices + vectors + looked_up) + integers
  attention = 2 * tokens * LAYERS * row
  want = [[weights, 2 * tokens * matrices], [caches, attention]]
  np.testing.assert_allclose(got.target, want)
  assert got.draft[1, 0] == pytest.approx(gamma * caches / LAYERS)
  params = (jax.eval_shape(lambda c=c: init_params(c, jax.random.key(0))) for c in (whisper, small))
  own = next(params), without_encoder(next(params))
  sizes = [x.size for x in jax.tree.leaves(own)]
  assert got.weights.sum() == pytest.approx(2 * sum(sizes))
  both = caches * (LAYERS + 1) / LAYERS
  assert both < got.caches.sum() < 1.1 * both  # with lengths and biases of sources


def test_largest_batch_grows_with_alpha(monkeypatch):
  def counts(batch, gamma):
    step = np.array([[2e9, 2e9 * batch], [1e6 * batch, 1e6 * batch]])
    target = step * [[1, gamma + 1], [1, gamma + 1]]
    return plan.Work(target, 0.02 * gamma * step, np.array(2e9), np.array(1e6 * batch))

  monkeypatch.setattr(batches, "Counts", lambda pair: counts)
  monkeypatch.setattr(batches, "BATCHES", (1, *range(64, 641, 8), batches.LIMIT))
  rows = [*batches.records(batches.Pair("target", "draft", plan.PairShapes(None, None, 0, 0)))]
  table = batches.speech_batches_table(rows)
  for device, cells in zip(batches.RATES, table.rows, strict=True):
    found = [row for row in rows if row["device"] == device]
    largest = [batches.largest_batch(found, alpha) for alpha in batches.ALPHAS]
    assert 64 < largest[0] < largest[1] < largest[2] < batches.LIMIT
    assert cells[table.columns.index("largest batch")] == " / ".join(map(str, largest))
    for row in found:
      for alpha in batches.ALPHAS:
        assert (row["speedup"][f"{alpha}"] >= plan.PAYS) == (
          alpha >= plan.least_alpha(row["c"], row["v"])
        )
