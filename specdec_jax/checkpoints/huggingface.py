"""Reader of Hugging Face checkpoints, and writer for T5.

This module reads T5, mT5 and umT5; `bart`, `t5gemma` and `gpt2` read the other models.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from flax import traverse_util
from safetensors.numpy import save

from specdec_jax.checkpoints import bart, gpt2, t5gemma
from specdec_jax.checkpoints.pretrained import (
  CONFIG,
  WEIGHTS,
  generation_of,
  open_arrays,
  read_config,
  read_eos_ids,
  read_generation,
  require_known,
)
from specdec_jax.checkpoints.stored import LOGITS, TABLE, Checkpoint, StoredArray, equal
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.errors import InputError
from specdec_jax.models.config import T5Config

_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_NAMES = {
  # The embedding table has three names in transformers; safetensors stores one of them.
  **dict.fromkeys(
    ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), TABLE
  ),
  "lm_head.weight": LOGITS,
  f"encoder.{_BIAS}": "encoder/relpos_bias/rel_embedding",
  f"decoder.{_BIAS}": "decoder/relpos_bias/rel_embedding",
  "encoder.final_layer_norm.weight": "encoder/encoder_norm/scale",
  "decoder.final_layer_norm.weight": "decoder/decoder_norm/scale",
}
# For each part of a layer: its name in this package, the name of the norm before it, and the name
# of the part in the file.
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
# The biases of relative positions as `_our_name` returns them, of layer 0 or of a different layer.
_LAYER_BIAS = re.compile(
  r"(\w+)/(?:relpos_bias/rel_embedding|layers_(\d+)/\w+/relative_attention_bias/kernel)"
)
# By `feed_forward_proj`: `dense_act_fn` in transformers, and the name in this package.
_ACTIVATIONS: dict[str, tuple[str, Literal["gelu", "relu", "silu"]]] = {
  "relu": ("relu", "relu"),
  "gated-gelu": ("gelu_new", "gelu"),
  "gated-silu": ("silu", "silu"),
}
# Fields that the configuration of a T5 in transformers may have; the others have their defaults.
_T5_FIELDS = (
  *("vocab_size", "padded_vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim"),
  *("num_encoder_layers", "num_decoder_layers", "gated", "activation", "tied_logits"),
  *("eos_id", "start_id", "pad_id", "dtype", "dropout_rate"),
)
_KERNELS = {"q": "query", "k": "key", "v": "value", "o": "out"}
_IN_LAYER = re.compile(r"(\w+)\.block\.(\d+)\.layer\.(\d)\.(?:layer_norm|\w+\.(\w+))\.weight")
# Old conversions of T5 1.0 contain this array, which no model uses.
_UNUSED = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"


class _Reader(NamedTuple):
  """Reader of the checkpoints of some model types.

  Attributes:
    unused: regular expression for the names of arrays to leave out.
    rename: function from a name in the file to the name in this package.
    open: function from (folder, fields of the config, arrays) to the checkpoint.
  """

  unused: str
  rename: Callable[[str], str]
  open: Callable[[str, Mapping[str, Any], dict[str, StoredArray]], Checkpoint]


def open_huggingface(folder: str) -> Checkpoint:
  """Open the checkpoint of a supported model that `save_pretrained` wrote as safetensors.

  Raises:
    InputError: the model is not supported, or files are damaged or missing.
  """
  fields = {"model_type": None, **read_config(folder)}
  reader = _reader(folder, fields)
  arrays = open_arrays(folder, reader.unused, reader.rename)
  return reader.open(folder, fields, arrays)._replace(generation=read_generation(folder))


def open_state(
  name: str, fields: Mapping[str, Any], state: Mapping[str, StoredArray], settings: Mapping
) -> Checkpoint:
  """Return the `Checkpoint` of a transformers model that is in memory.

  Args:
    name: name of the model, for messages.
    fields: fields of its configuration.
    state: its arrays, by their names in transformers.
    settings: its generation settings.

  Raises:
    InputError: the model is not supported.
  """
  fields = {"model_type": None, **fields}
  unused, rename, open_arrays_of = _reader(name, fields)
  arrays = {rename(key): x for key, x in state.items() if not re.fullmatch(unused, key)}
  tasks = fields.get("task_specific_params")
  return open_arrays_of(name, fields, arrays)._replace(
    generation=generation_of("its generation_config", settings, tasks)
  )


def _reader(name: str, fields: Mapping[str, Any]) -> _Reader:
  """Return the reader of a model. Raise InputError if its type is not supported."""
  t5 = _Reader(_UNUSED, _our_name, _open_t5)
  readers = {
    **dict.fromkeys(("t5", "mt5", "umt5"), t5),
    "gpt2": _Reader(*gpt2.NAMES, gpt2.open_gpt2),
    "t5gemma": _Reader(*t5gemma.NAMES, t5gemma.open_t5gemma),
    **{kind: _Reader(*bart.names(kind), bart.open_bart) for kind in bart.MODEL_TYPES},
  }
  require_known(name, fields, model_type=tuple(readers))
  return readers[fields["model_type"]]


def _open_t5(folder: str, fields: Mapping[str, Any], arrays: dict[str, StoredArray]) -> Checkpoint:
  """Open a Hugging Face checkpoint of a T5, mT5 or umT5.

  Logits are computed with `lm_head.weight` if the file contains it, otherwise with the embedding
  table. T5 1.0 scales the decoder's hidden states before it multiplies them by the embedding table;
  mT5 and umT5 do not. In transformers 4 the field `tie_word_embeddings` says whether hidden states
  are scaled. In transformers 5 the field `scale_decoder_outputs` says whether they are, and
  `tie_word_embeddings` is always true.
  """
  is_t5 = fields["model_type"] == "t5"
  defaults = dict(feed_forward_proj="relu" if is_t5 else "gated-gelu", tie_word_embeddings=is_t5)
  fields = {**defaults, **fields}
  scales = is_t5 or str(fields.get("transformers_version")).startswith("4.")
  fields = {"scale_decoder_outputs": fields["tie_word_embeddings"] and scales, **fields}
  config = _config(folder, fields)
  if config.bias_per_layer:
    arrays = {_with_layer_bias(name): x for name, x in arrays.items()}
  if LOGITS in arrays and config.tied_logits:
    if TABLE in arrays and equal(arrays[LOGITS], arrays[TABLE]):
      del arrays[LOGITS]
    else:
      arrays[LOGITS] = arrays[LOGITS] / config.logits_divisor
      config = dataclasses.replace(config, tied_logits=False)
  elif TABLE in arrays and fields["tie_word_embeddings"] and not config.tied_logits:
    arrays.setdefault(LOGITS, arrays[TABLE])
  # transformers stores matrices transposed, except for the embedding table.
  arrays = {name: x.T if len(x.shape) == 2 and name != TABLE else x for name, x in arrays.items()}
  return Checkpoint(folder, config, arrays, None, read_eos_ids(fields, default=1))


def save_huggingface(folder: str, config: T5Config, params) -> None:
  """Write a T5 to `folder` as transformers' `save_pretrained` does, in the dtype of its parameters.

  This is the inverse of `open_huggingface`, except that padding of the embedding table becomes part
  of the vocabulary. It writes `model.safetensors`, then `config.json`; either both files are
  written or neither.

  Args:
    folder: folder to write to; created if it does not exist.
    config: config of the model, which must not be `fused`.
    params: parameters of the model.

  Raises:
    InputError: transformers has no model with this config.
  """
  kind = ("gated-" if config.gated else "") + config.activation
  t5 = T5Config(**{name: getattr(config, name) for name in _T5_FIELDS})
  others = [name for name, value in vars(t5).items() if value != getattr(config, name)]
  if others or kind not in _ACTIVATIONS:
    raise InputError(
      f"A model with {', '.join(f'{name} {getattr(config, name)!r}' for name in others) or kind} "
      f"cannot be written for transformers as a T5, which has {', '.join(_ACTIVATIONS)}."
    )
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  arrays = {}
  for name, value in traverse_util.flatten_dict(params, sep="/").items():
    array = np.asarray(value)
    array = array.T if array.ndim == 2 and name != TABLE else array
    arrays[_their_name(name)] = np.ascontiguousarray(array)
  with atomic_write(path / CONFIG) as config_file, atomic_write(path / WEIGHTS, "wb") as weights:
    weights.write(save(arrays, {"format": "pt"}))
    config_file.write(json.dumps(_config_fields(config), indent=2) + "\n")


def _config_fields(config: T5Config) -> dict:
  """Return the fields of config.json: the inverse of `_config`, except for padding and dropout."""
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
    feed_forward_proj=("gated-" if config.gated else "") + config.activation,
    tie_word_embeddings=config.tied_logits,
    dropout_rate=config.dropout_rate,
    pad_token_id=config.pad_id,
    eos_token_id=config.eos_id,
    decoder_start_token_id=config.start_id,
  )


def _config(folder: str, fields: Mapping[str, Any]) -> T5Config:
  """Return the config of the model that the fields of config.json describe.

  In this package tied logits are always scaled, so `tied_logits` equals `scale_decoder_outputs`.
  """
  kind = fields["feed_forward_proj"]
  require_known(folder, fields, feed_forward_proj=tuple(_ACTIVATIONS))
  (their_activation, activation), gated = _ACTIVATIONS[kind], kind.startswith("gated")
  require_known(
    folder,
    fields,
    dense_act_fn=(their_activation,),
    is_gated_act=(gated,),
    tie_word_embeddings=(True, False),
    scale_decoder_outputs=(True, False),
    relative_attention_num_buckets=(32,),
    relative_attention_max_distance=(128,),
    layer_norm_epsilon=(1e-6,),
  )
  fields = {"pad_token_id": 0, "decoder_start_token_id": 0, **fields}
  if fields.get("num_decoder_layers") is None:
    fields = {**fields, "num_decoder_layers": fields["num_layers"]}
  return T5Config(
    vocab_size=fields["vocab_size"],
    emb_dim=fields["d_model"],
    num_heads=fields["num_heads"],
    head_dim=fields["d_kv"],
    mlp_dim=fields["d_ff"],
    num_encoder_layers=fields["num_layers"],
    num_decoder_layers=fields["num_decoder_layers"],
    gated=gated,
    activation=activation,
    bias_per_layer=fields["model_type"] == "umt5",
    tied_logits=fields["scale_decoder_outputs"],
    pad_id=fields["pad_token_id"],
    start_id=fields["decoder_start_token_id"],
    eos_id=read_eos_ids(fields, default=1)[0],
  )


def _our_name(name: str) -> str:
  """Return the name that an array has in this package, given its name in the file.

  An unknown name is returned unchanged; it is reported when arrays are compared with the config.
  """
  match = _IN_LAYER.fullmatch(name)
  if name in _NAMES or not match or (match[1], match[3]) not in _PARTS:
    return _NAMES.get(name, name)
  stack, layer, part, kernel = match.groups()
  block, norm, _ = _PARTS[stack, part]
  inside = f"{block}/{_KERNELS.get(kernel, kernel)}/kernel" if kernel else f"{norm}/scale"
  return f"{stack}/layers_{layer}/{inside}"


def _with_layer_bias(name: str) -> str:
  """Return the name of an array of a umT5, given the name that `_our_name` returns."""
  match = _LAYER_BIAS.fullmatch(name)
  return f"{match[1]}/layers_{match[2] or 0}/relpos_bias/rel_embedding" if match else name


def _their_name(name: str) -> str:
  """Return the name that a parameter has in the file; this is the inverse of `_our_name`."""
  for file_name, our_name in _NAMES.items():
    if name == our_name:
      return file_name
  stack, layer, block, *kernel = name.split("/")
  for (part_stack, part), (our_block, norm, file_block) in _PARTS.items():
    if part_stack == stack and block in (our_block, norm):
      inside = "layer_norm"
      if block == our_block:
        short = {long: short for short, long in _KERNELS.items()}
        inside = f"{file_block}.{short.get(kernel[0], kernel[0])}"
      return f"{stack}.block.{layer.removeprefix('layers_')}.layer.{part}.{inside}.weight"
  raise InputError(f"{name} is not a parameter of a T5 in transformers.")
