"""Configurations of published models, by family and size."""

from typing import Any

from specdec_jax.errors import InputError
from specdec_jax.models.config import GPTConfig, T5Config

# Sizes of a family: (emb_dim, num_heads, head_dim, mlp_dim, layers), with the layers of the encoder
# and of the decoder if they differ.
_Sizes = dict[str, tuple[int, ...]]

# Sources of sizes. 1.0, 1.1: as published for T5 1.0 (Raffel et al., 2020) and T5 1.1; xl has 3B
# and xxl 11B parameters, and tiny is the test model of t5x. Other encoder-decoders: config.json on
# the Hugging Face Hub: google/mt5-*, google/byt5-*, google/umt5-*, google/flan-ul2,
# google/madlad400-*-mt, Salesforce/codet5*, facebook/bart-*, sshleifer/distilbart-cnn-*,
# facebook/mbart-large-50-many-to-many-mmt, google/pegasus-*, Helsinki-NLP/opus-mt-en-de,
# facebook/m2m100_*, facebook/nllb-200-*, openai/whisper-* and distil-whisper/distil-large-v3.
# CodeT5+ 220M and 770M have the sizes of codet5 base and large. nllb 600m is distilled, and the
# distilled 1.3B has the size of 1.3b.
# gpt_like: Section 4.2 of the paper; with separate matrices for embeddings and logits, the two
# sizes have the paper's 97M and 6M parameters. gpt2: Radford et al., 2019, and DistilGPT2. lamda:
# Thoppilan et al., 2022, Table 27, which counts parameters without embeddings. The table does not
# describe the model of 100M parameters; the size here follows the table's rules (head_dim 128,
# num_heads = emb_dim / 64, mlp_dim = 8 emb_dim).
_T5_1_1: _Sizes = {
  "tiny": (8, 4, 3, 16, 2),
  "small": (512, 6, 64, 1024, 8),
  "base": (768, 12, 64, 2048, 12),
  "large": (1024, 16, 64, 2816, 24),
  "xl": (2048, 32, 64, 5120, 24),
  "xxl": (4096, 64, 64, 10240, 24),
}
_T5_FAMILIES: dict[str, _Sizes] = {
  "1.0": {
    "tiny": (8, 4, 3, 16, 2),
    "small": (512, 8, 64, 2048, 6),
    "base": (768, 12, 64, 3072, 12),
    "large": (1024, 16, 64, 4096, 24),
    "xl": (1024, 32, 128, 16384, 24),
    "xxl": (1024, 128, 128, 65536, 24),
  },
  "1.1": _T5_1_1,
  "mt5": {size: row for size, row in _T5_1_1.items() if size != "tiny"},
  "byt5": {
    "small": (1472, 6, 64, 3584, 12, 4),
    "base": (1536, 12, 64, 3968, 18, 6),
    "large": (1536, 16, 64, 3840, 36, 12),
    "xl": (2560, 32, 64, 6720, 36, 12),
    "xxl": (4672, 64, 64, 12352, 36, 12),
  },
  "umt5": {size: row for size, row in _T5_1_1.items() if size not in ("tiny", "large")},
  "ul2": {"20b": (4096, 16, 256, 16384, 32)},
  "madlad": {
    "3b": (1024, 16, 128, 8192, 32),
    "7b": (2048, 16, 128, 8192, 48),
    "10b": (2048, 32, 128, 16384, 32),
  },
  "codet5": {
    "small": (512, 8, 64, 2048, 6),
    "base": (768, 12, 64, 3072, 12),
    "large": (1024, 16, 64, 4096, 24),
  },
  "bart": {
    "base": (768, 12, 64, 3072, 6),
    "large": (1024, 16, 64, 4096, 12),
    "cnn_large": (1024, 16, 64, 4096, 12),
    "distil_cnn_12_6": (1024, 16, 64, 4096, 12, 6),
    "distil_cnn_6_6": (1024, 16, 64, 4096, 6),
  },
  "mbart": {"large_50": (1024, 16, 64, 4096, 12)},
  "pegasus": {"large": (1024, 16, 64, 4096, 16)},
  "marian": {"base": (512, 8, 64, 2048, 6)},
  "m2m100": {"418m": (1024, 16, 64, 4096, 12), "1.2b": (1024, 16, 64, 8192, 24)},
  "nllb": {
    "600m": (1024, 16, 64, 4096, 12),
    "1.3b": (1024, 16, 64, 8192, 24),
    "3.3b": (2048, 16, 128, 8192, 24),
  },
  "whisper": {
    "tiny": (384, 6, 64, 1536, 4),
    "base": (512, 8, 64, 2048, 6),
    "small": (768, 12, 64, 3072, 12),
    "medium": (1024, 16, 64, 4096, 24),
    "large": (1280, 20, 64, 5120, 32),
  },
  "whisper_v3": {
    "large": (1280, 20, 64, 5120, 32),
    "turbo": (1280, 20, 64, 5120, 32, 4),
    "distil": (1280, 20, 64, 5120, 32, 2),
  },
  "t5gemma": dict.fromkeys(("s-s", "b-b", "l-l", "ml-ml", "xl-xl", "2b-2b", "9b-2b", "9b-9b"), ()),
}
_GPT_FAMILIES: dict[str, _Sizes] = {
  "gpt_like": {"97m": (768, 12, 64, 3072, 12), "6m": (256, 4, 64, 1024, 2)},
  "gpt2": {
    "distil": (768, 12, 64, 3072, 6),
    "small": (768, 12, 64, 3072, 12),
    "medium": (1024, 16, 64, 4096, 24),
    "large": (1280, 20, 64, 5120, 36),
    "xl": (1600, 25, 64, 6400, 48),
  },
  "lamda": {
    "100m": (640, 10, 128, 5120, 8),
    "2b": (2560, 40, 128, 20480, 10),
    "8b": (4096, 64, 128, 32768, 16),
    "137b": (8192, 128, 128, 65536, 64),
  },
}
_FAMILIES = _T5_FAMILIES | _GPT_FAMILIES

