"""Test that checkpoints written by T5X are read and give the logits of T5X."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.models.t5 import T5

network = pytest.importorskip("t5x.examples.t5.network", reason="T5X is not installed")

from t5x import adafactor, checkpoints, partitioning, train_state  # noqa: E402

pytestmark = pytest.mark.slow

ROWS, BATCH, LENGTH = 128, 4, 11
SIZES = dict(emb_dim=16, num_heads=4, head_dim=3, mlp_dim=32)
KINDS = {
  "1.0": dict(mlp_activations=("relu",), logits_via_embedding=True),
  "1.1": dict(mlp_activations=("gelu", "linear"), logits_via_embedding=False),
}


class SingleFilePartitioner(partitioning.PjitPartitioner):
  """Partitioner without sharding, so that T5X writes all arrays into its index, as it once did."""

  def get_mesh_axes(self, state):
    return jax.tree.map(lambda _: None, state)


@pytest.fixture(scope="module", params=KINDS)
def written(request, tmp_path_factory):
  """Return (folders by format, source, inputs, logits of T5X) for random tokens."""
  config = network.T5Config(
    vocab_size=ROWS, num_encoder_layers=2, num_decoder_layers=3, **SIZES, **KINDS[request.param]
  )
  module = network.Transformer(config)
  rng = np.random.default_rng(0)
  source = tiny.sources(tiny.config(vocab_size=ROWS), 0, BATCH, LENGTH)
  targets = rng.integers(2, ROWS, (BATCH, LENGTH)).astype(np.int32)
  inputs = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
  tokens = dict(
    encoder_input_tokens=source, decoder_input_tokens=inputs, decoder_target_tokens=targets
  )

  def call(function):
    return jax.jit(lambda first: function(first, **tokens, enable_dropout=False))

  variables = call(module.init)(jax.random.key(1))
  logits = call(module.apply)({"params": variables["params"]})
  state = train_state.FlaxOptimTrainState.create(adafactor.Adafactor(0.1), variables)
  folders = {}
  for name, kind in (("zarr", partitioning.PjitPartitioner), ("msgpack", SingleFilePartitioner)):
    folders[name] = tmp_path_factory.mktemp(name)
    checkpoints.Checkpointer(state, kind(num_partitions=1), str(folders[name])).save(state)
  return folders, source, inputs, np.asarray(logits)


@pytest.mark.parametrize(
  "format, fused", [("zarr", True), ("msgpack", False)], ids=["zarr, fused", "msgpack, as stored"]
)
def test_logits_equal_those_of_t5x(written, format, fused):
  folders, source, inputs, want = written
  path = folders[format] / "checkpoint_0"
  num_files = len(list(path.iterdir()))
  assert num_files == 1 if format == "msgpack" else num_files > 50
  config = open_checkpoint(str(path)).config
  if fused:
    config = dataclasses.replace(config.with_layout(fused=True), tied_logits=False)
  params = open_checkpoint(str(path)).load(config)
  got = jax.jit(T5(config).apply)({"params": params}, source, inputs)
  assert got.dtype == jnp.float32 and np.std(want) > 0.1
  np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)
