"""Models with the architecture of GPT-2 (Radford et al., 2019) in the format of Hugging Face."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from specdec_jax.checkpoints.families.mapping import (
  expand,
  read_eos_ids,
  require_known,
)
from specdec_jax.checkpoints.formats import LOGITS, TABLE, Leaf
from specdec_jax.models.config import GPTConfig

PREFIX = "transformer."
# The causal mask, which old files contain in each layer.
UNUSED = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
TRANSPOSED = (LOGITS,)
_EOS_ID = 50256
_SIZES = dict(vocab_size=50257, n_embd=768, n_head=12, n_layer=12, n_positions=1024)
_ACTIVATIONS: dict[str, Literal["gelu", "relu"]] = {
  "gelu_new": "gelu",
  "gelu_pytorch_tanh": "gelu",
  "relu": "relu",
}
_TOP = {"wte.weight": TABLE, "wpe.weight": "decoder/positions", "lm_head.weight": LOGITS}
_LAYER = {
  "h.{}.ln_1": "decoder/layers_{}/pre_self_attention_layer_norm",
  "h.{}.attn.c_attn": "decoder/layers_{}/self_attention/query_key_value",
  "h.{}.attn.c_proj": "decoder/layers_{}/self_attention/out",
  "h.{}.ln_2": "decoder/layers_{}/pre_mlp_layer_norm",
  "h.{}.mlp.c_fc": "decoder/layers_{}/mlp/wi",
  "h.{}.mlp.c_proj": "decoder/layers_{}/mlp/wo",
}


def names(config: GPTConfig) -> dict[str, str]:
  """Return our name for each name in transformers."""
  norm = expand({"ln_f": "decoder/decoder_norm"})
  return _TOP | norm | expand(_LAYER, config.num_decoder_layers)


def config(path: str, fields: Mapping[str, Any]) -> GPTConfig:
  """Return the config of the model that the fields of config.json describe.

  `reorder_and_upcast_attn` is ignored: it avoids overflow in float16, but the result is the same.
  """
  fields = _SIZES | dict(fields)
  require_known(
    path,
    fields,
    activation_function=tuple(_ACTIVATIONS),
    layer_norm_epsilon=(1e-5,),
    add_cross_attention=(False,),
    tie_word_embeddings=(True, False),
  )
  width, num_heads = fields["n_embd"], fields["n_head"]
  eos_id = read_eos_ids(fields, _EOS_ID)[0]
  return GPTConfig(
    vocab_size=fields["vocab_size"],
    emb_dim=width,
    num_heads=num_heads,
    head_dim=width // num_heads,
    mlp_dim=fields.get("n_inner") or 4 * width,
    num_decoder_layers=fields["n_layer"],
    gated=False,
    activation=_ACTIVATIONS[fields.get("activation_function", "gelu_new")],
    tied_logits=fields.get("tie_word_embeddings", True),
    biases=True,
    num_positions=fields["n_positions"],
    eos_id=eos_id,
    pad_id=int(eos_id == 0),  # any other token than EOS, which ends a prompt
    start_id=None,
  )


def convert(
  config: GPTConfig, fields: Mapping[str, Any], arrays: Mapping[str, Any]
) -> tuple[GPTConfig, dict[str, Leaf]]:
  """Return the config and the leaves.

  The matrix for queries, keys and values is split into three. Attention in this package does not
  scale logits. Instead, the matrix and bias of the queries are divided by the divisor that the
  config specifies (by default, sqrt(head_dim)).
  """
  leaves = {name: Leaf(array) for name, array in arrays.items()}
  scale = config.head_dim**0.5 if fields.get("scale_attn_weights", True) else 1.0
  width = config.emb_dim
  for layer in range(config.num_decoder_layers):
    divisor = scale * (layer + 1 if fields.get("scale_attn_by_inverse_layer_idx") else 1)
    block = f"decoder/layers_{layer}/self_attention"
    for kind in ("kernel", "bias"):
      joint = arrays.get(f"{block}/query_key_value/{kind}")
      if joint is not None and joint.shape[-1] == 3 * width:
        del leaves[f"{block}/query_key_value/{kind}"]
        for i, (part, by) in enumerate((("query", divisor), ("key", 1.0), ("value", 1.0))):
          columns = joint[..., i * width : (i + 1) * width]
          leaves[f"{block}/{part}/{kind}"] = Leaf(columns, divisor=by)
  if LOGITS in leaves:
    table = arrays.get(TABLE)
    if config.tied_logits and table is not None and np.array_equal(arrays[LOGITS].T, table):
      del leaves[LOGITS]
    else:  # config.json may say that they are tied
      config = dataclasses.replace(config, tied_logits=False)
  return config, leaves
