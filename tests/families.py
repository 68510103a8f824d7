"""Small random models of encoder-decoder families, made by transformers."""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

# By name: the prefix of the classes in transformers, and fields of the configuration that differ
# from `_SIZES`, `_T5` or `_GEMMA`.
FAMILIES = {
  "bart": ("Bart", {}),
  "bart, few layers": ("Bart", dict(decoder_layers=1, decoder_ffn_dim=48, scale_embedding=True)),
  "mbart": ("MBart", dict(scale_embedding=True, decoder_start_token_id=2)),
  "pegasus": ("Pegasus", dict(scale_embedding=True, activation_function="relu")),
  "marian": (
    "Marian",
    dict(
      scale_embedding=True,
      activation_function="swish",
      pad_token_id=95,
      decoder_start_token_id=95,
      eos_token_id=0,
    ),
  ),
  "marian, two tables": (
    "Marian",
    dict(
      share_encoder_decoder_embeddings=False,
      tie_word_embeddings=False,
      activation_function="relu",
      pad_token_id=95,
      decoder_start_token_id=95,
      eos_token_id=0,
    ),
  ),
  "m2m_100": ("M2M100", {}),
  "t5gemma": ("T5Gemma", {}),
  "t5gemma, grouped": ("T5Gemma", dict(num_key_value_heads=2)),
  "madlad": ("T5", dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=0)),
  "umt5, tied": ("UMT5", dict(tie_word_embeddings=True)),
  "pile-t5": ("UMT5", dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=0)),
  "t5gemma, unequal": ("T5Gemma", dict(hidden_size=24, num_hidden_layers=3, num_key_value_heads=2)),
}
CROSS_ATTENTION = "encoder_attn", "cross_attn", "EncDecAttention"
_SIZES = dict(
  vocab_size=96,
  d_model=32,
  encoder_layers=2,
  decoder_layers=2,
  encoder_attention_heads=4,
  decoder_attention_heads=4,
  encoder_ffn_dim=64,
  decoder_ffn_dim=64,
  max_position_embeddings=64,
)
_T5 = dict(
  vocab_size=96,
  d_model=32,
  d_kv=8,
  d_ff=64,
  num_heads=4,
  num_layers=2,
  feed_forward_proj="gated-gelu",
  tie_word_embeddings=False,
)
_GEMMA = dict(
  vocab_size=96,
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=4,
  head_dim=8,
  sliding_window=6,
  query_pre_attn_scalar=10,
  attn_logit_softcapping=2.0,
  final_logit_softcapping=3.0,
)


def model_of(name, seed=0):
  """Return a PyTorch model of a family with random weights.

  Scales are so large that each part of the model changes the logits.
  """
  import torch
  import transformers

  family, fields = FAMILIES[name]
  make = getattr(transformers, f"{family}Config")
  if family == "T5Gemma":
    # The window of transformers 5 includes the token at this distance, unlike those of version 4
    # and of the published code.
    window = _GEMMA["sliding_window"] - (not transformers.__version__.startswith("4."))
    encoder = _GEMMA | {"sliding_window": window} | fields
    config = make(encoder=encoder, decoder=_GEMMA, vocab_size=96)
  else:
    config = make(**(_T5 if family.endswith("T5") else _SIZES) | fields)
  config._attn_implementation = "eager"  # the others ignore soft caps in transformers 4
  torch.manual_seed(seed)
  model = getattr(
    transformers, f"{family}{'MTModel' if family == 'Marian' else 'ForConditionalGeneration'}"
  )(config)
  with torch.no_grad():
    for key, weight in model.named_parameters():
      if "embed_positions" in key and family in ("Pegasus", "Marian") and "tables" not in name:
        continue  # sinusoids
      spread = 1.5 * weight.shape[-1] ** -0.5
      if weight.ndim == 1:
        spread = 0.1 if key.endswith("bias") else 0.5
      weight += spread * torch.randn_like(weight)
      if "shared" in key or "embed_tokens" in key:  # tied logits would repeat the last token
        weight *= 2.0 if "tables" in name else 0.4
      if "embed_positions" in key and "tables" in name:  # otherwise the source matters less
        weight *= 0.3
      if key.endswith("Attention.q.weight"):  # T5 has no scale of attention
        weight *= 0.35
      if any(part in key for part in CROSS_ATTENTION) and weight.ndim == 2:
        weight *= 1.5
    if hasattr(model, "final_logits_bias"):
      model.final_logits_bias += 0.1 * torch.randn_like(model.final_logits_bias)
  return model.eval()


def saved(name, folder):
  """Save a model of a family to a folder, and return it."""
  model = model_of(name)
  model.save_pretrained(folder)
  if name == "marian, two tables":  # with learned positions, as `save_pretrained` does not write
    file = pathlib.Path(folder) / "model.safetensors"
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    save_file({key: np.ascontiguousarray(value) for key, value in state.items()}, file)
  if name.startswith("t5gemma"):
    file = pathlib.Path(folder) / "config.json"
    fields = json.loads(file.read_text())
    fields["encoder"]["sliding_window"] = _GEMMA["sliding_window"]
    file.write_text(json.dumps(fields))
  return model


def sources(config, seed, num_rows, width):
  """Return random sources [num_rows, width] that end with EOS and padding; one has no padding."""
  rng = np.random.default_rng(seed)
  special = {config.pad_id, config.eos_id, config.start_id}
  ordinary = [i for i in range(config.vocab_size) if i not in special]
  rows = np.full((num_rows, width), config.pad_id, np.int32)
  for i, row in enumerate(rows):
    length = width if i == 0 else rng.integers(2, width + 1)
    row[: length - 1], row[length - 1] = rng.choice(ordinary, length - 1), config.eos_id
  return rows
