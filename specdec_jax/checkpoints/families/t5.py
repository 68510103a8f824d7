"""T5, mT5 and umT5 in the format of Hugging Face."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from specdec_jax.checkpoints.families.mapping import attention, expand, read_eos_ids, require_known
from specdec_jax.checkpoints.formats import LOGITS, TABLE, Leaf
from specdec_jax.models.config import T5Config

PREFIX = ""
# Old conversions of T5 1.0 contain this array.
UNUSED = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
TRANSPOSED = ("/kernel", "/rel_embedding")
_TOP = {
  # The embedding table has three names in transformers; safetensors stores one of them.
  "shared.weight": TABLE,
  "encoder.embed_tokens.weight": TABLE,
  "decoder.embed_tokens.weight": TABLE,
  "lm_head.weight": LOGITS,
  "encoder.final_layer_norm.weight": "encoder/encoder_norm/scale",
  "decoder.final_layer_norm.weight": "decoder/decoder_norm/scale",
}


# Fields of config.json.
_FIELDS = {
  "emb_dim": "d_model",
  "num_heads": "num_heads",
  "head_dim": "d_kv",
  "mlp_dim": "d_ff",
  "num_encoder_layers": "num_layers",
  "num_decoder_layers": "num_decoder_layers",
  "pad_id": "pad_token_id",
  "start_id": "decoder_start_token_id",
}
# Defaults of transformers: those of all models, and by `model_type`.
_SHARED = dict(d_model=512, d_kv=64, tie_word_embeddings=True)
_MT5 = dict(vocab_size=250112, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu")
DEFAULTS: dict[str, dict[str, Any]] = {
  "t5": dict(vocab_size=32128, d_ff=2048, num_layers=6, num_heads=8, feed_forward_proj="relu"),
  "mt5": _MT5 | dict(tie_word_embeddings=False),
  "umt5": _MT5,
}
# By `feed_forward_proj`: `dense_act_fn` in transformers, and the name in this package.
_ACTIVATIONS: dict[str, tuple[str, Literal["gelu", "relu", "silu"]]] = {
  "relu": ("relu", "relu"),
  "gated-gelu": ("gelu_new", "gelu"),
  "gated-silu": ("silu", "silu"),
}


def names(config: T5Config) -> dict[str, str]:
  """Return our name for each name in transformers."""
  table = dict(_TOP)
  for stack, own, mlp in (("encoder", "attention", 1), ("decoder", "self_attention", 2)):
    theirs, ours = f"{stack}.block.{{}}.layer", f"{stack}/layers_{{}}"
    layer = {
      f"{theirs}.0.layer_norm": f"{ours}/pre_{own}_layer_norm",
      **attention(f"{theirs}.0.SelfAttention", f"{ours}/{own}"),
      f"{theirs}.1.layer_norm": f"{ours}/pre_cross_attention_layer_norm",
      **attention(f"{theirs}.1.EncDecAttention", f"{ours}/encoder_decoder_attention"),
      f"{theirs}.{mlp}.layer_norm": f"{ours}/pre_mlp_layer_norm",  # of an encoder, that of block 1
    }
    for part in ("wi", "wi_0", "wi_1", "wo"):
      layer[f"{theirs}.{mlp}.DenseReluDense.{part}"] = f"{ours}/mlp/{part}"
    num_layers = getattr(config, f"num_{stack}_layers")
    table |= expand(layer, num_layers)
    for i in range(num_layers if config.bias_per_layer else 1):
      place = f"{stack}/layers_{i}" if config.bias_per_layer else stack
      bias = f"{stack}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"
      table[bias] = f"{place}/relpos_bias/rel_embedding"
  return table


def _with_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Return the fields with their defaults.

  T5 1.0 scales the decoder's hidden states before it multiplies them by the embedding table. In
  transformers 4 the field `tie_word_embeddings` says whether hidden states are scaled. In
  transformers 5 the field `scale_decoder_outputs` says so, and `tie_word_embeddings` is always
  true; mT5 does not scale them.
  """
  is_mt5 = fields["model_type"] == "mt5"
  may_be_null = ("num_decoder_layers", "pad_token_id", "decoder_start_token_id")
  given = {k: x for k, x in fields.items() if x is not None or k not in may_be_null}
  fields = _SHARED | DEFAULTS[given["model_type"]] | given
  scales = not is_mt5 or str(fields.get("transformers_version")).startswith("4.")
  fields.setdefault("scale_decoder_outputs", fields["tie_word_embeddings"] and scales)
  fields.setdefault("num_decoder_layers", fields["num_layers"])
  fields.setdefault("pad_token_id", 0)
  fields.setdefault("decoder_start_token_id", fields["pad_token_id"])
  return fields


def config(path: str, fields: Mapping[str, Any]) -> T5Config:
  """Return the config of the model that the fields of config.json describe.

  In this package tied logits are always scaled, so `tied_logits` equals `scale_decoder_outputs`.
  """
  fields = _with_defaults(fields)
  kind = fields["feed_forward_proj"]
  require_known(path, fields, feed_forward_proj=tuple(_ACTIVATIONS))
  (their_activation, activation), gated = _ACTIVATIONS[kind], kind.startswith("gated")
  require_known(
    path,
    fields,
    dense_act_fn=(their_activation,),
    is_gated_act=(gated,),
    tie_word_embeddings=(True, False),
    scale_decoder_outputs=(True, False),
    relative_attention_num_buckets=(32,),
    relative_attention_max_distance=(128,),
    layer_norm_epsilon=(1e-6,),
  )
  return T5Config(
    **{ours: fields[theirs] for ours, theirs in _FIELDS.items()},
    vocab_size=fields["vocab_size"],
    gated=gated,
    activation=activation,
    bias_per_layer=fields["model_type"] == "umt5",
    tied_logits=fields["scale_decoder_outputs"],
    eos_id=read_eos_ids(fields, default=1)[0],
  )


def fields_of(config: T5Config) -> dict[str, Any]:
  """Return the fields of config.json: the inverse of `config`, except for padding and dropout."""
  return {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()} | dict(
    architectures=["T5ForConditionalGeneration"],
    model_type="t5",
    is_encoder_decoder=True,
    decoder_layers=config.num_decoder_layers,  # transformers 5.24 reads the size of its cache here
    vocab_size=config.table_size,
    feed_forward_proj=("gated-" if config.gated else "") + config.activation,
    tie_word_embeddings=config.tied_logits,
    dropout_rate=config.dropout_rate,
    eos_token_id=config.eos_id,
  )


def convert(
  config: T5Config, fields: Mapping[str, Any], arrays: Mapping[str, Any]
) -> tuple[T5Config, dict[str, Leaf]]:
  """Return the config and the leaves; logits use `lm_head.weight` if there is one, or the table."""
  leaves = {name: Leaf(array) for name, array in arrays.items()}
  if LOGITS in leaves and config.tied_logits:
    if TABLE in arrays and np.array_equal(arrays[LOGITS].T, arrays[TABLE]):
      del leaves[LOGITS]
    else:
      leaves[LOGITS] = Leaf(arrays[LOGITS], divisor=config.logits_divisor)
      config = dataclasses.replace(config, tied_logits=False)
  elif TABLE in arrays and _with_defaults(fields)["tie_word_embeddings"] and not config.tied_logits:
    leaves.setdefault(LOGITS, Leaf(arrays[TABLE].T))
  return config, leaves
