"""Test that a T5 saved by transformers is read and has the logits of its PyTorch model."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.models.sizes import t5_config
from specdec_jax.models.t5 import T5

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.slow

GATED = dict(feed_forward_proj="gated-gelu")
KINDS = {
  "1.0": dict(feed_forward_proj="relu"),
  "1.1": dict(**GATED, tie_word_embeddings=False),
  "byt5": dict(**GATED, tie_word_embeddings=False, num_decoder_layers=1),
  "mt5": GATED,
  "mt5, tied": dict(**GATED, tie_word_embeddings=True),
  "ul2": dict(feed_forward_proj="gated-silu", tie_word_embeddings=False),
  "umt5": dict(**GATED, tie_word_embeddings=False),
}
BATCH, LENGTH = 3, 40


def saved(version, folder, shape, own_logits, **how):
  """Save a T5 with random weights with transformers, and return its PyTorch model."""
  kind = {"mt5": "MT5", "umt5": "UMT5"}.get(version.split(",")[0], "T5")
  config = getattr(transformers, f"{kind}Config")(
    vocab_size=shape.table_size,
    d_model=shape.emb_dim,
    d_kv=shape.head_dim,
    d_ff=shape.mlp_dim,
    num_heads=shape.num_heads,
    num_layers=shape.num_encoder_layers,
    decoder_start_token_id=0,
    **KINDS[version],
  )
  torch.manual_seed(0)
  model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
  with torch.no_grad():
    if own_logits:  # otherwise transformers 5 would tie them
      draw = torch.randn_like(model.lm_head.weight) / shape.emb_dim**0.5
      model.lm_head.weight = torch.nn.Parameter(draw)
    for name, weight in model.named_parameters():
      if "layer_norm" in name:  # all ones, so swapped ones would not differ
        weight *= 1 + 0.3 * torch.randn_like(weight)
      if "relative_attention_bias" in name:  # large enough for a wrong bucket to matter
        weight *= 10
  model.save_pretrained(folder, **how)
  return model


def assert_same_logits(model, folder):
  """Compare the logits of a folder with those of PyTorch, with separate and fused matrices."""
  config = open_checkpoint(str(folder)).config
  source = tiny.sources(config, 0, BATCH, LENGTH)
  inputs = np.pad(tiny.sources(config, 1, BATCH, LENGTH), ((0, 0), (1, 0)))
  with torch.no_grad():
    want = model(
      input_ids=torch.tensor(source, dtype=torch.long),
      attention_mask=torch.tensor(source != 0),
      decoder_input_ids=torch.tensor(inputs, dtype=torch.long),
    ).logits.numpy()
  assert np.std(want) > 0.2
  for fused in (False, True):
    if fused:
      config = dataclasses.replace(config.with_layout(fused=True), tied_logits=False)
    params = open_checkpoint(str(folder)).load(config)
    got = jax.jit(T5(config).apply)({"params": params}, source, inputs)
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
  "version, own_logits", [("1.0", True), ("1.1", False), *zip(KINDS, [False, True] * 4)]
)
def test_logits_of_every_version_with_tied_and_untied_logits(tmp_path, version, own_logits):
  """The installed transformers writes the files, so test with versions 4 and 5 after a change."""
  shape = tiny.config(vocab_size=384 if version == "byt5" else 128)
  assert_same_logits(saved(version, tmp_path, shape, own_logits), tmp_path)


@pytest.mark.parametrize(
  "version, how",
  [("1.0", {}), ("1.1", {"max_shard_size": "40MB"})],
  ids=["one file", "several"],
)
def test_logits_equal_those_of_pytorch(tmp_path, version, how):
  shape = t5_config("small", version)
  model = saved(version, tmp_path, shape, own_logits=version == "1.1", **how)
  files = list(tmp_path.glob("*.safetensors"))
  assert len(files) > 3 if how else len(files) == 1
  config = open_checkpoint(str(tmp_path)).config
  published = dataclasses.replace(shape, vocab_size=shape.table_size, padded_vocab_size=None)
  assert config == published
  assert_same_logits(model, tmp_path)
