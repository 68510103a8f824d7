"""BART, mBART, PEGASUS, Marian, M2M100 and NLLB in the format of Hugging Face."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from specdec_jax.checkpoints.families.mapping import attention, expand, read_eos_ids, require_known
from specdec_jax.checkpoints.formats import LOGITS, TABLE, Leaf
from specdec_jax.models.config import T5Config

# Defaults of the fields of config.json that differ between the types of models.
DEFAULTS: dict[str, dict[str, Any]] = {
  "bart": dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=2),
  "mbart": dict(pad_token_id=1, eos_token_id=2),
  "pegasus": dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0),
  "marian": dict(
    vocab_size=58101, pad_token_id=58100, eos_token_id=0, decoder_start_token_id=58100
  ),
  "m2m_100": dict(
    vocab_size=128112,
    pad_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
    scale_embedding=True,
    activation_function="relu",
  ),
}
_SIZES: dict[str, Any] = dict(
  vocab_size=50265, d_model=1024, max_position_embeddings=1024, scale_embedding=False
) | dict(activation_function="gelu", bos_token_id=0)
for _stack in ("encoder", "decoder"):
  _SIZES |= {f"{_stack}_layers": 12, f"{_stack}_attention_heads": 16, f"{_stack}_ffn_dim": 4096}
_NORM_AFTER = "bart", "marian"  # each norm follows its block, and no norm follows the last layer
_LEARNED_POSITIONS = "bart", "mbart"  # also with a norm after the embeddings
_POSITION_OFFSET = 2  # rows before the first learned position
_ACTIVATIONS: dict[str, Literal["gelu", "gelu_exact", "relu", "silu"]] = {
  "gelu": "gelu_exact",
  "gelu_new": "gelu",
  "relu": "relu",
  "swish": "silu",
  "silu": "silu",
}

PREFIX = "model."
# The version of fairseq, and sinusoidal positions that are no parameters.
UNUSED = r"(model\.)?(en|de)coder\.(version|embed_positions\.weights)"
TRANSPOSED = ("/kernel",)
ENCODER_TABLE, _BIAS = "encoder_embedder/embedding", "decoder/logits_dense/bias"


def names(config: T5Config) -> dict[str, str]:
  """Return our name for each name in transformers."""
  table = {
    "shared.weight": TABLE,
    "encoder.embed_tokens.weight": ENCODER_TABLE if config.encoder_embeddings else TABLE,
    "decoder.embed_tokens.weight": TABLE,
    "lm_head.weight": LOGITS,
    "final_logits_bias": _BIAS,
  }
  at = "post" if config.norm_position == "after" else "pre"
  for stack, own in (("encoder", "attention"), ("decoder", "self_attention")):
    theirs, ours = f"{stack}.layers.{{}}", f"{stack}/layers_{{}}"
    table[f"{stack}.embed_positions.weight"] = f"{stack}/positions"
    table |= expand(
      {
        f"{stack}.layernorm_embedding": f"{stack}/embedding_norm",
        f"{stack}.layer_norm": f"{stack}/{stack}_norm",
      }
    )
    layer = {
      **attention(f"{theirs}.self_attn", f"{ours}/{own}", "_proj", "out"),
      f"{theirs}.self_attn_layer_norm": f"{ours}/{at}_{own}_layer_norm",
      **attention(f"{theirs}.encoder_attn", f"{ours}/encoder_decoder_attention", "_proj", "out"),
      f"{theirs}.encoder_attn_layer_norm": f"{ours}/{at}_cross_attention_layer_norm",
      f"{theirs}.fc1": f"{ours}/mlp/wi",
      f"{theirs}.fc2": f"{ours}/mlp/wo",
      f"{theirs}.final_layer_norm": f"{ours}/{at}_mlp_layer_norm",
    }
    table |= expand(layer, getattr(config, f"num_{stack}_layers"))
  return table


def _with_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
  given = {name: value for name, value in fields.items() if value is not None}
  fields = _SIZES | DEFAULTS[given["model_type"]] | given
  fields.setdefault("decoder_start_token_id", fields.get("bos_token_id"))
  return fields


def config(path: str, fields: Mapping[str, Any]) -> T5Config:
  """Return the config of the model that the fields of config.json describe."""
  fields = _with_defaults(fields)
  kind = fields["model_type"]
  two_tables = (True, False) if kind == "marian" else (True,)
  require_known(
    path,
    fields,
    activation_function=tuple(_ACTIVATIONS),
    scale_embedding=(False, True),
    tie_word_embeddings=two_tables,
    share_encoder_decoder_embeddings=two_tables,
    decoder_vocab_size=(fields.get("vocab_size"),),
  )
  return T5Config(
    **shared_fields(fields),
    encoder_embeddings=not fields.get("share_encoder_decoder_embeddings", True),
    activation=_ACTIVATIONS[fields["activation_function"]],
    norm_position="after" if kind in _NORM_AFTER else "before",
    has_final_norm=kind not in _NORM_AFTER,
    embedding_norm=kind in _LEARNED_POSITIONS,
    num_positions=fields["max_position_embeddings"],
  )


def shared_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Return the fields of the config that all models like BART have, given those of config.json."""
  width = fields["d_model"]

  def sizes_of(stack: str) -> tuple[int, int, int, int, int]:
    num_heads = fields[f"{stack}_attention_heads"]
    return width, num_heads, num_heads, width // num_heads, fields[f"{stack}_ffn_dim"]

  encoder, decoder = sizes_of("encoder"), sizes_of("decoder")
  _, num_heads, _, head_dim, mlp_dim = decoder
  return dict(
    vocab_size=fields["vocab_size"],
    emb_dim=width,
    num_heads=num_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    num_encoder_layers=fields["encoder_layers"],
    num_decoder_layers=fields["decoder_layers"],
    encoder_sizes=None if encoder == decoder else encoder,
    gated=False,
    biases=True,
    pad_id=fields["pad_token_id"],
    start_id=fields["decoder_start_token_id"],
    eos_id=read_eos_ids(fields, fields["eos_token_id"])[0],
  )


