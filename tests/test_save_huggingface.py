"""Test that weights written in the format of transformers are those that are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from safetensors import safe_open

from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.checkpoints.save import save_huggingface
from specdec_jax.errors import InputError

SHAPES = {
  "1.0": dict(gated=False, activation="relu", tied_logits=True),
  "1.1": dict(),
  "tied and gated": dict(tied_logits=True, num_decoder_layers=3),
}


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_exported_weights_are_loaded_unchanged(tmp_path, fields, dtype):
  config = tiny.config(**fields)
  params = jax.tree.map(lambda x: x.astype(dtype), tiny_pair.random_params(config, 1))
  save_huggingface(str(tmp_path), config, params)
  stored = open_checkpoint(str(tmp_path))
  assert stored.config == config
  assert {array.dtype for array in stored.arrays.values()} == {jnp.dtype(dtype)}
  jax.tree.map(np.testing.assert_array_equal, stored.load(config), params)


@pytest.mark.slow
@pytest.mark.parametrize("num_decoder_layers", [1, 2, 3])
def test_transformers_generates_from_exported_weights(tmp_path, num_decoder_layers):
  transformers = pytest.importorskip("transformers", reason="transformers is not installed")
  torch = pytest.importorskip("torch", reason="PyTorch is not installed")
  config = tiny.config(num_decoder_layers=num_decoder_layers)
  assert config.num_encoder_layers == 2
  save_huggingface(str(tmp_path), config, tiny_pair.random_params(config, 1))
  model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
  prompt, options = torch.tensor([[5, 6, 7, 1]]), dict(max_new_tokens=8, do_sample=False)
  without_cache = model.generate(prompt, use_cache=False, **options)
  assert without_cache.shape[1] > 2
  assert model.generate(prompt, use_cache=True, **options).tolist() == without_cache.tolist()


def test_exported_arrays_have_the_names_of_transformers(tmp_path):
  config = tiny.config(layers=1)
  save_huggingface(str(tmp_path), config, tiny_pair.random_params(config, 1))

  def attention(layer, name):
    return {f"{layer}.{name}.{part}.weight" for part in "qkvo"}

  def mlp(layer):
    return {f"{layer}.DenseReluDense.{part}.weight" for part in ("wi_0", "wi_1", "wo")}

  def norms(stack, count):
    return {f"{stack}.block.0.layer.{i}.layer_norm.weight" for i in range(count)}

  bias = "layer.0.SelfAttention.relative_attention_bias.weight"
  with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
    assert set(file.keys()) == {
      *("shared.weight", "lm_head.weight"),
      *(f"{stack}.final_layer_norm.weight" for stack in ("encoder", "decoder")),
      *(f"{stack}.block.0.{bias}" for stack in ("encoder", "decoder")),
      *norms("encoder", 2),
      *norms("decoder", 3),
      *attention("encoder.block.0.layer.0", "SelfAttention"),
      *attention("decoder.block.0.layer.0", "SelfAttention"),
      *attention("decoder.block.0.layer.1", "EncDecAttention"),
      *mlp("encoder.block.0.layer.1"),
      *mlp("decoder.block.0.layer.2"),
    }


@pytest.mark.parametrize(
  "fields, said",
  [
    (dict(activation="silu", gated=False), "feed_forward_proj in .* is 'silu'"),
    (dict(norm_position="after", num_positions=9), "with norm_position 'after', num_positions 9 "),
  ],
)
def test_other_models_are_not_written_as_a_t5(tmp_path, fields, said):
  with pytest.raises(InputError, match=said):
    save_huggingface(str(tmp_path), tiny.config(**fields), {})
  assert not [*tmp_path.iterdir()]
