"""Configurations of published models, by family and size."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from specdec_jax.errors import InputError
from specdec_jax.models.config import GPTConfig, T5Config

# (emb_dim, num_heads, head_dim, layers of each stack, mlp_dim), as published for T5 1.0
# (Raffel et al., 2020) and T5 1.1; xl has 3B and xxl 11B parameters. tiny is the test model of t5x.
_SIZES = {
  "1.0": {
    "tiny": (8, 4, 3, 2, 16),
    "small": (512, 8, 64, 6, 2048),
    "base": (768, 12, 64, 12, 3072),
    "large": (1024, 16, 64, 24, 4096),
    "xl": (1024, 32, 128, 24, 16384),
    "xxl": (1024, 128, 128, 24, 65536),
  },
  "1.1": {
    "tiny": (8, 4, 3, 2, 16),
    "small": (512, 6, 64, 8, 1024),
    "base": (768, 12, 64, 12, 2048),
    "large": (1024, 16, 64, 24, 2816),
    "xl": (2048, 32, 64, 24, 5120),
    "xxl": (4096, 64, 64, 24, 10240),
  },
}


def version_name(version: str | float) -> str:
  """Return the name of a T5 version; gin files may give the version as a number."""
  return version if isinstance(version, str) else str(float(version))


def t5_config(size: str, version: str | float = "1.1", **overrides) -> T5Config:
  """Return the published configuration of a T5 model.

  Args:
    size: 'tiny' (test model of t5x), 'small', 'base', 'large', 'xl' (3B) or 'xxl' (11B).
    version: '1.0' (ReLU, tied logits) or '1.1' (gated GELU, untied logits); the numbers 1.0 and 1.1
      are accepted too.
    **overrides: fields of `T5Config` that differ from the published ones.
  """
  version = version_name(version)
  if version not in _SIZES:
    raise InputError(f"T5 version {version!r} is not known; use '1.0' or '1.1'.")
  if size not in _SIZES[version]:
    raise InputError(f"T5 size {size!r} is not known; use one of {', '.join(_SIZES[version])}.")
  emb_dim, num_heads, head_dim, num_layers, mlp_dim = _SIZES[version][size]
  published = T5Config(
    vocab_size=32100,
    padded_vocab_size=32128,
    emb_dim=emb_dim,
    num_heads=num_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    num_encoder_layers=num_layers,
    num_decoder_layers=num_layers,
    gated=version == "1.1",
    activation="gelu" if version == "1.1" else "relu",
    tied_logits=version == "1.0",
  )
  return dataclasses.replace(published, **overrides)


# (emb_dim, num_heads, head_dim, layers, mlp_dim) of decoder-only models. gpt_like: Section 4.2 of
# the paper; with separate matrices for embeddings and logits, the two sizes have the paper's 97M
# and 6M parameters. gpt2: Radford et al., 2019, and DistilGPT2. lamda: Thoppilan et al., 2022,
# Table 27, which counts parameters without embeddings. The table does not describe the model of
# 100M parameters; the size here follows the table's rules (head_dim 128, num_heads = emb_dim / 64,
# mlp_dim = 8 emb_dim).
_GPT_SIZES = {
  "gpt_like": {
    "97m": (768, 12, 64, 12, 3072),
    "6m": (256, 4, 64, 2, 1024),
  },
  "gpt2": {
    "distil": (768, 12, 64, 6, 3072),
    "small": (768, 12, 64, 12, 3072),
    "medium": (1024, 16, 64, 24, 4096),
    "large": (1280, 20, 64, 36, 5120),
    "xl": (1600, 25, 64, 48, 6400),
  },
  "lamda": {
    "100m": (640, 10, 128, 8, 5120),
    "2b": (2560, 40, 128, 10, 20480),
    "8b": (4096, 64, 128, 16, 32768),
    "137b": (8192, 128, 128, 64, 65536),
  },
}
_GPT_FAMILIES: dict[str, dict[str, Any]] = {
  "gpt_like": dict(vocab_size=8000, num_positions=128, biases=True, gated=False),
  "gpt2": dict(
    vocab_size=50257,
    num_positions=1024,
    biases=True,
    gated=False,
    tied_logits=True,
    eos_id=50256,
    start_id=None,
  ),
  "lamda": dict(vocab_size=32000),  # gated GELU and relative positions, as in T5 1.1
}


def gpt_config(size: str, family: str = "gpt_like", **overrides) -> GPTConfig:
  """Return the published configuration of a decoder-only model.

  Args:
    size: '97m' or '6m' for the family 'gpt_like' of the paper; 'distil', 'small', 'medium', 'large'
      or 'xl' for 'gpt2'; '100m', '2b', '8b' or '137b' for 'lamda'. The dimensions of '100m' are not
      published; they follow the proportions of the other sizes.
    family: 'gpt_like', 'gpt2' or 'lamda'.
    **overrides: fields of `GPTConfig` that differ from the published ones.
  """
  if family not in _GPT_SIZES:
    raise InputError(f"Family {family!r} is not known; use one of {', '.join(_GPT_SIZES)}.")
  sizes = _GPT_SIZES[family]
  if size not in sizes:
    raise InputError(f"{family} of size {size!r} is not known; use one of {', '.join(sizes)}.")
  emb_dim, num_heads, head_dim, num_layers, mlp_dim = sizes[size]
  published = GPTConfig(
    emb_dim=emb_dim,
    num_heads=num_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    num_decoder_layers=num_layers,
    **_GPT_FAMILIES[family],
  )
  return dataclasses.replace(published, **overrides)


# Encoder-decoders of other families. A row has (emb_dim, num_heads, head_dim, mlp_dim, encoder
# layers, decoder layers), from config.json on the Hugging Face Hub: google/mt5-*, google/byt5-*,
# google/umt5-*, google/flan-ul2, google/madlad400-*-mt, facebook/bart-*,
# sshleifer/distilbart-cnn-*, facebook/mbart-large-50-many-to-many-mmt, google/pegasus-*,
# Helsinki-NLP/opus-mt-en-de, facebook/m2m100_*, facebook/nllb-200-* and Salesforce/codet5*. CodeT5+
# 220M and 770M have the sizes of codet5 base and large. nllb 600m is distilled, and the distilled
# 1.3B has the size of 1.3b.
_T5_1_1 = {
  size: (emb_dim, num_heads, head_dim, mlp_dim, num_layers, num_layers)
  for size, (emb_dim, num_heads, head_dim, num_layers, mlp_dim) in _SIZES["1.1"].items()
  if size != "tiny"
}
_FAMILY_SIZES: dict[str, dict[str, tuple[int, int, int, int, int, int]]] = {
  "mt5": _T5_1_1,
  "byt5": {
    "small": (1472, 6, 64, 3584, 12, 4),
    "base": (1536, 12, 64, 3968, 18, 6),
    "large": (1536, 16, 64, 3840, 36, 12),
    "xl": (2560, 32, 64, 6720, 36, 12),
    "xxl": (4672, 64, 64, 12352, 36, 12),
  },
  "umt5": {size: row for size, row in _T5_1_1.items() if size != "large"},
  "ul2": {"20b": (4096, 16, 256, 16384, 32, 32)},
  "madlad": {
    "3b": (1024, 16, 128, 8192, 32, 32),
    "7b": (2048, 16, 128, 8192, 48, 48),
    "10b": (2048, 32, 128, 16384, 32, 32),
  },
  "codet5": {
    "small": (512, 8, 64, 2048, 6, 6),
    "base": (768, 12, 64, 3072, 12, 12),
    "large": (1024, 16, 64, 4096, 24, 24),
  },
  "bart": {
    "base": (768, 12, 64, 3072, 6, 6),
    "large": (1024, 16, 64, 4096, 12, 12),
    "cnn_large": (1024, 16, 64, 4096, 12, 12),
    "distil_cnn_12_6": (1024, 16, 64, 4096, 12, 6),
    "distil_cnn_6_6": (1024, 16, 64, 4096, 6, 6),
  },
  "mbart": {"large_50": (1024, 16, 64, 4096, 12, 12)},
  "pegasus": {"large": (1024, 16, 64, 4096, 16, 16)},
  "marian": {"base": (512, 8, 64, 2048, 6, 6)},
  "m2m100": {
    "418m": (1024, 16, 64, 4096, 12, 12),
    "1.2b": (1024, 16, 64, 8192, 24, 24),
  },
  "nllb": {
    "600m": (1024, 16, 64, 4096, 12, 12),
    "1.3b": (1024, 16, 64, 8192, 24, 24),
    "3.3b": (2048, 16, 128, 8192, 24, 24),
  },
}
_BART: dict[str, Any] = dict(
  vocab_size=50265,
  gated=False,
  activation="gelu_exact",
  norm_position="after",
  has_final_norm=False,
  embedding_norm=True,
  biases=True,
  num_positions=1024,
  pad_id=1,
  eos_id=2,
  start_id=2,
)
_M2M100 = _BART | dict(
  vocab_size=128112,
  activation="relu",
  norm_position="before",
  has_final_norm=True,
  embedding_norm=False,
)
_FAMILY_FIELDS: dict[str, dict[str, Any]] = {
  "mt5": dict(vocab_size=250100, padded_vocab_size=250112),
  "byt5": dict(vocab_size=384),
  "umt5": dict(vocab_size=256384, bias_per_layer=True),
  "ul2": dict(vocab_size=32100, padded_vocab_size=32128, activation="silu", tied_logits=True),
  "madlad": dict(vocab_size=256000, pad_id=1, eos_id=2),
  "codet5": dict(vocab_size=32100, gated=False, activation="relu", tied_logits=True, eos_id=2),
  "bart": _BART,
  "mbart": _M2M100 | dict(vocab_size=250054, embedding_norm=True),
  "pegasus": _M2M100 | dict(vocab_size=96103, pad_id=0, eos_id=1, start_id=0),
  "marian": _BART
  | dict(
    vocab_size=58101,
    activation="silu",
    embedding_norm=False,
    logits_bias=True,
    num_positions=512,
    pad_id=58100,
    eos_id=0,
    start_id=58100,
  ),
  "m2m100": _M2M100,
  "nllb": _M2M100 | dict(vocab_size=256206),
}
_SUMMARIZERS = "cnn_large", "distil_cnn_12_6", "distil_cnn_6_6"  # without the mask token

# (emb_dim, num_heads, num_kv_heads, head_dim, mlp_dim, layers) of a stack of T5Gemma, whose sizes
# name the encoder and the decoder. From google-deepmind/gemma, gemma/research/t5gemma/config.py.
_GEMMA_STACKS = {
  "s": (512, 8, 8, 64, 1024, 8),
  "b": (768, 12, 12, 64, 2048, 12),
  "l": (1024, 16, 16, 64, 2816, 24),
  "ml": (1152, 4, 4, 256, 6912, 26),
  "xl": (2048, 32, 32, 64, 5120, 24),
  "2b": (2304, 8, 4, 256, 9216, 26),
  "9b": (3584, 16, 8, 256, 14336, 42),
}
_T5GEMMA_SIZES = "s-s", "b-b", "l-l", "ml-ml", "xl-xl", "2b-2b", "9b-2b", "9b-9b"


def _t5gemma_config(size: str) -> T5Config:
  """Return the published configuration of a T5Gemma (Zhang et al., 2025)."""
  encoder, decoder = (_GEMMA_STACKS[stack] for stack in size.split("-"))
  emb_dim, num_heads, num_kv_heads, head_dim, mlp_dim, num_layers = decoder
  return T5Config(
    vocab_size=256000,
    emb_dim=emb_dim,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    num_encoder_layers=encoder[-1],
    num_decoder_layers=num_layers,
    encoder_sizes=None if encoder == decoder else encoder[:-1],
    encoder_embeddings=True,
    norm_position="both",
    logits_cap=30.0,
    attention_cap=50.0,
    rope_theta=10000.0,
    window=4096,
    start_id=2,
  )


def encoder_decoder_config(size: str, family: str, **overrides) -> T5Config:
  """Return the published configuration of an encoder-decoder of a family other than T5.

  Args:
    family: 'mt5', 'byt5', 'umt5', 'ul2', 'madlad', 'codet5', 't5gemma', 'bart', 'mbart', 'pegasus',
      'marian', 'm2m100' or 'nllb'.
    **overrides: fields of `T5Config` that differ from the published ones.
  """
  sizes = sizes_of(family)
  if size not in sizes:
    raise InputError(f"{family} of size {size!r} is not known; use one of {', '.join(sizes)}.")
  if family == "t5gemma":
    return dataclasses.replace(_t5gemma_config(size), **overrides)
  emb_dim, num_heads, head_dim, mlp_dim, encoder_layers, decoder_layers = _FAMILY_SIZES[family][
    size
  ]
  published = T5Config(
    emb_dim=emb_dim,
    num_heads=num_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    num_encoder_layers=encoder_layers,
    num_decoder_layers=decoder_layers,
    **_FAMILY_FIELDS[family] | (dict(vocab_size=50264) if size in _SUMMARIZERS else {}),
  )
  return dataclasses.replace(published, **overrides)


def sizes_of(family: str) -> tuple[str, ...]:
  """Return the names of the sizes of a family."""
  tables: dict[str, Iterable[str]] = {
    **_SIZES,
    **_FAMILY_SIZES,
    "t5gemma": _T5GEMMA_SIZES,
    **_GPT_SIZES,
  }
  if family not in tables:
    raise InputError(f"Family {family!r} is not known; use one of {', '.join(tables)}.")
  return tuple(tables[family])


def named_config(version: str | float, size: str, **overrides) -> T5Config | GPTConfig:
  """Return the published configuration of one size of a T5 version or of another family."""
  version = version_name(version)
  if version in _SIZES:
    return t5_config(size, version, **overrides)
  if version in _GPT_SIZES:
    return gpt_config(size, version, **overrides)
  return encoder_decoder_config(size, version, **overrides)
