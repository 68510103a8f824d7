"""Reader of Hugging Face checkpoints of T5Gemma (Zhang et al., 2025)."""

import re
from collections.abc import Mapping
from typing import Any

from specdec_jax.checkpoints.pretrained import read_eos_ids, require_known
from specdec_jax.checkpoints.stored import LOGITS, TABLE, Checkpoint, StoredArray
from specdec_jax.errors import InputError
from specdec_jax.models.config import T5Config

_ENCODER_TABLE = "encoder_embedder/embedding"
_NAMES = {
  "encoder.embed_tokens.weight": _ENCODER_TABLE,
  "decoder.embed_tokens.weight": TABLE,
  "lm_head.out_proj.weight": LOGITS,
  "encoder.norm.weight": "encoder/encoder_norm/scale",
  "decoder.norm.weight": "decoder/decoder_norm/scale",
}
_IN_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(\w+)(?:\.(\w+)_proj)?\.weight")
_KERNELS = {"q": "query", "k": "key", "v": "value", "o": "out"} | {
  "gate": "wi_0",
  "up": "wi_1",
  "down": "wo",
}
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


def open_t5gemma(
  folder: str, fields: Mapping[str, Any], arrays: dict[str, StoredArray]
) -> Checkpoint:
  """Open a T5Gemma checkpoint of transformers.

  Factors that transformers applies to activations are merged into parameters: the scale of
  attention into the projection of queries, the scale of embeddings into their tables, and the 1
  that is added to the scale of each norm.

  Args:
    folder: folder of the model, or a description of a model in memory.
    fields: fields of its config, such as the result of `read_config`.
    arrays: arrays of the model by their names in this package; the dict is modified.

  Raises:
    InputError: the config has an unsupported value, or files are damaged or missing.
  """
  encoder, decoder = (_stack(folder, fields, stack) for stack in ("encoder", "decoder"))
  same = "vocab_size", "rope_theta", "sliding_window", "attn_logit_softcapping"
  for name in same:
    if encoder.get(name) != decoder.get(name):
      raise InputError(
        f"{name} in {folder} is {encoder.get(name)!r} for the encoder and {decoder.get(name)!r} "
        "for the decoder; they must be equal."
      )
  ids = {name: decoder[name] for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
  ids |= {name: fields[name] for name in ids if fields.get(name) is not None}
  start = fields.get("decoder_start_token_id")
  ids["decoder_start_token_id"] = ids["bos_token_id"] if start is None else start
  eos_ids = read_eos_ids(ids, 1)
  names = "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"
  sizes = [tuple(stack[n] for n in (*names, "intermediate_size")) for stack in (encoder, decoder)]
  emb_dim, num_heads, num_kv_heads, head_dim, mlp_dim = sizes[1]
  config = T5Config(
    vocab_size=decoder["vocab_size"],
    emb_dim=emb_dim,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    num_encoder_layers=encoder["num_hidden_layers"],
    num_decoder_layers=decoder["num_hidden_layers"],
    encoder_sizes=None if sizes[0] == sizes[1] else sizes[0],
    encoder_embeddings=True,
    norm_position="both",
    logits_cap=decoder["final_logit_softcapping"],
    attention_cap=decoder["attn_logit_softcapping"],
    rope_theta=decoder["rope_theta"],
    window=decoder["sliding_window"],
    pad_id=ids["pad_token_id"],
    start_id=ids["decoder_start_token_id"],
    eos_id=eos_ids[0],
  )
  if TABLE in arrays and fields.get("tie_word_embeddings", True):
    arrays.setdefault(LOGITS, arrays[TABLE])
  tables = {TABLE: emb_dim, _ENCODER_TABLE: sizes[0][0]}
  for name, array in arrays.items():
    stack = encoder if name.startswith("encoder/") else decoder
    if name in tables:
      arrays[name] = array / tables[name] ** -0.5
    elif len(array.shape) == 2:
      arrays[name] = array.T
    elif name.endswith("/scale"):
      arrays[name] = array + 1.0
    if name.endswith("/query/kernel"):
      arrays[name] = arrays[name] / stack["query_pre_attn_scalar"] ** 0.5
  return Checkpoint(folder, config, arrays, None, eos_ids)


def _stack(folder: str, fields: Mapping[str, Any], stack: str) -> dict[str, Any]:
  """Return the fields of the encoder or of the decoder."""
  given = fields[stack]
  rope = given.get("rope_parameters") or {}
  of_stack = {**_DEFAULTS, **{k: x for k, x in rope.items() if k == "rope_theta"}, **given}
  layers = range(of_stack["num_hidden_layers"])
  alternating = ["full_attention" if i % 2 else "sliding_attention" for i in layers]
  require_known(
    folder,
    {**of_stack, "rope_type": rope.get("rope_type", "default")},
    hidden_activation=("gelu_pytorch_tanh",),
    rms_norm_eps=(1e-6,),
    attention_bias=(False,),
    rope_type=("default",),
    rope_scaling=(None,),
    layer_types=(alternating, None),
  )
  return of_stack


def _our_name(name: str) -> str:
  """Return the name that an array has in this package, given its name in the file.

  An unknown name only loses the prefix "model."; it is reported when arrays are compared with the
  config.
  """
  name = name.removeprefix("model.")
  match = _IN_LAYER.fullmatch(name)
  if name in _NAMES or not match:
    return _NAMES.get(name, name)
  stack, layer, part, projection = match.groups()
  self_attention = "attention" if stack == "encoder" else "self_attention"
  blocks = {
    "self_attn": self_attention,
    "cross_attn": "encoder_decoder_attention",
    "mlp": "mlp",
    "pre_self_attn_layernorm": f"pre_{self_attention}_layer_norm",
    "post_self_attn_layernorm": f"post_{self_attention}_layer_norm",
    "pre_cross_attn_layernorm": "pre_cross_attention_layer_norm",
    "post_cross_attn_layernorm": "post_cross_attention_layer_norm",
    "pre_feedforward_layernorm": "pre_mlp_layer_norm",
    "post_feedforward_layernorm": "post_mlp_layer_norm",
  }
  block = blocks.get(part, part)
  inside = f"{_KERNELS.get(projection, projection)}/kernel" if projection else "scale"
  return f"{stack}/layers_{layer}/{block}/{inside}"


NAMES = r"", _our_name  # arrays to leave out (none), and the function that renames the others
