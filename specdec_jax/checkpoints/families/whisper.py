"""Whisper in the format of Hugging Face."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec_jax.checkpoints.families import bart
from specdec_jax.checkpoints.families.mapping import expand, require_known
from specdec_jax.checkpoints.formats import LOGITS, TABLE, Leaf
from specdec_jax.models.config import T5Config
from specdec_jax.models.whisper import SpeechTokens

PREFIX = "model."
UNUSED = r"(?!)"  # there are none
TRANSPOSED = ("/kernel",)
_SIZES: dict[str, Any] = dict(
  vocab_size=51865,
  num_mel_bins=80,
  d_model=384,
  max_source_positions=1500,
  max_target_positions=448,
  decoder_start_token_id=50257,
  pad_token_id=50256,
  eos_token_id=50256,
)
for _stack in ("encoder", "decoder"):
  _SIZES |= {f"{_stack}_layers": 4, f"{_stack}_attention_heads": 6, f"{_stack}_ffn_dim": 1536}
# Fields of generation_config.json that `tokens` reads, and those that change no text.
SPEECH = (
  *("lang_to_id", "task_to_id", "no_timestamps_token_id", "prev_sot_token_id", "is_multilingual"),
  *("max_initial_timestamp_index", "forced_decoder_ids", "language", "task", "return_timestamps"),
  *("alignment_heads", "median_filter_width"),
)


def names(config: T5Config) -> dict[str, str]:
  """Return our name for each name in transformers."""
  convolutions = {f"encoder.{name}": name for name in ("conv1", "conv2")}
  return bart.names(config) | expand(convolutions) | {"proj_out.weight": LOGITS}


def config(path: str, fields: Mapping[str, Any]) -> T5Config:
  """Return the config of the model that the fields of config.json describe."""
  require_known(path, fields, activation_function=("gelu",), scale_embedding=(False,))
  require_known(path, fields, tie_word_embeddings=(True,))
  fields = _SIZES | {name: value for name, value in fields.items() if value is not None}
  return T5Config(
    **bart.shared_fields(fields),
    num_mels=fields["num_mel_bins"],
    source_positions=fields["max_source_positions"],
    activation="gelu_exact",
    num_positions=fields["max_target_positions"],
  )


def convert(
  config: T5Config, fields: Mapping[str, Any], arrays: Mapping[str, Any]
) -> tuple[T5Config, dict[str, Leaf]]:
  """Return the config and the leaves; keys get biases of 0, and convolutions become matrices.

  The scale of attention is merged into the projection of queries.
  """
  leaves = {name: Leaf(array) for name, array in arrays.items()}
  if TABLE in arrays:
    leaves.setdefault(LOGITS, Leaf(arrays[TABLE].T))
  for name, array in arrays.items():
    if name.startswith("conv") and array.ndim == 3:
      leaves[name] = Leaf(array.transpose(2, 1, 0).reshape(-1, len(array)))
    elif "/query/" in name:
      sizes = config.encoder if name.startswith("encoder") else config
      leaves[name] = Leaf(array, divisor=sizes.head_dim**0.5)
    elif name.endswith("/key/kernel"):
      bias = np.zeros(array.shape[1:], array.dtype)
      leaves.setdefault(name.replace("kernel", "bias"), Leaf(bias))
  return config, leaves


def tokens(fields: Mapping[str, Any]) -> SpeechTokens:
  """Return the tokens of prompts and of timestamps that the fields of a checkpoint's files name."""
  languages = {name.strip("<|>"): i for name, i in (fields.get("lang_to_id") or {}).items()}
  return SpeechTokens(
    start_id=fields["decoder_start_token_id"],
    languages=languages if fields.get("is_multilingual", True) else {},
    tasks=fields.get("task_to_id") or {},
    forced=tuple(token for _, token in fields.get("forced_decoder_ids") or ()),
    no_timestamps_id=fields.get("no_timestamps_token_id"),
    previous_id=fields.get("prev_sot_token_id"),
    max_initial=fields.get("max_initial_timestamp_index"),
    language=fields.get("language"),
    task=fields.get("task"),
  )
