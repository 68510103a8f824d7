"""Reader of Hugging Face checkpoints of BART, mBART, PEGASUS, Marian, M2M100 and NLLB."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from specdec_jax.checkpoints.pretrained import read_eos_ids, require_known
from specdec_jax.checkpoints.stored import LOGITS, TABLE, Checkpoint, StoredArray
from specdec_jax.models.config import T5Config

# Defaults of the fields of config.json that differ between the types of models.
MODEL_TYPES: dict[str, dict[str, Any]] = {
  "bart": dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=2),
  "mbart": dict(pad_token_id=1, eos_token_id=2),
  "pegasus": dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0),
  "marian": dict(pad_token_id=58100, eos_token_id=0, decoder_start_token_id=58100),
  "m2m_100": dict(
    pad_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
    scale_embedding=True,
    activation_function="relu",
  ),
}
_NORM_AFTER = "bart", "marian"  # each norm follows its block, and no norm follows the last layer
_NORM_AFTER_EMBEDDINGS = "bart", "mbart"
_LEARNED_POSITIONS = "bart", "mbart"
_POSITION_OFFSET = 2  # rows before the first position

Activation = Literal["gelu", "gelu_exact", "relu", "silu"]
_ACTIVATIONS: dict[str, Activation] = {
  "gelu": "gelu_exact",
  "gelu_new": "gelu",
  "relu": "relu",
  "swish": "silu",
  "silu": "silu",
}
_LOGITS_BIAS = "decoder/logits_dense/bias"
_NAMES = {
  **dict.fromkeys(
    ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), TABLE
  ),
  "lm_head.weight": LOGITS,
  "final_logits_bias": _LOGITS_BIAS,
}
_IN_STACK = re.compile(
  r"(encoder|decoder)\.(?:layers\.(\d+)\.)?(\w+)(?:\.(\w)\w*_proj)?\.(weight|bias)"
)
_KERNELS = {"q": "query", "k": "key", "v": "value", "o": "out"}
_DENSE = {"fc1": "mlp/wi", "fc2": "mlp/wo", "encoder_attn": "encoder_decoder_attention"}
# Sinusoidal positions, which are computed, and the fairseq version that old files contain.
_SINUSOIDAL = r"(model\.)?(encoder|decoder)\.embed_positions\.\w+|(model\.)?(en|de)coder\.version"


def names(model_type: str) -> tuple[str, Callable[[str], str]]:
  """Return a pattern for arrays to leave out, and the function that renames the other arrays."""
  unused = r"(model\.)?(en|de)coder\.version" if model_type in _LEARNED_POSITIONS else _SINUSOIDAL
  place = "post" if model_type in _NORM_AFTER else "pre"
  return unused, functools.partial(_our_name, place=place)


def open_bart(folder: str, fields: Mapping[str, Any], arrays: dict[str, StoredArray]) -> Checkpoint:
  """Open a checkpoint of a BART, mBART, PEGASUS, Marian, M2M100 or NLLB.

  Factors that transformers applies to activations are merged into parameters: the scale of
  attention into the projection of queries, and the scale of embeddings into their table. Sinusoidal
  positions become parameters.

  Args:
    folder: folder of the model, or a description of a model in memory.
    fields: fields of its config, such as the result of `read_config`.
    arrays: arrays of the model by their names in this package.

  Raises:
    InputError: the config has an unsupported value, or files are damaged or missing.
  """
  kind = fields["model_type"]
  fields = {**MODEL_TYPES[kind], **{k: x for k, x in fields.items() if x is not None}}
  fields = {"scale_embedding": False, "activation_function": "gelu", **fields}
  fields.setdefault("decoder_start_token_id", fields.get("bos_token_id"))
  config = _config(folder, fields, has_bias=_has_bias(arrays))
  # transformers stores matrices transposed, except for the embeddings.
  kept = TABLE, "encoder/positions", "decoder/positions"
  arrays = {
    name: x.T if len(x.shape) == 2 and name not in kept else x for name, x in arrays.items()
  }
  if not config.logits_bias:
    arrays.pop(_LOGITS_BIAS, None)
  elif len(arrays[_LOGITS_BIAS].shape) == 2:
    bias = arrays[_LOGITS_BIAS].T
    arrays[_LOGITS_BIAS] = StoredArray(
      bias.shape[1:], bias.dtype, lambda index: bias.whole()[0][index]
    )
  if TABLE in arrays:
    arrays.setdefault(LOGITS, arrays[TABLE].T)
    if fields["scale_embedding"]:
      arrays[TABLE] = arrays[TABLE] / config.emb_dim**-0.5
  for stack, sizes in (("encoder", config.encoder), ("decoder", config)):
    positions = f"{stack}/positions"
    if kind in _LEARNED_POSITIONS:
      if positions in arrays:
        arrays[positions] = arrays[positions].rows(_POSITION_OFFSET)
    else:
      table = sinusoids(kind, fields["max_position_embeddings"], config.emb_dim, config.pad_id)
      arrays[positions] = StoredArray(table.shape, table.dtype, table.__getitem__)
    for name in arrays:
      if name.startswith(stack) and "/query/" in name:
        arrays[name] = arrays[name] / sizes.head_dim**0.5
  eos_ids = read_eos_ids(fields, fields["eos_token_id"])
  return Checkpoint(folder, config, arrays, None, eos_ids)


def _has_bias(arrays: Mapping[str, StoredArray]) -> bool:
  """Return whether the logits have a bias that is not 0 everywhere."""
  return _LOGITS_BIAS in arrays and bool(arrays[_LOGITS_BIAS].whole().any())


def _config(folder: str, fields: Mapping[str, Any], has_bias: bool) -> T5Config:
  """Return the config of the model that the fields of config.json describe."""
  kind = fields["model_type"]
  require_known(
    folder,
    fields,
    activation_function=tuple(_ACTIVATIONS),
    scale_embedding=(False, True),
    tie_word_embeddings=(True,),
    share_encoder_decoder_embeddings=(True,),
    decoder_vocab_size=(fields.get("vocab_size"),),
  )
  width = fields["d_model"]

  def sizes_of(stack: str) -> tuple[int, int, int, int, int]:
    num_heads = fields[f"{stack}_attention_heads"]
    return width, num_heads, num_heads, width // num_heads, fields[f"{stack}_ffn_dim"]

  encoder, decoder = sizes_of("encoder"), sizes_of("decoder")
  _, num_heads, _, head_dim, mlp_dim = decoder
  return T5Config(
    vocab_size=fields["vocab_size"],
    emb_dim=width,
    num_heads=num_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    num_encoder_layers=fields["encoder_layers"],
    num_decoder_layers=fields["decoder_layers"],
    encoder_sizes=None if encoder == decoder else encoder,
    gated=False,
    activation=_ACTIVATIONS[fields["activation_function"]],
    norm_position="after" if kind in _NORM_AFTER else "before",
    has_final_norm=kind not in _NORM_AFTER,
    embedding_norm=kind in _NORM_AFTER_EMBEDDINGS,
    logits_bias=has_bias,
    biases=True,
    num_positions=fields["max_position_embeddings"],
    pad_id=fields["pad_token_id"],
    start_id=fields["decoder_start_token_id"],
    eos_id=read_eos_ids(fields, fields["eos_token_id"])[0],
  )


def sinusoids(kind: str, num_positions: int, emb_dim: int, pad_id: int) -> np.ndarray:
  """Return the float32 table [num_positions, emb_dim] of sinusoidal positions of a type of model.

  The first half of a row has sines, the second half cosines. The wavelengths of PEGASUS and Marian
  are those of Vaswani et al. (2017). M2M100 divides exponents by one less than half of emb_dim, and
  its positions start at pad_id + 1.
  """
  half = np.arange(emb_dim // 2)
  first = pad_id + 1 if kind == "m2m_100" else 0
  exponents = half / (emb_dim // 2 - 1) if kind == "m2m_100" else 2 * half / emb_dim
  angles = np.arange(first, first + num_positions)[:, None] / 10000.0**exponents
  return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _our_name(name: str, place: str) -> str:
  """Return the name that an array has in this package, given its name in the file.

  An unknown name only loses the prefix "model."; it is reported when arrays are compared with the
  config.

  Args:
    name: name in the file.
    place: 'pre' or 'post', the place of norms relative to their block.
  """
  name = name.removeprefix("model.")
  match = _IN_STACK.fullmatch(name)
  if name in _NAMES or not match:
    return _NAMES.get(name, name)
  stack, layer, part, projection, kind = match.groups()
  if part == "embed_positions":
    return f"{stack}/positions"
  self_attention = "attention" if stack == "encoder" else "self_attention"
  norms = {
    "self_attn_layer_norm": f"{place}_{self_attention}_layer_norm",
    "encoder_attn_layer_norm": f"{place}_cross_attention_layer_norm",
    "final_layer_norm": f"{place}_mlp_layer_norm",
  }
  if layer is None:
    norm = {"layernorm_embedding": "embedding_norm", "layer_norm": f"{stack}_norm"}.get(part, part)
    return f"{stack}/{norm}/{'scale' if kind == 'weight' else 'bias'}"
  if part in norms:
    return f"{stack}/layers_{layer}/{norms[part]}/{'scale' if kind == 'weight' else 'bias'}"
  block = {**_DENSE, "self_attn": self_attention}.get(part, part)
  block = f"{block}/{_KERNELS.get(projection, projection)}" if projection else block
  return f"{stack}/layers_{layer}/{block}/{'kernel' if kind == 'weight' else 'bias'}"
