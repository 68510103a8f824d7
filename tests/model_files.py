"""Tiny checkpoints of families of encoder-decoders in the format of Hugging Face, from numpy.

Names and shapes are those of transformers, which need not be installed. Weights are random.
"""
# mypy: ignore-errors

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

V, E, M, HEADS, LAYERS = 96, 32, 64, 4, 2  # tokens, width, width of the MLP, heads, layers
STACKS = "encoder", "decoder"
BART = dict(vocab_size=V, d_model=E, max_position_embeddings=64)
for _stack in STACKS:
  BART |= {f"{_stack}_layers": LAYERS, f"{_stack}_ffn_dim": M, f"{_stack}_attention_heads": HEADS}
T5 = dict(vocab_size=V, d_model=E, d_kv=8, d_ff=M, num_heads=HEADS, num_layers=LAYERS)
T5 |= dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, pad_token_id=1)
T5 |= dict(eos_token_id=2, decoder_start_token_id=0)
GEMMA = dict(vocab_size=V, hidden_size=E, intermediate_size=M, num_hidden_layers=LAYERS)
GEMMA |= dict(num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=8, sliding_window=6)
GEMMA |= dict(query_pre_attn_scalar=10, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
SCALED = dict(scale_embedding=True)
MARIAN = dict(activation_function="swish", pad_token_id=95, eos_token_id=0)
MODELS = {  # type of the model, and fields of its configuration that differ from those above
  "bart": ("bart", {}),
  "bart, one layer": ("bart", SCALED | dict(decoder_layers=1, decoder_ffn_dim=48)),
  "mbart": ("mbart", SCALED | dict(decoder_start_token_id=2)),
  "pegasus": ("pegasus", SCALED | dict(activation_function="relu")),
  "marian": ("marian", SCALED | MARIAN | dict(decoder_start_token_id=95)),
  "m2m_100": ("m2m_100", {}),
  "t5gemma": ("t5gemma", {}),
  "t5gemma, grouped": ("t5gemma", dict(num_key_value_heads=2)),
  "t5gemma, unequal": ("t5gemma", dict(hidden_size=24, num_hidden_layers=3)),
  "t5 1.0": ("t5", dict(feed_forward_proj="relu", tie_word_embeddings=True)),
  "madlad": ("t5", {}),
  "ul2": ("t5", dict(feed_forward_proj="gated-silu")),
  "mt5": ("mt5", {}),
  "mt5, tied": ("mt5", dict(tie_word_embeddings=True, transformers_version="4.57.6")),
  "umt5": ("umt5", {}),
}


def bart_shapes(kind, fields):
  shapes = {"model.shared.weight": (V, E), "final_logits_bias": (1, V)}
  parts = {}  # have a weight and a bias
  for stack in STACKS:
    at, mlp = f"model.{stack}", fields[f"{stack}_ffn_dim"]
    if kind in ("bart", "mbart"):
      shapes[f"{at}.embed_positions.weight"] = fields["max_position_embeddings"] + 2, E
      parts[f"{at}.layernorm_embedding"] = (E,)
    if kind not in ("bart", "marian"):
      parts[f"{at}.layer_norm"] = (E,)
    for layer in range(fields[f"{stack}_layers"]):
      inside = f"{at}.layers.{layer}"
      for name in ("self_attn", "encoder_attn")[: 1 + STACKS.index(stack)]:
        parts |= {f"{inside}.{name}.{x}_proj": (E, E) for x in ("q", "k", "v", "out")}
        parts[f"{inside}.{name}_layer_norm"] = (E,)
      parts |= {f"{inside}.fc1": (mlp, E), f"{inside}.fc2": (E, mlp)}
      parts[f"{inside}.final_layer_norm"] = (E,)
  for name, shape in parts.items():
    shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
  return shapes


def t5_shapes(kind, fields):
  shapes = {"shared.weight": (V, E)}
  if not fields["tie_word_embeddings"]:
    shapes["lm_head.weight"] = (V, E)
  for stack in STACKS:
    shapes[f"{stack}.final_layer_norm.weight"] = (E,)
    parts = ("SelfAttention", "EncDecAttention")[: 1 + STACKS.index(stack)]
    for layer in range(LAYERS):
      at = f"{stack}.block.{layer}.layer"
      if layer == 0 or kind == "umt5":
        shapes[f"{at}.0.SelfAttention.relative_attention_bias.weight"] = (32, HEADS)
      for i, part in enumerate(parts):
        shapes |= {f"{at}.{i}.{part}.{x}.weight": (E, E) for x in "qkvo"}
      gated, mlp = fields["feed_forward_proj"] != "relu", f"{at}.{len(parts)}.DenseReluDense"
      shapes |= {f"{mlp}.{x}.weight": (M, E) for x in (("wi_0", "wi_1") if gated else ("wi",))}
      shapes[f"{mlp}.wo.weight"] = (E, M)
      shapes |= {f"{at}.{i}.layer_norm.weight": (E,) for i in range(len(parts) + 1)}
  return shapes


def gemma_shapes(fields):
  shapes = {}
  for stack in STACKS:
    sizes, at = fields[stack], f"model.{stack}"
    width, mlp = sizes["hidden_size"], sizes["intermediate_size"]
    heads, kv = (sizes[f"num_{x}_heads"] * sizes["head_dim"] for x in ("attention", "key_value"))
    shapes |= {f"{at}.embed_tokens.weight": (V, width), f"{at}.norm.weight": (width,)}
    inputs = {"self_attn": width}  # the width of what each attention reads
    inputs |= {"cross_attn": fields["encoder"]["hidden_size"]} if stack == "decoder" else {}
    for layer in range(sizes["num_hidden_layers"]):
      part = f"{at}.layers.{layer}"
      for name, memory in inputs.items():
        shapes |= {f"{part}.{name}.{x}_proj.weight": (kv, memory) for x in "kv"}
        shapes[f"{part}.{name}.q_proj.weight"] = heads, width
        shapes[f"{part}.{name}.o_proj.weight"] = width, heads
      for norm in (*(f"{name}_layernorm" for name in inputs), "feedforward_layernorm"):
        shapes |= {f"{part}.{x}_{norm}.weight": (width,) for x in ("pre", "post")}
      shapes |= {f"{part}.mlp.{x}_proj.weight": (mlp, width) for x in ("gate", "up")}
      shapes[f"{part}.mlp.down_proj.weight"] = width, mlp
  return shapes


def write_models(folder: pathlib.Path):
  """Write a checkpoint of each of MODELS."""
  for name, (kind, changed) in MODELS.items():
    if kind == "t5gemma":
      fields = {"encoder": GEMMA | changed, "decoder": GEMMA, "vocab_size": V}
      shapes = gemma_shapes(fields)
    else:
      fields = (T5 if kind.endswith("t5") else BART) | changed
      shapes = (t5_shapes if kind.endswith("t5") else bart_shapes)(kind, fields)
    rng, path = np.random.default_rng(0), folder / name.replace(", ", "_").replace(" ", "_")
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": kind, **fields}))
    arrays = {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
    save_file(arrays, path / "model.safetensors")
