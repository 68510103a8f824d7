"""Hugging Face's folders of any model that is read here; T5's in full, GPT-2's by `gpt2`."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import traverse_util
from safetensors.numpy import save

from specdec_jax.atomic_files import atomic_write
from specdec_jax.checkpoints.gpt2 import open_gpt2
from specdec_jax.checkpoints.pretrained import (
  CONFIG,
  WEIGHTS,
  generation_settings,
  open_arrays,
  read_config,
  read_eos_ids,
  require_known,
  require_sizes,
)
from specdec_jax.checkpoints.stored import LOGITS, TABLE, Checkpoint, equal
from specdec_jax.errors import InputError
from specdec_jax.models.config import T5Config
from specdec_jax.models.t5 import PAD_ID

_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_NAMES = {
  # One table under three names: the file has whichever safetensors kept.
  **dict.fromkeys(
    ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), TABLE
  ),
  "lm_head.weight": LOGITS,
  f"encoder.{_BIAS}": "encoder/relpos_bias/rel_embedding",
  f"decoder.{_BIAS}": "decoder/relpos_bias/rel_embedding",
  "encoder.final_layer_norm.weight": "encoder/encoder_norm/scale",
  "decoder.final_layer_norm.weight": "decoder/decoder_norm/scale",
}
# What a layer's parts are called, the norm before each, and what they are called there.
_PARTS = {
  ("encoder", "0"): ("attention", "pre_attention_layer_norm", "SelfAttention"),
  ("encoder", "1"): ("mlp", "pre_mlp_layer_norm", "DenseReluDense"),
  ("decoder", "0"): ("self_attention", "pre_self_attention_layer_norm", "SelfAttention"),
  ("decoder", "1"): (
    "encoder_decoder_attention",
    "pre_cross_attention_layer_norm",
    "EncDecAttention",
  ),
  ("decoder", "2"): ("mlp", "pre_mlp_layer_norm", "DenseReluDense"),
}
_KERNELS = {"q": "query", "k": "key", "v": "value", "o": "out"}
_IN_LAYER = re.compile(r"(\w+)\.block\.(\d+)\.layer\.(\d)\.(?:layer_norm|\w+\.(\w+))\.weight")
# Old conversions of T5 1.0 have it, and no model ever used it.
_UNUSED = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"


def open_huggingface(folder: str) -> Checkpoint:
  """What `save_pretrained` wrote: a T5 of any kind, mT5 or GPT-2; nothing pickled is read.

  Raises:
    InputError: it is no model that is known here, or files are damaged or missing.
  """
  about = {"model_type": None, **read_config(folder)}
  require_known(folder, about, model_type=("t5", "mt5", "gpt2"))
  return (open_gpt2 if about["model_type"] == "gpt2" else _open_t5)(folder, about)


def _open_t5(folder: str, about: Mapping[str, Any]) -> Checkpoint:
  """A T5 or mT5, whose logits come from `lm_head.weight` if that is there, else from the table.

  Whether they are scaled as well, which T5 1.0's are, is what `tie_word_embeddings` says in
  transformers 4. In 5 that is always true, `scale_decoder_outputs` says it, and mT5's never are.
  """
  is_t5 = about["model_type"] == "t5"
  usual = dict(feed_forward_proj="relu" if is_t5 else "gated-gelu", tie_word_embeddings=is_t5)
  about = {**usual, **about}
  scales = is_t5 or str(about.get("transformers_version")).startswith("4.")
  about = {"scale_decoder_outputs": about["tie_word_embeddings"] and scales, **about}
  config = _config(folder, about)
  arrays = open_arrays(folder, _UNUSED, _our_name)
  if LOGITS in arrays and config.tied_logits:
    if TABLE in arrays and equal(arrays[LOGITS], arrays[TABLE]):
      del arrays[LOGITS]
    else:
      arrays[LOGITS] = arrays[LOGITS] / config.logits_divisor
      config = dataclasses.replace(config, tied_logits=False)
  elif TABLE in arrays and about["tie_word_embeddings"] and not config.tied_logits:
    arrays.setdefault(LOGITS, arrays[TABLE])
  turned = lambda name, array: len(array.shape) == 2 and name != TABLE
  arrays = {name: x.T if turned(name, x) else x for name, x in arrays.items()}
  eos_ids = read_eos_ids(folder, about, default=1)
  return Checkpoint(folder, config, arrays, None, eos_ids, generation_settings(folder))


def save_huggingface(folder: str, config: T5Config, params) -> None:
  """Write a model to `folder` as transformers' `save_pretrained` does, its weights as they are.

  The inverse of `open_huggingface`: `config.json`, written last, and `model.safetensors`.

  Args:
    folder: made if need be; both files are written, or neither.
    config: its shape; not `fused`.
    params: its parameters.

  Raises:
    InputError: a shape that transformers does not have.
  """
  if config.fused or config.gated != (config.activation == "gelu"):
    raise InputError(
      f"A model with fused {config.fused}, gated {config.gated} and {config.activation} cannot be "
      "written for transformers, which has gated gelu and relu that is not gated, neither fused."
    )
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  arrays = {}
  for name, value in traverse_util.flatten_dict(params, sep="/").items():
    array = np.asarray(value)
    array = array.T if array.ndim == 2 and name != TABLE else array
    arrays[_their_name(name)] = np.ascontiguousarray(array)
  with atomic_write(path / CONFIG) as about, atomic_write(path / WEIGHTS, "wb") as weights:
    weights.write(save(arrays, {"format": "pt"}))
    about.write(json.dumps(_about(config), indent=2) + "\n")


def _about(config: T5Config) -> dict:
  """Our shape as config.json: the inverse of `_config`."""
  return dict(
    architectures=["T5ForConditionalGeneration"],
    model_type="t5",
    is_encoder_decoder=True,
    vocab_size=config.table_size,
    d_model=config.emb_dim,
    num_heads=config.num_heads,
    d_kv=config.head_dim,
    d_ff=config.mlp_dim,
    num_layers=config.num_encoder_layers,
    num_decoder_layers=config.num_decoder_layers,
    feed_forward_proj="gated-gelu" if config.gated else "relu",
    tie_word_embeddings=config.tied_logits,
    dropout_rate=config.dropout_rate,
    pad_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=0,
  )


def _config(folder: str, about: Mapping[str, Any]) -> T5Config:
  """config.json as our shape; where logits are scaled they are tied."""
  gated = about["feed_forward_proj"] == "gated-gelu"
  require_known(
    folder,
    about,
    feed_forward_proj=("relu", "gated-gelu"),
    dense_act_fn=("gelu_new" if gated else "relu",),
    is_gated_act=(gated,),
    tie_word_embeddings=(True, False),
    scale_decoder_outputs=(True, False),
    decoder_start_token_id=(PAD_ID,),
    pad_token_id=(PAD_ID,),
    relative_attention_num_buckets=(32,),
    relative_attention_max_distance=(128,),
    layer_norm_epsilon=(1e-6,),
  )
  if about.get("num_decoder_layers") is None:
    about = {**about, "num_decoder_layers": about.get("num_layers")}
  sizes = "vocab_size", "d_model", "num_heads", "d_kv", "d_ff", "num_layers", "num_decoder_layers"
  require_sizes(folder, about, *sizes)
  return T5Config(
    vocab_size=about["vocab_size"],
    emb_dim=about["d_model"],
    num_heads=about["num_heads"],
    head_dim=about["d_kv"],
    mlp_dim=about["d_ff"],
    num_encoder_layers=about["num_layers"],
    num_decoder_layers=about["num_decoder_layers"],
    gated=gated,
    activation="gelu" if gated else "relu",
    tied_logits=about["scale_decoder_outputs"],
  )


def _our_name(name: str) -> str:
  """Name in our tree; a name that is not known stays, to be told when shapes are compared."""
  match = _IN_LAYER.fullmatch(name)
  if name in _NAMES or not match or (match[1], match[3]) not in _PARTS:
    return _NAMES.get(name, name)
  stack, layer, part, kernel = match.groups()
  block, norm, _ = _PARTS[stack, part]
  inside = f"{block}/{_KERNELS.get(kernel, kernel)}/kernel" if kernel else f"{norm}/scale"
  return f"{stack}/layers_{layer}/{inside}"


def _their_name(name: str) -> str:
  """Name of one of our parameters in their files: the inverse of `_our_name`."""
  for theirs, ours in _NAMES.items():
    if name == ours:
      return theirs
  stack, layer, block, *kernel = name.split("/")
  for (in_stack, part), (ours, norm, theirs) in _PARTS.items():
    if in_stack == stack and block in (ours, norm):
      inside = "layer_norm"
      if block == ours:
        short = {long: short for short, long in _KERNELS.items()}
        inside = f"{theirs}.{short.get(kernel[0], kernel[0])}"
      return f"{stack}.block.{layer.removeprefix('layers_')}.layer.{part}.{inside}.weight"
  raise InputError(f"{name} is no parameter of a T5 that transformers has.")
