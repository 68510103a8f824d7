"""T5Gemma (Zhang et al., 2025) in the format of Hugging Face."""

from collections.abc import Mapping
from typing import Any

from specdec_jax.checkpoints.families.mapping import attention, expand, read_eos_ids, require_known
from specdec_jax.checkpoints.formats import LOGITS, TABLE, Leaf
from specdec_jax.errors import InputError
from specdec_jax.models.config import T5Config

PREFIX = "model."
UNUSED = ""
TRANSPOSED = ("/kernel",)
_ENCODER_TABLE = "encoder_embedder/embedding"
_DEFAULTS = {
  "pad_token_id": 0,
  "eos_token_id": 1,
  "bos_token_id": 2,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0,
  "query_pre_attn_scalar": 256,
  "attn_logit_softcapping": 50.0,
  "final_logit_softcapping": 30.0,
  "sliding_window": 4096,
}


def names(config: T5Config) -> dict[str, str]:
  """Return our name for each name in transformers."""
  table = {
    "encoder.embed_tokens.weight": _ENCODER_TABLE,
    "decoder.embed_tokens.weight": TABLE,
    "lm_head.out_proj.weight": LOGITS,
  }
  for stack, own in (("encoder", "attention"), ("decoder", "self_attention")):
    theirs, ours = f"{stack}.layers.{{}}", f"{stack}/layers_{{}}"
    layer = {
      **attention(f"{theirs}.self_attn", f"{ours}/{own}", "_proj"),
      **attention(f"{theirs}.cross_attn", f"{ours}/encoder_decoder_attention", "_proj"),
      f"{theirs}.mlp.gate_proj": f"{ours}/mlp/wi_0",
      f"{theirs}.mlp.up_proj": f"{ours}/mlp/wi_1",
      f"{theirs}.mlp.down_proj": f"{ours}/mlp/wo",
    }
    for at in ("pre", "post"):
      layer |= {
        f"{theirs}.{at}_self_attn_layernorm": f"{ours}/{at}_{own}_layer_norm",
        f"{theirs}.{at}_cross_attn_layernorm": f"{ours}/{at}_cross_attention_layer_norm",
        f"{theirs}.{at}_feedforward_layernorm": f"{ours}/{at}_mlp_layer_norm",
      }
    table |= expand({f"{stack}.norm": f"{stack}/{stack}_norm"})
    table |= expand(layer, getattr(config, f"num_{stack}_layers"))
  return table


def config(path: str, fields: Mapping[str, Any]) -> T5Config:
  """Return the config of the model that the fields of config.json describe."""
  encoder, decoder = (_stack(path, fields, stack) for stack in ("encoder", "decoder"))
  for name in ("vocab_size", "rope_theta", "sliding_window", "attn_logit_softcapping"):
    if encoder.get(name) != decoder.get(name):
      raise InputError(
        f"{name} in {path} is {encoder.get(name)!r} for the encoder and {decoder.get(name)!r} "
        "for the decoder; they must be equal."
      )
  ids = {name: decoder[name] for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
  ids |= {name: fields[name] for name in ids if fields.get(name) is not None}
  start = fields.get("decoder_start_token_id")
  sizes = "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"
  of_encoder, of_decoder = (
    tuple(stack[name] for name in (*sizes, "intermediate_size")) for stack in (encoder, decoder)
  )
  emb_dim, num_heads, num_kv_heads, head_dim, mlp_dim = of_decoder
  return T5Config(
    vocab_size=decoder["vocab_size"],
    emb_dim=emb_dim,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    num_encoder_layers=encoder["num_hidden_layers"],
    num_decoder_layers=decoder["num_hidden_layers"],
    encoder_sizes=None if of_encoder == of_decoder else of_encoder,
    encoder_embeddings=True,
    norm_position="both",
    logits_cap=decoder["final_logit_softcapping"],
    attention_cap=decoder["attn_logit_softcapping"],
    rope_theta=decoder["rope_theta"],
    window=decoder["sliding_window"],
    pad_id=ids["pad_token_id"],
    start_id=ids["bos_token_id"] if start is None else start,
    eos_id=read_eos_ids(ids, 1)[0],
  )


def _stack(path: str, fields: Mapping[str, Any], stack: str) -> dict[str, Any]:
  given = fields[stack]
  rope = given.get("rope_parameters") or {}
  of_stack = {**_DEFAULTS, **{k: x for k, x in rope.items() if k == "rope_theta"}, **given}
  layers = range(of_stack["num_hidden_layers"])
  alternating = ["full_attention" if i % 2 else "sliding_attention" for i in layers]
  require_known(
    path,
    {**of_stack, "rope_type": rope.get("rope_type", "default")},
    hidden_activation=("gelu_pytorch_tanh",),
    rms_norm_eps=(1e-6,),
    attention_bias=(False,),
    rope_type=("default",),
    rope_scaling=(None,),
    layer_types=(alternating, None),
  )
  return of_stack


def convert(
  config: T5Config, fields: Mapping[str, Any], arrays: Mapping[str, Any]
) -> tuple[T5Config, dict[str, Leaf]]:
  """Return the config and the leaves, into which factors of activations are merged.

  These are the scale of attention in the projection of queries, the scale of embeddings in their
  tables, and the 1 that is added to the scale of each norm.
  """
  leaves = {}
  if TABLE in arrays and fields.get("tie_word_embeddings", True):
    leaves[LOGITS] = Leaf(arrays[TABLE].T)
  tables = {TABLE: config.emb_dim, _ENCODER_TABLE: config.encoder.emb_dim}
  for name, array in arrays.items():
    stack = fields["encoder" if name.startswith("encoder/") else "decoder"]
    scalar = stack.get("query_pre_attn_scalar", _DEFAULTS["query_pre_attn_scalar"])
    if name in tables:
      leaves[name] = Leaf(array, divisor=tables[name] ** -0.5)
    elif name.endswith("/query/kernel"):
      leaves[name] = Leaf(array, divisor=scalar**0.5)
    else:
      leaves[name] = Leaf(array, plus=1.0 if name.endswith("/scale") else 0.0)
  return config, leaves