# (emb_dim, num_heads, num_kv_heads, head_dim, mlp_dim, layers) of a stack of T5Gemma (Zhang et al.,
# 2025), whose sizes name the encoder and the decoder. From google-deepmind/gemma,
# gemma/research/t5gemma/config.py.
_GEMMA_STACKS = {
  "s": (512, 8, 8, 64, 1024, 8),
  "b": (768, 12, 12, 64, 2048, 12),
  "l": (1024, 16, 16, 64, 2816, 24),
  "ml": (1152, 4, 4, 256, 6912, 26),
  "xl": (2048, 32, 32, 64, 5120, 24),
  "2b": (2304, 8, 4, 256, 9216, 26),
  "9b": (3584, 16, 8, 256, 14336, 42),
}

# Fields that all sizes of a family share.
_T5: dict[str, Any] = dict(vocab_size=32100, padded_vocab_size=32128)
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
_WHISPER: dict[str, Any] = dict(
  vocab_size=51865,
  gated=False,
  activation="gelu_exact",
  biases=True,
  num_positions=448,
  num_mels=80,
  source_positions=1500,
  pad_id=50257,
  eos_id=50257,
  start_id=50258,
)
_FIELDS: dict[str, dict[str, Any]] = {
  "1.0": _T5 | dict(gated=False, activation="relu", tied_logits=True),
  "1.1": _T5,
  "mt5": dict(vocab_size=250100, padded_vocab_size=250112),
  "byt5": dict(vocab_size=384),
  "umt5": dict(vocab_size=256384, bias_per_layer=True),
  "ul2": _T5 | dict(activation="silu", tied_logits=True),
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
  "whisper": _WHISPER,
  "whisper_v3": _WHISPER | dict(vocab_size=51866, num_mels=128),
  "t5gemma": dict(
    vocab_size=256000,
    encoder_embeddings=True,
    norm_position="both",
    logits_cap=30.0,
    attention_cap=50.0,
    rope_theta=10000.0,
    window=4096,
    start_id=2,
  ),
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
# Names on the Hugging Face Hub: a pattern, its family, and suffixes, each with its size if that is
# another word.
_HUB = (
  ("google/flan-t5-{}", "1.1", "small base large xl xxl"),
  ("google/t5-v1_1-{}", "1.1", "small base large xl xxl"),
  ("google-t5/t5-{}", "1.0", "small base large 3b=xl 11b=xxl"),
  ("google/mt5-{}", "mt5", "small base large xl xxl"),
  ("google/umt5-{}", "umt5", "small base xl xxl"),
  ("google/byt5-{}", "byt5", "small base large xl xxl"),
  ("google/flan-ul2{}", "ul2", "=20b"),
  ("google/madlad400-{}-mt", "madlad", "3b 7b 10b"),
  ("Salesforce/codet5-{}", "codet5", "small base large"),
  ("facebook/bart-{}", "bart", "base large large-cnn=cnn_large"),
  ("sshleifer/distilbart-cnn-{}", "bart", "12-6=distil_cnn_12_6 6-6=distil_cnn_6_6"),
  ("facebook/mbart-large-50-{}", "mbart", "many-to-many-mmt=large_50"),
  ("google/pegasus-{}", "pegasus", "large"),
  ("Helsinki-NLP/opus-mt-{}", "marian", "en-de=base"),
  ("facebook/m2m100_{}", "m2m100", "418M=418m 1.2B=1.2b"),
  ("facebook/nllb-200-{}", "nllb", "distilled-600M=600m 1.3B=1.3b 3.3B=3.3b"),
  ("openai/whisper-{}", "whisper", "tiny base small medium large large-v2=large"),
  ("openai/whisper-large-v3{}", "whisper_v3", "=large -turbo=turbo"),
  ("distil-whisper/distil-large-v3{}", "whisper_v3", "=distil"),
)
# Family and size of each name.
PUBLISHED = {
  pattern.format(suffix): (family, size or suffix)
  for pattern, family, words in _HUB
  for suffix, _, size in (word.partition("=") for word in words.split())
}

_SUMMARIZERS = "cnn_large", "distil_cnn_12_6", "distil_cnn_6_6"  # without the mask token


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
  if (version := version_name(version)) not in ("1.0", "1.1"):
    raise InputError(f"T5 version {version!r} is not known; use '1.0' or '1.1'.")
  return named_config(version, size, **overrides)


def gpt_config(size: str, family: str = "gpt_like", **overrides) -> GPTConfig:
  """Return the published configuration of a decoder-only model.

  Args:
    size: '97m' or '6m' for the family 'gpt_like' of the paper; 'distil', 'small', 'medium', 'large'
      or 'xl' for 'gpt2'; '100m', '2b', '8b' or '137b' for 'lamda'. The dimensions of '100m' are not
      published; they follow the proportions of the other sizes.
    family: 'gpt_like', 'gpt2' or 'lamda'.
    **overrides: fields of `GPTConfig` that differ from the published ones.
  """
  if family not in _GPT_FAMILIES:
    raise InputError(f"Family {family!r} is not known; use one of {', '.join(_GPT_FAMILIES)}.")
  return named_config(family, size, **overrides)


def sizes_of(family: str) -> tuple[str, ...]:
  """Return the names of the sizes of a family."""
  if family not in _FAMILIES:
    raise InputError(f"Family {family!r} is not known; use one of {', '.join(_FAMILIES)}.")
  return tuple(_FAMILIES[family])


def named_config(version: str | float, size: str, **overrides) -> Any:
  """Return the published configuration of one size of a T5 version or of another family.

  It is a `GPTConfig` for the families of `gpt_config`, and a `T5Config` for '1.0', '1.1', 'mt5',
  'byt5', 'umt5', 'ul2', 'madlad', 'codet5', 'bart', 'mbart', 'pegasus', 'marian', 'm2m100', 'nllb',
  'whisper' (multilingual), 'whisper_v3' and 't5gemma'. `overrides` are fields that differ from the
  published ones.
  """
  family = version_name(version)
  if size not in sizes_of(family):
    known = ", ".join(sizes_of(family))
    raise InputError(f"{family} of size {size!r} is not known; use one of {known}.")
  fields = dict(_FIELDS[family])
  if family == "t5gemma":
    encoder, stack = (_GEMMA_STACKS[stack] for stack in size.split("-"))
    emb_dim, num_heads, fields["num_kv_heads"], head_dim, mlp_dim, num_layers = stack
    layers = encoder[-1], num_layers
    fields["encoder_sizes"] = None if encoder == stack else encoder[:-1]
  else:
    emb_dim, num_heads, head_dim, mlp_dim, *layers = _FAMILIES[family][size]
  fields |= dict(emb_dim=emb_dim, num_heads=num_heads, head_dim=head_dim, mlp_dim=mlp_dim)
  fields["num_decoder_layers"] = layers[-1]
  if size in _SUMMARIZERS:
    fields["vocab_size"] = 50264
  if family in _GPT_FAMILIES:
    return GPTConfig(**fields | overrides)
  return T5Config(**dict(num_encoder_layers=layers[0]) | fields | overrides)
