"""What Hugging Face's transformers saves is read, and gives the logits of its own PyTorch T5."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from specdec_jax.checkpoints.load import load_params, open_checkpoint
from specdec_jax.models.config import t5_config
from specdec_jax.models.t5 import T5

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

KINDS = {
  "1.0": dict(feed_forward_proj="relu"),
  "1.1": dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
}
BATCH, LENGTH = 3, 40


def saved(version, folder, **how):
  """T5-small of a version with random weights, saved: (PyTorch's model, our shape)."""
  shape = t5_config("small", version)
  config = transformers.T5Config(
    vocab_size=shape.table_size,
    d_model=shape.emb_dim,
    d_kv=shape.head_dim,
    d_ff=shape.mlp_dim,
    num_heads=shape.num_heads,
    num_layers=shape.num_encoder_layers,
    **KINDS[version],
  )
  torch.manual_seed(0)
  model = transformers.T5ForConditionalGeneration(config).eval()
  with torch.no_grad():
    if version == "1.1":  # or transformers 5 would tie it
      model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) / 22)
    for name, weight in model.named_parameters():
      if "layer_norm" in name:  # all ones, so that nobody would see one exchanged for another
        weight *= 1 + 0.3 * torch.randn_like(weight)
      if "relative_attention_bias" in name:  # strong enough for a wrong bucket to be seen
        weight *= 10
  model.save_pretrained(folder, **how)
  return model, shape


@pytest.mark.parametrize("how", [{}, {"max_shard_size": "40MB"}], ids=["one file", "several"])
@pytest.mark.parametrize("version", KINDS)
def test_logits_are_those_of_pytorch(tmp_path, version, how):
  model, shape = saved(version, tmp_path, **how)
  files = list(tmp_path.glob("*.safetensors"))
  assert len(files) > 3 if how else len(files) == 1
  config = open_checkpoint(str(tmp_path)).config
  published = dataclasses.replace(shape, vocab_size=shape.table_size, padded_vocab_size=None)
  assert config == published

  source = tiny.sources(config, 0, BATCH, LENGTH)
  inputs = np.pad(tiny.sources(config, 1, BATCH, LENGTH), ((0, 0), (1, 0)))
  with torch.no_grad():
    want = model(
      input_ids=torch.tensor(source, dtype=torch.long),
      attention_mask=torch.tensor(source != 0),
      decoder_input_ids=torch.tensor(inputs, dtype=torch.long),
    ).logits.numpy()
  assert np.std(want) > 0.3
  for fused in (False, True):
    if fused:
      config = dataclasses.replace(config, fused=True, tied_logits=False)
    params = load_params(str(tmp_path), config)
    got = jax.jit(T5(config).apply)({"params": params}, source, inputs)
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)
