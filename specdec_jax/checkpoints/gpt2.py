"""Hugging Face's folders of GPT-2 (Radford et al., 2019), DistilGPT2 and others of that family."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from specdec_jax.checkpoints.pretrained import (
  CONFIG,
  generation_settings,
  open_arrays,
  read_eos_ids,
  require_known,
  require_sizes,
)
from specdec_jax.checkpoints.stored import LOGITS, TABLE, Checkpoint, equal, split
from specdec_jax.errors import InputError
from specdec_jax.models.config import GPTConfig

_EOS_ID = 50256
_ACTIVATIONS: dict[str, Literal["gelu", "relu"]] = {
  "gelu_new": "gelu",
  "gelu_pytorch_tanh": "gelu",  # the same
  "relu": "relu",
}

_NAMES = {
  "wte.weight": TABLE,
  "wpe.weight": "decoder/positions",
  "ln_f.weight": "decoder/decoder_norm/scale",
  "ln_f.bias": "decoder/decoder_norm/bias",
  "lm_head.weight": LOGITS,
}
_PARTS = {
  "ln_1": "pre_self_attention_layer_norm",
  "attn.c_attn": "self_attention/query_key_value",
  "attn.c_proj": "self_attention/out",
  "ln_2": "pre_mlp_layer_norm",
  "mlp.c_fc": "mlp/wi",
  "mlp.c_proj": "mlp/wo",
}
_IN_LAYER = re.compile(r"h\.(\d+)\.(.+)\.(weight|bias)")
# The causal mask, which old files keep with each layer.
_UNUSED = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"


def open_gpt2(folder: str, about: Mapping[str, Any]) -> Checkpoint:
  """A GPT-2 that `save_pretrained` wrote, with or without its head; `about` is its config.json.

  Queries, keys and values, side by side there, are read apart. Attention here does not scale its
  logits, so queries are divided by what these would be.

  Raises:
    InputError: it does what is not done here, or files are damaged or missing.
  """
  config = _config(folder, about)
  arrays = open_arrays(folder, _UNUSED, _our_name)
  scale = config.head_dim**0.5 if about.get("scale_attn_weights", True) else 1.0
  for layer in range(min(config.num_decoder_layers, len(arrays))):  # whatever the file claims
    divisor = scale * (layer + 1 if about.get("scale_attn_by_inverse_layer_idx") else 1)
    for kind in ("kernel", "bias"):
      block = f"decoder/layers_{layer}/self_attention"
      name = f"{block}/query_key_value/{kind}"
      if name in arrays and arrays[name].shape[-1:] == (3 * config.emb_dim,):
        query, key, value = split(arrays.pop(name), 3)
        arrays[f"{block}/query/{kind}"] = query / divisor
        arrays[f"{block}/key/{kind}"] = key
        arrays[f"{block}/value/{kind}"] = value
  if LOGITS in arrays:
    if config.tied_logits and TABLE in arrays and equal(arrays[LOGITS], arrays[TABLE]):
      del arrays[LOGITS]
    else:  # even if config.json says that they are tied
      arrays[LOGITS] = arrays[LOGITS].T
      config = dataclasses.replace(config, tied_logits=False)
  eos_ids = read_eos_ids(folder, about, _EOS_ID)
  return Checkpoint(folder, config, arrays, None, eos_ids, generation_settings(folder))


def _config(folder: str, about: Mapping[str, Any]) -> GPTConfig:
  """config.json as our shape.

  `reorder_and_upcast_attn` is not looked at: it keeps the same sums from overflowing in float16.
  """
  require_known(
    folder,
    about,
    activation_function=tuple(_ACTIVATIONS),
    layer_norm_epsilon=(1e-5,),
    add_cross_attention=(False,),
    tie_word_embeddings=(True, False),
  )
  require_sizes(folder, about, "vocab_size", "n_positions", "n_embd", "n_head", "n_layer")
  width, num_heads = about["n_embd"], about["n_head"]
  if about.get("n_inner") is None:
    about = {**about, "n_inner": 4 * width}
  require_sizes(folder, about, "n_inner")
  if width % num_heads:
    raise InputError(
      f"n_embd in {folder}/{CONFIG} is {width}; it must be a multiple of n_head, {num_heads}."
    )
  return GPTConfig(
    vocab_size=about["vocab_size"],
    emb_dim=width,
    num_heads=num_heads,
    head_dim=width // num_heads,
    mlp_dim=about["n_inner"],
    num_decoder_layers=about["n_layer"],
    gated=False,
    activation=_ACTIVATIONS[about.get("activation_function", "gelu_new")],
    tied_logits=about.get("tie_word_embeddings", True),
    biases=True,
    num_positions=about["n_positions"],
    eos_id=read_eos_ids(folder, about, _EOS_ID)[0],
    start_id=None,
  )


def _our_name(name: str) -> str:
  """Name in our tree; a name that is not known stays, to be told when shapes are compared."""
  name = name.removeprefix("transformer.")
  match = _IN_LAYER.fullmatch(name)
  if not match or match[2] not in _PARTS:
    return _NAMES.get(name, name)
  layer, part, kind = match.groups()
  weight = "scale" if part.startswith("ln_") else "kernel"
  return f"decoder/layers_{layer}/{_PARTS[part]}/{weight if kind == 'weight' else 'bias'}"