def convert(
  config: T5Config, fields: Mapping[str, Any], arrays: Mapping[str, Any]
) -> tuple[T5Config, dict[str, Leaf]]:
  """Return the config and the leaves, with scales, and with sinusoidal positions that are missing.

  The scale of attention is merged into the projection of queries, and that of embeddings into their
  tables. Learned positions begin after the rows of padding.
  """
  fields = _with_defaults(fields)
  leaves = {name: Leaf(array) for name, array in arrays.items()}
  if _BIAS in arrays and np.asarray(arrays[_BIAS]).any():
    config = dataclasses.replace(config, logits_bias=True)
    leaves[_BIAS] = Leaf(arrays[_BIAS].reshape(arrays[_BIAS].shape[-1:]))
  else:
    leaves.pop(_BIAS, None)
  if TABLE in arrays and fields.get("tie_word_embeddings", True):
    leaves.setdefault(LOGITS, Leaf(arrays[TABLE].T))
  for table in {TABLE, ENCODER_TABLE} & arrays.keys():
    scale = config.emb_dim**-0.5 if fields["scale_embedding"] else 1.0
    leaves[table] = Leaf(arrays[table], divisor=scale)
  for stack, sizes in (("encoder", config.encoder), ("decoder", config)):
    positions = f"{stack}/positions"
    if fields["model_type"] not in _LEARNED_POSITIONS:
      leaves.setdefault(positions, Leaf(_sinusoids(config, fields["model_type"])))
    elif positions in arrays:
      leaves[positions] = Leaf(arrays[positions][_POSITION_OFFSET:])
    for name in arrays:
      if name.startswith(stack) and "/query/" in name:
        leaves[name] = Leaf(arrays[name], divisor=sizes.head_dim**0.5)
  return config, leaves


def _sinusoids(config: T5Config, kind: str) -> np.ndarray:
  """Return the float32 table [num_positions, emb_dim] of sinusoidal positions of a type of model.

  The first half of a row has sines, the second half cosines. The wavelengths of PEGASUS and Marian
  are those of Vaswani et al. (2017). M2M100 divides exponents by one less than half of emb_dim, and
  its positions start at pad_id + 1.
  """
  assert config.num_positions is not None
  half = np.arange(config.emb_dim // 2)
  first = config.pad_id + 1 if kind == "m2m_100" else 0
  exponents = half / (len(half) - 1) if kind == "m2m_100" else 2 * half / config.emb_dim
  angles = np.arange(first, first + config.num_positions)[:, None] / 10000.0**exponents
  return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
