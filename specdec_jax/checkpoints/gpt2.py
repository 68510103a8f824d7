"""Reader of Hugging Face checkpoints with the architecture of GPT-2 (Radford et al., 2019)."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from specdec_jax.checkpoints.pretrained import read_eos_ids, require_known
from specdec_jax.checkpoints.stored import LOGITS, TABLE, Checkpoint, StoredArray, equal, split
from specdec_jax.models.config import GPTConfig

_EOS_ID = 50256
_ACTIVATIONS: dict[str, Literal["gelu", "relu"]] = {
  "gelu_new": "gelu",
  "gelu_pytorch_tanh": "gelu",
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
# The causal mask, which old files contain in each layer.
_UNUSED = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"


def open_gpt2(folder: str, fields: Mapping[str, Any], arrays: dict[str, StoredArray]) -> Checkpoint:
  """Open a GPT-2 checkpoint of transformers, with or without a language model head.

  The file has one matrix for queries, keys and values, which is split into three. Attention in this
  package does not scale logits. Instead, the matrix and bias of the queries are divided by the
  divisor that the config specifies (by default, sqrt(head_dim)).

  Args:
    folder: folder of the model, or a description of a model in memory.
    fields: fields of its config, such as the result of `read_config`.
    arrays: arrays of the model by their names in this package; the dict is modified.

  Raises:
    InputError: the config has an unsupported value, or files are damaged or missing.
  """
  config = _config(folder, fields)
  scale = config.head_dim**0.5 if fields.get("scale_attn_weights", True) else 1.0
  for layer in range(config.num_decoder_layers):
    divisor = scale * (layer + 1 if fields.get("scale_attn_by_inverse_layer_idx") else 1)
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
    else:  # config.json may say that they are tied
      arrays[LOGITS] = arrays[LOGITS].T
      config = dataclasses.replace(config, tied_logits=False)
  eos_ids = read_eos_ids(fields, _EOS_ID)
  return Checkpoint(folder, config, arrays, None, eos_ids)


def _config(folder: str, fields: Mapping[str, Any]) -> GPTConfig:
  """Return the config of the model that the fields of config.json describe.

  The field `reorder_and_upcast_attn` is ignored. It changes the order of operations, to avoid
  overflow in float16, but not the result.
  """
  require_known(
    folder,
    fields,
    activation_function=tuple(_ACTIVATIONS),
    layer_norm_epsilon=(1e-5,),
    add_cross_attention=(False,),
    tie_word_embeddings=(True, False),
  )
  width, num_heads = fields["n_embd"], fields["n_head"]
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
    eos_id=read_eos_ids(fields, _EOS_ID)[0],
    start_id=None,
  )


def _our_name(name: str) -> str:
  """Return the name that an array has in this package, given its name in the file.

  An unknown name only loses the prefix "transformer."; it is reported when arrays are compared with
  the config.
  """
  name = name.removeprefix("transformer.")
  match = _IN_LAYER.fullmatch(name)
  if not match or match[2] not in _PARTS:
    return _NAMES.get(name, name)
  layer, part, kind = match.groups()
  weight = "scale" if part.startswith("ln_") else "kernel"
  return f"decoder/layers_{layer}/{_PARTS[part]}/{weight if kind == 'weight' else 'bias'}"


NAMES = _UNUSED, _our_name  # arrays to leave out, and the function that renames the others
